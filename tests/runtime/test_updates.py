"""Updates at home behind the host's back: whoever reads or writes a group's home comes after its update.

Nothing here depends on time: an update stands still until a gate opens, and what must wait is shown to wait, and to
find the updated bytes afterwards. `without(...)` shows that each wait is needed.
"""

from __future__ import annotations

import dis
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from runtime_helpers import ctrl_c_in_a_wait
from torch import Tensor
from update_cases import NUMEL, Gate, Subject, blocks_until_opened, opened_soon

from chunkc.ir.chunks import GRAD, PARAM
from chunkc.ir.errors import HomeError, StreamError
from chunkc.runtime import streams as streams_module
from chunkc.runtime import updates as updates_module
from chunkc.runtime.streams import WorkerStream
from chunkc.runtime.updates import HomeUpdate, HomeUpdates, finish_all

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["cpu", "cuda"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    yield (made := Subject(request.param))
    made.gate.opened.set()
    made.settle()


# ---------------------------------------------------------------- copies


def fetch(subject: Subject) -> None:
    subject.store.prefetch("param:0")


def fetch_and_wait(subject: Subject) -> Tensor:
    opened_soon(subject.gate)
    subject.store.wait("param:0")
    return subject.slot("param:0")


def test_a_fetch_reads_what_the_update_leaves(subject: Subject) -> None:
    subject.begin()
    fetch(subject)  # asks, and does not block
    assert not subject.gate.done()
    assert torch.all(fetch_and_wait(subject) == 2.0)


def test_a_fetch_that_does_not_come_after_the_update_reads_what_was(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject.begin()
    with monkeypatch.context() as patch:
        patch.setattr(subject.store.updates, "before", lambda group: ())
        fetch(subject)
    subject.settle()
    assert torch.all(fetch_and_wait(subject) == 1.0)


def test_other_groups_are_fetched_meanwhile(subject: Subject) -> None:
    subject.begin(group=1)
    fetch(subject)
    subject.store.wait("param:0")
    assert torch.all(subject.slot("param:0") == 1.0)
    assert not subject.gate.done()


@pytest.mark.parametrize("left_out", [False, True], ids=["as it is", "without the wait"])
def test_a_gradient_goes_home_after_the_update_that_reads_the_former(
    subject: Subject, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    store = subject.store
    store.prefetch("grad:0")
    store.wait("grad:0")
    store.sink("a", "grad:0", lambda: torch.full((NUMEL,), 3.0), owned=True)

    def job() -> None:
        subject.gate.wait()
        seen.append(float(subject.home(GRAD)[0]))

    store.updates.begin(0, job, label="a")
    if left_out:
        monkeypatch.setattr(store.updates, "before", lambda group: ())
    store.write_back("grad:0")
    if left_out:
        subject.settle()
    opened_soon(subject.gate)
    store.wait("grad:0")
    store.evict("grad:0")
    monkeypatch.undo()
    store.updates.finish()
    subject.settle()
    assert seen == [3.0 if left_out else 0.0]
    assert torch.all(subject.home(GRAD) == 3.0)


@pytest.mark.parametrize("left_out", [False, True], ids=["as it is", "without the wait"])
def test_an_update_begins_when_copies_of_its_group_under_way_are_over(left_out: bool) -> None:
    """A parameter that is being fetched is read as it was; its update begins with the gradients' arrival."""
    subject, hold = Subject("cpu"), Gate()
    store = subject.store
    store.tier.to_device.submit(hold.wait)
    store.prefetch("param:0")
    after = list(store.tier.mark()) if left_out else store.home_moments(0)
    store.updates.begin(0, lambda: subject.home().fill_(2.0), label="a", after=after)
    if left_out:
        store.updates.finish()
    hold.opened.set()
    store.wait("param:0")
    assert torch.all(subject.slot("param:0") == (2.0 if left_out else 1.0))
    store.updates.finish()
    assert torch.all(subject.home() == 2.0)


@pytest.mark.parametrize("left_out", [False, True], ids=["as it is", "without the wait"])
def test_an_update_begins_when_enqueued_computation_is_over(left_out: bool) -> None:
    """Eager code on the device reads a home view before the update, however late it runs."""
    subject, hold, read = Subject("cuda"), Gate(), []
    store = subject.store
    store.tier.enqueue(hold.wait)
    store.tier.enqueue(lambda: read.append(float(subject.home()[0])))
    store.updates.begin(
        0, lambda: subject.home().fill_(2.0), label="a", after=() if left_out else store.home_moments(0)
    )  # fmt: skip
    if left_out:
        store.updates.finish()
    hold.opened.set()
    store.updates.finish()
    subject.settle()
    assert read == [2.0 if left_out else 1.0]


# ---------------------------------------------------------------- the host


def test_the_host_waits_before_it_touches_home(subject: Subject) -> None:
    subject.begin()
    blocks_until_opened(subject.gate, lambda: subject.store.await_home("param:0"))


def test_filling_home_comes_after_the_update(subject: Subject) -> None:
    subject.begin()
    target = subject.store.home_view(PARAM, "a")
    blocks_until_opened(
        subject.gate, lambda: subject.store.fill(PARAM, "a", target, torch.full((NUMEL,), 5.0))
    )  # fmt: skip
    subject.store.updates.finish()
    assert torch.all(subject.home() == 5.0)


def test_a_gradient_that_the_user_replaced_is_collected_after_the_update(subject: Subject) -> None:
    subject.begin(GRAD)
    subject.parameters["a"].grad = torch.full((NUMEL,), 7.0)
    blocks_until_opened(subject.gate, lambda: subject.store.collect_gradients(0))
    subject.settle()
    assert torch.all(subject.home(GRAD) == 7.0)


def test_nothing_is_placed_elsewhere_under_an_update(subject: Subject) -> None:
    subject.begin()
    blocks_until_opened(
        subject.gate, lambda: subject.store.place(subject.layout, subject.parameters, frozenset({0}))
    )  # fmt: skip
    assert torch.all(subject.parameters["a"] == 2.0)


# ---------------------------------------------------------------- failures


def broken() -> None:
    raise ValueError("no such thing")


def test_a_failure_reaches_who_needs_the_chunk_with_its_name(subject: Subject) -> None:
    store = subject.store
    store.updates.begin(0, broken, label="chunk param:0 (a)")
    for _ in range(2):
        store.prefetch("param:0")
        with pytest.raises(StreamError, match=r"chunk param:0 \(a\) failed and may be half done: ValueError: no such"):
            store.wait("param:0")
        with pytest.raises(StreamError):
            store.release_slots()
    store.prefetch("param:1")  # other chunks are as they were
    store.wait("param:1")


def test_finish_tells_of_a_failure_once_and_waits_for_all() -> None:
    updates, ran = HomeUpdates(), []
    updates.begin(0, broken, label="first")
    updates.begin(1, lambda: ran.append(1), label="second")
    with pytest.raises(StreamError, match="first"):
        updates.finish()
    assert ran == [1]
    updates.finish()
    updates.wait(0)
    assert updates.before(0) == ()


def test_finish_tells_of_every_failure_at_once() -> None:
    updates = HomeUpdates()
    for group, label in enumerate(("first", "second", "third")):
        updates.begin(group, broken, label=label)
    with pytest.raises(StreamError, match="first") as caught:
        updates.finish()
    assert [note.partition("the update of ")[2].split()[0] for note in caught.value.__notes__] == ["second", "third"]


def test_all_updates_of_several_models_are_waited_for() -> None:
    models, gate, ran = (HomeUpdates(), HomeUpdates()), Gate(), []
    for number, updates in enumerate(models):
        updates.begin(0, broken, label=f"model {number}")
        updates.begin(1, gate.wait, label="")
        updates.begin(2, lambda number=number: ran.append(number), label="")
    opened_soon(gate)
    with pytest.raises(StreamError, match="model 0") as caught:
        finish_all(models)
    assert sorted(ran) == [0, 1]
    assert "model 1" in caught.value.__notes__[0]
    finish_all(models)


def test_one_failed_copy_that_many_updates_wait_for_is_told_of_once() -> None:
    updates, arrived = HomeUpdates(), WorkerStream("to_home").submit(broken)
    for group in range(3):
        updates.begin(group, lambda: None, label="it", after=[arrived])
    with pytest.raises(StreamError, match="no such thing") as caught:
        updates.finish()
    assert not hasattr(caught.value, "__notes__")


def test_an_interrupted_finish_forgets_no_failure() -> None:
    updates, gate = HomeUpdates(), Gate()
    updates.begin(0, broken, label="the first")
    updates.begin(1, gate.wait, label="the second")
    with pytest.raises(KeyboardInterrupt), ctrl_c_in_a_wait():
        updates.finish()
    gate.opened.set()
    with pytest.raises(StreamError, match="the first"):
        updates.finish()


def test_wait_tells_of_a_failure_again_and_again() -> None:
    updates = HomeUpdates()
    updates.begin(0, broken, label="it")
    for _ in range(2):
        with pytest.raises(StreamError, match="it failed"):
            updates.wait(0)
    updates.wait(1)


def test_gradients_that_never_arrived_are_not_used() -> None:
    def full() -> None:
        raise HomeError("the disk is full")

    updates, ran = HomeUpdates(), []
    arrived = WorkerStream("to_home").submit(full)
    updates.begin(0, lambda: ran.append(1), label="it", after=[arrived])
    with pytest.raises(HomeError, match="the disk is full"):
        updates.finish()
    assert not ran


# ---------------------------------------------------------------- order, threads, ends


def test_updates_run_in_order_without_gradients_on_one_thread() -> None:
    updates, seen = HomeUpdates(), []

    def job(index: int) -> None:
        seen.append((index, torch.is_grad_enabled(), threading.current_thread().name))

    for index in range(5):
        updates.begin(index, lambda index=index: job(index), label="")
    updates.finish()
    assert seen == [(index, False, "chunkc-update") for index in range(5)]


def test_the_order_of_use_is_that_of_the_latest_step() -> None:
    updates = HomeUpdates()
    assert updates.in_order_of_use([3, 1, 2]) == [1, 2, 3]
    for group in (2, 3, 2, 1):
        updates.note_use(group)
    assert updates.in_order_of_use([0, 1, 2, 3]) == [2, 3, 1, 0]
    assert updates.in_order_of_use([3, 2]) == [2, 3]


@pytest.mark.timeout(180)  # a process that imports torch
def test_updates_under_way_end_before_the_interpreter_does() -> None:
    script = """
        import time
        from chunkc.runtime.updates import HomeUpdates
        updates = HomeUpdates()
        def job():
            time.sleep(0.5)
            print("done", flush=True)
        def broken():
            raise ValueError("never told")
        updates.begin(0, job, label="the first")
        updates.begin(1, broken, label="the last")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout == "done\n"
    assert "the update of the last failed" in done.stderr


def test_a_store_takes_its_updates_with_it() -> None:
    updates = HomeUpdates()
    updates.begin(0, lambda: None, label="")
    updates.finish()
    reference = weakref.ref(updates)
    del updates
    gc.collect()
    assert reference() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_that_an_update_is_its_parent_s() -> None:
    updates, gate = HomeUpdates(), Gate()
    updates.begin(0, gate.wait, label="it")
    child = os.fork()
    if child == 0:
        try:
            updates.finish()
        except StreamError as error:
            os._exit(0 if "before os.fork" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    gate.opened.set()
    updates.finish()
    assert os.waitstatus_to_exitcode(status) == 0


# ---------------------------------------------------------------- Ctrl-C


class Interrupter:
    """A trace function: KeyboardInterrupt where Python may deliver a signal, at the `at`-th such place of this room.

    Python looks for signals after calls, at the beginning of functions and in loops.
    """

    DELIVERS = re.compile("CALL|RESUME|JUMP_BACKWARD")

    def __init__(self, at: int) -> None:
        self.left, self.delivered = at, False
        self.names: dict[CodeType, dict[int, str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (updates_module.__file__, streams_module.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        names = self.names.get(frame.f_code)
        if names is None:
            names = self.names[frame.f_code] = {i.offset: i.opname for i in dis.get_instructions(frame.f_code)}
        delivers = [True]  # at the beginning of the function

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if event == "opcode":
                due, delivers[0] = delivers[0], bool(self.DELIVERS.match(names.get(frame.f_lasti, "")))
                self.left -= due
                if due and self.left == 0:
                    self.delivered = True
                    raise KeyboardInterrupt
            return trace

        return trace


@pytest.mark.parametrize("is_first", [True, False])
def test_an_update_that_is_interrupted_anywhere_as_it_begins_is_waited_for_or_never_runs(is_first: bool) -> None:
    outcomes = set()
    for at in range(1, 200):
        updates, gate, ran = HomeUpdates(), Gate(), list[int]()
        if not is_first:  # the thread is there
            updates.begin(1, lambda: None, label="")
            updates.finish()
        update = HomeUpdate(lambda gate=gate, ran=ran: (gate.wait(), ran.append(1)), "it")  # type: ignore[misc, arg-type]
        interrupter, former = Interrupter(at), sys.gettrace()
        sys.settrace(interrupter)
        try:
            updates.enter(0, update)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(former)
        has_begun = updates.has(0, update)
        assert bool(updates.before(0)) == has_begun
        gate.opened.set()
        updates.finish()
        assert len(ran) == has_begun
        updates._stream.drain()
        assert len(ran) == has_begun, "it ran, or ran again, when nobody waited for it any more"
        outcomes.add((interrupter.delivered, has_begun))
        if not interrupter.delivered:
            break
    assert outcomes == {(True, False), (True, True), (False, True)}
