"""Chunks: flat buffers of one kind of model data, the unit of movement (PatrickStar, arXiv:2108.05818)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from chunkc.ir.states import DEFAULT_STATES, ELEMENTS_PER_SCALE, INT8, StateFormat, num_entries

STEP_NBYTES = 4
"""An optimizer's step counter: one fp32 scalar per trainable parameter, always on the compute tier."""

ALIGNMENT_NBYTES = 256
"""Tensors start at multiples of this inside a chunk: enough for vector loads on CPUs and CUDA devices."""

PARAM, GRAD = "param", "grad"

NAMES_KEPT = 1 << 14
"""Chunks' names that are remembered as what they say: every event of a step asks."""


def chunk_name(kind: str, group: int, part: tuple[int, int] | None = None) -> str:
    """The stable name of a chunk, as plans and graphs print it: `param:3`, or of a part of it: `param:3[0:65536]`.

    A part is a range of elements; optimizer updates move chunks part by part.
    """
    return f"{kind}:{group}" if part is None else f"{kind}:{group}[{part[0]}:{part[1]}]"


@lru_cache(maxsize=NAMES_KEPT)
def split_chunk_name(name: str) -> tuple[str, int]:
    """Kind and group of a chunk's (or a part's) name."""
    kind, _, group = name.partition("[")[0].partition(":")
    return kind, int(group)


def is_state(kind: str) -> bool:
    """Whether chunks of a kind hold optimizer states."""
    return kind not in (PARAM, GRAD)


@lru_cache(maxsize=NAMES_KEPT)
def chunk_part(name: str) -> tuple[int, int] | None:
    """The range of elements a name stands for; None for the whole chunk."""
    _, bracket, part = name.partition("[")
    if not bracket:
        return None
    begin, _, end = part.rstrip("]").partition(":")
    return int(begin), int(end)


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the planner sees it: its name and its dense layout.

    Attributes:
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

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def nbytes(self) -> int:
        return self._rounded(self.home_nbytes)

    @property
    def home_nbytes(self) -> int:
        """Bytes of the elements alone: what the parameter takes at home, and what layouts go by."""
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

    @property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer's states but the step counter; 0 for a frozen parameter."""
        dtypes = self.states.dtypes(self.dtype) if self.trainable else {}
        return sum(self._rounded(num_entries(kind, self.numel) * dtype.itemsize) for kind, dtype in dtypes.items())

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granule_nbytes) * self.granule_nbytes


@dataclass(frozen=True)
class TensorSlice:
    """Where one parameter (and its gradient, and its states) lies in its group's chunks, in elements."""

    spec: ParamSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class ChunkGroup:
    """Parameters that share chunks: one chunk per kind of data, all laid out alike.

    `numel` is the room of each chunk in elements, gaps for alignment included.
    """

    index: int
    dtype: torch.dtype
    trainable: bool
    numel: int
    slices: tuple[TensorSlice, ...]
    states: StateFormat = DEFAULT_STATES

    def kind_dtype(self, kind: str) -> torch.dtype:
        """Gradients have the parameters' dtype; states that of their format."""
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

    @property
    def resident_nbytes(self) -> int:
        """What the group takes when it stays on the compute tier: parameters, gradients, states."""
        return sum(s.spec.nbytes + s.spec.training_nbytes for s in self.slices)


@dataclass(frozen=True)
class ChunkLayout:
    """Which parameter lies in which group, and which parameters are too small to move at all.

    Attributes:
        overhead_nbytes: what else stays on the compute tier whatever is planned: workspaces of libraries.
    """

    chunk_nbytes: int
    groups: tuple[ChunkGroup, ...]
    small: tuple[ParamSpec, ...]
    overhead_nbytes: int = 0

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

    def specs(self) -> dict[str, ParamSpec]:
        """Every parameter by name."""
        return {spec.name: spec for spec in (*self.small, *(s.spec for group in self.groups for s in group.slices))}

    def chunk_nbytes_of(self, chunk: str) -> int:
        """Bytes of the slot of a chunk, or of a part of one."""
        kind, index = split_chunk_name(chunk)
        group = self.groups[index]
        begin, end = chunk_part(chunk) or (0, group.numel)
        granule_nbytes = group.slices[0].spec.granule_nbytes if group.slices else 1
        nbytes = num_entries(kind, end - begin) * group.kind_dtype(kind).itemsize
        return -(-nbytes // granule_nbytes) * granule_nbytes
