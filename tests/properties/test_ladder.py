"""A budget moves data and changes no bit: models, homes, code generators, budgets, activation plans, updates, copies.

Each cell of the grid trains three steps inside a hard limit of its budget, and is compared with the same model where
everything fits and stays. Measured bytes never exceed predicted ones, nor these the budget, and afterwards nothing is
left. The sample has every pair of values of two axes in some cell.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import HUGE, Result, assert_same_training, train
from late_tiers import LateTier, tier_of_new_sessions
from zoo import DEEP, LADDER, Case

import chunkc
from chunkc.explaining.explain import minimum_budget
from chunkc.explaining.optimizer_choice import OptimizerChoice
from chunkc.runtime.device.tier import CpuTier

MODELS: Mapping[str, Case] = {name: case for name, case in (LADDER | DEEP).items() if case.num_graphs}


class Cell(NamedTuple):
    """A way to train a model.

    Attributes:
        percent: of the way from the smallest budget, 0, to the one in which everything stays, 100.
        updates: where groups are updated, and during which other work.
        copies: "prompt", "late": at the wait for each, or "random": after 0 to 5 ms.
    """

    model: str
    home: str
    codegen: str
    percent: int
    activations: str
    updates: str
    optimizer: str
    copies: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(chunkc.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "lamb": functools.partial(chunkc.optim.LAMB, lr=1e-3, weight_decay=0.1),
    "sgd": functools.partial(chunkc.optim.SGD, lr=1e-2, momentum=0.9),
}

UPDATES: Mapping[str, Mapping[str, str]] = {
    "after": {},
    "backward": {"overlap": "backward"},
    "cpu": {"update_on": "cpu", "overlap": "forward"},
    "both": {"update_on": "cpu", "overlap": "both"},
}


def _random_delays() -> CpuTier:
    generator = random.Random(0)
    return CpuTier(delay=lambda: generator.uniform(0, 0.005))


TIERS: Mapping[str, Callable[[], CpuTier] | None] = {"prompt": None, "late": LateTier, "random": _random_delays}

CODEGENS = ("eager", "inductor")

AXES = (
    tuple(MODELS),
    ("cpu", "disk"),
    CODEGENS,
    (0, 30, 60, 100),
    ("keep", "auto", "offload", "rerun"),
    tuple(UPDATES),
    tuple(OPTIMIZERS),
    tuple(TIERS),
)


def is_possible(cell: Cell) -> bool:
    """Updates by the CPU happen where home is, and not on a disk."""
    return not (cell.home == "disk" and UPDATES[cell.updates].get("update_on") == "cpu")


def sample() -> Iterator[Cell]:
    """Yield cells of which each has the most pairs of values, of some candidates, that no cell before it has."""
    generator = random.Random(0)

    def pairs(cell: Cell) -> set[tuple[Any, ...]]:
        return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations(range(len(AXES)), 2)}

    def candidates(axis: int, value: Any, other: int, second: Any) -> Iterator[Cell]:
        for _ in range(40):
            cell = [generator.choice(values) for values in AXES]
            cell[axis], cell[other] = value, second
            yield Cell(*cell)

    missing = {
        (a, value, b, other)
        for a, b in itertools.combinations(range(len(AXES)), 2)
        for value, other in itertools.product(AXES[a], AXES[b])
    }
    while missing:
        pair = min(missing, key=str)
        missing.remove(pair)  # where no cell can have it
        if cells := [cell for cell in candidates(*pair) if is_possible(cell)]:
            cell = max(cells, key=lambda cell: len(pairs(cell) & missing))
            missing -= pairs(cell)
            yield cell


CELLS = list(sample())


def tiers(codegen: str, models: Collection[str], *, quick: int) -> list[Any]:
    """Sort the cells of a code generator into tiers. Few are in the quick tests and the second tier, of `models` alone:
    each has the most values that no cell before it has, until every value of every other axis is in one of them."""
    cells, chosen = [cell for cell in CELLS if cell.codegen == codegen], list[Cell]()
    others = [axis for axis in range(1, len(AXES)) if AXES[axis] != CODEGENS]
    missing = {(axis, value) for axis in others for value in AXES[axis]}
    candidates = [cell for cell in cells if cell.model in models]
    while missing:
        cell = max(candidates, key=lambda cell: len(missing & set(enumerate(cell))))
        chosen.append(cell)
        missing -= set(enumerate(cell))
    marks = {cell: [] if number < quick else [pytest.mark.second_tier] for number, cell in enumerate(chosen)}
    return [pytest.param(cell, marks=marks.get(cell, [pytest.mark.slow]), id=str(cell)) for cell in cells]


TIGHT_GENERATED = next(cell for cell in CELLS if cell[:4] == ("byte_gpt", "cpu", "inductor", 0))
"""In the second tier: a model that Inductor compiles quickly, in its smallest budget."""

QUICKLY_TRACED = ("byte_gpt", "dropout", "gpt2_dropout", "llama_tied", "frozen_mlp", "odd_layouts", "convnet")


@pytest.mark.parametrize("cell", tiers("eager", QUICKLY_TRACED, quick=2))
def test_eager_segments_train_to_the_same_bits_within_every_budget(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=pytest.mark.second_tier if cell == TIGHT_GENERATED else pytest.mark.slow, id=str(cell))
        for cell in CELLS
        if cell.codegen == "inductor"
    ],
)
def test_generated_segments_train_to_the_same_bits_within_every_budget(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


def check(cell: Cell, tmp_path: Path) -> None:
    case, home = MODELS[cell.model], f"disk:{tmp_path}" if cell.home == "disk" else "cpu"
    least = smallest_nbytes(cell.model, cell.codegen, cell.activations, cell.optimizer, cell.updates)
    most = fitting(cell).predicted_peak_nbytes
    budget = least + max(0, most - least) * cell.percent // 100
    factory, optimizer = TIERS[cell.copies], functools.partial(OPTIMIZERS[cell.optimizer], **UPDATES[cell.updates])
    tier: AbstractContextManager[None] = nullcontext() if factory is None else tier_of_new_sessions(factory)
    with tier:
        result = train(
            case, memory_budget=budget, home=home, codegen=cell.codegen, activations=cell.activations,
            optimizer=optimizer, with_grads=False, whole_graph="never", debug=cell.copies != "prompt",
        )  # fmt: skip
    assert_same_training(result, fitting(cell))
    assert result.measured_peak_nbytes <= result.predicted_peak_nbytes <= budget
    assert result.allocator_peak_nbytes <= budget
    assert_nothing_is_left(tmp_path)


def assert_nothing_is_left(folder: Path) -> None:
    torch._dynamo.reset()
    gc.collect()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    assert not [path for link in links if link.is_symlink() and (path := os.readlink(link)).startswith(str(folder))]
    assert not list(folder.iterdir())


def fitting(cell: Cell) -> Result:
    return _fitting(cell.model, cell.codegen, cell.optimizer)


@functools.cache
def _fitting(model: str, codegen: str, optimizer: str) -> Result:
    """The reference: all stays, in the segments of a small budget."""
    return train(
        MODELS[model], memory_budget=HUGE, codegen=codegen, limit=False, optimizer=OPTIMIZERS[optimizer],
        with_grads=False, whole_graph="never", activations="keep",
    )  # fmt: skip


@functools.cache
def smallest_nbytes(
    model: str, codegen: str, activations: str, optimizer: str = "adamw", updates: str = "after"
) -> int:
    """The smallest budget in which a model trains, as `explain` says."""
    case, settings = MODELS[model], {"momentum": 0.9} if optimizer == "sgd" else {}
    choice = OptimizerChoice(optimizer=optimizer, **settings, **UPDATES[updates])
    return minimum_budget(
        case.build(), **case.batch(0), memory_budget=1, codegen=codegen, activations=activations, choice=choice
    )


@pytest.mark.parametrize(
    ("model", "codegen"),
    [
        pytest.param(
            model,
            codegen,
            marks=pytest.mark.second_tier if (model, codegen) == ("deep_gpt", "eager") else pytest.mark.slow,
        )
        for model in DEEP
        for codegen in CODEGENS
    ],
)
def test_half_of_the_memory_is_enough(model: str, codegen: str) -> None:
    """The cells above mean something: the smallest budgets are well below that of a model that keeps all its values."""
    kept = smallest_nbytes(model, codegen, "keep")
    assert all(
        smallest_nbytes(model, codegen, activations) <= kept // 2 for activations in ("auto", "offload", "rerun")
    )
