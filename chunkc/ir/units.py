"""Parse and print sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

BINARY_UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
"""Units of printed sizes, the largest first, with bytes."""

_DECIMAL_UNITS = {"b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}

BYTE_UNITS: Mapping[str, int] = MappingProxyType(_DECIMAL_UNITS | {unit.lower(): n for unit, n in BINARY_UNITS})
"""Units that sizes may be written in, in lower case, with bytes."""

NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?)"
"""Regular expression of a number as users write it: one group."""

_SIZE = re.compile(rf"{NUMBER}\s*({'|'.join(BYTE_UNITS)})", re.IGNORECASE)


def parse_nbytes(text: str) -> int:
    """Parse a size such as "1.5GiB" into bytes (a fraction of a byte is cut off).

    Raises:
        ValueError: it is no number with one of `BYTE_UNITS`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a size")
    return int(Fraction(match[1]) * BYTE_UNITS[match[2].lower()])


def format_nbytes(nbytes: int) -> str:
    """Print bytes for people, with the exact count: `1.50 MiB (1,572,864 bytes)`."""
    return short_nbytes(nbytes) if abs(nbytes) < 1024 else f"{short_nbytes(nbytes)} ({nbytes:,} bytes)"


def short_nbytes(nbytes: int) -> str:
    """Print bytes as `5.61 GiB`; whole bytes below 1 KiB. The sign is kept."""
    for unit, scale in BINARY_UNITS:
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes:,} bytes"
