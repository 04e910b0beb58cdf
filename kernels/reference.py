"""Update in plain PyTorch: the reference for tests of every other kernel. Neither fast nor frugal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chunkc.ir.layout import PARAM
from chunkc.ir.states import UNSIGNED, scale_of
from chunkc.kernels.formats import (
    NO_SCALE,
    QUANT_BLOCK,
    GradScale,
    RoundingKey,
    Slots,
    Span,
    UpdateFormat,
    checked_spans,
)
from chunkc.kernels.quant import dequantise, quantise
from chunkc.kernels.rounding import (
    FIRST_MOMENT_STREAM,
    PARAM_STREAM,
    random_bits16,
    round_nearest,
    round_stochastic,
)
from chunkc.kernels.split import join_master, split_master


@torch.no_grad()
def chunk_update(
    fmt: UpdateFormat,
    slots: Slots,
    spans: Sequence[Span],
    scalars: Tensor,
    *,
    scale: GradScale = NO_SCALE,
    key: RoundingKey | None = None,
    first_element: int = 0,
) -> None:
    """Update a tile of a chunk group by a format's rule, in place, on any device.

    Elements outside the spans stay as they are. Each operation is in the format's `wide_dtype`, rounded by itself, in
    the order that every fused kernel keeps, so they compute the same bits. The update uses the new moments before they
    are rounded.

    Args:
        fmt: terms of its rule that are added up are left out.
        scalars: `[num_groups, num_scalars]`, see `UpdateFormat.scalar_table`.
        scale: factors of the gradients, and whether to skip the update.
        key: for random bits of stochastic rounding; None without it.
        first_element: index in the chunk group of the tile's first element.

    Raises:
        ValueError: see `check_update` and `check_spans`.
    """
    for span in checked_spans(fmt, slots, spans, scalars, scale, key, first_element):
        _update_span(fmt, slots, span, scalars[span.group], scale, key, first_element)


def _update_span(
    fmt: UpdateFormat,
    slots: Slots,
    span: Span,
    scalars: Tensor,
    scale: GradScale,
    key: RoundingKey | None,
    first_element: int,
) -> None:
    states, part = slots.states(), slice(span.begin, span.end)
    blocks = slice(span.begin // QUANT_BLOCK, -(-span.end // QUANT_BLOCK))

    def load_moment(kind: str) -> Tensor:
        codes, scales = states[kind][part], states.get(scale_of(kind))
        if scales is None:
            return codes.to(fmt.wide_dtype)
        return dequantise(codes, scales[blocks], signed=kind not in UNSIGNED)

    def store(tensor: Tensor, value: Tensor) -> None:
        if scale.found_inf is not None:
            value = torch.where(scale.found_inf != 0, tensor, value)
        tensor.copy_(value)

    def store_rounded(tensor: Tensor, value: Tensor, stream: int) -> None:
        if tensor.dtype != torch.bfloat16:
            store(tensor, value.to(tensor.dtype))
        elif key is None:
            store(tensor, round_nearest(value))
        else:
            index = torch.arange(first_element + span.begin, first_element + span.end, device=tensor.device)
            store(tensor, round_stochastic(value, random_bits16(index, key, stream)))

    def store_moment(kind: str, value: Tensor, stream: int) -> None:
        codes, scales = states[kind][part], states.get(scale_of(kind))
        if scales is None:
            store_rounded(codes, value, stream)
        else:
            new_codes, new_scales = quantise(value, signed=kind not in UNSIGNED)
            store(codes, new_codes)
            store(scales[blocks], new_scales)

    wide = slots.grad[part].to(fmt.wide_dtype)
    for factor in (scale.unscale, scale.clip):
        if factor is not None:
            wide = wide * factor
    target = (slots.param if slots.master is None or fmt.split else slots.master)[part].to(fmt.wide_dtype)
    if fmt.split:
        assert slots.master is not None
        target = join_master(slots.param[part], slots.master[part])
    moments = [load_moment(kind) for kind in fmt.kinds]
    l2 = fmt.needs_l2(fmt.scalars(*scalars.tolist()))
    new_target, *rest = fmt.arithmetic.in_torch([wide, target, *moments], scalars, l2=l2)
    for stream, (kind, value) in enumerate(zip(fmt.kinds, rest), start=FIRST_MOMENT_STREAM):
        if kind not in fmt.kept:
            store_moment(kind, value, stream)
    if PARAM in fmt.kept:
        return
    if slots.master is not None:
        store(slots.master[part], split_master(new_target)[1] if fmt.split else new_target)
    store_rounded(slots.param[part], new_target, PARAM_STREAM)
