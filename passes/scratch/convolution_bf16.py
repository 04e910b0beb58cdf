"""Scratch bytes of bfloat16 convolutions on processors that have AVX-512 with bfloat16, but no AMX.

oneDNN reorders images, filters and results as it does in float32 (`scratch.convolution`), and takes a scratchpad on
top: filters' gradients are summed in float32, from transposed copies of images and gradients. With AMX it runs other
kernels, which are not known here; nor are those that emulate bfloat16.

Exact for filters of more than one pixel, but for two upper bounds. With channels last, oneDNN estimates which blocks
are fastest, and a block of sums is counted where the filters may be divided. Backwards with a stride count the largest
block. Filters of one pixel have an upper bound: what each thread gathers, transposes and sums.

Sources: oneDNN's `jit_avx512_core_bf16_conv_kernel.cpp`, `jit_avx512_core_bf16_1x1_conv_kernel.cpp`,
`jit_brgemm_conv_utils.cpp` and `jit_brgemm_conv_bwd_utils.cpp`; checked by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from chunkc.passes.scratch.copies import nbytes_of
from chunkc.passes.scratch.onednn_convolution import (
    ADDRESS_NBYTES,
    BARRIER,
    BLOCK,
    MAX_CHANNELS,
    MIN_POSITIONS,
    PADDING,
    PAGE,
    WIDEST_BFLOAT16_PATCHES,
    Convolution,
    addresses_nbytes,
    by_blocks,
    padded,
)
from chunkc.torch_private.engine import multiplies_bfloat16, multiplies_tiles

_ITEMSIZE, _SUM_ITEMSIZE = 2, 4
_MAX_EDGE = 7
"""Of filters; longer ones were not measured."""
_WHOLE_PIXELS, _WHOLE_CHANNELS = 9, 384
"""Up to so many pixels and channels, filters with channels last are not divided into parts of one row."""
_MAX_POSITIONS = 32
"""Positions that a kernel of filters of one pixel handles at a time."""
_MAX_TRANSPOSED_EDGE = 14
"""Larger gradients of filters of one pixel are not transposed."""
_WORKING_SET_NBYTES = 48 << 10
_CLOSE = 1_000_000
"""Costs that differ by less than one in so many may come out in either order in oneDNN's floats."""


def has_known_kernels(c: Convolution) -> bool:
    """Whether a convolution, or its backward, runs kernels that are known here."""
    known = c.input.dtype == torch.bfloat16 and c.input.dim() == 4 and c.groups == 1 and not c.transposed
    known &= torch.backends.cpu.get_cpu_capability() == "AVX512" and multiplies_bfloat16()
    if not known or multiplies_tiles():
        return False
    edges = tuple(c.weight.shape[2:])
    max_edge = WIDEST_BFLOAT16_PATCHES if c.reads_plain_image and c.reads_patches else _MAX_EDGE
    inside = all(k <= max_edge and p <= k // 2 for k, p in zip(edges, c.padding, strict=True))
    inside &= all(k <= size + 1 for k, size in zip(edges, c.input.shape[2:], strict=True))
    inside &= all(after <= k // 2 for k, after in zip(edges, _after(c), strict=True))
    return inside and max(c.dilation) == 1 and c.input.shape[1] > 1 and c.positions >= MIN_POSITIONS


def forward_nbytes(c: Convolution) -> int | None:
    """Bytes that a forward holds beyond its result; None where that is not known."""
    last = [not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in (c.input, c.weight)]
    if not all(is_last or t.is_contiguous() for is_last, t in zip(last, (c.input, c.weight), strict=True)):
        return None
    if any(last):
        if c.result_shape[3] == 1:
            return None  # of one column, images may be copied
        copies = 0 if last[0] else nbytes_of(c.input)
        return copies + (0 if last[1] or c.pixels == 1 else nbytes_of(c.weight)) + _channels_last_nbytes(c)
    result = c.blocked_nbytes(c.result_shape)
    filters = padded(c.result_shape[1]) * c.pixels * _ITEMSIZE
    filters *= padded(c.input.shape[1], 2) if c.reads_plain_image else padded(c.input.shape[1])
    images = 0 if c.reads_plain_image else c.blocked_nbytes(c.input.shape)
    inside = c.gathered_nbytes + _padded_bias_nbytes(c) + (_stored_nbytes(c, c.result_shape) if c.pixels == 1 else 0)
    return max(inside + images + filters + result - c.result_nbytes, result)


def backward_nbytes(c: Convolution, outputs: Sequence[Tensor | None]) -> int | None:
    """Bytes that a backward of contiguous images and filters holds; None where that is not known.

    First the images' gradient, then, beside it, that of the filters, as in float32.
    """
    outside = c.result_shape[1]
    if not (c.input.is_contiguous() and c.weight.is_contiguous()):
        return None
    uneven = any(size % step for size, step in zip(c.input.shape[2:], c.stride, strict=True))
    if c.input.shape[1] < BLOCK and (outside % BLOCK if c.pixels > 1 else uneven):
        return None
    d_image, d_filters, d_bias = (0 if t is None else nbytes_of(t) for t in outputs)
    given = d_image + d_filters + d_bias
    image, grad = c.blocked_nbytes(c.input.shape), c.blocked_nbytes(c.result_shape)
    peaks = [0]
    if d_image and c.strided:
        peaks += [_strided_nbytes(c) + d_image - given, 3 * d_image - given]
    elif d_image:
        whole = padded(outside) * padded(c.input.shape[1]) * c.pixels * _ITEMSIZE
        stored = _stored_nbytes(c, c.input.shape) if c.pixels == 1 else 0
        peaks += [grad + whole + image + stored - given, image + d_image - given]
    if d_filters:
        filters = c.blocked_filters_nbytes
        summed = _one_pixel_summed_nbytes(c) if c.pixels == 1 else max(_summed_nbytes(c, s) for s in _splits(c))
        images = 0 if c.reads_plain_image else image
        peaks += [grad + images + filters + summed - d_filters, filters + d_bias]
    return max(peaks)


def _after(c: Convolution) -> tuple[int, ...]:
    """Padding behind the image that a result needs, per dimension."""
    sizes = zip(c.result_shape[2:], c.stride, c.weight.shape[2:], c.input.shape[2:], c.padding, strict=True)
    return tuple(max(0, (size - 1) * step + k - whole - before) for size, step, k, whole, before in sizes)


def _padded_bias_nbytes(c: Convolution) -> int:
    outside = c.result_shape[1]
    return padded(outside) * _ITEMSIZE + PADDING if c.bias and outside % BLOCK else 0


def _buffer_nbytes(c: Convolution, channels: int, columns: int) -> int:
    """Float32 sums of a row, of each thread."""
    return PAGE + _SUM_ITEMSIZE * c.num_threads * min(MAX_CHANNELS, padded(channels)) * columns


def _channels_last_nbytes(c: Convolution) -> int:
    """Reordered filters, and addresses of the blocks that each thread multiplies."""
    inside, outside = c.input.shape[1], c.result_shape[1]
    filters = by_blocks(outside) * padded(inside, 2) * c.pixels * _ITEMSIZE
    columns = c.result_shape[3]
    in_place = (columns - 1) * c.stride[1] < c.input.shape[3]
    whole = c.pixels == 1 or (in_place and c.pixels <= _WHOLE_PIXELS and inside <= _WHOLE_CHANNELS)
    buffer = 0 if whole else _buffer_nbytes(c, outside, columns)
    return filters + PAGE + addresses_nbytes(c.pixels) * c.num_threads + buffer


def _strided_nbytes(c: Convolution) -> int:
    """What a strided backward for images holds; as in float32, and a row of float32 sums."""
    inside, outside = c.input.shape[1], c.result_shape[1]
    numel = 1
    sizes = zip(c.result_shape[2:], c.weight.shape[2:], c.stride, c.padding, c.input.shape[2:], strict=True)
    for size, kernel, step, before, whole in sizes:
        after = (size - 1) * step + kernel - whole - before
        numel *= size + sum(max(0, kernel - 1 - pad) // step for pad in (before, after))
    addresses = padded(c.pixels * -(-outside // MAX_CHANNELS) * ADDRESS_NBYTES, PAGE)
    thread = -(-addresses // ADDRESS_NBYTES) * ADDRESS_NBYTES + PAGE
    thread += _ITEMSIZE * padded(numel * padded(outside, 2), PAGE)
    width, step = c.input.shape[3], c.stride[1]
    uneven = width % step != 0
    if uneven:
        thread += _ITEMSIZE * padded(padded(width, step) * step * inside, PAGE)
    filters = padded(outside, 2) * by_blocks(inside) * c.pixels * _ITEMSIZE
    read = math.prod(c.result_shape) * _ITEMSIZE
    pages = (4 if uneven else 3) * PAGE
    return read + filters + pages + c.num_threads * thread + _buffer_nbytes(c, inside, -(-width // step))


def _stored_nbytes(c: Convolution, written: Sequence[int]) -> int:
    """Of filters of one pixel: float32 sums of each thread; a bound."""
    positions = padded(c.positions, _MAX_POSITIONS) + _MAX_POSITIONS
    return _SUM_ITEMSIZE * c.num_threads * positions * padded(written[1]) + PADDING


def _one_pixel_summed_nbytes(c: Convolution) -> int:
    """Of filters of one pixel: all threads share, and each transposes images and gradient if they are small; a bound.

    Where a stride does not divide the image, the kernel of longer filters may run.
    """
    inside, outside = padded(c.input.shape[1]), padded(c.result_shape[1])
    nbytes = _SUM_ITEMSIZE * c.num_threads * outside * (inside + (1 if c.bias else 0)) + BARRIER
    if min(c.result_shape[2:]) <= _MAX_TRANSPOSED_EDGE:
        nbytes += c.num_threads * padded(c.positions, 2) * (inside + outside) * _ITEMSIZE + 2 * PADDING
    nbytes += c.gathered_nbytes + _padded_bias_nbytes(c)
    return max(nbytes, *(_summed_nbytes(c, split) for split in _splits(c))) if c.strided else nbytes


def _transposed_widths(c: Convolution) -> tuple[int, int]:
    """Columns of transposed images (as they are: of a first convolution's) and of the transposed gradient."""
    width, step = c.input.shape[3], c.stride[1]
    images = width
    if not c.reads_plain_image:
        images = padded(-(-width // step) + _guard(c), 2) * step
    return images, padded(c.result_shape[3], 2)


def _guard(c: Convolution) -> int:
    return padded(max(c.padding[1], _after(c)[1] + 1), 2)


def _summed_nbytes(c: Convolution, split: tuple[int, int, int]) -> int:
    """Transposed images and gradients, float32 sums of every thread that shares filters, and barriers."""
    sharing, by_result, by_image = split
    outside = padded(c.result_shape[1])
    images, grads = _transposed_widths(c)
    inside = c.input.shape[1] if c.reads_plain_image else padded(c.input.shape[1])
    read = 0 if c.reads_plain_image else sharing * inside * images * c.input.shape[2]
    nbytes = _ITEMSIZE * (read + _guard(c)) + PADDING
    nbytes += _ITEMSIZE * sharing * outside * grads * c.result_shape[2] + PADDING
    nbytes += PAGE * (1 + sharing * by_image) if by_result > 1 else 0
    nbytes += PAGE * (1 + sharing * by_result) if by_image > 1 else 0
    sums = outside * (inside * c.pixels + (1 if c.bias else 0))
    return nbytes + _SUM_ITEMSIZE * sharing * sums + BARRIER


def _splits(c: Convolution) -> list[tuple[int, int, int]]:
    """How oneDNN may divide threads: those that share filters, by blocks of result channels and of image channels.

    The last of the cheapest, and those that are as cheap but for rounding.
    """
    all_splits = list(_all_splits(c))
    costs = _costs(c, all_splits)
    best = 0
    for index in range(1, len(costs)):
        if costs[index] <= costs[best]:
            best = index
    close = [
        split
        for index, split in enumerate(all_splits)
        if index == best or ((costs[index] - costs[best]) * _CLOSE < costs[best] and costs[index] != costs[best])
    ]
    most, threads = _shares(c), c.num_threads
    return [(min(most, threads) if threads // 2 < s[0] < threads else s[0], *s[1:]) for s in close]


def _shares(c: Convolution) -> int:
    """Parts that threads which share filters may have: images, or their rows."""
    images, rows = c.input.shape[0], c.result_shape[2]
    return images if _sums_whole_images(c) else images * rows


def _sums_whole_images(c: Convolution) -> bool:
    edges = tuple(c.weight.shape[2:])
    same = tuple(c.input.shape[2:]) == tuple(c.result_shape[2:]) and not c.strided and 1 not in edges
    same = same and all(p == k // 2 for k, p in zip(edges, c.padding, strict=True))
    if c.reads_plain_image or padded(c.input.shape[1]) < 128 or not same:
        return False
    row = _ITEMSIZE * BLOCK * sum(_transposed_widths(c))
    return row * max(1, c.padding[0], _after(c)[0]) <= _WORKING_SET_NBYTES


def _all_splits(c: Convolution) -> Iterator[tuple[int, int, int]]:
    inside, outside = _num_blocks(c)
    for sharing in range(1, c.num_threads + 1):
        if sharing > _shares(c):
            return
        rest = c.num_threads // sharing
        for by_result in range(1, min(rest, outside) + 1):
            yield sharing, by_result, min(rest // by_result, inside)


def _num_blocks(c: Convolution) -> tuple[int, int]:
    """Blocks of image and of result channels."""
    inside = 1 if c.reads_plain_image else -(-c.input.shape[1] // BLOCK)
    return inside, -(-c.result_shape[1] // BLOCK)


def _costs(c: Convolution, splits: Sequence[tuple[int, int, int]]) -> list[int]:
    """Per split, bytes read and written as oneDNN weighs them, times a number that is the same for all."""
    inside, outside = _num_blocks(c)
    block = c.input.shape[1] if c.reads_plain_image else BLOCK
    widths, images, shares, steps = _transposed_widths(c), c.input.shape[0], _shares(c), math.prod(c.stride)
    per_image, per_result = block * c.input.shape[2] * widths[0], BLOCK * c.result_shape[2] * widths[1]
    filters = 2 * _SUM_ITEMSIZE * outside * BLOCK * inside * block * c.pixels
    data = _ITEMSIZE * (inside * per_image + outside * per_result)
    few = data * images < filters
    wide = max(inside, outside) * filters * (images if few else 1)  # else both terms are per image
    read, grads = wide * inside * per_image * (4 if few else 1), wide * outside * per_result * steps
    sums = (filters if few else data) * inside * outside * c.pixels * block * BLOCK * steps * shares
    found = []
    for sharing, by_result, by_image in splits:
        share, of_result, of_image = -(-shares // sharing), -(-outside // by_result), -(-inside // by_image)
        found.append(share * (read * of_image + grads * of_result) + sums * of_result * of_image)
    return found
