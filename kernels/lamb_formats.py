"""Define LAMB's hyper-parameters, and cut tensors into rows with a partial sum each, for all LAMB kernels.

LAMB (You et al., Large batch optimization for deep learning, arXiv:1904.00962, algorithm 2) scales each tensor's
update by a trust ratio, the norm of the parameter over that of the update. A tensor may span tiles and chunks, so an
update has two stages. Stage 1 updates the moments of a tile and writes a pair of partial sums of squares for each row
of elements. Once all tiles that a tensor lies in have had stage 1, stage 2 adds up the tensor's rows in order and
changes the parameters. Nothing is added atomically: the bits of a run are the same every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Span, check_slots, check_tensor
from chunkc.kernels.fused_pass import host_empty
from chunkc.kernels.hyperparameters import check_ranges

ROW = 1 << 14
"""Elements of a partial sum at most. Rows end at multiples of it in the space of all elements, so tiles that begin and
end there do not change a bit."""


class LambScalars(NamedTuple):
    """Scalars of the inner loop, each computed in double precision on the host."""

    grad_sign: float  # -1 to maximize, else 1
    weight_decay: float
    lerp_weight: float  # 1 - beta1
    beta2: float
    one_minus_beta2: float
    bias_correction1: float
    bias_correction2_sqrt: float
    eps: float
    neg_lr: float
    adapt: float  # 0 for a trust ratio of 1, else 1
    min_coeff: float  # limits of the trust ratio
    max_coeff: float


@dataclass(frozen=True, slots=True)
class LambHyper:
    """Hyper-parameters of one LAMB update.

    Args:
        step: the number of this update, from 1.
        adapt: if false, the trust ratio is 1 (usual for biases and norms, which have no weight decay).
        min_coeff, max_coeff: limits of the trust ratio, in fp32. The paper's phi is the identity, which has none.

    Raises:
        ValueError: a value is out of range, or `step` is under 1.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0
    step: int = 1
    adapt: bool = True
    maximize: bool = False
    min_coeff: float = 0.0
    max_coeff: float = math.inf

    def __post_init__(self) -> None:
        names = ("step", "beta1", "beta2", "lr", "eps", "weight_decay")
        check_ranges(**{name: getattr(self, name) for name in names})
        if not 0 <= self.min_coeff <= self.max_coeff:
            raise ValueError(f"min_coeff and max_coeff must be in order from 0, got {self.min_coeff}, {self.max_coeff}")

    def scalars(self) -> LambScalars:
        """Derive the scalars, in double precision."""
        return LambScalars(
            grad_sign=-1.0 if self.maximize else 1.0,
            weight_decay=self.weight_decay,
            lerp_weight=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            bias_correction1=1 - self.beta1**self.step,
            bias_correction2_sqrt=(1 - self.beta2**self.step) ** 0.5,
            eps=self.eps,
            neg_lr=-self.lr,
            adapt=float(self.adapt),
            min_coeff=self.min_coeff,
            max_coeff=self.max_coeff,
        )


class LambPiece(NamedTuple):
    """Elements of a tensor in a tile: `[begin, end)` of the tile.

    Their rows have the partial sums from `partial` on; all rows of the tensor, in every tile, have the partial sums
    `[first_partial, last_partial)`.
    """

    begin: int
    end: int
    group: int
    partial: int
    first_partial: int
    last_partial: int


@dataclass(frozen=True, slots=True, eq=False)
class LambWork:
    """Work of both stages on one tile.

    Args:
        rows: int64 `[num_rows, 5]`, on the device that updates: begin and end in elements of the tile, group, first and
            last (exclusive) partial sum of the tensor. Row `i` has the partial sum `partial + i`.
        partial: the number of the first row's partial sum.
        pieces: the same work by tensor.
        cuts: for each piece, where its rows begin and end, in elements of the tile.
        num_elements: of the tile.
        num_groups: the scalars have at least so many rows.
        num_partials: of all tiles.
        pointer_offsets: of several tensors that one launch updates, see `lamb_work_of_tensors`; the slots are the first
            tensor's. The others are not checked, and the caller marks all as written.
    """

    rows: Tensor
    partial: int
    pieces: tuple[LambPiece, ...]
    cuts: tuple[tuple[int, ...], ...]
    num_elements: int
    num_groups: int
    num_partials: int
    pointer_offsets: Tensor | None = None

    def with_rows(self, rows: Tensor) -> LambWork:
        """Make the same work with a copy of its rows, such as on another device."""
        return replace(self, rows=rows)


def lamb_work(tensors: Sequence[Span], tiles: Sequence[tuple[int, int]]) -> tuple[LambWork, ...]:
    """Cut tensors into the rows of each tile, on the CPU.

    Args:
        tensors: in order and disjoint, in the space of all elements: chunk after chunk. Empty tensors have no rows.
        tiles: ranges `[begin, end)` of that space, in order and disjoint. They cover every tensor.

    Raises:
        ValueError: tensors or tiles are out of order or overlap, or elements of a tensor lie in no tile.
    """
    for name, ranges in (("tensors", [(span.begin, span.end) for span in tensors]), ("tiles", list(tiles))):
        previous_end = 0
        for begin, end in ranges:
            if not previous_end <= begin <= end:
                raise ValueError(f"{name} must be in order and apart; got [{begin}, {end}) after {previous_end}")
            previous_end = end
    if min((span.group for span in tensors), default=0) < 0:
        raise ValueError("groups count from 0")
    placed: list[list[tuple[Span, int, int, int]]] = [[] for _ in tiles]  # (tensor, begin, end, number of the tensor)
    at = 0
    for number, span in enumerate(tensors):
        begin = span.begin
        while begin < span.end:
            while at < len(tiles) and tiles[at][1] <= begin:
                at += 1
            if at == len(tiles) or tiles[at][0] > begin:
                raise ValueError(f"element {begin} of the tensor [{span.begin}, {span.end}) lies in no tile")
            end = min(span.end, tiles[at][1])
            placed[at].append((span, begin, end, number))
            begin = end
    # Rows are numbered tensor by tensor, which is tile by tile too.
    partials_of: dict[int, list[int]] = {}
    numbered: list[list[tuple[list[int], Span, int, int]]] = []
    num_partials = 0
    for tile in placed:
        numbered.append([])
        for span, begin, end, number in tile:
            cuts = [begin, *range((begin // ROW + 1) * ROW, end, ROW), end]
            numbered[-1].append((cuts, span, num_partials, number))
            partials = partials_of.setdefault(number, [num_partials, num_partials])
            num_partials += len(cuts) - 1
            partials[1] = num_partials
    num_groups = max((span.group + 1 for span in tensors), default=0)
    works = []
    at_partial = 0
    for (start, stop), tile_rows in zip(tiles, numbered, strict=True):
        pieces, all_cuts, rows = [], [], []
        for cuts, span, partial, number in tile_rows:
            local = [cut - start for cut in cuts]
            first, last = partials_of[number]
            pieces.append(LambPiece(local[0], local[-1], span.group, partial, first, last))
            all_cuts.append(tuple(local))
            rows += [(a, b, span.group, first, last) for a, b in pairwise(local)]
        table = torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, 5))  # none of the compute tier's memory
        works.append(
            LambWork(table, at_partial, tuple(pieces), tuple(all_cuts), stop - start, num_groups, num_partials)
        )
        at_partial += len(rows)
    return tuple(works)


def lamb_work_of_tensors(tensors: Sequence[Span]) -> LambWork:
    """Make the work of both stages on tensors anywhere in memory, each stage one launch; on the CPU.

    Only Triton's kernels take it. The work lacks `pointer_offsets` (`chunkc.kernels.pointer_offsets`), which may change
    at every step. Its rows are int64 `[num_rows, 6]`: begin and end in elements of a tensor, and its number last.

    Args:
        tensors: disjoint, in a space that determines where their rows end. None is empty.
    """
    works = lamb_work(tensors, [(span.begin, span.end) for span in tensors])
    numbers = torch.repeat_interleave(torch.tensor([len(work.rows) for work in works], device="cpu"))
    rows = torch.cat([torch.cat([work.rows for work in works]), numbers[:, None]], dim=1)
    return works[0].with_rows(rows)


def new_partials(work: LambWork, device: torch.device | str = "cpu") -> Tensor:
    """Allocate partial sums of all tiles, fp32 `[2, num_partials]`: parameters' first, then updates'."""
    if torch.device(device).type == "cpu":
        return host_empty((2, work.num_partials), torch.float32)
    return torch.empty(2, work.num_partials, dtype=torch.float32, device=device)


def check_lamb(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Check the arguments of a stage.

    Raises:
        ValueError: the format is not one of LAMB's, or a tensor does not fit the format or the work.
    """
    if fmt.moments != "float32" or fmt.rounding != "nearest" or fmt.split:
        raise ValueError(f"LAMB needs moments='float32', rounding='nearest' and split=False, got {fmt}")
    check_slots(fmt, slots, scale)
    if (work.rows.shape[1] == 6) != (work.pointer_offsets is not None):
        raise ValueError(
            "pointer offsets go with the work of several tensors, from lamb_work_of_tensors, and with no other"
        )
    if slots.param.numel() != work.num_elements:
        raise ValueError(f"the work is for a tile of {work.num_elements} elements, the slots have {len(slots.param)}")
    for name, tensor, dtype, shape in (
        ("scalars", scalars, torch.float32, (max(len(scalars), work.num_groups), len(LambScalars._fields))),
        ("partials", partials, torch.float32, (2, work.num_partials)),
        ("work.rows", work.rows, torch.int64, tuple(work.rows.shape)),
    ):
        check_tensor(name, tensor, dtype, shape, slots.param.device)
