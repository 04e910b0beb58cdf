"""Convolutions and their backwards against the allocator: exact where oneDNN's kernels are known, else never less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from convolution_cases import Shape, aten, gap, gaps, last

from chunkc.runtime import cpu_allocator

AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="blocks are known for AVX-512 only"
)


@pytest.fixture(autouse=True)
def _meter() -> Iterator[None]:
    cpu_allocator.install()
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


EXACT = {
    "blocks": Shape(2, 32, 64, 16, 3, padding=1),
    "threads share rows": Shape(2, 16, 16, 32, 3, padding=1),
    "threads share images": Shape(8, 48, 32, 14, 3, stride=2, padding=1),
    "padded blocks": Shape(2, 20, 24, 16, 3, padding=1),
    "colours": Shape(2, 3, 16, 32, 7, stride=2, padding=3),
    "colours, threads share images": Shape(4, 3, 32, 32, 3, stride=2, padding=1),
    "colours, many images": Shape(8, 3, 32, 32, 3, stride=2, padding=1),
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
