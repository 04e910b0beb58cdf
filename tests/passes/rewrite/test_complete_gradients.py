"""Where a rewritten backward says that groups are settled at home: after the last copy of each, none too early."""

from __future__ import annotations

from verify_cases import LAYOUT, MODULES, NUM_LAYERS, backward_program, case, plan_step

from chunkc.ir import chunk_ops
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, PhasePlan
from chunkc.passes.rewrite.insert import complete_after, insert_events


def test_every_group_is_settled_once_after_its_gradients_left() -> None:
    nodes = list(case("settling").graph.nodes)
    for group in range(NUM_LAYERS):
        (at,) = [i for i, n in enumerate(nodes) if n.target is chunk_ops.settle and n.args == (group,)]
        copies = [
            i
            for i, n in enumerate(nodes)
            if n.target in (chunk_ops.prefetch, chunk_ops.write_back) and n.args[0].group == group
        ]
        assert at == max(copies) + 1


def test_a_plan_that_nobody_listens_to_says_nothing() -> None:
    assert not case("backward").all("settle")


def test_the_last_fetch_counts_too() -> None:
    """Gradients gone home, the parameter fetched once more: settled only then."""
    stops = (
        (Event(WRITE_BACK, Chunk("grad", 2), 1), Event(EVICT, Chunk("grad", 2), 1)),
        (Event(PREFETCH, Chunk("param", 2), 1), Event(WAIT, Chunk("param", 2), 1)),
        (Event(EVICT, Chunk("param", 2), 1),),
    )
    assert complete_after(backward_program(), PhasePlan("backward", stops, ()), LAYOUT) == {(1, 0): 2}


def test_a_group_counts_only_with_all_its_gradients() -> None:
    program = backward_program().returning(frozenset({"h.1.w"}))
    plan = plan_step(None, 0).phases[1]
    graph = insert_events(
        program, plan, MODULES, group_of=LAYOUT.group_of(), resident=frozenset(), layout=LAYOUT
    )  # fmt: skip
    settled = {n.args[0] for n in graph.graph.nodes if n.target is chunk_ops.settle}
    assert settled == set(range(NUM_LAYERS)) - {1}


def test_a_group_that_stays_is_not_settled_when_its_cast_is_made() -> None:
    stops = ((Event(PREFETCH, Chunk("param_bf16", 2), 0), Event(WAIT, Chunk("param_bf16", 2), 0)), ())
    plan = PhasePlan("backward", stops, ())
    assert complete_after(backward_program(), plan, LAYOUT, resident=frozenset({2})) == {}
