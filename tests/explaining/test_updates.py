"""`update_on` and `overlap` in an explanation: what crosses the link, and what of the optimizer is hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_modules import Stack

import chunkc
from chunkc.ir.explanation import HOST_UPDATES, Explanation
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import PREFETCH
from chunkc.ir.program import BACKWARD, FORWARD, UPDATE
from chunkc.ir.simulate import RESIDENT_UPDATE
from chunkc.machines.presets import load_hardware


def explained(
    update_on: str, overlap: str, hardware: str | Hardware = "h200", *, memory_budget: str = "220MiB", **options: Any
) -> Explanation:
    with torch.device("meta"):
        model, x = Stack(6, width=1024, bias=False), torch.empty(4096, 1024)
    return chunkc.explain(
        model, x, memory_budget=memory_budget, hardware=hardware, whole_graph="never", activations="keep",
        update_on=update_on, overlap=overlap, **options,
    )  # fmt: skip


def test_states_of_chunks_updated_at_home_do_not_move() -> None:
    in_slots, at_home = explained("device", "none"), explained("cpu", "none")
    assert not [e for e in in_slots.events if e.stream == HOST_UPDATES]
    assert len([e for e in at_home.events if e.stream == HOST_UPDATES]) == 6 - at_home.chunks.resident
    assert at_home.traffic_nbytes.to_device < in_slots.traffic_nbytes.to_device
    assert at_home.notes[0].startswith("the CPU updates")
    assert at_home.predicted_peak_nbytes <= in_slots.predicted_peak_nbytes


def test_a_step_updates_in_the_order_in_which_the_next_forward_reads() -> None:
    found = explained("device", "none", memory_budget="280MiB")
    fetched = [e.name for e in found.events if e.phase == FORWARD and e.kind == PREFETCH]
    updated = [e.name for e in found.events if e.phase == UPDATE and e.kind == "update"]
    assert updated[0] == RESIDENT_UPDATE, "what is on the device for good comes first: the forward begins with it"
    groups = [name.partition(":")[2] for name in dict.fromkeys(fetched)]
    of_tiles = [name.removeprefix("update.").partition("[")[0] for name in updated[1:]]
    assert found.chunks.resident > 0
    assert len(groups) > 1
    assert list(dict.fromkeys(of_tiles)) == groups


def test_what_the_backward_updates_is_updated_once() -> None:
    found = explained("device", "backward", memory_budget="280MiB")
    updated = [e.name for e in found.events if e.kind == "update" and e.name != RESIDENT_UPDATE]
    assert any(e.phase == BACKWARD for e in found.events if e.kind == "update")
    assert updated
    assert len(set(updated)) == len(updated)


def test_overlap_hides_updates_behind_the_model_s_work() -> None:
    totals = {mode: explained("cpu", mode).step_time_s.total for mode in ("none", "forward", "backward", "both")}
    assert totals["forward"] < totals["none"]
    assert totals["backward"] < totals["none"]
    assert totals["both"] <= totals["backward"] * (1 + 1e-9)
    assert {explained("cpu", mode).predicted_peak_nbytes for mode in totals} == {
        explained("cpu", "none").predicted_peak_nbytes
    }


def test_cores_that_compute_hide_nothing() -> None:
    plain, overlapped = explained("cpu", "none", "cpu"), explained("cpu", "both", "cpu")
    assert plain.step_time_s.total == overlapped.step_time_s.total
    assert overlapped.step_time_s.to_device < plain.step_time_s.to_device, "what stays needs no gradients"
    assert any("hides nothing here" in note for note in overlapped.notes)


def test_a_disk_is_no_memory_to_update() -> None:
    with pytest.raises(chunkc.OptionsError, match="updates memory where it is"):
        explained("cpu", "none", home="disk")


def test_a_cpu_of_unknown_speed_is_not_guessed() -> None:
    unknown = replace(load_hardware("h200"), cpu_update_bytes_per_s=None)
    with pytest.raises(chunkc.OptionsError, match="does not say cpu_update_bytes_per_s"):
        explained("cpu", "none", unknown)
    assert explained("auto", "none", unknown).traffic_nbytes == explained("device", "none").traffic_nbytes


@pytest.mark.parametrize(("optimizer", "nbytes"), [("adamw", 28), ("lamb", 40)])
def test_updates_at_home_take_as_long_as_their_bytes(optimizer: str, nbytes: int) -> None:
    found = explained("cpu", "none", optimizer=optimizer)
    rate = load_hardware("h200").cpu_update_bytes_per_s
    at_home = [event for event in found.events if event.stream == HOST_UPDATES]
    assert at_home
    assert {event.nbytes for event in at_home} == {nbytes * 2**20}
    assert all(event.end_s - event.start_s == pytest.approx(nbytes * 2**20 / rate) for event in at_home)
