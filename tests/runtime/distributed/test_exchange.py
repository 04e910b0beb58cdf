"""Chunks between the homes of ranks and slots that hold all their parts; the ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from chunkc.ir import shards
from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup, ParamSpec
from chunkc.ir.shards import Shards
from chunkc.passes.planning.layout import lay_out
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.distributed.exchange import gather, scatter_sums

SHAPES: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (1,), "c": (7,), "d": (4, 2), "e": ()}
RANKS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (6, 3)]
"""With how many copies there are of each part."""


@pytest.fixture(params=[0, 20, 1 << 16], autouse=True, ids=lambda nbytes: f"{nbytes} bytes")
def packed_nbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Up to what size parts go together: none, some, all."""
    monkeypatch.setattr(shards, "PACKED_NBYTES", request.param)
    return request.param


class Thread:
    """A rank's transport, whose messages go through queues from thread to thread."""

    def __init__(self, rank: int, queues: list[list[SimpleQueue[torch.Tensor]]]) -> None:
        self.rank, self.num_ranks, self.queues = rank, len(queues), queues
        self.others = [other for other in range(self.num_ranks) if other != rank]
        self.sent, self.num_messages = 0, 0

    def exchange(self, channel: str, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        for rank, tensor in sends:
            self.sent += tensor.nbytes
            self.num_messages += 1
            self.queues[self.rank][rank].put(tensor.clone())
        for rank, tensor in receives:
            tensor.copy_(self.queues[rank][self.rank].get(timeout=10))


def on_ranks(num_ranks: int, job: Callable[[Any], None]) -> list[Thread]:
    queues: list[list[Any]] = [[SimpleQueue() for _ in range(num_ranks)] for _ in range(num_ranks)]
    ranks = [Thread(rank, queues) for rank in range(num_ranks)]
    threads = [threading.Thread(target=job, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks


def shards_of(shape: tuple[int, ...], rank: int, num_ranks: int, num_copies: int) -> Shards:
    each = num_ranks // num_copies
    return (
        Shards(shape, each, rank % each, 3, num_copies, rank // each) if shape else Shards((), 1, 0, 3, num_ranks, rank)
    )


def group_of(rank: int, num_ranks: int, num_copies: int = 1) -> ChunkGroup:
    specs = []
    for name, shape in SHAPES.items():
        whole = ParamSpec(name, shape, torch.empty(shape).stride(), torch.float32, trainable=True)
        specs.append(whole.part(shards_of(shape, rank, num_ranks, num_copies)))
    (group,) = lay_out(specs, 1 << 20).groups
    return group


def whole(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def home_with(group: ChunkGroup, values: dict[str, torch.Tensor]) -> torch.Tensor:
    home = torch.full((group.numel,), torch.nan)
    for where in group.slices:
        assert where.spec.shards is not None
        begin, end = where.spec.shards.span(where.spec.shards.rank)
        home[where.offset : where.end] = values[where.spec.name].flatten()[begin:end]
    return home


def slot_of(group: ChunkGroup, kind: str) -> torch.Tensor:
    return torch.full((group.slot_numel(Chunk(kind, 0)),), torch.nan)


def in_slot(group: ChunkGroup, slot: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        w.spec.name: slot[w.slot_offset : w.slot_offset + w.spec.whole_numel].view(SHAPES[w.spec.name])
        for w in group.slices
    }


def added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, from the first to the last."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


@pytest.mark.parametrize(("num_ranks", "num_copies"), RANKS)
def test_every_rank_gets_every_parameter_whole(num_ranks: int, num_copies: int) -> None:
    values, found = whole(0), {}

    def job(rank: Any) -> None:
        group = group_of(rank.rank, num_ranks, num_copies)
        slot = slot_of(group, PARAM)
        gather(group, home_with(group, values), slot, slot[group.gathered_numel :], rank)
        found[rank.rank] = in_slot(group, slot)

    ranks = on_ranks(num_ranks, job)
    for tensors in found.values():
        assert all(torch.equal(tensors[name], value) for name, value in values.items())
    nbytes = sum(value.nbytes for value in values.values() if value.dim())
    assert len(found) == num_ranks
    assert sum(rank.sent for rank in ranks) == (num_ranks - num_copies) * nbytes


def test_small_parts_of_a_chunk_go_to_each_rank_in_one_message(packed_nbytes: int) -> None:
    def job(rank: Any) -> None:
        group = group_of(rank.rank, 3)
        slot, home = slot_of(group, GRAD), home_with(group, whole(0))
        gather(group, home, slot, slot[group.gathered_numel :], rank)
        gathered.append(rank.num_messages)
        scatter_sums(group, slot, slot[group.gathered_numel :], home, home, dict.fromkeys("abcd", False), rank)

    gathered: list[int] = []
    ranks = on_ranks(3, job)
    num_parcels = {0: 4, 20: 2, 1 << 16: 1}[packed_nbytes]  # with 20: a, whose parts have 24 bytes, and the others
    assert gathered == [2 * num_parcels] * 3
    assert [rank.num_messages for rank in ranks] == [4 * num_parcels] * 3


@pytest.mark.parametrize(("num_ranks", "num_copies"), RANKS)
def test_each_rank_gets_its_part_of_the_mean(num_ranks: int, num_copies: int) -> None:
    """Added up in the order of the ranks, in each row and then row by row; added to what home has where it has one.

    What is not in the slot stays.
    """
    computed, before, found = [whole(1 + rank) for rank in range(num_ranks)], whole(9), {}
    adds = {"a": False, "b": True, "d": True, "e": True}

    def job(rank: Any) -> None:
        group = group_of(rank.rank, num_ranks, num_copies)
        slot, home = slot_of(group, GRAD), home_with(group, before)
        for name in adds:
            in_slot(group, slot)[name].copy_(computed[rank.rank][name])
        scatter_sums(group, slot, slot[group.gathered_numel :], home, home, adds, rank)
        found[rank.rank] = (group, home)

    ranks = on_ranks(num_ranks, job)
    for name, former in before.items():
        expected = former.clone()
        if name in adds:
            each = num_ranks // num_copies if former.dim() else 1
            rows = [added([one[name] for one in computed[at : at + each]]) for at in range(0, num_ranks, each)]
            total = added(rows)
            expected = total / num_ranks + (former if adds[name] else 0)
        for rank, (group, home) in found.items():
            (where,) = [w for w in group.slices if w.spec.name == name]
            assert where.spec.shards is not None
            begin, end = where.spec.shards.span(where.spec.shards.rank)
            assert where.spec.shards.row[where.spec.shards.rank] == rank
            assert torch.equal(home[where.offset : where.end], expected.flatten()[begin:end])
    nbytes = sum(before[name].nbytes for name in adds if before[name].dim())
    assert len(found) == num_ranks
    in_rows, of_copies = (num_ranks - num_copies) * nbytes, 2 * (num_copies - 1) * nbytes
    assert sum(rank.sent for rank in ranks) == in_rows + of_copies + 2 * (num_ranks - 1) * 4


def test_the_smallest_go_together_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PACKED_NBYTES", 1 << 16)
    monkeypatch.setattr(shards, "PACKING_NBYTES", 4 * (2 * 1 + 2 * 4 + 2 * 4 + 1))  # b, c, d and e
    group = group_of(1, 2)
    names = [[where.spec.name for where in parcel] for parcel in group.parcels]
    assert sorted(names) == [["a"], ["b", "c", "d"], ["e"]]
    assert group.packing_numel == 2 * 1 + 2 * 4 + 2 * 4
    assert group.slot_numel(Chunk(PARAM, 0)) == group.gathered_numel + group.packing_numel


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_lay_slots_out_alike(num_ranks: int) -> None:
    groups = [group_of(rank, num_ranks) for rank in range(num_ranks)]
    for kind in (PARAM, GRAD):
        assert len({group.slot_numel(Chunk(kind, 0)) for group in groups}) == 1
    assert len({tuple(where.slot_offset for where in group.slices) for group in groups}) == 1
    assert len({group.numel for group in groups}) > 1, "what is at home differs: a's rows are not shared evenly"
    part = Chunk(PARAM, 0, (0, 4))
    assert groups[0].slot_numel(part) == 4, "an update's tile is of this rank's part"


def test_an_exchange_takes_no_memory_of_the_compute_tier() -> None:
    """It runs while another thread computes what a plan counts: at the peak, each byte would be one too many."""

    class Alone(Thread):
        def exchange(self, channel: str, sends: Sequence[Any], receives: Sequence[Any]) -> None:
            for _, received in receives:
                received.zero_()

    cpu_allocator.install()
    rank, group = Alone(0, [[], []]), group_of(0, 2)
    slot, home = slot_of(group, GRAD).fill_(1), home_with(group, whole(0))
    cpu_allocator.reset_peak()
    before_nbytes = cpu_allocator.current_nbytes()
    gather(group, home, slot, slot[group.gathered_numel :], rank)
    scatter_sums(group, slot, slot[group.gathered_numel :], home, home, dict.fromkeys("abcd", True), rank)
    assert cpu_allocator.peak_nbytes() == before_nbytes
