"""Plans of two revisions, compared."""

from __future__ import annotations

import pytest
import replay

FOUND = {"smallest budget": {"fits": False, "minimum_budget_nbytes": 7, "events": ["to_device prefetch param:0 4"]}}


def test_equal_plans_do_not_differ() -> None:
    assert list(replay.differences("gpt2", FOUND, FOUND)) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"minimum_budget_nbytes": 8}, "minimum_budget_nbytes: 7 at the base, 8 here"),
        ({"fits": True}, "fits: False at the base, True here"),
        ({"events": []}, "events: 1 lines differ"),
        ({"error": "BudgetError"}, "error: None at the base, BudgetError here"),
    ],
)
def test_each_difference_is_named(changed: dict[str, object], named: str) -> None:
    head = {"smallest budget": FOUND["smallest budget"] | changed}
    (line,) = replay.differences("gpt2", FOUND, head)
    assert line.startswith("gpt2, smallest budget: ")
    assert named in line


def test_a_budget_that_only_one_revision_planned_is_named() -> None:
    assert [line.split(":")[0] for line in replay.differences("gpt2", {}, FOUND)] == ["gpt2, smallest budget"] * 3


def test_cases_have_names_of_their_own() -> None:
    for cases in (list(replay.all_cases()), list(replay.small_cases())):
        assert len({case.name for case in cases}) == len(cases) >= 5


@pytest.mark.second_tier
def test_this_checkout_plans_as_its_base_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["--small", "--jobs", "1"]) == 0, capsys.readouterr().out
