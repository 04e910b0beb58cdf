"""A convolution as oneDNN sees it on the CPU: channels in blocks of 16, which of its kernels are known, their buffers.

Sources: ATen's `Convolution.cpp` and `mkldnn/Conv.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
PADDING = 128
"""Bytes by which oneDNN aligns one region of its scratchpad."""
_MANY_IMAGES = 16
"""From so many on, oneDNN computes also what one thread could do as a matrix product."""
MIN_POSITIONS = 4
"""Results of fewer positions are computed as matrix products."""
PAGE = 4096
BARRIER = 2 * PAGE + PADDING
"""Bytes of the buffer in which threads wait for each other before they sum filters' gradients."""
ADDRESS_NBYTES = 40
"""Of the addresses of one pair of blocks that are multiplied."""
MAX_CHANNELS = 64
"""In one of these blocks."""
_WIDEST_FILTERS, _WIDEST_PADDING = 14, 6
"""Wider filters' gradients, and convolutions of images padded by more, may be products with unfolded images."""
WIDEST_BFLOAT16_PATCHES = 16
"""The same of filters, in bfloat16, of a few colours."""


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
    """One convolution, or the one that a backward belongs to.

    Attributes:
        input: images [N, C, *spatial].
        weight: filters [out, C / groups, *kernel]; transposed [C, out / groups, *kernel].
        result_shape: of the convolution's result.
        stride, padding, dilation: per spatial dimension.
        bias: whether it adds one (or its backward makes the bias's gradient).
        num_threads: threads that it may use.
    """

    input: Tensor
    weight: Tensor
    result_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    bias: bool
    num_threads: int

    @property
    def pixels(self) -> int:
        """Of one filter."""
        return math.prod(self.weight.shape[2:])

    @property
    def positions(self) -> int:
        """Of one result."""
        return math.prod(self.result_shape[2:])

    @property
    def strided(self) -> bool:
        return any(step != 1 for step in self.stride)

    @property
    def channels(self) -> tuple[int, int]:
        """Of one group, in and out."""
        return self.input.shape[1] // self.groups, self.result_shape[1] // self.groups

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.channels == (1, 1)

    @property
    def result_nbytes(self) -> int:
        return math.prod(self.result_shape) * self.input.itemsize

    def blocked_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of images of `shape` whose channels are padded to blocks."""
        channels = shape[1] if self.groups > 1 else padded(shape[1])
        return shape[0] * channels * math.prod(shape[2:]) * self.input.itemsize

    @property
    def blocked_filters_nbytes(self) -> int:
        if self.depthwise:
            return padded(self.groups) * self.pixels * self.input.itemsize
        inside, outside = self.channels
        inside = inside if self.reads_plain_image else padded(inside)
        return self.groups * padded(outside) * inside * self.pixels * self.input.itemsize

    @property
    def reads_plain_image(self) -> bool:
        """A first convolution, of a few colours, reads them as they are."""
        return self.groups == 1 and not self.transposed and self.input.shape[1] < BLOCK and self.pixels > 1

    @property
    def is_square(self) -> bool:
        """Filters, strides and padding are the same in all dimensions."""
        return all(len(set(sizes)) == 1 for sizes in (tuple(self.weight.shape[2:]), self.stride, self.padding))

    @property
    def fills_blocks(self) -> bool:
        if self.groups == 1:
            return True  # padded
        return self.groups % BLOCK == 0 if self.depthwise else all(c % BLOCK == 0 for c in self.channels)

    @property
    def has_known_kernels(self) -> bool:
        """Float32 images on AVX-512, done by oneDNN, without gaps in filters, with a result larger than a matrix's."""
        known = self.input.dtype == torch.float32 and self.input.dim() in (3, 4) and max(self.dilation) == 1
        known &= torch.backends.cpu.get_cpu_capability() == "AVX512"
        return known and self.positions >= MIN_POSITIONS and not may_unfold(self.input, self.weight, self.groups)

    @property
    def is_direct(self) -> bool:
        """One pixel, few images, one thread: a matrix product in place."""
        plain = not (self.strided or self.transposed) and self.groups == 1 and self.input.shape[0] < _MANY_IMAGES
        return self.pixels == 1 and self.num_threads == 1 and plain

    @property
    def unfolded_nbytes(self) -> int:
        """Bytes of an image of one group as columns: for each position what a filter reads there."""
        channels, positions = self.channels[0], self.positions
        if self.transposed:
            channels, positions = self.channels[1], math.prod(self.input.shape[2:])
        return channels * self.pixels * positions * self.input.itemsize

    @property
    def reads_patches(self) -> bool:
        """Every pixel is read once at most."""
        return self.padding[-1] == 0 and self.stride[-1] >= self.weight.shape[-1]

    @property
    def unfolds_for_filters(self) -> bool:
        """Whether oneDNN has only a matrix product for gradients of filters as wide, such as those of patches of 16."""
        in_bfloat16 = self.reads_plain_image and self.input.dtype == torch.bfloat16
        return self.weight.shape[-1] > (WIDEST_BFLOAT16_PATCHES if in_bfloat16 else _WIDEST_FILTERS)

    @property
    def may_unfold_images(self) -> bool:
        """Whether filters may be so wide, or images so much padded, that oneDNN has only a matrix product."""
        padding = self.padding[-1]
        is_wide = self.weight.shape[-1] > _WIDEST_FILTERS and not self.reads_patches
        return is_wide or padding > min(_WIDEST_PADDING, self.result_shape[-1])

    @property
    def may_unfold_for_images(self) -> bool:
        """The same for the images' gradient, for which results are padded."""
        width, padding = self.weight.shape[-1], self.padding[-1]
        return max(padding, width - 1 - padding) > _WIDEST_PADDING and not self.reads_patches

    @property
    def padded_bias_nbytes(self) -> int:
        """A bias that does not fill blocks."""
        filled = self.channels[1] % BLOCK == 0 or self.depthwise
        return 0 if filled else self.groups * padded(self.channels[1]) * 4 + PADDING

    @property
    def gathered_nbytes(self) -> int:
        """Filters of one pixel with a stride first gather the pixels that they read, each thread those of one image."""
        if self.pixels != 1 or not self.strided or self.transposed:
            return 0
        return self.num_threads * padded(self.channels[0]) * self.positions * self.input.itemsize + PADDING


def may_unfold(input: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether ATen's own convolution may run: other dtypes, small single images, old processors."""
    if input.dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if input.dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    edge = min(weight.shape[-2:]) if weight.dim() > 3 else 1  # in one dimension, images are of one row
    small = input.shape[0] == 1 and input.numel() <= 20480 and groups == 1 and edge <= 3
    return input.dtype != torch.float32 or small
