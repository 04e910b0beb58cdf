"""Read names, shorten them, and make them and messages safe to show on a terminal."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

_LONGEST = 2000
"""Most characters of a line shown by itself, such as an error's."""


def printable(text: str) -> str:
    r"""Escape every character that a terminal may obey (`\x1b`), except ends of lines and tabs.

    Also escapes characters that change the direction of writing, and halves of surrogate pairs, which no encoding has.
    """
    if text.isascii() and text.isprintable():
        return text
    return "\n".join(line if line.isprintable() else "".join(map(_shown, line)) for line in text.split("\n"))


def one_line(text: str) -> str:
    """Join the text into one line of `printable` characters, with the middle of a very long line cut out."""
    line = printable(" ".join(text.split("\n"))).replace("\t", " ").strip()
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def short(value: object) -> str:
    """Return the value on one short line."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # an int of too many digits, or a class with a repr that fails
        return f"a {type(value).__name__} that cannot be shown"


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def message_of(error: BaseException) -> str:
    """Return the first line of an error's message; empty if there is none, or if `str` fails."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return ""
    return lines[0] if lines else ""


def _shown(character: str) -> str:
    if character.isprintable() or character == "\t":
        return character
    return character.encode("unicode_escape").decode("ascii")


def is_of_a_loss(operation: str) -> bool:
    """Whether the name of an operation, such as that at a peak, says that it is part of a cross entropy."""
    return any(name in operation for name in ("log_softmax", "nll_loss"))
