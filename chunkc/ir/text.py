"""Text for people: safe to show on a terminal, whatever names it is made of."""

from __future__ import annotations

import reprlib

_LONGEST = 2000
"""Characters of a line that stands for itself, such as an error's."""


def printable(text: str) -> str:
    """The text with every character that a terminal may obey as an escape (`\\x1b`), but for ends of lines and tabs.

    So are characters that change the direction of writing, and halves of surrogate pairs, which no encoding has.
    """
    if text.isascii() and text.isprintable():
        return text
    return "\n".join(line if line.isprintable() else "".join(map(_shown, line)) for line in text.split("\n"))


def one_line(text: str) -> str:
    """The text as one line of `printable` characters, which is cut where it is very long."""
    line = printable(" ".join(text.split("\n"))).replace("\t", " ").strip()
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def short(value: object) -> str:
    """The value on one short line."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # an int of too many digits, or a class whose repr fails
        return f"a {type(value).__name__} that cannot be shown"


def message_of(error: BaseException) -> str:
    """The first line of what an error says; empty where it says nothing, or fails to."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return ""
    return lines[0] if lines else ""


def _shown(character: str) -> str:
    if character.isprintable() or character == "\t":
        return character
    return character.encode("unicode_escape").decode("ascii")
