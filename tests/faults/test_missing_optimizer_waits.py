"""Each wait of an optimizer's own doors left out once: what is read or kept then is wrong; with the wait it is right.

Updates stand still until a gate opens: while a door waits, or, where its wait is left out, when it has let us through.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuda_path_subjects
import pytest
import torch
from cuda_path_subjects import budget, on_fake_gpu
from harness import array, differences
from optim_models import through_a_file
from overlap_cases import Late, Subject
from plain_modules import Stack
from torch import Tensor
from zoo import Case, floats

import chunkc

pytestmark = pytest.mark.timeout(120)

SHORT_S, LONG_S = 0.1, 20.0
EXP_AVG = "exp_avg"


class ExternalBytes(Late):
    """No update begins before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.opened.set()

    def __call__(self) -> float:
        assert self.opened.wait(LONG_S), "nobody opened the gate"
        return 0.0


class Gated(Subject):
    """The model, compiled once; `begin` starts training anew with another optimizer."""

    def __init__(self) -> None:
        self.gate = ExternalBytes()
        super().__init__("none", Late(), self.gate)
        self.start = [p.detach().clone() for p in self.model.parameters()]

    def begin(self, overlap: str) -> None:
        """A gradient is there, and no update has begun."""
        self.gate.opened.set()
        self.store.updates.finish()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.start, strict=True):
                parameter.copy_(value)
                parameter.grad = None
        self.optimizer = chunkc.optim.AdamW(
            self.model.parameters(), lr=1e-2, weight_decay=0.1, update_on="cpu", overlap=overlap
        )
        self.backward(0)

    @property
    def weight(self) -> Tensor:
        """The one whose chunk is updated last."""
        return self.weight_of(3)

    def states(self, optimizer: Any = None) -> dict[str, Tensor]:
        """The weight's states, past every door."""
        return (optimizer or self.optimizer).__dict__["state"][self.weight]

    def values(self) -> list[Any]:
        return [array(p) for p in self.model.parameters()]


@dataclass(frozen=True)
class Door:
    """A door of an optimizer behind a step whose updates go on.

    Attributes:
        act: goes through it, and returns what is read there.
        leave_out: the methods, by a path from the subject, of which each is a no-op then.
    """

    name: str
    act: Callable[[Gated], list[Any]]
    leave_out: tuple[str, ...] = ("optimizer.scheduler.finish",)
    overlap: str = "forward"

    def __str__(self) -> str:
        return self.name


def synchronize(made: Gated) -> list[Any]:
    made.optimizer.synchronize()
    return made.values()


def synchronize_the_model(made: Gated) -> list[Any]:
    chunkc.synchronize(made.model)
    return made.values()


def state(made: Gated) -> list[Any]:
    return [array(made.optimizer.state[made.weight][EXP_AVG])]


def state_dict(made: Gated) -> list[Any]:
    return [array(found[EXP_AVG]) for found in made.optimizer.state_dict()["state"].values()]


def deepcopy(made: Gated) -> list[Any]:
    other = copy.deepcopy(made.optimizer)
    return [array(found[EXP_AVG]) for found in other.__dict__["state"].values()]


def pickle(made: Gated) -> list[Any]:
    other = through_a_file(made.optimizer)
    return [array(found[EXP_AVG]) for found in other.__dict__["state"].values()]


def load(made: Gated) -> list[Any]:
    """The update under way must not be written over what is loaded."""
    groups = copy.deepcopy(made.optimizer.param_groups)
    ids, loaded = iter(range(100)), {}
    for group in groups:
        group["params"] = [next(ids) for _ in group["params"]]
    for index, parameter in enumerate(made.model.parameters()):
        moments = {kind: torch.full_like(parameter, 0.25) for kind in (EXP_AVG, "exp_avg_sq")}
        loaded[index] = {"step": torch.tensor(7.0), **moments}
    made.optimizer.load_state_dict({"state": loaded, "param_groups": groups})
    return []


def zero_grad(made: Gated) -> list[Any]:
    made.optimizer.zero_grad(set_to_none=False)
    return []


def another_step(made: Gated) -> list[Any]:
    """A state that the user puts in between goes home after the first update, not before."""
    made.states()[EXP_AVG] = torch.full_like(made.weight, 0.5)
    made.optimizer.step()
    return []


def another_backward_s_update(made: Gated) -> list[Any]:
    """The same, where the update begins in a backward."""
    made.states()[EXP_AVG] = torch.full_like(made.weight, 0.5)
    index, updates = made.store.views.group_index("layers.3.weight"), made.optimizer.scheduler.in_session(made.session)
    updates.begin_update(index)
    assert index in updates.begun
    return []


def what_is_not_compiled_reads(made: Gated) -> list[Any]:
    return [array(made.weight)]


DOORS = [
    Door("synchronize", synchronize),
    Door("chunkc.synchronize", synchronize_the_model, ("store.updates._wait_for", "store.updates._forget")),
    Door("state", state),
    Door("state_dict", state_dict),
    Door("deepcopy", deepcopy),
    Door("pickle", pickle),
    Door("zero_grad(set_to_none=False)", zero_grad),
    # Either of the two is enough on a CPU; `fill` waits for nothing where a device has what is loaded.
    Door("load_state_dict", load, ("optimizer.scheduler.finish", "store.slots.await_home")),
    Door("another step", another_step, ("store.updates.wait",)),
    Door("another backward's update", another_backward_s_update, ("store.updates.wait",), "both"),
    Door("end of a step with what is not compiled", what_is_not_compiled_reads, ("store.updates.wait",)),
]


@pytest.fixture(scope="module")
def made() -> Iterator[Gated]:
    yield (made := Gated())
    made.gate.opened.set()
    made.store.updates.finish()


def outcome(made: Gated, door: Door, *, held: bool, left_out: bool) -> list[Any]:
    """What is read behind the door, and what is there when everything is over."""
    made.begin(door.overlap)
    timer = threading.Timer(SHORT_S, made.gate.opened.set)
    with pytest.MonkeyPatch.context() as patch:
        if door.act is what_is_not_compiled_reads:
            patch.setattr(made.session, "trained", made.session.trained - {"layers.3.weight"})
        for path in door.leave_out if left_out else ():
            *owners, name = path.split(".")
            owner: Any = made
            for part in owners:
                owner = getattr(owner, part)
            patch.setattr(owner, name, lambda *args: None)
        if held:
            made.gate.opened.clear()
        if held and not left_out:
            timer.start()
        made.optimizer.step()
        seen = door.act(made)
        assert made.gate.opened.is_set() != left_out, "it waited" if left_out else "it did not wait"
    made.gate.opened.set()
    made.store.updates.finish()
    timer.cancel()
    return [*seen, *made.values(), array(made.states()[EXP_AVG])]


@pytest.mark.parametrize("door", DOORS, ids=str)
def test_every_door_s_wait_matters(made: Gated, door: Door) -> None:
    expected = outcome(made, door, held=False, left_out=False)
    assert not differences(outcome(made, door, held=True, left_out=False), expected)
    assert differences(outcome(made, door, held=True, left_out=True), expected)


def test_a_failed_update_is_told_before_anything_is_loaded(made: Gated) -> None:
    """So the load may be made again: what `load_state_dict` waits for at its beginning is told there."""
    made.begin("forward")
    saved = copy.deepcopy(made.optimizer.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkc.optim.elementwise.chunk_update", lambda *args, **options: 1 / 0)
        patch.setattr("chunkc.optim.optimizer.update_in_place", lambda *args: None)
        made.optimizer.step()
        before = dict(made.states())
        with pytest.raises(chunkc.StreamError, match=r"layers.*division by zero"):
            made.optimizer.load_state_dict(saved)
    assert made.states().keys() == before.keys() > {EXP_AVG}
    made.optimizer.load_state_dict(saved)
    assert not made.states()


# ---------------------------------------------------------------- a device that is behind


# All of it moves.
STACK = Case("stack", lambda: Stack(3, bias=False), lambda seed: {"x": floats(seed, (4, 64))})


@pytest.mark.second_tier
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_step_s_updates_come_after_all_that_was_enqueued(overlap: str) -> None:
    """Eager code on the device makes a gradient at home zero, late; the CPU's update comes later still."""
    seen = []
    for held, left_out in ((False, False), (True, False), (True, True)):
        gate = threading.Event()
        with on_fake_gpu(), pytest.MonkeyPatch.context() as patch:
            made = cuda_path_subjects.Subject(STACK, budget(STACK, 0))
            optimizer = chunkc.optim.AdamW(made.model.parameters(), lr=1e-2, update_on="cpu", overlap=overlap)
            made.compiled(**STACK.batch(0)).backward()
            made.settle()
            gradient = made.model.get_parameter("layers.1.weight").grad
            assert gradient is not None
            if held:
                made.tier.enqueue(gate.wait, LONG_S)
            made.tier.enqueue(gradient.zero_)
            if left_out:
                patch.setattr(made.tier, "mark", lambda: ())
            elif held:
                timer = threading.Timer(SHORT_S, gate.set)
                timer.start()
            optimizer.step()
            made.session.store.updates.finish()
            assert gate.is_set() == (held and not left_out)
            gate.set()
            made.settle()
            seen.append([array(p) for p in made.model.parameters()])
    expected, found, without = seen
    assert not differences(found, expected)
    assert differences(without, expected)
