"""The files are those of the package `safetensors`, and headers that lie are refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkc.checkpoint import mapped as mapped_files
from chunkc.checkpoint.mapped import Mapped
from chunkc.checkpoint.sources import pieces_of
from chunkc.ir.errors import CheckpointError, UnsupportedError
from chunkc.weights.safetensors import header_of

TENSORS = {
    "half": torch.randn(3, dtype=torch.bfloat16),  # what follows is not aligned
    "wide": torch.randn(2, 3, dtype=torch.float64),
    "turned": torch.randn(4, 5).t(),
    "empty": torch.empty(0, 7),
    "single": torch.tensor(3, dtype=torch.int16),
    "truth": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "codes": torch.arange(5, dtype=torch.uint8),
    "unsigned": torch.arange(5).to(torch.uint32),
    "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
}


def written(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    header = header_of([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    path.write_bytes(header + b"".join(piece for tensor in tensors.values() for piece in pieces_of(tensor)))
    return path


def mapped(path: Path) -> dict[str, Mapped]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return mapped_files.mapped(fd, path.name)
    finally:
        os.close(fd)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in (a, b))
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(a.view(torch.uint8).flatten().tolist()) == bytes(b.view(torch.uint8).flatten().tolist())
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1) if tensor.dim() == 0 else tensor


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    found = load_file(written(tmp_path / "a.safetensors", TENSORS))
    assert all(same(flat(found[name]), flat(tensor)) for name, tensor in TENSORS.items())


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor.resolve_conj().resolve_neg().contiguous() for name, tensor in TENSORS.items()}
    save_file(tensors, tmp_path / "b.safetensors")
    for path in (tmp_path / "b.safetensors", written(tmp_path / "c.safetensors", TENSORS)):
        found = mapped(path)
        assert set(found) == set(TENSORS)
        assert all(same(flat(found[name].tensor()), flat(tensor)) for name, tensor in TENSORS.items())


def test_a_dtype_that_files_have_no_word_for() -> None:
    with pytest.raises(UnsupportedError, match=r"x is torch\.complex128"):
        header_of([("x", torch.complex128, (1,))])


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "would lie at"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "would lie at"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}, "would lie at"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "end at"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "end at"),
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "header"),
        ({"shape": [2]}, "header"),
        (7, "header"),
    ],
)
def test_headers_that_lie(tmp_path: Path, about: Any, problem: str) -> None:
    text = json.dumps({"x": about}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=problem):
        mapped(path)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_no_such_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors has"):
        mapped(path)


def test_a_name_that_the_format_keeps_for_itself_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="__metadata__"):
        header_of([("__metadata__", torch.float32, (2,))])
