"""What ranks compare, and what they say where they differ; what a rank hears is given here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from chunkc.distributed.agreement import Here, agree, begin_phase, rendezvous, together, transport_of
from chunkc.ir.errors import BudgetError, DistributedError, FileError
from chunkc.runtime.distributed.transport import AGREEMENTS


class Heard:
    """Rank 0, to which two others have said something: a function of what it says."""

    num_ranks = 3

    def __init__(self, *others: Any, world: Heard | None = None) -> None:
        self.others, self.said, self.world = others, [], world or self

    def all_gather(self, value: Any, channel: str = AGREEMENTS) -> list[Any]:
        self.said.append(value)
        return [value, *(other(value) if callable(other) else other for other in self.others)]


def same(value: Any) -> Any:
    return value


def with_facts(facts: dict[str, str]) -> Callable[[Any], Any]:
    """Another rank says the same, but for these."""
    return lambda said: replace(said, facts={**said.facts, **facts})


def test_a_difference_names_what_and_who() -> None:
    with pytest.raises(DistributedError, match=r"differ in the code: rank 1 of 3"):
        agree(Heard(with_facts({"the code": "x"}), same), {"the code": "a"})  # type: ignore[arg-type]
    heard = Heard(same, with_facts({"the plan": "another"}))
    with pytest.raises(DistributedError, match=r"differ in the plan: rank 2 of 3"):
        agree(heard, {"the code": "a", "the plan": "b"})  # type: ignore[arg-type]


def saying(**here: Any) -> Callable[[Any], Any]:
    """Another rank says this of itself where a phase begins."""
    return lambda said: replace(said, result=replace(said.result, **here))


def test_a_phase_begins_with_what_each_rank_says() -> None:
    own = Here(5, (1,), "needs", "history", "code", "static")
    heard: Any = Heard(saying(nbytes=7), saying(nbytes=3, outdated=(4,)))
    said = begin_phase(heard, own, {"the phase": "forward"})
    assert said == [own, replace(own, nbytes=7), replace(own, nbytes=3, outdated=(4,))]
    differs: Any = Heard(with_facts({"the phase": "backward"}), same)
    with pytest.raises(DistributedError, match=r"the phase: rank 1 of 3 .*: backward instead of forward"):
        begin_phase(differs, own, {"the phase": "forward"})


def test_ranks_of_equal_sizes_have_equal_code() -> None:
    own = Here(5, (), "needs", "history", "code", "static")
    for others in ({"needs": "less"}, {"kind": "symbols"}):
        begin_phase(Heard(saying(code="another", **others), same), own, {})  # type: ignore[arg-type]
    with pytest.raises(DistributedError, match="differ in the code of the model: rank 2 of 3"):
        begin_phase(Heard(same, saying(code="another")), own, {})  # type: ignore[arg-type]


def test_an_error_before_the_meeting_is_told_and_raised_by_all() -> None:
    own = Heard(same, same)
    budget = BudgetError(minimum_nbytes=2, budget_nbytes=1, moment="m", module="", contents=())
    with pytest.raises(BudgetError), rendezvous(own):  # type: ignore[arg-type]
        raise budget
    (refusal,) = own.said
    with pytest.raises(DistributedError, match=r"rank 1 of 3 cannot go on. BudgetError: memory_budget is 1 byte"):
        agree(Heard(refusal, same), {"the code": "a"})  # type: ignore[arg-type]


def test_who_tries_again_says_nothing() -> None:
    own = Heard(same, same)
    with pytest.raises(KeyError), rendezvous(own, (KeyError,)):  # type: ignore[arg-type]
        raise KeyError
    assert not own.said


def test_an_error_after_the_meeting_is_no_part_of_it() -> None:
    own = Heard(same, same)

    def fails() -> None:
        with rendezvous(own) as compare:  # type: ignore[arg-type]
            compare(lambda: {"the code": "a"})
            raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        fails()
    assert len(own.said) == 1


@pytest.mark.parametrize("is_met", [False, True])
def test_ranks_that_share_layers_hear_of_an_error_where_a_phase_begins(is_met: bool) -> None:
    world = Heard(same)
    own = Heard(same, same, world=world)

    def fails() -> None:
        with rendezvous(own) as compare:  # type: ignore[arg-type]
            if is_met:
                compare(lambda: {"the code": "a"})
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        fails()
    (refusal,) = world.said
    with pytest.raises(DistributedError, match=r"cannot go on. ValueError: no room"):
        agree(Heard(refusal), {"the code": "a"})  # type: ignore[arg-type]


def test_one_process_meets_nobody() -> None:
    def facts() -> dict[str, str]:
        raise AssertionError("nobody compares them")

    with rendezvous(None) as compare:
        compare(facts)
    assert transport_of({"w": nn.Parameter(torch.ones(2))}) is None


def test_what_one_rank_cannot_do_is_an_error_of_all() -> None:
    def failing() -> None:
        raise OSError(28, "No space left on device")

    assert together(None, "save", lambda: 7, FileError) == [7]
    assert together(Heard(same, same), "save", lambda: 7, FileError) == [7, 7, 7]  # type: ignore[arg-type]
    heard = Heard(same, partial(replace, problem="it has no room"))
    with pytest.raises(FileError, match=r"rank 2 of 3: it has no room"):
        together(heard, "save", lambda: 7, FileError)  # type: ignore[arg-type]
    heard = Heard(same, same)
    with pytest.raises(OSError, match="No space"):
        together(heard, "save", failing, FileError)  # type: ignore[arg-type]
    assert heard.said[0].problem == "No space left on device"
    differs = Heard(same, with_facts({"the phase": "backward"}))
    with pytest.raises(DistributedError, match=r"the phase: rank 2 of 3 .*: backward instead of save"):
        together(differs, "save", lambda: 7, FileError)  # type: ignore[arg-type]
