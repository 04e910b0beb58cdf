"""What the optimizer's `update_on` and `overlap` mean for a step that is only explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chunkc.adam_groups import CPU, DEVICE, divided
from chunkc.ir.chunks import ChunkGroup, ChunkLayout
from chunkc.ir.hardware import Hardware
from chunkc.ir.simulate import HomeUpdates, update_s_per_element
from chunkc.overlap import NONE, Overlap
from chunkc.passes.update_placement import cpu_update_s


@dataclass(frozen=True)
class Updates:
    """How the optimizer will be made: its arguments of these names.

    Raises:
        OptionsError: there is no such value, or they contradict each other.
    """

    update_on: str = DEVICE
    overlap: str = NONE

    def __post_init__(self) -> None:
        Overlap(self.overlap, self.update_on)

    def at_home(self, groups: list[ChunkGroup], home: str, hardware: Hardware) -> frozenset[int]:
        """Which of the groups the CPU updates at home.

        Raises:
            OptionsError: all should be, but home is a disk.
        """
        return divided(groups, self.update_on, home=home, on_cuda=hardware.kind == "cuda", hardware=hardware)

    def simulated(self, at_home: frozenset[int], layout: ChunkLayout, hardware: Hardware) -> HomeUpdates:
        """Those updates, for the simulator. Cores that compute have no time for an update meanwhile."""
        seconds = {}
        for index in sorted(at_home):
            group = layout.groups[index]
            known = cpu_update_s([group], hardware)
            seconds[index] = group.numel * update_s_per_element(hardware) if known is None else known
        beside = Overlap(self.overlap, self.update_on) if hardware.kind == "cuda" else Overlap(NONE, CPU)
        return HomeUpdates(seconds, beside.beside_forward, beside.beside_backward)

    def notes(self, at_home: frozenset[int], layout: ChunkLayout, hardware: Hardware) -> Iterator[str]:
        """What was assumed."""
        if at_home:
            yield f"the CPU updates {len(at_home)} of {len(layout.groups)} chunks at home"
        if at_home and self.overlap != NONE and hardware.kind != "cuda":
            yield f'overlap="{self.overlap}" hides nothing here: the cores that update are those that compute'
