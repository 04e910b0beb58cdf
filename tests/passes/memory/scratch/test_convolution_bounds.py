"""Convolutions as models have them against the allocator: never too little, and at most half as much again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from convolution_cases import KNOWN, SLACK_NBYTES, WITHIN, Shape, aten, gap
from metering import measure

from chunkc.passes.memory.scratch import cpu

pytestmark = pytest.mark.usefixtures("metered")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def check_calls(shape: Shape, dtype: torch.dtype, *, last: bool, bias: bool, within: float | None = WITHIN) -> None:
    """A forward and a backward of one convolution, with as many threads as are set."""
    image, filters = shape.image().to(dtype), shape.filters().to(dtype)
    if last:
        image, filters = (t.contiguous(memory_format=FORMATS[t.dim()]) for t in (image, filters))
    added = torch.randn(shape.outside).to(dtype) if bias else None
    result = check_call(aten.convolution.default, (image, filters, added, *shape.how), within)
    args = (torch.randn_like(result), image, filters, [shape.outside], *shape.how, [shape.inside > 3, True, bias])
    check_call(aten.convolution_backward.default, args, within)


def check_call(target, args: tuple, within: float | None):
    num_threads = torch.get_num_threads()
    measured, outputs = measure(target, args, {})
    predicted = cpu.scratch_nbytes(target, args, {}, outputs, num_threads)
    assert predicted >= measured, f"{target} takes {measured}, predicted {predicted}"
    if within is not None:
        limit = within * measured + num_threads * SLACK_NBYTES
        assert predicted <= limit, f"{target} takes {measured}, predicted {predicted}"
    return outputs


CLASSES = {
    "dense": Shape(2, 32, 48, 14, 3, padding=1),
    "strided": Shape(2, 32, 64, 14, 3, stride=2, padding=1),
    "one pixel": Shape(4, 64, 128, 14, 1),
    "depthwise": Shape(2, 72, 72, 14, 3, padding=1, groups=72),
    "depthwise, wide": Shape(2, 64, 64, 14, 7, padding=3, groups=64),
    "depthwise, strided": Shape(2, 48, 48, 14, 5, stride=2, padding=2, groups=48),
    "grouped by 4": Shape(2, 128, 128, 14, 3, padding=1, groups=32),
    "grouped by 8, strided": Shape(2, 128, 128, 14, 3, stride=2, padding=1, groups=16),
    "grouped by 24": Shape(2, 96, 96, 14, 3, padding=1, groups=4),
}


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels last"])
@pytest.mark.parametrize("dtype", KNOWN)
@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_within_half_as_much_again(name: str, dtype: torch.dtype, last: bool) -> None:
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        check_calls(CLASSES[name], dtype, last=last, bias=num_threads == 2, within=WITHIN if KNOWN[dtype] else None)


MODELS = {
    "stem": Shape(2, 3, 64, 64, 7, stride=2, padding=3),
    "patches": Shape(2, 3, 96, 64, 16, stride=16),
    "residual": Shape(4, 128, 128, 28, 3, padding=1),
    "late": Shape(4, 512, 512, 7, 3, padding=1),
    "grouped": Shape(4, 256, 256, 14, 3, padding=1, groups=32),
    "inverted bottleneck": Shape(4, 144, 144, 28, 3, stride=2, padding=1, groups=144),
    "with gaps": Shape(2, 64, 64, 28, 3, padding=2, dilation=2),
    "grown": Shape(4, 128, 64, 16, 2, stride=2, transposed=True),
    "generator": Shape(4, 64, 32, 16, 4, stride=2, padding=1, transposed=True),
    "causal": Shape(4, 256, 256, 128, 4, padding=3, groups=256, dimensions=1),
    "conformer": Shape(4, 144, 144, 100, 31, padding=15, groups=144, dimensions=1),
    "spectrogram": Shape(2, 80, 384, 150, 3, padding=1, dimensions=1),
    "positions of sound": Shape(2, 256, 256, 99, 128, padding=64, groups=16, dimensions=1),
    "volumes": Shape(2, 32, 32, 12, 3, padding=1, dimensions=3),
    "volumes, grown": Shape(2, 64, 32, 8, 2, stride=2, transposed=True, dimensions=3),
}


@pytest.mark.second_tier
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels last"])
@pytest.mark.parametrize("dtype", KNOWN)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_within_half_as_much_again(name: str, dtype: torch.dtype, last: bool) -> None:
    if last and MODELS[name].dimensions == 1:
        pytest.skip("rows have no such format")
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        check_calls(MODELS[name], dtype, last=last, bias=num_threads == 2, within=WITHIN if KNOWN[dtype] else None)


SMALL_VOLUMES = {
    "filters": Shape(1, 8, 8, 16, 3, padding=1, dimensions=3),
    "strided": Shape(1, 16, 32, 16, 3, stride=2, padding=1, dimensions=3),
    "deep": Shape(1, 32, 8, 8, 3, padding=1, dimensions=3),
}


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("name", SMALL_VOLUMES)
def test_one_small_volume_to_the_byte(name: str, num_threads: int) -> None:
    """ATen unfolds it, on every processor; whether it is small, its last dimension does not matter."""
    torch.set_num_threads(num_threads)
    shape = SMALL_VOLUMES[name]
    image, filters = shape.image(), shape.filters()
    assert gap(aten.convolution.default, image, filters, None, *shape.how) == 0
    grad = torch.randn_like(aten.convolution.default(image, filters, None, *shape.how))
    args = (grad, image, filters, [shape.outside], *shape.how, [False, True, False])
    assert gap(aten.convolution_backward.default, *args) == 0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_filters_of_one_row_of_volumes(num_threads: int) -> None:
    """On one thread ATen computes where the last two dimensions of filters are one pixel; else oneDNN's kernels do."""
    torch.set_num_threads(num_threads)
    image, filters = torch.randn(2, 16, 6, 8, 8), torch.randn(16, 16, 3, 1, 1)
    how = ([1, 1, 1], [1, 0, 0], [1, 1, 1], False, [0, 0, 0], 1)
    is_known = num_threads == 1 or KNOWN[torch.float32]
    check_call(aten.convolution.default, (image, filters, None, *how), WITHIN if is_known else None)


def some_shapes(seed: int, number: int) -> Iterator[Shape]:
    """Convolutions of any kind, small ones; filters not larger than images, since for some of those, transposed and in
    bfloat16, oneDNN itself writes beyond its memory."""
    pick = random.Random(seed).choice
    while number:
        dimensions, groups, transposed = pick([1, 2, 2, 2, 3]), pick([1, 1, 1, 4, 16]), pick([False, False, True])
        inside, outside = (groups * pick([1, 3, 4, 8, 12, 16, 24, 32]) for _ in range(2))
        kernel = pick([1, 2, 3, 3, 3, 4, 5])
        edge = pick([kernel, 7, 8, 13, 16]) if dimensions < 3 else pick([kernel, 5, 6])
        padding = pick([0, kernel // 2, kernel // 2])
        shape = Shape(
            pick([1, 2, 4]), inside, outside, edge, kernel, pick([1, 1, 2]), padding, groups, transposed, dimensions
        )
        if edge <= padding if transposed else edge + 2 * padding < kernel:
            continue
        number -= 1
        yield shape


@pytest.mark.second_tier
@pytest.mark.parametrize("dtype", KNOWN)
@pytest.mark.parametrize("seed", range(4))
def test_never_too_little_for_any_shape(seed: int, dtype: torch.dtype) -> None:
    for index, shape in enumerate(some_shapes(seed, 60)):
        torch.set_num_threads(1 + index % 4)
        check_calls(shape, dtype, last=index % 2 == 1 and shape.dimensions > 1, bias=index % 3 == 0, within=None)
