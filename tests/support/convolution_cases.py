"""Convolutions of square images, measured against what is predicted of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from metering import measure
from torch import Tensor

from chunkc.passes.memory.scratch import cpu

aten = torch.ops.aten

SLACK_NBYTES, MOST_SLACK_NBYTES = 16 << 10, 40 << 10
"""Per thread and at most, in addition to what is taken: a few pages of addresses and barriers."""


@dataclass(frozen=True)
class Shape:
    """Square images and filters: images, channels in and out, pixels of an edge, and how they are convolved."""

    images: int
    inside: int
    outside: int
    edge: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    transposed: bool = False
    dimensions: int = 2
    dilation: int = 1

    @property
    def how(self) -> tuple:
        d = self.dimensions
        return (
            [self.stride] * d, [self.padding] * d, [self.dilation] * d, self.transposed, [0] * d, self.groups,
        )  # fmt: skip

    def image(self) -> Tensor:
        return torch.randn(self.images, self.inside, *[self.edge] * self.dimensions)

    def filters(self) -> Tensor:
        first, second = (self.inside, self.outside) if self.transposed else (self.outside, self.inside)
        return torch.randn(first, second // self.groups, *[self.kernel] * self.dimensions)


def last(tensor: Tensor) -> Tensor:
    """Return the tensor with channels last; rows have no such format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


def gap(target: torch._ops.OpOverload, *args: object) -> int:
    """Return the predicted bytes less the measured ones."""
    measured, outputs = measure(target, args, {})
    return cpu.scratch_nbytes(target, args, {}, outputs, torch.get_num_threads()) - measured


def check(target: torch._ops.OpOverload, *args: object, within: float | None = None) -> Tensor | tuple[Tensor, ...]:
    """Check that the prediction is no less than the measured bytes; return the operator's results.

    Args:
        within: the prediction may be that many times the measured bytes, and a few pages more. None: any number.
    """
    measured, outputs = measure(target, args, {})
    num_threads = torch.get_num_threads()
    predicted = cpu.scratch_nbytes(target, args, {}, outputs, num_threads)
    what = f"{target} with {num_threads} threads takes {measured}, predicted {predicted}"
    assert predicted >= measured, what
    assert within is None or predicted <= within * measured + min(num_threads * SLACK_NBYTES, MOST_SLACK_NBYTES), what
    return outputs


def check_both(
    shape: Shape,
    *,
    bias: bool,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    within: float | None = None,
) -> None:
    """`check` the forward, and the backward for all that is asked for in training."""
    image, filters = shape.image().to(dtype), shape.filters().to(dtype)
    if channels_last:
        image, filters = last(image), last(filters)
    added = torch.randn(shape.outside).to(dtype) if bias else None
    result = check(aten.convolution.default, image, filters, added, *shape.how, within=within)
    grad, mask = torch.randn_like(result), [shape.inside > 3, True, bias]
    args = (grad, image, filters, [shape.outside], *shape.how, mask)
    check(aten.convolution_backward.default, *args, within=within)


def some_shapes(seed: int, number: int) -> Iterator[Shape]:
    """Draw small convolutions of any kind.

    Filters are no larger than images: for some that are, transposed and in bfloat16, oneDNN itself writes beyond its
    memory.
    """
    pick = random.Random(seed).choice
    while number:
        dimensions, groups, transposed = pick([1, 2, 2, 2, 3]), pick([1, 1, 1, 4, 16]), pick([False, False, True])
        inside, outside = (groups * pick([1, 3, 4, 8, 12, 16, 24, 32]) for _ in range(2))
        kernel = pick([1, 2, 3, 3, 3, 4, 5])
        edge = pick([kernel, 7, 8, 13, 16]) if dimensions < 3 else pick([kernel, 5, 6])
        padding = pick([0, kernel // 2, kernel // 2])
        stride, dilation = pick([1, 1, 2]), pick([1, 1, 1, 2])
        whole = (kernel - 1) * dilation + 1
        shape = Shape(
            pick([1, 2, 4]), inside, outside, edge, kernel, stride, padding, groups, transposed, dimensions, dilation
        )
        if edge <= padding if transposed else edge + 2 * padding < whole:
            continue
        number -= 1
        yield shape
