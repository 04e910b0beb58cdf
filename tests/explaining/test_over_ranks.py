"""A model cut over ranks, explained without any rank: parts, exchanges, links, hosts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc.explaining.formats import render_text
from chunkc.explaining.over_ranks import with_ranks
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.explanation import Explanation
from chunkc.ir.hardware import CPU
from chunkc.ir.links import BETWEEN_DEVICES, BETWEEN_HOSTS, GATHER, SCATTER, TO_DEVICE, TO_HOME
from chunkc.machines.presets import load_hardware

WIDTH, NUM_LAYERS = 256, 4
MODEL_NBYTES = 4 * NUM_LAYERS * WIDTH * WIDTH
ROOMY, TIGHT = 1 << 30, 2 << 20


def layers(num_layers: int = NUM_LAYERS) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)), nn.Flatten(0))


def explain(model: nn.Module | None = None, **options: Any) -> Explanation:
    x = torch.ones(4, WIDTH, device="meta")
    return chunkc.explain(model or layers(), x, **{"memory_budget": ROOMY, "chunk_size": "256KiB", **options})


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_has_its_part_and_exchanges_what_the_formula_says(num_ranks: int) -> None:
    """Each parameter once in the forward and once more in the backward, where it was not kept, and its gradient."""
    least = explain(hardware=CPU, world_size=num_ranks).minimum_budget_nbytes
    for budget, num_gathers in ((ROOMY, 1), (least, 2)):
        found = explain(hardware=CPU, world_size=num_ranks, memory_budget=budget, zero_stage=3)
        ranks = found.ranks
        assert found.fits
        assert (ranks.num_ranks, ranks.num_hosts, ranks.ranks_per_host) == (num_ranks, 1, num_ranks)
        assert ranks.num_parameters * num_ranks == found.num_parameters == MODEL_NBYTES // 4
        assert found.home_nbytes == 4 * MODEL_NBYTES // num_ranks, "parameter, gradient, two moments"
        assert found.chunks.resident == 0
        assert NUM_LAYERS <= ranks.gathers <= num_gathers * NUM_LAYERS
        assert ranks.scatters == NUM_LAYERS
        exchanged = (ranks.gathers + ranks.scatters) * MODEL_NBYTES // NUM_LAYERS
        assert ranks.link_nbytes[BETWEEN_DEVICES] == exchanged * (num_ranks - 1) // num_ranks
        assert ranks.link_nbytes.keys() == {TO_DEVICE, TO_HOME, BETWEEN_DEVICES}
    assert ranks.gathers > NUM_LAYERS, "a small budget gathers chunks again"


@pytest.mark.parametrize(("zero_stage", "whole"), [(3, 0), (2, 1), (1, 2)])
def test_what_stands_on_every_rank_is_gathered_once_in_a_step(zero_stage: Any, whole: int) -> None:
    model = layers()
    model[1].requires_grad_(False)
    found, cut = (explain(model, hardware=CPU, world_size=2, zero_stage=stage) for stage in (zero_stage, 3))
    tight = explain(model, hardware=CPU, world_size=2, zero_stage=zero_stage, memory_budget=found.minimum_budget_nbytes)
    assert tight.ranks is not None
    assert found.ranks.zero_stage == zero_stage
    assert tight.fits
    assert tight.minimum_budget_nbytes - cut.minimum_budget_nbytes <= whole * MODEL_NBYTES
    if zero_stage < 3:
        assert tight.minimum_budget_nbytes > cut.minimum_budget_nbytes
        assert found.ranks.gathers == tight.ranks.gathers == NUM_LAYERS - 1, "nobody changes what is frozen"
    assert found.ranks.scatters == NUM_LAYERS - 1
    assert found.home_nbytes == cut.home_nbytes


def test_the_plan_chooses_what_is_whole_and_says_so() -> None:
    """All of it where there is room, as in stage 2; in a smaller budget some, and none in the smallest."""
    model, num_layers = layers(12), 12
    forced, roomy = (explain(model, hardware=CPU, world_size=2, zero_stage=stage) for stage in (2, None))
    assert roomy.plan_text == forced.plan_text
    assert roomy.ranks.groups == forced.ranks.groups
    assert (roomy.ranks.zero_stage, [group.is_whole for group in roomy.ranks.groups]) == (None, [True] * num_layers)
    least, matrix_nbytes = roomy.minimum_budget_nbytes, MODEL_NBYTES // NUM_LAYERS
    for budget, whole in ((least, ()), (least + 5 * matrix_nbytes, (0, 8))):
        found = explain(model, hardware=CPU, world_size=2, memory_budget=budget)
        assert found.minimum_budget_nbytes == least
        assert [group.is_whole for group in found.ranks.groups] == [i in whole for i in range(num_layers)]
        assert sum(group.gathers for group in found.ranks.groups) == found.ranks.gathers
        assert all(group.gathers == 1 for group in found.ranks.groups if group.is_whole)
        between = sum(group.nbytes * (group.gathers + 1) for group in found.ranks.groups)
        assert found.ranks.link_nbytes[BETWEEN_DEVICES] == between // 2
        assert found.predicted_peak_nbytes <= budget
    text = render_text(found)
    assert "in stages of ZeRO chosen per chunk" in text
    lines = [line.strip() for line in text.splitlines() if "whole on every rank" in line]
    assert [line.split()[0] for line in lines] == ["param:0", "param:8"]
    assert all("gathered once in" in line for line in lines)
    assert any("not whole, gathered twice in" in line for line in text.splitlines())


def test_one_rank_is_a_model_that_is_not_cut() -> None:
    alone = explain(hardware=replace(load_hardware("8xv100-32g"), name="v100-32g"), world_size=1)
    assert alone.ranks is None
    small_host = replace(load_hardware("v100-32g"), host_memory_nbytes=alone.host_memory_nbytes)
    assert alone.step_time_s.to_device == explain(hardware=small_host).step_time_s.to_device
    assert not any("rank" in note for note in alone.notes)


def test_all_devices_train_together_unless_it_is_said_otherwise() -> None:
    found = explain(hardware="8xv100-32g")
    assert (found.ranks.num_ranks, found.hardware) == (8, "8xv100-32g")
    assert any("rank 0 of 8 ranks on 1 host;" in note for note in found.notes)
    assert any("never timed on real ones" in note for note in found.notes)
    assert {event.stream for event in found.events} >= {GATHER, SCATTER}


def test_cards_without_links_to_each_other_exchange_through_ram_and_explain_says_so() -> None:
    said = "no link between devices of a host is stated: they exchange through its RAM"
    for hardware, part in (("2xrtx5090", 1 / 2), ("4xrtx3090", 3 / 4)):
        found = explain(hardware=hardware)
        ranks = found.ranks
        assert ranks.link_nbytes.keys() == {TO_DEVICE, TO_HOME}
        assert ranks.link_nbytes[TO_HOME] > (ranks.gathers + ranks.scatters) * MODEL_NBYTES // NUM_LAYERS * part
        assert any(said in note for note in found.notes)
    assert not any(said in note for name in ("2xh100", "rtx5090") for note in explain(hardware=name).notes)


def test_hosts_add_up_what_their_ranks_need() -> None:
    found, host = explain(hardware=CPU, mesh="2x4"), CPU.host_memory_nbytes
    assert (found.ranks.num_hosts, found.ranks.ranks_per_host) == (2, 4)
    assert found.host.training == found.host_needs_nbytes == 4 * (found.home_nbytes + found.predicted_peak_nbytes)
    assert found.host.building == 4 * (MODEL_NBYTES + MODEL_NBYTES // 4), "each rank builds all of the model first"
    assert found.host_fits == (found.host.training <= (host or 0))
    small = replace(CPU, host_memory_nbytes=found.host.training - 1)
    assert not explain(hardware=small, mesh="2x4").host_fits
    assert "Homes of all its ranks take" in render_text(explain(hardware=small, mesh="2x4"))


def test_the_link_between_hosts_decides_and_carries() -> None:
    one, two = (explain(hardware=name, memory_budget=TIGHT * 64) for name in ("4xh100", "2x2xh100"))
    assert two.step_time_s.to_device > one.step_time_s.to_device
    assert BETWEEN_HOSTS not in one.ranks.link_nbytes
    assert two.ranks.link_nbytes[BETWEEN_HOSTS] == two.ranks.link_nbytes[BETWEEN_DEVICES]
    assert BETWEEN_DEVICES not in (explain(hardware="2x8xh100", mesh="2x1").ranks or two.ranks).link_nbytes


def test_hosts_with_copies_exchange_sums_of_gradients_alone() -> None:
    flat, copies = (explain(hardware="2x2xh100", mesh=mesh, memory_budget=TIGHT * 64) for mesh in (None, "2x2"))
    assert copies.ranks.num_parameters == 2 * flat.ranks.num_parameters
    part = MODEL_NBYTES // NUM_LAYERS // 2
    assert copies.ranks.link_nbytes[BETWEEN_DEVICES] == (copies.ranks.gathers + copies.ranks.scatters) * part
    assert copies.ranks.link_nbytes[BETWEEN_HOSTS] == copies.ranks.scatters * part
    assert copies.ranks.link_nbytes[BETWEEN_HOSTS] < flat.ranks.link_nbytes[BETWEEN_HOSTS]
    assert any("hosts have copies" in note for note in copies.notes)


@pytest.mark.parametrize(
    ("world_size", "mesh", "shape"),
    [
        (None, None, (16, 2)),
        (3, None, (3, 1)),
        (9, None, (9, 2)),
        (None, "2x4", (8, 2)),
        (8, " 1X8 ", (8, 1)),
        (None, "1x2x8", (16, 2)),
        (8, "2x2x2", (8, 2)),
    ],
)
def test_ranks_by_number_or_by_hosts(world_size: int | None, mesh: str | None, shape: tuple[int, int]) -> None:
    found = with_ranks(load_hardware("2x8xh100"), world_size, mesh)
    assert (found.num_devices, found.num_hosts) == shape


@pytest.mark.parametrize(
    ("world_size", "mesh", "message"),
    [
        (17, None, "17 ranks need a device each; the hosts of 2x8xh100 are 2 of 8 devices each"),
        (None, "3x1", "3 ranks on 3 hosts need a device each"),
        (None, "2x", "mesh is '2x'; allowed: hosts and ranks on each"),
        (None, "2x2x2x2", "mesh is '2x2x2x2'; allowed: .* such as 2x4x2"),
        (None, "1x3x8", "24 ranks need a device each"),
        (4, "2x4", "world_size is 4, but mesh '2x4' has 8 ranks"),
    ],
)
def test_ranks_that_cannot_be(world_size: int | None, mesh: str | None, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        with_ranks(load_hardware("2x8xh100"), world_size, mesh)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum()


def transposed() -> nn.Module:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight.data = model.weight.data.t().clone(memory_format=torch.preserve_format)
    return model


def test_no_such_stage() -> None:
    with pytest.raises(OptionsError, match="zero_stage is 0; allowed: 1, 2, 3, or None"):
        explain(hardware=CPU, world_size=2, zero_stage=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "rerun"}, 'distributed models keep what the forward saves \\(activations="keep"\\)'),
        ({"moments_dtype": "int8"}, "AdamW updates distributed parameters with fp32 or bf16 moments"),
        ({"model": transposed()}, "weight is not contiguous"),
    ],
)
def test_what_ranks_refuse_is_refused(options: dict[str, Any], message: str) -> None:
    explain(**{"hardware": CPU, **options})
    with pytest.raises(UnsupportedError, match=message):
        explain(**{"hardware": CPU, "world_size": 2, **options})


def test_where_a_part_is_and_no_alternatives() -> None:
    why = explain(hardware=CPU, world_size=2, memory_budget=TIGHT, why="0.weight").why
    assert why.alternatives == ()
    assert any(happening.what == "fetched" for happening in why.happenings)
