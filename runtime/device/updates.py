"""Run updates of chunk groups in home memory on a CPU thread, while their caller goes on or waits.

    store.updates.begin(3, HomeUpdate(job, "...", after=marks))  # returns at once
    store.tier.links["to_device"].submit(read, after=[*mark, *store.updates.before(3)])

One worker thread runs them in the order of their submission. Until an update has ended, nothing else may read or write
its group at home: copies come `after` the marks that `before` returns; a host calls `wait`.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch

from chunkc.ir.errors import HomeError, StreamError
from chunkc.runtime.device.streams import JobMark, WorkerStream
from chunkc.runtime.device.tier import Mark

logger = logging.getLogger(__name__)


class HomeUpdate:
    """Update of one chunk group: runs once, however often it is submitted, with the number of threads of its maker.

    Args:
        job: reads and writes the group's home memory.
        label: the group's name for the user, for the error of a job that fails.
        after: marks of what must be over before it runs.
    """

    def __init__(self, job: Callable[[], object], label: str, after: Sequence[Mark] = ()) -> None:
        self._job: Callable[[], object] | None = job
        self._label = label
        self._after = tuple(after)
        self._num_threads = torch.get_num_threads()
        self._problem: StreamError | None = None
        self.event: JobMark | None = None

    def submitted(self, stream: WorkerStream) -> JobMark:
        """Submit the update, unless it has been, and return its end.

        Raises:
            StreamError: the thread cannot be started.
        """
        if self.event is None:
            self.event = stream.submit(self._run, after=self._after)
        self._after = ()
        return self.event

    def _run(self) -> None:
        """Run the job on the worker thread, which has its own grad mode."""
        job, self._job = self._job, None
        if self._problem is not None:
            raise self._problem
        if job is None:
            return
        try:
            if torch.get_num_threads() != self._num_threads:  # each thread has its own
                torch.set_num_threads(self._num_threads)
            with torch.no_grad():
                job()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            self._problem = StreamError(f"the update of {self._label} failed and may be half done: {problem}")
            raise self._problem from error


class HomeUpdates:
    """Updates at home of one model's chunk groups, one after the other.

    The interpreter's exit waits for those under way: a thread must not be killed in the middle of arithmetic.
    """

    def __init__(self) -> None:
        self._stream = WorkerStream("update")
        self._pending: dict[int, HomeUpdate] = {}
        self._needed: dict[int, None] = {}
        at_exit = partial(_finish_at_exit, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def begin(self, group: int, update: HomeUpdate) -> None:
        """Begin a group's update, which runs once all before it are over. Never blocks.

        If interrupted, it has not begun, or will run before a wait for it returns.

        Raises:
            StreamError: the thread cannot be started; the update has not begun.
        """
        self._pending[group] = update
        try:
            update.submitted(self._stream)
        except StreamError:
            del self._pending[group]
            raise

    def has(self, group: int, update: HomeUpdate) -> bool:
        """Whether an update has begun; it may have ended already."""
        return self._pending.get(group) is update or update.event is not None

    def before(self, group: int) -> tuple[JobMark, ...]:
        """Return the marks that a copy of the group's home has to wait for; none if no update is under way."""
        update = self._pending.get(group)
        if update is None:
            return ()
        event = update.submitted(self._stream)
        if event.done() and not event.failed():
            del self._pending[group]
            return ()
        return (event,)

    def wait(self, group: int) -> None:
        """Block the caller until the group's update has ended.

        Raises:
            StreamError, HomeError: the update failed; raised by every call, until `finish` has raised it.
        """
        for event in self.before(group):
            event.wait()

    def finish(self, groups: Collection[int] | None = None) -> None:
        """Block the caller until the updates of these groups (None: all) have ended, and drop them unless interrupted.

        Raises:
            StreamError, HomeError: as `finish_all`.
        """
        groups, failures = [*(self._pending if groups is None else groups)], list[StreamError | HomeError]()
        self._wait_for(groups, failures)
        self._forget(groups)
        _raise_first(failures)

    def end_soon(self) -> None:
        """End the thread behind the updates under way; no other may begin. Never blocks."""
        self._stream.end_soon()

    def _wait_for(self, groups: Iterable[int], failures: list[StreamError | HomeError]) -> None:
        """Block the caller until these groups' updates have ended, and collect the errors of those that failed."""
        for group in groups:
            try:
                if (update := self._pending.get(group)) is not None:
                    update.submitted(self._stream).wait()
            except (StreamError, HomeError) as error:
                failures.append(error)

    def _forget(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._pending.pop(group, None)

    # --- the order in which groups are needed ---

    def note_use(self, group: int) -> None:
        """Note that the group is fetched from home now."""
        self._needed.setdefault(group)

    def in_order_of_use(self, groups: Sequence[int]) -> list[int]:
        """Sort groups by their first fetch since the last call; groups without one follow, by index."""
        rank = {group: at for at, group in enumerate(self._needed)}
        self._needed.clear()
        return sorted(groups, key=lambda group: (rank.get(group, len(rank)), group))


def finish_all(models: Iterable[HomeUpdates]) -> None:
    """Block the caller until every update of several models has ended, and drop them unless interrupted.

    Raises:
        StreamError, HomeError: an update failed: the parameters it names may be half updated. The first error, with a
            note for each of the others.
    """
    pending = [(updates, [*updates._pending]) for updates in models]
    failures: list[StreamError | HomeError] = []
    for updates, groups in pending:
        updates._wait_for(groups, failures)
    for updates, groups in pending:
        updates._forget(groups)
    _raise_first(failures)


def _raise_first(failures: Sequence[StreamError | HomeError]) -> None:
    """Raise the first error, if there is one, with a note for each of the others."""
    if failures:
        texts = dict.fromkeys(str(failure) for failure in failures)  # many may have waited for one copy that failed
        for text in list(texts)[1:]:
            failures[0].add_note(f"and {text}")
        raise failures[0]


def _finish_at_exit(reference: weakref.ref[HomeUpdates]) -> None:
    updates = reference()
    if updates is None:
        return
    try:
        updates._stream.close()
    except (StreamError, HomeError) as error:  # no caller is left to catch it
        logger.error("%s", error)
