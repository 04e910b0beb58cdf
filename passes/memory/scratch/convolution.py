"""Scratch bytes of convolutions and their backwards on the CPU, where oneDNN or ATen computes them.

oneDNN reads and writes blocks of channels, or channels last, and reorders what comes otherwise: image, filters and
result at a time. On top it takes a scratchpad (`scratch.convolution_scratchpad`), mostly for threads that sum filters'
gradients. These rules are those of AVX-512, in bfloat16 without AMX: exact for most convolutions, and else bounds. On
other processors there is a wide bound (`scratch.convolution_bound`).

Sources: ATen's `Convolution.cpp`, `ConvolutionMM2d.cpp`, `ConvolutionMM3d.cpp` and `mkldnn/Conv.cpp`, ideep's
`conv.hpp`; checked by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chunkc.passes.memory.scratch import convolution_scratchpad as scratchpad
from chunkc.passes.memory.scratch.convolution_bound import bound_nbytes
from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.onednn_convolution import (
    BLOCK,
    PADDING,
    SUM_ITEMSIZE,
    WIDEST_DEPTHWISE,
    Convolution,
    by_blocks,
    padded,
)
from chunkc.torch_private import onednn

_MANY_IMAGES = 16
"""From so many on, oneDNN computes also filters of one pixel with one thread."""
_SMALL_IMAGE = 20480
"""Numbers of one image (of a volume: but for its last dimension) up to which ATen computes by itself."""
_SMALL_EDGE = 3
"""It does so for filters up to so wide or high."""


@dataclass(frozen=True)
class Operands:
    """Tensors of a convolution, or of the one that a backward belongs to, and its numbers.

    Attributes:
        image: [N, C, *spatial].
        filters: [out, C / groups, *kernel]; transposed [C, out / groups, *kernel].
    """

    image: Tensor
    filters: Tensor
    numbers: Convolution


def operands(
    image: Tensor,
    filters: Tensor,
    result_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    transposed: bool,
    bias: bool,
    num_threads: int,
) -> Operands:
    """With the numbers read off the tensors. One number for all dimensions is allowed, as for ATen."""
    last = _is_last(image) or _is_last(filters)
    stride, padding, dilation = (
        tuple(numbers) * (image.dim() - 2) if len(numbers) == 1 else tuple(numbers)
        for numbers in (stride, padding, dilation)
    )
    numbers = Convolution(
        transposed,
        image.shape[0],
        groups,
        image.shape[1] // groups,
        result_shape[1] // groups,
        tuple(image.shape[2:]),
        tuple(result_shape[2:]),
        tuple(filters.shape[2:]),
        stride,
        padding,
        dilation,
        image.itemsize,
        last,
        bias,
        num_threads,
    )
    return Operands(image, filters, numbers.mirrored() if transposed else numbers)


def convolution_nbytes(o: Operands) -> int:
    """Bytes that a convolution holds inside, beyond its result."""
    c = o.numbers
    if o.image.numel() == 0:
        return _copies(c, o.image, o.filters)
    in_aten = _runs_in_aten(o)
    if in_aten and c.itemsize >= SUM_ITEMSIZE:
        return _in_aten_nbytes(o, None, ())
    found = _images_gradient(c, forward=True) if c.transposed else _forward(c)
    if in_aten or not (c.is_usual and _is_known(o)):
        found = max(found, bound_nbytes(c, backward=False, unfolds=in_aten))
    groups = c.filters_nbytes if c.transposed and c.groups > 1 else 0  # copied, group by group
    return _copies(c, o.image, o.filters) + groups + found


def convolution_backward_nbytes(o: Operands, grad: Tensor, outputs: Sequence[Tensor | None]) -> int:
    """Bytes that a convolution's backward holds inside.

    Args:
        grad: of the result.
        outputs: gradients of images, filters and bias; None for those not asked for.
    """
    c = o.numbers
    if o.image.numel() == 0:
        return _copies(c, o.image, o.filters, grad)
    in_aten = _runs_in_aten(o)
    if in_aten and c.itemsize >= SUM_ITEMSIZE:
        return _in_aten_nbytes(o, grad, outputs)
    d_image, d_filters, d_bias = (0 if t is None else nbytes_of(t) for t in outputs)
    peaks = [0]
    if d_image:
        inside = _forward(replace(c, bias=False)) if c.transposed else _images_gradient(c)
        peaks.append(inside - d_filters - d_bias + (PADDING if c.transposed and c.last else 0))
    if d_filters:
        peaks.append(_filters_gradient(replace(c, bias=False) if c.transposed else c, d_bias))
    gives_pixels = bool(d_image) and c.reads_plain_image and 1 in (c.inside, c.written[-1])
    if in_aten or gives_pixels or not (c.is_usual and _is_known(o)):
        peaks.append(bound_nbytes(c, backward=True, unfolds=in_aten))
    return _copies(c, o.image, o.filters, grad) + max(peaks)


def _forward(c: Convolution) -> int:
    """Image, filters and result are reordered, and the result goes back to its plain format when the others are gone;
    with channels last, only filters are."""
    if c.last:
        return _forward_filters(c) + scratchpad.last_nbytes(c)
    image = 0 if c.reads_plain_image else c.blocked_images_nbytes
    given = c.results_nbytes
    result = c.blocked_results_nbytes
    peaks = [result]
    if c.lanes and not c.unfolds_images:
        peaks.append(scratchpad.forward_nbytes(c) + image + _forward_filters(c) + result - given)
    if c.may_unfold_images:
        peaks.append(scratchpad.columns_nbytes(c, c.unfolded_nbytes, c.positions * c.outside))
    if c.depthwise and len(c.kernel) == 3:
        peaks += [c.images_nbytes + _forward_filters(c), 2 * given]
    return max(peaks)


def _images_gradient(c: Convolution, *, forward: bool = False) -> int:
    """As a forward from results to images; with a stride, through channels last and one more copy. Where this is a
    transposed convolution's forward, a bias may be added to a copy in float32."""
    biased = forward and c.bias
    given = c.images_nbytes
    copied = given if c.strided or c.last else c.blocked_images_nbytes
    added = copied // c.itemsize * SUM_ITEMSIZE + PADDING if biased else 0
    m = replace(c.mirrored(), bias=False)
    filters = _images_filters(c)
    peaks = [0]
    if c.may_unfold_for_images and not c.last:
        columns = c.unfolded_nbytes // c.itemsize * SUM_ITEMSIZE
        peaks.append(added + scratchpad.columns_nbytes(c, columns, math.prod(c.read) * c.inside))
    if c.strided and not (c.fills_lanes or (c.depthwise and c.itemsize == SUM_ITEMSIZE)):
        read = 0 if c.last else c.results_nbytes
        uneven = c.read[-1] % c.stride[-1] != 0
        strided = scratchpad.strided_nbytes(replace(c, bias=biased))
        peaks.append(strided + read + (PADDING if forward else 0) + (added if uneven or c.groups > 1 else 0))
        return max(peaks) if c.last else max(*peaks, 2 * given)
    if c.last:
        inside = scratchpad.last_nbytes(m)
        return max(*peaks, filters + (added if c.groups > 1 else 0) + inside + (PADDING if inside else 0))
    image = c.blocked_images_nbytes
    peaks.append(2 * image if biased and c.groups > 1 else image)
    if c.lanes and not c.unfolds_images:
        stored = scratchpad.forward_nbytes(m)
        peaks.append(added + c.blocked_results_nbytes + filters + image + stored - given)
    return max(peaks)


def _filters_gradient(c: Convolution, d_bias: int) -> int:
    """Image and incoming gradient are reordered, threads that share filters sum theirs, and the sum goes back."""
    given = c.filters_nbytes
    peaks = [given + d_bias]
    if c.unfolds_for_filters or c.may_unfold_for_filters:
        peaks.append(scratchpad.filters_columns_nbytes(c))
    if not c.unfolds_for_filters:
        filters = _filters_gradients(c)
        inside = filters + scratchpad.filters_nbytes(c) - given + (PADDING if c.transposed and c.itemsize == 2 else 0)
        if not c.last:
            inside += c.blocked_results_nbytes + (0 if c.sums_plain_image else c.blocked_images_nbytes)
        peaks += [inside, filters + d_bias + (given if c.last else 0)]
    return max(peaks)


def _forward_filters(c: Convolution) -> int:
    if c.depthwise:
        return _dense_nbytes(c) if c.fills_groups else padded(c.groups) * c.pixels * c.itemsize
    pairs = c.itemsize == 2
    inside, outside = c.inside, c.outside
    if c.groups > 1:
        if not c.last or c.fills_lanes:
            return c.filters_nbytes
        inside, outside = padded(inside) if inside < BLOCK else inside, by_blocks(outside)
    elif c.last:
        outside = by_blocks(outside)
    else:
        outside = padded(outside)
        inside = inside if c.reads_plain_image else padded(inside)
    return c.groups * outside * (padded(inside, 2) if pairs else inside) * c.pixels * c.itemsize


def _images_filters(c: Convolution) -> int:
    if c.is_dense_depthwise and not c.covers_image:
        return _dense_nbytes(c)
    if c.groups == 1 and not c.last:
        return padded(c.outside) * padded(c.inside) * c.pixels * c.itemsize
    return _forward_filters(c.mirrored())


def _dense_nbytes(c: Convolution) -> int:
    """Of depthwise filters that are computed as groups are."""
    return c.groups * BLOCK * BLOCK * c.pixels * c.itemsize


def _filters_gradients(c: Convolution) -> int:
    """Bytes of filters' gradients in blocks; with channels last, groups are padded each, also wide depthwise ones."""
    if c.depthwise and not (c.is_dense_depthwise or (c.last and c.kernel[-1] > WIDEST_DEPTHWISE)):
        return padded(c.groups) * c.pixels * c.itemsize
    if c.groups > 1 and not c.last:
        return c.filters_nbytes
    inside = c.inside if c.sums_plain_image else padded(c.inside)
    return c.groups * padded(c.outside) * inside * c.pixels * c.itemsize


def _format(dims: int) -> torch.memory_format:
    return torch.channels_last_3d if dims == 5 else torch.channels_last


def _is_last(tensor: Tensor) -> bool:
    """Whether channels are last, and this is no plain format too."""
    dims = tensor.dim()
    return dims in (4, 5) and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=_format(dims))


def _copies(c: Convolution, *tensors: Tensor) -> int:
    """Bytes of copies in the format that is computed in."""
    format_of = _format if c.last else lambda dims: torch.contiguous_format
    return sum(nbytes_of(t) for t in tensors if not t.is_contiguous(memory_format=format_of(t.dim())))


def _is_known(o: Operands) -> bool:
    """Whether the kernels are known that oneDNN picks for its instructions."""
    if o.image.dtype == torch.bfloat16:
        return onednn.multiplies_bfloat16() and not onednn.multiplies_tiles()
    return onednn.uses_avx512() and o.image.dtype == torch.float32


def _runs_in_aten(o: Operands) -> bool:
    """Whether ATen computes by itself: other dtypes, small single images, one pixel on one thread, old processors."""
    if not onednn.computes(o.image.dtype):
        return True
    if o.image.dtype != torch.float32:
        return False
    c, shape = o.numbers, o.image.shape
    edges = c.kernel[-2:] if len(c.kernel) > 1 else (1, *c.kernel)  # in one dimension, images are of one row
    plain = not c.strided and max(c.dilation) == 1
    if plain and set(edges) == {1} and c.num_threads == 1 and shape[0] < _MANY_IMAGES:
        return True
    big = (b - a >= step for a, b, step in zip(c.after, c.padding, c.stride, strict=True))  # padded after it is
    if c.transposed and any(big):
        return True
    small = shape[0] == 1 and math.prod(shape[:4]) <= _SMALL_IMAGE and c.groups == 1
    return small and min(edges) <= _SMALL_EDGE


def _in_aten_nbytes(o: Operands, grad: Tensor | None, outputs: Sequence[Tensor | None]) -> int:
    """ATen unfolds images, a batch or one at a time, and takes one group after the other; volumes' groups at once.

    Args:
        grad: of the result, in a backward.
        outputs: gradients of images, filters and bias, in a backward; None for those not asked for.
    """
    c = o.numbers
    tensors = [o.image, o.filters, *([] if grad is None else [grad])]
    is_volume, dilated = len(c.kernel) == 3, max(c.dilation) > 1
    at_once = is_volume and not (dilated or c.transposed)
    one_image = (dilated and not c.transposed) or (c.transposed and (is_volume or grad is not None))
    columns = (1 if one_image else c.num_images) * (c.groups if at_once else 1)
    columns *= c.inside * c.pixels * c.positions * c.itemsize
    if c.pixels == 1 and c.read == c.written and not (c.strided or c.transposed) and not (at_once and c.groups > 1):
        columns = c.images_nbytes if at_once and outputs and outputs[0] is not None else 0  # it is its own columns
    elif outputs and outputs[1] is None and not (is_volume or dilated or c.transposed):
        columns = 0  # gradients of images are folded as they are computed
    nbytes = columns + _copies(replace(c, last=c.last and not is_volume), *tensors)
    if dilated or (c.transposed and is_volume):
        nbytes += (c.groups * c.outside if dilated else math.prod(c.read)) * c.itemsize  # of a bias
    if c.pixels == 1 and c.transposed and is_volume:
        nbytes = max(nbytes, c.results_nbytes)
    if c.groups == 1 or at_once:
        return nbytes
    parts = c.images_nbytes + c.results_nbytes + c.filters_nbytes
    result = max(c.images_nbytes, c.results_nbytes) if c.transposed else c.results_nbytes
    joined = result if grad is None else nbytes_of(o.image) + c.filters_nbytes
    joined += c.groups * max(c.inside, c.outside) * c.itemsize if grad is not None else 0
    return max(joined, nbytes + parts // c.groups)
