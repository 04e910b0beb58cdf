"""`clip_grad_norm_` of chunkc's optimizers: the norm from slots, the factor in the update."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import HUGE, TINY, array, compile_case, differences, limited, refuse, session_of
from optim_models import results
from plain_modules import Stack
from torch import Tensor, nn
from zoo import Case, floats

import chunkc

WIDTH, STEPS, MAX_NORM = 64, 4, 1e-3
FP32, BF16 = torch.float32, torch.bfloat16

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
def minimum(dtype: torch.dtype) -> int:
    return refuse(case(dtype), memory_budget=TINY).minimum_nbytes


def build(tight: bool, dtype: torch.dtype = FP32) -> tuple[nn.Module, nn.Module]:
    return compile_case(case(dtype), memory_budget=minimum(dtype) if tight else HUGE, whole_graph="never")


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_gradient_at_home_is_read_and_every_budget_gives_the_same_bits(name: str) -> None:
    expected = train(False, OPTIMIZERS[name], accumulate=2)
    for update_on in ("device", "cpu"):
        found = train(True, OPTIMIZERS[name], accumulate=2, update_on=update_on)
        assert not differences(found[0], expected[0])
        assert not differences(found[1], expected[1])


def test_in_16_bits_the_norm_is_no_coarser() -> None:
    expected, found = (train(tight, OPTIMIZERS["AdamW"], BF16) for tight in (False, True))
    assert not differences(found[0], expected[0])
    assert not differences(found[1], expected[1])


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_it_trains_as_torch_does(name: str) -> None:
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
        limit = (MAX_NORM, 1e3)[step % 2]
        norms = ours.clip_grad_norm_(limit), torch.nn.utils.clip_grad_norm_(shadow.parameters(), limit)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-5)


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


def test_twice_is_as_in_torch() -> None:
    model, compiled = build(True)
    optimizer: Any = OPTIMIZERS["SGD"](model.parameters())
    compiled(**case().batch(0)).backward()
    shadow = [nn.Parameter(torch.zeros_like(p)) for p in model.parameters() if p.grad is not None]
    for p, q in zip((p for p in model.parameters() if p.grad is not None), shadow, strict=True):
        q.grad = p.grad.detach().clone()  # type: ignore[union-attr]
    for limit in (1e-2, 1e-3, 1.0):
        found, expected = optimizer.clip_grad_norm_(limit), torch.nn.utils.clip_grad_norm_(shadow, limit)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


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
