"""Predicted bytes against the allocator's on a ladder of models: every operation of a training step, not only the peak.

With `codegen="eager"` all agree to the byte, but for operators in `scratch.operators.EXCEPTIONS`, which keep their
bound. `test_prediction_inductor.py` is about `codegen="inductor"`.
"""

from __future__ import annotations

import pytest
import torch
from ladder import describe, inexact, is_exception, rungs
from memory_curves import PhaseCurve, step_curves
from zoo import LADDER

SEVERAL_GRAPHS = ("graph_breaks", "breaks_in_loop")
"""Models whose graphs hand values to each other, which are counted longer than Python holds them."""

LOW_PRECISION = ("autocast_gpt", "autocast_convnet")
"""Models whose peak is a product or convolution in bfloat16, exceptions to the byte."""

TO_THE_BYTE = tuple(name for name in LADDER if name not in (*SEVERAL_GRAPHS, "lstm"))
IN_FLOAT32 = tuple(name for name in TO_THE_BYTE if name not in LOW_PRECISION)


CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward")

QUICK = (
    "gpt2_dropout", "t5", "convnet", "short_gpt", "frozen_mlp", "called_twice", "encoder", "sometimes_unused",
    "resnet", "convnext", "lstm_cells", "unet", "dropout", "checkpointed_gpt", "autocast_gpt", "odd_layouts",
)  # fmt: skip
"""The part of the ladder that the default run climbs; the rest is slow."""


pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.second_tier
@pytest.mark.parametrize("name", rungs(TO_THE_BYTE, QUICK))
def test_every_operation_to_the_byte(name: str) -> None:
    """Two phases; what is charged beside the graph is the same before both: saved values are predicted exactly too."""
    forward, backward = step_curves(LADDER[name], "eager", whole_graph="never")
    assert (forward.phase, backward.phase) == ("forward", "backward")
    for curve in (forward, backward):
        wrong = inexact(curve.moments)
        assert not wrong, describe(wrong)
        assert len(curve.moments) > 5
        exceptions = [m for m in curve.moments if is_exception(m)]
        if not any(m.excess_nbytes for m in exceptions):
            assert curve.predicted_peak_nbytes == curve.measured_peak_nbytes
    assert forward.base_nbytes == backward.base_nbytes + dropped_nbytes(forward, backward)


def dropped_nbytes(forward: PhaseCurve, backward: PhaseCurve) -> int:
    """New values of integer buffers, which the backward never sees, and AOTAutograd drops after copying them."""
    dropped = forward.base_nbytes - backward.base_nbytes
    assert 0 <= dropped < 512, "only batch normalisation's step counters, 8 bytes each"
    return dropped


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_one_thread_to_the_byte(name: str) -> None:
    """Every moment of a graph run whole: without a second thread, only convolutions of the ladder are exceptions."""
    torch.set_num_threads(1)
    for curve in step_curves(LADDER[name], "eager", whole_graph="auto"):
        wrong = [m for m in curve.moments if m.excess_nbytes < 0 or (m.excess_nbytes and m.op not in CONVOLUTIONS)]
        assert not wrong, describe(wrong)


@pytest.mark.parametrize("name", rungs(SEVERAL_GRAPHS, ["breaks_in_loop"]))
def test_several_graphs_keep_the_bound(name: str) -> None:
    """Never too little; forwards are exact."""
    curves = step_curves(LADDER[name], "eager", whole_graph="never")
    assert len(curves) >= 4
    for curve in curves:
        wrong = [m for m in curve.moments if m.excess_nbytes < 0 or (curve.phase == "forward" and m.excess_nbytes)]
        assert not wrong, describe(wrong)


def test_nn_lstm_is_not_captured() -> None:
    """Dynamo skips a forward that calls `nn.LSTM` (unless told to allow it): all of it runs eagerly, without a plan."""
    assert step_curves(LADDER["lstm"], "eager", whole_graph="never") == []
