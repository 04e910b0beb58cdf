"""Bound the scratch bytes of convolutions and their backwards on the CPU, where oneDNN or ATen computes them.

ATen's own kernels unfold images; their scratch is predicted to the byte. oneDNN picks a kernel when it runs, by
instruction set, cache and threads. Each of its kernels takes at most one of these:

- direct: image, filters and result reordered to blocks of channels; with channels last, filters alone;
- a matrix product: per thread, an image unfolded to columns.

For the filters' gradient, each thread that shares filters has its own float32 sum; in bfloat16 it also transposes its
inputs. Where several kernels may run, the bound is the largest of theirs.

Sources: ATen's `Convolution.cpp`, `ConvolutionMM2d.cpp`, `ConvolutionMM3d.cpp` and `mkldnn/Conv.cpp`, ideep's
`conv.hpp`. The bounds were fitted to oneDNN's scratch for some 20,000 convolutions on one to four threads of an AMD
EPYC with AVX-512, with all its instructions and under `ONEDNN_MAX_CPU_ISA` SSE41, AVX and AVX2 (in bfloat16:
AVX512_CORE).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.torch_private import onednn

_BLOCK = 16
"""Channels of a block."""
_FLOAT32_NBYTES = 4
"""Bytes of an accumulator, and of an element of the filters' gradients that threads sum."""
_PAGE = 4096
_MIB = 1 << 20
_MANY_IMAGES = 16
"""Batch size from which oneDNN, not ATen, computes filters of one pixel on one thread."""
_SMALL_IMAGE = 20480
"""Elements of a single image (of a volume: without its last dimension) up to which ATen, not oneDNN, computes."""
_SMALL_EDGE = 3
"""Height or width of filters up to which ATen does so."""
_WIDEST_FILTERS, _WIDEST_DEPTHWISE = 13, 3
"""Widths up to which filters, and the gradients of depthwise filters, have a direct kernel."""
_MOST_PADDING, _TOO_MUCH_PADDING = 6, 31
"""Padding up to which a direct kernel is certain (see `most_padding`), and beyond which there is none."""
_UNUSUAL = 3
"""Factor by which kernels for unusual shapes may exceed what is modelled here."""
_MIN_POSITIONS = 4
"""Positions of a result below which it may be computed as a matrix product."""


def _pad(size: int, block: int = _BLOCK) -> int:
    return -(-size // block) * block


@dataclass(frozen=True)
class Convolution:
    """Metadata of a convolution. A transposed convolution is the image gradient of another, and has its metadata.

    Attributes:
        transposed: whether it is transposed; images and results below are then those of the other.
        num_images, groups: counts.
        inside, outside: channels of one group of images, and of results.
        read, written: spatial sizes of images, and of results.
        kernel, stride, padding, dilation: per spatial dimension.
        itemsize: bytes of an element.
        last: whether it computes with channels last.
        bias: whether it adds a bias, or its backward computes the bias's gradient.
        num_threads: threads that it may use.
    """

    transposed: bool
    num_images: int
    groups: int
    inside: int
    outside: int
    read: tuple[int, ...]
    written: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    itemsize: int
    last: bool
    bias: bool
    num_threads: int

    def mirrored(self) -> Convolution:
        """Exchange images and results."""
        return replace(self, inside=self.outside, outside=self.inside, read=self.written, written=self.read)

    @property
    def pixels(self) -> int:
        """Pixels of one filter."""
        return math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """Positions of one result."""
        return math.prod(self.written)

    @property
    def low(self) -> bool:
        """Whether it accumulates in a wider dtype than its own."""
        return self.itemsize < _FLOAT32_NBYTES

    @property
    def strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def dilated(self) -> bool:
        return max(self.dilation) > 1

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.inside == self.outside == 1

    @property
    def few_colours(self) -> bool:
        """Whether images have fewer channels than a block, so that the forward may read them without reordering."""
        return self.groups == 1 and self.inside < _BLOCK and self.pixels > 1 and not self.transposed

    @property
    def sums_plain_image(self) -> bool:
        """Whether the filters' gradient, too, reads images without reordering: with `usual_colours` and AVX-512."""
        return self.few_colours and self.usual_colours and onednn.uses_avx512()

    @property
    def usual_colours(self) -> bool:
        """Whether images have 1 or 3 channels, or in low precision, results fill blocks. Else the filters' gradient may
        unfold images."""
        return self.outside % _BLOCK == 0 if self.low else self.inside in (1, 3)

    @property
    def images_nbytes(self) -> int:
        return self.num_images * self.groups * self.inside * math.prod(self.read) * self.itemsize

    @property
    def results_nbytes(self) -> int:
        return self.num_images * self.groups * self.outside * self.positions * self.itemsize

    @property
    def filters_nbytes(self) -> int:
        return self.groups * self.inside * self.outside * self.pixels * self.itemsize

    @property
    def blocked_images_nbytes(self) -> int:
        return self.num_images * self._blocked(self.inside) * math.prod(self.read) * self.itemsize

    @property
    def blocked_results_nbytes(self) -> int:
        return self.num_images * self._blocked(self.outside) * self.positions * self.itemsize

    def _blocked(self, channels: int) -> int:
        """Count the channels of all groups, padded to blocks. A block holds several depthwise groups."""
        return _pad(self.groups * channels) if self.depthwise else self.groups * _pad(channels, self.lanes)

    @property
    def lanes(self) -> int:
        """Channels of a group in one vector; 1 if none of 16, 8 and 4 divides both of its channel counts."""
        if self.groups == 1 or self.depthwise:
            return _BLOCK
        return next((n for n in (16, 8, 4) if self.inside % n == 0 and self.outside % n == 0), 1)

    @property
    def fills_lanes(self) -> bool:
        """Whether groups are as wide as lanes; such groups have kernels of their own."""
        alike = self.groups > 1 and self.inside == self.outside == self.lanes > 1
        return alike and not (self.transposed and self.last)

    @property
    def columns_nbytes(self) -> int:
        """Bytes of one group of an image as columns: for each position, the elements that a filter reads. Of a volume:
        one slice, or all if channels are last and the shape is not `usual`."""
        whole = self.last and not self.usual
        return self.inside * self.pixels * math.prod(self.written if whole else self.written[-2:]) * self.itemsize

    @property
    def after(self) -> tuple[int, ...]:
        """Padding after the image, per dimension; negative where the last pixels are not read."""
        sizes = zip(self.written, self.stride, self.kernel, self.dilation, self.read, self.padding, strict=True)
        return tuple(
            (size - 1) * step + (kernel - 1) * gap + 1 - whole - before
            for size, step, kernel, gap, whole, before in sizes
        )

    @property
    def block(self) -> int:
        """Channels of a block, to a multiple of which groups are padded."""
        return _BLOCK if self.groups == 1 or onednn.uses_avx512() or not self.usual else _BLOCK // 2

    @property
    def most_padding(self) -> int:
        """Padding up to which a forward certainly has a direct kernel."""
        if onednn.uses_avx512():
            return _MOST_PADDING if self.depthwise else 2 * _MOST_PADDING
        return _MOST_PADDING // 2

    @property
    def emulated(self) -> bool:
        """Whether it computes in low precision on a processor without bfloat16 instructions."""
        return self.low and not onednn.multiplies_bfloat16()

    @property
    def usual(self) -> bool:
        """Whether there is a direct kernel. Among the conditions: filters at most a pixel larger than images, padding
        of at most half a filter on each side, a stride of at most the filter's width or 2; if dilated, of 1. Depthwise
        filters may be larger, and padded more."""
        odd = self.groups > 1 or self.dilated or (self.pixels == 1 and self.strided)
        odd = odd or (self.transposed and self.inside < _BLOCK)
        volume = len(self.kernel) == 3 and odd
        if self.lanes == 1 or volume or not onednn.uses_avx2() or (self.low and onednn.multiplies_tiles()):
            return False
        if self.last and self.pixels > 1 and 1 in (*self.read[-2:], *self.written[-2:]):
            return False  # images of one row or column are unfolded
        sizes = zip(self.kernel, self.dilation, self.stride, self.padding, self.after, self.read, strict=True)
        for kernel, gap, step, before, after, size in sizes:
            whole = (kernel - 1) * gap + 1
            if max(before, after) > (whole - 1 if self.depthwise and not self.last else whole // 2):
                return False
            if whole > size + (kernel if self.depthwise else 1) or step > max(kernel, 2):
                return False
            if gap > 1 and (step > 1 or before < whole // 2):
                return False
        return self.pixels == 1 or self.positions >= _MIN_POSITIONS


@dataclass(frozen=True)
class Operands:
    """Tensors and metadata of a convolution; for a backward, of its forward.

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
    """Read the metadata off the tensors. As in ATen, a single stride, padding or dilation holds for all dimensions."""
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
    """Bound the bytes that a convolution holds inside, beyond its result."""
    c = o.numbers
    if o.image.numel() == 0:
        return _copies(c, o.image, o.filters)
    in_aten = _in_aten_nbytes(o, None, ()) if _runs_in_aten(o) else 0
    if _runs_in_aten(o) and not c.low:
        return in_aten
    inside = _image_gradient(c, forward=True) if c.transposed else _forward(c)
    groups = c.filters_nbytes if c.transposed and c.groups > 1 else 0  # copied, group by group
    return _copies(c, o.image, o.filters) + groups + _with_slack(c, inside) + 2 * in_aten


def convolution_backward_nbytes(o: Operands, grad: Tensor, outputs: Sequence[Tensor | None]) -> int:
    """Bound the bytes that a convolution's backward holds inside.

    Args:
        grad: of the result.
        outputs: gradients of images, filters and bias; None for those not asked for.
    """
    c = o.numbers
    if o.image.numel() == 0:
        return _copies(c, o.image, o.filters, grad)
    in_aten = _in_aten_nbytes(o, grad, outputs) if _runs_in_aten(o) else 0
    if _runs_in_aten(o) and not c.low:
        return in_aten
    d_image, d_filters, d_bias = (0 if t is None else nbytes_of(t) for t in outputs)
    plain = replace(c, bias=False) if c.transposed else c
    peaks = [0]
    if d_image:  # computed first, before there are other gradients
        inside = _forward(plain) if c.transposed else _image_gradient(c)
        peaks.append(inside - d_filters - d_bias)
    if d_filters:
        peaks.append(_filter_gradient(plain, d_bias))
    return _copies(c, o.image, o.filters, grad) + _with_slack(c, max(peaks)) + 2 * in_aten


def _with_slack(c: Convolution, nbytes: int) -> int:
    """Add bytes for alignment, barriers, addresses, a padded bias, and kernels for unusual shapes."""
    if not onednn.uses_avx2():
        nbytes = nbytes * 5 // 4  # kernels for SSE unfold more than they need
    if min(c.positions, math.prod(c.read)) < _MIN_POSITIONS:
        nbytes += 4 * c.groups * _pad(c.inside) * _pad(c.outside) * c.pixels * _FLOAT32_NBYTES  # operands are packed
    thread = _PAGE + (_MIB if c.low and not c.usual else 0)
    return nbytes + _PAGE + c.num_threads * thread + _pad(c.groups * c.outside) * _FLOAT32_NBYTES


def _forward(c: Convolution) -> int:
    """Bound a forward.

    Image, filters and result are reordered; the result is reordered back to its plain format after the other two are
    freed. With channels last, only filters are reordered.
    """
    filters, given, result = _packed_filters(c), c.results_nbytes, c.blocked_results_nbytes
    columns = _columns(c, c.positions * c.outside)
    if c.last:
        direct = filters + _rows_of_channels_last(c)
    else:
        image = 0 if c.few_colours and (c.inside <= 3 or onednn.uses_avx512()) else c.blocked_images_nbytes
        direct = max(result, image + filters + result - given + _gathered(c) + _row_of_pixels(c))
    if not c.usual:
        return _UNUSUAL * (direct + columns) + given
    if c.last:
        return direct + columns if c.dilated and not onednn.uses_avx512() else direct
    if not c.depthwise and c.padding[-1] > _TOO_MUCH_PADDING:
        return columns
    wide = c.kernel[-1] > _WIDEST_FILTERS and c.stride[-1] < c.kernel[-1]
    return max(direct, columns) if wide or c.padding[-1] > c.most_padding else direct


def _image_gradient(c: Convolution, *, forward: bool = False) -> int:
    """Bound the gradient of images: as a forward from results to images; with a stride, computed with channels last and
    one more copy.

    Args:
        forward: whether this is a transposed convolution's forward, which may add a bias to a float32 copy.
    """
    m = replace(c.mirrored(), bias=False, transposed=True)
    given, image, filters = c.images_nbytes, c.blocked_images_nbytes, _packed_filters(c, gradient=True)
    copied = given if c.strided or c.last else image
    added = copied // c.itemsize * _FLOAT32_NBYTES if forward and c.bias else 0
    if c.strided and not (c.fills_lanes or (c.depthwise and not c.low)):
        direct = _strided(c) + (0 if c.last else c.results_nbytes)
        if c.emulated and c.groups == 1:
            direct += added + (image + c.blocked_results_nbytes // 8) // c.itemsize * _FLOAT32_NBYTES
        elif c.groups > 1 or any(size % step for size, step in zip(c.read, c.stride, strict=True)):
            direct += added
        direct = direct if c.last else max(direct, 2 * given)
    elif c.last:
        direct = filters + _rows_of_channels_last(m) + added
    else:
        direct = added + c.blocked_results_nbytes + filters + image - given + _gathered(m) + _row_of_pixels(m)
        direct = max(direct, 2 * image if added and c.groups > 1 else image)
    columns = added + _columns(c, math.prod(c.read) * c.inside)
    if not c.usual:
        return _UNUSUAL * (direct + columns + filters) + given
    padding = max(c.padding[-1], (c.kernel[-1] - 1) * c.dilation[-1] - c.padding[-1])
    wide = padding > _MOST_PADDING and c.stride[-1] < c.kernel[-1]
    if c.last:
        return direct + columns if c.dilated and not onednn.uses_avx512() else direct
    return max(direct, columns) if wide or (c.dilated and c.groups > 1) else direct


def _filter_gradient(c: Convolution, d_bias: int) -> int:
    """Bound the gradient of filters: image and incoming gradient are reordered, threads that share filters add up their
    sums, and the result is reordered back."""
    given, filters, columns = c.filters_nbytes, _blocked_filter_gradient(c), _summed_columns(c)
    if c.depthwise:
        wide = c.kernel[-1] > _WIDEST_DEPTHWISE or c.dilated
    else:
        wide = c.kernel[-1] > _WIDEST_FILTERS + (3 if c.low and c.few_colours else onednn.uses_avx512())
        few = c.groups == 1 and c.inside < _BLOCK and c.pixels > 1
        wide |= few and (len(c.kernel) == 1 or not (c.few_colours and c.usual_colours))
        wide |= c.groups > 1 and not c.last and c.lanes < (_BLOCK if c.low else 8)
        wide |= not onednn.uses_avx512() and (c.dilated or len(c.kernel) == 3)
    if wide and c.usual and c.groups > 1 and not c.last:
        return max(given + d_bias, columns)
    direct = filters + _thread_sums(c, filters) - given
    if not c.last:
        direct += c.blocked_results_nbytes + (0 if c.sums_plain_image else c.blocked_images_nbytes)
    direct = max(direct, filters + d_bias + (given if c.last else 0), given + d_bias)
    if not c.usual:
        return _UNUSUAL * (direct + columns) + c.num_images * _gathered_image(c)
    return max(direct, columns) if wide else direct


def _packed_filters(c: Convolution, *, gradient: bool = False) -> int:
    """Count the bytes of filters in padded blocks; `gradient`: as the images' gradient reads them."""
    if c.depthwise:
        dense = c.last and (not c.usual or (c.dilated and (gradient or max(c.padding) > _MOST_PADDING)))
        return (c.groups * c.block**2 if dense else _pad(c.groups)) * c.pixels * c.itemsize
    inside, outside = (c.outside, c.inside) if gradient else (c.inside, c.outside)
    if c.groups > 1 and c.usual and (not c.last or (c.fills_lanes and onednn.uses_avx512())):
        return c.groups * outside * (_pad(inside, 2) if c.low else inside) * c.pixels * c.itemsize
    if c.last:  # blocks of 16, 32, 48 or 64 results
        sizes = (16, 32, 48, 64) if outside > c.block else (c.block,)
        outside = max(_pad(outside, n) for n in sizes if n == sizes[0] or outside > n * 3 // 4)
    else:
        outside = _pad(outside)
    if c.groups > 1 or not (c.last or (c.few_colours and not gradient)):
        inside = _pad(inside, c.block)
    return c.groups * outside * (_pad(inside, 2) if c.low else inside) * c.pixels * c.itemsize


def _blocked_filter_gradient(c: Convolution) -> int:
    """Count the bytes of the filters' gradient in blocks; with channels last, each depthwise group may be padded."""
    overlap = c.usual and all(s < k < n for s, k, n in zip(c.stride, c.kernel, c.read, strict=True))
    if c.depthwise and not (c.last and (c.kernel[-1] > _WIDEST_DEPTHWISE or not overlap or c.dilated)):
        return _pad(c.groups) * c.pixels * c.itemsize
    if c.groups > 1 and not c.last:
        return c.filters_nbytes
    inside = c.inside if c.sums_plain_image else _pad(c.inside, c.block)
    return c.groups * _pad(c.outside, c.block) * inside * c.pixels * c.itemsize


def _rows_of_channels_last(c: Convolution) -> int:
    """Bound the threads' buffers with channels last: addresses of blocks; a padded image, if groups have no lanes or
    there is one channel; in low precision, sums of a row."""
    nbytes = _PAGE + c.num_threads * _pad(40 * c.pixels, _PAGE)
    if c.depthwise:
        return nbytes
    one_channel = c.inside == 1 and c.groups == 1
    if c.lanes == 1 or one_channel:
        numel = math.prod(size + 2 * pad for size, pad in zip(c.read, c.padding, strict=True))
        nbytes += c.num_threads * (16 * _PAGE + c.itemsize * _pad(c.groups * c.inside * numel, _PAGE))
    if one_channel:
        nbytes += c.num_threads * c.columns_nbytes * c.pixels
    if c.low and c.pixels == 1:
        return nbytes + (_row_of_pixels(c) + _gathered(c) if c.emulated else 0)
    return nbytes + (_row_sums(c, c.outside, c.written[-1]) if c.low else 0)


def _row_sums(c: Convolution, channels: int, columns: int) -> int:
    return _PAGE + _FLOAT32_NBYTES * c.num_threads * min(64, _pad(channels)) * columns


def _gathered(c: Convolution) -> int:
    """Count the bytes of pixels that threads gather for filters of one pixel with a stride: an image's for each."""
    return c.num_threads * _gathered_image(c)


def _gathered_image(c: Convolution) -> int:
    """Count the bytes of the pixels of one image that filters of one pixel with a stride read."""
    return _pad(c.inside) * c.positions * c.itemsize if c.pixels == 1 and c.strided else 0


def _row_of_pixels(c: Convolution) -> int:
    """Count the bytes of sums for filters of one pixel in low precision: one result for each thread."""
    if not c.low or c.pixels > 1 or c.groups > 1:
        return 0
    return _FLOAT32_NBYTES * c.num_threads * (_pad(c.positions, 32) + 32) * _pad(c.outside)


def _strided(c: Convolution) -> int:
    """Bound an images' gradient with a stride, without a copy of the result that it reads: filters in blocks; for each
    thread one padded result, and rows of the image where they cannot be written in place."""
    numel = 1
    for size, kernel, step, before, after in zip(c.written, c.kernel, c.stride, c.padding, c.after, strict=True):
        numel *= size + sum(max(0, kernel - 1 - pad) // step for pad in (before, after))
    thread = 4 * _PAGE + _pad(40 * c.pixels * -(-c.outside // 64), _PAGE)
    thread += c.itemsize * _pad(numel * _pad(c.groups * c.outside, 2), _PAGE)
    width, step = c.read[-1], c.stride[-1]
    if width % step:
        itemsize = _FLOAT32_NBYTES if c.bias or c.groups > 1 else c.itemsize
        rows = 3 if c.depthwise else 1
        thread += rows * itemsize * _pad(_pad(width, step) * step * c.groups * c.inside, _PAGE)
    nbytes = c.groups * _pad(c.outside, 2) * _pad(c.inside) * c.pixels * c.itemsize
    nbytes = max(nbytes, _packed_filters(replace(c, last=True), gradient=True)) + 4 * _PAGE + c.num_threads * thread
    return nbytes + (_row_sums(c, c.inside, -(-width // step)) if c.low else 0)


def _thread_sums(c: Convolution, filters_nbytes: int) -> int:
    """Bound the sums of threads that share filters, and their transposed inputs in low precision.

    Threads share filters where that saves more bytes of images and gradients read than their sums take, or where there
    are fewer than two blocks of filters for each thread.
    """
    filters = filters_nbytes // c.itemsize * _FLOAT32_NBYTES
    bias = (_pad(c.groups) if c.depthwise else c.groups * _pad(c.outside)) * _FLOAT32_NBYTES
    if c.depthwise and filters == _pad(c.groups) * c.pixels * _FLOAT32_NBYTES:
        return (c.num_threads + 1) * (filters + bias)
    sharing = max(1, c.num_threads // c.groups) if c.usual else c.num_threads
    sums = (sharing - (1 if onednn.uses_avx512() else 0)) * (filters + bias)
    inside, outside = -(-c.inside // _BLOCK), -(-c.outside // _BLOCK)
    read, written = c.blocked_images_nbytes // math.prod(c.stride), c.blocked_results_nbytes
    saved = []  # bytes read again if threads divide filters by result channels, image channels, or both
    if outside >= 2 * sharing:
        saved.append(read)
    if inside >= 2 * sharing:
        saved.append(written)
    if inside * outside >= 8 * sharing:
        saved.append(read + written)
    if c.usual and saved and c.low:
        sums = min(sums, sharing * (c.blocked_images_nbytes + written) // c.itemsize * _FLOAT32_NBYTES // 2)
    elif c.usual and saved:
        sums = min(sums, sharing * min(saved) // 8)
    if c.low:
        channels = c.inside if c.sums_plain_image else _pad(c.inside)
        width = _pad(c.read[-1] + 2 * c.padding[-1] + 2 * c.stride[-1], 2)
        image = channels * math.prod(c.read[:-1]) * width
        grad = _pad(c.outside) * math.prod(c.written[:-1]) * _pad(c.written[-1], 2)
        sharing = min(sharing, 1 + sums // filters)
        sums += filters + bias + sharing * c.groups * ((image + grad) * c.itemsize + 2 * _PAGE)
    return 4 * _PAGE + c.num_threads * _PAGE + bias + _gathered(c) + sums


def _columns(c: Convolution, num_sums: int) -> int:
    """Bound a product with unfolded images: each thread's columns, and in low precision its `num_sums` float32 sums."""
    sums = num_sums * _FLOAT32_NBYTES if c.low else 0
    columns = c.columns_nbytes // c.itemsize * _FLOAT32_NBYTES
    return c.num_threads * (columns + sums + _PAGE) + c.groups * _pad(c.inside + c.outside) * _FLOAT32_NBYTES


def _summed_columns(c: Convolution) -> int:
    """Bound filters' gradients as products with unfolded images: each thread's columns and sums.

    With a usual shape, one thread works if each would have 256 positions or more, or there is one image of one or two
    groups.
    """
    columns = c.columns_nbytes + (c.inside * c.pixels * c.positions * c.itemsize if c.last else 0)
    filters = c.filters_nbytes // c.itemsize * _FLOAT32_NBYTES
    positions = math.prod(c.written[-2:])
    all_work = positions // c.num_threads < 256 and (c.num_images > 1 or c.groups > 2)
    num_threads = c.num_threads if all_work or not c.usual else 1
    return num_threads * (columns + 4 * filters + _PAGE) + c.groups * _pad(c.outside) * _FLOAT32_NBYTES


def _format(dims: int) -> torch.memory_format:
    return torch.channels_last_3d if dims == 5 else torch.channels_last


def _is_last(tensor: Tensor) -> bool:
    """Whether strides are in channels-last order by `c10/core/MemoryFormat.h`: true also for tensors with gaps, and for
    some that are contiguous as well."""
    if tensor.dim() not in (4, 5) or tensor.stride(1) == 0:
        return False
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * size
    return True


def _copies(c: Convolution, *tensors: Tensor) -> int:
    """Count the bytes of copies of tensors that are not in the memory format of the computation."""
    format_of = _format if c.last else lambda dims: torch.contiguous_format
    return sum(nbytes_of(t) for t in tensors if not t.is_contiguous(memory_format=format_of(t.dim())))


def _runs_in_aten(o: Operands) -> bool:
    """Whether ATen, not oneDNN, computes: dtypes that oneDNN does not compute on this processor; in float32 also single
    small images, filters of one pixel on one thread, and transposed ones with output padding of a stride or more."""
    if not onednn.computes(o.image.dtype):
        return True
    if o.image.dtype != torch.float32:
        return False
    c, shape = o.numbers, o.image.shape
    edges = c.kernel[-2:] if len(c.kernel) > 1 else (1, *c.kernel)  # in one dimension, images are of one row
    plain = not c.strided and max(c.dilation) == 1
    if plain and set(edges) == {1} and c.num_threads == 1 and shape[0] < _MANY_IMAGES:
        return True
    big = (b - a >= step for a, b, step in zip(c.after, c.padding, c.stride, strict=True))  # output padding
    if c.transposed and any(big):
        return True
    small = shape[0] == 1 and math.prod(shape[:4]) <= _SMALL_IMAGE and c.groups == 1
    return small and min(edges) <= _SMALL_EDGE


def _in_aten_nbytes(o: Operands, grad: Tensor | None, outputs: Sequence[Tensor | None]) -> int:
    """Count the bytes of ATen's own kernels: images unfolded, a batch or one at a time, and copies of operands.

    Groups are computed one after another; those of volumes at once, unless dilated or transposed.

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
    if (
        c.pixels == 1
        and c.read == c.written
        and not (c.strided or c.transposed or dilated)
        and not (at_once and c.groups > 1)
    ):
        columns = c.images_nbytes if at_once and outputs and outputs[0] is not None else 0  # its own columns
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
