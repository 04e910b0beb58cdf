"""`--largest batch_size` on the ladder: the answer B trains inside the budget as a hard limit, and B + 1 is refused.

Nothing runs while B is searched. B then trains with the allocator refusing every byte beyond the budget; B + 1 must
raise `BudgetError` before it runs, and name a smallest budget that is larger.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import refuse, train
from ladder import resized, rungs
from zoo import LADDER, Case

from chunkc.explaining.explain import minimum_budget
from chunkc.explaining.largest import largest
from chunkc.ir.errors import UnsupportedError

QUICK = ("frozen_mlp", "dropout", "convnet")
BUDGET_PERCENT = 160
"""Of what the ladder's own batch needs at least."""


def case_of_size(name: str, size: int) -> Case:
    case = LADDER[name]
    return replace(case, batch=lambda seed: resized(case.batch(seed), size))


@pytest.mark.second_tier
@pytest.mark.parametrize("name", rungs((n for n in LADDER if n not in ("lstm", "breaks_in_loop")), QUICK))
def test_the_largest_batch_trains_and_one_more_is_refused(name: str) -> None:
    case = LADDER[name]

    def needs(size: int) -> int:
        batch = resized(case.batch(0), size)
        return minimum_budget(case.build(), memory_budget=budget, codegen="eager", activations="keep", **batch)

    budget = 1 << 30
    budget = needs(2) * BUDGET_PERCENT // 100
    found = largest(needs, budget)
    assert found >= 2
    assert needs(found) <= budget < needs(found + 1)
    result = train(case_of_size(name, found), memory_budget=budget, activations="keep", steps=2)
    assert result.allocator_peak_nbytes <= budget
    options = {"memory_budget": budget, "activations": "keep", "whole_graph": "auto"}
    error = refuse(case_of_size(name, found + 1), **options)
    assert error.budget_nbytes == budget < error.minimum_nbytes


def test_recurrent_models_that_are_left_alone_say_so() -> None:
    """Dynamo leaves them alone unless it is told to trace them."""
    case = LADDER["lstm"]
    with pytest.raises(UnsupportedError, match=r"captured no graph: .*allow_rnn = True"):
        minimum_budget(case.build(), **case.batch(0))
