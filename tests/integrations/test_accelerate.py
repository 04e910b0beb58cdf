"""accelerate's loop with a model compiled in place, beside the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from harness import differences, limited, weights
from loops import assert_close, assert_moved, batches, gpt, tokens

import chunkc

BUDGET = 1_300_000
OPTIONS: dict[str, Any] = {"codegen": "eager", "whole_graph": "never"}


def accelerated(
    *, ours: bool = True, folder: Path | None = None, steps: range = range(6), budget: int = BUDGET, **settings: Any
) -> tuple[torch.nn.Module, list[float]]:
    """A loop with `accumulate` and clipping; where there is a folder, it begins there, and saves there at the end."""
    torch._dynamo.reset()
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    model = gpt(num_layers=1)
    if ours:
        chunkc.place(model)
        model.compile(backend="chunkc", options={"memory_budget": budget} | OPTIONS)
    optimizer = (chunkc.optim.AdamW if ours else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trained, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data, losses = list(batches(tokens(12), 2)), []
    with limited(budget if ours else 1 << 30):
        if folder is not None and folder.exists():
            accelerator.load_state(str(folder))
        for step in steps:
            with accelerator.accumulate(trained):
                loss = trained(**data[step]).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        if folder is not None:
            accelerator.save_state(str(folder))
    assert accelerator.unwrap_model(trained) is model
    return model, losses


@pytest.mark.second_tier
def test_trains_saves_and_resumes_exactly(tmp_path: Path) -> None:
    _, plain = accelerated(ours=False)
    whole, losses = accelerated()
    assert_close(losses, plain)
    assert_moved(whole, BUDGET)
    _, first = accelerated(folder=tmp_path / "state", steps=range(4))
    parts, second = accelerated(folder=tmp_path / "state", steps=range(4, 6))
    assert first + second == losses
    assert not differences(weights(parts), weights(whole))
    assert not any(b"_orig_mod" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_mixed_precision() -> None:
    _, plain = accelerated(ours=False, mixed_precision="bf16")
    model, losses = accelerated(mixed_precision="bf16", budget=1_700_000)
    assert losses == pytest.approx(plain, rel=2e-2)  # bf16 has 8 bits, and other orders of operations round otherwise
    assert_moved(model, 1_700_000)
