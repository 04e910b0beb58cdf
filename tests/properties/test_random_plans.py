"""The verifier: random sabotage is reported, unless running the plan shows that it is harmless."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from verify_cases import HUGE, PHASES, SPARES, Case, case

from chunkc.ir import chunk_ops
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK


@dataclass
class _Copy:
    """A slot as memory: what is in it, and the copy that has not ended."""

    content: int | None = None
    copying: str = ""


def run_is_safe(subject: Case) -> bool:
    """Run the graph on version numbers; copies end as late as they can, what is read or kept must be new."""
    newest: dict[str, int] = {}
    home: dict[str, int] = {}
    slots: dict[str, _Copy] = {chunk: _Copy(0) for chunk in subject.options.get("present", ())}
    views: dict[fx.Node, _Copy | None] = {}

    def write(chunk: str) -> bool:
        slot = slots.get(chunk)
        if slot is None or slot.copying or slot.content is None:
            return False
        slot.content = newest[chunk] = newest.get(chunk, 0) + 1
        return True

    for node in subject.graph.nodes:
        if node.op == "call_module":
            for arg in node.args:
                if arg in views:
                    slot, chunk = views[arg], arg.args[0]
                    if slot is None or slots.get(chunk) is not slot or slot.content != newest.get(chunk, 0):
                        return False
            continue
        if node.op != "call_function" or node.target.__module__ != chunk_ops.__name__:
            continue
        kind, chunk = node.target.__name__, node.args[0]
        if kind == "sink":
            if not write(node.args[1]):
                return False
        elif kind == "update":
            group, begin, end = node.args
            gradient = slots.get(Chunk("grad", group, (begin, end)))
            if gradient is None or gradient.content is None:
                return False
            if not all(write(Chunk(k, group, (begin, end))) for k in ("param", "exp_avg", "exp_avg_sq")):
                return False
        elif kind == "parameter":
            views[node] = slots.get(chunk)
        elif kind == PREFETCH:
            if chunk in slots:
                return False
            slots[chunk] = _Copy(None, "in")
        elif chunk not in slots:
            return False
        elif kind == WAIT:
            slot = slots[chunk]
            if slot.copying == "in":
                slot.content = home.get(chunk, 0)
            elif slot.copying == "out":
                assert slot.content is not None
                home[chunk] = slot.content
            slot.copying = ""
        elif kind == WRITE_BACK:
            slot = slots[chunk]
            if slot.copying or slot.content is None:
                return False
            slot.copying = "out"
        elif kind == EVICT and slots.pop(chunk).copying:
            return False
    lost = [chunk for chunk, version in newest.items() if chunk not in slots and home.get(chunk, 0) != version]
    stale = [chunk for chunk, slot in slots.items() if slot.copying or home.get(chunk, 0) != newest.get(chunk, 0)]
    return not lost and not stale and set(slots) == set(subject.options.get("kept", ()))


def events_of(subject: Case) -> list[fx.Node]:
    return [n for n in subject.graph.nodes if n.target in (*chunk_ops.EVENT_TARGETS.values(), chunk_ops.sink)]


@pytest.mark.parametrize("phase", PHASES)
def test_the_judge_finds_nothing_wrong_with_a_valid_plan(phase: str) -> None:
    for spare in SPARES:
        assert run_is_safe(case(phase, spare))


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(PHASES),
    st.sampled_from(SPARES),
    st.lists(
        st.tuples(st.sampled_from(["delete", "swap", "move", "repeat"]), *[st.integers(0, 10**6)] * 2),
        min_size=1,
        max_size=2,
    ),
)
def test_random_sabotage_is_reported_unless_it_is_harmless(
    phase: str, spare: int, mutations: list[tuple[str, int, int]]
) -> None:
    subject = case(phase, spare)
    subject.options["budget_nbytes"] = HUGE  # the judge does not count bytes
    for kind, one, two in mutations:
        nodes = events_of(subject)
        node, other = nodes[one % len(nodes)], nodes[two % len(nodes)]
        if kind == "delete":
            subject.graph.erase_node(node)
        elif node.target is chunk_ops.sink or other.target is chunk_ops.sink:
            continue  # a gradient cannot be sunk before it is made
        elif kind == "swap":
            node.args, other.args, node.target, other.target = (other.args, node.args, other.target, node.target)
        elif kind == "move" and node is not other:
            other.prepend(node)
        elif kind == "repeat":
            with subject.graph.inserting_before(other):
                subject.graph.call_function(node.target, node.args)
    if not run_is_safe(subject):
        assert subject.violations(), "an unsafe graph passes"


def test_deleting_any_single_event_is_reported() -> None:
    """A plan holds nothing that it could do without, but for sinks, which the graph alone cannot miss."""
    for phase in PHASES:
        for number in range(len([n for n in events_of(case(phase)) if n.target is not chunk_ops.sink])):
            subject = case(phase)
            node = [n for n in events_of(subject) if n.target is not chunk_ops.sink][number]
            text = f"{phase}: {node.target.__name__}{node.args}"
            subject.graph.erase_node(node)
            assert subject.violations(), f"without {text} the graph passes"
