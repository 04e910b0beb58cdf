"""Updates at home that fail: who is told, how often, and what is not done with what they left."""

from __future__ import annotations

import pytest
from update_cases import Gate, Subject, opened_soon

from chunkc.ir.errors import HomeError, StreamError
from chunkc.ir.layout import Chunk
from chunkc.runtime.device.streams import WorkerStream
from chunkc.runtime.device.updates import HomeUpdate, HomeUpdates, finish_all

pytestmark = pytest.mark.timeout(60)


def broken() -> None:
    raise ValueError("no such thing")


def test_a_failure_reaches_who_needs_the_chunk_with_its_name(subject: Subject) -> None:
    store = subject.store
    store.updates.begin(0, HomeUpdate(broken, "chunk param:0 (a)"))
    for _ in range(2):
        store.prefetch(Chunk("param", 0))
        with pytest.raises(StreamError, match=r"chunk param:0 \(a\) failed and may be half done: ValueError: no such"):
            store.slots.wait(Chunk("param", 0))
        with pytest.raises(StreamError):
            store.release_slots()
    store.prefetch(Chunk("param", 1))  # other chunks are as they were
    store.slots.wait(Chunk("param", 1))


def test_finish_tells_of_a_failure_once_and_waits_for_all() -> None:
    updates, ran = HomeUpdates(), []
    updates.begin(0, HomeUpdate(broken, "first"))
    updates.begin(1, HomeUpdate(lambda: ran.append(1), "second"))
    with pytest.raises(StreamError, match="first"):
        updates.finish()
    assert ran == [1]
    updates.finish()
    updates.wait(0)
    assert updates.before(0) == ()


def test_finish_tells_of_every_failure_at_once() -> None:
    updates = HomeUpdates()
    for group, label in enumerate(("first", "second", "third")):
        updates.begin(group, HomeUpdate(broken, label))
    with pytest.raises(StreamError, match="first") as caught:
        updates.finish()
    assert [note.partition("the update of ")[2].split()[0] for note in caught.value.__notes__] == ["second", "third"]


def test_all_updates_of_several_models_are_waited_for() -> None:
    models, gate, ran = (HomeUpdates(), HomeUpdates()), Gate(), []
    for number, updates in enumerate(models):
        updates.begin(0, HomeUpdate(broken, f"model {number}"))
        updates.begin(1, HomeUpdate(gate.wait, ""))
        updates.begin(2, HomeUpdate(lambda number=number: ran.append(number), ""))
    opened_soon(gate)
    with pytest.raises(StreamError, match="model 0") as caught:
        finish_all(models)
    assert sorted(ran) == [0, 1]
    assert "model 1" in caught.value.__notes__[0]
    finish_all(models)


def test_one_failed_copy_that_many_updates_wait_for_is_told_of_once() -> None:
    updates, arrived = HomeUpdates(), WorkerStream("to_home").submit(broken)
    for group in range(3):
        updates.begin(group, HomeUpdate(lambda: None, "it", [arrived]))
    with pytest.raises(StreamError, match="no such thing") as caught:
        updates.finish()
    assert not hasattr(caught.value, "__notes__")


def test_wait_tells_of_a_failure_again_and_again() -> None:
    updates = HomeUpdates()
    updates.begin(0, HomeUpdate(broken, "it"))
    for _ in range(2):
        with pytest.raises(StreamError, match="it failed"):
            updates.wait(0)
    updates.wait(1)


def test_gradients_that_never_arrived_are_not_used() -> None:
    def full() -> None:
        raise HomeError("the disk is full")

    updates, ran = HomeUpdates(), []
    arrived = WorkerStream("to_home").submit(full)
    updates.begin(0, HomeUpdate(lambda: ran.append(1), "it", [arrived]))
    with pytest.raises(HomeError, match="the disk is full"):
        updates.finish()
    assert not ran
