"""`torch.amp.GradScaler` and `clip_grad_norm_` in the usual loop, over parameters that move and that stay."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import HUGE, TINY, compile_case, differences, limited, refuse, session_of
from optim_models import results
from plain_modules import Stack
from torch import nn
from zoo import Case, floats

import chunkc

WIDTH, STEPS = 64, 4

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p, **kw: chunkc.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **kw),
    "Adam": lambda p, **kw: chunkc.optim.Adam(p, lr=1e-2, weight_decay=0.1, **kw),
    "LAMB": lambda p, **kw: chunkc.optim.LAMB(p, lr=1e-2, weight_decay=0.1, **kw),
    "SGD": lambda p, **kw: chunkc.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5, **kw),
}


def case(dtype: torch.dtype = torch.float32) -> Case:
    return Case(
        "scaled", lambda: Stack(2, width=WIDTH, dtype=dtype), lambda seed: {"x": floats(seed, (4, WIDTH)).to(dtype)}
    )


@functools.cache
def minimum(dtype: torch.dtype, autocast: bool) -> int:
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        return refuse(case(dtype), memory_budget=TINY).minimum_nbytes


def build(tight: bool, dtype: torch.dtype = torch.float32, autocast: bool = False) -> tuple[nn.Module, nn.Module]:
    nbytes = minimum(dtype, autocast) if tight else HUGE
    return compile_case(case(dtype), memory_budget=nbytes, whole_graph="never")


def train(
    tight: bool,
    make: Callable[..., torch.optim.Optimizer],
    *,
    scale: float | None,
    dtype: torch.dtype = torch.float32,
    unscale: bool = True,
    clip: float | None = None,
    overflow_at: int | None = None,
    update_on: str = "device",
) -> list[Any]:
    """The documented loop; at step `overflow_at` the loss is infinite and the scaler skips."""
    model, compiled = build(tight, dtype)
    optimizer = make(model.parameters(), update_on=update_on)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    with limited(minimum(dtype, False) if tight else HUGE):
        loop(model, compiled, optimizer, scaler, dtype, unscale=unscale, clip=clip, overflow_at=overflow_at)
    assert session_of(model).store.views.is_managed("layers.0.weight") == tight
    return results(model, optimizer)


def loop(
    model: nn.Module,
    compiled: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype,
    *,
    unscale: bool,
    clip: float | None,
    overflow_at: int | None,
) -> None:
    for step in range(STEPS):
        loss = compiled(**case(dtype).batch(step))
        if step == overflow_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = results(model, optimizer)
        if unscale:
            scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert bool(differences(results(model, optimizer), before)) == (step != overflow_at)


@pytest.mark.second_tier
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_power_of_two_changes_no_bit(name: str) -> None:
    """The scale comes in before the backward and goes out exactly, by `unscale_` or inside the optimizer."""
    expected = train(False, OPTIMIZERS[name], scale=None)
    for tight, update_on, unscale in ((False, "device", False), (True, "device", True), (True, "cpu", False)):
        found = train(tight, OPTIMIZERS[name], scale=2.0**10, unscale=unscale, update_on=update_on)
        assert not differences(found, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_overflows_is_skipped_altogether(name: str) -> None:
    """`train` sees that nothing changes at that step, the count of steps neither; here: all ways agree afterwards."""
    expected = train(False, OPTIMIZERS[name], scale=2.0**10, overflow_at=1)
    assert not differences(
        train(True, OPTIMIZERS[name], scale=2.0**10, overflow_at=1, unscale=False, update_on="cpu"), expected
    )
    steps = [part for part in expected if part.shape == ()]
    assert steps
    assert all(step == STEPS - 1 for step in steps)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_an_overflow_at_the_first_step_leaves_no_state(name: str, update_on: str) -> None:
    model, compiled = build(True)
    optimizer = OPTIMIZERS[name](model.parameters(), update_on=update_on)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for factor in (float("inf"), 1.0):
        scaler.scale(compiled(**case().batch(0)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states = [optimizer.state[p] for p in model.parameters()]
        if factor == 1.0:
            assert [state["step"].item() for state in states] == [1.0] * len(states)
        else:
            assert states == [{}] * len(states)


def test_half_precision_parameters_are_unscaled_inside() -> None:
    """`GradScaler.unscale_` refuses fp16 gradients, so the optimizer divides them, in fp32."""
    dtype = torch.float16
    expected = train(False, OPTIMIZERS["AdamW"], scale=2.0**8, dtype=dtype, unscale=False, overflow_at=2)
    assert not differences(
        train(True, OPTIMIZERS["AdamW"], scale=2.0**8, dtype=dtype, unscale=False, overflow_at=2), expected
    )
    unscaled = train(False, OPTIMIZERS["AdamW"], scale=None, dtype=dtype)
    assert differences(expected, unscaled)


@pytest.mark.parametrize("tight", [False, True])
def test_it_follows_torch_under_autocast_with_clipping(tight: bool) -> None:
    """The whole loop, with fp32 parameters, fp16 arithmetic, an overflow and clipping, against torch's optimizer."""
    model, compiled = build(tight, autocast=True)
    shadow = copy.deepcopy(case().build())
    pairs = [
        (model, OPTIMIZERS["AdamW"](model.parameters())),
        (shadow, torch.optim.AdamW(shadow.parameters(), lr=1e-2, weight_decay=0.1)),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3) for _ in pairs]
    for step in range(8):
        with torch.autocast("cpu", torch.float16):
            loss = compiled(**case().batch(step)) * (float("inf") if step in (2, 3) else 1.0)
        scalers[0].scale(loss).backward()
        scalers[1].scale(torch.zeros(()))  # both have a scale
        for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
            q.grad = p.grad.detach().clone()  # type: ignore[union-attr]
        norms = []
        for (subject, optimizer), scaler in zip(pairs, scalers, strict=True):
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(subject.parameters(), 0.01))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0, equal_nan=True)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        assert pairs[0][1].state[p]["step"] == pairs[1][1].state[q]["step"] == 6


def test_clipping_changes_gradients_at_home() -> None:
    free, clipped = (train(True, OPTIMIZERS["LAMB"], scale=None, clip=clip) for clip in (None, 1e-3))
    assert differences(free, clipped)
    model, compiled = build(True)
    compiled(**case().batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    after = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    torch.testing.assert_close(after, torch.tensor(1e-3), rtol=1e-3, atol=0)
