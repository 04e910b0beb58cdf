"""The argument `overlap`: what each value stands for, and which make sense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chunkc
from chunkc.optim.update_mode import UpdateMode


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [("none", False, False), ("forward", True, False), ("backward", False, True), ("both", True, True)],
)
def test_what_updates_run_beside(mode: str, forward: bool, backward: bool) -> None:
    found = UpdateMode(mode, "cpu")
    assert (found.in_forward, found.in_backward) == (forward, backward)


def test_only_what_makes_sense_is_taken() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(chunkc.OptionsError, match='"none", "forward", "backward", "both"'):
        chunkc.optim.AdamW(parameters, update_on="cpu", overlap="always")
    with pytest.raises(chunkc.OptionsError, match='use update_on="cpu" or "auto"'):
        chunkc.optim.AdamW(parameters, overlap="forward")
