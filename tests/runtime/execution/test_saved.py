"""Saved values at home: room that is used again, storages that come back as they were, and who keeps them. Copies start
after the computation that makes them, or that still uses their buffer.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.execution.saved import STAND_IN, SavedRoom, SavedValues, saved_values
from chunkc.runtime.execution.saved_instructions import SavedPrefetch, SavedWriteBack
from chunkc.runtime.storage.homes import DiskHome, Home, MemoryHome


@pytest.fixture(params=[MemoryHome, DiskHome])
def home(request: pytest.FixtureRequest) -> Home:
    return request.param()


def left(room: SavedRoom, values: list[torch.Tensor], name: str = "s") -> list[torch.Tensor]:
    """What stands for values of one storage that was copied home."""
    saved = SavedValues(room)
    saved.writer(name, values[0].untyped_storage().nbytes(), lambda: values)()
    return saved.stand_ins(name)


def test_values_come_back_as_they_were(home: Home) -> None:
    """Views of one storage are views of one storage again, with their sizes, strides, offsets and dtypes."""
    whole = torch.randn(6, 8)
    values = [whole, whole.t()[2:5], whole.view(torch.int32)[1:, ::3], whole[0, 0]]
    stand_ins = left(SavedRoom(home), values)
    assert [s.shape for s in stand_ins] == [v.shape for v in values]
    assert {s.dtype for s in stand_ins} == {STAND_IN}
    found = saved_values(stand_ins)
    assert found is not None
    assert found._region_of.keys() == {"s"}
    for _ in range(2):  # however often the backward runs
        buffer = torch.empty(whole.nbytes, dtype=torch.uint8)
        found.reader("s", buffer)()
        back = found.values("s", buffer)
        assert len({value.untyped_storage().data_ptr() for value in back}) == 1
        for value, given in zip(back, values, strict=True):
            assert (value.shape, value.stride(), value.dtype) == (given.shape, given.stride(), given.dtype)
            assert torch.equal(value, given)


def test_values_of_two_storages_are_refused() -> None:
    with pytest.raises(AssertionError, match="one storage"):
        left(SavedRoom(MemoryHome()), [torch.randn(4), torch.randn(4)])
    saved = SavedValues(SavedRoom(MemoryHome()))
    with pytest.raises(AssertionError, match=r"one storage|than the 8 bytes"):
        saved.writer("s", 8, lambda: [torch.randn(4)])()


def test_room_is_given_back_with_the_last_stand_in_and_used_again(home: Home) -> None:
    room = SavedRoom(home)
    one, other = left(room, [torch.randn(64)]), left(room, [torch.randn(64)])
    assert room.in_use_nbytes == room.nbytes == 512
    kept = one[0].detach()
    del one
    gc.collect()
    assert room.in_use_nbytes == 512, "what shares the stand-in's bytes stands for the value, too"
    del kept, other
    gc.collect()
    assert (room.in_use_nbytes, room.nbytes) == (0, 512)
    again = left(room, [torch.randn(64)])
    assert (room.in_use_nbytes, room.nbytes) == (256, 512)
    larger = left(room, [torch.randn(96)])
    assert (room.in_use_nbytes, room.nbytes) == (640, 640), "no more is kept than was in use at once"
    del again, larger
    room.close()
    assert room.nbytes == 0


def test_what_is_in_use_when_the_room_is_closed_goes_with_its_last_reader() -> None:
    room = SavedRoom(MemoryHome())
    stand_ins = left(room, [torch.arange(8.0)])
    room.close()
    found, buffer = saved_values(stand_ins), torch.empty(32, dtype=torch.uint8)
    assert found is not None
    found.reader("s", buffer)()
    assert torch.equal(found.values("s", buffer)[0], torch.arange(8.0))
    del found, stand_ins
    gc.collect()
    assert room.nbytes == 0


def test_a_copy_of_a_stand_in_is_found_while_the_values_are_there_and_refused_after() -> None:
    room = SavedRoom(MemoryHome())
    (stand_in,) = left(room, [torch.randn(3, 5)])
    copy = stand_in.clone()
    assert saved_values([None, 3, copy]) is saved_values([stand_in])
    del stand_in
    gc.collect()
    with pytest.raises(UnsupportedError, match="hooks on saved tensors"):
        saved_values([torch.randn(2), copy])
    assert saved_values([torch.randn(2), None]) is None


class EarlyLink:
    """Runs a copy as early as it may be: at once, after what it comes after."""

    def submit(self, job: Callable[[], None], *, after: Sequence[Any] = ()) -> None:
        for mark in after:
            mark.wait()
        job()


def run_behind(computation: Callable[[], object], buffer: torch.Tensor) -> Any:
    """Make a run with one enqueued computation, which runs when its mark is waited for; it allocates `buffer` next."""
    tier = SimpleNamespace(
        links=defaultdict(EarlyLink),
        mark=lambda: [SimpleNamespace(wait=computation)],
        allocate_slot=lambda nbytes, dtype: buffer.view(dtype),
    )
    slots = SimpleNamespace(
        traffic=SimpleNamespace(to_home_nbytes=0, to_device_nbytes=0), drop_spare=lambda: None, debug=False
    )
    return SimpleNamespace(store=SimpleNamespace(tier=tier, slots=slots), saved=SavedValues(SavedRoom(MemoryHome())))


def test_copies_come_after_the_computation_so_far() -> None:
    value = torch.zeros(8)
    run = run_behind(lambda: value.fill_(1), buffer=value)
    registers: list[Any] = [value, None]
    SavedWriteBack("s", "home", value.nbytes, sources=(0,))(registers, run)
    assert torch.equal(value, torch.ones(8))
    value.zero_()
    run.store.tier.mark = lambda: [SimpleNamespace(wait=lambda: value.fill_(2))]  # the former user of its memory
    SavedPrefetch("s", "device", value.nbytes, target=1)(registers, run)
    assert torch.equal(registers[1].view(torch.float32), torch.ones(8)), "what was computed is what went home"
    assert run.store.slots.traffic.to_home_nbytes == run.store.slots.traffic.to_device_nbytes == 32
