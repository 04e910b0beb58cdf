"""Full disks, broken disks, dead threads, NaN: a clear error, nothing hangs, parameters stay readable."""

from __future__ import annotations

import errno
import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import HUGE, TINY, Optimizer, adamw, array, compile_case, differences, gradients, refuse, weights
from torch import Tensor, nn
from zoo import Case, floats

import chunkc
from chunkc.runtime.streams import Event

pytestmark = [
    pytest.mark.timeout(90),  # a hang is a failure
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),  # they die on purpose
]


class Stack(nn.Module):
    """Four equal layers, one chunk each; their biases are too small to move."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


CASE = Case("stack", Stack, lambda seed: {"x": floats(seed, (8, 64))})


@functools.cache
def small_budget() -> int:
    """Bytes: nearly the minimum."""
    return int(1.05 * refuse(CASE, memory_budget=TINY, home="disk").minimum_nbytes)


def train_steps(compiled: nn.Module, optimizer: Optimizer, steps: range) -> list[np.ndarray]:
    """Ordinary training steps; returns the losses."""
    losses = []
    for step in steps:
        loss = compiled(**CASE.batch(step))
        loss.backward()
        losses.append(array(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def addresses(model: nn.Module) -> list[int]:
    return [p.data_ptr() for p in model.parameters()]


def model_nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def compiled_anew(model: nn.Module, **options: Any) -> nn.Module:
    """The same model after a failed compilation, as a user would compile it again."""
    torch._dynamo.reset()
    return torch.compile(model, backend="chunkc", options={"codegen": "eager", "whole_graph": "never", **options})


def expected_losses(num_steps: int) -> list[np.ndarray]:
    """Losses of an undisturbed training."""
    return undisturbed()[0][:num_steps]


@functools.cache
def undisturbed() -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Losses, and weights at the end, of three steps."""
    model, compiled = compile_case(CASE, memory_budget=HUGE, whole_graph="never")
    return train_steps(compiled, adamw(model.parameters()), range(3)), weights(model)


# ---------------------------------------------------------------- a full disk


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
    assert not differences(train_steps(compiled, adamw(model.parameters()), range(2)), expected_losses(2))


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
    assert not differences(train_steps(compiled, adamw(model.parameters()), range(2)), expected_losses(2))


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
    losses = [array(loss), *train_steps(compiled, optimizer, range(1, 3))]
    assert not differences(losses, expected_losses(3))


# ---------------------------------------------------------------- a home that cannot be used


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
    assert not differences(train_steps(compiled, adamw(model.parameters()), range(1)), expected_losses(1))


# ---------------------------------------------------------------- copies that fail in the middle of a step


def once(at: int, real: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but `fault` at the given call, counted from 1; afterwards, all is well again."""
    num_calls = 0

    def call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return (fault if num_calls == at else real)(*args)

    return call


def _die(event: Event, *args: Any) -> None:
    """The worker thread ends in the middle of a copy, without a word: its job is never finished."""
    raise SystemExit


def _input_output_error(*args: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def break_copy(patch: pytest.MonkeyPatch, fault: str, at: int) -> None:
    """Let one copy of those to come fail."""
    if fault == "thread":
        patch.setattr(Event, "_run", once(at, Event._run, _die))
    else:
        patch.setattr(os, fault, once(at, getattr(os, fault), _input_output_error))


FAULTS = [
    (phase, fault, at)
    for phase, fault, last in (
        ("forward", "thread", 4),
        ("forward", "preadv", 4),
        ("backward", "thread", 5),
        ("backward", "preadv", 2),  # some chunks are in slots already
        ("backward", "pwritev", 4),
        ("optimizer", "thread", 20),
        ("optimizer", "preadv", 16),
        ("optimizer", "pwritev", 12),
    )
    for at in (1, last)
]
"""The `at`-th copy of a phase goes wrong: its first, or (nearly) its last."""


@pytest.mark.parametrize(("phase", "fault", "at"), FAULTS)
def test_a_copy_that_fails_in_the_middle_of_a_step(
    phase: str, fault: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled = compile_case(
        CASE, memory_budget=small_budget(), home=f"disk:{tmp_path}", whole_graph="never", debug=True
    )
    optimizer = adamw(model.parameters())
    losses = train_steps(compiled, optimizer, range(1))
    before = weights(model)

    def step(until: str) -> Iterator[str]:
        yield "forward"
        loss = compiled(**CASE.batch(9))
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
        del caught
        optimizer.zero_grad()
        assert all(np.isfinite(loss) for loss in train_steps(compiled, optimizer, range(1, 3)))
        return
    assert not differences(after, before)
    del caught
    optimizer.zero_grad()
    losses += train_steps(compiled, optimizer, range(1, 3))
    assert not differences(losses, expected_losses(3))


@pytest.mark.parametrize("fault", ["thread", "pwritev"])
def test_a_failed_optimizer_step_tears_no_parameter(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter is as before the step or as after it."""

    def until_the_step() -> tuple[nn.Module, Any]:
        model, compiled = compile_case(CASE, memory_budget=small_budget(), home=f"disk:{tmp_path}", whole_graph="never")
        optimizer = adamw(model.parameters())
        train_steps(compiled, optimizer, range(1))
        compiled(**CASE.batch(1)).backward()
        return model, optimizer

    model, optimizer = until_the_step()
    before = weights(model)
    optimizer.step()
    after = weights(model)
    model, optimizer = until_the_step()
    assert not differences(weights(model), before)
    with monkeypatch.context() as patch:
        break_copy(patch, fault, 12)
        with pytest.raises((chunkc.StreamError, chunkc.HomeError)):
            optimizer.step()
    found = weights(model)
    changed = {name for name in found if not differences(found[name], after[name])}
    assert changed
    assert changed != set(found)
    for name in found.keys() - changed:
        assert not differences(found[name], before[name]), f"{name} is torn"


# ---------------------------------------------------------------- NaN


def test_a_batch_whose_loss_is_nan_can_be_left_out() -> None:
    """`if isfinite(loss)`, as many training loops do: as if the batch had never been."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(), home="disk", whole_graph="never", debug=True)
    optimizer = adamw(model.parameters())
    losses = train_steps(compiled, optimizer, range(1))
    loss = compiled(x=torch.full((8, 64), float("nan")))
    loss.backward()
    assert torch.isnan(loss)
    assert all(np.isnan(gradient).all() for gradient in gradients(model).values())
    del loss
    optimizer.zero_grad()
    losses += train_steps(compiled, optimizer, range(1, 3))
    expected, expected_weights = undisturbed()
    assert not differences(losses, expected)
    assert not differences(weights(model), expected_weights)


def test_a_step_with_nan_gradients_gives_nan_as_in_pytorch() -> None:
    """Nothing is caught, hidden or raised: what had a NaN gradient is NaN, in weights and states."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(), home="disk", whole_graph="never")
    optimizer = adamw(model.parameters())
    compiled(x=torch.full((8, 64), float("nan"))).backward()
    optimizer.step()
    assert all(np.isnan(value).all() for value in weights(model).values())
    assert all(state["exp_avg"].isnan().all() for state in optimizer.state.values())


# ---------------------------------------------------------------- nothing is left behind

SCRIPT = """
import os, sys, time, torch, chunkc
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

directory, ending = sys.argv[1:]
model = chunkc.place(Stack(), home="disk:" + directory)
options = {"memory_budget": 200_000, "home": "disk:" + directory, "codegen": "eager", "whole_graph": "never"}
compiled = torch.compile(model, backend="chunkc", options=options)
optimizer = chunkc.optim.AdamW(model.parameters())
for _ in range(2):
    loss = compiled(torch.ones(4, 64))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert chunkc.report(compiled).traffic_nbytes["to_home"] > 0
links = ["/proc/self/fd/" + fd for fd in os.listdir("/proc/self/fd")]
open_files = [os.readlink(link) for link in links if os.path.islink(link)]
assert any(path.startswith(directory) for path in open_files), open_files
compiled(torch.ones(4, 64))  # a step is under way
if ending == "exception":
    raise ZeroDivisionError("oops")
if ending == "kill":
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("ending", ["exit", "exception", "kill"])
def test_no_file_is_left_behind(ending: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), ending]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if ending == "kill":
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert list(tmp_path.iterdir()) == []  # not even while it runs
            process.send_signal(signal.SIGKILL)
            assert ready == "ready\n", process.stderr and process.stderr.read()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == {"exit": 0, "exception": 1, "kill": -signal.SIGKILL}[ending], errors
    if ending == "exception":
        assert errors.rstrip().endswith("ZeroDivisionError: oops")
    if ending == "exit":
        assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_forgotten_gives_its_disk_space_back(tmp_path: Path) -> None:
    """While the process lives on: no descriptor into the home directory stays open."""

    def descriptors() -> list[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.islink(link)]

    def train() -> None:
        model, compiled = compile_small_on(tmp_path)
        train_steps(compiled, adamw(model.parameters()), range(1))
        assert any(str(tmp_path) in path for path in descriptors())

    train()
    torch._dynamo.reset()
    gc.collect()
    assert not [path for path in descriptors() if str(tmp_path) in path]


def compile_small_on(directory: Path) -> tuple[nn.Module, nn.Module]:
    budget = small_budget()
    return compile_case(CASE, memory_budget=budget, home=f"disk:{directory}", whole_graph="never")
