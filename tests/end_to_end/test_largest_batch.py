"""`--largest batch_size` on the ladder: the answer B trains inside the budget as a hard limit, and B + 1 is refused.

Nothing runs while B is searched. B then trains with the allocator refusing every byte beyond the budget; B + 1 must
raise `BudgetError` before it runs, and name a smallest budget that is larger.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import refuse, train
from ladder import resized, rungs
from zoo import LADDER, Case

from chunkc.explaining.explain import minimum_budget
from chunkc.explaining.largest import largest
from chunkc.ir.errors import UnsupportedError

RECURRENT = ("lstm",)
"""Dynamo leaves these models alone unless it is told to trace them."""
UNPLACED = ("breaks_in_loop",)
"""`explain` lays chunks out graph by graph, as a model that was not placed before: here that gives other chunks. It is
trained so, with parameters on the compute tier until their graph is compiled, and so without the hard limit."""

QUICK = ("frozen_mlp", "dropout", "convnet")
QUICK_INDUCTOR: tuple[str, ...] = ()
INDUCTOR = ("frozen_mlp", "short_gpt", "checkpointed_gpt", "lstm_cells", "convnet", "unet", "vit")

BUDGET_PERCENT = 160
"""Of what the ladder's own batch needs at least."""


def case_of_size(name: str, size: int) -> Case:
    case = LADDER[name]
    return replace(case, batch=lambda seed: resized(case.batch(seed), size))


def check(name: str, codegen: str) -> None:
    case = LADDER[name]

    def needs(size: int) -> int:
        batch = resized(case.batch(0), size)
        return minimum_budget(case.build(), memory_budget=budget, codegen=codegen, activations="keep", **batch)

    budget = 1 << 30
    budget = needs(2) * BUDGET_PERCENT // 100
    found = largest(needs, budget)
    assert found >= 2
    assert needs(found) <= budget < needs(found + 1)
    placed = name not in UNPLACED
    kwargs = {"memory_budget": budget, "codegen": codegen, "place": placed, "activations": "keep"}
    result = train(case_of_size(name, found), limit=placed, steps=2, **kwargs)
    assert (result.allocator_peak_nbytes if placed else result.predicted_peak_nbytes) <= budget
    error = refuse(case_of_size(name, found + 1), whole_graph="auto", **kwargs)
    assert error.budget_nbytes == budget < error.minimum_nbytes


@pytest.mark.second_tier
@pytest.mark.parametrize("name", rungs(tuple(n for n in LADDER if n not in RECURRENT), QUICK))
def test_the_largest_batch_trains_and_one_more_is_refused(name: str) -> None:
    check(name, "eager")


@pytest.mark.second_tier
@pytest.mark.parametrize("name", rungs(INDUCTOR, QUICK_INDUCTOR))
def test_the_largest_batch_by_inductor(name: str) -> None:
    check(name, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_the_largest_batch_of_a_recurrent_model(name: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        check(name, "eager")


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_that_are_left_alone_say_so(name: str) -> None:
    case = LADDER[name]
    with pytest.raises(UnsupportedError, match=r"captured no graph: .*allow_rnn = True"):
        minimum_budget(case.build(), **case.batch(0))
