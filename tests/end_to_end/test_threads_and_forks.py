"""Several threads, processes, and models that are gone."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import adamw, array, differences, session_of, weights
from scripts import CASE, assert_close, backward, compile_small, small_budget, train_steps, weight_of
from torch import Tensor

import chunkc
from chunkc.session.compiled_step import CompiledGraph
from chunkc.session.session import Session

every_way = pytest.mark.usefixtures("every_way")


def in_a_fork(check: Callable[[], bool]) -> bool:
    """What `check` says in a child of this process."""
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = check()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def refuses(use: Callable[[], object]) -> bool:
    """Whether this raises the error that names forks."""
    try:
        use()
    except chunkc.UnsupportedError as error:
        return "os.fork" in str(error)
    return False


@every_way
def test_a_child_neither_reads_nor_changes_a_disk_home() -> None:
    model, compiled = compile_small("disk")
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(1))
    backward(compiled, 1)
    parameter = weight_of(model)
    memory, before = parameter.detach().numpy(), weights(model)
    tensors = [parameter, parameter.grad, optimizer.state[parameter]["exp_avg"]]

    def check() -> bool:
        memory.fill(7.0)  # nobody can refuse what has an address
        uses = [torch.sum, torch.clone, lambda t: t + 1, lambda t: t.numpy(), lambda t: t.data, str]
        return all(refuses(lambda t=t, use=use: use(t)) for t in tensors for use in uses)

    assert in_a_fork(check)
    assert not differences(before, weights(model))
    optimizer.step()


@every_way
def test_a_home_in_ram_is_a_snapshot_in_a_child() -> None:
    model, compiled = compile_small("cpu")
    backward(compiled, 0)
    before = weights(model)

    def check() -> bool:
        same = not differences(before, weights(model))
        for parameter in model.parameters():
            parameter.detach().numpy().fill(0)  # no threads: the parent's are not here
        return same

    assert in_a_fork(check)
    assert not differences(before, weights(model))


class PhasesInTurn:
    """Whether phases of one session were ever inside at once. Each waits for two milliseconds for another."""

    def __init__(self) -> None:
        self.at_once = threading.Event()
        self._sessions: list[Session] = []  # of each phase inside. Unlike adding to a count, append is atomic.

    @contextlib.contextmanager
    def inside(self, session: Session) -> Iterator[None]:
        self._sessions.append(session)
        if self._sessions.count(session) > 1:
            self.at_once.set()
        self.at_once.wait(0.002)
        try:
            yield
        finally:
            self._sessions.remove(session)


@pytest.fixture
def phases_in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[PhasesInTurn]:
    """Phases of one session that ran at once: none may."""
    seen = PhasesInTurn()
    run = CompiledGraph._run

    def watched(graph: CompiledGraph, phase: str, *args: Any, **kwargs: Any) -> list[Any]:
        with seen.inside(graph.session):
            return run(graph, phase, *args, **kwargs)

    monkeypatch.setattr(CompiledGraph, "_run", watched)
    yield seen
    assert not seen.at_once.is_set()


def run_in_threads(jobs: list[Callable[[], None]]) -> None:
    """Run all at once, and raise what one raised."""
    problems: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


@every_way
def test_threads_call_one_model(short_switch_interval: None, phases_in_turn: PhasesInTurn) -> None:
    model, compiled = compile_small(room=2.0)
    expected = {}
    reference = CASE.build(0)
    for step in range(4):
        with torch.no_grad():
            expected[step] = array(reference(**CASE.batch(step)))

    def evaluate(step: int) -> None:
        for _ in range(8):
            with torch.no_grad():
                assert_close(array(compiled(**CASE.batch(step))), expected[step])

    run_in_threads([lambda step=step: evaluate(step) for step in range(4)])
    store = session_of(model).store
    assert len(store.resident) < len(store.layout.groups)


@every_way
def test_a_thread_evaluates_while_another_trains(short_switch_interval: None, phases_in_turn: PhasesInTurn) -> None:
    model, compiled = compile_small(room=2.0)
    with torch.no_grad():  # Dynamo reads `.grad` twice as it traces, and fails if another thread drops it in between
        compiled(**CASE.batch(9))
    losses: list = []
    done = threading.Event()

    def train() -> None:
        try:
            losses.extend(train_steps(compiled, adamw(model.parameters()), range(6)))
        finally:
            done.set()

    def evaluate() -> None:
        while not done.is_set():
            with torch.no_grad():
                assert torch.isfinite(compiled(**CASE.batch(9)))

    run_in_threads([train, evaluate])
    seen = weights(model)
    alone, compiled = compile_small(room=2.0)
    assert not differences(losses, train_steps(compiled, adamw(alone.parameters()), range(6)))
    assert not differences(seen, weights(alone))


@every_way
def test_gradients_that_another_thread_writes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch frees memory there without the interpreter's lock."""
    model, compiled = compile_small(room=2.0)
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(2))
    store = session_of(model).store
    staying = {name for name in store.views.parameters() if not store.views.is_managed(name)}
    read = []
    monkeypatch.setattr("chunkc.runtime.store.gradient_states.gradient_of", lambda p: read.append(p) or p.grad)

    def evaluate() -> None:
        with torch.no_grad():
            compiled(**CASE.batch(9))

    def inside(gradient: Tensor) -> None:
        read.clear()
        run_in_threads([evaluate])
        assert not {id(p) for p in read} & {id(p) for name, p in store.views.parameters().items() if name in staying}

    last = next(p for name, p in store.views.parameters().items() if name in staying and p.requires_grad)
    last.register_post_accumulate_grad_hook(inside)
    backward(compiled, 0)
    assert staying
    optimizer.step()


# ---------------------------------------------------------------- models that are gone


@every_way
def test_a_model_that_is_gone_gives_everything_back(fresh_dynamo: None) -> None:
    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def num_threads() -> int:
        return sum(thread.name.startswith("chunkc-to") for thread in threading.enumerate())

    sessions = []
    gc.collect()
    before = num_files(), num_threads()
    for index in range(4):
        model = CASE.build(index)
        options = {"memory_budget": int((1.05 + index) * small_budget()), "home": "disk", "codegen": "eager"}
        compiled = torch.compile(model, backend="chunkc", options=options)
        train_steps(compiled, adamw(model.parameters()), range(1))
        sessions.append(session_of(model))
        del model, compiled
        gc.collect()
    assert all(session.is_over and not session.store.arena.chunks for session in sessions)
    for _ in range(50):
        if num_threads() <= before[1]:
            break
        threading.Event().wait(0.05)
    assert num_threads() <= before[1]
    assert num_files() <= before[0] + 2
