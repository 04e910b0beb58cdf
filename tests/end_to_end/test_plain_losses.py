"""The whole ladder beside plain PyTorch: losses of training inside a hard limit, with room for a part of the model.

Eager segments draw random numbers as eager PyTorch does; orders of sums differ.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import TINY, TRACING_NBYTES, Result, array, in_a_small_budget, train
from zoo import LADDER, Case

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 3
SECOND_TIER = ("sometimes_unused", "graph_breaks")


def plain_losses(case: Case) -> list[np.ndarray]:
    """What the loop of `harness.train` gives in plain PyTorch."""
    model = case.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    torch.manual_seed(0)
    losses = []
    for step in range(STEPS):
        loss = case.loss(model(**case.batch(step)))
        loss.backward()
        losses.append(array(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.second_tier if n in SECOND_TIER else pytest.mark.slow) for n in LADDER],
)
def test_losses_are_those_of_plain_pytorch(name: str) -> None:
    case = LADDER[name]

    def run(budget: int) -> Result:  # a batch alone is more than the first, which asks for the smallest
        return train(case, memory_budget=budget, limit=budget > 2 * TINY, steps=STEPS, whole_graph="never")

    found = in_a_small_budget(run)
    assert found.measured_peak_nbytes <= found.predicted_peak_nbytes + TRACING_NBYTES
    tolerance = 2e-2 if "autocast" in name else 1e-3  # bf16 has 8 bits
    np.testing.assert_allclose(found.losses, plain_losses(case), rtol=tolerance)
