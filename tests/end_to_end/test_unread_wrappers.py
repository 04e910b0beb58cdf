"""Code of Inductor's that chunkc cannot read, as of a PyTorch that nobody has checked yet: its memory is bounded from
the graph, and everybody who asks hears that it is a guess."""

from __future__ import annotations

import logging

import pytest
import torch
from harness import HUGE, assert_same_training, compile_case, refuse, train
from zoo import CASES

import chunkc
from chunkc.passes.memory.inductor import memory, wrapper_source
from chunkc.torch_private import compile_cache, versions

CASE = CASES["frozen_mlp"]
UNREAD = "Inductor's code, which uses assert_size_stride"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are read off wrappers by this process: those that are kept depend on names, which the tests change."""
    monkeypatch.setattr(compile_cache, "is_on", lambda: False)


@pytest.fixture
def unknown_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said anything of the functions that look at tensors."""
    monkeypatch.setattr(memory, "CHECKS", frozenset())


@pytest.mark.second_tier
def test_it_trains_inside_its_smallest_budget_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = train(CASE, memory_budget=HUGE, codegen="inductor", limit=False, whole_graph="never")
    monkeypatch.setattr(memory, "CHECKS", frozenset())
    budget_nbytes = refuse(CASE, memory_budget=1, codegen="inductor").minimum_nbytes
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        tight = train(CASE, memory_budget=budget_nbytes, codegen="inductor", whole_graph="never")  # a hard limit
    assert_same_training(tight, read)
    assert tight.measured_peak_nbytes <= budget_nbytes
    warnings = {record.getMessage() for record in caplog.records if UNREAD in record.getMessage()}
    assert warnings
    assert all("all values of its graph at once" in text and '"codegen": "eager"' in text for text in warnings)


@pytest.mark.second_tier
@pytest.mark.usefixtures("unknown_checks")
def test_strict_refuses_and_the_report_and_the_explanation_list_it() -> None:
    model, compiled = compile_case(CASE, memory_budget=HUGE, codegen="inductor")
    compiled(**CASE.batch(0)).backward()
    explained = chunkc.explain(model, **CASE.batch(0), codegen="inductor")
    for estimates in (chunkc.report(compiled).estimates, explained.estimates):
        assert estimates
        assert all(estimate.operator.startswith(UNREAD) for estimate in estimates)
    _, strict = compile_case(CASE, memory_budget=HUGE, codegen="inductor", strict=True)
    with pytest.raises(chunkc.UnsupportedError, match=r'assert_size_stride.*strict=True refuses.*"codegen": "eager"'):
        strict(**CASE.batch(0))


def test_steps_of_inductor_that_changed_are_no_error_on_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*args: object) -> None:
        raise TypeError("lower() got an unexpected keyword argument")

    monkeypatch.setattr(wrapper_source, "generate_wrapper", changed)
    monkeypatch.setattr(wrapper_source, "newer_than_checked", lambda: None)
    model = CASE.build(0)
    with pytest.raises(chunkc.UnsupportedError, match=r"TypeError: lower\(\)"):
        chunkc.explain(model, **CASE.batch(0), codegen="inductor")
    monkeypatch.setattr(wrapper_source, "newer_than_checked", lambda: versions.newer_than_checked("2.99.0"))
    explained = chunkc.explain(model, **CASE.batch(0), codegen="inductor")
    assert {e.operator for e in explained.estimates} == {"Inductor's code, which has no function `call`"}


def test_a_newer_version_gets_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(versions, "newer_than_checked", lambda: "newer")
    versions.warn_if_newer.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="chunkc"):
            for _ in range(2):
                _, compiled = compile_case(CASE, memory_budget=HUGE, codegen="eager")
                assert torch.isfinite(compiled(**CASE.batch(0)))
    finally:
        versions.warn_if_newer.cache_clear()
    assert [record.getMessage() for record in caplog.records] == ["newer"]
