"""LoRA over a frozen base, which never goes home and has room for neither gradients nor states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differences, limited, session_of, weights
from loops import assert_close, batches, gpt, losses_of, tokens
from torch import nn

import chunkc

OPTIONS: dict[str, Any] = {"codegen": "eager", "whole_graph": "never", "activations": "keep"}
BUDGET = 1_200_000
"""Bytes: the base has 0.8 MB, activations take 0.4 MB."""


def with_adapters(base: nn.Module, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # takes seconds: not in every collection

    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, **settings)
    return get_peft_model(base, config)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return losses_of(model, optimizer, batches(tokens(4), 1), max_norm=0.5)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def compiled(model: nn.Module, budget: int = BUDGET) -> nn.Module:
    torch._dynamo.reset()
    chunkc.place(model)
    model.compile(backend="chunkc", options={"memory_budget": budget} | OPTIONS)
    return model


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("dtype", "budget"),
    [(torch.float32, BUDGET), pytest.param(torch.bfloat16, 850_000, marks=pytest.mark.slow)],
    ids=str,
)
def test_lora_trains_as_without_chunkc_and_the_frozen_base_only_comes(
    tmp_path: Path, dtype: torch.dtype, budget: int
) -> None:
    """With a base in bf16 and adapters in fp32, as QLoRA has them, beside the other."""
    from peft import PeftModel

    plain = with_adapters(gpt(num_layers=4).to(dtype))
    expected = train(plain, torch.optim.AdamW(trainable(plain), lr=1e-2))

    model = compiled(with_adapters(gpt(num_layers=4).to(dtype)), budget)
    base = {name: value for name, value in weights(model).items() if "lora_" not in name}
    with limited(budget):
        losses = train(model, chunkc.optim.AdamW(trainable(model), lr=1e-2))
    if dtype is torch.float32:
        assert_close(losses, expected)
    else:
        assert losses == pytest.approx(
            expected, rel=2e-2
        )  # bf16 has 8 bits, and other orders of operations round otherwise
    assert not differences({name: weights(model)[name] for name in base}, base)

    report = chunkc.report(model)
    assert report.predicted_peak_nbytes <= budget
    groups = session_of(model).store.layout.groups
    frozen = [group for group in groups if not group.trainable]
    assert 0 < len(frozen) < report.num_chunks
    assert report.num_resident_chunks < report.num_chunks
    assert all(("lora_" in piece.spec.name) == group.trainable for group in groups for piece in group.slices)
    assert f"prefetch(param:{frozen[-1].index}," in report.plan_text
    for group in frozen:
        for event in ("write_back(param:", "(grad:", "(exp_avg:", "(exp_avg_sq:"):
            assert f"{event}{group.index}," not in report.plan_text, event
    trained = [group for group in groups if group.trainable]
    room = {group.index: sum(map(group.nbytes, group.update_kinds)) for group in trained}
    room |= {group.index: group.nbytes("param") for group in frozen}
    assert report.home_nbytes <= sum(room.values()) + 16 * 4096, "pages for gradients or states of the base"
    assert report.traffic_nbytes["to_home"] <= 5 * sum(room[group.index] for group in trained), "the base went home"
    assert report.traffic_nbytes["to_device"] > 0

    model.save_pretrained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if b"_orig_mod" in path.read_bytes()]
    loaded = PeftModel.from_pretrained(gpt(num_layers=4).to(dtype), tmp_path)
    batch = next(batches(tokens(2, seed=9), 2))
    with torch.no_grad():
        before = loaded.eval()(**batch).logits
        torch.testing.assert_close(
            model.eval()(**batch).logits, before, rtol=1e-3, atol=1e-2 if dtype is torch.bfloat16 else 1e-5
        )
        merged = model.merge_and_unload()
        atol = 0.1 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(merged(**batch).logits, before, rtol=1e-2, atol=atol)


@pytest.mark.slow
def test_modules_to_save_and_adapters_switched_off() -> None:
    """Part of the base is trained whole, beside adapters; without them the base answers."""
    plain = with_adapters(gpt(num_layers=4), modules_to_save=["lm_head"])
    expected = train(plain, torch.optim.AdamW(trainable(plain), lr=1e-2))
    model = compiled(with_adapters(gpt(num_layers=4), modules_to_save=["lm_head"]))
    with limited(BUDGET):
        assert_close(train(model, chunkc.optim.AdamW(trainable(model), lr=1e-2)), expected)
    batch = next(batches(tokens(2, seed=9), 2))
    with model.disable_adapter(), plain.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-3, atol=1e-5)
