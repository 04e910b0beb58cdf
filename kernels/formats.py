"""Define update formats, slots and spans for all elementwise kernels: the precision of an update, and its data.

A chunk group is a set of flat buffers, one per kind of data, all laid out alike. An update may see a tile of it: the
same range of elements of every buffer. Nothing here computes an update.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import (
    ELEMENTS_PER_SCALE,
    MASTER,
    MASTER_LOW,
    MOMENT_DTYPES,
    MOMENTS,
    is_scale,
    scale_of,
)
from chunkc.kernels import adam
from chunkc.kernels.arithmetic import Arithmetic
from chunkc.kernels.hyperparameters import (
    GRAD_DTYPES,
    table_of_rows,
    takes_gradients,
    wide_dtype,
)

MomentsFormat = Literal["float32", "bfloat16", "int8"]
Rounding = Literal["nearest", "stochastic"]

QUANT_BLOCK = ELEMENTS_PER_SCALE
"""Elements that share one scale in 8-bit moments. A block never mixes two spans: spans begin at multiples of it."""


UNIT = 16
"""Alignment, in elements, of vector loads in Triton's kernels: 16 bytes of 8-bit codes."""


class Slots:
    """Buffers of one tile of a chunk group, `[n]` elements each, flat and contiguous, on one device.

    `grad` may share `param`'s memory where their dtypes are equal; no other overlap is allowed. A rule's slots are a
    dataclass with these buffers, its moments, and a scale for each 8-bit moment:

    Args:
        param, grad: `[n]`, of the format's dtypes.
        master: `[n]` of the format's `master_dtype` where it has one, else None.
        (moments): `[n]`, of the format's `moment_dtype`.
        (their scales): `[ceil(n / 256)]` fp32 for "int8" moments, else None. Block `b` is of the
            elements from `256 * b` of the tile on, and tiles begin at multiples of 256 elements of their group.
            Moments begin as zeros, codes and scales alike: a scale of 0 makes every code 0.
    """

    __slots__ = ()
    param: Tensor
    grad: Tensor
    master: Tensor | None

    @classmethod
    def of(cls, flat: Mapping[str, Tensor]) -> Self:
        """Make slots of flat tensors by kind of data."""
        master = flat.get(MASTER, flat.get(MASTER_LOW))
        return cls(**{kind: flat[kind] for kind in flat if kind not in (MASTER, MASTER_LOW)}, master=master)  # type: ignore[call-arg]

    def __getitem__(self, kind: str) -> Tensor | None:
        return getattr(self, kind, None)

    def states(self) -> dict[str, Tensor]:
        """Return the buffers that the format has, by name, without parameter and gradient."""
        names = (field.name for field in fields(self) if field.name not in (PARAM, GRAD))  # type: ignore[arg-type]
        return {name: tensor for name in names if (tensor := self[name]) is not None}

    def part(self, begin: int, end: int) -> Self:
        """Make views of the elements `[begin, end)`; with 8-bit moments `begin` is a multiple of 256."""
        blocks, elements = slice(begin // QUANT_BLOCK, num_quant_blocks(end)), slice(begin, end)
        parts = {kind: tensor[blocks if is_scale(kind) else elements] for kind, tensor in self.states().items()}
        return type(self)(param=self.param[elements], grad=self.grad[elements], **({"master": None} | parts))  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True)
class UpdateFormat:
    """Dtypes and rounding of an update's buffers. Hashable: kernels are compiled and cached per format.

    Each rule has a subclass with its arithmetic. Its states, except the master, are called moments.

    Args:
        param_dtype: fp32, bf16 or fp16, updated in fp32; or fp64, updated in fp64.
        grad_dtype: fp32, bf16, fp16, or fp64 of fp64 parameters; widened to `wide_dtype` before anything else.
        moments: "float32", which is fp64 for fp64 parameters; "bfloat16"; or "int8": one byte per element, a code into
            a table of 256 values, times the fp32 scale of its block (Dettmers et al., arXiv:2110.02861; see
            `chunkc.kernels.quant`).
        master: an fp32 master is kept, and the parameter is its rounded copy. Without it the parameter is updated.
        split: only the lower 16 bits of the master are kept; a bf16 parameter has the upper bits (see
            `chunkc.kernels.split`). Not with 8-bit moments.
        rounding: of all that is stored in bf16 (parameters and moments): "nearest" (ties to even), or "stochastic": up
            with the probability of the distance, so that the expected value is exact. fp16 is rounded to nearest.

    Raises:
        ValueError: these arguments cannot be combined; the message says which can.
    """

    arithmetic: ClassVar[Arithmetic]
    """A function of gradient and parameter (or master), then the moments by the names of their buffers. Its results are
    the new parameter and the new moments in that order, then terms that are added up over rows of elements (see
    `chunkc.kernels.summed_work`)."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    moments: MomentsFormat = "float32"
    master: bool = False
    rounding: Rounding = "nearest"
    split: bool = False

    def __post_init__(self) -> None:
        if self.param_dtype not in (*GRAD_DTYPES, torch.float64):
            raise ValueError(f"parameters must be float64, float32, bfloat16 or float16, got {self.param_dtype}")
        if not takes_gradients(self.param_dtype, self.grad_dtype):
            raise ValueError(f"gradients must be float32, bfloat16 or float16, got {self.grad_dtype}")
        if self.moments not in get_args(MomentsFormat):
            raise ValueError(f"moments must be one of {list(get_args(MomentsFormat))}, got {self.moments!r}")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding must be one of {list(get_args(Rounding))}, got {self.rounding!r}")
        stochastic = self.rounding == "stochastic"
        if self.param_dtype == torch.float32 and self.master:
            raise ValueError("float32 parameters are their own master; use master=False")
        if self.param_dtype == torch.float64 and (self.master or stochastic or self.moments != "float32"):
            raise ValueError("float64 parameters are their own master, have float64 moments and rounding='nearest'")
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
        if (self.kept or self.num_sums) and (self.moments != "float32" or stochastic):
            raise ValueError(f"an update in stages needs moments='float32' and rounding='nearest', got {self}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments' buffers; moments in `UNSIGNED` have no negative elements."""
        return self.arithmetic.inputs[2:]

    @property
    def kept(self) -> frozenset[str]:
        """Kinds of data that the rule leaves as they are: no kernel writes them."""
        kept, target = self.arithmetic.kept, self.arithmetic.inputs[1]
        return kept - {target} | {PARAM, MASTER} if target in kept else kept

    @property
    def num_sums(self) -> int:
        """Number of terms of an element that are added up."""
        return len(self.arithmetic.code().results) - 1 - len(self.kinds)

    @property
    def scalars(self) -> Any:
        """Named tuple of the rule's scalars."""
        return self.arithmetic.scalars

    @property
    def slots(self) -> type[Slots]:
        """Class of the buffers of a tile."""
        return slots_with(self.kinds)

    def needs_l2(self, scalars: Any) -> bool:
        """Whether weight decay is added to the gradient, given a group's scalars."""
        return getattr(scalars, "l2", 0.0) != 0

    def scalar_table(self, hypers: Sequence[Any]) -> Tensor:
        """Make the scalars of several groups as `[num_groups, num_scalars]` of the `wide_dtype` on the CPU."""
        return table_of_rows([hyper.scalars() for hyper in hypers], self.wide_dtype)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of all arithmetic, and of the scalars."""
        return wide_dtype(self.param_dtype)

    @property
    def by_reference(self) -> bool:
        """Whether the format has no device code in Triton: on a GPU `chunkc.kernels.reference` updates."""
        return self.wide_dtype == torch.float64

    @property
    def moment_dtype(self) -> torch.dtype:
        """Dtype of the moments' buffers; uint8 codes for "int8"."""
        return torch.float64 if self.wide_dtype == torch.float64 else MOMENT_DTYPES[self.moments]

    @property
    def master_dtype(self) -> torch.dtype | None:
        """Dtype of the master's buffer: int16 for the lower bits of a split master; None without a master."""
        return None if not self.master else torch.int16 if self.split else torch.float32

    @property
    def quantised(self) -> bool:
        return self.moments == "int8" and bool(self.kinds)

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def span_alignment(self) -> int:
        """Number of elements; spans must begin at its multiples in the chunk group."""
        return QUANT_BLOCK if self.quantised else 1


@dataclass(frozen=True, slots=True, eq=False)
class AdamSlots(Slots):
    """Buffers of an Adam update."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None


@functools.cache
def slots_with(kinds: tuple[str, ...]) -> type[Slots]:
    """Make the class of slots with these moments."""
    if kinds == MOMENTS:
        return AdamSlots
    optional = [(kind, Tensor | None, None) for kind in (*kinds, MASTER, *map(scale_of, kinds))]
    return make_dataclass(
        "Slots",
        [(PARAM, Tensor), (GRAD, Tensor), *optional],
        bases=(Slots,),
        namespace={"__module__": __name__},
        frozen=True,
        slots=True,
        eq=False,
    )


@dataclass(frozen=True, slots=True)
class AdamFormat(UpdateFormat):
    """Format of an Adam update."""

    arithmetic = adam.ADAM


@dataclass(frozen=True, slots=True)
class AmsgradFormat(UpdateFormat):
    """Format of an Adam update with `max_exp_avg_sq`, in spans that use it and in others."""

    arithmetic = adam.AMSGRAD


class Span(NamedTuple):
    """Elements `[begin, end)` of a tile that share hyper-parameters: row `group` of the table of scalars."""

    begin: int
    end: int
    group: int


@dataclass(frozen=True, slots=True, eq=False)
class GradScale:
    """Factors of gradients before the update, as 0-dim fp32 tensors on the slots' device: the host waits for none.

    Args:
        unscale: gradients are multiplied by it first (1 / loss scale); None for 1.
        clip: and then by this (the factor of global-norm clipping); None for 1.
        found_inf: where it is not 0, the update changes nothing; None for 0.
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
    """Derive the key of a chunk group's update from seed, step and chunk group alone.

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
    """Step SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def num_quant_blocks(num_elements: int) -> int:
    """Count the scales of `num_elements` 8-bit values."""
    return -(-num_elements // QUANT_BLOCK)


def check_slots(fmt: UpdateFormat, slots: Slots, scale: GradScale) -> None:
    """Check a tile's tensors and the factors of its gradients.

    Raises:
        ValueError: a tensor has another dtype, shape or device than the format says, is missing or in excess.
    """
    num_elements, device = slots.param.numel(), slots.param.device
    elements, blocks = (num_elements,), (num_quant_blocks(num_elements),)
    expected: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...] | None]] = [
        (PARAM, slots.param, fmt.param_dtype, elements),
        (GRAD, slots.grad, fmt.grad_dtype, elements),
        *[(kind, slots[kind], fmt.moment_dtype, elements) for kind in fmt.kinds],
        (MASTER, slots.master, fmt.master_dtype or torch.float32, elements if fmt.master else None),
        *[(scale_of(k), slots[scale_of(k)], torch.float32, blocks if fmt.quantised else None) for k in fmt.kinds],
    ]
    excess = slots.states().keys() - {name for name, *_ in expected}
    expected += [(name, slots[name], torch.float32, None) for name in sorted(excess)]
    for name in ("unscale", "clip", "found_inf"):
        tensor = getattr(scale, name)
        expected.append((name, tensor, torch.float32, () if tensor is not None else None))
    for name, tensor, dtype, shape in expected:
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


def check_update(
    fmt: UpdateFormat,
    slots: Slots,
    scalars: Tensor,
    scale: GradScale,
    key: RoundingKey | None,
    first_element: int,
) -> None:
    """Check the arguments of an update, except its spans (see `check_spans`).

    Args:
        scalars: `[num_groups, num_scalars]` on the slots' device, see `UpdateFormat.scalar_table`.
        key: for stochastic rounding, else None.
        first_element: index in the chunk group of the tile's first element.

    Raises:
        ValueError: see `check_slots`; also of the scalars, the key and the first element.
    """
    check_slots(fmt, slots, scale)
    num_groups = scalars.shape[0] if scalars.dim() else 0
    check_tensor("scalars", scalars, fmt.wide_dtype, (num_groups, len(fmt.scalars._fields)), slots.param.device)
    if fmt.stochastic != (key is not None):
        raise ValueError("a rounding key is needed for rounding='stochastic', and for nothing else")
    if first_element < 0 or first_element % fmt.span_alignment:
        raise ValueError(
            f"tiles of {fmt.moments} moments begin at multiples of {fmt.span_alignment}, not {first_element}"
        )


def check_spans(spans: Sequence[Span], fmt: UpdateFormat, *, num_elements: int, num_groups: int) -> None:
    """Check spans against a tile of `num_elements`.

    Raises:
        ValueError: spans are out of range or order, overlap, name a group that is not there, or share a block of
            8-bit moments.
    """
    previous_end = 0
    for span in spans:
        if not previous_end <= span.begin <= span.end <= num_elements:
            raise ValueError(f"spans must be in order, apart and inside [0, {num_elements}); got {span}")
        if not 0 <= span.group < num_groups:
            raise ValueError(f"{span} names a group that is not among the {num_groups} of the scalars")
        if span.begin % fmt.span_alignment:
            raise ValueError(f"spans with {fmt.moments} moments begin at multiples of {fmt.span_alignment}; got {span}")
        previous_end = span.end


def checked_spans(
    fmt: UpdateFormat,
    slots: Slots,
    spans: Sequence[Span],
    scalars: Tensor,
    scale: GradScale,
    key: RoundingKey | None,
    first_element: int,
) -> list[Span]:
    """Check the arguments of an update of a tile, and return the spans with elements.

    Raises:
        ValueError: see `check_update` and `check_spans`.
    """
    check_update(fmt, slots, scalars, scale, key, first_element)
    check_spans(spans, fmt, num_elements=slots.param.numel(), num_groups=len(scalars))
    return [span for span in spans if span.end > span.begin]


def mark_written(fmt: UpdateFormat, slots: Slots) -> None:
    """Tell autograd that code other than its operators has written to the slots."""
    buffers = {PARAM: slots.param, **slots.states()}
    torch.autograd.graph.increment_version([tensor for kind, tensor in buffers.items() if kind not in fmt.kept])
