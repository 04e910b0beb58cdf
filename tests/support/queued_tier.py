"""`CudaTier` on a fake GPU with kernels in Python: the host runs ahead of computation, slots are reused at once.

Whatever an instruction computes is a job of the compute stream's worker thread. A slot that the store has given back
is handed out again immediately, while earlier computation may still use it: so torch's caching allocator does. Each
edge that orders bytes can be left out, to show that something breaks then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fake_gpu import FakeGpu

from chunkc.ir.links import INWARD
from chunkc.runtime.device.cuda import CudaLink, CudaMark, CudaTier
from chunkc.runtime.device.tier import Links
from chunkc.runtime.store.store import ChunkStore

EDGES = (
    "prefetch after mark",
    "write_back after mark",
    "hold for prefetch",
    "hold for write_back",
    "launch before hold",
)
"""What may be left out. The last is an edge only where a thread launches copies: behind a home that blocks."""


class _Mark(CudaMark):
    """A copy's end, with the direction it went."""

    way = ""


class _Link(CudaLink):
    """A link that may leave out the order of its copies after other work."""

    def __init__(self, tier: QueuedTier, name: str, way: str) -> None:
        super().__init__(tier.gpu, name)
        self.tier, self.way = tier, way

    def submit(self, job: Callable[[], None], *, after: Sequence[CudaMark] = ()) -> CudaMark:
        mark = super().submit(job, after=() if f"{self.way} after mark" in self.tier.left_out else after)
        known = _Mark(mark.end, mark.begin)
        known.launched = None if "launch before hold" in self.tier.left_out else mark.launched
        known.way = self.way
        return known


class QueuedTier(CudaTier):
    """See the module.

    Attributes:
        left_out: edges that are missing.
        store: owner of the slots; to be set before the first prefetch.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu, meter=False)
        self.gpu = gpu
        self.left_out: frozenset[str] = frozenset()
        self.store: ChunkStore | None = None
        self.num_reused = 0
        self._blocks: list[torch.Tensor] = []
        self.links = Links(lambda name: _Link(self, name, "prefetch" if name in INWARD else "write_back"))

    def enqueue(self, job: Callable[..., None], *args: Any) -> None:  # type: ignore[override]
        if threading.current_thread().name == "chunkc-compute":
            job(*args)
        else:
            self.gpu.compute.jobs.submit(lambda: _without_gradients(job, *args))

    def hold_for(self, mark: CudaMark) -> None:
        if f"hold for {getattr(mark, 'way', '')}" not in self.left_out:
            super().hold_for(mark)

    def materialise(self) -> None:
        """Values are Python objects that the compute thread makes: wait for it, and for nothing else."""
        self.gpu.compute.synchronize()

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert self.store is not None
        held = [
            slot.buffer for slot in self.store.slots._slots.values() if slot.buffer is not None
        ] + self.store.slots._spare._buffers
        in_use = {buffer.data_ptr() for buffer in held}
        for block in self._blocks:
            if block.nbytes == numel * dtype.itemsize and block.data_ptr() not in in_use:
                self.num_reused += 1
                return block.view(dtype)
        block = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        self._blocks.append(block)
        return block.view(dtype)

    def settle(self) -> None:
        """Block until nothing is under way, whatever was left out."""
        for _ in range(2):
            self.drain()
            for stream in self.gpu.streams:
                stream.synchronize()


def _without_gradients(job: Callable[..., None], *args: Any) -> None:
    with torch.no_grad():  # the executor's is the host thread's
        job(*args)
