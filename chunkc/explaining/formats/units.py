"""Bytes, seconds and shares as a person reads them, in a few characters."""

from __future__ import annotations

from chunkc.ir.units import BINARY_UNITS

_SECOND_UNITS = ((1.0, 1, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "us"))


def short_nbytes(nbytes: int) -> str:
    """`5.61 GiB`; whole bytes below 1 KiB. The sign is kept."""
    for unit, scale in BINARY_UNITS:
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes:,} bytes"


def byte_unit(nbytes: int) -> tuple[str, int]:
    """The unit to draw an axis in that ends at `nbytes`, and its bytes. The largest of which there are two or more."""
    return next(((unit, scale) for unit, scale in BINARY_UNITS if nbytes >= 2 * scale), ("bytes", 1))


def short_seconds(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.89 us`: three digits, the unit that fits. The sign is kept."""
    for least, scale, unit in _SECOND_UNITS:
        if abs(seconds) >= least:
            return f"{_three_digits(seconds * scale)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e6:.2g} us"


def share(part: float, whole: float) -> str:
    """`12.3 %`; empty where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def _three_digits(value: float) -> str:
    num_whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, 3 - num_whole)}f}"
