"""What users of offloading systems complain about, each a test by name, through an engine.

`tests/test_complaints.py` has the whole list; here is what belongs to loops and configurations.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from engine_cases import EPS, LR, assert_close, assert_same, config, engine, small_model, weights
from harness import TRACING_NBYTES
from optim_models import BUDGET_NBYTES, WIDTH, batch
from torch import Tensor, nn

import chunkc
from chunkc.runtime.device import cpu_allocator

pytestmark = [pytest.mark.second_tier, pytest.mark.usefixtures("fresh_dynamo")]

HUGE = {"memory_budget": 64 << 20, "codegen": "eager", "whole_graph": "never"}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_out_of_memory_in_a_warm_up_though_training_would_fit(precision: str) -> None:
    """There is no warm-up: the first step is inside the budget, with the norm that a loss scale and clipping need."""
    cpu_allocator.install()
    gc.collect()
    foreign = cpu_allocator.current_nbytes()
    changes: dict[str, Any] = {"gradient_clipping": 0.5}
    if precision != "fp32":
        changes[precision] = {"enabled": True}
    model, _ = engine(**changes)
    dtype = model.config.dtype or torch.float32
    for step in range(3):
        limit = foreign + BUDGET_NBYTES + (TRACING_NBYTES if step == 0 else 0)
        with cpu_allocator.hard_limit(None if step == 0 else limit):
            model.backward(model(batch(step, dtype)))
            model.step()
        report = chunkc.report(model.module)
        assert report.measured_peak_nbytes is not None
        assert report.measured_peak_nbytes - foreign <= report.predicted_peak_nbytes <= BUDGET_NBYTES


def test_schedulers_clipping_accumulation_and_groups_do_not_work_with_the_optimizer() -> None:
    """They do, all at once: the same bits under two budgets, and what plain PyTorch gives."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]

    found: list[list[Tensor]] = []
    for options in (config()["chunkc"], HUGE):
        torch._dynamo.reset()
        net = small_model()
        changes = config(
            gradient_accumulation_steps=2,
            gradient_clipping=0.03,
            scheduler={
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": LR, "warmup_type": "linear"},
            },
        )
        model, _ = chunkc.initialize_engine(net, config=changes | {"chunkc": options}, model_parameters=groups(net))
        for step in range(8):
            model.backward(model(batch(step)))
            model.step()
        found.append(weights(model))
    assert_same(*found)

    plain = small_model()
    optimizer = torch.optim.AdamW(groups(plain), lr=LR, eps=EPS)
    for update, rate in enumerate((0.0, 0.0, LR / 2, LR)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for part in range(2):
            (plain(batch(2 * update + part)) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.03)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(found[0], weights(plain))


class Adapted(nn.Module):
    """A frozen model with low-rank adapters, one of which is never used, and a parameter that half the steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.base = small_model().requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in self.base.layers)
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in self.base.layers)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        for layer, down, up in zip(self.base.layers, self.down, self.up):
            x = torch.tanh(layer(x) + up(down(x)))
        if more:
            x = x + self.sometimes(x)
        return (x.float() - 1).square().mean()


def adapted() -> Adapted:
    torch.manual_seed(1)
    return Adapted()


def test_frozen_parameters_lora_and_parameters_unused_in_some_iterations() -> None:
    model, optimizer = chunkc.initialize_engine(adapted, config=config())
    plain = adapted()
    reference = torch.optim.AdamW(plain.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    for step in range(4):
        model.backward(model(batch(step), step % 2 == 1))
        model.step()
        plain(batch(step), step % 2 == 1).backward()
        reference.step()
        reference.zero_grad()
    assert_close(weights(model), weights(plain))
    untouched = [*model.module.base.parameters(), *model.module.idle.parameters()]
    assert all(p.grad is None and not optimizer.state.get(p) for p in untouched)


def test_wrong_gradients_are_found_only_as_nan() -> None:
    """Nothing is updated with gradients that are not finite, and at the smallest loss scale that is an error."""
    model, _ = engine(fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1})
    before = weights(model)
    for _ in range(2):
        model.backward(model(batch(0, torch.float16)) * float("nan"))
        if model.loss_scale > 1:
            model.step()
            assert not model.was_step_applied()
    with pytest.raises(chunkc.ChunkcError, match="gradients overflow"):
        model.step()
    assert_same(weights(model), before)
