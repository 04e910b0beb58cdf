"""Under "auto", saved values are copied home only as far as the host's memory has room for them; and the search for the
quickest way in which values may be absent.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verify_cases import HARDWARE, LAYOUT, NUM_LAYERS, captured_step

import chunkc
import chunkc.machines.devices
import chunkc.policy.activation_search
from chunkc.ir.errors import BudgetError
from chunkc.ir.explanation import Explanation
from chunkc.ir.hardware import CPU, Hardware
from chunkc.ir.items import ActivationPlan
from chunkc.ir.layout import GRAD, PARAM
from chunkc.machines.presets import load_hardware
from chunkc.passes.planning.layout import EMPTY_LAYOUT
from chunkc.passes.planning.recompute_search import RecomputeRegions
from chunkc.passes.planning.residency import evenly_spread
from chunkc.passes.planning.room import SLACK_CHUNKS, Room
from chunkc.policy import activation_search as activation_plans
from chunkc.policy.activation_search import SearchSpace, first_or_quickest, may_keep, quickest
from chunkc.policy.captured_step import MAX_LAYOUTS, Captured, profile
from chunkc.policy.host_memory import HostFull, check_copies
from chunkc.policy.state import StepRequest
from chunkc.policy.step_seconds import step_s

WIDTH, ROWS = 256, 4096
VALUE_NBYTES = 4 * WIDTH * ROWS
GPU = replace(load_hardware("rtx3090"), host_memory_nbytes=1 << 40)


class Layer(nn.Module):
    """Noise is drawn once: where its backward reads any, that stays or is copied."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.up, self.noisy = nn.Linear(WIDTH, WIDTH, bias=False), noisy

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        return x * torch.rand_like(x) if self.noisy else x


class Model(nn.Module):
    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(noisy) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def explained(hardware: Hardware, budget_nbytes: int, noisy: bool = False, **options: object) -> Explanation:
    with torch.device("meta"):
        model, x = Model(noisy), torch.ones(ROWS, WIDTH)
    options = {"memory_budget": budget_nbytes, "activations": "auto", "codegen": "eager", **options}
    return chunkc.explain(model, x, hardware=hardware, **options)


def tight_budget(noisy: bool = False) -> int:
    """What fits with about half of the values absent, or of those that cannot be made again."""
    least, most = (
        explained(CPU, 1 << 40, noisy, activations=activations).minimum_budget_nbytes
        for activations in ("offload", "rerun" if noisy else "keep")
    )
    return (least + most) // 2


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_copies_keep_to_the_host(home: str) -> None:
    budget_nbytes = tight_budget(noisy=True)
    roomy = explained(replace(CPU, host_memory_nbytes=1 << 40), budget_nbytes, True, home=home)
    copied = sum(roomy.saved_at_home.values())
    assert roomy.fits
    assert copied >= VALUE_NBYTES
    enough = budget_nbytes + roomy.home_nbytes
    assert explained(replace(CPU, host_memory_nbytes=enough), budget_nbytes, True, home=home).fits
    less = explained(replace(CPU, host_memory_nbytes=enough - 1), budget_nbytes, True, home=home)
    if home == "disk":
        assert sum(less.saved_at_home.values()) == copied
    else:
        assert not less.fits or less.home_nbytes < roomy.home_nbytes


def test_what_the_host_has_no_room_for_is_made_again() -> None:
    roomy = explained(GPU, 1 << 30, activations="offload")
    budget_nbytes = (roomy.minimum_budget_nbytes + explained(GPU, 1 << 30).predicted_peak_nbytes) // 2
    for host_nbytes in (1, roomy.home_nbytes // 2):
        found = explained(replace(GPU, host_memory_nbytes=host_nbytes), budget_nbytes)
        assert found.fits
        assert found.saved_again
        assert found.host_fits or not found.saved_at_home


def test_where_the_host_has_no_room_no_more_is_made_again_than_the_budget_asks_for() -> None:
    everything = explained(GPU, 1 << 30, activations="rerun")
    least_nbytes, most_nbytes = everything.minimum_budget_nbytes, explained(GPU, 1 << 30).predicted_peak_nbytes
    found = explained(replace(GPU, host_memory_nbytes=1), least_nbytes + 2 * (most_nbytes - least_nbytes) // 5)
    assert found.fits
    assert found.saved_again
    assert not found.saved_at_home
    assert len(found.saved_again) < len(everything.saved_again)


def test_a_model_that_no_plan_fits_into_the_host_is_planned_for_a_larger_host() -> None:
    """What is explained is the step on the host that the explanation asks for."""

    def step(host_nbytes: int) -> Explanation:
        with torch.device("meta"):
            layers = [layer for _ in range(24) for layer in (nn.Linear(512, 512, bias=False), nn.Tanh())]
            model, x = nn.Sequential(*layers, nn.Flatten(0)), torch.ones(512, 512)
        hardware = replace(GPU, host_memory_nbytes=host_nbytes)
        return chunkc.explain(model, x, hardware=hardware, memory_budget="40MiB", chunk_size="1MiB")

    large, small = step(1 << 40), step(1 << 20)
    assert small.saved_at_home == large.saved_at_home
    assert (small.minimum_budget_nbytes, small.step_time_s) == (large.minimum_budget_nbytes, large.step_time_s)
    assert large.host_fits
    assert not small.host_fits


def test_where_nothing_else_fits_the_error_says_so() -> None:
    budget_nbytes = tight_budget(noisy=True)
    found = explained(replace(CPU, host_memory_nbytes=budget_nbytes), budget_nbytes, True)
    assert not found.fits
    assert found.minimum_budget_nbytes > budget_nbytes


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with as much memory as the budget."""
    nbytes = tight_budget(noisy=True)
    monkeypatch.setattr(chunkc.machines.devices, "compute_tier_memory", lambda: (nbytes, nbytes))
    return nbytes


def test_training_goes_by_the_machine_at_hand(small_host: int) -> None:
    options = {"memory_budget": small_host, "activations": "auto", "codegen": "eager"}
    model = torch.compile(Model(noisy=True), backend="chunkc", options=options)
    with pytest.raises(BudgetError, match="the host's memory") as error:
        model(torch.ones(ROWS, WIDTH))
    assert error.value.minimum_nbytes > small_host


def test_what_is_known_of_a_host() -> None:
    seen: Any = SimpleNamespace(offloaded=(SimpleNamespace(nbytes=100),))
    check_copies(seen, EMPTY_LAYOUT, frozenset(), replace(CPU, host_memory_nbytes=1100), 1000)
    check_copies(seen, EMPTY_LAYOUT, frozenset(), replace(GPU, host_memory_nbytes=100), 1000)
    check_copies(seen, EMPTY_LAYOUT, frozenset(), replace(GPU, host_memory_nbytes=None), 1000)
    for hardware in (replace(CPU, host_memory_nbytes=1099), replace(GPU, host_memory_nbytes=99)):
        with pytest.raises(HostFull, match="99"):
            check_copies(seen, EMPTY_LAYOUT, frozenset(), hardware, 1000)


def test_gradients_that_stay_away_from_home_take_no_room_there() -> None:
    """So the host has room for this model, and its copies are held against what is left."""
    group = SimpleNamespace(index=0, trainable=True, update_kinds=(PARAM, GRAD), nbytes=lambda kind: 1000)
    layout: Any = SimpleNamespace(groups=(group,), is_on_disk=lambda kind: False, is_in_ram=lambda kind: True)
    seen: Any = SimpleNamespace(offloaded=(SimpleNamespace(nbytes=600),))
    hardware = replace(GPU, host_memory_nbytes=1500)
    check_copies(seen, layout, frozenset(), hardware, 100)  # 2000 bytes of homes: no plan fits this host
    with pytest.raises(HostFull, match="500"):
        check_copies(seen, layout, frozenset(), hardware, 100, consumed={0})


def test_what_was_quickest_stands_while_it_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation looks for the quickest way; the first call, in which as much is possible, does not look again."""
    budgets, asked = [], []
    search, first_or_quickest = (
        chunkc.policy.activation_search.quickest,
        chunkc.policy.activation_search.first_or_quickest,
    )

    def searching(mixes: Any, *args: Any) -> Any:
        budgets.append(mixes._room.budget_nbytes)
        return search(mixes, *args)

    def asking(ways: Any, mixes: Any, *args: Any) -> Any:
        asked.append(mixes)
        return first_or_quickest(ways, mixes, *args)

    budget_nbytes = tight_budget()
    monkeypatch.setattr("chunkc.policy.activation_search.quickest", searching)
    monkeypatch.setattr("chunkc.policy.decide.first_or_quickest", asking)
    found = explained(replace(GPU, host_memory_nbytes=1 << 40), budget_nbytes)
    assert found.saved_at_home or found.saved_again
    assert len(set(budgets)) == len(budgets) < len(asked)


# ---------------------------------------------------------------- the search

CAPTURED = captured_step()


@pytest.mark.parametrize("seed", range(50))
def test_giving_up_slow_ways_changes_nothing_but_the_work(seed: int) -> None:
    """However few ways are timed to the end, the search goes the same steps and finds the same one."""
    rng = random.Random(seed)
    ways = {(m, k): ActivationPlan(frozenset({str((m, k))})) for m in range(3, 20) for k in range(17)}
    known = {absent: rng.choice([None, *map(float, range(1, 9))]) for absent in ways.values()}
    mixes: Any = SimpleNamespace(
        groups=(3, 19), recompute_regions=16, at=lambda *place: ways[place], enough_s=-math.inf
    )
    tried: list[list[ActivationPlan]] = [[], []]
    num_given_up = 0

    def patient(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan] | None:
        tried[0].append(absent)
        seconds = known[absent]
        return None if seconds is None else (seconds, absent)

    def impatient(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan] | None:
        nonlocal num_given_up
        tried[1].append(absent)
        seconds = known[absent]
        if seconds is not None and seconds > most_s:
            num_given_up += 1
            return math.inf, absent
        return None if seconds is None else (seconds, absent)

    assert quickest(mixes, impatient) == quickest(mixes, patient)
    assert tried[0] == tried[1]
    assert num_given_up


@pytest.mark.parametrize(("enough_s", "num_tried"), [(7.0, 1), (6.0, 2), (4.0, 7)])
def test_a_way_that_is_good_enough_ends_the_search(enough_s: float, num_tried: int) -> None:
    """More residents are quicker, up to 13, as long as nothing is recomputed; what is recomputed is never quick."""

    def at(m: int, k: int) -> ActivationPlan:
        return ActivationPlan(frozenset({str(m)}), frozenset({str(k)} if k else ()))

    mixes: Any = SimpleNamespace(groups=(3, 19), recompute_regions=16, at=at, enough_s=enough_s)
    tried: list[ActivationPlan] = []

    def timed(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan]:
        tried.append(absent)
        return (9.0 if absent.recomputed else 4 + abs(13 - int(*absent.offloaded)) / 2), absent

    found = quickest(mixes, timed)
    assert found[0] <= enough_s
    assert len(tried) == num_tried


def test_what_rounding_makes_quicker_is_no_step() -> None:
    """All ways take as long but for the last digit: none but the first ones and their neighbours are tried."""
    tried: list[tuple[int, int]] = []

    def timed(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan]:
        (place,) = absent.offloaded
        tried.append((int(place.partition(",")[0]), int(place.partition(",")[2])))
        return 1.0 + 1e-14 * abs(700 - tried[-1][0]), absent

    mixes: Any = SimpleNamespace(
        groups=(0, 999), recompute_regions=0, at=lambda m, k: ActivationPlan(frozenset({f"{m},{k}"})), enough_s=0.0
    )
    assert quickest(mixes, timed) is not None
    assert len(tried) == 3 + 2 * 3


def test_stretches_are_looked_for_once_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []
    monkeypatch.setattr(
        activation_plans, "leanest", lambda *asked, **kind: (searched.append((asked, kind)), RecomputeRegions((1,)))[1]
    )
    captured, spending = replace(CAPTURED), replace(LAYOUT, transient=frozenset({0}))
    for layout in (LAYOUT, spending, LAYOUT, replace(spending)):
        assert activation_plans._recompute_regions(captured, layout) == RecomputeRegions((1,))
    assert len(searched) == 2
    for chunk_nbytes in range(1, 9):
        activation_plans._recompute_regions(captured, replace(LAYOUT, chunk_nbytes=chunk_nbytes))
    assert len(captured.cache.regions) == MAX_LAYOUTS


def test_a_part_of_a_model_keeps_values_only_where_the_others_could_too() -> None:
    part = replace(CAPTURED, graph_fraction=0.25)
    assert CAPTURED.other_graphs_nbytes == 0
    assert part.other_graphs_nbytes == 3 * part.saved_nbytes > 0
    kept = Room.of(LAYOUT).minimum_nbytes(profile(CAPTURED, LAYOUT).passes)
    assert may_keep(part, Room.of(LAYOUT, kept + part.other_graphs_nbytes))
    assert not may_keep(part, Room.of(LAYOUT, kept + part.other_graphs_nbytes - 1))
    assert may_keep(CAPTURED, Room.of(LAYOUT))


def test_where_values_may_not_stay_nothing_is_searched_for() -> None:
    """Of the ways, the first one that fits in which something is absent."""
    ways = ActivationPlan(), ActivationPlan(frozenset({"a"})), ActivationPlan(recomputed=frozenset({"b"}))
    mixes: Any = SimpleNamespace(may_keep=False)

    def seconds(found: ActivationPlan, most_s: float) -> float:
        raise AssertionError("nobody asks how long it takes")

    def decided(absent: ActivationPlan) -> ActivationPlan:
        return absent

    assert first_or_quickest(ways, mixes, decided, seconds) == ways[1]
    assert first_or_quickest(ways[:1], mixes, decided, seconds) == ways[0]


@pytest.mark.parametrize("staying", range(NUM_LAYERS + 1))
def test_only_numbers_of_groups_that_make_a_difference_are_asked_for(staying: int) -> None:
    """Nothing may leave this graph: at most as many residents as have room, at least as many as leave copies theirs."""
    groups = evenly_spread(range(NUM_LAYERS))
    residents = frozenset(groups[:staying])
    needed = Room.of(LAYOUT, resident=residents).minimum_nbytes(profile(CAPTURED, LAYOUT).passes)
    slack = SLACK_CHUNKS * LAYOUT.groups[0].numel * 4

    def found(budget_nbytes: int, external_nbytes: int = 0) -> tuple[int, int]:
        return SearchSpace(CAPTURED, Room.of(LAYOUT, budget_nbytes, external_nbytes), groups, HARDWARE).groups

    assert found(needed + slack) == found(needed + slack + 9, 9)
    assert found(needed + slack)[0] == staying
    assert found(needed) == (max(0, staying - 1), staying)
    assert found(needed - 1)[1] == max(0, staying - 1)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_search_times_all_stages_of_an_update(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan that follows has them: LAMB's two cross the links twice."""
    budget_nbytes, num_stages = tight_budget(), 2 if optimizer == "lamb" else 1
    asked, timed = [], []

    def step_seconds(form: Captured, request: StepRequest, hardware: Hardware, most_s: float) -> float:
        state = request.planner_state
        requests = [replace(request, planner_state=replace(state, num_stages=n)) for n in (1, state.num_stages)]
        asked.append(state.num_stages)
        timed.append([step_s(form, each, hardware) for each in requests])
        return timed[-1][1]

    monkeypatch.setattr("chunkc.policy.decide.step_s", step_seconds)
    explained(GPU, budget_nbytes, optimizer=optimizer)
    assert {*asked} == {num_stages}
    assert all((one < all_stages) == (num_stages > 1) for one, all_stages in timed)
