"""The suite `promise`: which model it takes, what it tries after a failure, and what a run cut short keeps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_subject import FakeSubject
from measuring.context import Context
from measuring.small_run import run_small
from measuring.subject_process import DoesNotFit, OutOfMemory, SubjectFailed, TimedOut
from peers.specs import SubjectSpec
from suites import budget, promise
from suites.promise import Attempt, next_attempt

CONTEXT = Context(is_small=False, device="cuda", show=lambda *_: None)
CASES = promise.cases(CONTEXT)
SMALLEST = CASES[-1]


@pytest.mark.parametrize(
    ("available_gb", "s_per_gib", "name"),
    [
        (118.5, 0.79, "llama3-8b@6GB"),
        (118.0, 0.1, "gpt-4b@6GB"),
        (125.0, 0.81, "gpt-4b@6GB"),
        (125.0, None, "gpt-4b@6GB"),  # not known
        (125.0, 2.0, "gpt-1b@6GB"),
        (40.0, 0.1, "gpt-1b@6GB"),
        (4.0, 9.0, "gpt-1b@6GB"),
    ],
)
def test_the_largest_model_that_fits_and_is_soon_pinned(available_gb: float, s_per_gib: float | None, name: str):
    case, reason = promise.choose(CASES, s_per_gib, int(available_gb * 1e9))
    assert case.name == name
    assert (reason == "the largest") == (case == CASES[0])


@pytest.mark.parametrize(
    ("attempt", "error", "seconds", "expected"),
    [
        (Attempt(CASES[0], "inductor"), SubjectFailed("x"), 149.0, Attempt(CASES[0], "eager")),
        (Attempt(CASES[0], "inductor"), SubjectFailed("x"), 151.0, Attempt(SMALLEST, "inductor")),
        (Attempt(CASES[0], "inductor"), TimedOut("x"), 260.0, Attempt(SMALLEST, "inductor")),
        (Attempt(CASES[0], "eager"), SubjectFailed("x"), 9.0, Attempt(SMALLEST, "inductor")),
        (Attempt(CASES[0], "inductor"), OutOfMemory("x"), 9.0, Attempt(CASES[0], "inductor", is_limited=False)),
        (Attempt(CASES[0], "inductor", is_limited=False), OutOfMemory("x"), 9.0, Attempt(SMALLEST, "inductor")),
        (Attempt(CASES[1], "inductor"), DoesNotFit(7), 9.0, Attempt(SMALLEST, "inductor")),
        (Attempt(SMALLEST, "inductor"), SubjectFailed("x"), 9.0, Attempt(SMALLEST, "eager")),
        (Attempt(SMALLEST, "eager"), SubjectFailed("x"), 9.0, None),
        (Attempt(SMALLEST, "inductor"), DoesNotFit(7), 9.0, None),
    ],
)
def test_what_is_tried_after_a_failure(attempt: Attempt, error: Exception, seconds: float, expected: Attempt | None):
    assert next_attempt(attempt, error, seconds, SMALLEST) == expected


class _Fake(FakeSubject):
    """By the suite's clock; `wrong` raises at the call of that number."""

    now_s = 0.0
    wrong: tuple[dict[int, Exception], ...] = ()
    made: list[SubjectSpec]
    said: list[str]

    def __init__(self, spec: SubjectSpec, _cache: Path, *, timeout_s: Any) -> None:
        super().__init__(spec, _cache, timeout_s=timeout_s)
        self.errors = _Fake.wrong[len(_Fake.made)] if len(_Fake.made) < len(_Fake.wrong) else {}
        _Fake.made.append(spec)

    def ask(self, command: str) -> dict[str, Any]:
        _Fake.said.append(command)
        return {}

    def begin_step(self, num_steps: int) -> dict[str, float]:
        _Fake.now_s += num_steps
        if self.num_calls in self.errors:
            raise self.errors[self.num_calls]
        return dict.fromkeys(("to_device_nbytes", "to_home_nbytes", "wait_s", "host_s"), 8.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[_Fake]:
    monkeypatch.setattr(promise, "SubjectProcess", _Fake)
    monkeypatch.setattr(promise, "available_ram_nbytes", lambda: 10**12)
    monkeypatch.setattr("time.monotonic", lambda: _Fake.now_s)
    monkeypatch.setattr(_Fake, "now_s", 0.0)
    monkeypatch.setattr(_Fake, "wrong", ())
    monkeypatch.setattr(_Fake, "made", [], raising=False)
    monkeypatch.setattr(_Fake, "said", [], raising=False)
    return _Fake


def _sections(tmp_path: Path, seconds: float = 1000.0) -> list[dict[str, Any]]:
    facts = tmp_path / "facts.json"
    figures = {"nbytes": 2**33, "s_per_gib": 0.3}
    facts.write_text(json.dumps({"facts": [{"status": "PASS", "name": "register-8", "figures": figures}]}))
    context = replace(CONTEXT, deadline_s=seconds, facts=facts)
    return [section.to_json() for section in promise.run(context)]


def test_the_report_is_there_after_the_first_steps_and_grows(fake: type[_Fake], tmp_path: Path):
    sections = _sections(tmp_path)
    assert {section["title"] for section in sections} == {"llama3-8b@6GB, inductor"}
    assert sections[0]["rows"][0]["metrics"]["measured peak"]["median"] == 90
    assert "step" not in sections[0]["rows"][0]["metrics"]
    counts = [len(s["rows"][0]["metrics"]["step"]["samples"]) for s in sections[1:]]
    assert counts == [*range(2, 2 * promise.MAX_TURNS + 1, 2), 2 * promise.MAX_TURNS]
    assert fake.said == ["lift"]
    held, lifted = sections[-1]["rows"]
    assert (held["labels"]["allocator"], lifted["labels"]["allocator"]) == ("held to the budget", "limit lifted")
    assert lifted["metrics"]["allocator's retries"]["median"] > held["metrics"]["allocator's retries"]["median"]
    assert held["metrics"]["both ways"]["median"] == 16.0
    assert fake.made[0].limit_nbytes == 6 * budget.GB


def test_a_deadline_inside_a_turn_keeps_what_was_before(fake: type[_Fake], tmp_path: Path):
    fake.wrong = ({3: TimedOut("no answer within 1 s:\nlog")},)  # after the first steps, and one of the turn
    sections = _sections(tmp_path, seconds=4.0)
    row = sections[-1]["rows"][0]
    assert (row["note"], row.get("is_failure")) == ("the time was up", None)
    assert row["metrics"]["step"]["samples"] == [1.0]
    assert row["metrics"]["measured peak"]["median"] == 90


def test_attempts_until_one_succeeds(fake: type[_Fake], tmp_path: Path):
    failed, full = SubjectFailed("it ended\nRuntimeError: no"), OutOfMemory("full")
    fake.wrong = ({1: failed}, {1: full}, {1: full})
    titles = list(dict.fromkeys(section["title"] for section in _sections(tmp_path)))
    assert titles == [
        "llama3-8b@6GB, inductor",
        "llama3-8b@6GB, eager",
        "llama3-8b@6GB, eager, no limit",
        "gpt-1b@6GB, inductor",
    ]
    assert [spec.limit_nbytes for spec in fake.made] == [6 * budget.GB, 6 * budget.GB, None, 6 * budget.GB]


@pytest.mark.slow
def test_for_real(tmp_path: Path):
    (section,) = run_small("promise", tmp_path)
    held, lifted = section["rows"]
    assert held["metrics"]["measured peak"]["median"] <= section["setting"]["budget_nbytes"]
    assert held["metrics"]["moved in"]["median"] > 0
    assert lifted["metrics"]["step"]["samples"]
