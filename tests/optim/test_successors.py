"""Several optimizers of the same parameters, one after the other or in turns: each has its states, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import HUGE, array, compile_case, differences, home_of, take_step
from optim_models import results
from overlap_cases import case, minimum_nbytes
from plain_modules import Stack
from torch import nn

import chunkc

BF16 = torch.bfloat16
AdamW, LAMB = chunkc.optim.AdamW, chunkc.optim.LAMB
Make = Callable[[nn.Module], torch.optim.Optimizer]


def made(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


PAIRS: dict[str, tuple[torch.dtype, Make, Make]] = {
    "the same format": (torch.float32, made(AdamW), made(AdamW)),
    "fp32 and bf16 moments": (torch.float32, made(AdamW), made(AdamW, moments_dtype=BF16)),
    "AdamW, then LAMB": (torch.float32, made(AdamW), made(LAMB)),
    "split, then LAMB": (BF16, made(AdamW), made(LAMB)),
    "split, then whole": (BF16, made(AdamW), made(AdamW, master_weights="float32")),
    "split, then 8-bit": (BF16, made(AdamW), made(AdamW, moments_dtype="int8")),
    "split, then none": (BF16, made(AdamW), made(AdamW, stochastic_rounding=True)),
    "LAMB, then split": (BF16, made(LAMB), made(AdamW)),
}


def step(model: nn.Module, compiled: nn.Module, of: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    take_step(compiled(**of.batch(number)), optimizer)


def build(pair: str, fits: bool) -> tuple[Any, nn.Module, nn.Module]:
    of = case(PAIRS[pair][0])
    nbytes = HUGE if fits else minimum_nbytes(of) + 32768  # states in another format may take more
    model, compiled = compile_case(of, memory_budget=nbytes, whole_graph="never")
    return of, model, compiled


@pytest.mark.second_tier
@pytest.mark.parametrize("pair", PAIRS)
def test_two_optimizers_in_turns(pair: str) -> None:
    def train(fits: bool, order: Sequence[int] = (0, 1, 1, 0, 1)) -> list[Any]:
        of, model, compiled = build(pair, fits)
        pair_of = [make(model) for make in PAIRS[pair][1:]]
        for number, which in enumerate(order):
            step(model, compiled, of, pair_of[which], number)
        session, name = home_of(model.get_parameter("layers.0.weight"))
        assert session.store.views.is_managed(name) != fits
        return results(model, *pair_of)

    assert not differences(train(False), train(True))


@pytest.mark.second_tier
@pytest.mark.parametrize("load", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_second_optimizer_after_some_steps(pair: str, load: bool) -> None:
    """It begins anew, or goes on from what the first one saved."""

    def train(fits: bool) -> list[Any]:
        of, model, compiled = build(pair, fits)
        first = PAIRS[pair][1](model)
        for number in range(2):
            step(model, compiled, of, first, number)
        saved = first.state_dict() if load else None
        del first
        second = PAIRS[pair][2](model)
        assert not second.state_dict()["state"]
        if saved is not None:
            second.load_state_dict({**second.state_dict(), "state": saved["state"]})
        for number in range(2, 4):
            step(model, compiled, of, second, number)
        return results(model, second)

    assert not differences(train(False), train(True))


@pytest.mark.usefixtures("two_threads")
def test_residents_leave_for_a_second_one_with_larger_states() -> None:
    """At its first step, which finds no room for a tile beside them, and again at the next forward."""

    def train(nbytes: int) -> tuple[list[Any], list[int]]:
        of = replace(case(BF16), make=lambda: Stack(12, dtype=BF16))
        model, compiled = compile_case(of, memory_budget=nbytes, whole_graph="never")
        optimizer, num_residents = AdamW(model.parameters(), lr=1e-2, moments_dtype="int8"), []
        for number in range(4):
            compiled(**of.batch(number)).backward()
            if number == 2:
                optimizer = AdamW(model.parameters(), lr=1e-2, master_weights="float32")
            session, _ = home_of(model.get_parameter("layers.0.weight"))
            before = len(session.store.resident)
            optimizer.step()
            num_residents += [before, len(session.store.resident)]
            optimizer.zero_grad()
        return results(model), num_residents

    expected, all_stay = train(HUGE)
    found, num_residents = train(400_000)
    assert not differences(found, expected)
    assert set(all_stay) == {12}
    assert num_residents[:5] == [5] * 5
    assert num_residents[5] == 4  # left at the step


def test_what_the_first_one_saved_stays_as_it_was() -> None:
    of, model, compiled = build("the same format", False)
    first = PAIRS["the same format"][1](model)
    step(model, compiled, of, first, 0)
    saved = [state["exp_avg"] for state in first.state_dict()["state"].values()]
    before = [array(value) for value in saved]
    del first
    step(model, compiled, of, PAIRS["the same format"][2](model), 1)
    assert not differences([array(value) for value in saved], before)


@pytest.mark.parametrize("overlap", ["forward", "backward", "both"])
def test_the_first_one_goes_on_though_another_was_made(overlap: str) -> None:
    """Its states are no longer in chunks when its next update could begin in a backward."""

    def train(mode: str) -> list[Any]:
        of, model, compiled = build("split, then LAMB", False)
        first = AdamW(model.parameters(), lr=1e-2, update_on="cpu", overlap=mode)
        for number in range(2):
            step(model, compiled, of, first, number)
        second = LAMB(model.parameters(), lr=1e-2, update_on="cpu", overlap=mode)
        for number in range(2, 4):
            step(model, compiled, of, first, number)
        assert not second.state_dict()["state"]
        return results(model, first)

    assert not differences(train(overlap), train("none"))
