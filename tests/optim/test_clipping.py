"""`clip_grad_norm_` of chunkc's optimizers: the norm from slots, the factor in the update; and loss scalers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import HUGE, TINY, array, compile_case, differences, limited, refuse, session_of
from optim_models import copy_gradients, results
from plain_modules import Stack
from torch import Tensor, nn
from zoo import Case, floats

import chunkc

WIDTH, STEPS, MAX_NORM = 64, 4, 1e-3
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p, **kw: chunkc.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **kw),
    "LAMB": lambda p, **kw: chunkc.optim.LAMB(p, lr=1e-2, weight_decay=0.1, **kw),
    "SGD": lambda p, **kw: chunkc.optim.SGD(p, lr=1e-1, momentum=0.9, **kw),
}


class OneUnused(Stack):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(3, width=WIDTH, dtype=dtype)
        self.unused = nn.Linear(WIDTH, WIDTH, dtype=dtype)


def case(dtype: torch.dtype = FP32) -> Case:
    return Case("clipped", lambda: OneUnused(dtype), lambda seed: {"x": floats(seed, (4, WIDTH)).to(dtype)})


@functools.cache
def minimum(dtype: torch.dtype, autocast: bool = False) -> int:
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        return refuse(case(dtype), memory_budget=TINY).minimum_nbytes


def build(tight: bool, dtype: torch.dtype = FP32, autocast: bool = False) -> tuple[nn.Module, nn.Module]:
    nbytes = minimum(dtype, autocast) if tight else HUGE
    return compile_case(case(dtype), memory_budget=nbytes, whole_graph="never")


def read_nbytes(model: nn.Module) -> int:
    """Bytes of gradients that norms have read at home."""
    return chunkc.report(model).gradients_read_nbytes


def ask(compiled: nn.Module, optimizer: Any) -> None:
    """From the next backward on, sums are taken."""
    compiled(**case().batch(0)).backward()
    optimizer.grad_norm()
    optimizer.zero_grad()


def plain_norm(model: nn.Module) -> Tensor:
    return torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()


def at_home_nbytes(model: nn.Module) -> int:
    store = session_of(model).store
    return sum(
        p.grad.nbytes for n, p in store.views.parameters().items() if store.views.is_managed(n) and p.grad is not None
    )


def train(
    tight: bool, make: Callable[..., Any], dtype: torch.dtype = FP32, *, accumulate: int = 1, **arguments: Any
) -> tuple[list[Any], list[Any]]:
    """Norms and what was trained; also that the norm is that of the gradients, and what was read for it."""
    model, compiled = build(tight, dtype)
    optimizer = make(model.parameters(), **arguments)
    norms = []
    with limited(minimum(dtype) if tight else HUGE):
        for step in range(STEPS):
            for part in range(accumulate):
                compiled(**case(dtype).batch(step * accumulate + part)).backward()
            before = read_nbytes(model)
            norm = optimizer.clip_grad_norm_(MAX_NORM)
            assert read_nbytes(model) - before == (at_home_nbytes(model) if step == 0 else 0)
            torch.testing.assert_close(norm, plain_norm(model).float(), rtol=1e-6, atol=0)
            norms.append(array(norm))
            optimizer.step()
            optimizer.zero_grad()
    assert session_of(model).store.views.is_managed("layers.0.weight") == tight
    return norms, results(model, optimizer)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "dtype"), [*((name, FP32) for name in OPTIMIZERS), ("AdamW", BF16), ("SGD", FP64)])
def test_no_gradient_at_home_is_read_and_every_budget_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """In 16 bits the norm is no coarser."""
    expected = train(False, OPTIMIZERS[name], dtype, accumulate=2)
    for update_on in ("device", "cpu"):
        found = train(True, OPTIMIZERS[name], dtype, accumulate=2, update_on=update_on)
        assert not differences(found, expected)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_it_trains_as_torch_does(name: str) -> None:
    """Clipped once, or several times before a step."""
    model, compiled = build(True)
    shadow = copy.deepcopy(case().build())
    ours: Any = OPTIMIZERS[name](model.parameters())
    theirs: Any = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    }[name](shadow.parameters())
    for step in range(STEPS):
        compiled(**case().batch(step)).backward()
        shadow(**case().batch(step)).backward()
        for limit in ((MAX_NORM,), (1e3, 1e-2, MAX_NORM), (1e3,), (MAX_NORM, 1.0))[step]:
            norms = ours.clip_grad_norm_(limit), torch.nn.utils.clip_grad_norm_(shadow.parameters(), limit)
            torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*shadow.parameters()], rtol=0, atol=2e-5)


Change = Callable[[nn.Module, Any], object]


def weight_of(model: nn.Module) -> nn.Parameter:
    found: Any = model
    return found.layers[1].weight


def unscale(model: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


def replace(model: nn.Module, optimizer: Any) -> None:
    weight_of(model).grad = torch.full_like(weight_of(model), 3.0)


def drop(model: nn.Module, optimizer: Any) -> None:
    weight_of(model).grad = None


CHANGES: dict[str, Change] = {
    "nothing": lambda model, optimizer: None,
    "written in place": lambda model, optimizer: weight_of(model).grad.mul_(5.0),  # type: ignore[union-attr]
    "written through a view": lambda model, optimizer: weight_of(model).grad.view(-1)[3:9].fill_(7.0),  # type: ignore[union-attr]
    "zeroed": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "clipped by torch": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    "unscaled": unscale,
    "replaced": replace,
    "dropped": drop,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_norm_is_of_the_gradients_as_they_are(name: str) -> None:
    """Of what sums were taken, and then changed, nothing is remembered."""
    model, compiled = build(True)
    optimizer: Any = OPTIMIZERS["AdamW"](model.parameters())
    ask(compiled, optimizer)
    compiled(**case().batch(0)).backward()
    nbytes = read_nbytes(model)
    before = optimizer.grad_norm()
    assert read_nbytes(model) == nbytes
    CHANGES[name](model, optimizer)
    expected = plain_norm(model)
    found = optimizer.grad_norm()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert bool(found == before) == (name == "nothing")
    assert bool(read_nbytes(model) > nbytes) == (name not in ("nothing", "dropped"))


def test_a_backward_without_zero_grad_is_added_to_the_norm() -> None:
    model, compiled = build(True)
    optimizer: Any = OPTIMIZERS["AdamW"](model.parameters())
    ask(compiled, optimizer)
    nbytes, norms = read_nbytes(model), []
    for _ in range(2):
        compiled(**case().batch(0)).backward()
        norms.append(optimizer.grad_norm())
    torch.testing.assert_close(norms[1], 2 * norms[0])
    optimizer.zero_grad()
    compiled(**case().batch(1)).backward()
    compiled(**case().batch(0)).backward()
    assert optimizer.grad_norm() != norms[1]
    assert read_nbytes(model) == nbytes


def test_sums_are_taken_only_where_somebody_asks() -> None:
    model, compiled = build(True)
    optimizer: Any = OPTIMIZERS["AdamW"](model.parameters())
    asked = []
    for step in range(6):
        compiled(**case().batch(step)).backward()
        if step in (1, 2):
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        asked.append(len(session_of(model).store.sums.requesters))
    assert asked == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("tight", [False, True])
def test_what_was_clipped_is_what_is_multiplied(tight: bool) -> None:
    model, compiled = build(tight)
    optimizer: Any = OPTIMIZERS["SGD"](model.parameters())

    def backward(step: int) -> None:
        compiled(**case().batch(step)).backward()

    backward(0)
    optimizer.clip_grad_norm_(MAX_NORM)
    backward(1)
    with pytest.raises(chunkc.UnsupportedError, match="after clip_grad_norm_"):
        optimizer.step()
    with pytest.raises(chunkc.UnsupportedError, match="zero_grad"):
        optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.zero_grad()
    backward(2)
    optimizer.step()  # of other gradients, which nobody has clipped
    optimizer.clip_grad_norm_(MAX_NORM)
    weight_of(model).grad.add_(1.0)  # type: ignore[union-attr]
    with pytest.raises(chunkc.UnsupportedError, match="after clip_grad_norm_"):
        optimizer.step()
    optimizer.zero_grad()
    backward(3)
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    backward(4)
    optimizer.step()  # the step before is over, and these are new
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    backward(5)
    optimizer.clip_grad_norm_(MAX_NORM)
    model.zero_grad()
    backward(6)
    with pytest.raises(chunkc.UnsupportedError, match="not those that clip_grad_norm_"):
        optimizer.step()


@pytest.mark.parametrize("tight", [False, True])
def test_what_is_not_finite_is_as_in_torch(tight: bool) -> None:
    model, compiled = build(tight)
    optimizer: Any = OPTIMIZERS["SGD"](model.parameters())
    (compiled(**case().batch(0)) * float("inf")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    assert weight_of(model).isnan().any()


def test_it_knows_a_loss_scale() -> None:
    """The norm is of unscaled gradients, and one step divides and clips."""
    results = []
    for scale in (1.0, 2.0**12):
        model, compiled = build(True)
        optimizer: Any = OPTIMIZERS["AdamW"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        norms = []
        for step in range(STEPS):
            scaler.scale(compiled(**case().batch(step))).backward()
            norms.append(array(optimizer.clip_grad_norm_(MAX_NORM, loss_scale=scaler.get_scale())))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(norms + [array(p) for p in model.parameters()])
    assert not differences(results[0], results[1])


def test_updates_in_the_backward_know_no_norm() -> None:
    model, _ = build(True)
    optimizer: Any = OPTIMIZERS["AdamW"](model.parameters(), overlap="backward")
    with pytest.raises(chunkc.UnsupportedError, match='overlap="forward"'):
        optimizer.clip_grad_norm_(1.0)


def test_without_gradients_there_is_nothing_to_clip() -> None:
    model, _ = build(True)
    optimizer: Any = OPTIMIZERS["AdamW"](model.parameters())
    assert float(optimizer.clip_grad_norm_(1.0)) == 0.0
    optimizer.step()


def test_updates_in_the_backward_invalidate_no_sums() -> None:
    """Whether clipping undoes the updates or not, gradients at home are read for the first norm only."""
    for max_norm in (1e-3, 1e9):
        model, compiled = build(tight=True)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, overlap="backward", undoable=True)
        found = []
        for step in range(4):
            compiled(**case().batch(step)).backward()
            optimizer.clip_grad_norm_(max_norm)
            found.append(read_nbytes(model))
            optimizer.step()
            optimizer.zero_grad()
        assert found == [found[0]] * 4
        assert found[0] > 0


# ---------------------------------------------------------------- loss scalers in the usual loop


SCALED: dict[str, Callable[..., Any]] = OPTIMIZERS | {
    "Adam": lambda p, **kw: chunkc.optim.Adam(p, lr=1e-2, weight_decay=0.1, **kw),
    "SGD": lambda p, **kw: chunkc.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5, **kw),
}


def train_scaled(
    tight: bool,
    make: Callable[..., torch.optim.Optimizer],
    *,
    scale: float | None,
    dtype: torch.dtype = torch.float32,
    unscale: bool = True,
    overflow_at: int | None = None,
    update_on: str = "device",
) -> list[Any]:
    """The documented loop; at step `overflow_at` the loss is infinite and the scaler skips."""
    model, compiled = build(tight, dtype)
    optimizer = make(model.parameters(), update_on=update_on)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    with limited(minimum(dtype) if tight else HUGE):
        for step in range(STEPS):
            loss = compiled(**case(dtype).batch(step))
            scaler.scale(loss * float("inf") if step == overflow_at else loss).backward()
            before = results(model, optimizer)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert bool(differences(results(model, optimizer), before)) == (step != overflow_at)
    assert session_of(model).store.views.is_managed("layers.0.weight") == tight
    return results(model, optimizer)


@pytest.mark.quick(0, second=2)
@pytest.mark.parametrize("name", SCALED)
def test_a_power_of_two_changes_no_bit(name: str) -> None:
    """The scale comes in before the backward and goes out exactly, by `unscale_` or inside the optimizer."""
    expected = train_scaled(False, SCALED[name], scale=None)
    for tight, update_on, unscale in ((False, "device", False), (True, "device", True), (True, "cpu", False)):
        found = train_scaled(tight, SCALED[name], scale=2.0**10, unscale=unscale, update_on=update_on)
        assert not differences(found, expected)


@pytest.mark.quick(4)
@pytest.mark.parametrize("overflow_at", [0, 1])
@pytest.mark.parametrize("name", SCALED)
def test_what_overflows_is_skipped_altogether(name: str, overflow_at: int) -> None:
    """`train_scaled` sees that nothing changes at that step, and no state is made; afterwards all ways agree."""
    options: dict[str, Any] = {"scale": 2.0**10, "overflow_at": overflow_at}
    expected = train_scaled(False, SCALED[name], **options)
    for update_on in ("device", "cpu"):
        found = train_scaled(True, SCALED[name], unscale=False, update_on=update_on, **options)
        assert not differences(found, expected)
    steps = [part for part in expected if part.shape == ()]
    assert steps
    assert all(step == STEPS - 1 for step in steps)


def test_half_precision_parameters_are_unscaled_inside() -> None:
    """`GradScaler.unscale_` refuses fp16 gradients, so the optimizer divides them, in fp32."""
    dtype = torch.float16
    expected = train_scaled(False, SCALED["AdamW"], scale=2.0**8, dtype=dtype, unscale=False, overflow_at=2)
    assert not differences(
        train_scaled(True, SCALED["AdamW"], scale=2.0**8, dtype=dtype, unscale=False, overflow_at=2), expected
    )
    unscaled = train_scaled(False, SCALED["AdamW"], scale=None, dtype=dtype)
    assert differences(expected, unscaled)


@pytest.mark.parametrize("tight", [False, True])
def test_it_follows_torch_under_autocast_with_clipping(tight: bool) -> None:
    """The whole loop, with fp32 parameters, fp16 arithmetic, an overflow and clipping, against torch's optimizer."""
    model, compiled = build(tight, autocast=True)
    shadow = copy.deepcopy(case().build())
    pairs = [
        (model, SCALED["AdamW"](model.parameters())),
        (shadow, torch.optim.AdamW(shadow.parameters(), lr=1e-2, weight_decay=0.1)),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3) for _ in pairs]
    for step in range(8):
        with torch.autocast("cpu", torch.float16):
            loss = compiled(**case().batch(step)) * (float("inf") if step in (2, 3) else 1.0)
        scalers[0].scale(loss).backward()
        scalers[1].scale(torch.zeros(()))  # both have a scale
        copy_gradients(model, shadow)
        norms = []
        for (subject, optimizer), scaler in zip(pairs, scalers, strict=True):
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(subject.parameters(), 0.01))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0, equal_nan=True)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    torch.testing.assert_close([*model.parameters()], [*shadow.parameters()], rtol=0, atol=1e-6)
    steps = {float(state["step"]) for _, optimizer in pairs for state in optimizer.state.values() if state}
    assert steps == {6.0}
