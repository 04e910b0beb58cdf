"""A budget that is too small: the error names what would do, and the model is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import TINY, compile_case, everything_fits, minimum_nbytes, refuse
from zoo import CASES

import chunkc


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "home"),
    [
        *((name, "cpu") for name in ("byte_gpt", "convnet", "frozen_mlp", "big_embedding", "encoder")),
        ("gpt2", "disk"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("gpt2", "cpu"), ("t5", "cpu"), ("t5", "disk"))),
    ],
)
def test_the_minimum_is_small_and_one_byte_less_does_not_work(name: str, home: str) -> None:
    """The minimum itself works: `tests/properties/test_ladder.py`."""
    minimum = minimum_nbytes(name, home)
    if (name, home) in {(of, "cpu") for of in ("byte_gpt", "big_embedding", "gpt2")}:
        assert minimum < 0.7 * everything_fits(name).predicted_peak_nbytes
    assert refuse(CASES[name], memory_budget=minimum - 1, home=home).minimum_nbytes == minimum


def test_the_error_says_where_and_what() -> None:
    error = refuse(CASES["byte_gpt"], memory_budget=TINY)
    assert error.budget_nbytes == TINY
    assert error.moment
    sizes = [nbytes for _, nbytes in error.contents]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sum(sizes) <= error.minimum_nbytes
    assert all(label.strip() for label, _ in error.contents)
    for part in (error.moment, error.module, f"{error.minimum_nbytes:,}", f"{TINY:,}", error.contents[0][0]):
        assert part in str(error)


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    """Refused before anything is moved: not even the home's file exists."""
    case = CASES["byte_gpt"]
    _, compiled = compile_case(case, memory_budget=TINY, home=f"disk:{tmp_path}", place=False)
    with pytest.raises(chunkc.BudgetError):
        compiled(**case.batch(0))
    assert list(tmp_path.iterdir()) == []
