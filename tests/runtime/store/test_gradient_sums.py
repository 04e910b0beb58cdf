"""Sums of squares of gradients: what is said where home has no room for them."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from chunkc.ir.errors import HomeError
from chunkc.ir.layout import ParamSpec
from chunkc.kernels.row_sums_cpu import sum_squares
from chunkc.passes.planning.layout import lay_out
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.store.gradient_sums import GradientSums, request_sums


def take(sums: GradientSums) -> Any:
    group = lay_out([ParamSpec("up.weight", (300,), (1,), torch.float32, trainable=True)], 1 << 16).groups[0]
    gradient = torch.ones(300)
    sums.take(group, torch.ones(group.numel), {"up.weight": gradient}, CpuTier())
    return sums.of("up.weight", gradient, since=0)


def test_a_home_without_room_for_sums_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    full = Mock(allocate=Mock(side_effect=HomeError("cannot reserve 48 bytes")))
    lacking, asker = GradientSums(full), torch.nn.Identity()
    request_sums(asker, [lacking], sum_squares)
    with caplog.at_level(logging.INFO, "chunkc"):
        assert take(lacking) is None
        assert take(lacking) is None
    (said,) = caplog.messages
    assert "no room for the sums of squares of up.weight's gradients: cannot reserve 48 bytes" in said
    assert "report.gradients_read_nbytes" in said
    assert "use another home" in said


def test_with_room_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    sums, asker = GradientSums(MemoryHome()), torch.nn.Identity()
    request_sums(asker, [sums], sum_squares)
    with caplog.at_level(logging.INFO, "chunkc"):
        assert float(take(sums).sum()) == 300
    assert not caplog.messages
