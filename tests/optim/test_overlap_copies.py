"""Copies of a model whose updates are under way: whole after `synchronize`, else of two steps; `state_dict` waits.

A module is copied and saved past every optimizer, tensor by tensor, from home; nothing there could make it wait. For
`state_dict` alone modules have hooks.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import array
from optim_models import through_a_file
from overlap_cases import Subject, subject
from torch import Tensor, nn

import chunkc
from chunkc.kernels.formats import GradScale
from chunkc.optim import elementwise
from chunkc.optim.elementwise import ElementwiseRule, clipped, update_on_cpu
from chunkc.optim.rule import Extent, Spans

pytestmark = pytest.mark.timeout(120)

SHORT_S, LONG_S = 0.1, 20.0
WEIGHT = "layers.0.weight"


class Halves:
    """Updates at home in two halves, between which they stand still until they are told to go on."""

    def __init__(self) -> None:
        self.half_done, self.going_on = threading.Event(), threading.Event()

    def __call__(
        self, rule: ElementwiseRule, flat: dict[str, Tensor], spans: Spans, scale: GradScale, extent: Extent
    ) -> None:
        numel = flat["param"].numel()
        half = numel // 2
        update_on_cpu(rule, part(flat, 0, half), clipped(spans, 0, half), scale, extent)
        self.half_done.set()
        assert self.going_on.wait(LONG_S), "nobody said so"
        later = Extent(extent.chunk, extent.first_element + half)
        update_on_cpu(rule, part(flat, half, numel), clipped(spans, half, numel), scale, later)


def part(flat: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    return {kind: tensor[begin:end] for kind, tensor in flat.items()}


def deepcopy(model: nn.Module) -> Tensor:
    return copy.deepcopy(model).get_parameter(WEIGHT)


def save_model(model: nn.Module) -> Tensor:
    return through_a_file(model).get_parameter(WEIGHT)


def copied(
    made: Subject,
    ways: list[Callable[[nn.Module], Tensor]],
    patch: pytest.MonkeyPatch,
    wait: Callable[[nn.Module], object] | None,
    *,
    stands: bool = False,
) -> Any:
    """The weight before a step, in copies made while its update goes on, after `wait`, and after it.

    `stands`: the update stands still until the copies are made.
    """
    made.train(range(1), reading=False)
    made.optimizer.synchronize()
    before = array(made.model.get_parameter(WEIGHT)).ravel()
    halves = Halves()
    patch.setattr(elementwise, "update_on_cpu", halves)
    made.backward(1)
    made.optimizer.step()
    assert halves.half_done.wait(LONG_S)
    if not stands:
        threading.Timer(SHORT_S, halves.going_on.set).start()
    if wait is not None:
        wait(made.model)
    found = [array(way(made.model)).ravel() for way in ways]
    halves.going_on.set()
    chunkc.synchronize(made.model)
    return before, found, array(made.model.get_parameter(WEIGHT)).ravel()


@pytest.mark.second_tier
@pytest.mark.parametrize("waits", [True, False], ids=["synchronized", "not synchronized"])
def test_a_copy_of_the_model_waits_for_synchronize_only(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = chunkc.synchronize if waits else None
    before, found, after = copied(subject("forward"), [deepcopy, save_model], monkeypatch, wait, stands=not waits)
    half = after.size // 2
    assert (before[:half] != after[:half]).any()
    assert (before[half:] != after[half:]).any()
    for values in found:
        assert np.array_equal(values, after if waits else np.concatenate([after[:half], before[half:]]))


@pytest.mark.parametrize("of", ["model", "compiled model", "module"])
def test_a_state_dict_waits_by_itself(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject("forward")
    whose = {"model": made.model, "compiled model": made.compiled, "module": made.model.get_submodule("layers.0")}[of]
    prefix = {"model": "layers.0.", "compiled model": "_orig_mod.layers.0.", "module": ""}[of]
    ways = [lambda _: through_a_file(whose.state_dict())[f"{prefix}weight"]]
    before, (found,), after = copied(made, ways, monkeypatch, None)
    assert (before != after).any()
    assert np.array_equal(found, after)
