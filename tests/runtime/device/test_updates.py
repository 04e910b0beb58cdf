"""Updates at home behind the host's back: whoever reads or writes a group's home comes after its update.

Nothing here depends on time: an update stands still until a gate opens, and what must wait is shown to wait, and to
find the updated bytes afterwards; without it, `left_out`, others. Waits of the host are in
`tests/faults/test_missing_update_waits.py`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch
from store_cases import NUMEL, Gate, Subject, opened_soon
from torch import Tensor

from chunkc.ir.errors import StreamError
from chunkc.ir.layout import GRAD, Chunk
from chunkc.runtime.device.updates import HomeUpdate, HomeUpdates

pytestmark = pytest.mark.timeout(60)


# ---------------------------------------------------------------- copies


def fetch(subject: Subject) -> None:
    subject.store.prefetch(Chunk("param", 0))


def fetch_and_wait(subject: Subject) -> Tensor:
    opened_soon(subject.gate)
    subject.store.slots.wait(Chunk("param", 0))
    return subject.slot(Chunk("param", 0))


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
    subject.store.slots.wait(Chunk("param", 0))
    assert torch.all(subject.slot(Chunk("param", 0)) == 1.0)
    assert not subject.gate.done()


@pytest.mark.parametrize("left_out", [False, True], ids=["as it is", "without the wait"])
def test_a_gradient_goes_home_after_the_update_that_reads_the_former(
    subject: Subject, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    store = subject.store
    store.prefetch(Chunk("grad", 0))
    store.slots.wait(Chunk("grad", 0))
    store.gradients.sink("a", Chunk("grad", 0), lambda: torch.full((NUMEL,), 3.0), owned=True)

    def job() -> None:
        subject.gate.wait()
        seen.append(float(subject.home(GRAD)[0]))

    store.updates.begin(0, HomeUpdate(job, "a"))
    if left_out:
        monkeypatch.setattr(store.updates, "before", lambda group: ())
    store.write_back(Chunk("grad", 0))
    if left_out:
        subject.settle()
    opened_soon(subject.gate)
    store.slots.wait(Chunk("grad", 0))
    store.slots.evict(Chunk("grad", 0))
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
    store.tier.links["to_device"].submit(hold.wait)
    store.prefetch(Chunk("param", 0))
    after = list(store.tier.mark()) if left_out else store.slots.home_marks(0)
    store.updates.begin(0, HomeUpdate(lambda: subject.home().fill_(2.0), "a", after))
    if left_out:
        store.updates.finish()
    hold.opened.set()
    store.slots.wait(Chunk("param", 0))
    assert torch.all(subject.slot(Chunk("param", 0)) == (2.0 if left_out else 1.0))
    store.updates.finish()
    assert torch.all(subject.home() == 2.0)


def test_an_update_computes_with_its_makers_number_of_threads() -> None:
    updates, found, before = HomeUpdates(), list[int](), torch.get_num_threads()
    try:
        for number in (before + 1, before):
            torch.set_num_threads(number)
            updates.begin(0, HomeUpdate(lambda: found.append(torch.get_num_threads()), "a"))
            updates.finish()
    finally:
        torch.set_num_threads(before)
    assert found == [before + 1, before]


@pytest.mark.parametrize("left_out", [False, True], ids=["as it is", "without the wait"])
def test_an_update_begins_when_enqueued_computation_is_over(left_out: bool) -> None:
    """Eager code on the device reads a home view before the update, however late it runs."""
    subject, hold, read = Subject("cuda"), Gate(), []
    store = subject.store
    store.tier.enqueue(hold.wait)
    store.tier.enqueue(lambda: read.append(float(subject.home()[0])))
    after = () if left_out else store.slots.home_marks(0)
    store.updates.begin(0, HomeUpdate(lambda: subject.home().fill_(2.0), "a", after))
    if left_out:
        store.updates.finish()
    hold.opened.set()
    store.updates.finish()
    subject.settle()
    assert read == [2.0 if left_out else 1.0]


# ---------------------------------------------------------------- order, threads, ends


def test_updates_run_in_order_without_gradients_on_one_thread() -> None:
    updates, seen = HomeUpdates(), []

    def job(index: int) -> None:
        seen.append((index, torch.is_grad_enabled(), threading.current_thread().name))

    for index in range(5):
        updates.begin(index, HomeUpdate(lambda index=index: job(index), ""))
    updates.finish()
    assert seen == [(index, False, "chunkc-update") for index in range(5)]


def test_the_order_of_use_is_that_of_the_latest_step() -> None:
    updates = HomeUpdates()
    assert updates.in_order_of_use([3, 1, 2]) == [1, 2, 3]
    for group in (2, 3, 2, 1):
        updates.note_use(group)
    assert updates.in_order_of_use([0, 1, 2, 3]) == [2, 3, 1, 0]
    assert updates.in_order_of_use([3, 2]) == [2, 3]


@pytest.mark.second_tier
@pytest.mark.timeout(180)  # a process that imports torch
def test_updates_under_way_end_before_the_interpreter_does() -> None:
    """Without that wait, in a fork, it ends in the middle of one."""
    script = """
        import os, time
        from chunkc.runtime.device import updates as module
        if (child := os.fork()) == 0:
            module._finish_at_exit = lambda reference: None
        else:
            print("without the wait it ended with", os.waitpid(child, 0)[1], flush=True)
        updates = module.HomeUpdates()
        def job():
            print("begun", flush=True)
            time.sleep(0.5 if child else 30)
            print("done", flush=True)
        def broken():
            raise ValueError("never told")
        updates.begin(0, module.HomeUpdate(job, "the first"))
        updates.begin(1, module.HomeUpdate(broken, "the last"))
        time.sleep(0.2)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout == "begun\nwithout the wait it ended with 0\nbegun\ndone\n"
    assert done.stderr.count("the update of the last failed") == 1


def test_a_store_takes_its_updates_with_it() -> None:
    updates = HomeUpdates()
    updates.begin(0, HomeUpdate(lambda: None, ""))
    updates.finish()
    reference = weakref.ref(updates)
    del updates
    gc.collect()
    assert reference() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_that_an_update_is_its_parent_s() -> None:
    updates, gate = HomeUpdates(), Gate()
    updates.begin(0, HomeUpdate(gate.wait, "it"))
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
