"""A convolution in numbers, as oneDNN sees it on the CPU: channels in blocks, formats, and what it reorders.

A transposed convolution is the gradient, for its images, of a plain one: `Convolution` is always the plain one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

BLOCK = 16
PADDING = 128
"""Bytes by which oneDNN aligns one region of its scratchpad."""
PAGE = 4096
ADDRESS_NBYTES = 40
"""Of the addresses of one pair of blocks that are multiplied."""
MAX_CHANNELS = 64
"""In one of these blocks."""
_LANES = (16, 8, 4)
"""Channels of a group that are computed side by side; of those that none divides, there is a matrix product only."""
MIN_POSITIONS = 4
"""Results of fewer positions may be computed as matrix products."""
SUM_ITEMSIZE = 4
"""Of accumulators and of sums of filters' gradients."""

_WIDEST_FILTERS, _WIDEST_PADDING = 14, 6
"""Wider filters' gradients, and convolutions of images padded by more, may be products with unfolded images."""
_WIDEST_BFLOAT16_PATCHES = 16
"""The same of filters, in bfloat16, of a few colours."""
_MOST_COLOURS = 3
"""Of volumes that are read as they are."""
_TOO_MUCH_PADDING = 31
"""No kernel computes a convolution of images padded by more."""
WIDEST_DEPTHWISE = 3
"""Depthwise filters up to so wide have a kernel of their own for their gradients."""


def padded(size: int, block: int = BLOCK) -> int:
    return -(-size // block) * block


def addresses_nbytes(num_addresses: int) -> int:
    """Pages of addresses, and what is left of the last one."""
    return padded(padded(num_addresses * ADDRESS_NBYTES, PAGE), ADDRESS_NBYTES)


def by_blocks(channels: int) -> int:
    """Channels padded to the block that oneDNN may choose, of those of 16, 32, 48 and 64."""
    most = padded(channels, 2 * BLOCK) if channels > BLOCK else BLOCK
    by_three = padded(channels, 3 * BLOCK)
    return max(most, by_three) if 20 * channels >= 19 * by_three else most


@dataclass(frozen=True)
class Convolution:
    """Numbers of one convolution; of a transposed one, those of the convolution that it is the gradient of.

    Attributes:
        transposed: whether it is one of those.
        num_images, groups: how many.
        inside, outside: channels of one group, in and out.
        read, written: spatial sizes of images and of results.
        kernel, stride, padding, dilation: per spatial dimension.
        itemsize: 4 for float32, 2 for bfloat16.
        last: whether images come, and results go, with channels last.
        bias: whether it adds one (or its backward makes the bias's gradient).
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
        """With images and results exchanged."""
        return replace(self, inside=self.outside, outside=self.inside, read=self.written, written=self.read)

    @property
    def pixels(self) -> int:
        """Of one filter."""
        return math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """Of one result."""
        return math.prod(self.written)

    @property
    def strided(self) -> bool:
        return any(step != 1 for step in self.stride)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.inside == self.outside == 1

    @property
    def is_usual(self) -> bool:
        """Filters not larger than the image, padded on both sides by half of them at most, and moved by no more than
        their width; with gaps, by one. Others may be computed by any kernel."""
        volume, few = len(self.kernel) == 3, self.groups == 1 and self.inside < BLOCK
        certain = self.unfolds_images and self.unfolds_for_filters and not volume
        if certain and self.positions >= MIN_POSITIONS:
            return True
        sizes = zip(self.kernel, self.dilation, self.stride, self.padding, self.after, self.read, strict=True)
        for kernel, gap, step, before, after, size in sizes:
            whole = (kernel - 1) * gap + 1
            larger = 1 if self.groups == 1 and gap == 1 and len(self.kernel) < 3 else 0
            larger = kernel if self.depthwise and not (self.last and gap > 1) else larger
            most = (whole - 1) // 2 if volume or few else whole // 2
            most = whole - 1 if self.depthwise and not self.last else most
            if max(before, after) > most or whole > size + larger or step > max(kernel, 2):
                return False
            if self.pixels == 1 and self.inside < BLOCK and step > 1:
                return False
            if gap > 1 and (step > 1 or before < whole // 2):
                return False
        square = all(len(set(sizes)) == 1 for sizes in (self.kernel, self.stride, self.padding))
        if self.reads_plain_image and not square and not (len(self.kernel) == 3 and self.inside <= _MOST_COLOURS):
            return False
        if (volume and self.pixels == 1 and self.strided) or (volume and few and self.transposed):
            return False
        if self.last and not self.lanes and self.itemsize == 2:
            return False
        if self.reads_plain_image and self.reads_patches and not self.last:
            return True  # also of one position
        large = self.written[-1] > 1 and self.positions >= MIN_POSITIONS
        return (large or self.pixels == 1) and (len(self.kernel) < 3 or not (self.groups > 1 or self.has_gaps))

    @property
    def is_dense_depthwise(self) -> bool:
        """Depthwise with channels last, but maybe computed as groups are."""
        if not (self.depthwise and self.last):
            return False
        sizes = zip(self.stride, self.kernel, self.read, strict=True)
        overlap = all(step < kernel < size for step, kernel, size in sizes)
        return self.has_gaps or len(self.kernel) == 3 or not (overlap and self.is_usual)

    @property
    def covers_image(self) -> bool:
        """Filters without gaps are as large as the image, or larger, in some dimension."""
        return not self.has_gaps and any(k >= size for k, size in zip(self.kernel, self.read, strict=True))

    @property
    def fills_groups(self) -> bool:
        """Depthwise with channels last, gaps and much padding: filters are filled up with zeros to those of groups."""
        return self.depthwise and self.last and self.has_gaps and max(self.padding) > _WIDEST_PADDING

    @property
    def has_gaps(self) -> bool:
        return max(self.dilation) > 1

    @property
    def lanes(self) -> int:
        if self.groups == 1 or self.depthwise:
            return BLOCK  # padded
        return next((n for n in _LANES if self.inside % n == 0 and self.outside % n == 0), 0)

    @property
    def fills_lanes(self) -> bool:
        """Groups that are as wide as lanes have kernels of their own."""
        alike = self.groups > 1 and self.inside == self.outside == self.lanes
        return alike and not (self.transposed and self.last)

    @property
    def reads_plain_image(self) -> bool:
        """A first convolution, of a few colours, reads them as they are."""
        return self.groups == 1 and self.inside < BLOCK and self.pixels > 1 and not self.transposed

    @property
    def sums_plain_image(self) -> bool:
        """The same for its filters' gradients: of one or three colours; in bfloat16, where results fill blocks."""
        fills = self.inside in (1, 3) if self.itemsize == 4 else self.outside % BLOCK == 0
        return self.reads_plain_image and fills

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
        return self._blocked(self.inside) * self.num_images * math.prod(self.read) * self.itemsize

    @property
    def blocked_results_nbytes(self) -> int:
        return self._blocked(self.outside) * self.num_images * self.positions * self.itemsize

    def _blocked(self, channels: int) -> int:
        """Channels of one image, or result, of all groups."""
        whole = self.groups * channels
        return padded(whole) if self.groups == 1 or self.depthwise else whole

    @property
    def unfolded_nbytes(self) -> int:
        """Bytes of an image (of a volume: one slice) of one group as columns: for each position what a filter reads."""
        return self.inside * self.pixels * math.prod(self.written[-2:]) * self.itemsize

    @property
    def after(self) -> tuple[int, ...]:
        """Padding behind the image that a result needs, per dimension; negative where pixels are left over."""
        sizes = zip(self.written, self.stride, self.kernel, self.dilation, self.read, self.padding, strict=True)
        return tuple(
            (size - 1) * step + (kernel - 1) * gap + 1 - whole - before
            for size, step, kernel, gap, whole, before in sizes
        )

    @property
    def reads_patches(self) -> bool:
        """Every pixel is read once at most."""
        return self.padding[-1] == 0 and self.stride[-1] >= self.kernel[-1]

    @property
    def unfolds_for_filters(self) -> bool:
        """Whether oneDNN has only a matrix product for the filters' gradients: wide ones, such as those of patches of
        16, and groups or depthwise filters of plain images that have no kernel of their own."""
        widest = _WIDEST_BFLOAT16_PATCHES if self.reads_plain_image and self.itemsize == 2 else _WIDEST_FILTERS
        if self.kernel[-1] > widest:
            return True
        if self.last:
            return False
        if self.groups == 1:
            few = len(self.kernel) == 3 and self.pixels > 1 and _MOST_COLOURS < self.inside < BLOCK
            return few and (self.itemsize == 2 or any(self.padding))
        if self.depthwise:
            return self.kernel[-1] > WIDEST_DEPTHWISE or len(self.kernel) == 3 or self.has_gaps
        return self.lanes < (8 if self.itemsize == 4 else BLOCK)

    @property
    def may_unfold_for_filters(self) -> bool:
        """Whether it may have: of a few channels of one row, or that are read in blocks."""
        few = self.groups == 1 and self.pixels > 1 and self.inside < BLOCK
        sizes = zip(self.padding, self.kernel, self.dilation, self.stride, self.read, strict=True)
        beyond = any(
            2 * pad > (kernel - 1) * gap + 1 or (self.depthwise and kernel > size - (step > 1))
            for pad, kernel, gap, step, size in sizes
        )
        return (few and (len(self.kernel) == 1 or not self.sums_plain_image)) or beyond or not self.is_usual

    @property
    def unfolds_images(self) -> bool:
        """Whether images, and results for the images' gradient, are certainly unfolded: much padding, groups that have
        no lanes."""
        return not self.last and (not self.lanes or (self.padding[-1] > _TOO_MUCH_PADDING and not self.depthwise))

    @property
    def may_unfold_images(self) -> bool:
        """Whether there may be only a matrix product: wide filters, much padding, gaps, groups that have no lanes."""
        is_wide = self.kernel[-1] > _WIDEST_FILTERS and not self.reads_patches
        much = self.padding[-1] > min(_WIDEST_PADDING, self.written[-1])
        return is_wide or much or not self.is_usual or (not self.lanes and not self.last)

    @property
    def may_unfold_for_images(self) -> bool:
        """The same for the images' gradient, for which results are padded."""
        width, padding = (self.kernel[-1] - 1) * self.dilation[-1], self.padding[-1]
        wide = max(padding, width - padding) > _WIDEST_PADDING and not self.reads_patches
        gaps = self.has_gaps and self.groups > 1
        return wide or gaps or not self.is_usual or (not self.lanes and not self.last)
