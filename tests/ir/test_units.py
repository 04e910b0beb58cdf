"""Sizes in text: read in every unit, and printed."""

from __future__ import annotations

import pytest

from chunkc.ir.units import format_nbytes, parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("7B", 7),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("1.5 MB", 1_500_000),
        (" 1.5mib ", 1_572_864),
        ("2GB", 2 * 10**9),
        ("2GiB", 2 * 2**30),
        ("0.001TB", 10**9),
        ("1TIB", 2**40),
        ("0.1KiB", 102),
    ],
)
def test_sizes_are_read_in_every_unit(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "6", "GiB", "6G", "-6GiB", "1e3MiB", "6GiB\nmore", "9" * 5000 + "GiB", "٦GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_nbytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.00 KiB (1,024 bytes)"),
        (1_572_864, "1.50 MiB (1,572,864 bytes)"),
        (2**30, "1.00 GiB (1,073,741,824 bytes)"),
        (2**40, "1.00 TiB (1,099,511,627,776 bytes)"),
        (-2048, "-2.00 KiB (-2,048 bytes)"),
    ],
)
def test_bytes_are_printed_for_people_and_exactly(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
