"""Suites keep to their time: what would begin late does not begin."""

from __future__ import annotations

import time

import pytest
from measuring.context import Context
from measuring.subject_process import Turn, interleave
from suites import disk, fits, prediction


class Counting:
    def __init__(self) -> None:
        self.num_turns = 0

    def step(self, num_steps: int) -> Turn:
        self.num_turns += 1
        return Turn((1.0,) * num_steps, (1.0,) * num_steps, (2.0,) * num_steps, (3.0,) * num_steps, {})


def test_rounds_end_with_the_time_but_one_is_complete():
    subjects = {"a": Counting(), "b": Counting()}
    turns = interleave(subjects, num_rounds=5, num_steps=2, is_over=lambda: True)
    assert {name: len(of) for name, of in turns.items()} == {"a": 1, "b": 1}
    left = iter([False, True])
    turns = interleave(subjects, num_rounds=5, num_steps=2, is_over=lambda: next(left))
    assert len(turns["a"]) == 2


@pytest.mark.parametrize("suite", [disk, prediction])
def test_no_section_begins_when_the_time_is_up(suite, monkeypatch):
    def begun(*arguments: object) -> None:
        raise AssertionError("a section began")

    monkeypatch.setattr(suite, "_section", begun)
    context = Context(True, "cpu", lambda *shown: None, deadline_s=time.monotonic() - 1)
    assert list(suite.run(context)) == []


def test_starts_are_left_out_when_the_steps_took_all_the_time(monkeypatch):
    monkeypatch.setattr(fits, "_steps", lambda *arguments: "steps")
    monkeypatch.setattr(fits, "_starts", lambda title, size, *arguments: (title, size.model.num_layers))
    monkeypatch.setattr(fits, "_second_starts", lambda *arguments: "second")

    def sections(deadline_s: float) -> list[object]:
        return list(fits.run(Context(True, "cpu", lambda *shown: None, deadline_s=deadline_s)))

    layers = fits.SMALL.model.num_layers
    cold = [(fits.COLD, layers), (fits.COLD, 2 * layers)]
    assert sections(time.monotonic() + 100) == ["steps", *cold, "second"]
    assert sections(time.monotonic() - 1) == ["steps"]
