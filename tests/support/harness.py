"""Run the zoo's models under chunkc, and compare the results bit by bit.

Results are NumPy arrays: they are outside torch's allocator, so keeping them charges nothing to a hard limit.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo import LADDER, Case

import chunkc
import chunkc.backend
from chunkc.runtime.device import cpu_allocator
from chunkc.session.compiled_step import CompiledGraph
from chunkc.session.session import Session, owner

HUGE = 1 << 34
"""A budget in which every model of the zoo fits many times over."""

TRACING_NBYTES = 16384
"""What Dynamo itself may allocate while it traces: two copies of the random generator's state, 5056 bytes each. It
frees them before the compiled graph runs for the first time."""

TRACED_STEPS = 2
"""Steps in which Dynamo traces the graphs of a model that has several: `sometimes_unused` takes another branch in the
second one."""

LOOP_NBYTES = 64 * 1024
"""What a loop of another library may allocate outside the model's calls: batches, losses, norms, metrics."""

TINY = 4096
"""A budget in which no model fits."""

_T = TypeVar("_T")

Arrays = dict[str, np.ndarray]
Optimizer = torch.optim.Optimizer
OptimizerFactory = Callable[[Any], Optimizer]


@contextmanager
def graphs_made() -> Iterator[list[CompiledGraph]]:
    """Yield the graphs that the backend makes inside the block, in order."""
    made: list[CompiledGraph] = []
    init = CompiledGraph.__init__

    def noting(graph: CompiledGraph, *args: Any) -> None:
        init(graph, *args)
        made.append(graph)

    with mock.patch.object(CompiledGraph, "__init__", noting):
        yield made


class Count:
    """Counts calls of a function, and lets them through."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Count:
    """Count calls of a module's function from now on."""
    count = Count(getattr(module, name))
    monkeypatch.setattr(module, name, count)
    return count


def take_step(loss: Tensor, optimizer: Optimizer) -> None:
    """Run backward and update, and clear the gradients."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train_steps(case: Case, call: Callable[..., Any], optimizer: Optimizer, steps: range) -> list[np.ndarray]:
    """Run ordinary training steps; return the losses."""
    losses = []
    for step in steps:
        loss = case.loss(call(**case.batch(step)))
        loss.backward()
        losses.append(array(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(parameters: Any) -> Optimizer:
    """chunkc's AdamW with the settings of every end-to-end test."""
    return chunkc.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Result:
    """Results of a training run.

    Attributes:
        losses: one float32 scalar per step.
        grads: per step, each parameter's gradient by name; a parameter without gradient is missing.
        weights: parameters and buffers after the last step, by name.
        predicted_peak_nbytes, measured_peak_nbytes, num_chunks: of `chunkc.report`.
        allocator_peak_nbytes: the hard limit's own measure; bytes.
    """

    losses: tuple[np.ndarray, ...]
    grads: tuple[Arrays, ...]
    weights: Arrays
    predicted_peak_nbytes: int
    measured_peak_nbytes: int
    num_chunks: int
    allocator_peak_nbytes: int


def array(tensor: Tensor) -> np.ndarray:
    """Return a copy of the tensor's bits in memory that torch does not know of."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy().copy()


def home_of(parameter: Tensor) -> tuple[Session, str]:
    """Return the session that owns a parameter, and the parameter's name in it."""
    found = owner(parameter)
    assert found is not None, "the model was neither placed nor compiled"
    return found


def session_of(model: nn.Module) -> Session:
    """Return the one session that owns all parameters of a model."""
    (session,) = {home_of(parameter)[0] for parameter in model.parameters()}
    return session


def kept(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor that charges nothing to a hard limit."""
    low = tensor.dtype is torch.bfloat16
    copy = torch.from_numpy(array(tensor))
    return copy.view(torch.bfloat16) if low else copy


def gradients(model: nn.Module) -> Arrays:
    """Return copies of all gradients that exist, by parameter name."""
    return {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> Arrays:
    """Return copies of all parameters and buffers, by name."""
    return {name: array(t) for name, t in (*model.named_parameters(), *model.named_buffers())}


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """List the differences of two nested results (mappings, sequences, arrays) in shape, type or any bit."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if left.keys() != right.keys():
            return [f"{path}: names {sorted(left.keys() ^ right.keys())} are in one only"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        if len(left) != len(right):
            return [f"{path}: {len(left)} against {len(right)} entries"]
        return [d for i, pair in enumerate(zip(left, right)) for d in differences(*pair, f"{path}[{i}]")]
    left, right = np.asarray(left), np.asarray(right)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return [f"{path}: {left.dtype}{left.shape} against {right.dtype}{right.shape}"]
    if left.tobytes() == right.tobytes():
        return []
    num_different = int((left != right).sum())
    return [f"{path}: {num_different} of {left.size} elements differ"]


def assert_same_training(result: Result, reference: Result) -> None:
    """Check that losses, every gradient of every step and every weight have the same bits."""
    for part in ("losses", "grads", "weights"):
        found = differences(getattr(result, part), getattr(reference, part), part)
        assert not found, "\n".join(found[:20])


def compile_case(
    case: Case, *, memory_budget: int, home: str = "cpu", codegen: str = "eager", seed: int = 0,
    place: bool = True, device: str = "cpu", backend: Any = "chunkc", **options: Any,
) -> tuple[nn.Module, nn.Module]:  # fmt: skip
    """Return a model, placed in its home unless `place` is false, and the same model compiled by chunkc.

    Saved values are kept unless `activations` says otherwise, so that the budget alone decides when chunks move.
    """
    torch._dynamo.reset()
    gc.collect()
    model = case.build(seed)
    if place:
        sizes = {"chunk_size": options["chunk_size"]} if "chunk_size" in options else {}
        model = chunkc.place(model, device=device, home=home, **sizes)
    options = {"activations": "keep"} | options | {"memory_budget": memory_budget, "home": home, "codegen": codegen}
    return model, torch.compile(model, backend=backend, options=options)


def segmented(model: nn.Module, memory_budget: int | str, **options: Any) -> Any:
    """Compile a model by chunkc in eager code, cut into segments even where everything fits.

    Saved values are kept. Other `options` override all of this.
    """
    fixed = {"memory_budget": memory_budget, "codegen": "eager", "whole_graph": "never", "activations": "keep"}
    options = fixed | options
    return torch.compile(model, backend="chunkc", options=options)


def limited_once_traced(limit_nbytes: int) -> Callable[..., Any]:
    """Return the backend, with the hard limit lowered to `limit_nbytes` when a graph is about to run."""

    def backend(*args: Any, **options: Any) -> Callable[..., Any]:
        compiled = chunkc.backend.chunkc(*args, **options)

        def run(*arguments: Any) -> Any:
            cpu_allocator.set_limit(limit_nbytes)
            return compiled(*arguments)

        return run

    return backend


def train(
    case: Case, *, memory_budget: int, home: str = "cpu", codegen: str = "eager", steps: int = 3,
    limit: bool = True, seed: int = 0, optimizer: OptimizerFactory = adamw, with_grads: bool = True, **options: Any,
) -> Result:  # fmt: skip
    """Train `case` for some steps, inside a hard limit equal to the budget unless `limit` is false.

    The limit starts from the bytes that are charged before the run (tensors that other tests left behind), so the run
    itself, with its batches, gets exactly the budget. Where Dynamo traces several graphs there is no limit in the first
    steps, in which it does so.

    Args:
        with_grads: copy all gradients at each step; updates in the backward would have consumed them.
    """
    cpu_allocator.install()
    gc.collect()
    foreign_nbytes = cpu_allocator.current_nbytes()
    limit_nbytes = foreign_nbytes + memory_budget
    traces_at_once = case.num_graphs == 1
    if limit and traces_at_once:
        options["backend"] = limited_once_traced(limit_nbytes)
    model, compiled = compile_case(case, memory_budget=memory_budget, home=home, codegen=codegen, seed=seed, **options)
    update = optimizer(model.parameters())
    losses: list[np.ndarray] = []
    grads: list[Arrays] = []
    torch.manual_seed(seed)
    cpu_allocator.reset_peak()
    with cpu_allocator.hard_limit(limit_nbytes if limit and traces_at_once else None):
        for step in range(steps):
            batch = case.batch(seed + step)
            if limit and traces_at_once and step == 0:
                cpu_allocator.set_limit(limit_nbytes + TRACING_NBYTES)
            elif limit and not traces_at_once and step == TRACED_STEPS:
                cpu_allocator.set_limit(limit_nbytes)
                cpu_allocator.reset_peak()
            loss = case.loss(compiled(**batch))
            loss.backward()
            losses.append(array(loss))
            if with_grads:
                grads.append(gradients(model))
            del batch, loss
            update.step()
            update.zero_grad()
    chunkc.synchronize(model)  # an optimizer's last update may go on
    peak_nbytes = cpu_allocator.peak_nbytes() - foreign_nbytes
    report = chunkc.report(compiled)
    return Result(
        tuple(losses), tuple(grads), weights(model), report.predicted_peak_nbytes,
        report.measured_peak_nbytes - foreign_nbytes, report.num_chunks, peak_nbytes,
    )  # fmt: skip


def refuse(case: Case, *, memory_budget: int, **options: Any) -> chunkc.BudgetError:
    """Return the error of the first call of a model that does not fit `memory_budget`."""
    options.setdefault("whole_graph", "never")
    _, compiled = compile_case(case, memory_budget=memory_budget, **options)
    try:
        case.loss(compiled(**case.batch(0))).backward()
    except chunkc.BudgetError as error:
        return error.with_traceback(None)
    raise AssertionError(f"{case.name} trains in {memory_budget} bytes")


@contextmanager
def limited(budget_nbytes: int) -> Iterator[None]:
    """Limit torch's allocator inside to `budget_nbytes`, and room for what the loop and Dynamo allocate."""
    cpu_allocator.install()
    gc.collect()
    now = cpu_allocator.current_nbytes()
    with cpu_allocator.hard_limit(now + budget_nbytes + LOOP_NBYTES + TRACING_NBYTES):
        yield


def in_a_small_budget(run: Callable[[int], _T]) -> _T:
    """Call `run(budget)` with 1.3 times the least budget, in bytes, that `BudgetError` names."""
    nbytes = TINY
    for _ in range(20):  # graphs are planned one by one: a later one may need more
        try:
            return run(nbytes * 13 // 10)
        except chunkc.BudgetError as error:
            nbytes = max(nbytes, error.minimum_nbytes)
    raise AssertionError(f"{nbytes} bytes are not enough either")


@functools.cache
def everything_fits(name: str, codegen: str = "eager", steps: int = 3) -> Result:
    """Return the results that every budget and home must reproduce: all resident, segments as in a small budget."""
    case = LADDER[name]
    return train(case, memory_budget=HUGE, codegen=codegen, steps=steps, limit=False, whole_graph="never")


@functools.cache
def minimum_nbytes(name: str, home: str = "cpu", codegen: str = "eager") -> int:
    """Return the smallest budget, in bytes, that `BudgetError` names for a model of the zoo."""
    case = LADDER[name]
    nbytes = refuse(case, memory_budget=TINY, home=home, codegen=codegen).minimum_nbytes
    for _ in range(20 if case.num_graphs > 1 else 0):  # graphs are planned one by one: a later one may need more
        try:
            train(case, memory_budget=nbytes, home=home, codegen=codegen, limit=False, whole_graph="never")
            break
        except chunkc.BudgetError as error:
            nbytes = error.minimum_nbytes
    return nbytes


def budget_nbytes(name: str, percent: int, home: str = "cpu", codegen: str = "eager") -> int:
    """Return a percentage of the predicted peak where everything fits, at least the minimum; for 0 the minimum."""
    share = everything_fits(name, codegen).predicted_peak_nbytes * percent // 100
    return max(share, minimum_nbytes(name, home, codegen))
