"""Convolutions of square images, measured against what is predicted of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from metering import measure

from chunkc.passes.memory.scratch import cpu
from chunkc.torch_private import onednn

aten = torch.ops.aten

KNOWN = {
    torch.float32: onednn.uses_avx512(),
    torch.bfloat16: onednn.multiplies_bfloat16() and not onednn.multiplies_tiles(),
}
"""Whether predictions follow the kernels that oneDNN picks here; else they are wide bounds."""
WITHIN = 1.5
"""How many times the truth may be predicted where they do: caches and threads change oneDNN's choices, too."""
SLACK_NBYTES = 16 << 10
"""Per thread, in addition to what is taken: a few pages of addresses and barriers."""


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

    def image(self) -> torch.Tensor:
        return torch.randn(self.images, self.inside, *[self.edge] * self.dimensions)

    def filters(self) -> torch.Tensor:
        first, second = (self.inside, self.outside) if self.transposed else (self.outside, self.inside)
        return torch.randn(first, second // self.groups, *[self.kernel] * self.dimensions)


def gap(target, *args) -> int:
    """Predicted bytes less measured ones."""
    measured, outputs = measure(target, args, {})
    return cpu.scratch_nbytes(target, args, {}, outputs, torch.get_num_threads()) - measured


def check(target, *args, within: float = WITHIN) -> None:
    """Never too little; where kernels are known, at most `within` times the truth, and a few pages."""
    measured, outputs = measure(target, args, {})
    num_threads = torch.get_num_threads()
    predicted = cpu.scratch_nbytes(target, args, {}, outputs, num_threads)
    what = f"{target} takes {measured}, predicted {predicted}"
    assert predicted >= measured, what
    (dtype,) = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
    assert not KNOWN.get(dtype) or predicted <= within * measured + num_threads * SLACK_NBYTES, what


def check_both(shape: Shape, *, bias: bool, dtype: torch.dtype = torch.float32, within: float = WITHIN) -> None:
    """`check` of the forward and of the backward for all that is asked for in training."""
    image, filters = shape.image().to(dtype), shape.filters().to(dtype)
    added = torch.randn(shape.outside).to(dtype) if bias else None
    grad = torch.randn(aten.convolution.default(image, filters, added, *shape.how).shape).to(dtype)
    mask = [shape.inside > 3, True, bias]
    check(aten.convolution.default, image, filters, added, *shape.how, within=within)
    check(
        aten.convolution_backward.default, grad, image, filters, [shape.outside], *shape.how, mask, within=within
    )  # fmt: skip


def gaps(shape: Shape, *, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Gaps of the forward, and of the backward for all that training asks for."""
    image, filters = shape.image().to(dtype), shape.filters().to(dtype)
    added = torch.randn(shape.outside).to(dtype) if bias else None
    grad = torch.randn(aten.convolution.default(image, filters, added, *shape.how).shape).to(dtype)
    mask = [shape.inside > 3, True, bias]
    return (
        gap(aten.convolution.default, image, filters, added, *shape.how),
        gap(aten.convolution_backward.default, grad, image, filters, [shape.outside], *shape.how, mask),
    )


def last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)
