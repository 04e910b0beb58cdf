"""`chunkc explain --why`: where a part is, and what the alternatives cost, beside the plan itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc.explaining.formats import render_text
from chunkc.ir.errors import OptionsError
from chunkc.ir.explanation import Alternative, Explanation, Why

MIB = 1 << 20
SMALL, MIDDLE, LARGE = 7 * MIB, int(9.5 * MIB), 1 << 30
"""Budgets in which all groups move, the first ones stay, and all stay."""


class Breaking(nn.Module):
    """A model of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.body[:4](x)
        torch._dynamo.graph_break()
        return self.body[4:](half)


def layers() -> nn.Sequential:
    return nn.Sequential(*[module for _ in range(4) for module in (nn.Linear(256, 256), nn.GELU())])


@cache
def asked(why: str, budget: int = SMALL, make: Callable[[], nn.Module] | None = None, **options: Any) -> Explanation:
    model = nn.Sequential(layers()) if make is None else make()
    settings = {"memory_budget": budget, "hardware": "cpu", "chunk_size": "260KiB", "activations": "keep", **options}
    return chunkc.explain(model, torch.randn(512, 256), why=why, **settings)


def answer(*args: Any, **options: Any) -> Why:
    found = asked(*args, **options).why
    assert found is not None
    return found


def alternative(why: Why, what: str) -> Alternative:
    (found,) = [one for one in why.alternatives if what in one.what]
    return found


def test_nothing_is_asked() -> None:
    assert chunkc.explain(layers(), torch.randn(2, 256)).why is None


@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}, {"activations": "offload"}], ids=str)
def test_of_the_whole_model_every_copy_is_told(options: dict[str, Any]) -> None:
    explanation = asked("0", **options)
    told = sum(one.nbytes for one in explanation.why.happenings if one.copy_s)
    traffic = explanation.traffic_nbytes
    assert told == traffic.to_device + traffic.to_home > 0
    stalls = sum(one.stall_s for one in explanation.why.happenings)
    assert stalls == pytest.approx(explanation.step_time_s.stall)


def test_one_that_moves() -> None:
    explanation, found = asked("0.2.weight"), answer("0.2.weight")
    times = [one.at_s for one in found.happenings]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= explanation.step_time_s.total
    assert [one.what for one in found.happenings if one.item == "param:1"] == ["fetched", "needed", "let go"]
    assert found.chosen == ("param:1: moves, with gradient and states",)
    assert [one.what for one in found.alternatives] == ["all its chunks stay on the device"]
    assert found.alternatives[0].step_time_s is None
    assert found.alternatives[0].minimum_nbytes > SMALL


def test_one_that_stays() -> None:
    explanation = asked("0.4.weight", MIDDLE)
    found = explanation.why
    assert found.chosen == ("param:2: stays on the device, with gradient and states",)
    assert not found.happenings
    (moves,) = found.alternatives
    assert moves.what == "all its chunks move"
    assert moves.step_time_s > explanation.step_time_s.total


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_an_alternative_is_the_step_that_would_be_planned(overlap: str) -> None:
    """All moving under a large budget, and all staying: the one is the other's alternative."""
    stays = asked("0", LARGE, overlap=overlap)
    assert stays.why is not None
    forced = alternative(stays.why, "all its chunks move").step_time_s
    needed = alternative(answer("0", SMALL, overlap=overlap), "all its chunks stay").minimum_nbytes
    assert asked("0", needed, overlap=overlap).chunks.resident == 4
    assert asked("0", needed - 1, overlap=overlap).chunks.resident < 4
    assert forced >= stays.step_time_s.total


def test_saved_values() -> None:
    kept = asked("0.4")
    assert "kept on the device until the backward has read it" in kept.why.chosen[-1], kept.why
    away = alternative(kept.why, "saved values go home")
    assert away.step_time_s > kept.step_time_s.total
    home = asked("0.4", activations="offload").why
    assert "goes home between forward and backward" in home.chosen[-1]
    assert {"copied home", "home", "let go", "fetched", "needed"} == {
        one.what for one in home.happenings if one.item.startswith("forward")
    }


def test_a_value_that_goes_home_alone_costs_what_its_plan_costs() -> None:
    (storage, *_) = [one.item for one in answer("0", activations="offload").happenings if "forward" in one.item]
    found = answer(storage)
    assert found.chosen == (f"saved {storage}: kept on the device until the backward has read it",)
    assert [one.what for one in found.alternatives] == ["its saved values go home", "its saved values are made again"]


def test_saved_values_that_are_made_again() -> None:
    again = asked("0", LARGE, activations="rerun")
    assert any("dropped, and made again by the backward" in one for one in again.why.chosen), again.why
    assert again.saved_again
    assert 0 < again.recompute_s < again.step_time_s.compute
    assert "saved values that the backward makes again, in" in " ".join(render_text(replace(again, why=None)).split())
    kept = alternative(again.why, "saved values are kept").step_time_s
    assert kept < again.step_time_s.total


def test_parts_by_every_kind_of_name() -> None:
    of_chunk = answer("param:1")
    assert of_chunk.happenings
    for name in ("grad:1", "exp_avg:1"):
        assert answer(name) == replace(of_chunk, name=name)
    assert answer("0.2").chosen[:2] == (
        "param:1: moves, with gradient and states",
        "0.2.bias: in no chunk, too small to move, and stays on the device",
    )
    with pytest.raises(OptionsError, match=r"no parameter, module, chunk .*'0.2.wait'; near it are 0.2.weight"):
        asked("0.2.wait")


def test_a_model_of_several_graphs() -> None:
    explanation = asked("body", make=Breaking)
    found = explanation.why
    assert {one.before.partition(".")[0] for one in found.happenings} >= {"forward", "backward", "update"}
    assert sum(one.nbytes for one in found.happenings if one.copy_s) == sum(vars(explanation.traffic_nbytes).values())
    assert alternative(found, "stay").minimum_nbytes


def test_a_budget_that_is_too_small() -> None:
    explanation = asked("0.2.weight", MIB)
    assert not explanation.fits
    assert explanation.why is not None
    text = render_text(explanation)
    assert "does not fit" in text
    assert "needs a budget of" in text


def test_the_text_answers_that_alone() -> None:
    text = render_text(asked("0"))
    assert "what the plan does with it" in text
    assert "with all else as it is, in 7.00 MiB" in text
    assert "as it is planned" in text
    assert "host memory" not in text
