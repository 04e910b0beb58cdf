"""Read the bytes of tensors for a checkpoint's files, piece by piece.

A checkpoint is written while the model computes, and the plan has no room for it. So nothing here allocates from the
compute tier, except for a GPU tensor that is not contiguous. Pieces of a contiguous CPU tensor are views of its memory.
Others are in NumPy's memory; a CPU tensor that is not contiguous is copied whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chunkc.ir.blocks import Block
from chunkc.ir.errors import CheckpointError, UnsupportedError
from chunkc.kernels.host_memory import host_empty
from chunkc.runtime.storage.maps import drop_pages, drop_span
from chunkc.runtime.store.shards import block_of
from chunkc.torch_private.dtensor import DTensor, local_of

PIECE_NBYTES = 1 << 20
"""Bytes of a piece at most."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Pieces = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True)
class Source:
    """A tensor to be saved.

    Attributes:
        file, key: where it is saved.
        shape, dtype: of the whole tensor in the file.
        pieces: yields the bytes in row-major order; each call begins at the first. Of a sharded tensor, those of
            `block`; none if another rank writes the same block.
        is_guarded: whether only an optimizer's step changes it: the next step waits until it is read. Sources that are
            not guarded are written before `save` returns.
        check: raises CheckpointError if the tensor was written to since the source was made.
        block: this rank's block of a sharded tensor; None: the tensor is not sharded.
    """

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Pieces
    is_guarded: bool
    check: Callable[[], None]
    block: Block | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of `pieces`."""
        if self.block is None:
            return self.whole_nbytes
        return self.block.numel * self.dtype.itemsize if self.block.is_first else 0

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def run_nbytes(self) -> int:
        """Bytes of each run: those of `pieces` that are consecutive in the whole tensor."""
        return self.whole_nbytes if self.block is None else self.block.run_numel * self.dtype.itemsize

    def runs(self) -> Iterator[int]:
        """Iterate over the runs' offsets from the beginning of the whole tensor, in bytes."""
        return iter((0,)) if self.block is None else (first * self.dtype.itemsize for first in self.block.runs())


def source_of(file: str, key: str, tensor: torch.Tensor, *, is_guarded: bool, title: str | None = None) -> Source:
    """Make the source of a tensor; of a sharded one, the source of this rank's block.

    Args:
        title: the tensor's name in errors; `key` by default.

    Raises:
        UnsupportedError: it is not an ordinary dense tensor with values; the message names it.
    """
    title = title or key
    if isinstance(tensor, DTensor):
        block = block_of(tensor)
        part = source_of(file, key, local_of(tensor), is_guarded=is_guarded, title=title)
        return _of_rank(replace(part, check=_unchanged(title, tensor)), block)
    detached = tensor.detach()
    if type(detached) is not torch.Tensor or detached.layout is not torch.strided or detached.device.type == "meta":
        kind = type(detached).__name__ if type(detached) is not torch.Tensor else detached.layout
        raise UnsupportedError(
            f"{title} is a {kind} on {detached.device}; a checkpoint saves dense tensors that have values"
        )
    shape, check = tuple(detached.shape), _unchanged(title, tensor)
    return Source(file, key, shape, detached.dtype, lambda: pieces_of(tensor.detach()), is_guarded, check)


def _of_rank(part: Source, block: Block) -> Source:
    """Turn the source of a local tensor into that of its block; only the first rank with a block has its bytes."""
    assert part.shape == block.sizes, part.key
    found = replace(part, shape=block.shape, block=block)
    return found if block.is_first else replace(found, pieces=lambda: iter(()))


def _unchanged(title: str, *tensors: torch.Tensor) -> Callable[[], None]:
    """Return a function that raises CheckpointError if a tensor was written to since, or its data replaced."""

    def state_of(tensor: torch.Tensor) -> tuple[int | None, int | None, int]:
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if tensor.is_inference():  # it has no version counter
            return None, None, local.data_ptr()
        return tensor._version, local._version, local.data_ptr()

    states = [state_of(tensor) for tensor in tensors]

    def check() -> None:
        if [state_of(tensor) for tensor in tensors] != states:
            raise CheckpointError(
                f"{title} was changed while it was being saved; call wait() of the checkpoint before code that is no "
                "optimizer's step changes parameters or buffers"
            )

    return check


def master_of(file: str, key: str, parameter: torch.Tensor, lower: torch.Tensor | None) -> Source:
    """Make the source of the fp32 master of a bf16 parameter with a split master (see `kernels.split`).

    Args:
        lower: int16 lower bits, of the parameter's shape; of a sharded parameter, this rank's. None: the master equals
            the parameter.
    """
    if isinstance(parameter, DTensor):
        return _of_rank(master_of(file, key, local_of(parameter), lower), block_of(parameter))
    check = _unchanged(key, parameter, *(() if lower is None else (lower,)))
    shape = tuple(parameter.shape)
    return Source(file, key, shape, torch.float32, lambda: _joined(parameter.detach(), lower), True, check)


def pieces_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order, in pieces; each is valid until the next one is requested."""
    if tensor.numel() == 0:
        return
    if tensor.device.type != "cpu":
        yield from _from_device(tensor)
        return
    if tensor.is_neg() or tensor.is_conj():
        tensor = host_empty(tensor.shape, tensor.dtype).copy_(tensor)
    array = bits_of(tensor)
    if tensor.is_contiguous():
        yield from _cut(array)
        return
    copy = np.empty(array.shape, array.dtype)
    np.copyto(copy, array)
    drop_pages(tensor)
    yield from _cut(copy)


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """View a CPU tensor's elements as integers of their size; a complex number as two integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.dtype.itemsize]).numpy()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _cut(array: npt.NDArray[Any]) -> Iterator[memoryview]:
    """Yield pieces of an array; once the next one is requested, drop the RAM behind a piece of a disk home."""
    whole = _bytes_of(array)
    for begin in range(0, len(whole), PIECE_NBYTES):
        piece = whole[begin : begin + PIECE_NBYTES]
        yield piece
        drop_span(array.ctypes.data + begin, len(piece))


def _from_device(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield pieces copied to one host buffer; a tensor that is not contiguous is copied whole on the device first."""
    flat = tensor.contiguous().reshape(-1)
    numel = max(PIECE_NBYTES // flat.dtype.itemsize, 1)
    room = host_empty((min(numel, flat.numel()),), flat.dtype)
    for begin in range(0, flat.numel(), numel):
        part = flat[begin : begin + numel]
        piece = room[: part.numel()]
        piece.copy_(part)
        yield _bytes_of(bits_of(piece))


def _joined(parameter: torch.Tensor, lower: torch.Tensor | None) -> Iterator[memoryview]:
    """Yield pieces of the fp32 masters that `kernels.split.join_master` would make, computed in NumPy."""
    upper_bits, lower_bits = _rows_of(parameter), None if lower is None else _rows_of(lower)
    numel = PIECE_NBYTES // 4
    for begin in range(0, len(upper_bits), numel):
        wide = upper_bits[begin : begin + numel].astype(np.int32) << 16
        joined = wide if lower_bits is None else wide + lower_bits[begin : begin + numel]
        joined = np.where(np.isnan(joined.view(np.float32)), wide, joined)
        for read in (upper_bits, lower_bits):
            if read is not None:
                drop_span(read.ctypes.data + 2 * begin, 2 * len(wide))
        yield _bytes_of(joined)


def _rows_of(tensor: torch.Tensor) -> npt.NDArray[np.int16]:
    """Return a 16-bit tensor's elements in row-major order, in 1-D: a view of a contiguous CPU tensor, else a copy."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return bits_of(tensor).reshape(-1)
    return np.frombuffer(b"".join(pieces_of(tensor)), dtype=np.int16)
