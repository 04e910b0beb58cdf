"""Describe chunks: flat buffers of one kind of model data, the unit of movement (PatrickStar, arXiv:2108.05818)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import torch

from chunkc.ir.links import FROM_DISK, GATHER, SCATTER, TO_DEVICE, TO_DISK, TO_HOME
from chunkc.ir.shards import Shards, parcels
from chunkc.ir.states import DEFAULT_STATES, StateFormat, num_entries

STEP_NBYTES = 4
"""Size of an optimizer's step counter: one fp32 scalar per trainable parameter, always on the compute tier."""

ALIGNMENT_NBYTES = 256
"""Alignment of tensors inside a chunk: enough for vector loads on CPUs and CUDA devices."""

PARAM, GRAD = "param", "grad"

CASTS: Mapping[str, torch.dtype] = {"param_bf16": torch.bfloat16, "param_fp16": torch.float16}
"""Kinds of chunks that hold parameters in 16 bits: cast on the way from the parameters' home, or from resident
parameters; they have no home of their own."""

DiskHolds = Literal["nothing", "states", "everything"]


@dataclass(frozen=True)
class Chunk:
    """Identity of a chunk, or of a part of one. Plans and graphs print it as `param:3` or `param:3[0:65536]`.

    Attributes:
        kind: `PARAM`, `GRAD`, one of `CASTS`, or a kind of optimizer state.
        group: index of the chunk's group in its layout.
        part: a range of elements; None for the whole chunk. Optimizer updates move chunks part by part.
    """

    kind: str
    group: int
    part: tuple[int, int] | None = None
    _hash: int = field(init=False, compare=False)
    """Kept, since it is read ten times as often as chunks are made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kind, self.group, self.part)))

    @property
    def whole(self) -> Chunk:
        """The whole chunk that this is, or is a part of."""
        return self if self.part is None else Chunk(self.kind, self.group)

    def has_own_slot(self, resident: Collection[int]) -> bool:
        """Whether the chunk takes a slot of its own while these groups are resident: casts always do."""
        return self.group not in resident or self.kind in CASTS

    @cached_property
    def _name(self) -> str:
        return f"{self.kind}:{self.group}" + ("" if self.part is None else f"[{self.part[0]}:{self.part[1]}]")

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        """Return the name in quotes: FX prints the arguments of chunk nodes as Python."""
        return repr(self._name)

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: object) -> bool:
        """Compare by name, so that plans do not depend on the order of sets."""
        return self._name < str(other)

    def __reduce__(self) -> tuple[type[Chunk], tuple[str, int, tuple[int, int] | None]]:
        return Chunk, (self.kind, self.group, self.part)  # without the hash, which differs between processes


def is_state(kind: str) -> bool:
    """Whether chunks of a kind hold optimizer states."""
    return kind not in (PARAM, GRAD) and kind not in CASTS


@dataclass(frozen=True)
class ParamSpec:
    """Planner's description of a parameter: its name and its dense layout.

    Attributes:
        shape, stride: of the tensor in this process: of a sharded parameter, this rank's shard.
        shards: its sharding over ranks; None: this process has all of it.
        states: format of the states that its optimizer keeps for it.
        granule_nbytes: allocation unit of the compute tier. Every `nbytes` of the parameter is of the compute tier; at
            home it takes no more than its elements.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    granule_nbytes: int = 1
    states: StateFormat = DEFAULT_STATES
    shards: Shards | None = None

    @property
    def whole_numel(self) -> int:
        """Elements that computation reads: of the shards of all ranks."""
        return self.numel if self.shards is None else self.shards.numel

    @property
    def whole_nbytes(self) -> int:
        """Bytes of these elements, equal on all ranks: layouts are decided by them."""
        return self.whole_numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.rounded(self.home_nbytes)

    @property
    def home_nbytes(self) -> int:
        """Bytes of the elements alone: the parameter's room at home."""
        return self.numel * self.dtype.itemsize

    @property
    def training_nbytes(self) -> int:
        """Bytes of gradient and optimizer states of this parameter.

        Without the step counter, which is on the compute tier wherever the parameter is.
        """
        return self.gradient_nbytes + self.optimizer_nbytes

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradient; 0 for a frozen parameter."""
        return self.nbytes if self.trainable else 0

    @cached_property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer's states without the step counter; 0 for a frozen parameter."""
        dtypes = self.states.dtypes(self.dtype) if self.trainable else {}
        return sum(self.rounded(num_entries(kind, self.numel) * dtype.itemsize) for kind, dtype in dtypes.items())

    def part(self, shards: Shards) -> ParamSpec:
        """Return one rank's shard of a contiguous parameter that this process has all of."""
        begin, end = shards.rows(shards.rank)
        return replace(self, shape=(end - begin, *self.shape[1:]) if self.shape else (), shards=shards)

    def aligned(self, numel: int) -> int:
        """Round a number of elements up to where the next parameter of a chunk may begin."""
        unit = max(ALIGNMENT_NBYTES // self.dtype.itemsize, self.states.alignment)
        return -(-numel // unit) * unit

    def rounded(self, nbytes: int) -> int:
        """Round bytes up to the compute tier's allocation unit."""
        return -(-nbytes // self.granule_nbytes) * self.granule_nbytes


@dataclass(frozen=True)
class TensorSlice:
    """Place of one parameter (and its gradient, and its states) in its group's chunks, in elements.

    `slot_offset`: of a sharded parameter, its place in gathered slots of the group (see `ChunkGroup`).
    """

    spec: ParamSpec
    offset: int
    slot_offset: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class ChunkGroup:
    """Parameters that share chunks: one chunk per kind of data, all laid out alike.

    `numel` is the room of each chunk in elements, gaps for alignment included.

    In a sharded group, chunks at home hold this rank's shards. Computation needs whole parameters and gradients, in
    slots of `gathered_numel` elements and `packing_numel` more, in which the small shards of one message are packed. A
    gradient's slot has another `exchange_numel`: room for the gradients that other ranks computed for this rank's
    shard. Optimizer states, and parts of chunks, are as at home. In ZeRO stages 1 and 2 some of these elements are on
    the compute tier from phase to phase (`replicated_numel`); the rest of a slot comes and goes. The same holds in a
    group that `is_replicated`, if no stage is forced: its parameters, as in stage 2.
    """

    index: int
    dtype: torch.dtype
    trainable: bool
    numel: int
    slices: tuple[TensorSlice, ...]
    states: StateFormat = DEFAULT_STATES
    gathered_numel: int = 0
    exchange_numel: int = 0
    is_replicated: bool = False

    @cached_property
    def is_cut(self) -> bool:
        """Whether the group is sharded over ranks."""
        return any(s.spec.shards is not None for s in self.slices)

    def slot_numel(self, chunk: Chunk) -> int:
        """Return the elements of a chunk's slot, or of a part's, without the replicated ones."""
        if self.is_gathered(chunk):
            exchanged = self.packing_numel + (self.exchange_numel if chunk.kind == GRAD else 0)
            return self.gathered_numel + exchanged - self.replicated_numel(chunk)
        begin, end = chunk.part or (0, self.numel)
        return end - begin

    def slot_nbytes(self, chunk: Chunk) -> int:
        """Return the bytes of a chunk's slot, or of a part's, without replicated data."""
        if chunk.part is None:
            return self._whole_slots_nbytes[chunk.kind]
        begin, end = chunk.part
        return _rounded_nbytes(chunk.kind, end - begin, self._itemsizes[chunk.kind], self._granule_nbytes)

    @cached_property
    def _whole_slots_nbytes(self) -> Mapping[str, int]:
        """Kind -> the bytes of the slot of its whole chunk."""
        sizes, granule_nbytes = self._itemsizes, self._granule_nbytes
        numel = {kind: self.slot_numel(Chunk(kind, self.index)) for kind in sizes}
        return {kind: _rounded_nbytes(kind, numel[kind], size, granule_nbytes) for kind, size in sizes.items()}

    @cached_property
    def _itemsizes(self) -> Mapping[str, int]:
        return {kind: self.kind_dtype(kind).itemsize for kind in (*self.update_kinds, *CASTS)}

    @cached_property
    def _granule_nbytes(self) -> int:
        return self.slices[0].spec.granule_nbytes if self.slices else 1

    @cached_property
    def parcels(self) -> tuple[tuple[TensorSlice, ...], ...]:
        """Parameters of a sharded group, by the messages in which ranks send their shards."""
        by_message = parcels([s.spec.shards for s in self.slices if s.spec.shards is not None], self.dtype.itemsize)
        return tuple(tuple(self.slices[index] for index in parcel) for parcel in by_message)

    @cached_property
    def packing_numel(self) -> int:
        """Elements of the parameters that share a message with others, of all ranks."""
        packed = (where.spec.shards for parcel in self.parcels if len(parcel) > 1 for where in parcel)
        return sum(shards.numel_of_equals for shards in packed if shards is not None)

    def replicated_numel(self, chunk: Chunk) -> int:
        """Return the elements of a chunk's slot that every plan keeps on the compute tier, as they are replicated.

        Those of parameters include the room for packing, which would need a slot of its own otherwise.
        """
        if chunk.part is not None or chunk.kind not in self.replicated_kinds:
            return 0
        return self.gathered_numel + (self.packing_numel if chunk.kind == PARAM else 0)

    @cached_property
    def replicated_kinds(self) -> tuple[str, ...]:
        """Kinds of chunks that every rank keeps whole from phase to phase: in ZeRO stages 1 and 2, and by choice."""
        stages = [s.spec.shards.zero_stage for s in self.slices if s.spec.shards is not None]
        if not stages or stages[0] == 3 or (stages[0] is None and not self.is_replicated):
            return ()
        return (PARAM, GRAD) if stages[0] == 1 and self.trainable else (PARAM,)

    @property
    def may_replicate(self) -> bool:
        """Whether a plan may choose to replicate its parameters."""
        return any(s.spec.shards is not None and s.spec.shards.zero_stage is None for s in self.slices)

    @cached_property
    def largest_numel(self) -> int:
        """`numel` of the rank with the largest shards: equal on all ranks."""
        if not self.is_cut:
            return self.numel
        return sum(s.spec.aligned(s.spec.shards.largest_numel) for s in self.slices if s.spec.shards is not None)

    @property
    def replicated_nbytes(self) -> int:
        """Bytes of all replicated data, each kind rounded to the compute tier's allocation unit."""
        chunks = [Chunk(kind, self.index) for kind in self.replicated_kinds]
        return sum(self.slices[0].spec.rounded(self.replicated_numel(chunk) * self.dtype.itemsize) for chunk in chunks)

    def is_gathered(self, chunk: Chunk) -> bool:
        """Whether the chunk's slot holds the shards of all ranks."""
        return self.is_cut and chunk.part is None and not is_state(chunk.kind)

    def kind_dtype(self, kind: str) -> torch.dtype:
        """Return the dtype of a kind: gradients have the parameters' dtype, states that of their format."""
        if kind in CASTS:
            return CASTS[kind]
        return self.states.dtypes(self.dtype)[kind] if is_state(kind) else self.dtype

    def nbytes(self, kind: str) -> int:
        return num_entries(kind, self.numel) * self.kind_dtype(kind).itemsize

    def entries(self, kind: str, where: TensorSlice) -> slice:
        """Return the range of a tensor's entries in a chunk of that kind."""
        begin = num_entries(kind, where.offset)
        return slice(begin, begin + num_entries(kind, where.spec.numel))

    @property
    def title(self) -> str:
        """Readable name of the group: `h.0.up.weight to h.0.down.weight`."""
        first, last = self.slices[0].spec.name, self.slices[-1].spec.name
        return first if len(self.slices) == 1 else f"{first} to {last}"

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of chunks of the optimizer's states."""
        return tuple(self.states.dtypes(self.dtype))

    @property
    def update_kinds(self) -> tuple[str, ...]:
        """Kinds of chunks that an update of the group needs at the same time."""
        return (PARAM, GRAD, *self.state_kinds)

    @property
    def update_nbytes_per_element(self) -> int:
        """Bytes of all kinds per element, rounded up."""
        return math.ceil(sum(self.nbytes(kind) for kind in self.update_kinds) / self.numel) if self.numel else 0

    @cached_property
    def resident_nbytes(self) -> int:
        """Bytes of the group if resident: parameters, gradients, states."""
        return sum(s.spec.nbytes + s.spec.training_nbytes for s in self.slices)


@lru_cache
def _rounded_nbytes(kind: str, numel: int, itemsize: int, granule_nbytes: int) -> int:
    """Return the bytes of a kind's entries for so many elements, rounded up to the allocation unit."""
    return -(-num_entries(kind, numel) * itemsize // granule_nbytes) * granule_nbytes


@dataclass(frozen=True)
class ChunkLayout:
    """Assignment of parameters to groups, and the parameters that are too small to move.

    Attributes:
        overhead_nbytes: other bytes on the compute tier under every plan: workspaces of libraries.
        disk_holds: the chunks with a home on a disk; the home of the other chunks is RAM.
        transient: groups that keep no gradients while resident: the backward that computes them also consumes them.
        version: increases with each layout of one model. Layouts of different models do not compare by it.
    """

    chunk_nbytes: int
    groups: tuple[ChunkGroup, ...]
    small: tuple[ParamSpec, ...]
    overhead_nbytes: int = 0
    disk_holds: DiskHolds = "nothing"
    transient: frozenset[int] = frozenset()
    version: int = field(default=0, compare=False)

    @property
    def trainable_groups(self) -> list[ChunkGroup]:
        return [group for group in self.groups if group.trainable]

    def group_of(self) -> dict[str, int]:
        return {s.spec.name: group.index for group in self.groups for s in group.slices}

    def groups_of(self, parameters: Iterable[str]) -> frozenset[int]:
        """Return the groups of these parameters; small parameters have none."""
        group_of = self.group_of()
        return frozenset(group_of[name] for name in parameters if name in group_of)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First element of every parameter in its group; small parameters have none."""
        return {s.spec.name: s.offset for group in self.groups for s in group.slices}

    @cached_property
    def small_nbytes(self) -> int:
        """Bytes that never move: small parameters with gradients and states, and every parameter's step counter."""
        counters = STEP_NBYTES * sum(spec.trainable for spec in self.specs().values())
        return counters + sum(spec.nbytes + spec.training_nbytes for spec in self.small)

    def specs(self) -> dict[str, ParamSpec]:
        """Return every parameter by name."""
        return {spec.name: spec for spec in (*self.small, *(s.spec for group in self.groups for s in group.slices))}

    def is_on_disk(self, kind: str) -> bool:
        """Whether chunks of this kind have their home on a disk."""
        return self.disk_holds == "everything" or (self.disk_holds == "states" and is_state(kind))

    def is_in_ram(self, kind: str) -> bool:
        """Whether chunks of this kind have their home in RAM."""
        return not self.is_on_disk(kind)

    def links_of(self, kind: str) -> tuple[str, str]:
        """Return the links by which chunks of this kind reach the compute tier, and their home."""
        return (FROM_DISK, TO_DISK) if self.is_on_disk(kind) else (TO_DEVICE, TO_HOME)

    def links_of_chunk(self, chunk: Chunk) -> tuple[str, str]:
        """Return the links by which a chunk, or a part of one, reaches the compute tier, and its home."""
        return (GATHER, SCATTER) if self.groups[chunk.group].is_gathered(chunk) else self.links_of(chunk.kind)

    def read_for_cast_nbytes(self, chunk: Chunk, resident: Collection[int]) -> int:
        """Return the bytes that a cast of a chunk reads over the link.

        The cast of parameters on a disk is made behind the link, so the parameters themselves cross it. A resident
        parameter crosses none.
        """
        if chunk.group in resident:
            return 0
        return self.groups[chunk.group].nbytes(PARAM if self.is_on_disk(PARAM) else chunk.kind)

    @cached_property
    def cut(self) -> frozenset[int]:
        """Sharded groups: while gathered, they are on the compute tier for as long as they have a slot."""
        return frozenset(group.index for group in self.groups if group.is_cut)

    @cached_property
    def replicated_by_choice(self) -> frozenset[int]:
        """Groups that are replicated by the plan's choice: every rank keeps their parameters whole."""
        return frozenset(group.index for group in self.groups if group.is_replicated)

    @cached_property
    def replicated(self) -> frozenset[int]:
        """Groups of which every rank keeps some data whole, by choice or by force."""
        return frozenset(group.index for group in self.groups if group.replicated_kinds)

    def with_replicated(self, groups: Collection[int]) -> ChunkLayout:
        """Return the layout that replicates exactly these groups by choice."""
        if self.replicated_by_choice == frozenset(groups):
            return self
        return replace(self, groups=tuple(replace(group, is_replicated=group.index in groups) for group in self.groups))

    def chunk_nbytes_of(self, chunk: Chunk) -> int:
        """Return the bytes of the slot of a chunk, or of a part of one, without replicated data."""
        return self.groups[chunk.group].slot_nbytes(chunk)
