"""Scalars of steps behind steps of which only the device knows whether they happened."""

from __future__ import annotations

import itertools

import pytest
import torch

from chunkc.optim import pending_steps
from chunkc.optim.pending_steps import PendingSteps, decided


class Unanswered:
    """A number that the host is told when it waits."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number.clone()

    def arrived(self) -> bool:
        return False

    def read(self) -> float:
        return float(self._number)


@pytest.mark.parametrize("skipped", itertools.product((0.0, 1.0), repeat=3))
def test_the_device_takes_the_number_that_the_host_is_told_later(
    monkeypatch: pytest.MonkeyPatch, skipped: tuple[float, ...]
) -> None:
    """The second parameter has no gradient in the second step."""
    monkeypatch.setattr(pending_steps, "Answer", Unanswered)
    pending, parameters = PendingSteps(), [torch.zeros(1), torch.zeros(1)]
    states = {parameter: {"step": torch.zeros(())} for parameter in parameters}

    def count(parameter: torch.Tensor) -> object:
        states[parameter]["step"].add_(1)
        return pending.hyper(parameter, int(states[parameter]["step"]), float)

    for number, found_inf in enumerate(skipped):
        of_step = parameters[: 1 if number == 1 else 2]
        for parameter in of_step:
            count(parameter)
        pending.add(torch.tensor(found_inf), {parameter: states[parameter] for parameter in of_step})
    rows = decided(
        [count(parameter) for parameter in parameters],
        lambda hypers: torch.tensor(hypers)[:, None],
        lambda table: table,
    )
    pending.resolve(wait=True)
    assert rows.flatten().tolist() == [float(states[parameter]["step"]) for parameter in parameters]
    assert rows[0].item() == 1 + skipped.count(0)
