"""The pass history: in the log for who asks for it, as artifacts for who traces, and made for nobody else."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import HUGE, segmented
from torch import nn

from chunkc.torch_private import engine
from chunkc.torch_private.aot import LazyGraphModule

PHASES = ("chunkc_forward", "chunkc_backward")


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs whose code is generated."""
    names: list[str] = []
    generate = LazyGraphModule._real_recompile

    def noting(module: Any) -> Any:
        names.append(type(module).__name__)
        return generate(module)

    monkeypatch.setattr(LazyGraphModule, "_real_recompile", noting)
    return names


def train() -> None:
    torch._dynamo.reset()
    segmented(nn.Linear(64, 64), HUGE)(torch.ones(2, 64)).sum().backward()


def test_a_log_of_everything_shows_captured_and_rewritten_graphs(
    generated: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "chunkc"):
        train()
    for phase in ("forward", "backward"):
        assert f"captured {phase}:\n" in caplog.text
        assert f"{phase} with chunk nodes:\n" in caplog.text
        assert f"{phase} after pass hoist:\n" in caplog.text
    assert re.search(r"pass hoist: \d+\.\d ms, \d+ nodes -> \d+\n", caplog.text)
    assert set(PHASES) <= set(generated)


def test_a_trace_has_the_plan_and_each_rewritten_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def trace(
        kind: str, *, metadata_fn: Callable[[], dict[str, str]], payload_fn: Callable[[], str], expect_trace_id: bool
    ) -> None:
        found[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(engine, "trace_structured", trace)
    train()
    after_passes = {name for name in found if name.startswith("chunkc_pass_")}
    assert set(found) - after_passes == {"chunkc_plan", *PHASES}
    assert {"chunkc_pass_regions_graph", "chunkc_pass_partition_forward", "chunkc_pass_hoist_backward"} <= after_passes
    assert found["chunkc_plan"].startswith("plan: budget")
    assert "tangents_1" not in found["chunkc_forward"]
    assert "tangents_1" in found["chunkc_backward"]


def test_no_code_is_generated_that_nobody_reads(generated: list[str]) -> None:
    train()
    assert not set(PHASES) & set(generated)
