"""Add up resident bytes from the layout for the verifier, without any of the planner's sums.

Also counts gradients of resident transient groups while they wait for the update in the backward that computes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from chunkc.ir.layout import STEP_NBYTES, ChunkGroup, ChunkLayout, ParamSpec
from chunkc.ir.states import num_entries


def resident_data_nbytes(layout: ChunkLayout, resident: Collection[int]) -> int:
    """Sum up the data that a plan never moves, each tensor rounded as the allocator does.

    It is the overhead, all step counters, small parameters, residents and replicated data.
    """
    total_nbytes = layout.overhead_nbytes
    transient = {s.spec.name for index in layout.transient for s in layout.groups[index].slices}
    for spec, is_resident in _specs(layout, resident):
        total_nbytes += STEP_NBYTES if spec.trainable else 0
        if is_resident:
            dtypes = spec.states.dtypes(spec.dtype) if spec.trainable else {}
            keeps_gradient = spec.trainable and spec.name not in transient
            sizes = [spec.numel * spec.dtype.itemsize] * (2 if keeps_gradient else 1)
            sizes += [num_entries(kind, spec.numel) * dtype.itemsize for kind, dtype in dtypes.items()]
            total_nbytes += sum(-(-nbytes // spec.granule_nbytes) * spec.granule_nbytes for nbytes in sizes)
    return total_nbytes + sum(map(_whole_nbytes, layout.groups))


class ResidentGradients:
    """Gradients of resident transient groups: each exists from the call that computes it to its group's update.

    Attributes:
        nbytes: of those that exist.
        left: the parameters of these.
    """

    def __init__(self, layout: ChunkLayout, resident: Collection[int]) -> None:
        self._groups = {i: layout.groups[i] for i in layout.transient if i in resident}
        self._specs = {s.spec.name: s.spec for group in self._groups.values() for s in group.slices}
        self.nbytes = 0
        self.left: set[str] = set()

    def made(self, name: str) -> bool:
        """Record that a call has yielded a parameter's gradient; return whether it is of a transient group."""
        if name not in self._specs:
            return False
        self._count(name, 1)
        self.left.add(name)
        return True

    def consumed(self, group: int) -> bool:
        """Record that a group is updated; return whether it is transient."""
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


def _whole_nbytes(group: ChunkGroup) -> int:
    """Return a group's replicated bytes.

    In ZeRO stage 2, forced or chosen, these are the parameters of all ranks, with the room where messages are packed;
    in stage 1, if the group is trained, its gradients too.
    """
    stages = {s.spec.shards.zero_stage for s in group.slices if s.spec.shards is not None}
    stage = next(iter(stages)) if stages else 3
    if stage is None:
        stage = 2 if group.is_replicated else 3
    parameters, gradients = group.gathered_numel + group.packing_numel, group.gathered_numel
    numels = {2: [parameters], 1: [parameters, gradients] if group.trainable else [parameters]}.get(stage, [])
    granule_nbytes = group.slices[0].spec.granule_nbytes if group.slices else 1
    return sum(-(-numel * group.dtype.itemsize // granule_nbytes) * granule_nbytes for numel in numels)


def _specs(layout: ChunkLayout, resident: Collection[int]) -> Iterator[tuple[ParamSpec, bool]]:
    """Yield every parameter, and whether it is resident."""
    yield from ((spec, True) for spec in layout.small)
    for group in layout.groups:
        yield from ((s.spec, group.index in resident) for s in group.slices)
