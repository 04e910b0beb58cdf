"""The argument `overlap`: what each value stands for, and which make sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import TINY, array, compile_case, differences, refuse, session_of
from overlap_cases import case, minimum_nbytes

import chunkc
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ParamSpec, is_state
from chunkc.machines.presets import load_hardware, preset
from chunkc.optim.pauses import Pauses
from chunkc.optim.update_mode import UpdateMode, resolved
from chunkc.passes.planning.layout import lay_out
from chunkc.policy.host_memory import home_nbytes, shadow_copies_nbytes, with_room_for_copies

NUM_GROUPS = 4
LAYOUT = lay_out(
    [ParamSpec(f"{place}.weight", (1 << 20,), (1,), torch.bfloat16, True) for place in range(NUM_GROUPS)], 1 << 21
)


def resolved_on(hardware: Hardware, **changed: Any) -> UpdateMode:
    mode, layout = UpdateMode("auto", changed.pop("update_on", "device")), changed.pop("layout", LAYOUT)
    return resolved(mode, layout, hardware, **{"num_stages": 1, "over_ranks": False, **changed})


def test_auto_updates_in_the_backward_what_half_of_the_host_s_room_has_copies_of() -> None:
    gpu, every = load_hardware("rtx3090"), range(NUM_GROUPS)
    once, of_one = home_nbytes(LAYOUT, frozenset()), shadow_copies_nbytes(LAYOUT, [0])
    assert shadow_copies_nbytes(LAYOUT, every) == NUM_GROUPS * of_one > 0
    staged = UpdateMode("backward", undoable=True)

    def groups(copied_nbytes: int) -> frozenset[int]:
        mode = resolved_on(replace(gpu, host_memory_nbytes=once + 2 * copied_nbytes))
        if mode == UpdateMode("none"):
            return frozenset()
        assert (mode.mode, mode.undoable) == ("backward", True)
        return mode.of_backward(every)

    assert [len(groups(num * of_one + rest)) for num in every for rest in (0, of_one - 1)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert groups(2 * of_one) < groups(3 * of_one) < frozenset(every)
    assert resolved_on(replace(gpu, host_memory_nbytes=once + 2 * NUM_GROUPS * of_one)) == staged
    assert resolved_on(replace(gpu, host_memory_nbytes=once - 1)) == staged  # planned for a host that has room
    assert resolved_on(replace(gpu, host_memory_nbytes=None)) == staged


def test_with_states_on_a_disk_memory_and_disk_have_to_have_room() -> None:
    layout = replace(LAYOUT, disk_holds="states")
    in_ram, on_disk = (shadow_copies_nbytes(layout, [0], counts) for counts in (layout.is_in_ram, is_state))
    assert 0 < in_ram < shadow_copies_nbytes(layout, [0]) == in_ram + on_disk
    once = home_nbytes(layout, frozenset(), counts=layout.is_in_ram)
    mode = resolved_on(replace(load_hardware("rtx3090"), host_memory_nbytes=once + 2 * in_ram), layout=layout)
    assert mode.backward_groups is not None
    assert len(mode.backward_groups) == 1
    assert with_room_for_copies(layout, range(NUM_GROUPS), 3 * in_ram) == {0, 1, 2}
    assert with_room_for_copies(layout, [3, 1, 0, 2], 3 * in_ram, 2 * on_disk) == {1, 3}
    assert with_room_for_copies(layout, range(NUM_GROUPS), 4 * in_ram, on_disk - 1) == frozenset()


def test_only_what_the_backward_may_update_has_shadow_copies() -> None:
    assert UpdateMode("backward", undoable=True).shadow_copied(LAYOUT, frozenset({1})) == {0, 2, 3}
    assert UpdateMode("backward", undoable=True, backward_groups=frozenset({0, 1})).shadow_copied(
        LAYOUT, frozenset({1})
    ) == {0}
    assert UpdateMode("backward").shadow_copied(LAYOUT, frozenset()) == frozenset()


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": replace(LAYOUT, disk_holds="everything")},
        {"num_stages": 2},
        {"over_ranks": True},
        {"update_on": "cpu"},
    ],
)
def test_auto_is_none_elsewhere(changed: dict[str, Any]) -> None:
    assert resolved_on(load_hardware("rtx3090")).mode == "backward"
    assert resolved_on(load_hardware("rtx3090"), **changed).mode == "none"
    assert resolved_on(replace(load_hardware("rtx3090"), kind="cpu")).mode == "none"


def test_others_stay_what_they_are() -> None:
    for mode in (UpdateMode("backward"), UpdateMode("both", "cpu", undoable=True), UpdateMode("none")):
        assert resolved(mode, LAYOUT, load_hardware("rtx3090"), num_stages=1, over_ranks=False) is mode


def test_pauses_double_as_long_as_each_attempt_is_undone() -> None:
    pauses, tried = Pauses(), []
    for step in range(20):
        tried.append(pauses.may_try)
        pauses.has_undone = pauses.may_try and step < 12
        pauses.end_step()
    assert [step for step, has_tried in enumerate(tried) if has_tried] == [0, 2, 5, 10, *range(19, 20)]
    assert pauses.may_try


def test_a_disk_is_no_memory_to_update() -> None:
    of = case()
    budget = refuse(of, memory_budget=TINY, home="disk").minimum_nbytes
    model, compiled = compile_case(of, memory_budget=budget, home="disk", whole_graph="never")
    optimizer = chunkc.optim.AdamW(model.parameters(), update_on="cpu")
    compiled(**of.batch(0)).backward()
    before = [array(p) for p in model.parameters()]
    with pytest.raises(chunkc.OptionsError, match='home="cpu", or update_on="device"'):
        optimizer.step()
    assert not differences(before, [array(p) for p in model.parameters()])


def test_auto_divides_by_cost_on_a_gpu_and_leaves_disks_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case()
    model, compiled = compile_case(of, memory_budget=minimum_nbytes(of), whole_graph="never")
    compiled(**of.batch(0))
    session = session_of(model)
    groups = session.store.layout.groups
    monkeypatch.setattr(session, "hardware", preset("h200"))

    def at_home(update_on: str) -> frozenset[int]:
        return UpdateMode(update_on=update_on).at_home(groups, session.hardware, home=session.options.home)

    assert at_home("auto")
    assert at_home("device") == frozenset()
    assert at_home("cpu") == frozenset(group.index for group in groups)
    on_disk = session.options.model_copy(update={"home": "disk"})
    session.agree(replace(session.terms, options=on_disk))
    assert at_home("auto") == frozenset()
