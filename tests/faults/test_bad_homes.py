"""A full disk, and a home that cannot be used: an error before anything moved, and training goes on."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_cases import CASE, expected_losses, small_budget, train_steps
from harness import HUGE, adamw, array, compile_case, differences, gradients, weights
from torch import nn

import chunkc

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
    assert not differences(train_steps(compiled, adamw(model.parameters()), range(2)), expected_losses(2))


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
