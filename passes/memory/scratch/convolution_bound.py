"""Upper bound of what a convolution takes inside where its kernels are not known: other processors than those with
AVX-512 (in bfloat16: or with AMX), float16, results of a few positions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from chunkc.passes.memory.scratch.convolution_scratchpad import columns_nbytes, filters_columns_nbytes, strided_nbytes
from chunkc.passes.memory.scratch.onednn_convolution import MIN_POSITIONS, Convolution, by_blocks, padded
from chunkc.torch_private import onednn


def bound_nbytes(c: Convolution, *, backward: bool, unfolds: bool) -> int:
    """Upper bound of any convolution.

    In low precision the channels of each group are padded and accumulators are float32. A backward sums one filters'
    gradient per thread. Where ATen's own kernel may run instead (`unfolds`), it unfolds the images: one column per
    position, as long as a filter.
    """
    low = c.itemsize == 2
    itemsize = max(4, c.itemsize)
    if c.depthwise and not (c.last and backward):  # blocks span the groups
        num_groups, block, filters = 1, 16, padded(c.groups, 64) * c.pixels * itemsize
    else:
        num_groups, block = (1, 16) if c.depthwise else (c.groups, 32 if low else 16)
        block_w = 16 if c.depthwise else block
        outer, inner = max(padded(c.outside, block_w), by_blocks(c.outside)), padded(c.inside, block_w)
        filters = c.groups * outer * inner * c.pixels * itemsize
        filters *= 2 if c.last else 1

    def blocked(channels: int, sizes: Sequence[int]) -> int:
        whole = num_groups * padded(-(-c.groups * channels // num_groups), block)
        return c.num_images * whole * prod(sizes) * itemsize

    images, results = blocked(c.inside, c.read), blocked(c.outside, c.written)
    nbytes = images + results + filters
    nbytes += c.num_threads * (1 << 20 if low else 64 << 10) + (c.num_threads * filters if backward else 0)
    if min(c.positions, prod(c.read)) < MIN_POSITIONS:
        nbytes += 4 * filters  # as a matrix product, which packs its operands
    if (backward or c.transposed) and not low and not onednn.uses_avx512():
        nbytes += images + results + filters  # reordered once more
        nbytes += c.num_threads * (2 * filters + (64 << 10)) if backward else 0
    if c.strided and (backward or c.transposed):
        nbytes += strided_nbytes(c) + c.results_nbytes
        nbytes += 2 * max(c.images_nbytes, c.results_nbytes)  # a gradient comes with channels last, and is copied
    if backward and c.reads_plain_image and not low:
        nbytes += 2 * c.num_threads * filters  # unfolded, and summed per thread
    nbytes += columns_nbytes(c, c.unfolded_nbytes // c.itemsize * itemsize, c.positions * c.outside)
    nbytes += filters_columns_nbytes(c) if backward and c.unfolds_for_filters else 0
    if len(c.kernel) == 3 and c.last and not low and not onednn.uses_avx2():
        nbytes += c.num_threads * c.inside * c.pixels * c.positions * itemsize  # a whole volume is unfolded
    if unfolds or c.transposed:
        nbytes += c.num_images * c.groups * c.unfolded_nbytes + c.filters_nbytes
    return 2 * nbytes if low and len(c.kernel) == 3 else nbytes
