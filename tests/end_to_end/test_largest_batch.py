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

from chunkc.explain import minimum_budget
from chunkc.ir.errors import UnsupportedError
from chunkc.largest import largest

NO_GRAPH = ("lstm",)
"""Models that cannot be explained: nothing of them is captured."""

QUICK = ("frozen_mlp", "dropout", "convnet", "graph_breaks")
QUICK_INDUCTOR = ("frozen_mlp",)
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
        return minimum_budget(case.build(), memory_budget=budget, codegen=codegen, **batch)

    budget = 1 << 30
    budget = needs(2) * BUDGET_PERCENT // 100
    found = largest(needs, budget)
    assert found.size >= 2
    assert found.needs_nbytes[0] <= budget < found.needs_nbytes[1]
    result = train(case_of_size(name, found.size), memory_budget=budget, codegen=codegen, steps=2)
    assert result.allocator_peak_nbytes <= budget
    error = refuse(
        case_of_size(name, found.size + 1), memory_budget=budget, codegen=codegen, whole_graph="auto", place=True
    )
    assert error.budget_nbytes == budget < error.minimum_nbytes


@pytest.mark.parametrize("name", rungs(tuple(n for n in LADDER if n not in NO_GRAPH), QUICK))
def test_the_largest_batch_trains_and_one_more_is_refused(name: str) -> None:
    check(name, "eager")


@pytest.mark.parametrize("name", rungs(INDUCTOR, QUICK_INDUCTOR))
def test_the_largest_batch_by_inductor(name: str) -> None:
    check(name, "inductor")


@pytest.mark.parametrize("name", NO_GRAPH)
def test_models_without_a_graph_say_so(name: str) -> None:
    case = LADDER[name]
    with pytest.raises(UnsupportedError, match=r"graph"):
        minimum_budget(case.build(), **case.batch(0))
