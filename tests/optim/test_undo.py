"""`overlap="backward", undoable=True`: `step()` undoes what it must, to the bit, and nothing is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from harness import array, differences
from slot_cases import ADAMW, Act, Subject, begun_groups, clip_some, explained, interrupt_a_backward, nothing
from slot_cases import trained_undoably as trained

import chunkc

pytestmark = pytest.mark.timeout(120)

UNDOABLE: dict[str, Any] = {**ADAMW, "undoable": True}


def change_a_gradient(made: Subject, step: int) -> None:
    made.model.get_parameter("layers.1.weight").grad.mul_(0.5)


def add_a_second_backward(made: Subject, step: int) -> torch.Tensor:
    return made.backward(step + 10)


def read_it_all(made: Subject, step: int) -> torch.Tensor:
    """Between backward and step all is as the last step has left it, but for the gradients."""
    saved = made.optimizer.state_dict()
    values = [p.detach().double().sum() for p in made.model.parameters()]
    values += [p.grad.double().sum() for p in made.model.parameters()]
    values += [torch.as_tensor(v).double().sum() for s in saved["state"].values() for v in s.values()]
    return torch.stack(values)


@pytest.mark.parametrize("act", [nothing, clip_some, add_a_second_backward, read_it_all])
def test_whatever_comes_between_has_the_same_bits(act: Act) -> None:
    """Writes are those of `test_unseen_writes`."""
    found, made, begun = trained("backward", act)
    assert not differences(found, trained("none", act)[0])
    assert begun[0] == set()
    assert begun[1] == begun[-1] == made.moving
    assert [bool(groups) for groups in begun[2:4]] == [act is not clip_some] * 2


def test_views_of_parameters_and_states_see_every_step() -> None:
    """Whose memory somebody has views of keeps its place."""
    made = Subject("backward", arguments=UNDOABLE)
    made.step(0)
    weight = made.model.get_parameter("layers.2.weight")
    view, moments = weight.detach(), made.optimizer.state[weight]["exp_avg"].view(-1)
    for step in range(1, 4):
        made.backward(step)
        before = view.clone(), moments.clone()
        assert begun_groups(made)
        made.optimizer.step()
        assert torch.equal(view, weight)
        assert torch.equal(moments, made.optimizer.state[weight]["exp_avg"].view(-1))
        assert not torch.equal(view, before[0])
        assert not torch.equal(moments, before[1])
        made.optimizer.zero_grad()
    assert not differences(made.state(), trained("none", nothing, num_steps=4)[1].state())


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_the_cpu_updates_at_home_with_the_same_bits(overlap: str) -> None:
    arguments = {**ADAMW, "update_on": "cpu"}
    for act in (clip_some, change_a_gradient, read_it_all):
        found, made, begun = trained(overlap, act, arguments=arguments)
        assert begun[-1] == made.moving
        assert not differences(found, trained("none", act, arguments=arguments)[0])


@pytest.mark.parametrize("scaled_by", [torch.amp.GradScaler, chunkc.GradScaler])
def test_a_loss_scale_and_its_overflows(scaled_by: Any) -> None:
    """The scale grows every other step, and one overflows. PyTorch's scaler writes gradients, so all is undone."""

    def train(overlap: str) -> tuple[list[Any], list[int], int]:
        arguments = UNDOABLE if overlap == "backward" else ADAMW
        made = Subject(overlap, dtype=torch.float16, arguments=arguments)
        scaler = scaled_by("cpu", init_scale=2.0**10, growth_interval=2)
        found, stood = [], []
        for step in range(7):
            loss = made.compiled(**made.case.batch(step))
            scaler.scale(loss * (torch.inf if step == 4 else 1.0)).backward()
            if scaled_by is chunkc.GradScaler:
                found.append(array(scaler.clip_grad_norm_(made.optimizer, 1e6)))
            waiting = begun_groups(made)
            before = [array(p) for p in made.model.parameters()]
            scaler.step(made.optimizer)
            stood.append(len(waiting) if differences(before, [array(p) for p in made.model.parameters()]) else 0)
            scaler.update()
            made.optimizer.zero_grad()
            found.append(scaler.get_scale())
        return [*found, *made.state()], stood, len(made.moving)

    found, stood, num = train("backward")
    assert not differences(found, train("none")[0])
    if scaled_by is chunkc.GradScaler:
        assert stood == [0, num, num, num, 0, 0, num]


def test_an_interrupted_backward_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four updates one has ended, and one was interrupted between its tiles: neither has happened."""
    made = Subject("backward", arguments=UNDOABLE)
    made.step(0)
    before = made.state()
    interrupt_a_backward(made, monkeypatch)
    assert not differences(made.state(), before)
    made.optimizer.zero_grad()
    made.step(1)
    made.step(2)
    assert not differences(made.state(), trained("none", nothing, num_steps=3)[1].state())


@pytest.mark.second_tier
def test_what_is_explained_is_what_happens() -> None:
    """Home has twins, the backward copies what is predicted, and each moment has its bytes."""
    made = Subject("backward", arguments=UNDOABLE, codegen="eager")
    for step in range(3):
        made.step(step)
    before = made.moved_nbytes
    made.step(3)
    moved = made.moved_nbytes[0] - before[0], made.moved_nbytes[1] - before[1]
    found = explained(made, overlap="backward", undoable=True)
    assert (found.traffic_nbytes.to_device, found.traffic_nbytes.to_home) == moved
    assert found.home_nbytes == made.store.arena.nbytes
    plan = made.session.records.latest["backward"].plan
    largest = {m.name: max(e.nbytes for e in found.moments if e.call == m.name) for m in plan.phases[1].moments}
    assert largest == {m.name: m.nbytes for m in plan.phases[1].moments}
    assert any(name.startswith("update.") for name in largest)
    assert any("home has room for parameters and states twice" in note for note in found.notes)


def test_what_to_do_about_undone_steps_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "chunkc.optim.update_scheduler"):
        trained("backward", nothing)
        assert not caplog.records
        trained("backward", change_a_gradient)
    (record,) = caplog.records
    assert "clip_grad_norm_" in record.getMessage()
    assert "accumulating" in record.getMessage()
