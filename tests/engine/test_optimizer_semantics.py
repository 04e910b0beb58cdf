"""What loops do with an optimizer beside `step()`: each beside plain PyTorch, and with the same bits under two budgets,
of which the small one is a hard limit.

"Learning-rate schedulers, gradient clipping, accumulation and several param groups do not work with the offloading
optimizer" is what users of such systems complain about.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from harness import kept, limited, segmented, take_step
from optim_models import BUDGET_NBYTES, MLP, batch, is_managed
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

import chunkc

pytestmark = pytest.mark.second_tier

HUGE_NBYTES = 64 << 20

Script = Callable[[MLP, Callable[[Tensor], Tensor], Callable[..., torch.optim.Optimizer]], list[Tensor]]
"""Gets the model, what to call, and the class of the optimizer; returns what to compare."""

EPS = 1e-4
"""Of Adam: with the usual one, its first updates are as large as the rate, however small a gradient or its rounding."""

PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW": (partial(chunkc.optim.AdamW, eps=EPS), partial(torch.optim.AdamW, eps=EPS)),
    "SGD": (
        lambda params, lr=0.1, **rest: chunkc.optim.SGD(params, lr=lr, momentum=0.9, **rest),
        lambda params, lr=0.1, **rest: torch.optim.SGD(params, lr=lr, momentum=0.9, **rest),
    ),
    "torch.optim.AdamW": (partial(torch.optim.AdamW, eps=EPS), partial(torch.optim.AdamW, eps=EPS)),
}
"""Under chunkc, and in plain PyTorch."""


@pytest.fixture(params=[name if name == "AdamW" else pytest.param(name, marks=pytest.mark.slow) for name in PAIRS])
def pair(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return PAIRS[request.param]


MODEL_NBYTES = sum(p.nbytes for p in MLP().parameters())


def run(
    script: Script,
    pair: tuple[Callable[..., Any], Callable[..., Any]],
    rtol: float = 1e-4,
    own_nbytes: int = 0,
) -> None:
    """Under a small budget, a large one, and in plain PyTorch.

    Args:
        own_nbytes: what the script itself makes beside the model; the hard limit lets it.
    """
    if pair is PAIRS["torch.optim.AdamW"]:
        own_nbytes += 3 * MODEL_NBYTES  # its states are in no chunk, and it updates all parameters together
    results = []
    for budget in (BUDGET_NBYTES, HUGE_NBYTES, None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MLP()
        call: Any = model
        if budget is not None:
            call = segmented(chunkc.place(model), budget)
        inside = limited(budget + own_nbytes) if budget == BUDGET_NBYTES else contextlib.nullcontext()
        with inside:
            results.append([kept(value) for value in script(model, call, pair[budget is None])])
        if budget == BUDGET_NBYTES:
            assert any(is_managed(p) for p in model.parameters()), "the test tests what it says"
    small, large, plain = results
    assert len(small) == len(large) == len(plain) > 0
    for index, (left, right, expected) in enumerate(zip(*results)):
        assert torch.equal(left, right), index
        torch.testing.assert_close(left, expected, rtol=rtol, atol=2e-6, msg=lambda m, index=index: f"{index}: {m}")


def compared(**how: Any) -> Callable[[Callable[..., list[Tensor]]], Callable[..., None]]:
    """Make a test of a script, with its name, that runs it with every pair; pytest gives what else it asks for."""

    def as_test(script: Callable[..., list[Tensor]]) -> Callable[..., None]:
        @wraps(script)
        def test(pair: tuple[Callable[..., Any], Callable[..., Any]], **found: Any) -> None:
            run(partial(script, **found), pair, **how)

        names = (*list(inspect.signature(script).parameters)[3:], "pair")
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return as_test


def parameters(model: nn.Module) -> list[Tensor]:
    return [kept(p) for p in model.parameters()]


CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3),
    "norm-one-by-one": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05, foreach=False),
    "largest": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=float("inf")),
    "given-norm": lambda parameters: nn.utils.clip_grads_with_norm_(parameters, 0.05, torch.tensor(0.2)),
}


@pytest.mark.parametrize(
    "clip", [pytest.param(name, marks=[] if name in ("norm", "value") else [pytest.mark.slow]) for name in CLIPS]
)
@compared(rtol=1e-3)
def test_clipping(model: MLP, call: Any, optimizer_class: Any, clip: str) -> list[Tensor]:
    optimizer, seen = optimizer_class(model.parameters(), lr=1e-2), []
    for step in range(3):
        for part in range(2):  # clipped gradients are of all parts
            call(batch(2 * step + part)).backward()
        seen.append(torch.as_tensor(CLIPS[clip](model.parameters()) or 0.0))
        seen += [kept(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return seen + parameters(model)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum="momentum" in o.defaults),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, 10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-3, 2),
}


def test_no_scheduler_is_left_out() -> None:
    classes = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@compared(rtol=1e-3)
def test_every_scheduler(model: MLP, call: Any, optimizer_class: Any) -> list[Tensor]:
    """One after the other on one model, each with an optimizer of its own."""
    seen = []
    for make in SCHEDULERS.values():
        optimizer = optimizer_class(model.parameters(), lr=1e-3)
        scheduler = make(optimizer)
        for step in range(4):
            take_step(call(batch(step)), optimizer)
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            seen.append(torch.tensor(optimizer.param_groups[0]["lr"]))
    return seen + parameters(model)


@compared()
def test_groups_added_later(model: MLP, call: Any, optimizer_class: Any) -> list[Tensor]:
    first, *others = model.layers
    optimizer = optimizer_class(first.parameters(), lr=1e-2)
    seen = []
    for step in range(4):
        call(batch(step)).backward()
        optimizer.step()
        model.zero_grad()
        seen += parameters(model)
        if step < len(others):
            optimizer.add_param_group({"params": list(others[step].parameters()), "lr": 1e-3 * (step + 1)})
    return seen


@compared()
def test_an_optimizer_in_hooks(model: MLP, call: Any, optimizer_class: Any) -> list[Tensor]:
    """PyTorch's tutorial: an optimizer for each parameter, which steps in the backward and frees the gradient."""
    optimizers = {p: optimizer_class([p], lr=1e-2) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(3):
        call(batch(step)).backward()
        assert all(p.grad is None for p in model.parameters())
    return parameters(model)


@compared()
def test_optimizer_hooks(model: MLP, call: Any, optimizer_class: Any) -> list[Tensor]:
    optimizer, seen = optimizer_class(model.parameters(), lr=1e-2), []
    weight = model.layers[0].weight
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().norm()))
    for step in range(3):
        take_step(call(batch(step)), optimizer)
    return seen + parameters(model)


@pytest.mark.parametrize("multi", [False, pytest.param(True, marks=pytest.mark.slow)])
@compared(own_nbytes=2 * MODEL_NBYTES)
def test_exponential_moving_average(model: MLP, call: Any, optimizer_class: Any, multi: bool) -> list[Tensor]:
    how: dict[str, Any] = (
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)} if multi else {"avg_fn": swa_utils.get_ema_avg_fn(0.9)}
    )
    average = swa_utils.AveragedModel(model, **how)
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    for step in range(4):
        take_step(call(batch(step)), optimizer)
        average.update_parameters(model)
    with torch.no_grad():
        value = average(batch(9))
    return [value, *parameters(average.module), *parameters(model)]


@compared(own_nbytes=2 * MODEL_NBYTES)
def test_stochastic_weight_averaging(model: MLP, call: Any, optimizer_class: Any) -> list[Tensor]:
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    average, scheduler = None, swa_utils.SWALR(optimizer, swa_lr=1e-3, anneal_epochs=2)
    for step in range(5):
        take_step(call(batch(step)), optimizer)
        if step >= 2:  # begun when the model has moved home
            average = average or swa_utils.AveragedModel(model)
            average.update_parameters(model)
            scheduler.step()
    swa_utils.update_bn([batch(0)], average)
    model.load_state_dict(average.module.state_dict())  # and trained on from there
    call(batch(7)).backward()
    optimizer.step()
    return [*parameters(average.module), *parameters(model)]
