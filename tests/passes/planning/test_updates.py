"""The optimizer's step in tiles: they cover all, residents make room, and copies are placed by the pace there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import CPU, Hardware
from chunkc.ir.layout import Chunk, ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.ir.links import host_links
from chunkc.ir.plan import PREFETCH
from chunkc.ir.states import StateFormat
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.residency import remaining_residents
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.update_placement import groups_for_cpu
from chunkc.passes.planning.update_seconds import cpu_update_s, update_seconds
from chunkc.passes.planning.updates import (
    MAX_GROUP_TILES,
    MAX_TILE_NUMEL,
    MIN_TILE_NUMEL,
    TILES_AT_ONCE,
    plan_update,
    smallest_update,
    update_positions,
    update_tiles,
)

HUGE = 1 << 40
FAST = Hardware(1e12, 1e11, host_links(1e10, 1e10))


def layout_of(*numels: int, dtype: torch.dtype = torch.float32) -> ChunkLayout:
    """One group per number."""
    specs = [ParamSpec(f"h.{i}.w", (n,), (1,), dtype, True) for i, n in enumerate(numels)]
    layout = lay_out(specs, max(numels) * dtype.itemsize)
    assert len(layout.groups) == len(numels)
    return layout


LAYOUT = layout_of(1024, 1024, 1000)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_residents_make_room_for_an_update(num_stages: int) -> None:
    everything = frozenset({0, 1, 2})
    positions = smallest_update(LAYOUT, [0, 1, 2], 700, num_stages)
    minimum = Room.of(LAYOUT).minimum_nbytes(positions)
    assert remaining_residents(positions, Room.of(LAYOUT, minimum, resident=everything)) < everything
    assert remaining_residents(positions, Room.of(LAYOUT, HUGE, resident=everything)) == everything
    with pytest.raises(BudgetError):
        remaining_residents(positions, Room.of(LAYOUT, minimum - 1, resident=everything))


@pytest.mark.parametrize("states", [StateFormat(), StateFormat("int8")], ids=str)
def test_an_update_counts_external_bytes_and_none_of_its_own(states: StateFormat) -> None:
    spec = ParamSpec("h.0.w", (1024,), (1,), torch.float32, True, states=states)
    (position,) = smallest_update(lay_out([spec], 4096), [0], 700)
    assert position.non_model_nbytes == 700


def test_update_tiles_cover_every_element_once() -> None:
    layout = layout_of(3 * MIN_TILE_NUMEL + 5)
    (group,) = layout.groups
    for capacity in (0, 1 << 20, 1 << 22, 1 << 23, 1 << 40):
        tiles = update_tiles(layout, [0], capacity)
        assert (tiles[0].begin, tiles[-1].end) == (0, group.numel)
        assert all(one.end == other.begin for one, other in pairwise(tiles))
        for tile in tiles:
            assert tile.end - tile.begin <= MIN_TILE_NUMEL or (
                TILES_AT_ONCE * (tile.end - tile.begin) * group.update_nbytes_per_element <= capacity
            )
            assert tile.end - tile.begin <= MAX_TILE_NUMEL


def test_tiles_of_a_step_do_not_grow_with_the_number_of_layers() -> None:
    """Fewer tiles of each of many layers, but no fewer than one, and no tile that has no room."""
    numel, room = 3 << 25, 1 << 40
    for num_layers, num_tiles in ((2, 6), (256, 6), (512, 3), (768, 2), (2000, 1)):
        layout = layout_of(*[numel] * num_layers)
        assert len(update_tiles(layout, [0], room)) == num_tiles
    assert len(update_tiles(layout, [0], 0)) == numel // MIN_TILE_NUMEL
    layout = layout_of(1 << 30)
    assert len(update_tiles(layout, [0], room)) == MAX_GROUP_TILES


def test_an_update_reads_the_gradient_and_writes_the_rest() -> None:
    layout = layout_of(1024, dtype=torch.bfloat16)
    (found,) = update_positions(layout, update_tiles(layout, [0], 0), 77)
    numel = layout.groups[0].numel
    assert found.reads == {Chunk("grad", 0, (0, numel))}
    assert found.writes == {Chunk(kind, 0, (0, numel)) for kind in ("param", "master_low", "exp_avg", "exp_avg_sq")}
    assert found.non_model_nbytes == 77
    assert sum(layout.chunk_nbytes_of(c) for c in found.items) == numel * (2 + 2 + 2 + 4 + 4)


@pytest.mark.parametrize(
    ("dtype", "num_stages", "nbytes"),
    [
        (torch.float32, 1, [28]),  # all are read, all but the gradient written: 16 + 12
        (torch.bfloat16, 1, [26]),  # 14 + 12, with the master's lower 16 bits
        (torch.float32, 2, [24, 16]),  # moments are made, 16 + 8; then, without gradients, parameters: 12 + 4
    ],
)
def test_behind_a_fast_link_an_update_takes_as_long_as_its_bytes(
    dtype: torch.dtype, num_stages: int, nbytes: list[int]
) -> None:
    layout = layout_of(1024, dtype=dtype)
    tiles = update_tiles(layout, [0], 0, num_stages)
    hardware = Hardware(1.0, 512.0, host_links(1e9, 1e9))
    for machine, rate in ((hardware, 512), (replace(hardware, cpu_update_bytes_per_s=256.0), 256)):
        found = update_positions(layout, tiles, 77, machine)
        assert [position.cost_s for position in found] == [1024 * n / rate for n in nbytes]
    assert update_positions(layout, tiles, 77) == tuple(replace(position, cost_s=0.0) for position in found)


@pytest.mark.parametrize(
    ("num_stages", "seconds"),
    [
        (1, [16]),  # parameter, gradient and moments come; three of them leave beside it
        (2, [8, 8]),  # all come and leave once in two stages, if nothing has to leave between them
    ],
)
def test_behind_a_slow_link_tiles_follow_each_other_as_it_brings_them(num_stages: int, seconds: list[int]) -> None:
    layout = layout_of(1024)
    hardware = Hardware(1.0, 1e9, host_links(1024.0, 1024.0))
    found = update_positions(layout, update_tiles(layout, [0], 0, num_stages), 77, hardware)
    assert [position.cost_s for position in found] == seconds
    (shared,) = update_positions(
        layout, update_tiles(layout, [0], 0), 77, replace(hardware, both_links_bytes_per_s=1024.0)
    )
    assert shared.cost_s == 16 + 12, "the two directions take turns"


@pytest.mark.parametrize("memory_bytes_per_s", [1e5, 1e12])
@pytest.mark.parametrize("to_home_bytes_per_s", [1e5, 1 << 20, 1e12])
def test_however_fast_each_part_is_few_tiles_are_in_flight(
    memory_bytes_per_s: float, to_home_bytes_per_s: float
) -> None:
    """There is room for all: fetched at once, they would fill it, and none would come sooner."""
    layout, num_tiles = layout_of(*[MIN_TILE_NUMEL] * 8), 8
    plan, tiles = plan_update(
        Room.of(layout, HUGE),
        range(num_tiles),
        hardware=Hardware(1.0, memory_bytes_per_s, host_links(1 << 20, to_home_bytes_per_s)),
        num_stages=1,
    )
    (phase,) = plan.phases
    assert len(tiles) == len(phase.moments) == num_tiles
    fetched = [sum(event.kind == PREFETCH for event in stop) / 4 for stop in phase.stops]
    assert fetched == [2, 1, 1, 1, 1, 1, 1, 0, 0], "the next one while one is updated"
    one = sum(layout.chunk_nbytes_of(Chunk(kind, 0)) for kind in layout.groups[0].update_kinds)
    assert max(moment.slot_nbytes for moment in phase.moments) <= TILES_AT_ONCE * one


@pytest.mark.parametrize("states", [StateFormat(), StateFormat("int8"), StateFormat("bfloat16")], ids=str)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("granule_nbytes", [1, 512])
def test_where_the_smallest_tiles_fit_there_is_a_plan(
    states: StateFormat, num_stages: int, granule_nbytes: int
) -> None:
    """And where they do not there is none, whatever size tiles are cut to in that budget."""
    numel, states = 5 * MIN_TILE_NUMEL + 3, states.seen_by(torch.float32)
    layout = lay_out([ParamSpec("w", (numel,), (1,), torch.float32, True, granule_nbytes, states)], 4 * numel)
    positions = smallest_update(layout, [0], 55, num_stages)
    minimum = Room.of(layout).minimum_nbytes(positions)
    part_nbytes = MIN_TILE_NUMEL * layout.groups[0].update_nbytes_per_element // 3
    budgets = (minimum + part_nbytes * k + d for k in range(60) for d in (-1, 0, 1))
    numbers_of_tiles = set()

    def check(budget: int) -> None:
        Room.of(layout, budget).check_minimum(positions)

    def plan(budget: int) -> None:
        room = Room.of(layout, budget, 55)
        numbers_of_tiles.add(len(plan_update(room, [0], hardware=FAST, num_stages=num_stages)[1]))

    for budget in (1, *budgets):
        assert refusal(check, budget) == refusal(plan, budget) == (minimum if budget < minimum else None)
    assert len(numbers_of_tiles) >= 3


def refusal(call: Callable[[int], None], budget: int) -> int | None:
    """The smallest budget that a call asks for; None if it works."""
    try:
        call(budget)
    except BudgetError as error:
        return error.minimum_nbytes
    return None


# ---------------------------------------------------------------- where groups are updated

GPU = Hardware(
    name="gpu", kind="cuda", flops_per_s=1e15, memory_bytes_per_s=4e12, links=host_links(50e9, 50e9),
    cpu_update_bytes_per_s=50e9,
)  # fmt: skip


def group(index: int, numel: int = 1 << 20, dtype: torch.dtype = torch.bfloat16) -> ChunkGroup:
    spec = ParamSpec(f"h.{index}.w", (numel,), (1,), dtype, True)
    return ChunkGroup(index, dtype, True, numel, (TensorSlice(spec, 0),))


GROUPS = [group(index) for index in range(10)]


def test_bytes_of_one_group() -> None:
    """bf16: 2 + 2 + 10 bytes in and 2 + 10 out per element, here and there; with an fp32 master, which alone is read
    of the two, the CPU reads 2 + 12 and writes 2 + 12."""
    assert update_seconds(GROUPS[:1], GPU) == pytest.approx((1 << 20) * 14 / 50e9)
    assert cpu_update_s(GROUPS[:1], GPU) == pytest.approx((1 << 20) * 26 / 50e9)
    full = [replace(GROUPS[0], states=StateFormat(master="float32"))]
    assert update_seconds(full, GPU) == pytest.approx((1 << 20) * 16 / 50e9)
    assert cpu_update_s(full, GPU) == pytest.approx((1 << 20) * 28 / 50e9)
    assert cpu_update_s([group(0, dtype=torch.float32)], GPU) == pytest.approx((1 << 20) * 28 / 50e9)


def test_two_stages_cross_the_link_twice() -> None:
    """LAMB, fp32: all four in (16) and moments out (8); then moments and parameter in (12), and that out (4)."""
    states = [replace(group(0, dtype=torch.float32), states=StateFormat(master="float32"))]
    assert update_seconds(states, GPU, num_stages=2) == pytest.approx((1 << 20) * (16 + 12) / 50e9)
    assert cpu_update_s(states, GPU, num_stages=2) == pytest.approx((1 << 20) * 40 / 50e9)
    assert groups_for_cpu(states * 3, GPU, num_stages=2) == frozenset({0})
    with_latency = replace(GPU, links=tuple(replace(link, latency_s=1.0) for link in GPU.links))
    assert update_seconds(states, with_latency, num_stages=2, latencies=True) == pytest.approx(
        4 + 3 + (1 << 20) * (16 + 12) / 50e9
    )


def test_no_split_is_better() -> None:
    def seconds(count: int) -> float:
        at_home = cpu_update_s(GROUPS[len(GROUPS) - count :], GPU)
        assert at_home is not None
        return max(at_home, update_seconds(GROUPS[: len(GROUPS) - count], GPU))

    chosen = groups_for_cpu(GROUPS, GPU)
    assert 0 < len(chosen) < 10
    assert chosen == frozenset(range(10 - len(chosen), 10))  # the last ones
    assert seconds(len(chosen)) == min(seconds(count) for count in range(11))


@pytest.mark.parametrize(("rate", "num_at_home"), [(None, 0), (1e6, 0), (1e15, 10)])
def test_extremes(rate: float | None, num_at_home: int) -> None:
    assert len(groups_for_cpu(GROUPS, replace(GPU, cpu_update_bytes_per_s=rate))) == num_at_home


def test_the_cpu_s_rate_is_shared_by_all_devices() -> None:
    one, eight = cpu_update_s(GROUPS, GPU), cpu_update_s(GROUPS, replace(GPU, num_devices=8))
    assert one is not None
    assert eight == pytest.approx(8 * one)
    assert groups_for_cpu([], CPU) == frozenset()
