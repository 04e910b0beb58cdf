"""Format seconds, percentages and axes of bytes in a few characters, for people."""

from __future__ import annotations

from chunkc.ir.units import BINARY_UNITS

_SECOND_UNITS = ((1.0, 1, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "us"))


def byte_unit(nbytes: int) -> tuple[str, int]:
    """Return the unit, and its bytes, for an axis that ends at `nbytes`: the largest unit that fits twice."""
    return next(((unit, scale) for unit, scale in BINARY_UNITS if nbytes >= 2 * scale), ("bytes", 1))


def short_seconds(seconds: float) -> str:
    """Format seconds with three digits and a fitting unit: `1.23 s`, `45.6 ms`, `7.89 us`. The sign is kept."""
    for least, scale, unit in _SECOND_UNITS:
        if abs(seconds) >= least:
            return f"{_three_digits(seconds * scale)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e6:.2g} us"


def share(part: float, whole: float) -> str:
    """Format a fraction as `12.3 %`; "" if `whole` is zero."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def _three_digits(value: float) -> str:
    num_whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, 3 - num_whole)}f}"
