"""Convolutions and their backwards against the allocator: exact where oneDNN's kernels are known, else never less."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from metering import measure

from chunkc.passes import scratch

pytestmark = pytest.mark.usefixtures("metered")
aten = torch.ops.aten
AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="blocks are known for AVX-512 only"
)


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
    return scratch.scratch_nbytes(target, args, {}, outputs, torch.get_num_threads()) - measured


def gaps(shape: Shape, *, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Of the forward and of the backward for all that is asked for in training."""
    image, filters = shape.image().to(dtype), shape.filters().to(dtype)
    added = torch.randn(shape.outside).to(dtype) if bias else None
    grad = torch.randn(aten.convolution.default(image, filters, added, *shape.how).shape).to(dtype)
    mask = [shape.inside > 3, True, bias]
    return (
        gap(aten.convolution.default, image, filters, added, *shape.how),
        gap(aten.convolution_backward.default, grad, image, filters, [shape.outside], *shape.how, mask),
    )


EXACT = {
    "blocks": Shape(2, 32, 64, 16, 3, padding=1),
    "threads share rows": Shape(2, 16, 16, 32, 3, padding=1),
    "threads share images": Shape(8, 48, 32, 14, 3, stride=2, padding=1),
    "padded blocks": Shape(2, 20, 24, 16, 3, padding=1),
    "colours": Shape(2, 3, 16, 32, 7, stride=2, padding=3),
    "patches": Shape(2, 3, 128, 32, 8, stride=8),
    "strided": Shape(2, 64, 64, 32, 3, stride=2, padding=1),
    "strided, filters padded": Shape(2, 48, 16, 16, 4, stride=2, padding=1),
    "strided, uneven": Shape(2, 32, 32, 15, 3, stride=2, padding=1),
    "one dimension": Shape(2, 128, 128, 100, 3, stride=2, padding=1, dimensions=1),
}


@AVX512
@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("name", EXACT)
def test_known_kernels_to_the_byte(name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    assert gaps(EXACT[name], bias=False) == (0, 0)


@AVX512
@pytest.mark.parametrize("name", EXACT)
def test_a_bias_is_known_too(name: str) -> None:
    torch.set_num_threads(2)
    assert gaps(EXACT[name], bias=True) == (0, 0)


@AVX512
def test_depthwise_filters_of_convnext() -> None:
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert gaps(Shape(2, 32, 32, 8, 7, padding=3, groups=32), bias=True) == (0, 0)


def last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


TRANSPOSED_CHANNELS_LAST = {
    "growing": Shape(2, 16, 16, 16, 2, stride=2, transposed=True),
    "overlapping": Shape(4, 16, 32, 8, 4, stride=2, padding=1, transposed=True),
    "uneven": Shape(2, 20, 24, 9, 3, stride=2, padding=1, transposed=True),
}


@AVX512
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", TRANSPOSED_CHANNELS_LAST)
def test_transposed_channels_last_to_the_byte(name: str, num_threads: int, bias: bool) -> None:
    torch.set_num_threads(num_threads)
    shape = TRANSPOSED_CHANNELS_LAST[name]
    image, filters, added = shape.image(), shape.filters(), torch.randn(shape.outside) if bias else None
    for formats in ((last(image), last(filters)), (last(image), filters), (image, last(filters))):
        assert gap(aten.convolution.default, *formats, added, *shape.how) == 0


BOUNDED = {
    "one pixel": Shape(4, 20, 40, 16, 1),
    "one pixel, strided": Shape(4, 32, 64, 16, 1, stride=2),
    "wide stride": Shape(2, 64, 96, 32, 5, stride=3),
    "large filters": Shape(2, 32, 96, 7, 7),
    "transposed": Shape(3, 64, 96, 16, 5, padding=2, transposed=True),
    "transposed, strided": Shape(3, 32, 16, 20, 2, stride=3, transposed=True),
    "few channels": Shape(2, 4, 96, 32, 3, stride=3),
    "groups": Shape(2, 64, 128, 8, 3, padding=1, groups=4),
    "depthwise": Shape(8, 64, 64, 14, 3, groups=64),
    "depthwise, one pixel": Shape(2, 64, 64, 14, 1, groups=64),
    "gaps": Shape(2, 32, 32, 16, 3, padding=2, dilation=2),
    "gaps, strided": Shape(2, 32, 32, 16, 3, stride=2, padding=2, dilation=2),
    "one image": Shape(1, 16, 32, 16, 3, padding=1),
}


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BOUNDED)
def test_never_too_little(name: str, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for bias in (False, True):
        assert min(gaps(BOUNDED[name], bias=bias, dtype=dtype)) >= 0
