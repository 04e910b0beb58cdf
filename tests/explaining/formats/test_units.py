from __future__ import annotations

import pytest

from chunkc.explaining.formats.units import byte_unit, share, short_nbytes, short_seconds


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1536, "1.50 KiB"),
        (-(3 << 20), "-3.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (1 << 41, "2.00 TiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert short_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (1.234, "1.23 s"), (123.4, "123 s"), (4321.0, "4,321 s"), (0.0456, "45.6 ms"), (7.89e-6, "7.89 us")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert short_seconds(seconds) == text


def test_a_time_below_a_microsecond_is_not_nothing() -> None:
    assert short_seconds(2e-9) == "0.002 us"


def test_share_and_axis_unit() -> None:
    assert (share(1, 8), share(1, 0)) == ("12.5 %", "")
    assert byte_unit(3 << 30) == ("GiB", 1 << 30)
    assert byte_unit(1 << 30) == ("MiB", 1 << 20)
    assert byte_unit(7) == ("bytes", 1)
