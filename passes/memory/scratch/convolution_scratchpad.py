"""Scratchpads of oneDNN's convolutions, besides reordered images, filters and results. AVX-512 only.

Sources: oneDNN's `jit_avx512_common_conv_kernel.cpp`, `jit_avx512_core_bf16_conv_kernel.cpp`,
`jit_avx512_core_bf16_1x1_conv_kernel.cpp`, `jit_brgemm_conv_utils.cpp`, `brgemm_convolution_bwd_strided.cpp` and
`gemm_convolution_utils.cpp`; checked by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from chunkc.passes.memory.scratch.onednn_convolution import (
    BLOCK,
    MAX_CHANNELS,
    PADDING,
    PAGE,
    SUM_ITEMSIZE,
    WIDEST_DEPTHWISE,
    Convolution,
    addresses_nbytes,
    by_blocks,
    padded,
)

_BARRIER = 2 * PAGE + PADDING
"""Bytes of the buffer in which threads wait for each other before they sum filters' gradients."""
_MIN_ROWS_TO_SHARE = 9
"""Fewer rows of a result than this are never divided among threads when filters' gradients are summed."""
_WHOLE_PIXELS, _WHOLE_CHANNELS = 9, 384
"""Up to so many pixels and channels, filters with channels last are not divided into parts of one row."""
_MAX_POSITIONS = 32
"""Positions that a kernel of filters of one pixel handles at a time."""
_MAX_TRANSPOSED_EDGE = 14
"""Larger gradients of filters of one pixel are not transposed."""
_WORKING_SET_NBYTES = 48 << 10
_CLOSE = 1_000_000
"""Costs that differ by less than one in so many may come out in either order in oneDNN's floats."""
_FEW_POSITIONS = 256
"""With fewer positions per thread, every thread unfolds images of its own for the filters' gradients."""

_HARDLY_MORE = 2

Split = tuple[int, int, int]
"""Threads that share filters, parts by result channels, and parts by image channels."""


def forward_nbytes(c: Convolution) -> int:
    """A forward in blocks: padded bias, pixels gathered, float32 sums."""
    nbytes = gathered_nbytes(c)
    low = c.itemsize < SUM_ITEMSIZE
    if c.bias and c.depthwise and (low or c.groups % BLOCK):
        nbytes += padded(c.groups) * SUM_ITEMSIZE + PADDING
    elif c.bias and not c.depthwise and c.outside % BLOCK:
        nbytes += c.groups * padded(c.outside) * c.itemsize + PADDING
    return nbytes + (_stored_nbytes(c) if low and c.pixels == 1 and c.groups == 1 else 0)


def last_nbytes(c: Convolution) -> int:
    """A forward with channels last: addresses of blocks, and in bfloat16 float32 sums of a row. Of
    groups without lanes, and of one channel, each thread copies an image."""
    if c.depthwise:
        return padded(c.groups) * SUM_ITEMSIZE + PADDING if c.bias and c.itemsize < SUM_ITEMSIZE else 0
    if c.fills_lanes:
        return 0
    nbytes = PAGE + addresses_nbytes(c.pixels) * c.num_threads
    if (not c.lanes and c.itemsize < SUM_ITEMSIZE) or (c.inside == 1 and c.groups == 1):
        numel = math.prod(size + 2 * pad for size, pad in zip(c.read, c.padding, strict=True))
        nbytes += c.num_threads * (16 * PAGE + c.itemsize * padded(c.groups * c.inside * numel, PAGE))
    if c.itemsize == SUM_ITEMSIZE:
        return nbytes
    in_place = (c.written[-1] - 1) * c.stride[-1] < c.read[-1]
    in_place &= max(c.dilation) == 1
    whole = c.pixels == 1 or (in_place and c.pixels <= _WHOLE_PIXELS and c.inside <= _WHOLE_CHANNELS)
    return nbytes if whole else nbytes + _row_nbytes(c, c.outside, c.written[-1])


def strided_nbytes(c: Convolution) -> int:
    """An images' gradient with a stride, without what it reads: filters in blocks; and for every thread one padded
    image of what is read, a page that marks what of it was copied, addresses of blocks, and rows of the result where
    they cannot be written in place."""
    numel = 1
    for size, kernel, step, before, after in zip(c.written, c.kernel, c.stride, c.padding, c.after, strict=True):
        numel *= size + sum(max(0, kernel - 1 - pad) // step for pad in (before, after))
    pairs = 1 if c.itemsize == SUM_ITEMSIZE else 2
    outside, inside = c.groups * c.outside, c.groups * c.inside
    thread = addresses_nbytes(c.pixels * -(-c.outside // MAX_CHANNELS)) + PAGE
    thread += c.itemsize * padded(numel * padded(outside, pairs), PAGE)
    thread += 3 * addresses_nbytes(c.pixels) + PADDING if len(c.kernel) == 3 else 0  # a bound for volumes
    width, step = c.read[-1], c.stride[-1]
    uneven = width % step != 0
    if uneven:
        itemsize = SUM_ITEMSIZE if c.bias or c.groups > 1 else c.itemsize
        rows = 3 if c.depthwise else 1  # a bound
        thread += rows * itemsize * padded(padded(width, step) * step * inside, PAGE)
    block = pairs if c.groups == 1 or c.depthwise else BLOCK
    filters = c.groups * padded(c.outside, block) * by_blocks(c.inside) * c.pixels * c.itemsize
    nbytes = filters + (max(2, len(c.kernel)) + (2 if uneven else 1)) * PAGE + c.num_threads * thread
    return nbytes if pairs == 1 else nbytes + _row_nbytes(c, c.inside, -(-width // step))


def columns_nbytes(c: Convolution, columns_nbytes: int, num_sums: int) -> int:
    """A convolution, or its images' gradient, as a product with unfolded images; a bound where parts are unfolded.

    Args:
        columns_nbytes, num_sums: columns, and sums in bfloat16, of a thread.
    """
    low = c.itemsize < SUM_ITEMSIZE
    sums = num_sums * SUM_ITEMSIZE if low else 0
    bias = c.groups * padded(max(c.inside, c.outside)) * SUM_ITEMSIZE if c.bias and low else 0
    return c.num_threads * (columns_nbytes + sums + PADDING) + bias + 2 * PADDING


def filters_columns_nbytes(c: Convolution) -> int:
    """Filters' gradients as products with unfolded images; a bound where a thread unfolds an image part by part.

    One thread works where there is one image of one group, or where positions are many.
    """
    positions = math.prod(c.written[-2:])
    all_work = positions // c.num_threads < _FEW_POSITIONS and (c.num_images > 1 or c.groups > 2)
    num_threads = c.num_threads if all_work else 1
    filters = c.filters_nbytes // c.itemsize * SUM_ITEMSIZE
    sums = 4 * num_threads if c.itemsize == SUM_ITEMSIZE else 2 * num_threads + 2
    low = c.itemsize < SUM_ITEMSIZE
    bias = c.groups * padded(c.outside) * SUM_ITEMSIZE + PADDING if c.bias and low else 0
    aligned = 2 + num_threads * (low + c.last) + 2 * c.transposed
    unfolded = c.unfolded_nbytes + (c.inside * c.pixels * c.positions * c.itemsize if c.last else 0)
    return num_threads * unfolded + sums * filters + bias + aligned * PADDING


def gathered_nbytes(c: Convolution) -> int:
    """Filters of one pixel with a stride first gather the pixels that they read, each thread those of one image."""
    if c.pixels != 1 or not c.strided:
        return 0
    return c.num_threads * padded(c.inside) * c.positions * c.itemsize + PADDING


def filters_nbytes(c: Convolution) -> int:
    """Filters' gradients in blocks, with what oneDNN sums and transposes."""
    if c.depthwise and not (c.is_dense_depthwise or (c.last and c.kernel[-1] > WIDEST_DEPTHWISE)):
        return (c.num_threads * (c.pixels + 1) + 1) * SUM_ITEMSIZE * padded(c.groups) + 3 * PADDING
    if c.itemsize == SUM_ITEMSIZE:
        return _summed_nbytes(c)
    if c.pixels == 1 and c.groups == 1:
        return _one_pixel_nbytes(c)
    return max(_transposed_nbytes(c, split) for split in _splits(c))


def _row_nbytes(c: Convolution, channels: int, columns: int) -> int:
    """Float32 sums of a row, of each thread."""
    return PAGE + SUM_ITEMSIZE * c.num_threads * min(MAX_CHANNELS, padded(channels)) * columns


def _stored_nbytes(c: Convolution) -> int:
    """Of filters of one pixel in bfloat16: float32 sums of each thread; a bound."""
    positions = padded(c.positions, _MAX_POSITIONS) + _MAX_POSITIONS
    return SUM_ITEMSIZE * c.num_threads * positions * padded(c.outside) + PADDING


def _blocks(c: Convolution) -> tuple[int, int]:
    """Blocks of image and of result channels of one group."""
    return (1 if c.sums_plain_image else -(-c.inside // BLOCK)), -(-c.outside // BLOCK)


def _summed_nbytes(c: Convolution) -> int:
    """Float32: filters' gradients of all threads but one of those that share filters, and the bias's likewise.

    Of filters of one pixel it is not known how many threads share: all, as a bound.
    """
    inside = c.inside if c.sums_plain_image else padded(c.inside)
    bias = SUM_ITEMSIZE * c.groups * padded(c.outside)
    few = c.groups == 1 and c.inside < BLOCK and not c.sums_plain_image
    num_sharing = _most_sharing(c) if c.pixels == 1 or len(c.kernel) == 3 else _num_sharing(c)
    num_sharing = min(c.num_threads, c.num_images * c.positions) if few else num_sharing
    summed = bias + PADDING if c.bias and c.outside % BLOCK else 0
    if num_sharing > 1:
        summed += (num_sharing - 1) * (bias * inside * c.pixels + bias) + _BARRIER + PADDING * c.transposed
    num_blocks = -(-c.outside // BLOCK) * c.groups
    if c.bias and (few or num_blocks < c.num_threads or num_blocks % c.num_threads):
        summed += max(1, c.num_threads // num_blocks - 1) * bias + (2 + num_blocks + few) * PAGE
    return summed + gathered_nbytes(c)


def _one_pixel_nbytes(c: Convolution) -> int:
    """Bfloat16, filters of one pixel: all threads share, and each transposes images and gradient if they are small or
    with channels last; a bound. Where a stride does not divide the image, the kernel of longer filters may run."""
    inside, outside = padded(c.inside), padded(c.outside)
    nbytes = SUM_ITEMSIZE * _most_sharing(c) * outside * (inside + (1 if c.bias else 0)) + _BARRIER
    if c.last or len(c.written) == 1 or min(c.written) <= _MAX_TRANSPOSED_EDGE:
        nbytes += c.num_threads * padded(c.positions, 2) * (inside + outside) * c.itemsize + 2 * PADDING
    nbytes += gathered_nbytes(c) + (2 * PAGE * c.num_threads if len(c.kernel) == 3 else 0)
    if c.bias and c.outside % BLOCK:
        nbytes += outside * c.itemsize + PADDING
    uneven = any(size % step for size, step in zip(c.read, c.stride, strict=True))
    return max(nbytes, *(_transposed_nbytes(c, split) for split in _splits(c))) if uneven else nbytes


def _transposed_nbytes(c: Convolution, split: Split) -> int:
    """Bfloat16: transposed images and gradients, float32 sums of every thread that shares filters, and barriers."""
    sharing, by_result, by_image = split
    outside = c.groups * padded(c.outside)
    images, grads = _transposed_widths(c)
    inside = c.inside if c.sums_plain_image else padded(c.inside)
    read = 0 if c.sums_plain_image and not c.last else sharing * c.groups * inside * images * math.prod(c.read[:-1])
    nbytes = c.itemsize * (read + _guard(c)) + PADDING
    nbytes += c.itemsize * sharing * outside * grads * math.prod(c.written[:-1]) + PADDING
    nbytes += PAGE * (1 + c.groups * sharing * by_image) if by_result > 1 or c.groups > 1 else 0
    nbytes += PAGE * (1 + c.groups * sharing * by_result) if by_image > 1 or c.groups > 1 else 0
    sums = outside * (inside * c.pixels + (1 if c.bias else 0))
    return nbytes + SUM_ITEMSIZE * sharing * sums + _BARRIER


def _transposed_widths(c: Convolution) -> tuple[int, int]:
    """Columns of transposed images (as they are: of a first convolution's) and of the transposed gradient."""
    width, step = c.read[-1], c.stride[-1]
    images = width
    if c.last or not c.sums_plain_image:
        images = padded(-(-width // step) + _guard(c), 2) * step
    return images, padded(c.written[-1], 2)


def _guard(c: Convolution) -> int:
    return padded(max(c.padding[-1], max(0, c.after[-1]) + 1), 2)


def _rows(c: Convolution) -> int:
    return c.written[-2] if len(c.written) > 1 else 1


def _num_sharing(c: Convolution) -> int:
    """How many threads share filters in float32, each with images (or rows of them) of its own.

    oneDNN divides threads so that they read and write little, and then so that none has much more to do than others.
    """
    if c.num_threads < c.groups:
        return 1
    inside, outside = _blocks(c)
    rows = _rows(c)
    by_rows = rows > _MIN_ROWS_TO_SHARE and len(c.written) == 2
    images = c.num_images
    shares = images * rows if by_rows else images
    image_size = math.prod(c.read) // (c.read[-2] if by_rows else 1)
    result_size = c.positions // (rows if by_rows else 1)
    image_shares = images * c.read[-2] if by_rows else images
    block = c.inside if c.sums_plain_image else BLOCK

    def traffic(split: Split) -> int:
        sharing, by_result, by_image = split
        read = -(-image_shares // sharing) * -(-inside // by_image) * block * image_size // math.prod(c.stride)
        read += -(-shares // sharing) * -(-outside // by_result) * BLOCK * result_size
        return read + 8 * -(-outside // by_result) * -(-inside // by_image) * c.pixels * block * BLOCK

    def work(split: Split) -> int:
        sharing, by_result, by_image = split
        return -(-shares // sharing) * -(-outside // by_result) * -(-inside // by_image)

    most = images * max(1, rows // _MIN_ROWS_TO_SHARE if by_rows else 1)
    splits = list(_ways(c, most))
    best = _last_cheapest(splits, traffic)
    least, least_work = traffic(best), work(best)
    for split in splits:
        even = work(split) <= least_work and traffic(split) < 1.1 * least
        if even or 4 * work(split) <= 3 * least_work:
            best, least_work = split, work(split)
    sharing = best[0]
    return min(most, c.num_threads) if c.num_threads // 2 < sharing < c.num_threads else sharing


def _most_sharing(c: Convolution) -> int:
    """Upper bound of the same, where oneDNN reckons otherwise: of all ways that read and write hardly more than the
    best one."""
    if c.num_threads < c.groups:
        return 1
    inside, outside = _blocks(c)
    block = c.inside if c.sums_plain_image else BLOCK
    images, results = block * math.prod(c.read), BLOCK * c.positions

    def traffic(split: Split) -> float:
        sharing, by_result, by_image = split
        of_result, of_image = -(-outside // by_result), -(-inside // by_image)
        data = c.num_images * (of_image * images / math.prod(c.stride) + of_result * results) / sharing
        return data + 8 * of_result * of_image * c.pixels * block * BLOCK

    splits = list(_ways(c, c.num_images * c.positions))
    least = min(map(traffic, splits))
    return max(split[0] for split in splits if traffic(split) <= _HARDLY_MORE * least)


def _splits(c: Convolution) -> list[Split]:
    """How oneDNN may divide threads in bfloat16: the last of the cheapest ways, and those as cheap but for rounding."""
    if c.num_threads < c.groups:
        return [(1, 1, 1)]
    images = c.num_images
    most = images if _sums_whole_images(c) else images * math.prod(c.written[:-1])
    splits = list(_ways(c, most))
    cost = _cost(c, most)
    best = _last_cheapest(splits, cost)
    least = cost(best)
    close = [s for s in splits if s == best or ((cost(s) - least) * _CLOSE < least and cost(s) != least)]
    threads = c.num_threads
    if c.inside < BLOCK and not c.sums_plain_image:
        close.append((min(most, threads), 1, 1))
    return [(min(most, threads) if threads // 2 < s[0] < threads else s[0], *s[1:]) for s in close]


def _ways(c: Convolution, most: int) -> Iterator[Split]:
    inside, outside = _blocks(c)
    num_threads = c.num_threads // c.groups
    for sharing in range(1, min(num_threads, most) + 1):
        rest = num_threads // sharing
        for by_result in range(1, min(rest, outside) + 1):
            yield sharing, by_result, min(rest // by_result, inside)


def _last_cheapest(splits: list[Split], cost: Callable[[Split], int]) -> Split:
    return min(reversed(splits), key=cost)


def _sums_whole_images(c: Convolution) -> bool:
    same = c.read == c.written and not c.strided and 1 not in c.kernel
    same = same and all(p == k // 2 for k, p in zip(c.kernel, c.padding, strict=True))
    if c.sums_plain_image or padded(c.inside) < 128 or not same or len(c.kernel) != 2:
        return False
    row = c.itemsize * BLOCK * sum(_transposed_widths(c))
    return row * max(1, c.padding[0], c.after[0]) <= _WORKING_SET_NBYTES


def _cost(c: Convolution, shares: int) -> Callable[[Split], int]:
    """Bytes read and written as oneDNN weighs them, times a number that is the same for all ways to divide threads."""
    inside, outside = _blocks(c)
    block = c.inside if c.sums_plain_image else BLOCK
    widths, images, steps = _transposed_widths(c), c.num_images, math.prod(c.stride)
    per_image = block * math.prod(c.read[:-1]) * widths[0]
    per_result = BLOCK * math.prod(c.written[:-1]) * widths[1]
    filters = 2 * SUM_ITEMSIZE * outside * BLOCK * inside * block * c.pixels
    data = c.itemsize * (inside * per_image + outside * per_result)
    few = data * images < filters
    wide = max(inside, outside) * filters * (images if few else 1)  # else both terms are per image
    read, grads = wide * inside * per_image * (4 if few else 1), wide * outside * per_result * steps
    sums = (filters if few else data) * inside * outside * c.pixels * block * BLOCK * steps * shares

    def cost(split: Split) -> int:
        share, of_result, of_image = -(-shares // split[0]), -(-outside // split[1]), -(-inside // split[2])
        return share * (read * of_image + grads * of_result) + sums * of_result * of_image

    return cost
