"""Errors keep what they say, also through a pickle, and can be caught by their ordinary bases."""

from __future__ import annotations

import copy
import errno
import pickle
from dataclasses import replace

import pytest
from accelerate.utils.memory import should_reduce_batch_size

from chunkc.ir import errors


def budget_error() -> errors.BudgetError:
    return errors.BudgetError(
        minimum_nbytes=3 * 2**20,
        budget_nbytes=2**20,
        moment="aten.mm (forward.3)",
        module="h.3.mlp",
        contents=[("activations", 2 * 2**20), ("chunk param:3", 2**20)],
    )


def test_a_budget_error_names_all_that_matters() -> None:
    message = str(budget_error())
    for part in (
        "1.00 MiB (1,048,576 bytes)",
        "3.00 MiB (3,145,728 bytes)",
        "aten.mm (forward.3) in h.3.mlp",
    ):
        assert part in message
    *lines, last = message.splitlines()[1:]
    assert [line.split(")")[-1].strip() for line in lines] == ["activations", "chunk param:3"]
    assert should_reduce_batch_size(budget_error()), last


def test_a_budget_error_at_no_module_of_the_model_names_the_model() -> None:
    error = errors.BudgetError(minimum_nbytes=2, budget_nbytes=1, moment="aten.mm", module="", contents=[])
    assert "at aten.mm in the model, filled" in str(error)


def test_a_budget_error_says_what_its_minimum_holds_for() -> None:
    error = budget_error()
    assert "for" not in str(error).splitlines()[0].partition(". The peak")[0]
    wider = error.covering(error.minimum_nbytes + 1, "the 2 graphs compiled so far")
    assert wider.minimum_nbytes == error.minimum_nbytes + 1
    assert f"{wider.minimum_nbytes:,} bytes) for the 2 graphs compiled so far: what comes later may" in str(wider)
    assert error.covering(1, "").minimum_nbytes == error.minimum_nbytes
    again = pickle.loads(pickle.dumps(wider))
    assert (str(again), again.covers) == (str(wider), wider.covers)


def test_a_budget_error_says_where_values_are_from_and_what_helps_most() -> None:
    contents = [(errors.VALUES, 900 << 10), ("chunk param:3", 124 << 10)]
    error = errors.BudgetError(minimum_nbytes=1 << 20, budget_nbytes=1, moment="mm", module="", contents=contents)
    assert "What would need less" not in str(error)
    modules = [("h.3", 400 << 10), ("h.2", 200 << 10), ("h.1", 100 << 10), ("h.0", 1)]
    full = replace(error, values=modules).with_remedies(
        [("more", (1 << 20) + 1), ("half", 700 << 10), ("a bit less", 1 << 20)]
    )
    assert f"{errors.VALUES}: 400.00 KiB of h.3, 200.00 KiB of h.2, 100.00 KiB of h.1, 200.00 KiB of others" in str(
        full
    )
    best = full.with_remedies([("a quarter", 300 << 10)])
    assert str(best).endswith("What would need less: a quarter (about 300.00 KiB), half (about 700.00 KiB).")
    assert best.of_step(1 << 20).remedies == best.remedies
    assert best.of_step(1 << 21).remedies == ()  # they were estimated for a part of the step


def home_error() -> errors.HomeError:
    error = errors.HomeError("no room: No space left on device")
    error.errno = errno.ENOSPC
    return error


def verification_error() -> errors.VerificationError:
    return errors.VerificationError(["read: one", "slot: two"])


@pytest.mark.parametrize("way", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("make", [home_error, budget_error, verification_error])
def test_a_copied_error_keeps_all_it_has(make, way) -> None:
    before, after = make(), way(make())
    assert (type(after), str(after)) == (type(before), str(before))
    for name in ("errno", "minimum_nbytes", "budget_nbytes", "moment", "module", "contents", "violations", "remedies"):
        assert getattr(after, name, None) == getattr(before, name, None)


def test_a_verification_error_lists_every_violation() -> None:
    assert verification_error().violations == ("read: one", "slot: two")
    assert all(violation in str(verification_error()) for violation in ("read: one", "slot: two"))


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.OptionsError, ValueError),
        (errors.HomeError, OSError),
        (errors.ChunkcError, RuntimeError),
    ],
)
def test_errors_are_what_users_expect_to_catch(kind: type[Exception], base: type[Exception]) -> None:
    with pytest.raises(base, match="words"):
        raise kind("words")


def test_every_error_is_chunkcs_own() -> None:
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) >= 8
    assert all(issubclass(kind, errors.ChunkcError) for kind in kinds)
