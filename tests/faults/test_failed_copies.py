"""Copies that fail in the middle of a step, and NaN: torn is nothing. A full disk, and a home that cannot be used: an
error before anything moved, and training goes on.
"""

from __future__ import annotations

import errno
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import HUGE, TINY, adamw, array, compile_case, differences, gradients, refuse, train_steps, weights
from plain_modules import Stack
from store_cases import Builder, make_store
from torch import nn
from zoo import Case, floats

import chunkc
from chunkc.runtime.device.streams import JobMark
from chunkc.runtime.execution.executor import lower
from chunkc.runtime.execution.run import Measurement, Run
from chunkc.runtime.execution.saved import SavedRoom, SavedValues
from chunkc.runtime.storage.homes import MemoryHome

pytestmark = [
    pytest.mark.timeout(90),  # a hang is a failure
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),  # they die on purpose
]


CASE = Case("stack", Stack, lambda seed: {"x": floats(seed, (8, 64))})


@functools.cache
def small_budget() -> int:
    """Return a budget slightly above the minimum, in bytes."""
    return int(1.05 * refuse(CASE, memory_budget=TINY, home="disk").minimum_nbytes)


def expected_losses(num_steps: int) -> list[np.ndarray]:
    """Return the losses of an undisturbed training."""
    return undisturbed()[0][:num_steps]


@functools.cache
def undisturbed(num_steps: int = 3) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return losses, and weights at the end, of the first steps."""
    model, compiled = compile_case(CASE, memory_budget=HUGE, whole_graph="never")
    return train_steps(CASE, compiled, adamw(model.parameters()), range(num_steps)), weights(model)


def once(at: int, real: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but `fault` at the given call, counted from 1; afterwards, all is well again."""
    num_calls = 0

    def call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return (fault if num_calls == at else real)(*args)

    return call


def _die(event: JobMark, *args: Any) -> None:
    """The worker thread ends in the middle of a copy, without a word: its job is never finished."""
    raise SystemExit


def _input_output_error(*args: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def break_copy(patch: pytest.MonkeyPatch, fault: str, at: int) -> None:
    """Let one copy of those to come fail."""
    if fault == "thread":
        patch.setattr(JobMark, "_run", once(at, JobMark._run, _die))
    else:
        patch.setattr(os, fault, once(at, getattr(os, fault), _input_output_error))


FAULTS = [
    (phase, fault, at)
    for phase, fault, last in (
        ("optimizer", "pwritev", 12),
        ("optimizer", "thread", 20),
        ("optimizer", "preadv", 16),
        ("forward", "thread", 4),
        ("forward", "preadv", 4),
        ("backward", "thread", 5),
        ("backward", "preadv", 2),  # some chunks are in slots already
        ("backward", "pwritev", 4),
    )
    for at in (last, 1)
]
"""The `at`-th copy of a phase goes wrong: (nearly) its last, or its first."""


@pytest.mark.quick(1)
@pytest.mark.parametrize(("phase", "fault", "at"), FAULTS)
def test_a_copy_that_fails_in_the_middle_of_a_step(
    phase: str, fault: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled = compile_case(
        CASE, memory_budget=small_budget(), home=f"disk:{tmp_path}", whole_graph="never", debug=True
    )
    optimizer = adamw(model.parameters())
    losses = train_steps(CASE, compiled, optimizer, range(1))
    before = weights(model)

    def step(until: str) -> Iterator[str]:
        yield "forward"
        loss = compiled(**CASE.batch(1))
        yield "backward"
        loss.backward()
        yield "optimizer"
        optimizer.step()

    with monkeypatch.context() as patch:
        parts = step(phase)
        while next(parts) != phase:
            pass
        grads = gradients(model)
        break_copy(patch, fault, at)
        with pytest.raises(chunkc.StreamError if fault == "thread" else chunkc.HomeError) as caught:
            next(parts)
        if fault == "thread":
            assert "thread" in str(caught.value)
        else:
            assert caught.value.errno == errno.EIO
            assert str(tmp_path) in str(caught.value)
    after = weights(model)
    assert all(np.isfinite(value).all() for value in after.values())
    assert all(np.isfinite(gradient).all() for gradient in gradients(model).values())
    assert not list(tmp_path.iterdir())
    if phase == "optimizer":
        # Chunks updated before the fault stay updated; no tensor is anything in between.
        assert not differences(gradients(model), grads)
        _, updated = undisturbed(2)
        changed = {name for name in after if not differences(after[name], updated[name])}
        assert at == 1 or changed
        assert at > 12 or changed != set(after)
        for name in after.keys() - changed:
            assert not differences(after[name], before[name]), f"{name} is torn"
        del caught
        optimizer.zero_grad()
        assert all(np.isfinite(loss) for loss in train_steps(CASE, compiled, optimizer, range(1, 3)))
        return
    assert not differences(after, before)
    del caught
    optimizer.zero_grad()
    losses += train_steps(CASE, compiled, optimizer, range(1, 3))
    assert not differences(losses, expected_losses(3))


def test_a_batch_whose_loss_is_nan_can_be_left_out() -> None:
    """`if isfinite(loss)`, as many training loops do: as if the batch had never been."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(), home="disk", whole_graph="never", debug=True)
    optimizer = adamw(model.parameters())
    losses = train_steps(CASE, compiled, optimizer, range(1))
    loss = compiled(x=torch.full((8, 64), float("nan")))
    loss.backward()
    assert torch.isnan(loss)
    assert all(np.isnan(gradient).all() for gradient in gradients(model).values())
    del loss
    optimizer.zero_grad()
    losses += train_steps(CASE, compiled, optimizer, range(1, 3))
    expected, expected_weights = undisturbed()
    assert not differences(losses, expected)
    assert not differences(weights(model), expected_weights)


class Copy:
    """A copy under way, which fails where there is a `problem`."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem, self.is_over = problem, False

    def wait(self) -> None:
        self.is_over = True
        if self.problem is not None:
            raise self.problem


def test_copies_of_saved_values_are_over_before_an_error_frees_what_they_read() -> None:
    copies = {"first": Copy(chunkc.StreamError("the disk is on fire")), "second": Copy()}
    saved = SavedValues(SavedRoom(MemoryHome()), under_way=dict(copies))
    build = Builder()
    build.call("fail", build.graph.placeholder("x"))
    build.graph.output(())

    def fail(values: list[Any]) -> Any:
        raise ZeroDivisionError("oops")

    store, _ = make_store("a")
    with pytest.raises(ZeroDivisionError, match="oops"):
        lower(build.graph, {"fail": fail})([torch.ones(1)], Run(store, Measurement(), saved=saved))
    assert all(copy.is_over for copy in copies.values())
    assert not saved.under_way


def test_a_step_with_nan_gradients_gives_nan_as_in_pytorch() -> None:
    """Nothing is caught, hidden or raised: what had a NaN gradient is NaN, in weights and states."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(), home="disk", whole_graph="never")
    optimizer = adamw(model.parameters())
    compiled(x=torch.full((8, 64), float("nan"))).backward()
    optimizer.step()
    assert all(np.isnan(value).all() for value in weights(model).values())
    assert all(state["exp_avg"].isnan().all() for state in optimizer.state.values())


# ---------------------------------------------------------------- homes that cannot be used

pytestmark = [
    pytest.mark.timeout(90),  # a hang is a failure
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),  # they die on purpose
]


class Disk:
    """A directory with little room: a real small file system, or reservations patched to fail."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch | None) -> None:
        self.path, self.home = path, f"disk:{path}"
        self.free_nbytes = HUGE
        self._patched = patch is not None
        if patch is not None:
            reserve = os.posix_fallocate

            def limited(fd: int, offset: int, nbytes: int) -> None:
                if nbytes > self.free_nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.free_nbytes -= nbytes
                reserve(fd, offset, nbytes)

            patch.setattr(os, "posix_fallocate", limited)

    def leave_free(self, nbytes: int) -> None:
        """So many bytes can be reserved from now on."""
        nbytes -= nbytes % 4096
        if self._patched:
            self.free_nbytes = nbytes
            return
        disk = os.statvfs(self.path)
        used_nbytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={max(4096, used_nbytes + nbytes)}", str(self.path)], check=True)


@pytest.fixture(params=["tmpfs", "patched"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    if request.param == "patched":
        yield Disk(tmp_path, monkeypatch)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "chunkc-test", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root mounts file systems")
    try:
        yield Disk(tmp_path, None)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def addresses(model: nn.Module) -> list[int]:
    return [p.data_ptr() for p in model.parameters()]


def model_nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def compiled_anew(model: nn.Module, **options: Any) -> nn.Module:
    """The same model after a failed compilation, as a user would compile it again."""
    torch._dynamo.reset()
    return torch.compile(model, backend="chunkc", options={"codegen": "eager", "whole_graph": "never", **options})


def assert_full(error: chunkc.HomeError, disk: Disk) -> None:
    assert error.errno == errno.ENOSPC
    assert str(disk.path) in str(error)
    assert os.strerror(errno.ENOSPC) in str(error)


def test_a_disk_that_is_full_at_place(disk: Disk) -> None:
    model = CASE.build(0)
    before = addresses(model)
    disk.leave_free(model_nbytes(model) // 2)
    with pytest.raises(chunkc.HomeError) as caught:
        chunkc.place(model, home=disk.home)
    assert_full(caught.value, disk)
    assert addresses(model) == before
    assert not differences(weights(model), weights(CASE.build(0)))
    disk.leave_free(8 * model_nbytes(model))
    chunkc.place(model, home=disk.home)  # what was reserved has been given back: now it works
    compiled = compiled_anew(model, memory_budget=small_budget(), home=disk.home)
    assert not differences(train_steps(CASE, compiled, adamw(model.parameters()), range(2)), expected_losses(2))


@pytest.mark.second_tier
@pytest.mark.parametrize("way_out", ["home", "budget", "room"])
def test_a_disk_that_is_full_at_the_first_call(disk: Disk, way_out: str) -> None:
    """Parameters are adopted when the model is compiled. It is left as it was, and trains on elsewhere."""
    options: dict[str, Any] = {"memory_budget": small_budget(), "home": disk.home}
    model, compiled = compile_case(CASE, place=False, whole_graph="never", **options)
    before, values = addresses(model), weights(model)
    disk.leave_free(model_nbytes(model) // 2)
    for _ in range(2):  # a second call fails in the same way
        with pytest.raises(chunkc.HomeError) as caught:
            compiled(**CASE.batch(0))
        assert_full(caught.value, disk)
    assert addresses(model) == before
    assert not differences(weights(model), values)
    assert all(p.grad is None for p in model.parameters())
    if way_out == "home":
        options["home"] = "cpu"
    elif way_out == "budget":
        options["memory_budget"] = HUGE
    else:
        disk.leave_free(8 * model_nbytes(model))
    compiled = compiled_anew(model, **options)
    assert not differences(train_steps(CASE, compiled, adamw(model.parameters()), range(2)), expected_losses(2))


def test_a_disk_that_is_full_at_the_first_optimizer_step(disk: Disk) -> None:
    """Optimizer states get their room then. No parameter has changed; with room, the same step works."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(), home=disk.home, whole_graph="never")
    optimizer = adamw(model.parameters())
    loss = compiled(**CASE.batch(0))
    loss.backward()
    before, grads = weights(model), gradients(model)
    disk.leave_free(model_nbytes(model) // 2)
    with pytest.raises(chunkc.HomeError) as caught:
        optimizer.step()
    assert_full(caught.value, disk)
    assert not differences(gradients(model), grads)
    assert not differences(weights(model), before)
    disk.leave_free(8 * model_nbytes(model))
    optimizer.step()
    optimizer.zero_grad()
    losses = [array(loss), *train_steps(CASE, compiled, optimizer, range(1, 3))]
    assert not differences(losses, expected_losses(3))


@pytest.mark.parametrize("place", [True, False], ids=["place", "compile"])
@pytest.mark.parametrize("where", ["absent", "a file", "read-only"])
def test_an_unwritable_home_directory(tmp_path: Path, where: str, place: bool) -> None:
    """The message names the directory; the model is left as it was."""
    directory = {"absent": tmp_path / "absent", "a file": tmp_path / "file", "read-only": Path("/proc")}[where]
    (tmp_path / "file").touch()
    model = CASE.build(0)
    before = addresses(model)
    home = f"disk:{directory}"
    compiled = compiled_anew(model, memory_budget=small_budget(), home=home)
    adopt = (lambda: chunkc.place(model, home=home)) if place else (lambda: compiled(**CASE.batch(0)))
    with pytest.raises(chunkc.HomeError, match=str(directory)):
        adopt()
    assert addresses(model) == before
    assert not differences(weights(model), weights(CASE.build(0)))
    compiled = compiled_anew(model, memory_budget=small_budget(), home=f"disk:{tmp_path}")
    assert not differences(train_steps(CASE, compiled, adamw(model.parameters()), range(1)), expected_losses(1))
