"""Bfloat16 convolutions against the allocator: where oneDNN's kernels are known, close; never too little."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from convolution_cases import KNOWN, SLACK_NBYTES, Shape, aten, check, check_both, gap, gaps, last

from chunkc.passes.memory.scratch import cpu
from chunkc.torch_private import onednn

pytestmark = pytest.mark.usefixtures("metered")
BF16 = torch.bfloat16

USUAL = {
    "colours": Shape(2, 3, 16, 32, 7, stride=2, padding=3),
    "blocks": Shape(2, 32, 64, 16, 3, padding=1),
    "padded blocks": Shape(2, 20, 24, 16, 3, padding=1),
    "threads share rows": Shape(2, 16, 16, 32, 3, padding=1),
    "threads share images": Shape(4, 128, 160, 8, 3, padding=1),
    "strided": Shape(2, 16, 32, 8, 3, stride=2, padding=1),
    "small images": Shape(2, 64, 64, 2, 3, padding=1),
    "long filters": Shape(2, 32, 200, 14, 5, padding=2),
    "no padding": Shape(3, 24, 16, 7, 3),
    "patches of 14": Shape(2, 3, 64, 56, 14, stride=14),
    "patches of 16": Shape(4, 3, 64, 64, 16, stride=16),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("name", USUAL)
def test_usual_ones(name: str, num_threads: int, bias: bool) -> None:
    torch.set_num_threads(num_threads)
    check_both(USUAL[name], bias=bias, dtype=BF16)


def gap_of_channels_last(shape: Shape) -> tuple[int, int]:
    """Predicted bytes less measured ones, and the measured ones."""
    image, filters = last(shape.image().to(BF16)), last(shape.filters().to(BF16))
    found = gap(aten.convolution.default, image, filters, None, *shape.how)
    outputs = aten.convolution.default(image, filters, None, *shape.how)
    args = (image, filters, None, *shape.how)
    return found, cpu.scratch_nbytes(aten.convolution.default, args, {}, outputs, torch.get_num_threads()) - found


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("name", ["blocks", "threads share images", "strided", "small images", "no padding"])
def test_channels_last(name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    shape = USUAL[name]
    check(aten.convolution.default, last(shape.image().to(BF16)), last(shape.filters().to(BF16)), None, *shape.how)


MAY_BE_DIVIDED = {
    "many pixels": Shape(2, 64, 16, 8, 7, padding=3),
    "many channels": Shape(2, 768, 64, 8, 3, padding=1),
    "wider than the image": Shape(2, 32, 64, 16, 2, padding=1),
    "blocks of 32": Shape(2, 16, 40, 8, 3, padding=1),
}


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("name", MAY_BE_DIVIDED)
def test_channels_last_within_one_row_of_sums(name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    shape = MAY_BE_DIVIDED[name]
    found, measured = gap_of_channels_last(shape)
    rows_nbytes = 4096 + 4 * num_threads * 64 * (shape.edge + 1)
    assert found >= 0
    assert not KNOWN[BF16] or found <= rows_nbytes + measured // 3 + num_threads * SLACK_NBYTES


ONE_PIXEL = {
    "few positions": Shape(2, 32, 64, 4, 1),
    "strided": Shape(2, 16, 32, 8, 1, stride=2),
    "strided, pixels left over": Shape(2, 32, 200, 5, 1, stride=2),
    "many positions": Shape(2, 64, 96, 28, 1),
    "few channels": Shape(4, 8, 40, 16, 1),
}


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("name", ONE_PIXEL)
def test_one_pixel_is_bounded(name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for bias in (False, True):
        forward, backward = gaps(ONE_PIXEL[name], bias=bias, dtype=BF16)
        assert forward >= 0
        assert backward >= 0
        if KNOWN[BF16]:
            assert max(forward, backward) < 1 << 20, "far below what is reckoned per thread of unknown kernels"


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 64, 96, 15, 3, stride=2, padding=1),
        Shape(2, 48, 512, 7, 5, stride=3, padding=2),
        Shape(1, 512, 128, 8, 3, stride=2, padding=1),
        Shape(8, 12, 20, 9, 3, padding=1),
        Shape(2, 64, 16, 5, 7, stride=3, padding=3),
        replace(USUAL["blocks"], dilation=2),
        replace(USUAL["blocks"], groups=4),
    ],
    ids=lambda shape: f"{shape.inside}-{shape.outside}-{shape.edge}-{shape.kernel}-{shape.groups}-{shape.dilation}",
)
def test_never_too_little(shape: Shape, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for bias in (False, True):
        assert min(gaps(shape, bias=bias, dtype=BF16)) >= 0
    assert gap_of_channels_last(shape)[0] >= 0


@pytest.mark.parametrize("missing", ["bfloat16 instructions", "AMX is there"])
def test_other_processors_keep_the_bound(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels and AMX's take other scratch, which is not known."""
    shape = USUAL["blocks"]
    image, filters = shape.image().to(BF16), shape.filters().to(BF16)
    args = (image, filters, None, *shape.how)
    outputs = torch.empty(2, 64, 16, 16, dtype=BF16)
    monkeypatch.setattr(onednn, "computes", lambda dtype: True)
    monkeypatch.setattr(onednn, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(onednn, "multiplies_tiles", lambda: False)
    known = cpu.scratch_nbytes(aten.convolution.default, args, {}, outputs, 2)
    assert known == 2 * (2 * 32 * 16 * 16 + 64 * 32 * 9)
    if missing == "AMX is there":
        monkeypatch.setattr(onednn, "multiplies_tiles", lambda: True)
    else:
        monkeypatch.setattr(onednn, "multiplies_bfloat16", lambda: False)
    assert cpu.scratch_nbytes(aten.convolution.default, args, {}, outputs, 2) > known + (2 << 20)
