"""Adam's updates on a GPU: tiles and tensors by Triton, with tables that are made rarely and small.

The table of work says who updates what; it depends on a tile's runs alone and stays on the device. The scalars change
with every step; they are a few hundred bytes, copied from pinned memory behind the host's back. Nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from chunkc.kernels.adam_triton import WorkTable, adam_update, work_table
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Run
from chunkc.kernels.hyper import AdamHyper, scalar_table
from chunkc.optim.adam_rule import AdamRule, Place, Runs, clipped
from chunkc.optim.doubts import InDoubt, decided
from chunkc.recent import Recent

TABLE_NBYTES = 2 << 20
"""Tables of work that are kept on a device, in bytes: those used last (`machines.devices.TABLES_NBYTES` has room)."""

PIECE_NUM_ELEMENTS = 1 << 24
"""Elements that are updated with one table: it is then a fifth of `TABLE_NBYTES` whatever a tensor's size."""


def computes_by_triton(device: torch.device) -> bool:
    """Whether updates on a device are Triton's; on the CPU they are `chunkc.kernels.adam_cpu`'s."""
    return device.type == "cuda"


class StepScalars:
    """The hyper-parameters of one step of an optimizer, as rows of one table on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[AdamHyper | InDoubt, int] = {}
        self._table: torch.Tensor | None = None

    def row(self, hyper: AdamHyper | InDoubt) -> int:
        """The row of these hyper-parameters, a new one if need be."""
        found = self._rows.get(hyper)
        if found is None:
            found = self._rows[hyper] = len(self._rows)
            self._table = None
        return found

    def table(self) -> torch.Tensor:
        """All rows so far, `[num_rows, 9]` fp32."""
        if self._table is None:
            self._table = decided(list(self._rows), scalar_table, lambda table: upload(table, self._device))
        return self._table


class DeviceAdam:
    """One optimizer's updates on one device.

    Each step begins with `begin_step`; then any number of tiles and tensors, in the current stream's order.

    Attributes:
        tables: of work on the device, by their runs; the allocator uses the memory of those that went again in the
            stream's order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: Recent[tuple[Run, ...], WorkTable] = Recent(TABLE_NBYTES, lambda table: table.rows.nbytes)
        self._scalars = StepScalars(device)

    def begin_step(self) -> None:
        """Forget the former step's hyper-parameters."""
        self._scalars = StepScalars(self.device)

    def declare(self, hypers: Sequence[AdamHyper | InDoubt]) -> None:
        """Make room for all of a step's hyper-parameters at once, so that one table serves it."""
        for hyper in hypers:
            self._scalars.row(hyper)

    def table_of(self, runs: Sequence[Run], fmt: AdamFormat) -> WorkTable:
        """The table of work for these runs, made on the first call."""
        key = tuple(runs)
        found = self.tables.find(key)
        if found is None:
            made = work_table(key, fmt)
            found = self.tables.keep(key, replace(made, rows=upload(made.rows, self.device)))
        return found

    def update(self, rule: AdamRule, slots: AdamSlots, runs: Runs, scale: GradScale, place: Place) -> None:
        """Update runs of elements of flat tensors, in one launch; in as many as steps if rounding depends on them.

        What has more elements than `PIECE_NUM_ELEMENTS`, such as a large parameter that stays, goes piece by piece.
        """
        numel = slots.param.numel()
        if numel <= PIECE_NUM_ELEMENTS:
            self._update(rule, slots, runs, scale, place)
            return
        for begin in range(0, numel, PIECE_NUM_ELEMENTS):
            end = min(begin + PIECE_NUM_ELEMENTS, numel)
            at = Place(place.chunk, place.first_element + begin)
            self._update(rule, slots.part(begin, end), clipped(runs, begin, end), scale, at)

    def _update(self, rule: AdamRule, slots: AdamSlots, runs: Runs, scale: GradScale, place: Place) -> None:
        fmt = rule.format(slots.param.dtype, slots.grad.dtype)
        for part, key in rule.launches(fmt, runs, place):
            rows = [Run(begin, end, self._scalars.row(hyper)) for begin, end, hyper in part]
            first_element = place.first_element if key is not None else 0
            if rows:
                work, table = self.table_of(rows, fmt), self._scalars.table()
                adam_update(fmt, slots, work, table, scale=scale, key=key, first_element=first_element)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device, by a copy that nobody waits for: torch keeps pinned memory until it is done."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
