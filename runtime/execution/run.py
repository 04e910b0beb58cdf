"""State and measurements of one execution of a phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from chunkc.ir.plan import Tile
from chunkc.runtime.execution.saved import SavedValues
from chunkc.runtime.store.store import ChunkStore

Registers = list[Any]
"""Values of a phase by register; None where there is none yet, or no more."""


@dataclass
class Measurement:
    """Measured bytes per moment, in order, and seconds of arithmetic, or of enqueuing it where the host runs ahead.

    Attributes:
        peaks: each moment's name and largest reading.
        between_nbytes: the largest reading between moments: while chunks move and gradients are sunk.
        with_home_nbytes: the largest sum of a reading and the home bytes in use at that time.
        host_s: seconds that the host took for `num_instructions` beyond arithmetic, updates and waits for copies.
        unplanned_nbytes: bytes in use as the run began that no plan counts: tensors of the program's own. Every reading
            includes them.
        spans_s: begin and end of each moment, by `time.perf_counter`.
    """

    peaks: list[tuple[str, int | None]] = field(default_factory=list)
    between_nbytes: int = 0
    with_home_nbytes: int = 0
    compute_s: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    num_instructions: int = 0
    unplanned_nbytes: int = 0
    spans_s: list[tuple[float, float]] = field(default_factory=list)
    _began_s: float = 0.0

    @classmethod
    def beginning(cls, store: ChunkStore, planned_nbytes: int) -> Measurement:
        """Start measuring a run that begins now.

        Args:
            planned_nbytes: bytes on the compute tier that the run's plan counts now, without slots.
        """
        store.tier.lap_peak_nbytes()
        present_nbytes = store.tier.lap_peak_nbytes()  # the largest since the line above: the bytes in use now
        counted_nbytes = planned_nbytes + store.slots.nbytes
        return cls(unplanned_nbytes=0 if present_nbytes is None else max(0, present_nbytes - counted_nbytes))

    @property
    def peak_nbytes(self) -> int | None:
        """The largest of all readings; None where nothing meters the tier."""
        readings = [nbytes for _, nbytes in self.peaks if nbytes is not None]
        return max(self.between_nbytes, *readings) if readings else None

    def begin(self, store: ChunkStore) -> None:
        """Begin a moment: the reading so far belongs to the time before it."""
        nbytes = self._read(store)
        if nbytes is not None and nbytes > self.between_nbytes:
            self.between_nbytes = nbytes
        self._began_s = time.perf_counter()

    def end(self, name: str, store: ChunkStore) -> None:
        """End a moment, and note its time and its reading."""
        self.spans_s.append((self._began_s, time.perf_counter()))
        self.peaks.append((name, self._read(store)))

    def _read(self, store: ChunkStore) -> int | None:
        """Read the largest bytes of the compute tier since the last call."""
        nbytes = store.tier.lap_peak_nbytes()
        if nbytes is not None:
            self.with_home_nbytes = max(self.with_home_nbytes, nbytes + store.arena.used_nbytes)
        return nbytes


@dataclass
class Run:
    """Context of one execution, besides its registers.

    Attributes:
        update: the optimizer's update of a tile in slots.
        gradients_complete: called with each group, once its gradients are complete.
    """

    store: ChunkStore
    measurement: Measurement
    update: Callable[[Tile], None] | None = None
    gradients_complete: Callable[[int], None] | None = None
    saved: SavedValues | None = None


class Instruction(Protocol):
    """Step of a lowered phase."""

    def __call__(self, registers: Registers, run: Run) -> None: ...
