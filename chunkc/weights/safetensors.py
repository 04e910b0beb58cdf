"""Write safetensors files as a stream.

The format (https://huggingface.co/docs/safetensors): the header's length in 8 bytes, little endian; a header in JSON,
with dtype, shape and offsets of each tensor; the tensors' bytes. The library's own writer takes all tensors at once,
and would keep the pages of all of them in memory.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.storage.maps import drop_pages

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
"""Name of each dtype in the format."""

_ALIGNMENT_NBYTES = 8


def header_of(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Make the header of a file that has these tensors (name, dtype, shape) in this order, with its length before it.

    Raises:
        UnsupportedError: the format lacks a dtype, or a tensor is called `__metadata__`.
    """
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset_nbytes = 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise UnsupportedError(f"{name} is {dtype}, which safetensors files cannot hold")
        if name in content:
            raise UnsupportedError(f"a tensor is called {name}, which means something else in safetensors files")
        end_nbytes = offset_nbytes + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset_nbytes, end_nbytes]}
        offset_nbytes = end_nbytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_NBYTES)
    return struct.pack("<Q", len(text)) + text


def check_storable(name: str, tensor: object) -> torch.Tensor:
    """Return the tensor if a safetensors file can hold it.

    Raises:
        UnsupportedError: it cannot; the message has its name.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{name} is a {type(tensor).__name__}: safetensors files hold tensors only")
    if tensor.layout is not torch.strided or tensor.dtype not in NAMES or tensor.is_meta:
        what = "has no memory" if tensor.is_meta else f"is {tensor.dtype} in the layout {tensor.layout}"
        raise UnsupportedError(f"{name} {what}: safetensors files cannot hold it")
    return tensor


def in_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Sort the names of tensors, largest elements first, so that every tensor is aligned in a file."""
    return sorted(tensors, key=lambda name: -tensors[name].itemsize)


def write(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor] = torch.detach
) -> None:
    """Write tensors, one after the other; drop the pages of a disk home once they are written.

    Args:
        tensors: each passes `check_storable`.
        whole: gathers a sharded tensor, and returns any other as it is; called once for each, `in_order`.

    Raises:
        OSError: the file cannot be written; if there is no room, nothing was written.
    """
    names = in_order(tensors)
    header = header_of((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names)
    os.posix_fallocate(file.fileno(), 0, len(header) + sum(t.numel() * t.itemsize for t in tensors.values()))
    file.write(header)
    for name in names:
        data = whole(tensors[name]).detach().resolve_conj().resolve_neg().cpu().contiguous()
        if data.numel():
            file.write(data.reshape(-1).view(torch.uint8).numpy().data)
            drop_pages(data)
