"""What never leaves the compute tier, added up from the layout for the verifier: it takes no sum of the planner's.

And what waits there: gradients of groups that stay and are updated by the backward that makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from chunkc.ir.layout import STEP_NBYTES, ChunkGroup, ChunkLayout, ParamSpec
from chunkc.ir.states import num_entries


def resident_data_nbytes(layout: ChunkLayout, resident: Collection[int]) -> int:
    """The overhead, all step counters, small parameters and residents, and what every rank has whole, each tensor as
    the allocator gives it."""
    total_nbytes, transient = layout.overhead_nbytes, _transient(layout)
    for spec, stays in _specs(layout, resident):
        total_nbytes += STEP_NBYTES if spec.trainable else 0
        if stays:
            dtypes = spec.states.dtypes(spec.dtype) if spec.trainable else {}
            keeps_gradient = spec.trainable and spec.name not in transient
            sizes = [spec.numel * spec.dtype.itemsize] * (2 if keeps_gradient else 1)
            sizes += [num_entries(kind, spec.numel) * dtype.itemsize for kind, dtype in dtypes.items()]
            total_nbytes += sum(-(-nbytes // spec.granule_nbytes) * spec.granule_nbytes for nbytes in sizes)
    return total_nbytes + sum(map(_whole_nbytes, layout.groups))


class ResidentGradients:
    """Gradients of residents that are spent: each is there from the call that makes it to its group's update.

    Attributes:
        nbytes: of those that are there.
        left: the parameters that they are of.
    """

    def __init__(self, layout: ChunkLayout, resident: Collection[int]) -> None:
        self._groups = {i: layout.groups[i] for i in layout.transient if i in resident}
        self._specs = {s.spec.name: s.spec for group in self._groups.values() for s in group.slices}
        self.nbytes = 0
        self.left: set[str] = set()

    def made(self, name: str) -> bool:
        """A call has yielded a parameter's gradient; whether it is one of these."""
        if name not in self._specs:
            return False
        self._count(name, 1)
        self.left.add(name)
        return True

    def consumed(self, group: int) -> bool:
        """A group is updated; whether it is one of these."""
        if group not in self._groups:
            return False
        for where in self._groups[group].slices:
            if where.spec.name in self.left:
                self.left.remove(where.spec.name)
                self._count(where.spec.name, -1)
        return True

    def _count(self, name: str, times: int) -> None:
        spec = self._specs[name]
        nbytes = spec.numel * spec.dtype.itemsize
        self.nbytes += times * -(-nbytes // spec.granule_nbytes) * spec.granule_nbytes


def _transient(layout: ChunkLayout) -> frozenset[str]:
    return frozenset(s.spec.name for index in layout.transient for s in layout.groups[index].slices)


def _whole_nbytes(group: ChunkGroup) -> int:
    """Of a group in stage 2 of ZeRO, or that was chosen for it, all ranks' parameters stay, with the room where
    messages are put together; in stage 1 the gradients of trained ones too."""
    of_all = {s.spec.shards.zero_stage for s in group.slices if s.spec.shards is not None}
    stage = next(iter(of_all)) if of_all else 3
    if stage is None:
        stage = 2 if group.is_replicated else 3
    parameters, gradients = group.gathered_numel + group.packing_numel, group.gathered_numel
    numels = {2: [parameters], 1: [parameters, gradients] if group.trainable else [parameters]}.get(stage, [])
    granule_nbytes = group.slices[0].spec.granule_nbytes if group.slices else 1
    return sum(-(-numel * group.dtype.itemsize // granule_nbytes) * granule_nbytes for numel in numels)


def _specs(layout: ChunkLayout, resident: Collection[int]) -> Iterator[tuple[ParamSpec, bool]]:
    """Every parameter, and whether it stays on the compute tier."""
    yield from ((spec, True) for spec in layout.small)
    for group in layout.groups:
        yield from ((s.spec, group.index in resident) for s in group.slices)
