"""Chunks: flat buffers of one kind of model data, the unit of movement (PatrickStar, arXiv:2108.05818)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from chunkc.ir.links import FROM_DISK, GATHER, SCATTER, TO_DEVICE, TO_DISK, TO_HOME
from chunkc.ir.shards import Shards, parcels
from chunkc.ir.states import DEFAULT_STATES, ELEMENTS_PER_SCALE, INT8, StateFormat, num_entries

STEP_NBYTES = 4
"""An optimizer's step counter: one fp32 scalar per trainable parameter, always on the compute tier."""

ALIGNMENT_NBYTES = 256
"""Tensors start at multiples of this inside a chunk: enough for vector loads on CPUs and CUDA devices."""

PARAM, GRAD = "param", "grad"

CASTS: Mapping[str, torch.dtype] = {"param_bf16": torch.bfloat16, "param_fp16": torch.float16}
"""Kinds of chunks that are parameters in 16 bits: cast on the way from the parameters' home, or from where these stay,
and without a home of their own."""

DiskHolds = Literal["nothing", "states", "everything"]


@dataclass(frozen=True)
class Chunk:
    """The identity of a chunk, or of a part of one. Plans and graphs print it as `param:3` or `param:3[0:65536]`.

    Attributes:
        kind: `PARAM`, `GRAD`, one of `CASTS`, or a kind of optimizer state.
        group: index of the chunk's group in its layout.
        part: a range of elements; None for the whole chunk. Optimizer updates move chunks part by part.
    """

    kind: str
    group: int
    part: tuple[int, int] | None = None
    _hash: int = field(init=False, compare=False)
    """Asked for ten times as often as chunks are made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kind, self.group, self.part)))

    @property
    def whole(self) -> Chunk:
        """The chunk that this is, or is a part of."""
        return self if self.part is None else Chunk(self.kind, self.group)

    def has_own_slot(self, resident: Collection[int]) -> bool:
        """Whether it has a slot of its own while these groups stay on the compute tier: casts always have."""
        return self.group not in resident or self.kind in CASTS

    @cached_property
    def _name(self) -> str:
        return f"{self.kind}:{self.group}" + ("" if self.part is None else f"[{self.part[0]}:{self.part[1]}]")

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        """As text in quotes: FX prints the arguments of chunk nodes as Python."""
        return repr(self._name)

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: object) -> bool:
        """By name, so that plans do not depend on the order of sets."""
        return self._name < str(other)

    def __reduce__(self) -> tuple[type[Chunk], tuple[str, int, tuple[int, int] | None]]:
        return Chunk, (self.kind, self.group, self.part)  # without the hash, which is this process's


def is_state(kind: str) -> bool:
    """Whether chunks of a kind hold optimizer states."""
    return kind not in (PARAM, GRAD) and kind not in CASTS


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the planner sees it: its name and its dense layout.

    Attributes:
        shape, stride: as this process has it. Of a parameter that is cut over ranks that is this rank's part.
        shards: how it is cut over ranks; None: this process has all of it.
        states: in what form its optimizer keeps states for it.
        granule_nbytes: the compute tier's allocator gives tensors multiples of this. Every `nbytes` of the parameter is
            of the compute tier; at home it takes no more than its elements.
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
        """Elements that computation reads: of all ranks' parts."""
        return self.numel if self.shards is None else self.shards.numel

    @property
    def whole_nbytes(self) -> int:
        """Bytes of these elements, which are the same on all ranks: what layouts go by."""
        return self.whole_numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.rounded(self.home_nbytes)

    @property
    def home_nbytes(self) -> int:
        """Bytes of the elements alone: what the parameter takes at home."""
        return self.numel * self.dtype.itemsize

    @property
    def training_nbytes(self) -> int:
        """Bytes of gradient and optimizer states that training this parameter takes.

        The step counter is not among them: it stays on the compute tier wherever the parameter is.
        """
        return self.gradient_nbytes + self.optimizer_nbytes

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradient; 0 for a frozen parameter."""
        return self.nbytes if self.trainable else 0

    @cached_property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer's states but the step counter; 0 for a frozen parameter."""
        dtypes = self.states.dtypes(self.dtype) if self.trainable else {}
        return sum(self.rounded(num_entries(kind, self.numel) * dtype.itemsize) for kind, dtype in dtypes.items())

    def part(self, shards: Shards) -> ParamSpec:
        """Of a contiguous parameter that this process has all of: the part of one rank."""
        begin, end = shards.rows(shards.rank)
        return replace(self, shape=(end - begin, *self.shape[1:]) if self.shape else (), shards=shards)

    def aligned(self, numel: int) -> int:
        """So many elements, rounded up to where the next parameter of a chunk may begin."""
        unit = max(ALIGNMENT_NBYTES // self.dtype.itemsize, self.states.alignment)
        return -(-numel // unit) * unit

    def rounded(self, nbytes: int) -> int:
        """Bytes as the compute tier's allocator gives them."""
        return -(-nbytes // self.granule_nbytes) * self.granule_nbytes


@dataclass(frozen=True)
class TensorSlice:
    """Where one parameter (and its gradient, and its states) lies in its group's chunks, in elements.

    `slot_offset`: of a parameter that is cut over ranks, where it lies whole in slots of the group (see `ChunkGroup`).
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

    Of a group that is cut over ranks, chunks at home hold this rank's parts. Computation needs parameters and gradients
    whole, in slots of `gathered_numel` elements, and `packing_numel` more, where what goes in one message is put
    together. A gradient's slot has another `exchange_numel`: room for what other ranks computed for this rank's part.
    Optimizer states, and parts of chunks, are as at home. In stages 1 and 2 some of these elements stand on the compute
    tier from phase to phase (`replicated_numel`); the rest of a slot comes and goes. So they do in a group that
    `is_replicated`, where no stage is forced: its parameters, as in stage 2.
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
        """Whether it is cut over ranks."""
        return any(s.spec.shards is not None for s in self.slices)

    def slot_numel(self, chunk: Chunk) -> int:
        """Elements of the slot of one of its chunks, or of a part of one, without those that stand."""
        if self.is_gathered(chunk):
            exchanged = self.packing_numel + (self.exchange_numel if chunk.kind == GRAD else 0)
            return self.gathered_numel + exchanged - self.replicated_numel(chunk)
        begin, end = chunk.part or (0, self.numel)
        return end - begin

    @cached_property
    def parcels(self) -> tuple[tuple[TensorSlice, ...], ...]:
        """Of a group that is cut over ranks, its parameters by the messages that ranks send their parts in."""
        found = parcels([s.spec.shards for s in self.slices if s.spec.shards is not None], self.dtype.itemsize)
        return tuple(tuple(self.slices[index] for index in parcel) for parcel in found)

    @cached_property
    def packing_numel(self) -> int:
        """Elements of what does not go in a message of its own, of all ranks."""
        together = (where.spec.shards for parcel in self.parcels if len(parcel) > 1 for where in parcel)
        return sum(shards.numel_of_equals for shards in together if shards is not None)

    def replicated_numel(self, chunk: Chunk) -> int:
        """Elements of the slot of one of its chunks that stay on the compute tier whatever is planned: of whole
        parameters with the room for packing, for which a slot would have to come and go."""
        if chunk.part is not None or chunk.kind not in self.replicated_kinds:
            return 0
        return self.gathered_numel + (self.packing_numel if chunk.kind == PARAM else 0)

    @cached_property
    def replicated_kinds(self) -> tuple[str, ...]:
        """The kinds of chunks of which every rank has all parts from phase to phase: in stages 1 and 2 of ZeRO, and
        where it is chosen."""
        stages = [s.spec.shards.zero_stage for s in self.slices if s.spec.shards is not None]
        if not stages or stages[0] == 3 or (stages[0] is None and not self.is_replicated):
            return ()
        return (PARAM, GRAD) if stages[0] == 1 and self.trainable else (PARAM,)

    @property
    def may_replicate(self) -> bool:
        """Whether it is the plan's choice that its parameters stand whole on every rank."""
        return any(s.spec.shards is not None and s.spec.shards.zero_stage is None for s in self.slices)

    @cached_property
    def largest_numel(self) -> int:
        """`numel` of the rank that has the largest parts: the same on all ranks."""
        if not self.is_cut:
            return self.numel
        return sum(s.spec.aligned(s.spec.shards.largest_numel) for s in self.slices if s.spec.shards is not None)

    @property
    def replicated_nbytes(self) -> int:
        """Bytes of all that stands, each kind as the compute tier's allocator gives it."""
        chunks = [Chunk(kind, self.index) for kind in self.replicated_kinds]
        return sum(self.slices[0].spec.rounded(self.replicated_numel(one) * self.dtype.itemsize) for one in chunks)

    def is_gathered(self, chunk: Chunk) -> bool:
        """Whether the slot of one of its chunks holds all ranks' parts."""
        return self.is_cut and chunk.part is None and not is_state(chunk.kind)

    def kind_dtype(self, kind: str) -> torch.dtype:
        """Gradients have the parameters' dtype; states that of their format."""
        if kind in CASTS:
            return CASTS[kind]
        return self.states.dtypes(self.dtype)[kind] if is_state(kind) else self.dtype

    def nbytes(self, kind: str) -> int:
        return num_entries(kind, self.numel) * self.kind_dtype(kind).itemsize

    def entries(self, kind: str, where: TensorSlice) -> slice:
        """Where in a chunk of that kind a tensor's entries are."""
        begin = num_entries(kind, where.offset)
        return slice(begin, begin + num_entries(kind, where.spec.numel))

    @property
    def title(self) -> str:
        """The group as people know it: `h.0.up.weight to h.0.down.weight`."""
        first, last = self.slices[0].spec.name, self.slices[-1].spec.name
        return first if len(self.slices) == 1 else f"{first} to {last}"

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The chunks of an optimizer's states."""
        return tuple(self.states.dtypes(self.dtype))

    @property
    def update_kinds(self) -> tuple[str, ...]:
        """The chunks an optimizer step needs together."""
        return (PARAM, GRAD, *self.state_kinds)

    @property
    def update_nbytes_per_element(self) -> int:
        """Bytes of all kinds per element, rounded up."""
        return math.ceil(sum(self.nbytes(kind) for kind in self.update_kinds) / self.numel) if self.numel else 0

    def update_workspace_nbytes(self, num_elements: int) -> int:
        """What the update of so many elements allocates itself: with 8-bit moments a number per block."""
        return 4 * -(-num_elements // ELEMENTS_PER_SCALE) if self.states.moments == INT8 else 0

    @cached_property
    def resident_nbytes(self) -> int:
        """What the group takes when it stays on the compute tier: parameters, gradients, states."""
        return sum(s.spec.nbytes + s.spec.training_nbytes for s in self.slices)


@dataclass(frozen=True)
class ChunkLayout:
    """Which parameter lies in which group, and which parameters are too small to move at all.

    Attributes:
        overhead_nbytes: what else stays on the compute tier whatever is planned: workspaces of libraries.
        disk_holds: which chunks have their home on a disk; the others' is RAM.
        spent: groups that keep no gradients where they stay: the backward that makes these uses them up.
        version: of one model's layouts a later one has another. Says nothing of layouts of different models.
    """

    chunk_nbytes: int
    groups: tuple[ChunkGroup, ...]
    small: tuple[ParamSpec, ...]
    overhead_nbytes: int = 0
    disk_holds: DiskHolds = "nothing"
    transient: frozenset[int] = frozenset()
    version: int = field(default=0, compare=False)

    def group_of(self) -> dict[str, int]:
        return {s.spec.name: group.index for group in self.groups for s in group.slices}

    def groups_of(self, parameters: Iterable[str]) -> frozenset[int]:
        """The groups in which some parameters lie; small ones lie in none."""
        group_of = self.group_of()
        return frozenset(group_of[name] for name in parameters if name in group_of)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Every parameter's first element in its group; small ones have none."""
        return {s.spec.name: s.offset for group in self.groups for s in group.slices}

    @cached_property
    def small_nbytes(self) -> int:
        """What never moves: small parameters with their gradients and states, and every parameter's step counter."""
        counters = STEP_NBYTES * sum(spec.trainable for spec in self.specs().values())
        return counters + sum(spec.nbytes + spec.training_nbytes for spec in self.small)

    def specs(self) -> dict[str, ParamSpec]:
        """Every parameter by name."""
        return {spec.name: spec for spec in (*self.small, *(s.spec for group in self.groups for s in group.slices))}

    def is_on_disk(self, kind: str) -> bool:
        """Whether chunks of this kind have their home on a disk."""
        return self.disk_holds == "everything" or (self.disk_holds == "states" and is_state(kind))

    def links_of(self, kind: str) -> tuple[str, str]:
        """The links that chunks of this kind come by and leave by."""
        return (FROM_DISK, TO_DISK) if self.is_on_disk(kind) else (TO_DEVICE, TO_HOME)

    def links_of_chunk(self, chunk: Chunk) -> tuple[str, str]:
        """The links that a chunk, or a part of one, comes by and leaves by."""
        return (GATHER, SCATTER) if self.groups[chunk.group].is_gathered(chunk) else self.links_of(chunk.kind)

    def read_for_cast_nbytes(self, chunk: Chunk, resident: Collection[int]) -> int:
        """What comes over the link for a cast: a disk's is made behind it, and one of what stays crosses none."""
        if chunk.group in resident:
            return 0
        return self.groups[chunk.group].nbytes(PARAM if self.is_on_disk(PARAM) else chunk.kind)

    @cached_property
    def cut(self) -> frozenset[int]:
        """Groups that are cut over ranks: whole, they are on the compute tier for as long as they have a slot."""
        return frozenset(group.index for group in self.groups if group.is_cut)

    @cached_property
    def replicated_by_choice(self) -> frozenset[int]:
        """Groups whose parameters every rank has whole by choice."""
        return frozenset(group.index for group in self.groups if group.is_replicated)

    @cached_property
    def replicated(self) -> frozenset[int]:
        """Groups of which every rank has something whole, by choice or by force."""
        return frozenset(group.index for group in self.groups if group.replicated_kinds)

    def with_replicated(self, groups: Collection[int]) -> ChunkLayout:
        """The layout where it is the choice that these groups' parameters stand whole on every rank, and no others'."""
        if self.replicated_by_choice == frozenset(groups):
            return self
        return replace(self, groups=tuple(replace(group, is_replicated=group.index in groups) for group in self.groups))

    def chunk_nbytes_of(self, chunk: Chunk) -> int:
        """Bytes of the slot of a chunk, or of a part of one, without what stands."""
        group = self.groups[chunk.group]
        granule_nbytes = group.slices[0].spec.granule_nbytes if group.slices else 1
        nbytes = num_entries(chunk.kind, group.slot_numel(chunk)) * group.kind_dtype(chunk.kind).itemsize
        return -(-nbytes // granule_nbytes) * granule_nbytes
