"""Rounding on the bits: nearest is torch's, stochastic is unbiased, and its bits are random, reproducible and safe."""

from __future__ import annotations

import torch

from chunkc.kernels.formats import RoundingKey, rounding_key
from chunkc.kernels.rounding import mix32, random_bits16, round_nearest, round_stochastic

KEY = rounding_key(seed=5, step=1, chunk=0)
PINNED_MIX = [0, 2261973619, 2578835075]
PINNED_BITS = [[15299, 62695, 58523, 53351], [36696, 25485, 63604, 65220]]
PINNED_KEY = (2112053939, 1748607912)


def patterns() -> torch.Tensor:
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return ((torch.arange(1 << 16).unsqueeze(1) << 16) + lower).flatten().to(torch.int32).view(torch.float32)


def test_nearest_is_torchs() -> None:
    values = patterns()
    rounded, expected = round_nearest(values), values.to(torch.bfloat16)
    assert torch.equal(rounded.isnan(), values.isnan())
    number = ~values.isnan()
    assert torch.equal(rounded[number].view(torch.int16), expected[number].view(torch.int16))
    assert (rounded[~number].view(torch.int16) == 0x7FC0).all()


def test_stochastic_goes_to_a_neighbour() -> None:
    values = patterns()
    low, high = (round_stochastic(values, torch.tensor(random)) for random in (0, 0xFFFF))
    down = (values.view(torch.int32) & -0x10000).view(torch.float32)
    finite = values.isfinite()
    assert torch.equal(low[finite].float(), down[finite])
    step = (high.view(torch.int16).int() - low.view(torch.int16).int())[finite]
    assert torch.equal(step, ((values.view(torch.int32) & 0xFFFF) != 0)[finite].int())
    for rounded in (low, high):
        assert torch.equal(rounded[values.isinf()].float(), values[values.isinf()])
        assert rounded[values.isnan()].isnan().all()


def test_stochastic_is_unbiased() -> None:
    index = torch.arange(1 << 16)
    for value in (1.0 + 2**-9, 1.0 + 2**-12, -3.3, 1e-30):
        values = torch.full((1 << 16,), value)
        rounded = round_stochastic(values, random_bits16(index, KEY, 0)).double()
        unit = (rounded.max() - rounded.min()).item()
        assert unit > 0
        assert abs(rounded.mean().item() - values[0].double().item()) < unit * 4 * 0.5 / 256  # four deviations


def test_bits_are_random() -> None:
    """Each of the 16 is set half of the time, and two neighbours, streams, keys or upper words agree by chance."""
    num_elements = 1 << 16
    index = torch.arange(num_elements)
    bits = random_bits16(index, KEY, 0)
    assert (bits >= 0).all()
    assert (bits < 1 << 16).all()
    others = {
        "neighbour": random_bits16(index + 1, KEY, 0),
        "stream 1": random_bits16(index, KEY, 1),
        "stream 2": random_bits16(index, KEY, 2),
        "step": random_bits16(index, rounding_key(5, 2, 0), 0),
        "chunk": random_bits16(index, rounding_key(5, 1, 1), 0),
        "key.high": random_bits16(index, RoundingKey(KEY.low, KEY.high ^ 1), 0),
        "upper word": random_bits16(index + (1 << 32), KEY, 0),
    }
    tolerance = 5 * 0.5 / 256
    for place in range(16):
        mine = (bits >> place) & 1
        assert abs(mine.double().mean().item() - 0.5) < tolerance
        for what, other in others.items():
            agreement = (mine == ((other >> place) & 1)).double().mean().item()
            assert abs(agreement - 0.5) < tolerance, f"{what}, bit {place}"


def test_bits_are_these() -> None:
    """Pinned: a checkpoint continued by a later version must round alike."""
    index = torch.tensor([0, 1, 1 << 31, (1 << 32) + 1])
    assert mix32(torch.tensor([0, 1, 0xFFFFFFFF])).tolist() == PINNED_MIX
    assert random_bits16(index, RoundingKey(1, 2), 0).tolist() == PINNED_BITS[0]
    assert random_bits16(index, RoundingKey(1, 2), 2).tolist() == PINNED_BITS[1]
    assert tuple(rounding_key(1, 2, 3)) == PINNED_KEY


def test_mixing_is_a_bijection() -> None:
    values = torch.arange(0, 1 << 32, 4099)
    mixed = mix32(values)
    assert len(mixed.unique()) == len(values)
    assert (mixed < 1 << 32).all()
