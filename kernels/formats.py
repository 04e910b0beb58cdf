"""In which precision an Adam update keeps its tensors, and the data it works on: what every kernel agrees about.

A chunk group is a set of flat buffers, one per kind of data, all laid out alike. An update may see a tile of it: the
same range of elements of every buffer. Nothing here computes an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from chunkc.ir.states import ELEMENTS_PER_SCALE, MOMENT_DTYPES
from chunkc.kernels.hyper import GRAD_DTYPES, AdamScalars

Moments = Literal["float32", "bfloat16", "int8"]
Rounding = Literal["nearest", "stochastic"]

QUANT_BLOCK = ELEMENTS_PER_SCALE
"""Elements that share one scale in 8-bit moments. A block never mixes two runs: runs begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class AdamFormat:
    """What an Adam update reads and writes. Hashable: kernels are compiled and cached per format.

    Args:
        param_dtype: fp32, bf16 or fp16.
        grad_dtype: fp32, bf16 or fp16; widened to fp32 before anything else.
        moments: "float32"; "bfloat16"; or "int8": one byte per element, a code into a table of 256 values, times the
            fp32 scale of its block (Dettmers et al., arXiv:2110.02861; see `chunkc.kernels.quant`).
        master: an fp32 master is kept, and the parameter is its rounded copy. Without it the parameter is updated.
        split: of the master only the lower 16 bits are kept beside a bf16 parameter, which has the others (see
            `chunkc.kernels.split`). Not with 8-bit moments.
        rounding: of all that is stored in bf16 (parameters and moments): "nearest" (ties to even), or "stochastic": up
            with the probability of the distance, so that the expected value is exact. fp16 is rounded to nearest.

    Raises:
        ValueError: the combination makes no sense; the message says which does.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    moments: Moments = "float32"
    master: bool = False
    rounding: Rounding = "nearest"
    split: bool = False

    def __post_init__(self) -> None:
        for name, dtype in (("parameters", self.param_dtype), ("gradients", self.grad_dtype)):
            if dtype not in GRAD_DTYPES:
                raise ValueError(f"{name} must be float32, bfloat16 or float16, got {dtype}")
        if self.moments not in get_args(Moments):
            raise ValueError(f"moments must be one of {list(get_args(Moments))}, got {self.moments!r}")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding must be one of {list(get_args(Rounding))}, got {self.rounding!r}")
        stochastic = self.rounding == "stochastic"
        if self.param_dtype == torch.float32 and self.master:
            raise ValueError("float32 parameters are their own master; use master=False")
        if self.param_dtype == torch.float16 and stochastic:
            raise ValueError("stochastic rounding is to bfloat16; float16 parameters need rounding='nearest'")
        if self.param_dtype == torch.float16 and not self.master:
            raise ValueError("float16 parameters need master=True: small updates would be lost")
        if self.param_dtype == torch.bfloat16 and not self.master and not stochastic:
            raise ValueError(
                "bfloat16 parameters need master=True or rounding='stochastic': small updates would be lost"
            )
        if self.split and (self.param_dtype != torch.bfloat16 or not self.master or stochastic):
            raise ValueError(
                "split=True needs master=True and bfloat16 parameters with rounding='nearest': only they are within "
                "half a place of their master"
            )
        if self.split and self.moments == "int8":
            raise ValueError("split=True needs float32 or bfloat16 moments; with moments='int8' use split=False")
        if stochastic and self.param_dtype != torch.bfloat16 and self.moments != "bfloat16":
            raise ValueError("rounding='stochastic' needs something stored in bfloat16; use rounding='nearest'")

    @property
    def moment_dtype(self) -> torch.dtype:
        """The dtype of the two moments' buffers; uint8 codes for "int8"."""
        return MOMENT_DTYPES[self.moments]

    @property
    def master_dtype(self) -> torch.dtype | None:
        """The dtype of the master's buffer: int16 for the lower bits of a split one; None without a master."""
        return None if not self.master else torch.int16 if self.split else torch.float32

    @property
    def quantised(self) -> bool:
        return self.moments == "int8"

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def run_alignment(self) -> int:
        """Elements of the chunk group that runs must begin at a multiple of."""
        return QUANT_BLOCK if self.quantised else 1


@dataclass(frozen=True, slots=True, eq=False)
class AdamSlots:
    """The buffers of one tile of a chunk group, `[n]` elements each, flat and contiguous, on one device.

    `grad` may be `param`'s very memory where their dtypes are equal; no other overlap is allowed.

    Args:
        param, grad: `[n]`, of the format's dtypes.
        exp_avg, exp_avg_sq: `[n]`, of the format's `moment_dtype`.
        master: `[n]` of the format's `master_dtype` where it has one, else None.
        exp_avg_scale, exp_avg_sq_scale: `[ceil(n / 256)]` fp32 for "int8" moments, else None. Block `b` is of the
            elements from `256 * b` of the tile on, and tiles begin at multiples of 256 elements of their group.
            Moments begin as zeros, codes and scales alike: a scale of 0 makes every code 0.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None

    def part(self, begin: int, end: int) -> AdamSlots:
        """Views of the elements `[begin, end)`; with 8-bit moments `begin` is a multiple of 256."""
        blocks = slice(begin // QUANT_BLOCK, num_quant_blocks(end))
        flat = (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.master)
        scales = (self.exp_avg_scale, self.exp_avg_sq_scale)
        return AdamSlots(
            *[None if t is None else t[begin:end] for t in flat],  # type: ignore[arg-type]
            *[None if t is None else t[blocks] for t in scales],
        )


class Run(NamedTuple):
    """Elements `[begin, end)` of a tile that share hyper-parameters: row `group` of the table of scalars."""

    begin: int
    end: int
    group: int


@dataclass(frozen=True, slots=True, eq=False)
class GradScale:
    """What becomes of gradients before the update, as 0-dim fp32 tensors on the slots' device: nobody waits for them.

    Args:
        unscale: gradients are multiplied by it first (1 / loss scale); None for 1.
        clip: and then by this (the factor of global-norm clipping); None for 1.
        found_inf: where it is not 0, nothing changes at all; None for 0.
    """

    unscale: Tensor | None = None
    clip: Tensor | None = None
    found_inf: Tensor | None = None


NO_SCALE = GradScale()


class RoundingKey(NamedTuple):
    """Two words of 31 bits that all random bits of one update of one chunk group derive from."""

    low: int
    high: int


def rounding_key(seed: int, step: int, chunk: int) -> RoundingKey:
    """The key of a chunk group's update: another one for each seed, step and chunk group, whatever ran before.

    Args:
        seed: the run's seed, any integer.
        step: the number of the optimizer's step.
        chunk: the index of the chunk group.
    """
    key = 0
    for word in (seed, step, chunk):
        key = _splitmix64(key ^ (word & _MASK64))
    return RoundingKey(key & 0x7FFFFFFF, key >> 33)


_MASK64 = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def num_quant_blocks(num_elements: int) -> int:
    """How many scales `num_elements` 8-bit values have."""
    return -(-num_elements // QUANT_BLOCK)


def check_adam_slots(fmt: AdamFormat, slots: AdamSlots, scale: GradScale) -> None:
    """Check a tile's tensors and what its gradients are scaled with.

    Raises:
        ValueError: a tensor has another dtype, shape or device than the format says, is missing or in excess.
    """
    num_elements, device = slots.param.numel(), slots.param.device
    scale_shape = (num_quant_blocks(num_elements),) if fmt.quantised else None
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...] | None]] = [
        ("param", slots.param, fmt.param_dtype, (num_elements,)),
        ("grad", slots.grad, fmt.grad_dtype, (num_elements,)),
        ("exp_avg", slots.exp_avg, fmt.moment_dtype, (num_elements,)),
        ("exp_avg_sq", slots.exp_avg_sq, fmt.moment_dtype, (num_elements,)),
        ("master", slots.master, fmt.master_dtype or torch.float32, (num_elements,) if fmt.master else None),
        ("exp_avg_scale", slots.exp_avg_scale, torch.float32, scale_shape),
        ("exp_avg_sq_scale", slots.exp_avg_sq_scale, torch.float32, scale_shape),
    ]
    for name in ("unscale", "clip", "found_inf"):
        tensor = getattr(scale, name)
        wanted.append((name, tensor, torch.float32, () if tensor is not None else None))
    for name, tensor, dtype, shape in wanted:
        if (tensor is None) != (shape is None):
            raise ValueError(f"{name} is {'missing' if tensor is None else 'not wanted'} for {fmt}")
        if tensor is not None and shape is not None:
            check_tensor(name, tensor, dtype, shape, device)


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Check one tensor of an update on `device`.

    Raises:
        ValueError: it has another dtype, shape or device, or is not contiguous.
    """
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {shape}, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, param on {device}; an update runs on one device")


def check_adam_update(
    fmt: AdamFormat,
    slots: AdamSlots,
    scalars: Tensor,
    scale: GradScale,
    key: RoundingKey | None,
    first_element: int,
) -> None:
    """Check all that an update takes, but for its runs (see `check_runs`).

    Args:
        scalars: `[num_groups, 9]` fp32, as `chunkc.kernels.hyper.scalar_table` makes it, on the slots' device.
        key: for stochastic rounding, else None.
        first_element: index in the chunk group of the tile's first element.

    Raises:
        ValueError: see `check_adam_slots`; also of the scalars, the key and the first element.
    """
    check_adam_slots(fmt, slots, scale)
    num_groups = scalars.shape[0] if scalars.dim() else 0
    check_tensor("scalars", scalars, torch.float32, (num_groups, len(AdamScalars._fields)), slots.param.device)
    if fmt.stochastic != (key is not None):
        raise ValueError("a rounding key is needed for rounding='stochastic', and for nothing else")
    if first_element < 0 or first_element % fmt.run_alignment:
        raise ValueError(
            f"tiles of {fmt.moments} moments begin at multiples of {fmt.run_alignment}, not {first_element}"
        )


def check_runs(runs: Sequence[Run], fmt: AdamFormat, *, num_elements: int, num_groups: int) -> None:
    """Check runs against a tile of `num_elements`.

    Raises:
        ValueError: runs are out of range or order, overlap, name a group that is not there, or share a block of
            8-bit moments.
    """
    previous_end = 0
    for run in runs:
        if not previous_end <= run.begin <= run.end <= num_elements:
            raise ValueError(f"runs must be in order, apart and inside [0, {num_elements}); got {run}")
        if not 0 <= run.group < num_groups:
            raise ValueError(f"{run} names a group that is not among the {num_groups} of the scalars")
        if run.begin % fmt.run_alignment:
            raise ValueError(f"runs with {fmt.moments} moments begin at multiples of {fmt.run_alignment}; got {run}")
        previous_end = run.end


def checked_runs(
    fmt: AdamFormat,
    slots: AdamSlots,
    runs: Sequence[Run],
    scalars: Tensor,
    scale: GradScale,
    key: RoundingKey | None,
    first_element: int,
) -> list[Run]:
    """Check all that an update of a tile takes, and leave out runs without elements.

    Raises:
        ValueError: see `check_adam_update` and `check_runs`.
    """
    check_adam_update(fmt, slots, scalars, scale, key, first_element)
    check_runs(runs, fmt, num_elements=slots.param.numel(), num_groups=len(scalars))
    return [run for run in runs if run.end > run.begin]


def mark_written(slots: AdamSlots) -> None:
    """Tell autograd that an update by other than its operators has written to the slots."""
    states = (slots.exp_avg, slots.exp_avg_sq, slots.master, slots.exp_avg_scale, slots.exp_avg_sq_scale)
    torch.autograd.graph.increment_version([tensor for tensor in (slots.param, *states) if tensor is not None])
