"""Convolutions and their backwards against the allocator: exact where ATen computes; oneDNN's never less, and close
where its kernels are known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from convolution_cases import KNOWN, SLACK_NBYTES, Shape, aten, check, check_both, gap, gaps, last

pytestmark = pytest.mark.usefixtures("metered")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
USUAL = {
    "blocks": Shape(2, 32, 64, 16, 3, padding=1),
    "threads share rows": Shape(2, 16, 16, 32, 3, padding=1),
    "threads share images": Shape(8, 48, 32, 14, 3, stride=2, padding=1),
    "padded blocks": Shape(2, 20, 24, 16, 3, padding=1),
    "colours": Shape(2, 3, 16, 32, 7, stride=2, padding=3),
    "colours, threads share images": Shape(4, 3, 32, 32, 3, stride=2, padding=1),
    "colours, many images": Shape(8, 3, 32, 32, 3, stride=2, padding=1),
    "patches": Shape(2, 3, 128, 32, 8, stride=8),
    "patches of 16": Shape(2, 3, 64, 64, 16, stride=16),
    "patches of 32, one image": Shape(1, 3, 48, 64, 32, stride=32),
    "strided": Shape(2, 64, 64, 32, 3, stride=2, padding=1),
    "strided, filters padded": Shape(2, 48, 16, 16, 4, stride=2, padding=1),
    "strided, uneven": Shape(2, 32, 32, 15, 3, stride=2, padding=1),
    "one dimension": Shape(2, 128, 128, 100, 3, stride=2, padding=1, dimensions=1),
}


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("name", USUAL)
def test_usual_ones(name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    check_both(USUAL[name], bias=False)


@pytest.mark.parametrize("name", USUAL)
def test_a_bias_is_known_too(name: str) -> None:
    torch.set_num_threads(2)
    check_both(USUAL[name], bias=True)


@pytest.mark.parametrize("images", [15, 16])
def test_one_pixel_on_one_thread(images: int) -> None:
    """Up to 15 images a product in place, then oneDNN's."""
    torch.set_num_threads(1)
    shape = Shape(images, 64, 32, 8, 1)
    if images == 15:
        assert gaps(shape, bias=False) == (0, 0)
    else:
        assert min(gaps(shape, bias=False)) >= 0


@dataclass(frozen=True)
class Oblong:
    """A float32 convolution whose edges, strides or padding differ by dimension."""

    image: tuple[int, int, int, int]
    filters: tuple[int, int, int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    num_threads: int


OBLONG = {
    "strided once": Oblong((2, 8, 3, 100), (128, 8, 3, 3), (2, 1), (1, 1), 4),
    "flat filters": Oblong((2, 4, 32, 32), (200, 4, 1, 3), (2, 2), (0, 1), 2),
    "padded once": Oblong((4, 1, 56, 56), (48, 1, 5, 5), (1, 2), (2, 0), 4),
    "one column": Oblong((2, 96, 14, 2), (64, 96, 2, 2), (2, 2), (1, 0), 2),
    "larger than the image": Oblong((2, 8, 14, 4), (48, 8, 7, 7), (1, 2), (3, 3), 4),
    "few channels, small images": Oblong((3, 8, 4, 4), (384, 8, 5, 5), (2, 2), (2, 2), 4),
    "one pixel, strides that leave some over": Oblong((3, 12, 5, 5), (16, 12, 1, 1), (2, 2), (0, 0), 8),
    "much larger than the image": Oblong((3, 512, 3, 3), (40, 512, 7, 7), (2, 2), (3, 3), 16),
    "48 channels": Oblong((1, 4, 9, 28), (48, 4, 7, 7), (2, 2), (3, 0), 4),
}


@pytest.mark.parametrize("name", OBLONG)
def test_oblong_is_never_too_little(name: str) -> None:
    shape = OBLONG[name]
    torch.set_num_threads(shape.num_threads)
    image, filters = torch.randn(shape.image), torch.randn(shape.filters)
    how = (list(shape.stride), list(shape.padding), [1, 1], False, [0, 0], 1)
    for formats in ((image, filters), (last(image), last(filters))):
        assert gap(aten.convolution.default, *formats, None, *how) >= 0
    grad = torch.randn_like(aten.convolution.default(image, filters, None, *how))
    for mask in ([True, False, False], [False, True, False], [True, True, False]):
        assert gap(aten.convolution_backward.default, grad, image, filters, [0], *how, mask) >= 0


def test_depthwise_filters_of_convnext() -> None:
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        check_both(Shape(2, 32, 32, 8, 7, padding=3, groups=32), bias=True)


DEPTHWISE_CHANNELS_LAST = {
    "convnext": Shape(2, 32, 32, 14, 7, padding=3, groups=32),
    "strided": Shape(3, 48, 48, 14, 5, stride=2, padding=2, groups=48),
    "four pixels": Shape(1, 16, 16, 9, 4, padding=1, groups=16),
}


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("name", DEPTHWISE_CHANNELS_LAST)
def test_depthwise_gradients_of_channels_last(name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    shape = DEPTHWISE_CHANNELS_LAST[name]
    image, filters = last(shape.image()), shape.filters()
    grad = torch.randn_like(aten.convolution.default(image, filters, None, *shape.how))
    for given in (grad, grad.contiguous()):
        for mask in ([True, True, True], [True, True, False], [False, True, True], [True, False, False]):
            args = (given, image, filters, [shape.outside], *shape.how, mask)
            check(aten.convolution_backward.default, *args)


DEPTHWISE_LARGER_THAN_IMAGES = {
    "convnext's last stage": Shape(2, 64, 64, 4, 7, padding=3, groups=64),
    "as large": Shape(2, 32, 32, 7, 7, padding=3, groups=32),
    "strided": Shape(1, 48, 48, 3, 5, stride=2, padding=2, groups=48),
}


@pytest.mark.parametrize("name", DEPTHWISE_LARGER_THAN_IMAGES)
def test_depthwise_filters_larger_than_images_of_channels_last(name: str) -> None:
    torch.set_num_threads(2)
    shape = DEPTHWISE_LARGER_THAN_IMAGES[name]
    image, filters, bias = last(shape.image()), shape.filters(), torch.randn(shape.outside)
    check(aten.convolution.default, image, filters, bias, *shape.how)
    grad = torch.randn_like(aten.convolution.default(image, filters, bias, *shape.how))
    for mask in ([True, False, False], [False, True, True]):
        check(aten.convolution_backward.default, grad, image, filters, [shape.outside], *shape.how, mask)


@pytest.mark.parametrize("padding", [6, 7, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_filters_with_gaps_and_much_padding_are_computed_as_groups(dtype: torch.dtype, padding: int) -> None:
    """As those of visual attention networks: 7 pixels wide, every third one."""
    torch.set_num_threads(2)
    shape = Shape(2, 32, 32, 30, 3, padding=padding, dilation=padding, groups=32)
    image, filters = last(shape.image().to(dtype)), shape.filters().to(dtype)
    check(aten.convolution.default, image, filters, None, *shape.how)
    network = Shape(2, 32, 32, 14, 7, padding=9, dilation=3, groups=32)
    image, filters = last(network.image().to(dtype)), network.filters().to(dtype)
    assert gap(aten.convolution.default, image, filters, None, *network.how) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_depthwise_gradients_of_an_image_as_small_as_a_filter_are_never_too_little(dtype: torch.dtype) -> None:
    torch.set_num_threads(4)
    for images, channels in ((3, 64), (8, 96)):
        shape = Shape(images, channels, channels, 3, 3, stride=2, padding=1, groups=channels)
        image, filters = shape.image().to(dtype), shape.filters().to(dtype)
        grad = torch.randn_like(aten.convolution.default(image, filters, None, *shape.how))
        args = (grad, image, filters, [channels], *shape.how, [False, True, dtype == torch.bfloat16])
        assert gap(aten.convolution_backward.default, *args) >= 0


@pytest.mark.parametrize("num_threads", [1, 4])
def test_narrow_depthwise_gradients_of_channels_last_within_a_few_filters(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    shape = Shape(4, 40, 40, 14, 3, stride=2, padding=1, groups=40)
    image, filters = last(shape.image()), shape.filters()
    grad = torch.randn_like(aten.convolution.default(image, filters, None, *shape.how))
    args = (grad, image, filters, [40], *shape.how, [True, True, True])
    found = gap(aten.convolution_backward.default, *args)
    assert found >= 0
    if KNOWN[torch.float32]:
        assert found < 8 * filters.nbytes + num_threads * SLACK_NBYTES


TRANSPOSED_CHANNELS_LAST = {
    "growing": Shape(2, 16, 16, 16, 2, stride=2, transposed=True),
    "overlapping": Shape(4, 16, 32, 8, 4, stride=2, padding=1, transposed=True),
    "uneven": Shape(2, 20, 24, 9, 3, stride=2, padding=1, transposed=True),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", TRANSPOSED_CHANNELS_LAST)
def test_transposed_channels_last(name: str, num_threads: int, bias: bool) -> None:
    torch.set_num_threads(num_threads)
    shape = TRANSPOSED_CHANNELS_LAST[name]
    image, filters, added = shape.image(), shape.filters(), torch.randn(shape.outside) if bias else None
    for formats in ((last(image), last(filters)), (last(image), filters), (image, last(filters))):
        check(aten.convolution.default, *formats, added, *shape.how)


UNFOLDED = {
    "filters": Shape(1, 8, 16, 14, 3, padding=1),
    "strided": Shape(1, 20, 48, 9, 3, stride=2, padding=1),
    "strided, one pixel": Shape(1, 64, 16, 8, 1, stride=2),
    "one pixel": Shape(1, 64, 32, 8, 1),
    "padded pixel": Shape(1, 3, 16, 8, 1, padding=1),
    "one position": Shape(1, 32, 64, 3, 3),
}


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("name", UNFOLDED)
def test_one_small_image_to_the_byte(name: str, num_threads: int) -> None:
    """ATen's own kernel, on every processor."""
    torch.set_num_threads(num_threads)
    assert gaps(UNFOLDED[name], bias=False) == gaps(UNFOLDED[name], bias=True) == (0, 0)


def test_one_small_image_of_one_row_to_the_byte() -> None:
    torch.set_num_threads(2)
    assert gaps(Shape(1, 16, 48, 60, 8, padding=3, dimensions=1), bias=True) == (0, 0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_addresses_of_many_pixels(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    shape = Shape(2, 32, 16, 16, 11, padding=5)
    check(aten.convolution.default, last(shape.image()), last(shape.filters()), None, *shape.how)


@pytest.mark.parametrize("name", UNFOLDED)
def test_one_small_image_in_other_formats_is_never_too_little(name: str) -> None:
    shape = UNFOLDED[name]
    image, filters = shape.image(), shape.filters()
    grad = torch.randn_like(aten.convolution.default(image, filters, None, *shape.how))
    for formats in ((last(image), last(filters)), (last(image), filters), (image, last(filters))):
        assert gap(aten.convolution.default, *formats, None, *shape.how) >= 0
        for given in (grad, last(grad)):
            for mask in ([True, False, False], [False, True, False], [True, True, False]):
                assert gap(aten.convolution_backward.default, given, *formats, [0], *shape.how, mask) >= 0


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
    "wide filters": Shape(2, 32, 32, 16, 15, padding=7),
    "wide filters, strided": Shape(2, 32, 32, 32, 16, stride=2, padding=7),
    "wide filters, few channels": Shape(2, 8, 32, 32, 15, padding=7),
    "wide filters of one row": Shape(2, 32, 32, 100, 31, padding=15, dimensions=1),
    "wide filters in groups": Shape(2, 64, 64, 64, 16, padding=8, groups=4, dimensions=1),
    "wide depthwise filters": Shape(2, 32, 32, 16, 15, padding=7, groups=32),
    "wide filters, transposed": Shape(2, 32, 16, 6, 16, stride=8, padding=4, transposed=True),
    "padded by more than the result": Shape(4, 2, 16, 9, 8, stride=4, padding=4),
}


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BOUNDED)
def test_never_too_little(name: str, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for bias in (False, True):
        assert min(gaps(BOUNDED[name], bias=bias, dtype=dtype)) >= 0


CONVOLUTIONS = [  # images, channels in and out, pixels, kernel, stride, padding, groups
    (1, 3, 16, 8, 3, 1, 1, 1), (1, 3, 64, 32, 7, 2, 3, 1), (2, 3, 64, 32, 4, 4, 0, 1),
    (8, 64, 64, 14, 3, 1, 1, 1), (2, 64, 128, 28, 1, 1, 0, 1), (2, 128, 128, 14, 3, 2, 1, 1),
    (2, 96, 96, 14, 7, 1, 3, 96), (2, 64, 64, 14, 3, 1, 1, 4), (1, 64, 64, 14, 1, 1, 0, 1),
    (4, 256, 256, 7, 3, 1, 1, 32), (2, 20, 50, 9, 5, 1, 2, 1),
]  # fmt: skip


def check_threads(target, *args) -> None:
    """Never less than measured, for every number of threads."""
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert gap(target, *args) >= 0, f"{target} with {num_threads} threads"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_convolutions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    images, channels, filters, pixels, kernel, stride, padding, groups = shape
    image = torch.randn(images, channels, pixels, pixels).to(dtype)
    weight, bias = (
        torch.randn(filters, channels // groups, kernel, kernel).to(dtype),
        torch.zeros(filters).to(dtype),
    )
    how = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    for x in (image, image.to(memory_format=torch.channels_last)):
        grad = torch.randn_like(aten.convolution.default(x, weight, bias, *how))
        check_threads(aten.convolution.default, x, weight, bias, *how)
        check_threads(aten.convolution_backward.default, grad, x, weight, [filters], *how, [True, True, True])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_other_convolutions(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 16, 50).to(dtype), torch.randn(32, 16, 3).to(dtype)
    check_threads(aten.convolution.default, x, w, None, [1], [0], [1], False, [0], 1)
    up = torch.randn(16, 32, 3).to(dtype)
    check_threads(aten.convolution.default, x, up, None, [2], [1], [1], True, [1], 1)
    image, small = torch.randn(2, 8, 9, 9).to(dtype), torch.randn(6, 8, 3, 3).to(dtype)
    check_threads(aten.convolution.default, image, small, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for_all = ([2], [0], [1], False, [0], 1)  # one number for all dimensions
    check_threads(aten.convolution.default, image, small, None, *for_all)
    grad = torch.randn_like(aten.convolution.default(image, small, None, *for_all))
    check_threads(aten.convolution_backward.default, grad, image, small, [0], *for_all, [True, True, False])
    volume, filters = torch.randn(2, 4, 6, 7, 8).to(dtype), torch.randn(8, 4, 3, 3, 3).to(dtype)
    check_threads(aten.convolution.default, volume, filters, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
