"""Steps in symbols: at every shape, to the byte what capturing and describing that very shape gives."""

from __future__ import annotations

from functools import cache
from timeit import repeat
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder import rungs
from zoo import LADDER

from chunkc.explaining.explain import step_on
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.ir.errors import UnsupportedError
from chunkc.machines.presets import load_hardware
from chunkc.options import parse_options
from chunkc.passes.graphs.shapes import ShapesAt
from chunkc.passes.planning.step_profile import StepProfile
from chunkc.policy.captured_step import Captured, profile
from chunkc.tracing.build import Builder
from chunkc.tracing.dynamic_shapes import Templates

TRACED = (6, 24)
"""Batch and length at which the models are traced in symbols."""

HUGE = 1 << 50


pytestmark = pytest.mark.usefixtures("two_threads")


def batch(name: str, sizes: tuple[int, int], *, dynamic: bool = False) -> dict[str, Any]:
    """The model's batch with so many rows; of tokens also so long. Values do not matter."""
    found = {}
    for key, value in LADDER[name].batch(0).items():
        shape = [sizes[0], *value.shape[1:]]
        if value.dtype == torch.int64 and value.dim() == 2:
            shape[1] = sizes[1]
        found[key] = torch.zeros(shape, dtype=value.dtype)
        for dim in range(2) if dynamic else ():
            if dim < value.dim() and shape[dim] == TRACED[dim]:
                torch._dynamo.mark_dynamic(found[key], dim)
    return found


def builder(name: str, sizes: tuple[int, int], *, dynamic: bool = False, whole: bool = False) -> Builder:
    options = parse_options({"codegen": "eager", "whole_graph": "auto" if whole else "never"})
    cpu, inputs = load_hardware("cpu"), batch(name, sizes, dynamic=dynamic)
    step = step_on(cpu, LADDER[name].build(), (), inputs, options, dynamic=dynamic)
    builder = PredictedStep(step, options, cpu).graphs[0].builder
    builder.budget_nbytes = HUGE
    return builder


@cache
def templates(name: str, whole: bool = False) -> Templates:
    return Templates(builder(name, TRACED, dynamic=True, whole=whole))


def values(known: Templates, sizes: tuple[int, int]) -> dict[Any, int]:
    """What the symbols stand for at these sizes: they were traced at different ones, by which they are told apart."""
    return {symbol: sizes[TRACED.index(traced)] for symbol, traced in known.traced.items()}


def non_model_nbytes(step: StepProfile) -> tuple[list[int], int]:
    return [position.non_model_nbytes for position in step.all], step.boundary_nbytes


def sizes_of(captured: Captured) -> tuple:
    """Everything in a captured step but its code."""
    return captured.forward, captured.backward, captured.memories


# ---------------------------------------------------------------- against captures of the very shape

SIZES = [(2, 8), (3, 17), (7, 31), (16, 32), (33, 64)]


OTHER_GRAPHS = {"t5": "traced at one size, its slices of everything vanish and equal computations become one"}
"""Their bytes in symbols are compared with measured ones alone (`test_dynamic_shapes`)."""


def num_nodes(traced: Builder) -> int:
    return len(traced.capture.forward.graph.nodes)


@pytest.mark.second_tier
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    rungs(
        ("short_gpt", "encoder", "llama", "convnet", "resnet", "lstm_cells", "autocast_gpt", "t5"),
        ("short_gpt", "encoder"),
    ),
)
def test_as_a_capture_of_the_shape(name: str, whole: bool) -> None:
    known = templates(name, whole)
    for sizes in SIZES[1::2]:
        at = values(known, sizes)
        if not known.holds(at):
            assert name == "resnet", "its convolutions are traced for small batches"
            continue
        concrete = builder(name, sizes, whole=whole)
        layout = concrete.layout
        found, expected = known.at(at), concrete.build()
        assert found.whole == expected.whole == whole
        if name in OTHER_GRAPHS:
            assert num_nodes(known.builder) != num_nodes(concrete)
            continue
        assert non_model_nbytes(profile(found, layout)) == non_model_nbytes(profile(expected, layout))


# ---------------------------------------------------------------- against descriptions at the shape


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["short_gpt", "encoder"])
@settings(max_examples=20, deadline=None)
@given(sizes=st.tuples(st.integers(2, 200), st.integers(2, 64)))
def test_as_a_description_at_the_shape(name: str, sizes: tuple[int, int]) -> None:
    """Bytes, seconds and conditions, everything; most of these sizes were never described."""
    known = templates(name)
    at = values(known, sizes)
    expected = known.builder.described(whole=False, shapes=ShapesAt(at))
    assert sizes_of(known.at(at)) == sizes_of(expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["short_gpt", "encoder"])
def test_regions_are_few(name: str) -> None:
    known = Templates(templates(name).builder)
    for num_rows in range(2, 120):
        known.at(values(known, (num_rows, 2 + num_rows % 50)))
    assert known.num_described <= 6


def test_outside_of_what_was_captured() -> None:
    known = templates("encoder")
    one = values(known, (1, 0))
    assert not known.holds(one)
    with pytest.raises(UnsupportedError, match="not captured for"):
        known.at(one)


# ---------------------------------------------------------------- moments


@pytest.mark.parametrize("name", ["short_gpt", "encoder"])
def test_moments_are_those_of_the_step(name: str) -> None:
    known = templates(name)
    for sizes in SIZES:
        at = values(known, sizes)
        template = known.template(at, whole=False)
        nbytes = template.operation_bytes.at(at)
        for moment, expression in zip(nbytes, template.operation_bytes.expressions, strict=True):
            assert moment == expression.subs(at)
        captured = known.at(at)
        layout = known.builder.layout
        step = profile(captured, layout)
        peaks = [position.non_model_nbytes for position in (*step.forward, *step.backward)]
        assert nbytes.max() == max(peaks)
        assert set(peaks) <= set(nbytes.tolist())


def test_a_new_shape_takes_under_a_millisecond() -> None:
    known = templates("short_gpt")
    template = known.template(values(known, TRACED), whole=False)
    moments, sizes = template.operation_bytes, iter(range(2, 10_000))

    def evaluate() -> None:
        at = values(known, (next(sizes), 24))
        template.holds(at)
        moments.at(at)

    assert min(repeat(evaluate, number=1, repeat=50)) < 1e-3
