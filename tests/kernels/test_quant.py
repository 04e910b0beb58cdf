"""8-bit quantisation: the tables, the nearest code, what a block keeps."""

from __future__ import annotations

import pytest
import torch

from chunkc.kernels.quant import codebook, dequantise, midpoints, quantise

both = pytest.mark.parametrize("signed", [True, False])


def published_table(signed: bool) -> list[float]:
    """The algorithm of the paper's authors, `create_dynamic_map`, written again with `linspace`."""
    values = [0.0, 1.0]
    for i in range(7):
        num_boundaries = 2**i + 1 if signed else 2 ** (i + 1) + 1
        boundaries = torch.linspace(0.1, 1, num_boundaries, dtype=torch.float64)
        means = (10 ** (i - 6) * (boundaries[:-1] + boundaries[1:]) / 2).tolist()
        values += means + [-mean for mean in means if signed]
    return sorted(values)


@both
def test_tables(signed: bool) -> None:
    table, limits = codebook(signed=signed), midpoints(signed=signed)
    torch.testing.assert_close(table, tuple(published_table(signed)), rtol=1e-6, atol=0)
    assert list(table) == sorted(set(table))
    assert len(table) == 256
    assert all(low < limit < high for low, limit, high in zip(table, limits, table[1:]))
    assert 0.0 in table
    assert table[-1] == 1.0


@both
def test_codes_are_the_nearest(signed: bool) -> None:
    values = torch.linspace(-1.0 if signed else 0.0, 1.0, 256 * 100)
    values = torch.where(torch.arange(256 * 100) % 2 == 0, values, values**7)
    values[::256] = 1.0  # so that every scale is 1
    codes, scale = quantise(values, signed=signed)
    table = torch.tensor(codebook(signed=signed), dtype=torch.float64)
    distance = (values.double().unsqueeze(1) - table).abs()
    assert (scale == 1).all()
    chosen = distance.gather(1, codes.long().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, distance.amin(1), rtol=0, atol=1e-8)


@both
@pytest.mark.parametrize("num_elements", [0, 1, 255, 256, 257, 1000])
def test_round_trip(signed: bool, num_elements: int) -> None:
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    values = values if signed else values.abs()
    codes, scale = quantise(values, signed=signed)
    assert len(scale) == -(-num_elements // 256)
    again = dequantise(codes, scale, signed=signed)
    largest = scale.repeat_interleave(256)[:num_elements]
    assert ((again - values).abs() <= largest * 0.008).all()
    if not signed:
        assert torch.equal(dequantise(*quantise(again, signed=signed), signed=signed), again)
        assert torch.equal(again[values == largest], values[values == largest])


@both
def test_zeroed_buffers_are_zero_moments(signed: bool) -> None:
    codes, scale = torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    assert (dequantise(codes, scale, signed=signed) == 0).all()
    codes, scale = quantise(torch.zeros(300), signed=signed)
    assert (scale == 0).all()
    assert (dequantise(codes, scale, signed=signed) == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_stay_visible_in_their_block_only(bad: float) -> None:
    values = torch.ones(512)
    values[7] = bad
    codes, scale = quantise(values, signed=True)
    again = dequantise(codes, scale, signed=True)
    assert not again[:256].isfinite().any()
    assert (again[256:] == 1).all()
