"""The verifier on chunks that are cut over ranks: which link they take, and how much room a slot is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from chunkc.ir import chunk_ops
from chunkc.ir.hardware import CPU
from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkLayout, ParamSpec
from chunkc.ir.links import GATHER, SCATTER, TO_DEVICE
from chunkc.ir.plan import Position
from chunkc.ir.shards import Shards, ZeroStage
from chunkc.ir.verify.resident import resident_data_nbytes
from chunkc.ir.verify.verifier import verify_phase
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.residency import chunk_items
from chunkc.passes.planning.room import fixed_nbytes

ROWS = 1000


def layout(num_ranks: int = 3, zero_stage: ZeroStage | None = 3) -> ChunkLayout:
    """One matrix, of which this rank has a third; where no stage is forced, it is chosen to be whole."""
    found = lay_out([part((ROWS,), num_ranks, 0, zero_stage)], 1 << 16)
    return found.with_replicated([0]) if zero_stage is None else found


def part(shape: tuple[int, ...], num_ranks: int, rank: int, zero_stage: ZeroStage | None) -> ParamSpec:
    strides = torch.empty(shape, device="meta").stride()
    return ParamSpec("w", shape, strides, torch.float32, trainable=True).part(
        Shards(shape, num_ranks, rank, zero_stage)
    )


WHOLE = Chunk(PARAM, 0)


def violations(link: str, budget_nbytes: int, chunk: Chunk = WHOLE, zero_stage: ZeroStage | None = 3) -> list[str]:
    graph = fx.Graph()
    graph.call_function(chunk_ops.prefetch, (chunk, link))
    graph.call_function(chunk_ops.wait, (chunk, link))
    graph.call_function(chunk_ops.evict, (chunk,))
    graph.output(())
    return list(
        verify_phase(
            graph,
            layout=layout(zero_stage=zero_stage),
            memories={},
            resident=(),
            external_nbytes=0,
            budget_nbytes=budget_nbytes,
        )
    )


def test_chunks_of_all_ranks_are_gathered() -> None:
    assert not violations(GATHER, 1 << 20)
    (found,) = violations(TO_DEVICE, 1 << 20)
    assert "link" in found
    assert "the RAM of all ranks" in found
    tile = Chunk(PARAM, 0, (0, 64))
    assert not violations(TO_DEVICE, 1 << 20, tile)
    assert violations(GATHER, 1 << 20, tile), "an update's tile is of this rank alone"


@pytest.mark.parametrize("kind", [PARAM, GRAD])
def test_a_slot_has_room_for_all_ranks(kind: str) -> None:
    """A gradient's for what the two others send, too."""
    chunk = Chunk(kind, 0)
    (group,) = layout().groups
    nbytes = layout().chunk_nbytes_of(chunk)
    exchanged = 2 * -(-ROWS // 3) if kind == GRAD else 0
    assert nbytes == 4 * (group.gathered_numel + exchanged) >= 4 * (ROWS + exchanged)
    counter_nbytes = 4
    assert not violations(GATHER, nbytes + counter_nbytes, chunk)
    assert violations(GATHER, nbytes + counter_nbytes - 1, chunk)


def test_the_planner_takes_the_links_of_all_ranks() -> None:
    chunks = frozenset({Chunk(PARAM, 0), Chunk(GRAD, 0)})
    position = Position("forward.0", "forward", 0, "mm", "h", chunks, frozenset(), 0.0)
    items = chunk_items(layout(), [position], frozenset())
    assert {(item.way_back.link, item.way_home.link) for item in items.values()} == {(GATHER, SCATTER)}
    assert layout().cut == {0}


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple),
    st.integers(2, 9),
    st.sampled_from((1, 2, 3)),
)
def test_all_ranks_see_the_same_items_at_the_same_prices(shape: Any, num_ranks: int, zero_stage: ZeroStage) -> None:
    """So they plan alike, whatever parts they have."""
    machine = CPU.used_by(num_ranks)
    chunks = frozenset({Chunk(PARAM, 0), Chunk(GRAD, 0)})
    position = Position("forward.0", "forward", 0, "mm", "h", chunks, frozenset(), 0.0)
    first, *others = (
        chunk_items(lay_out([part(shape, num_ranks, rank, zero_stage)]), [position], frozenset())
        for rank in range(num_ranks)
    )
    assert all(items == first for items in others)
    whole_nbytes = 4 * math.prod(shape)
    ways = {chunk.kind: (item.way_back, item.way_home, item.nbytes) for chunk, item in first.items()}
    back, home, nbytes = ways[PARAM]
    assert back.moved_nbytes(nbytes) >= whole_nbytes
    assert back.seconds(nbytes, machine) == machine.exchange_s(GATHER, back.moved_nbytes(nbytes)) > 0
    assert home.seconds(nbytes, machine) == machine.exchange_s(SCATTER, home.moved_nbytes(nbytes)) > 0
    assert ways[GRAD][0].seconds(ways[GRAD][2], machine) == 0, "a gradient's slot begins empty"


@pytest.mark.parametrize(("zero_stage", "kinds"), [(1, (PARAM, GRAD)), (2, (PARAM,)), (3, ()), (None, (PARAM,))])
def test_what_every_rank_has_whole_counts_at_all_times(zero_stage: ZeroStage | None, kinds: tuple[str, ...]) -> None:
    """The planner and the verifier, which share no code, find the same bytes; a slot takes the rest."""
    laid_out, in_parts = layout(zero_stage=zero_stage), layout()
    (group,) = laid_out.groups
    replicated = 4 * group.gathered_numel * len(kinds)
    assert fixed_nbytes(laid_out, frozenset()) == fixed_nbytes(in_parts, frozenset()) + replicated
    assert resident_data_nbytes(laid_out, ()) == resident_data_nbytes(in_parts, ()) + replicated
    for kind in (PARAM, GRAD):
        chunk = Chunk(kind, 0)
        whole = in_parts.chunk_nbytes_of(chunk)
        assert laid_out.chunk_nbytes_of(chunk) == whole - (4 * group.gathered_numel if kind in kinds else 0)
        needed = resident_data_nbytes(laid_out, ()) + laid_out.chunk_nbytes_of(chunk)
        assert not violations(GATHER, needed, chunk, zero_stage)
        assert violations(GATHER, needed - 1, chunk, zero_stage)
        position = Position("forward.0", "forward", 0, "mm", "h", frozenset({chunk}), frozenset(), 0.0)
        (item,) = chunk_items(laid_out, [position], frozenset()).values()
        exchanged = 4 * group.gathered_numel
        assert item.way_home.moved_nbytes(item.nbytes) == exchanged, "what is exchanged is the same in every stage"
        assert item.way_back.moved_nbytes(item.nbytes) == (exchanged if kind == PARAM else 0)


@pytest.mark.parametrize("zero_stage", [1, 2, 3, None])
def test_room_for_what_goes_in_one_message_counts(zero_stage: ZeroStage | None) -> None:
    """In a slot of its own, or for good with whole parameters, where the planner and the verifier see it."""
    first = part((ROWS,), 3, 0, zero_stage)
    laid_out = lay_out([first, replace(first, name="v")], 1 << 16)
    laid_out = laid_out.with_replicated([0]) if zero_stage is None else laid_out
    (group,) = laid_out.groups
    assert group.packing_numel == 2 * 3 * -(-ROWS // 3)
    assert fixed_nbytes(laid_out, frozenset()) == resident_data_nbytes(laid_out, ())
    stands, moves = resident_data_nbytes(laid_out, ()), laid_out.chunk_nbytes_of(WHOLE)
    assert (moves > 0) == (zero_stage == 3)
    counters_nbytes = 2 * 4
    assert stands + moves >= counters_nbytes + 4 * (group.gathered_numel + group.packing_numel)
    packing_and_received = 4 * (group.packing_numel + group.exchange_numel)
    of_gradient = laid_out.chunk_nbytes_of(Chunk(GRAD, 0))
    assert of_gradient == packing_and_received + (0 if zero_stage == 1 else 4 * group.gathered_numel)


def test_a_plan_for_what_is_whole_is_none_for_what_is_not() -> None:
    """Whichever of the two the verifier is told: the bytes are others."""
    whole = layout(zero_stage=None)
    needed = resident_data_nbytes(whole, ()) + whole.chunk_nbytes_of(WHOLE)
    apart = whole.with_replicated(())
    assert not violations(GATHER, needed, zero_stage=None)
    assert resident_data_nbytes(apart, ()) + apart.chunk_nbytes_of(WHOLE) == needed, "as long as the chunk has a slot"
    assert resident_data_nbytes(apart, ()) < resident_data_nbytes(whole, ())
    assert whole.replicated_by_choice == {0}
    assert whole.with_replicated([0]) is whole
    assert layout(zero_stage=2).replicated_by_choice == frozenset(), "what is forced is no choice"
