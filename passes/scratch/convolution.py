"""Scratch bytes of convolutions and their backwards on the CPU, where oneDNN computes them.

oneDNN reads and writes blocks of 16 channels, or channels last, and reorders what comes otherwise: image, filters and
result at a time, and a backward sums filters' gradients per group of threads. With AVX-512 in float32 that is known
for most convolutions (`_forward`, `_backward`), and in bfloat16 without AMX (`scratch.convolution_bf16`); for the
others there is an upper bound (`_bound`).

Sources: ATen's `Convolution.cpp` and `mkldnn/Conv.cpp`, ideep's `conv.hpp`, oneDNN's
`jit_avx512_common_conv_kernel.cpp` and `brgemm_convolution_bwd_strided.cpp`; checked by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from chunkc.passes.scratch.convolution_bf16 import backward_nbytes, forward_nbytes, has_known_kernels
from chunkc.passes.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, nbytes_of
from chunkc.passes.scratch.onednn_convolution import (
    BARRIER,
    BLOCK,
    MAX_CHANNELS,
    MIN_POSITIONS,
    PADDING,
    PAGE,
    Convolution,
    addresses_nbytes,
    by_blocks,
    may_unfold,
    padded,
)

_SMALL_DEPTHWISE = 25
"""Up to so many pixels per filter, depthwise filters' gradients may be summed over blocked images."""
_WIDEST_DEPTHWISE = 3
"""Depthwise filters up to so wide have a kernel of their own for images with channels last."""
_MIN_ROWS_TO_SHARE = 9
"""Fewer rows of a result than this are never divided among threads when filters' gradients are summed."""


def convolution_nbytes(convolution: Convolution) -> int:
    """Bytes that a convolution holds inside, beyond its result."""
    c = convolution
    copies = _copied_nbytes(c.input, c.weight)
    found = _forward(c) if c.has_known_kernels else forward_nbytes(c) if has_known_kernels(c) else None
    if found is not None and c.may_unfold_images:
        found = max(found, _by_columns_nbytes(c))
    return copies + (_bound(c, backward=False) if found is None else found)


def convolution_backward_nbytes(convolution: Convolution, grad: Tensor, outputs: Sequence[Tensor | None]) -> int:
    """Bytes that a convolution's backward holds inside.

    Args:
        grad: of the result.
        outputs: gradients of images, filters and bias; None for those not asked for.
    """
    c = convolution
    if _is_depthwise_last(c):
        return _depthwise_last_nbytes(c, grad, outputs)
    copies = contiguous_copy_nbytes(grad, c.input, c.weight)
    known = c.has_known_kernels and c.is_square and c.fills_blocks
    known &= c.input.is_contiguous() and c.weight.is_contiguous()
    if c.reads_plain_image:
        known &= c.input.shape[1] in (1, 3)
    elif c.pixels == 1 and c.input.shape[1] < BLOCK:
        known &= all(size % step == 0 for size, step in zip(c.input.shape[2:], c.stride, strict=True))
    found = _backward(c, outputs) if known else backward_nbytes(c, outputs) if has_known_kernels(c) else None
    return copies + (_bound(c, backward=True) if found is None else found)


def _copied_nbytes(*operands: Tensor) -> int:
    """Copies of operands that are neither contiguous nor channels last."""
    formats = (torch.contiguous_format, torch.channels_last)
    return contiguous_copy_nbytes(
        *(t for t in operands if t.dim() != 4 or not any(t.is_contiguous(memory_format=f) for f in formats))
    )


def _forward(c: Convolution) -> int | None:
    """A forward, exactly (transposed with a stride: a bound); None where that is not known.

    Plain images: image, filters and result are reordered, and the result goes back to its plain format when the others
    are gone. With channels last, only filters are, and few bytes are for each thread.
    """
    if c.transposed and c.groups != 1:
        return None
    edges = zip(c.weight.shape[2:], c.input.shape[2:], strict=True)
    if c.groups == 1 and not c.transposed and any(k > size + 1 for k, size in edges):
        return None
    image, filters = c.input, c.weight
    last = [not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in (image, filters)]
    if any(last) and image.dim() == 4:
        if c.groups != 1:
            known = c.depthwise and c.fills_blocks and c.pixels > 1 and last[0]
            return c.blocked_filters_nbytes if known else None
        if not all(last[i] or t.is_contiguous() for i, t in enumerate((image, filters))):
            return None
        copies = 0 if last[0] else nbytes_of(image)
        copies += 0 if last[1] or c.pixels == 1 else nbytes_of(filters)
        if c.transposed:
            return copies + _transposed_last_nbytes(c) if c.strided else None
        if c.is_direct:
            return copies
        if c.result_shape[-1] == 1:
            return None  # of one column, images may be copied
        blocked = by_blocks(c.result_shape[1]) * image.shape[1] * c.pixels * 4
        return copies + blocked + PAGE + addresses_nbytes(c.pixels) * c.num_threads
    if not (image.is_contiguous() and filters.is_contiguous() and c.fills_blocks):
        return None
    if c.is_direct:
        return 0
    result = c.blocked_nbytes(c.result_shape)
    read = c.blocked_filters_nbytes + (0 if c.reads_plain_image else c.blocked_nbytes(image.shape))
    if not c.transposed:
        padded_bias = c.padded_bias_nbytes if c.bias else 0
        return max(c.gathered_nbytes + padded_bias + read + result - c.result_nbytes, result)
    biased = result + PADDING if c.bias else 0  # the bias is added to a copy
    if c.strided:
        return max(_strided_nbytes(c) + PADDING + biased, 2 * c.result_nbytes)
    return max(biased + read + result - c.result_nbytes, result)


def _transposed_last_nbytes(c: Convolution) -> int:
    """A transposed forward with a stride, of channels last; a bound for one or 40 and more result channels.

    Nothing is reordered but filters; a bias is added to a copy where the last rows of the result are uneven.
    """
    uneven = c.result_shape[-1] % c.stride[-1] != 0
    biased = c.result_nbytes + PADDING if c.bias and uneven else 0
    return _strided_nbytes(c) - nbytes_of(c.input) + PADDING + biased


def _backward(c: Convolution, outputs: Sequence[Tensor | None]) -> int:
    """A backward of contiguous images and filters.

    First the images' gradient: incoming gradient and filters are reordered, and the result goes back to its plain
    format; with a stride, through channels last and one more copy. Then, beside it, the filters' gradient: image and
    incoming gradient are reordered, threads that share filters sum theirs, and the sum goes back.
    """
    if c.is_direct:
        return 0
    d_image, d_filters, d_bias = (0 if t is None else nbytes_of(t) for t in outputs)
    given = d_image + d_filters + d_bias
    image, grad = c.blocked_nbytes(c.input.shape), c.blocked_nbytes(c.result_shape)
    filters = c.blocked_filters_nbytes
    peaks = [0]
    if d_image:
        if c.strided and not c.transposed:
            peaks += [_strided_nbytes(c) + d_image - given, 3 * d_image - given]
        else:
            whole = filters if not c.reads_plain_image else filters // c.channels[0] * padded(c.channels[0])
            peaks += [grad + whole + image - given, image + d_image - given]
        if c.may_unfold_for_images:
            peaks += [_by_columns_nbytes(c) + d_image - given]
    if d_filters:
        inside = filters + _summed_nbytes(c) - d_filters
        if c.unfolds_for_filters:
            inside = _summed_columns_nbytes(c)
        elif not c.depthwise or c.pixels <= _SMALL_DEPTHWISE:
            inside += grad + (0 if c.reads_plain_image else image) + c.gathered_nbytes
        peaks += [inside, filters + d_bias]
    return max(peaks)


def _is_depthwise_last(c: Convolution) -> bool:
    """Whether a backward is one of depthwise filters over images with channels last, and known."""
    is_last = not c.input.is_contiguous() and c.input.is_contiguous(memory_format=torch.channels_last)
    known = c.has_known_kernels and c.depthwise and not c.transposed and c.input.dim() == 4
    known &= c.weight.shape[-1] >= max(_WIDEST_DEPTHWISE, c.stride[-1])
    return known and is_last and not (c.unfolds_for_filters or c.may_unfold_for_images)


def _depthwise_last_nbytes(c: Convolution, grad: Tensor, outputs: Sequence[Tensor | None]) -> int:
    """Filters are reordered; for the gradient of wide ones as if each were a dense block of 16 by 16 channels. That of
    narrow ones is summed per thread: a bound."""
    _, d_filters, d_bias = (0 if t is None else nbytes_of(t) for t in outputs)
    filters, nbytes = c.blocked_filters_nbytes, c.blocked_filters_nbytes
    if d_filters and c.weight.shape[-1] > _WIDEST_DEPTHWISE:
        nbytes = (BLOCK * BLOCK + 1) * filters + d_bias
    elif d_filters:
        nbytes = 2 * filters + d_bias + c.num_threads * (filters + 4 * padded(c.groups)) + 2 * PADDING
    if grad.is_contiguous(memory_format=torch.channels_last):
        return nbytes
    return nbytes + (1 if grad.is_contiguous() else 2) * nbytes_of(grad)


def _strided_nbytes(c: Convolution) -> int:
    """What a strided backward for images (or transposed forward) holds beside its result.

    What is read, with channels last; filters in blocks; and for every thread one padded image of what is read, a page
    that marks what of it was copied, addresses of blocks, and rows of the result where they cannot be written in place.
    """
    read, written = tuple(c.result_shape[1:]), tuple(c.input.shape[1:])
    if c.transposed:
        read, written = written, read
    channels, numel = read[0], 1
    for size, whole, kernel, step, before in zip(
        read[1:], written[1:], c.weight.shape[2:], c.stride, c.padding, strict=True
    ):
        after = (size - 1) * step + kernel - whole - before
        numel *= size + sum(max(0, kernel - 1 - pad) // step for pad in (before, after))
    thread = addresses_nbytes(c.pixels * -(-channels // MAX_CHANNELS)) + PAGE + 4 * padded(numel * channels, PAGE)
    uneven = written[-1] % c.stride[-1] != 0
    if uneven:
        thread += 4 * padded(padded(written[-1], c.stride[-1]) * c.stride[-1] * written[0], PAGE)
    filters = c.blocked_filters_nbytes
    if c.groups == 1:
        filters = channels * by_blocks(written[0]) * c.pixels * 4
    images = c.input.shape[0] * math.prod(read) * 4
    return images + filters + (4 if uneven else 3) * PAGE + c.num_threads * thread


def _summed_nbytes(c: Convolution) -> int:
    """Filters' gradients of all threads but one of those that share filters, and the bias's likewise.

    Depthwise ones are products with unfolded images, and every thread has all of them. Of filters of one pixel it is
    not known how many threads share, nor for transposed ones: all, as a bound.
    """
    if c.depthwise:
        return _summed_columns_nbytes(c)
    outside = c.groups * padded(max(c.channels) if c.transposed else c.channels[1])
    num_sharing = c.num_threads if c.pixels == 1 or c.transposed else _num_sharing(c)
    summed = c.padded_bias_nbytes if c.bias else 0
    if num_sharing > 1:
        summed += (num_sharing - 1) * (c.blocked_filters_nbytes + 4 * outside) + BARRIER
        summed += PADDING if c.transposed else 0
    num_blocks = -(-c.channels[1] // BLOCK) * c.groups
    if c.bias and (num_blocks < c.num_threads or (c.pixels == 1 and num_blocks % c.num_threads)):
        summed += max(1, c.num_threads // num_blocks - 1) * 4 * outside + (2 + num_blocks) * PAGE
    return summed


def _summed_columns_nbytes(c: Convolution) -> int:
    """Filters' gradients as products with unfolded images; a bound where a thread unfolds an image part by part.

    One thread works where there is one image of one group.
    """
    num_threads = 1 if c.input.shape[0] * c.groups == 1 else c.num_threads
    itemsize = max(4, c.input.itemsize)
    unfolded = c.unfolded_nbytes // c.input.itemsize * itemsize
    return num_threads * (unfolded + 4 * c.weight.numel() * itemsize) + (3 if c.transposed else 2) * PADDING


def _by_columns_nbytes(c: Convolution) -> int:
    """A convolution, or its images' gradient, as a product with unfolded images; a bound, as above."""
    return c.num_threads * c.unfolded_nbytes + (2 if c.transposed else 1) * PADDING


def _num_sharing(c: Convolution) -> int:
    """How many threads share filters, each with images (or rows of them) of its own.

    oneDNN divides threads among images, blocks of result channels and blocks of image channels so that they read and
    write little, and then so that none has much more to do than the others.
    """
    if c.num_threads < c.groups:
        return 1
    num_threads = c.num_threads // c.groups
    inside, outside = (-(-channels // BLOCK) for channels in c.channels)
    rows = c.result_shape[2] if len(c.result_shape) == 4 else 1
    by_rows = rows > _MIN_ROWS_TO_SHARE
    images = c.input.shape[0]
    shares = images * rows if by_rows else images
    image_size = math.prod(c.input.shape[2:]) // (c.input.shape[2] if by_rows else 1)
    result_size = c.positions // (rows if by_rows else 1)
    image_shares = images * c.input.shape[2] if by_rows else images
    block = c.input.shape[1] if c.reads_plain_image else BLOCK

    def traffic(split: tuple[int, int, int]) -> int:
        sharing, by_result, by_image = split
        read = -(-image_shares // sharing) * -(-inside // by_image) * block * image_size // math.prod(c.stride)
        read += -(-shares // sharing) * -(-outside // by_result) * BLOCK * result_size
        return read + 8 * -(-outside // by_result) * -(-inside // by_image) * c.pixels * block * BLOCK

    def work(split: tuple[int, int, int]) -> int:
        sharing, by_result, by_image = split
        return -(-shares // sharing) * -(-outside // by_result) * -(-inside // by_image)

    most = images * max(1, rows // _MIN_ROWS_TO_SHARE if by_rows else 1)

    def splits() -> Iterator[tuple[int, int, int]]:
        for sharing in range(1, min(num_threads, most) + 1):
            rest = num_threads // sharing
            for by_result in range(1, min(rest, outside) + 1):
                yield sharing, by_result, min(rest // by_result, inside)

    best, least = (1, 1, 1), traffic((1, 1, 1))
    for split in splits():
        if traffic(split) <= least:
            best, least = split, traffic(split)
    least_work = work(best)
    for split in splits():
        even = work(split) <= least_work and traffic(split) < 1.1 * least
        if even or 4 * work(split) <= 3 * least_work:
            best, least_work = split, work(split)
    sharing = best[0]
    if c.num_threads // 2 < sharing < c.num_threads:
        sharing = min(most, c.num_threads)
    return sharing


def _unfolded_nbytes(c: Convolution) -> int:
    """ATen's own convolution of one small image (`ConvolutionMM2d.cpp`): its columns, unless they are the image; where
    formats differ, everything may be copied. Exact in plain formats, unless an image's gradient alone is asked for."""
    is_image = c.pixels == 1 and c.input.shape[2:] == torch.Size(c.result_shape[2:])
    columns = 0 if is_image else c.input.shape[0] * c.input.shape[1] * c.pixels * c.positions
    if c.input.is_contiguous() and c.weight.is_contiguous():
        return 4 * columns
    return 4 * (columns + math.prod(c.result_shape)) + nbytes_of(c.input) + nbytes_of(c.weight)


def _bound(c: Convolution, *, backward: bool) -> int:
    """Upper bound of any convolution.

    In low precision the channels of each group are padded and accumulators are float32. A backward sums one filters'
    gradient per thread. Where ATen's own kernel may run instead, it unfolds the images: one column per position, as
    long as a filter.
    """
    low = c.input.dtype in LOW_PRECISION
    itemsize = 4 if low else c.input.itemsize
    channels_last = not c.input.is_contiguous()
    unfolds = may_unfold(c.input, c.weight, c.groups)
    if unfolds and c.input.dtype == torch.float32 and c.input.dim() < 5 and not c.transposed and max(c.dilation) == 1:
        return _unfolded_nbytes(c)  # no other kernel may run
    if c.depthwise and not (channels_last and backward):  # blocks span the groups
        num_groups, block, filters = 1, 16, padded(c.groups, 64) * c.pixels * itemsize
    else:
        num_groups, block = (1, 16) if c.depthwise else (c.groups, 32 if low else 16)
        block_w = 16 if c.depthwise else block
        outside = -(-c.weight.shape[0] // c.groups)
        outer, inner = max(padded(outside, block_w), by_blocks(outside)), padded(c.weight.shape[1], block_w)
        filters = c.groups * outer * inner * c.pixels * itemsize
        filters *= 2 if channels_last else 1

    def blocked(shape: Sequence[int]) -> int:
        channels = num_groups * padded(-(-shape[1] // num_groups), block)
        return shape[0] * channels * math.prod(shape[2:]) * itemsize

    nbytes = blocked(c.input.shape) + blocked(c.result_shape) + filters
    nbytes += c.num_threads * (1 << 20 if low else 64 << 10) + (c.num_threads * filters if backward else 0)
    if c.positions < MIN_POSITIONS:
        nbytes += 2 * filters  # as a matrix product, which packs its operands
    if (backward or c.transposed) and not low and torch.backends.cpu.get_cpu_capability() != "AVX512":
        nbytes += blocked(c.input.shape) + blocked(c.result_shape) + filters  # reordered once more
        nbytes += c.num_threads * (2 * filters + (64 << 10)) if backward else 0
    if max(c.dilation) > 1:  # each thread may unfold an image
        nbytes += c.num_threads * c.input.shape[1] * c.pixels * c.positions * itemsize
    if c.transposed and c.strided and not (backward or low):
        nbytes += _strided_nbytes(c)
    if backward and c.strided:
        nbytes += 2 * nbytes_of(c.input)  # its gradient comes with channels last, and is copied
        if not (low or c.transposed or unfolds):
            nbytes += _strided_nbytes(c)
    if backward and c.reads_plain_image and not (low or unfolds):
        nbytes += 2 * c.num_threads * filters  # unfolded, and summed per thread
    if backward and (c.unfolds_for_filters or c.may_unfold_for_images):
        nbytes += _summed_columns_nbytes(c)
    elif c.may_unfold_images:
        nbytes += _by_columns_nbytes(c)
    if c.pixels == 1 and tuple(c.input.shape[2:]) != tuple(c.result_shape[2:]):
        nbytes += c.num_threads * c.input.shape[1] * c.positions * itemsize  # the pixels it reads, gathered
    if c.transposed or unfolds:
        channels, positions = c.input.shape[1], c.positions
        if c.transposed:
            channels, positions = c.result_shape[1], math.prod(c.input.shape[2:])
        nbytes += c.input.shape[0] * channels * c.pixels * positions * c.input.itemsize + nbytes_of(c.weight)
    return nbytes
