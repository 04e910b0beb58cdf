"""Bound the scratch bytes of convolutions and their backwards on the CPU, where oneDNN or ATen computes them.

oneDNN picks a kernel, its blocks and how threads share work when it runs, by instruction set, cache and threads. None
of that is modelled. What its kernels take is bounded by what they are given:

- image, filters and result, each padded to blocks of 16 channels; with channels last, filters alone;
- per thread, rows that it gathers, pads or sums;
- for the filters' gradient, a float32 sum for each thread; in 16 bits, its transposed inputs as well;
- for shapes that may lack a direct kernel (`Convolution.usual`), an image unfolded to columns for each thread if that
  is more; for those that certainly do (`unblocked`, `unfolds_filters`, strides with gaps), the columns alone.

`chunkc calibrate --operators` replaces a bound by what was measured. Sources: ATen's `Convolution.cpp`,
`ConvolutionMM2d.cpp`, `ConvolutionMM3d.cpp` and `mkldnn/Conv.cpp`, ideep's `conv.hpp`; of oneDNN, what its kernels
book as scratch and which shapes they refuse, but not how it ranks blocks. The bounds were held against oneDNN's scratch
for some 37,000 calls on one to 16 threads of an AMD EPYC with AVX-512, with all its instructions and under
`ONEDNN_MAX_CPU_ISA` SSE41, AVX2 and AVX512_CORE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import channels_come_last, nbytes_of
from chunkc.passes.memory.scratch.products import gemm_nbytes
from chunkc.torch_private import onednn

_BLOCK = 16
"""Channels of a block."""
_FLOAT32_NBYTES = 4
"""Bytes of an accumulator, and of an element of the filters' gradients that threads sum."""
_PAGE = 4096
_MIB = 1 << 20
_MANY_IMAGES = 16
"""Batch size from which oneDNN, not ATen, computes filters of one pixel on one thread."""
_SMALL_IMAGE, _SMALL_EDGE = 20480, 3
"""Elements of a single image (of a volume: without its last dimension), and height or width of filters, up to which
ATen, not oneDNN, computes."""
_WIDEST_FILTERS, _WIDEST_DEPTHWISE = 13, 3
"""Widths up to which filters, and the gradients of depthwise filters, have a direct kernel."""
_WIDEST_FEW = 7
"""The same without AVX-512, for images of fewer channels than a block."""
_WIDEST_BEYOND = 8
"""Pixels up to which filters without AVX-512 may reach beyond an image."""
_MOST_PADDING = 3
"""Padding up to which filters have a direct kernel without AVX-512."""
_UNMEASURED = 3
"""Factor by which kernels may exceed what is counted here on processors where none was measured."""
_FEWEST_LANES = 4
"""Channels of a group that its direct kernels compute at once with AVX-512."""
_MOST_MULTIPLIED = 16**3
"""Multiplications up to which ATen multiplies matrices in low precision by itself."""
_MIN_POSITIONS = 4
"""Positions of a result from which filters have a direct kernel."""
_MOST_PIXELS = 27
"""Pixels of filters up to which results of one position, too, have a direct kernel."""


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else nbytes_of(tensor)


def _pad(size: int, block: int = _BLOCK) -> int:
    return -(-size // block) * block


@dataclass(frozen=True)
class Convolution:
    """Operands and metadata of a convolution; for a backward, of its forward.

    A transposed convolution is the image gradient of another, and has its metadata.

    Attributes:
        image: [N, C, *spatial].
        filters: [out, C / groups, *kernel]; transposed [C, out / groups, *kernel].
        transposed: whether it is transposed; images and results below are then those of the other.
        groups: their number.
        inside, outside: channels of one group of images, and of results.
        read, written: spatial sizes of images, and of results.
        kernel, stride, padding, dilation: per spatial dimension.
        last: whether it computes with channels last.
        bias: whether it adds a bias, or its backward computes the bias's gradient.
        num_threads: threads that it may use.
        few_colours: whether its image has so few channels that they are read without reordering.
        usual: whether there is a direct kernel, see `_is_usual`.
    """

    image: Tensor
    filters: Tensor
    transposed: bool
    groups: int
    inside: int
    outside: int
    read: tuple[int, ...]
    written: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    last: bool
    bias: bool
    num_threads: int
    few_colours: bool = False
    usual: bool = True

    def mirrored(self) -> Convolution:
        """Exchange images and results."""
        return replace(
            self,
            inside=self.outside,
            outside=self.inside,
            read=self.written,
            written=self.read,
            few_colours=False,
        )

    @property
    def itemsize(self) -> int:
        return self.image.itemsize

    @property
    def low(self) -> bool:
        """Whether it accumulates in a wider dtype than its own."""
        return self.itemsize < _FLOAT32_NBYTES

    @property
    def emulated(self) -> bool:
        """Whether it computes in low precision on a processor without bfloat16 instructions."""
        return self.low and not onednn.multiplies_bfloat16()

    @property
    def measured(self) -> bool:
        """Whether its kernels are among those that were measured, see `_UNMEASURED`."""
        return onednn.is_x86() and not (self.low and onednn.multiplies_tiles())

    @property
    def pixels(self) -> int:
        """Pixels of one filter."""
        return math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """Positions of one result."""
        return math.prod(self.written)

    @property
    def strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def dilated(self) -> bool:
        return max(self.dilation) > 1

    @property
    def gaps(self) -> bool:
        """Whether there are gaps between the pixels of a filter."""
        return any(kernel > 1 and gap > 1 for kernel, gap in zip(self.kernel, self.dilation, strict=True))

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.inside == self.outside == 1

    @property
    def lanes(self) -> int:
        """Channels of a group in one vector. A block holds several depthwise groups."""
        return _BLOCK if self.groups == 1 or self.depthwise else math.gcd(_BLOCK, self.inside, self.outside)

    @property
    def unblocked(self) -> bool:
        """Whether images and filters are unfolded as they are: plain groups without a direct kernel."""
        direct = self.lanes >= _FEWEST_LANES or not self.measured if self.low else self.usual
        return self.groups > 1 and not (direct or self.depthwise or self.last)

    @property
    def block(self) -> int:
        """Channels of a block, to a multiple of which filters are padded."""
        if self.unblocked:
            return self.lanes
        return _BLOCK if self.groups == 1 or onednn.uses_avx512() or not self.usual else _BLOCK // 2

    @property
    def fills_lanes(self) -> bool:
        """Whether groups are as wide as lanes; with AVX-512 such groups have kernels of their own."""
        alike = self.groups > 1 and self.inside == self.outside == self.lanes and onednn.uses_avx512()
        return alike and not (self.transposed and self.last)

    @property
    def strided_kernel(self) -> bool:
        """Whether the gradient of images is certain to have a kernel for its stride, see `_strided`."""
        odd = self.groups == 1 or (self.low and max(self.inside % 4, self.outside % 4) > 0)
        has = onednn.uses_avx2() and self.measured and not self.emulated
        return self.strided and not self.dilated and odd and has

    @property
    def unfolds_filters(self) -> bool:
        """Whether the gradient of filters is certain to have no direct kernel."""
        if self.last or not self.measured:
            return False
        if self.depthwise or (len(self.kernel) == 3 and self.dilation[0] > 1 and not self.low):
            return self.gaps
        odd = self.outside % _BLOCK > 0 or (self.groups > 1 and self.inside % _BLOCK > 0)
        return self.low and odd and (self.groups > 1 or (self.inside < _BLOCK and self.pixels > 1))

    @property
    def sums_colours(self) -> bool:
        """Whether the gradient of filters, too, reads so few channels without reordering."""
        wholes = ((kernel - 1) * gap + 1 for kernel, gap in zip(self.kernel, self.dilation, strict=True))
        padded = any(before > whole // 2 for before, whole in zip(self.padding, wholes, strict=True))
        return self.few_colours and onednn.uses_avx512() and (self.low or (self.inside in (1, 3) and not padded))

    @property
    def image_nbytes(self) -> int:
        return self.image.shape[0] * self.groups * self.inside * math.prod(self.read) * self.itemsize

    @property
    def filters_nbytes(self) -> int:
        return nbytes_of(self.filters)

    @property
    def result_nbytes(self) -> int:
        return self.mirrored().image_nbytes

    @property
    def blocked_image_nbytes(self) -> int:
        channels = _pad(self.groups) if self.depthwise else self.groups * _pad(self.inside, self.lanes)
        return self.image.shape[0] * channels * math.prod(self.read) * self.itemsize

    @property
    def blocked_result_nbytes(self) -> int:
        return self.mirrored().blocked_image_nbytes

    def blocked_filters_nbytes(self, *, summed: bool = False) -> int:
        """Count the bytes of filters in blocks, or if `summed`, of their gradient.

        With channels last, blocks have up to 64 channels of results, and each depthwise group may be padded.
        """
        inside, outside = self.inside, self.outside
        if self.depthwise:
            overlap = all(s < k < n for s, k, n in zip(self.stride, self.kernel, self.read, strict=True))
            wide = summed and (self.kernel[-1] > _WIDEST_DEPTHWISE or not overlap)
            each = self.last and (wide or not self.usual)
            return (self.groups * self.block**2 if each else _pad(self.groups)) * self.pixels * self.itemsize
        if self.groups == 1 or not self.usual or (self.last and (summed or not self.fills_lanes)):
            sizes = (32, 48, 64) if self.last and not summed else ()
            outside = max(_pad(outside, n) for n in (self.block, *sizes) if n == self.block or outside > n * 3 // 4)
            plain = self.sums_colours if summed else self.few_colours
            if not plain and (self.groups > 1 or summed or self.emulated or not self.last):
                inside = _pad(inside, self.block)
        return self.groups * outside * _pad(inside, 2 if self.low else 1) * self.pixels * self.itemsize


def read_convolution(
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
) -> Convolution:
    """Read the metadata off the tensors. As in ATen, a single stride, padding or dilation holds for all dimensions."""
    stride, padding, dilation = (
        tuple(numbers) * (image.dim() - 2) if len(numbers) == 1 else tuple(numbers)
        for numbers in (stride, padding, dilation)
    )
    c = Convolution(
        image,
        filters,
        transposed,
        groups,
        image.shape[1] // groups,
        result_shape[1] // groups,
        tuple(image.shape[2:]),
        tuple(result_shape[2:]),
        tuple(filters.shape[2:]),
        stride,
        padding,
        dilation,
        channels_come_last(image) or channels_come_last(filters),
        bias,
        num_threads,
    )
    c = c.mirrored() if transposed else c
    few = c.inside < _BLOCK if onednn.uses_avx512() and not c.last else c.inside in (1, 3) and not transposed
    few = few and groups == 1 and c.pixels > 1
    return replace(c, few_colours=few, usual=_is_usual(c))


def _is_usual(c: Convolution) -> bool:
    """Whether there is a direct kernel.

    Among the conditions: filters at most a pixel larger than images, padding of at most half a filter, a stride of at
    most the filter's width or 2; if dilated, of 1. Depthwise filters may be larger, and padded more.
    """
    avx512, volume = onednn.uses_avx512(), len(c.kernel) == 3
    odd = c.groups > 1 or (c.pixels == 1 and c.strided) or (c.transposed and c.inside < _BLOCK)
    if not onednn.uses_avx2() or (c.low and onednn.multiplies_tiles()):
        return False
    if (volume and odd) or (c.dilated and (odd or volume or not avx512)):
        return False
    if c.transposed and (c.groups > 1 or c.dilated):
        return False
    if c.lanes < (_FEWEST_LANES if avx512 else 8) or (c.transposed and c.last and c.inside == 1):
        return False
    if c.pixels > 1 and (c.positions < _MIN_POSITIONS or (c.last and 1 in (*c.read[-2:], *c.written[-2:]))):
        return False  # images of one row or column are unfolded
    most = _WIDEST_FILTERS if avx512 or c.inside >= _BLOCK else _WIDEST_FEW
    for kernel, gap, step, before, size in zip(c.kernel, c.dilation, c.stride, c.padding, c.read, strict=True):
        whole = (kernel - 1) * gap + 1
        if before > (whole - 1 if c.depthwise and not c.last else whole // 2) or step > max(whole, 2):
            return False
        if whole > size + (whole if c.depthwise else c.groups == 1 and avx512):
            return False
        if gap > 1 and (step > 1 or before < whole // 2 or whole > size):
            return False
        if kernel > _WIDEST_FILTERS and volume:
            return False
        patches = c.groups == 1 and before == 0 and step >= (2 if most == _WIDEST_FILTERS else kernel)
        if kernel > most and not (c.depthwise or patches):
            return False
        if before > _MOST_PADDING and not avx512:
            return False
    return True


def convolution_nbytes(c: Convolution) -> int:
    """Bound the bytes that a convolution holds inside, beyond its result."""
    nbytes = _copies(c, c.image, c.filters)
    if c.image.numel() == 0:
        return nbytes
    if _runs_in_aten(c):
        return _in_aten_nbytes(c, None, ())
    groups = c.filters_nbytes if c.transposed and c.groups > 1 else 0  # copied, group by group
    return nbytes + groups + _with_slack(c, _image_gradient(c, forward=True) if c.transposed else _forward(c))


def convolution_backward_nbytes(c: Convolution, grad: Tensor, outputs: Sequence[Tensor | None]) -> int:
    """Bound the bytes that a convolution's backward holds inside.

    Args:
        grad: of the result.
        outputs: gradients of images, filters and bias; None for those not asked for.
    """
    nbytes = _copies(c, c.image, c.filters, grad)
    if c.image.numel() == 0:
        return nbytes
    if _runs_in_aten(c):
        return _in_aten_nbytes(c, grad, outputs)
    d_image, d_filters, d_bias = map(_nbytes, outputs)
    c = replace(c, bias=c.bias and not c.transposed)
    peak = 0
    if d_image:  # computed first, before there are other gradients
        peak = (_forward(c) if c.transposed else _image_gradient(c)) - d_filters - d_bias
    if d_filters:
        peak = max(peak, _filter_gradient(c, d_bias))
    return nbytes + _with_slack(c, peak)


def _with_slack(c: Convolution, nbytes: int) -> int:
    """Add bytes for alignment, a padded bias, and constants of products of matrices and kernels for unusual shapes."""
    if not c.measured:
        nbytes *= _UNMEASURED
    thread = 128
    if c.groups == c.positions == 1 and c.image.shape[0] > 1 and c.pixels > _MOST_PIXELS:  # a product of matrices
        thread += 64 * min(1024, _pad(c.inside * c.pixels)) * _FLOAT32_NBYTES
    if not c.usual and c.last:
        thread += 2 * _PAGE * (c.pixels if c.low else 3)
    if not c.usual and (c.low or c.last):
        thread = _MIB if c.low and onednn.multiplies_tiles() else min(thread, _MIB)
    page = 512 if c.unblocked else _PAGE
    return nbytes + page + c.num_threads * thread + _pad(c.groups * c.outside) * _FLOAT32_NBYTES


def _or_unfolded(c: Convolution, direct: int, blocked: int, num_sums: int, *, certain: bool = False) -> int:
    """Bound any kernel for an unusual shape: each thread unfolds an image, and has float32 sums in low precision.

    With channels last, threads pad or transpose their images as well.

    Args:
        certain: whether there is no other kernel.
    """
    wide = c.depthwise and max(c.kernel) > _WIDEST_FILTERS
    beyond = max(kernel - before for kernel, before in zip(c.kernel, c.padding, strict=True))
    wide |= beyond > _WIDEST_BEYOND and not onednn.uses_avx512()
    if c.usual and not wide:
        return direct
    columns = c.inside * c.pixels * math.prod(c.written if c.last else c.written[-2:])
    if c.usual:
        return max(direct, c.num_threads * _FLOAT32_NBYTES * columns)
    sizes = (size + 2 * before for size, before in zip(c.read, c.padding, strict=True))
    image = _pad(c.inside) * math.prod(sizes) if c.last else 0
    unfolded = c.num_threads * _FLOAT32_NBYTES * (columns + image + (num_sums if c.low else 0))
    unfolded += c.filters_nbytes if c.last else 0
    return unfolded if certain else max(direct, unfolded) + blocked


def _forward(c: Convolution) -> int:
    certain = c.low and c.unblocked
    nbytes = _or_unfolded(c, _direct(c), c.blocked_result_nbytes, c.outside * c.positions, certain=certain)
    return nbytes if c.last else max(nbytes, c.result_nbytes)


def _direct(c: Convolution) -> int:
    """Bound a forward by a direct kernel: image, filters and result, each reordered into blocks.

    The result is reordered back to its plain format after the other two are freed. With channels last, only filters are
    reordered.
    """
    filters, result = c.blocked_filters_nbytes(), c.blocked_result_nbytes
    if c.last:
        return filters + c.num_threads * _row(c) + _PAGE * (2 if c.low else 1)
    image = 0 if c.few_colours else c.blocked_image_nbytes
    return max(result, image + filters + result - c.result_nbytes + c.num_threads * _row(c))


def _row(c: Convolution) -> int:
    """Bound the buffers of one thread.

    With channels last, these are addresses of blocks, and sums of a row in low precision; for filters of one pixel, the
    pixels of an image that a stride leaves, and sums of a result in low precision.
    """
    nbytes = _pad(40 * c.pixels, _PAGE) if c.last else 0
    if c.last and c.low and not c.depthwise:
        nbytes += min(64, _pad(c.outside)) * c.written[-1] * _FLOAT32_NBYTES
    if c.pixels == 1 and c.groups == 1 and (not c.last or c.emulated):
        nbytes += _gathered(c) + (_pad(c.positions + 32, 32) * _pad(c.outside) * _FLOAT32_NBYTES if c.low else 0)
    return nbytes


def _gathered(c: Convolution) -> int:
    """Count the bytes of the pixels of one image that filters of one pixel with a stride read."""
    return _pad(c.inside) * c.positions * c.itemsize if c.pixels == 1 and c.strided else 0


def _image_gradient(c: Convolution, *, forward: bool = False) -> int:
    """Bound the gradient of images, computed as a forward from results to images.

    With a stride it is computed with channels last, and one more copy.

    Args:
        forward: whether this is a transposed convolution's forward, which may add a bias to a float32 copy.
    """
    given, image = c.image_nbytes, c.blocked_image_nbytes
    added = (given if c.strided or c.last else image) if forward and c.bias else 0
    unfolded = c.gaps and (c.strided or (c.depthwise and not c.last)) and c.measured
    unfolded |= c.low and c.unblocked and not c.strided_kernel
    few = c.unblocked and not c.low and c.outside <= _BLOCK // 2  # channels: no kernel for strides
    if unfolded:
        nbytes = 0  # `_or_unfolded` counts the columns
    elif few or not c.strided or (c.fills_lanes and c.usual) or (c.depthwise and not c.low):
        nbytes = _direct(c.mirrored())
    else:
        uneven = c.groups > 1 or any(size % step for size, step in zip(c.read, c.stride, strict=True))
        added = added if uneven or c.emulated else 0
        if c.emulated and c.groups == 1:
            added += image + c.blocked_result_nbytes // 8
        nbytes = _strided(c) if c.last else max(2 * given, _strided(c) + c.result_nbytes)
        if not c.low and (c.inside == 1 or not c.strided_kernel):
            nbytes = max(nbytes, _direct(c.mirrored()) + image)
    if not c.strided_kernel:
        nbytes = _or_unfolded(c, nbytes, image, c.inside * math.prod(c.read), certain=unfolded)
    nbytes += added // c.itemsize * _FLOAT32_NBYTES
    return nbytes if c.last else max(nbytes, given)


def _strided(c: Convolution) -> int:
    """Bound the gradient of images with a stride, without a copy of the result that it reads.

    Filters are in blocks. Each thread has one padded result, and rows of the image where they cannot be written in
    place.
    """
    sizes = zip(c.written, c.kernel, c.stride, strict=True)
    numel = math.prod(size + 2 * (kernel - 1) // step for size, kernel, step in sizes)
    thread = 2 * _PAGE + 40 * c.pixels * -(-c.outside // 64)  # addresses of blocks, and which rows are copied
    thread += c.itemsize * _pad(numel * _pad(c.groups * c.outside, 2), _PAGE)
    width, step = c.read[-1], c.stride[-1]
    if width % step:
        rows = 3 if c.depthwise else 1
        thread += _FLOAT32_NBYTES * _pad(rows * _pad(width, step) * step * c.groups * c.inside, _PAGE)
    if c.low:
        thread += min(64, _pad(c.inside)) * -(-width // step) * _FLOAT32_NBYTES
    filters = c.groups * _pad(c.outside, 2) * _pad(c.inside) * c.pixels * c.itemsize
    return max(filters, replace(c.mirrored(), last=True).blocked_filters_nbytes()) + c.num_threads * thread + 5 * _PAGE


def _filter_gradient(c: Convolution, d_bias: int) -> int:
    """Bound the gradient of filters: reordered operands, the sums of threads, and the reordered gradient.

    Image and incoming gradient are reordered, threads that share filters add up their sums, and the gradient is
    reordered back. Wide filters and some images of few channels are unfolded instead.
    """
    given, filters = c.filters_nbytes, c.blocked_filters_nbytes(summed=True)
    direct = filters - given + _thread_sums(c, filters // c.itemsize * _FLOAT32_NBYTES)
    direct += _PAGE * _barriers(c, bias=d_bias > 0)
    if not c.last:
        direct += c.blocked_result_nbytes + (0 if c.sums_colours else c.blocked_image_nbytes)
    direct = max(direct, filters + d_bias + (given if c.last else 0), given + d_bias)
    columns = c.pixels * math.prod(c.written if c.last else c.written[-2:]) + (math.prod(c.read) if c.last else 0)
    columns *= c.inside * c.itemsize
    alone = math.prod(c.written[-2:]) >= 256 * c.num_threads or (c.image.shape[0] == 1 and c.groups < 3)
    columns = (1 if alone and (c.usual or c.unfolds_filters) else c.num_threads) * (columns + 4 * given + 128)
    columns += 4 * given if c.low else 0
    if c.unfolds_filters:
        return columns + d_bias
    if not c.usual:
        return direct + columns
    if c.depthwise:
        wide = c.kernel[-1] > _WIDEST_DEPTHWISE
    elif c.groups > 1:
        wide = not c.last and c.lanes < (_BLOCK if c.low else 8)
    else:
        wide = c.kernel[-1] > _WIDEST_FILTERS + (3 if c.low and c.few_colours else onednn.uses_avx512())
        wide |= c.inside < _BLOCK and c.pixels > 1 and (len(c.kernel) == 1 or not c.sums_colours)
        wide |= len(c.kernel) == 3 and not onednn.uses_avx512()
    if wide and c.groups > 1 and not c.last:
        return max(given + d_bias, columns)
    return max(direct, columns) if wide else direct


def _barriers(c: Convolution, *, bias: bool) -> int:
    """Bound the pages of barriers for threads that share filters' gradients, and of those to which they align."""
    if c.depthwise or c.unblocked:
        return 0
    if c.low:
        return 2 if c.num_threads == 1 else 4 + c.num_threads
    return 0 if c.num_threads == 1 else 7 if bias else 3


def _thread_sums(c: Convolution, filters: int) -> int:
    """Bound the sums of threads that share filters, and in low precision the threads' transposed inputs.

    If each thread has many blocks of filters, threads share only as far as that saves reading images and gradients
    again.

    Args:
        filters: bytes of one sum.
    """
    bias = _pad(c.groups * _pad(c.outside, 1 if c.depthwise else _BLOCK)) * _FLOAT32_NBYTES
    if c.depthwise and filters == _pad(c.groups) * c.pixels * _FLOAT32_NBYTES:
        return (c.num_threads + 1) * (filters + bias)
    sharing = max(1, c.num_threads // c.groups) if c.usual else c.num_threads
    first = 1 if onednn.uses_avx512() else 0  # sums into the result
    sums = (sharing - first) * (filters + bias)
    read = c.blocked_image_nbytes // (1 if c.low else math.prod(c.stride)) + c.blocked_result_nbytes
    inside, outside = -(-c.inside // _BLOCK), -(-c.outside // _BLOCK)
    if c.usual and (outside >= 2 * sharing or inside * outside >= 8 * sharing):
        most = sharing * read // c.itemsize * _FLOAT32_NBYTES
        few = 0 if onednn.uses_avx512() else 3 * (filters + bias)
        sums = min(sums, max(few, most // (1 if c.low else 8 if onednn.uses_avx512() else 2)))
    if c.low:
        channels = c.inside if c.few_colours else _pad(c.inside)
        width = _pad(-(-c.read[-1] // c.stride[-1]) + c.padding[-1] + 2, 2) * c.stride[-1]
        image = channels * math.prod(size + 1 for size in c.read[:-1]) * width
        grad = _pad(c.outside) * math.prod(size + 1 for size in c.written[:-1]) * _pad(c.written[-1], 2)
        sharing = min(sharing, 2 + sums // filters)
        sums += filters + bias + sharing * c.groups * ((image + grad) * c.itemsize + 128)
    return bias + c.num_threads * _gathered(c) + sums


def _format(dims: int) -> torch.memory_format:
    return torch.channels_last_3d if dims == 5 else torch.channels_last


def _copies(c: Convolution, *tensors: Tensor) -> int:
    """Count the bytes of copies of tensors that are not in the memory format of the computation."""
    format_of = _format if c.last else lambda dims: torch.contiguous_format
    return sum(nbytes_of(t) for t in tensors if not t.is_contiguous(memory_format=format_of(t.dim())))


def _runs_in_aten(c: Convolution) -> bool:
    """Whether ATen computes, not oneDNN.

    ATen computes dtypes that oneDNN does not compute on this processor; in float32 also single small images, filters of
    one pixel on one thread, and transposed convolutions with output padding of a stride or more.
    """
    if not onednn.computes(c.image.dtype):
        return True
    sizes = zip(c.written, c.stride, c.kernel, c.dilation, c.read, c.padding, strict=True)
    needed = [(n - 1) * step + (k - 1) * gap + 1 - 2 * pad + step <= size for n, step, k, gap, size, pad in sizes]
    if c.transposed and any(needed):
        return True
    if c.image.dtype != torch.float32:
        return False
    edges = c.kernel[-2:] if len(c.kernel) > 1 else (1, *c.kernel)  # in one dimension, images are of one row
    plain = not c.strided and not c.dilated
    if plain and set(edges) == {1} and c.num_threads == 1 and c.image.shape[0] < _MANY_IMAGES:
        return True
    shape = c.image.shape
    return shape[0] == c.groups == 1 and math.prod(shape[:4]) <= _SMALL_IMAGE and min(edges) <= _SMALL_EDGE


def _in_aten_nbytes(c: Convolution, grad: Tensor | None, outputs: Sequence[Tensor | None]) -> int:
    """Count the bytes of ATen's own kernels: images unfolded, a batch or one at a time, and copies of operands.

    One group is exact. Groups are computed one after another, and their results joined; those of volumes at once,
    unless dilated or transposed.

    Args:
        grad: of the result, in a backward.
        outputs: gradients of images, filters and bias, in a backward; None for those not asked for.
    """
    tensors = [c.image, c.filters, *([] if grad is None else [grad])]
    is_volume = len(c.kernel) == 3
    at_once = is_volume and not (c.dilated or c.transposed)
    one_image = (c.dilated and not c.transposed) or (c.transposed and (is_volume or grad is not None))
    in_place = c.pixels == 1 and c.read == c.written and not (c.strided or c.transposed or c.dilated)
    columns = (1 if one_image else c.image.shape[0]) * (c.groups if at_once else 1)
    columns *= c.inside * c.pixels * c.positions * c.itemsize
    if in_place and not (at_once and c.groups > 1):
        columns = c.image_nbytes if at_once and outputs and outputs[0] is not None else 0  # its own columns
    elif outputs and outputs[1] is None and not (is_volume or c.dilated or c.transposed):
        columns = 0  # gradients of images are folded as they are computed
    copies = _copies(replace(c, last=c.last and not is_volume), *tensors)
    num_parts = 1 if at_once else c.groups  # that are computed one after another
    nbytes = columns + copies
    if grad is not None and c.low:
        nbytes += nbytes_of(grad, _FLOAT32_NBYTES) // num_parts + grad.shape[1] * c.itemsize  # sums of a bias
    if c.low and onednn.computes(c.image.dtype):
        products = [(c.inside * c.pixels, c.outside, c.positions)]
        if grad is None:
            products.append((c.inside, 1, math.prod(c.read)))  # a bias
        large = [product for product in products if math.prod(product) > _MOST_MULTIPLIED]
        nbytes += max((gemm_nbytes(c.image.dtype, *product, c.num_threads) for product in large), default=0)
    if c.dilated:
        nbytes += c.groups * c.outside * c.itemsize  # of a bias
    if c.transposed and is_volume:
        nbytes += math.prod(c.read) * c.itemsize
    if c.pixels == 1 and c.transposed and is_volume:
        nbytes += c.result_nbytes
    if num_parts == 1:
        return nbytes
    parts = (c.image_nbytes + c.result_nbytes + c.filters_nbytes) // num_parts
    if grad is None:
        joined = max(c.image_nbytes, c.result_nbytes) + c.filters_nbytes
        return joined + c.groups * (c.inside + c.outside) * c.itemsize + nbytes + parts
    if c.image.shape[0] == 1 and all(tensor.is_contiguous() for tensor in tensors):
        parts = 0  # views of the operands
    return max(sum(map(_nbytes, outputs)) + copies, nbytes + parts)
