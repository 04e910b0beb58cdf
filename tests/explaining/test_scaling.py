"""The smallest budget as a function of one size, from one capture: as planning every size for itself says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkc.explaining import largest as search
from chunkc.explaining import scaling
from chunkc.explaining.explain import minimum_budget
from chunkc.explaining.scaling import Scaling
from chunkc.ir.errors import UnsupportedError
from chunkc.machines.presets import load_hardware
from chunkc.options import parse_options

WIDTH = 64
BUDGET = 2_000_000


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(x, targets[: len(x)])


Call = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]


def call(size: int) -> Call:
    """Some targets more than there are rows: a dimension that is not the size, but grows with it."""
    return Rows(), (torch.zeros(3 * size, WIDTH), torch.zeros(3 * size + 5, dtype=torch.int64)), {}


def captured(build: Callable[[int], Call], budget: int = BUDGET) -> Scaling:
    options = parse_options({"codegen": "eager", "memory_budget": budget})
    return Scaling(build, options, load_hardware("cpu"))


def needs(size: int) -> int:
    model, args, kwargs = call(size)
    return minimum_budget(model, *args, memory_budget=BUDGET, **kwargs)


def test_as_every_size_for_itself() -> None:
    known = captured(call)
    for size in (1, 10, 1000):
        assert known.minimum_nbytes(size) == needs(size), size


def test_one_capture_serves_the_whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    known, count = captured(call), 0

    def one_more(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1

    monkeypatch.setattr(scaling, "predicted_on", one_more)
    search.largest(lambda size: known.minimum_nbytes(size) or 0, BUDGET)
    assert count == 0
    assert known.captures[0].templates.num_described < 8


def test_a_size_that_is_another_graph() -> None:
    """Zero rows are not what was captured."""
    assert captured(call).minimum_nbytes(0) is None


@pytest.mark.slow
def test_captured_again_where_inductor_makes_other_code() -> None:
    """Inductor sums more than 4,096 elements otherwise than fewer: beyond, one more capture serves all sizes."""
    options = parse_options({"codegen": "inductor", "memory_budget": BUDGET})
    known = Scaling(call, options, load_hardware("cpu"))
    for size in (10, 100, 2000, 3000):
        model, args, kwargs = call(size)
        alone = minimum_budget(model, *args, memory_budget=BUDGET, codegen="inductor", **kwargs)
        assert known.minimum_nbytes(size) == alone, size
    assert len(known.captures) == 2


@pytest.mark.parametrize("refuses", [False, True])
def test_few_captures_and_few_attempts(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every size is a graph of its own, or cannot be captured in symbols, tracing in symbols ends after some."""
    known, tried = captured(call), []

    def capture(size: int) -> Any:
        tried.append(size)
        if refuses:
            raise UnsupportedError("not this one")
        return known.captures[0]

    monkeypatch.setattr(known, "_capture", capture)
    monkeypatch.setattr(scaling.SizedStep, "minimum_nbytes", lambda capture, size: None)
    assert [known.minimum_nbytes(size) for size in (7, 8, 9, 10, 11)] == [None] * 5
    assert len(tried) == scaling.MAX_CAPTURES - 1
    assert len(known.captures) == (1 if refuses else scaling.MAX_CAPTURES)


class Wide(Rows):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(width))


class Branches(Rows):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return super().forward(x if len(x) == 3 * scaling.TRACED_SIZE else 2 * x, targets)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda n: (Wide(n), *call(n)[1:]), "the model's own tensors depend"),
        (lambda n: call(8), "no argument's dimensions"),
        (lambda n: (Rows(), (*call(n)[1], n), {}), "no tensor depends"),
        (lambda n: (Rows(), call(n)[1][:1] * n, {}), "number of arguments"),
        (lambda n: (Rows(), (torch.zeros(n, WIDTH), torch.zeros((n,) * (n - 4))), {}), "kind of an argument"),
        (lambda n: (Rows(), (torch.zeros(n, WIDTH), torch.zeros(3 * n - 12)), {}), "in different ways"),
        (lambda n: (Branches(), *call(n)[1:]), "other branches"),
    ],
    ids=["parameters", "constant", "number", "count", "rank", "ambiguous", "branch"],
)
def test_what_cannot_be_captured_says_why(build: Callable[[int], Call], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        captured(build)
