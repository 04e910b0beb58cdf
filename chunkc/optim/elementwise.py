"""Update tiles of chunk groups, and tensors in place, by rules that change each element by itself.

On a GPU by Triton; on the CPU by one pass over memory for each span of elements. Complex elements are two real ones
each, as in `torch.optim`. Formats without code in Triton (fp64) are updated by plain PyTorch on a GPU.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.ir.states import BFLOAT16, FLOAT32, INT8, MASTER, MASTER_LOW, NONE, SPLIT, StateFormat
from chunkc.kernels import elementwise_triton, reference
from chunkc.kernels.elementwise_cpu import chunk_update, prepare, warm_up_format
from chunkc.kernels.elementwise_triton import WorkTable, work_of_tensors, work_table
from chunkc.kernels.formats import (
    NO_SCALE,
    GradScale,
    MomentsFormat,
    RoundingKey,
    Slots,
    Span,
    UpdateFormat,
    rounding_key,
)
from chunkc.kernels.hyperparameters import COMPLEX_DTYPES, GRAD_DTYPES
from chunkc.kernels.pointer_offsets import RoundingSeed
from chunkc.optim import update_mode
from chunkc.optim.on_device import Batch, DeviceUpdater, StepScalars, divided
from chunkc.optim.rule import (
    DIFFERENTIABLE,
    MAXIMIZE,
    Extent,
    Groups,
    GroupWork,
    ResidentTensor,
    Rule,
    Spans,
    TileUpdate,
    Updater,
    flag,
    shown,
)
from chunkc.optim.states import put_back
from chunkc.optim.update_mode import DEVICE

PIECE_NUM_ELEMENTS = 1 << 24
"""Elements that are updated with one table: it is then a fifth of `TABLE_NBYTES` whatever a tensor's size."""

PIECE_BY_REFERENCE = 1 << 13
"""Elements that plain PyTorch updates at a time: about 15 temporary tensors of them, 8 bytes an element, fit
`TEMPORARIES_NBYTES`."""


@dataclass(frozen=True)
class ElementwiseRule(Rule):
    """A rule that changes each element by itself, in any format that its kernels support.

    Attributes:
        format_class: the kernels' format class, where it does not depend on the states.
    """

    format_class: ClassVar[type[UpdateFormat]]

    formats: Formats
    optional: ClassVar[tuple[str, ...]] = (MAXIMIZE, DIFFERENTIABLE, "foreach", "fused")

    def kernel(self, kinds: Iterable[str]) -> type[UpdateFormat]:
        """Return the kernels' format class for parameters that have these kinds of states."""
        return self.format_class

    def states(self, groups: Groups) -> StateFormat:
        return replace(self.formats.states, kinds=self.moments)

    def format(self, param_dtype: torch.dtype, grad_dtype: torch.dtype, kinds: Iterable[str]) -> UpdateFormat:
        """Return the kernels' format for parameters of a dtype that have these kinds of states.

        Raises:
            OptionsError: there is no such kernel; the message names those that exist.
        """
        kernel: Any = self.kernel(kinds)
        fmt: UpdateFormat = self.formats.of_kernel(kernel, param_dtype, grad_dtype, tuple(kinds))
        return fmt

    def slots(self, flat: Mapping[str, torch.Tensor]) -> tuple[UpdateFormat, Slots]:
        """Return the format and the kernels' arguments for flat tensors by kind."""
        fmt = self.format(flat[PARAM].dtype, flat[GRAD].dtype, [kind for kind in flat if kind not in (PARAM, GRAD)])
        return fmt, fmt.slots.of(flat)

    @property
    def must_know_steps(self) -> bool:
        return self.formats.stochastic

    def check_dtype(self, dtype: torch.dtype, title: str) -> None:
        real = dtype.to_real() if dtype in COMPLEX_DTYPES else dtype
        if real not in (*GRAD_DTYPES, torch.float64):
            raise UnsupportedError(f"{title} updates fp64, fp32, bf16, fp16, complex64 and complex128, not {dtype}")
        self.format(real, real, self.states(()).dtypes(real))

    def updater(self, device: torch.device, *, by_triton: bool) -> Updater:
        return ByTriton(self, device) if by_triton else OnCpu(self)


class Elementwise(Updater):
    """Updates by an elementwise rule, of spans of elements wherever they lie."""

    def __init__(self, rule: ElementwiseRule) -> None:
        self.rule = rule

    @abstractmethod
    def update(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale, extent: Extent) -> None:
        """Update spans of elements of flat tensors, which are given by kind."""

    def of_group(self, work: GroupWork) -> TileUpdate:
        def update(flat: Mapping[str, torch.Tensor], tile: Tile) -> None:
            spans = clipped(work.spans, tile.begin, tile.end)
            self.update(flat, spans, work.scale, Extent(work.index, tile.begin))

        return update

    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        for tensor in tensors:
            flats = tensor.flats()
            self.update(flats, [(0, flats[PARAM].numel(), tensor.hyper)], scale, tensor.extent)
            put_back(flats[PARAM], tensor.parameter)

    def compile_ahead(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale) -> None:
        fmt, _ = self.rule.slots(flat)
        for l2 in {fmt.needs_l2(hyper.scalars()) for _, _, hyper in spans}:
            warm_up_format(fmt, l2=l2, scaled=scale.unscale is not None or scale.clip is not None)


class OnCpu(Elementwise):
    """Updates by the CPU's threads."""

    def update(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale, extent: Extent) -> None:
        update_on_cpu(self.rule, flat, spans, scale, extent)

    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        formats = self.rule.formats
        if scale is not NO_SCALE or formats.stochastic or formats.states.moments != FLOAT32:
            super().of_tensors(tensors, scale)
            return
        # A shorter way, since a model may have many small parameters: prepare once for equal formats and
        # hyperparameters.
        updates: dict[Any, tuple[Any, list[str], Callable[[list[torch.Tensor]], None]]] = {}
        written: list[torch.Tensor] = []
        for tensor in tensors:
            flats = tensor.flats()
            key = (id(tensor.hyper), flats[PARAM].dtype, flats[GRAD].dtype, *tensor.states)
            if key not in updates:
                fmt = self.rule.format(flats[PARAM].dtype, flats[GRAD].dtype, tensor.states)
                order = [PARAM, GRAD, *fmt.kinds, *(kind for kind in tensor.states if kind not in fmt.kinds)]
                updates[key] = tensor.hyper, order, prepare(fmt, tensor.hyper)
            _, order, update = updates[key]
            update([flats[kind] for kind in order])
            written += [tensor.parameter, *tensor.states.values()]
            put_back(flats[PARAM], tensor.parameter)
        torch.autograd.graph.increment_version(written)


class ByTriton(Elementwise, DeviceUpdater[WorkTable]):
    """Updates on a GPU."""

    def __init__(self, rule: ElementwiseRule, device: torch.device) -> None:
        Elementwise.__init__(self, rule)
        DeviceUpdater.__init__(self, device)
        self._scalars = StepScalars(device)

    def begin_step(self) -> None:
        self._scalars = StepScalars(self.device)

    def of_group(self, work: GroupWork) -> TileUpdate:
        for _, _, hyper in work.spans:  # before the first tile: one table of scalars for all tiles
            self._scalars.row(hyper)
        return super().of_group(work)

    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        """Update tensors in place: those that can be batched in launches of many."""
        launches_of_many, single = divided(tensors, self._format_of)
        for batch in launches_of_many:  # before the first launch: one table of scalars for all
            for tensor in batch.tensors:
                self._scalars.row(tensor.hyper)
        for batch in launches_of_many:
            with self.order.turn():
                self._update_batch(batch, scale)
        super().of_tensors(single, scale)

    def _format_of(self, tensor: ResidentTensor) -> UpdateFormat:
        assert tensor.parameter.grad is not None
        return self.rule.format(tensor.parameter.dtype, tensor.parameter.grad.dtype, tuple(tensor.states))

    def _update_batch(self, batch: Batch, scale: GradScale) -> None:
        sizes = tuple((tensor.parameter.numel(), self._scalars.row(tensor.hyper)) for tensor in batch.tensors)
        work = self.kept((batch.fmt.span_alignment, *sizes), lambda: work_of_tensors(sizes, batch.fmt))
        seeds = [self._rounding_seed(tensor) for tensor in batch.tensors] if batch.fmt.stochastic else []
        pointer_offsets = self.order.reads(self.sent_pointer_offsets.of(batch, sizes, seeds))
        slots, scalars = batch.fmt.slots.of(batch.tensors[0].flats()), self.order.reads(self._scalars.table(batch.fmt))
        first, key = seeds[0] if seeds else (0, None)
        elementwise_triton.update(
            batch.fmt, slots, work, scalars, scale=scale, key=key, first_element=first, pointer_offsets=pointer_offsets
        )
        torch.autograd.graph.increment_version(batch.written)

    def _rounding_seed(self, tensor: ResidentTensor) -> RoundingSeed:
        extent = tensor.extent
        return RoundingSeed(extent.first_element, rounding_key(self.rule.formats.seed, tensor.hyper.step, extent.chunk))

    def table_of(self, spans: Sequence[Span], fmt: UpdateFormat) -> WorkTable:
        """Return the table of work for these spans, made on the first call."""
        return self.kept((fmt.span_alignment, *spans), lambda: work_table(spans, fmt))

    def update(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale, extent: Extent) -> None:
        """Update spans of elements, in one launch; in one for each step number if rounding depends on it.

        More elements than `PIECE_NUM_ELEMENTS`, as a large resident parameter has, go piece by piece. So do elements
        that plain PyTorch updates, in smaller pieces; then the host waits for the device.
        """
        fmt, slots = self.rule.slots(flat)
        numel, at_most = slots.param.numel(), PIECE_BY_REFERENCE if fmt.by_reference else PIECE_NUM_ELEMENTS
        for begin in range(0, numel, at_most):
            end = min(begin + at_most, numel)
            part = slots if end - begin == numel else slots.part(begin, end)
            at = Extent(extent.chunk, extent.first_element + begin)
            for of_step, key in launches(self.rule, fmt, clipped(spans, begin, end), at):
                rows = [Span(begin, end, self._scalars.row(hyper)) for begin, end, hyper in of_step]
                if not rows:
                    continue
                first = at.first_element if key is not None else 0
                with self.order.turn():
                    table = self.order.reads(self._scalars.table(fmt))
                    if fmt.by_reference:
                        reference.chunk_update(fmt, part, rows, table, scale=scale, key=key, first_element=first)
                        continue
                    work = self.table_of(rows, fmt)
                    elementwise_triton.update(fmt, part, work, table, scale=scale, key=key, first_element=first)


def update_on_cpu(
    rule: ElementwiseRule, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale, extent: Extent
) -> None:
    """Update spans of elements of flat tensors, on the CPU's threads."""
    fmt, slots = rule.slots(flat)
    for part, key in launches(rule, fmt, spans, extent):
        hypers = list(dict.fromkeys(hyper for _, _, hyper in part))
        rows = {hyper: row for row, hyper in enumerate(hypers)}
        in_rows = [Span(begin, end, rows[hyper]) for begin, end, hyper in part]
        if in_rows:
            first = extent.first_element if key is not None else 0
            table = fmt.scalar_table(hypers)
            chunk_update(fmt, slots, in_rows, table, scale=scale, key=key, first_element=first)


def launches(
    rule: ElementwiseRule, fmt: UpdateFormat, spans: Spans, extent: Extent
) -> Iterator[tuple[Spans, RoundingKey | None]]:
    """Yield spans that one launch may update; with stochastic rounding those of one step, which is part of the key."""
    if not fmt.stochastic:
        yield spans, None
        return
    for step in dict.fromkeys(hyper.step for _, _, hyper in spans):
        yield [span for span in spans if span[2].step == step], rounding_key(rule.formats.seed, step, extent.chunk)


def clipped(spans: Spans, at: int, until: int) -> Spans:
    """Cut spans to the elements `[at, until)`, counted from `at`."""
    return [(max(b - at, 0), min(e, until) - at, hyper) for b, e, hyper in spans if e > at and b < until]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keyword arguments of the constructors of elementwise rules, see `AdamW`."""

    maximize: bool = False
    update_on: str = DEVICE
    overlap: str = update_mode.AUTO
    undoable: bool = False
    moments_dtype: torch.dtype | str = torch.float32
    master_weights: bool | str | None = None
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    foreach: bool | None = None
    fused: bool | None = None
    differentiable: bool = False


Init = TypeVar("Init", bound=Callable[..., None])


def with_options(init: Init) -> Init:
    """Show a constructor's `**options` as the single `Options` in `help` and `inspect.signature`."""
    signature = inspect.signature(init)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = inspect.signature(Options).parameters.values()
    init.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
    return init


MOMENTS_FORMATS: Mapping[torch.dtype | str, str] = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    FLOAT32: FLOAT32,
    BFLOAT16: BFLOAT16,
    INT8: INT8,
}
"""A user's name for the moments' format -> the format."""


@dataclass(frozen=True)
class Formats:
    """The formats of states, and the rounding of values.

    Attributes:
        stochastic: round values stored in bf16 (parameters without a master, moments) stochastically.
        seed: the seed of those random bits.
    """

    states: StateFormat
    stochastic: bool
    seed: int

    @staticmethod
    def of(
        moments_dtype: torch.dtype | str,
        master_weights: bool | str | None,
        stochastic_rounding: bool,
        rounding_seed: int,
    ) -> Formats:
        """Return the formats that a user asks for.

        Raises:
            OptionsError: there is no such format of moments or masters, or not with the other options.
        """
        stochastic_rounding = flag({"stochastic_rounding": stochastic_rounding}, "stochastic_rounding")
        if isinstance(rounding_seed, bool) or not isinstance(rounding_seed, int):
            raise OptionsError(f"rounding_seed is {shown(rounding_seed)}; allowed: a whole number")
        if not isinstance(moments_dtype, str | torch.dtype) or moments_dtype not in MOMENTS_FORMATS:
            raise OptionsError(
                f'moments_dtype is {moments_dtype!r}; allowed: torch.float32, torch.bfloat16 and "int8" (blocks of 8 '
                "bits with a scale each)"
            )
        moments = MOMENTS_FORMATS[moments_dtype]
        if not (master_weights is None or isinstance(master_weights, bool) or master_weights in (SPLIT, FLOAT32)):
            raise OptionsError(f'master_weights is {master_weights!r}; allowed: True, False, "{SPLIT}" and "{FLOAT32}"')
        if master_weights == SPLIT and (stochastic_rounding or moments == INT8):
            raise OptionsError(
                f'master_weights="{SPLIT}" needs parameters rounded to nearest and fp32 or bf16 moments; use '
                f'master_weights="{FLOAT32}"'
            )
        if master_weights is None:
            master_weights = not stochastic_rounding
        if master_weights is True:
            master_weights = FLOAT32 if stochastic_rounding else SPLIT
        states = StateFormat(moments, master_weights or NONE)
        return Formats(states, stochastic_rounding, rounding_seed)

    @cache  # noqa: B019
    def of_kernel(
        self, kernel: type[UpdateFormat], param_dtype: torch.dtype, grad_dtype: torch.dtype, kinds: tuple[str, ...]
    ) -> UpdateFormat:
        """Return a kernel's format for parameters of a dtype that have these kinds of states.

        Raises:
            OptionsError: there is no such kernel; the message names those that exist.
        """
        has_moments = set(kinds) - {MASTER, MASTER_LOW} and param_dtype != torch.float64
        moments = self.states.moments if has_moments else FLOAT32
        in_bf16 = param_dtype == torch.bfloat16 or moments == BFLOAT16
        try:
            return kernel(
                param_dtype,
                grad_dtype,
                moments=cast(MomentsFormat, moments),
                master=MASTER in kinds or MASTER_LOW in kinds,
                split=MASTER_LOW in kinds,
                rounding="stochastic" if self.stochastic and in_bf16 else "nearest",
            )
        except ValueError as error:
            text = str(error).replace("master=", "master_weights=").replace("rounding='stochastic'", _STOCHASTIC)
            raise OptionsError(text.replace("rounding='nearest'", "stochastic_rounding=False")) from error


def formats_in(options: Mapping[str, Any]) -> tuple[Formats, dict[str, Any]]:
    """Split a constructor's `Options` into the formats that they ask for and the remaining options.

    Raises:
        OptionsError: there is no such format (see `Formats.of`).
    """
    rest = asdict(Options(**options))
    names = ("moments_dtype", "master_weights", "stochastic_rounding", "rounding_seed")
    return Formats.of(*[rest.pop(name) for name in names]), rest


_STOCHASTIC = "stochastic_rounding=True"
