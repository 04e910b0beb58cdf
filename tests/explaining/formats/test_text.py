"""The text on terminals of all kinds. What it says: `test_golden.py`."""

from __future__ import annotations

import io
import re

from rich.console import Console
from synthetic import MIB, large, measured, not_fitting, small

from chunkc.explaining.formats import print_text, render_text
from chunkc.ir.explanation import Peak


def test_many_modules_end_in_one_line_that_holds_the_rest() -> None:
    contents = {f"activations: {'x' * (i + 1)}": (100 - i) * MIB for i in range(30)}
    text = render_text(small(peak=Peak("backward.0", "aten.mm", "", contents)))
    for start, nbytes in (("16 smaller", sum(range(71, 87)) * MIB), ("activations", sum(contents.values()))):
        assert f"{nbytes:,}" in next(line for line in text.splitlines() if line.strip().startswith(start))


def test_plain_text_has_no_escapes_and_a_colour_terminal_has_the_same_words() -> None:
    plain = render_text(not_fitting(measured=measured()))
    assert "\x1b" not in plain
    assert plain.isascii()
    assert max(map(len, plain.splitlines())) <= 110
    buffer = io.StringIO()
    print_text(
        not_fitting(measured=measured()), Console(file=buffer, width=110, force_terminal=True, color_system="256")
    )
    assert "\x1b[" in buffer.getvalue()
    without_colour = re.sub(r"\x1b\[[0-9;]*m", "", buffer.getvalue())
    assert [line.rstrip() for line in without_colour.splitlines()] == plain.splitlines()


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    text = render_text(small(model="[bold]m[/bold]", notes=("[red]x",)))
    assert "[bold]m[/bold] on" in text
    assert "[red]x" in text


def test_a_narrow_console_loses_no_number() -> None:
    buffer = io.StringIO()
    print_text(small(), Console(file=buffer, width=60))
    assert f"{190 * MIB:,}" in buffer.getvalue()


def test_a_large_model_stays_short() -> None:
    assert len(render_text(large(100)).splitlines()) < 60
