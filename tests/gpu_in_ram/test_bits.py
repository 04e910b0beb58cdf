"""Losses and weights on late streams, with arithmetic: the same bits under every budget, whatever goes on in a step.

Every home and place of updates is in `test_ladder_bits`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cuda_in_ram
import pytest
import torch
from device_gpt import SMALL, Trained, smallest_budget, train
from torch import Tensor, nn

import chunkc

pytestmark = pytest.mark.arithmetic

HUGE = 1 << 34


@cache
def smallest(dtype: torch.dtype) -> int:
    """The smallest budget of the small shape."""
    return smallest_budget(SMALL, dtype)


def different(found: Trained, expected: Trained) -> list[str]:
    return [
        f"{what} {i}"
        for what in ("losses", "weights")
        for i, pair in enumerate(zip(getattr(found, what), getattr(expected, what), strict=True))
        if not torch.equal(*pair)
    ]


@pytest.mark.parametrize("activations", ["offload", "rerun"])
def test_saved_values_that_are_absent_change_no_bit(activations: str) -> None:
    expected = train(SMALL, torch.bfloat16, HUGE)
    budget_nbytes = smallest_budget(SMALL, torch.bfloat16, activations=activations)
    assert budget_nbytes < smallest(torch.bfloat16)
    for seed in (1, 2):
        with cuda_in_ram.choose(late=seed):
            waits = cuda_in_ram.num_waits()
            found = train(SMALL, torch.bfloat16, budget_nbytes, activations=activations)
            assert cuda_in_ram.num_waits() > waits
        assert not different(found, expected)
        assert found.report.measured_peak_nbytes <= budget_nbytes


def test_nor_does_the_budget_with_losses_in_tiles() -> None:
    """Beside the whole loss, tiles round differently: each budget has the same ones."""
    expected = train(SMALL, torch.bfloat16, HUGE, loss_tile_rows=16)
    budget_nbytes = smallest_budget(SMALL, torch.bfloat16, loss_tile_rows=16)
    with cuda_in_ram.choose(late=1):
        found = train(SMALL, torch.bfloat16, budget_nbytes, loss_tile_rows=16)
    assert not different(found, expected)
    assert found.report.measured_peak_nbytes <= budget_nbytes
    whole = train(SMALL, torch.bfloat16, HUGE)
    torch.testing.assert_close(torch.stack(found.losses), torch.stack(whole.losses), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("home", "update_on"), [("cpu", "device"), ("cpu", "cpu"), ("disk", "device")])
def test_nor_does_it_under_autocast(dtype: torch.dtype, home: str, update_on: str, tmp_path: Path) -> None:
    """Casts come from the host's cores, from a disk, and on the device from what stays there."""
    how: dict[str, Any] = {"autocast": dtype, "update_on": update_on}
    expected = train(SMALL, torch.float32, HUGE, **how)
    how["home"] = home if home == "cpu" else f"disk:{tmp_path}"
    budget_nbytes = smallest_budget(SMALL, torch.float32, **how)
    roomy_nbytes = (budget_nbytes + expected.report.predicted_peak_nbytes) // 2
    for seed, nbytes in enumerate((budget_nbytes, roomy_nbytes), 1):
        with cuda_in_ram.choose(late=seed):
            found = train(SMALL, torch.float32, nbytes, **how)
        assert not different(found, expected)
        assert found.report.measured_peak_nbytes <= nbytes
        assert "param_" in found.report.plan_text
    assert 0 < found.report.num_resident_chunks < found.report.num_chunks


class Quantized(nn.Module):
    """A frozen weight in int8 with a scale per row, and an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-127, 128, (width, width), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(width, 1) / 1000, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, width) / 10), nn.Parameter(torch.zeros(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ (self.codes * self.scale).t() + (x @ self.down.t()) @ self.up.t())


def test_nor_does_it_with_integers_in_chunks() -> None:
    def trained(budget_nbytes: int) -> tuple[list[Tensor], chunkc.Report]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = chunkc.place(nn.Sequential(*(Quantized(128) for _ in range(6))), device="cuda")
        options = {"memory_budget": budget_nbytes, "codegen": "eager", "whole_graph": "never"}
        compiled = torch.compile(model, backend="chunkc", options=options)
        optimizer = chunkc.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(3):
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step)).to("cuda")
            loss = compiled(x).square().mean()
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        chunkc.synchronize(model)
        return [p.detach().cpu().clone() for p in model.parameters()], chunkc.report(model)

    expected, _ = trained(HUGE)
    with pytest.raises(chunkc.BudgetError) as refused:
        trained(4096)
    budget_nbytes = refused.value.minimum_nbytes
    with cuda_in_ram.choose(late=1):
        found, report = trained(budget_nbytes)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert any(not torch.equal(p, torch.zeros_like(p)) for p in found if p.shape == (128, 4))
    assert report.measured_peak_nbytes <= budget_nbytes
    assert report.num_resident_chunks < report.num_chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_nor_does_a_backward_that_updates_what_stays(dtype: torch.dtype) -> None:
    """From a budget in which some chunks stay to one in which all do, without their gradients."""
    expected = train(SMALL, dtype, HUGE)
    for spare_nbytes in range(1_400_000, 6_000_000, 200_000):
        budget_nbytes = smallest(dtype) + spare_nbytes
        with cuda_in_ram.choose(late=spare_nbytes):
            found = train(SMALL, dtype, budget_nbytes, update_on="device", overlap="backward")
        assert not different(found, expected)
        assert found.report.measured_peak_nbytes <= budget_nbytes
        if found.report.num_resident_chunks == found.report.num_chunks:
            break
    updates = [name for name, _, _ in found.report.moments if name.startswith("update.")]
    assert len(updates) == found.report.num_chunks


UNDOABLE: dict[str, Any] = {"overlap": "backward", "undoable": True, "clip_in_step": True}

TRAININGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "updates beside both, accumulated": (torch.float32, {"update_on": "cpu", "overlap": "both", "accumulate": 2}),
    "fp16, scaled": (torch.float16, {"init_scale": 2.0**22}),
    "fp16, scaled, updated on the CPU": (torch.float16, {"init_scale": 2.0**22, "update_on": "cpu"}),
    "clipped": (torch.bfloat16, {"clip": 0.1}),
    "clipped in the step": (torch.bfloat16, {"clip": 0.1, "clip_in_step": True}),
    "fp16, scaled, clipped in the step": (
        torch.float16,
        {"init_scale": 2.0**22, "scaler": chunkc.GradScaler, "clip": 0.1, "clip_in_step": True},
    ),
    "clipped, updates that are undone": (torch.bfloat16, {**UNDOABLE, "clip": 0.1}),
    "not clipped, updates that stand": (torch.bfloat16, {**UNDOABLE, "clip": 1e6}),
    "not clipped, updates on the CPU that stand": (torch.bfloat16, {**UNDOABLE, "clip": 1e6, "update_on": "cpu"}),
    "fp16, scaled, updates that may be undone": (
        torch.float16,
        {**UNDOABLE, "init_scale": 2.0**22, "scaler": chunkc.GradScaler, "clip": 1e6},
    ),
    "accumulated": (torch.float32, {"accumulate": 2}),
    "8-bit moments": (torch.bfloat16, {"moments_dtype": "int8"}),
    "rounded stochastically": (torch.bfloat16, {"stochastic_rounding": True}),
    "SGD": (torch.float32, {"optimizer": chunkc.optim.SGD, "momentum": 0.9}),
    "LAMB": (torch.float32, {"optimizer": chunkc.optim.LAMB}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_nor_does_it_with(name: str) -> None:
    """Whatever else goes on in a step. Among the fp16 steps, one overflows and is skipped."""
    dtype, options = TRAININGS[name]

    def trained(budget_nbytes: int) -> Trained:
        options_left = dict(options)
        scale = options_left.pop("init_scale", None)
        make = options_left.pop("scaler", torch.amp.GradScaler)
        scaler = None if scale is None else make("cuda", init_scale=scale)
        found = train(SMALL, dtype, budget_nbytes, scaler=scaler, **options_left)
        assert scaler is None or scaler.get_scale() < scale, "no step was skipped"
        return found

    expected = trained(HUGE)
    assert expected.losses[-1] != expected.losses[0]
    budget_nbytes = smallest(dtype)
    for _ in range(4):  # some updates need more than a step: LAMB's, those beside both
        try:
            with cuda_in_ram.choose(late=3):
                found = trained(budget_nbytes)
            break
        except chunkc.BudgetError as error:
            budget_nbytes = error.minimum_nbytes
    assert not different(found, expected)
    assert found.report.measured_peak_nbytes <= budget_nbytes
    assert found.report.num_resident_chunks < found.report.num_chunks


def test_a_disk_that_holds_everything_is_read_in_place(tmp_path: Path) -> None:
    expected = train(SMALL, torch.float32, HUGE)
    with cuda_in_ram.choose(attribute_88=1, late=1):
        found = train(
            SMALL,
            torch.float32,
            smallest(torch.float32),
            home=f"disk:{tmp_path}",
            disk_holds="everything",
        )
    assert not different(found, expected)
