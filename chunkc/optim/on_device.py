"""Keep the data that updates on a GPU need besides kernels: tables of work, scalars, and pointers of many tensors.

A table of work says which program updates which elements; it depends on a tile's spans alone. Scalars change with every
step; they are a few hundred bytes, copied from pinned memory asynchronously. Tensors that do not move are updated in
launches of many (`batches`). Nothing here waits for the device.

A user may take steps on several streams, and backwards that update on others. Then these tables are made on one stream,
and read, rewritten and freed on another, without the user's knowledge (see `LaunchOrder`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import MASTER, MASTER_LOW
from chunkc.ir.strides import is_dense
from chunkc.kernels.formats import UpdateFormat
from chunkc.kernels.pointer_offsets import RoundingSeed, alignment_of, kinds_of, pointer_offsets_of
from chunkc.optim.pending_steps import decided
from chunkc.optim.rule import ResidentTensor, Updater
from chunkc.utils.recent import Recent

TABLE_NBYTES = 2 << 20
"""Tables of work that are kept on a device, in bytes: those used last (`machines.devices.TABLES_NBYTES` has room)."""

POINTER_OFFSETS_NBYTES = 1 << 20
"""Pointer offsets of tensors that one launch updates, in bytes: those used last; in addition to the tables."""

TEMPORARIES_NBYTES = 1 << 20
"""Temporary tensors of an update without a kernel, in bytes; in addition to the tables and pointer offsets."""


def computes_by_triton(device: torch.device) -> bool:
    """Whether updates on a device are Triton's; on the CPU they are loops in C++."""
    return device.type == "cuda"


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to the device asynchronously: torch keeps the pinned memory until the copy is done."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class LaunchOrder:
    """The order of an updater's launches on a device, on any streams: they have tables in common.

        with order.turn():                       # after the launch before, of another stream
            launch(order.reads(table))           # the table's memory is not reused before this stream has read it

    On the CPU, and as long as all launches are on one stream, nothing waits for anything.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._end: torch.cuda.Event | None = None
        self._are_several = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Order the work enqueued inside after that of all earlier turns."""
        if self._device.type == "cpu":
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        if self._end is None:
            self._end = torch.cuda.Event()
        elif stream != self._stream:
            self._are_several = True
            stream.wait_event(self._end)
        try:
            yield
        finally:
            self._end.record(stream)  # a stream that waits for the event waits for what it was last recorded for
            self._stream = stream

    def reads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor, which may be freed on another stream, until this turn's launches have read it."""
        if self._are_several and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor


@dataclass(eq=False)
class Sent:
    """A CPU tensor and its copy on the device."""

    here: torch.Tensor
    on_device: torch.Tensor

    def follow(self, now: torch.Tensor) -> None:
        """Replace the tensor, in the stream's order: work that was enqueued before reads the former one."""
        if not torch.equal(now, self.here):
            self.here = now
            self.on_device.copy_(now if self.on_device.device.type == "cpu" else now.pin_memory(), non_blocking=True)


class StepScalars:
    """The hyperparameters of one step of an optimizer, as rows of one table on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[Any, int] = {}
        self._tables: dict[tuple[type, torch.dtype], torch.Tensor] = {}

    def row(self, hyper: Any) -> int:
        """Return the row of these hyperparameters, possibly of pending steps; a new row if need be."""
        row = self._rows.get(hyper)
        if row is None:
            row = self._rows[hyper] = len(self._rows)
            self._tables.clear()
        return row

    def table(self, fmt: UpdateFormat) -> torch.Tensor:
        """Return all rows so far, `[num_rows, num_scalars]`, as updates of a format read them."""
        key = fmt.scalars, fmt.wide_dtype
        if key not in self._tables:
            self._tables[key] = decided(list(self._rows), fmt.scalar_table, lambda table: upload(table, self._device))
        return self._tables[key]


MAX_NUM_ELEMENTS = 1 << 23
MAX_NUM_TENSORS = 1 << 11
"""Limits of one launch: its tables are then a quarter of what is kept (`TABLE_NBYTES`)."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors that one launch updates.

    Attributes:
        addresses: int64 `[num_tensors, num_kinds]`, see `chunkc.kernels.pointer_offsets.pointer_offsets_of`.
    """

    fmt: UpdateFormat
    tensors: Sequence[ResidentTensor]
    addresses: np.ndarray

    @property
    def written(self) -> list[torch.Tensor]:
        """The parameters and states of all tensors."""
        return [written for tensor in self.tensors for written in (tensor.parameter, *tensor.states.values())]


class SentPointerOffsets:
    """Pointer offsets on a device; those used last are kept, `POINTER_OFFSETS_NBYTES` of them.

    Gradients may lie elsewhere in each step; the offsets on the device are then rewritten, in the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: Recent[tuple, Sent] = Recent(POINTER_OFFSETS_NBYTES, lambda sent: sent.on_device.nbytes)

    def of(self, batch: Batch, sizes: tuple, seeds: Sequence[RoundingSeed] = ()) -> torch.Tensor:
        """Return the present offsets of a batch.

        Args:
            sizes: distinguishes the batch from others of its format.
            seeds: see `chunkc.kernels.pointer_offsets.pointer_offsets_of`.
        """
        key, now = (batch.fmt, *sizes), pointer_offsets_of(batch.addresses, batch.fmt, seeds)
        sent = self._sent.find(key) or self._sent.keep(key, Sent(now, upload(now, self._device)))
        sent.follow(now)
        return sent.on_device


class Table(Protocol):
    """Tables of work, of one tile or of several."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]: ...

    def sent(self, send: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Make the same tables of tensors that `send` has copied."""


AnyTable = TypeVar("AnyTable", bound=Table)


class DeviceUpdater(Updater, Generic[AnyTable]):
    """Updates by launches on a device: any number of tiles and tensors in a step, in the current stream's order.

    Attributes:
        tables: of work on the device, by their spans, or by the tensors of a launch.
        order: the order of all launches, which share tables, pointer offsets and scalars.
        sent_pointer_offsets: those of the tensors of a launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: Recent[tuple, AnyTable] = Recent(TABLE_NBYTES, lambda table: sum(t.nbytes for t in table.tensors))
        self.order = LaunchOrder(device)
        self.sent_pointer_offsets = SentPointerOffsets(device)

    def kept(self, key: tuple, make: Callable[[], AnyTable]) -> AnyTable:
        """Return a table on the device, made on the first call."""
        table = self.tables.find(key)
        if table is None:
            table = self.tables.keep(key, make().sent(lambda tensor: upload(tensor, self.device)))
        for tensor in table.tensors:
            self.order.reads(tensor)
        return table


def divided(
    tensors: Iterable[ResidentTensor], format_of: Callable[[ResidentTensor], UpdateFormat | None]
) -> tuple[list[Batch], list[ResidentTensor]]:
    """Divide tensors into launches of many, and those that are updated one by one.

    Args:
        format_of: returns the format in which a launch of many may update a tensor; None where none may.
    """
    batched: list[tuple[ResidentTensor, UpdateFormat]] = []
    single: list[ResidentTensor] = []
    for tensor in tensors:
        fmt = format_of(tensor) if can_be_batched(tensor) else None
        if fmt is None or fmt.by_reference:
            single.append(tensor)
        else:
            batched.append((tensor, fmt))
    return batches(batched), single


def can_be_batched(tensor: ResidentTensor) -> bool:
    """Whether a launch can update a parameter with others: its data have one dense layout, and are not too large."""
    parameter, gradient = tensor.parameter, tensor.parameter.grad
    assert gradient is not None
    if not 0 < parameter.numel() <= MAX_NUM_ELEMENTS or gradient.is_neg() or not is_dense(parameter):
        return False
    if parameter.is_complex():
        return False
    return gradient.stride() == parameter.stride()


def batches(tensors: Iterable[tuple[ResidentTensor, UpdateFormat]]) -> list[Batch]:
    """Divide tensors into few launches: those of one format, with addresses that are aligned alike, share launches.

    Parameters that share memory are updated one after the other, as in `torch.optim`.
    """
    alike: dict[tuple, list[tuple[ResidentTensor, list[int]]]] = {}
    for tensor, fmt in tensors:
        addresses = _addresses(tensor, fmt)
        remainders = tuple(address % unit for address, unit in zip(addresses, alignment_of(fmt).tolist()))
        alike.setdefault((fmt, remainders), []).append((tensor, addresses))
    launches: list[Batch] = []
    for (fmt, _), members in alike.items():
        for run in _runs(members):
            batch = Batch(fmt, [tensor for tensor, _ in run], np.array([addresses for _, addresses in run]))
            launches += [batch] if _share_no_memory(batch) else _one_by_one(batch)
    return launches


def _addresses(tensor: ResidentTensor, fmt: UpdateFormat) -> list[int]:
    """Return a tensor's addresses in bytes, by `kinds_of` the format; 0 for kinds that it lacks."""
    buffers = {PARAM: tensor.parameter, GRAD: tensor.parameter.grad, **tensor.states}
    buffers[MASTER] = buffers.get(MASTER, buffers.get(MASTER_LOW))
    return [0 if (buffer := buffers.get(kind)) is None else buffer.data_ptr() for kind in kinds_of(fmt)]


def _runs(members: Sequence[tuple[ResidentTensor, list[int]]]) -> Iterable[list[tuple[ResidentTensor, list[int]]]]:
    """Yield runs of tensors that keep to the limits of a launch."""
    run: list[tuple[ResidentTensor, list[int]]] = []
    num_elements = 0
    for member in members:
        numel = member[0].parameter.numel()
        if run and (num_elements + numel > MAX_NUM_ELEMENTS or len(run) == MAX_NUM_TENSORS):
            yield run
            run, num_elements = [], 0
        run.append(member)
        num_elements += numel
    yield run


def _share_no_memory(batch: Batch) -> bool:
    """Whether no two of the parameters share memory."""
    begins = batch.addresses[:, 0]
    order = np.argsort(begins)
    ends = begins + np.array([tensor.parameter.nbytes for tensor in batch.tensors])
    return bool((ends[order][:-1] <= begins[order][1:]).all())


def _one_by_one(batch: Batch) -> list[Batch]:
    return [
        Batch(batch.fmt, [tensor], batch.addresses[index : index + 1]) for index, tensor in enumerate(batch.tensors)
    ]
