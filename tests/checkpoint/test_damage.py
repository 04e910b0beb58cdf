"""Damaged checkpoints are refused by name, and the one before is taken; no path leads out of a checkpoint."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import chunkc
from chunkc.checkpoint.manifest import File, Manifest
from chunkc.checkpoint.restoring import read
from chunkc.checkpoint.snapshot import STATE_JSON
from chunkc.ir.errors import CheckpointError


def begin(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    return model, torch.optim.Adam(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def two_checkpoints(folder: Path) -> list[torch.Tensor]:
    """Steps 1 and 2; the weights of each."""
    model, optimizer = begin()
    weights = []
    with chunkc.Checkpoint(folder, model=model, optimizer=optimizer) as ck:
        for number in (1, 2):
            step(model, optimizer)
            ck.save(number)
            weights.append(model.weight.detach().clone())
    return weights


NEWEST = "step-000000000002"


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 9)))


def swap(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin, length = rng.randrange(len(content) - 1), rng.randrange(1, 64)
    content[begin : begin + length] = bytes(b ^ 0xFF for b in content[begin : begin + length])
    path.write_bytes(content)


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


@pytest.mark.second_tier
def test_eighty_accidents(tmp_path: Path) -> None:
    weights = two_checkpoints(tmp_path / "good")
    rng = random.Random(0)
    kinds: list[Callable[[Path, random.Random], None]] = [flip, flip, flip, truncate, truncate, swap, lengthen, remove]
    names = sorted(path.name for path in (tmp_path / "good" / NEWEST).iterdir())
    assert len(names) == 5
    for number in range(80):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        hurt, name = kinds[number % len(kinds)], names[number % len(names)]
        hurt(folder / NEWEST / name, rng)
        model, optimizer = begin(1)
        with pytest.warns(UserWarning, match=f"{NEWEST} is damaged and left out"):
            found = chunkc.Checkpoint(folder, model=model, optimizer=optimizer).load_latest()
        assert found == 1, (number, hurt, name)
        assert torch.equal(model.weight, weights[0])
        shutil.rmtree(folder)


def test_nothing_changes_where_no_checkpoint_is_whole(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    rng = random.Random(0)
    for checkpoint in tmp_path.glob("step-*"):
        flip(checkpoint / "optimizer.safetensors", rng)
    model, optimizer = begin(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(CheckpointError, match=r"(?s)is whole:.*step-.*2 .*step-.*1"),
    ):
        chunkc.Checkpoint(tmp_path, model=model, optimizer=optimizer).load_latest()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state


def test_a_run_that_went_back_saves_the_damaged_step_again(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    flip(tmp_path / NEWEST / "model.safetensors", random.Random(0))
    model, optimizer = begin(1)
    with chunkc.Checkpoint(tmp_path, model=model, optimizer=optimizer) as ck:
        with pytest.warns(UserWarning, match="damaged"):
            assert ck.load_latest() == 1
        step(model, optimizer)
        ck.save(2)
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-000000000001", f"{NEWEST}.1"]
    fresh, other = begin(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chunkc.Checkpoint(tmp_path, model=fresh, optimizer=other).load_latest() == 2
    assert torch.equal(fresh.weight, model.weight)


# --- paths ---


def rewritten(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """A forged manifest, with a checksum that is right."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    files = {name: File(file["nbytes"], int(file["crc32"], 16)) for name, file in content["files"].items()}
    path.write_bytes(change(Manifest(content["step"], files)).render())


def naming(name: str) -> Callable[[Path, Path], None]:
    content = File(4, zlib.crc32(b"root"))
    return lambda folder, _: rewritten(folder / NEWEST, lambda m: Manifest(m.step, {**m.files, name: content}))


def linked_file(folder: Path, other: Path) -> None:
    """The very same bytes, elsewhere."""
    path = folder / NEWEST / "model.safetensors"
    path.unlink()
    path.symlink_to(other / NEWEST / "model.safetensors")


def linked_folder(folder: Path, other: Path) -> None:
    shutil.rmtree(folder / NEWEST)
    (folder / NEWEST).symlink_to(other / NEWEST)


def pipe(folder: Path, other: Path) -> None:
    path = folder / NEWEST / "state.json"
    path.unlink()
    os.mkfifo(path)


def another_steps_name(folder: Path, other: Path) -> None:
    shutil.copytree(folder / NEWEST, folder / "step-000000000009")


ELSEWHERE = ["../step-000000000001/state.json", "/etc/passwd", "..", ".x", "a/b", "a\0b"]
LEFT_OUT: list[tuple[Callable[[Path, Path], None], str, int]] = [
    *((naming(name), r"names the file .* which is not in the checkpoint's directory", 1) for name in ELSEWHERE),
    (linked_file, r"model\.safetensors cannot be read: a symbolic link", 1),
    (linked_folder, "it is a symbolic link", 1),
    (pipe, r"state\.json is no regular file", 1),
    (another_steps_name, "it says that it is of step 2", 2),
]


@pytest.mark.parametrize(("change", "said", "loaded"), LEFT_OUT, ids=range(len(LEFT_OUT)))
def test_files_that_are_not_the_checkpoint_s_own_are_not_read(
    tmp_path: Path, change: Callable[[Path, Path], None], said: str, loaded: int
) -> None:
    two_checkpoints(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    change(tmp_path / "a", tmp_path / "b")
    model, optimizer = begin(1)
    with pytest.warns(UserWarning, match=said):
        assert chunkc.Checkpoint(tmp_path / "a", model=model, optimizer=optimizer).load_latest() == loaded


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_does_not_check_a_file_names_its_damage(tmp_path: Path, rank: int) -> None:
    """Each file's checksum is compared by one rank; all of them read what is in JSON."""
    two_checkpoints(tmp_path)
    path = tmp_path / NEWEST / STATE_JSON
    path.write_bytes(path.read_bytes().replace(b",", b";", 1))
    folder_fd = os.open(tmp_path / NEWEST, os.O_RDONLY)
    try:
        with pytest.raises(CheckpointError, match=r"state\.json"):
            read(folder_fd, 2, rank, 3)
    finally:
        os.close(folder_fd)


def test_what_comes_from_a_newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkc.checkpoint.manifest.FORMAT", 2)
    two_checkpoints(tmp_path)
    monkeypatch.undo()
    model, optimizer = begin(1)
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(CheckpointError, match="of format 2, and this"),
    ):
        chunkc.Checkpoint(tmp_path, model=model, optimizer=optimizer).load_latest()


def test_reading_executes_nothing() -> None:
    """No module of the room knows pickle."""
    for path in Path(chunkc.checkpoint.__file__).parent.glob("*.py"):
        words = path.read_text()
        assert "torch.load" not in words
        assert "import pickle" not in words
