"""`overlap="backward"` on the device: the backward updates chunks in slots, and their gradients go nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import differences
from slot_cases import WITHOUT_GRADIENTS, Subject, interrupt_a_backward, trained

import chunkc
from chunkc.runtime.store.consumed_gradients import ConsumedGradient

pytestmark = pytest.mark.timeout(120)


def test_the_backward_updates_with_the_same_bits() -> None:
    found, made = trained("backward")
    assert not differences(found, trained("none")[0])
    made.backward(4)
    assert made.used == made.moving


def test_copies_are_those_of_states_and_of_parameters_once() -> None:
    """In a step, beside the forward's and the backward's own fetches: states both ways, parameters home."""
    made = Subject("backward")
    made.step(0)
    made.step(1)
    before = made.store.slots.traffic.to_device_nbytes, made.store.slots.traffic.to_home_nbytes
    made.backward(2)
    in_backward = made.store.slots.traffic.to_device_nbytes, made.store.slots.traffic.to_home_nbytes
    made.optimizer.step()
    assert (made.store.slots.traffic.to_device_nbytes, made.store.slots.traffic.to_home_nbytes) == in_backward
    groups = made.store.layout.groups
    states = sum(group.nbytes(kind) for group in groups for kind in group.state_kinds)
    parameters = sum(group.nbytes("param") for group in groups)
    assert in_backward[1] - before[1] == states + parameters
    plan = made.session.records.latest["backward"].plan
    fetches = [e for p in plan.phases for stop in p.stops for e in stop if e.kind == "prefetch"]
    assert in_backward[0] - before[0] == states + sum(e.nbytes for e in fetches if e.item.kind == "param")


def test_gradients_accumulate_where_the_user_says_so() -> None:
    def train(overlap: str) -> list[Any]:
        made = Subject(overlap)
        for step in range(3):
            with made.optimizer.accumulating():
                made.backward(2 * step)
                assert not made.used
                made.backward(2 * step + 1)
            made.backward(2 * step + 10)
            assert made.used == (made.moving if overlap == "backward" else set())
            made.optimizer.step()
            made.optimizer.zero_grad()
        return made.state()

    assert not differences(train("backward"), train("none"))


WHERE = pytest.mark.parametrize("spare_nbytes", [1 << 16, WITHOUT_GRADIENTS], ids=["in slots", "where it stays"])


@WHERE
def test_a_used_gradient_refuses_whoever_needs_it(spare_nbytes: int) -> None:
    made = Subject("backward", spare_nbytes)
    made.step(0)
    made.backward(1)
    weight = made.model.get_parameter("layers.2.weight")
    assert isinstance(weight.grad, ConsumedGradient)
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
    assert "consumed" in repr(weight.grad)
    refused = [
        lambda: torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0),
        lambda: weight.grad.clone(),
        lambda: made.optimizer.zero_grad(set_to_none=False),
        lambda: (weight * 2).sum().backward(),
    ]
    for use in refused:
        with pytest.raises(chunkc.UnsupportedError, match=r"gradient of layers.*was consumed.*zero_grad"):
            use()
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(2))
    made.optimizer.step()
    with pytest.raises(chunkc.UnsupportedError, match=r"gradient of layers.*was consumed"):
        made.optimizer.step()
    with pytest.raises(chunkc.UnsupportedError, match=r"gradient of layers.*was consumed"):
        made.backward(2)
    made.optimizer.zero_grad()
    made.step(2)


def change_a_parameter(made: Subject) -> None:
    with torch.no_grad():
        made.model.get_parameter("layers.2.weight").clamp_(-0.1, 0.1)


def drop_a_gradient(made: Subject) -> None:
    made.model.get_parameter("layers.2.weight").grad = None


def change_the_rate(made: Subject) -> None:
    made.optimizer.param_groups[0]["lr"] = 0.5


@WHERE
@pytest.mark.parametrize("change", [change_a_parameter, drop_a_gradient, change_the_rate])
def test_changes_after_the_update_are_refused(change: Any, spare_nbytes: int) -> None:
    made = Subject("backward", spare_nbytes)
    made.step(0)
    made.backward(1)
    assert "layers.2.weight" in made.used_names
    change(made)
    with pytest.raises((chunkc.UnsupportedError, chunkc.OptionsError), match=r"layers.*after its update had begun"):
        made.optimizer.step()


def test_hooks_and_what_users_write_keep_their_meaning() -> None:
    """A hooked parameter's chunk is the step's; lower bits of other contents are left out before they are fetched."""

    def train(overlap: str) -> list[Any]:
        made = Subject(overlap, dtype=torch.bfloat16)
        made.model.get_parameter("layers.1.weight").register_hook(lambda grad: grad * 2)
        found = [made.step(batch) for batch in range(2)]
        change_a_parameter(made)
        found += [made.step(2)]
        made.backward(3)
        assert len(made.used) == (3 if overlap == "backward" else 0)
        made.optimizer.step()
        return [*found, *made.state()]

    assert not differences(train("backward"), train("none"))


def test_a_backward_that_fails_before_an_update_leaves_it_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four updates one has ended, and one was interrupted between its tiles: the step says so, once."""
    made = Subject("backward")
    made.step(0)
    interrupt_a_backward(made, monkeypatch)
    assert made.store.slots.present == frozenset()
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(2))
    with pytest.raises(chunkc.StreamError, match=r"interrupted in the backward and is half done"):
        made.optimizer.step()
    made.optimizer.zero_grad()
    made.step(2)


def test_the_plan_says_what_is_used_to_the_byte() -> None:
    """At every moment of the backward, its updates among them."""
    made = Subject("backward", codegen="eager")
    made.step(0)
    made.step(1)
    made.backward(2)
    report = chunkc.report(made.compiled)
    updates = [name for name, _, _ in report.moments if name.startswith("update.")]
    assert len(updates) >= 4
    record = made.session.records.latest["backward"]
    assert {name for name, _ in record.measurement.peaks} == {
        m.name for m in record.plan.moments if m.phase == "backward"
    }
