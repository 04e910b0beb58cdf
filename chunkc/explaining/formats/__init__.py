"""Show an explanation in the formats of `chunkc explain --format`, or the `diff` of two."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from rich.console import Console

from chunkc.explaining.formats.diff import diff
from chunkc.explaining.formats.graph import render_graph
from chunkc.explaining.formats.html import render_html
from chunkc.explaining.formats.json_ import parse_json, read_explanation, render_json
from chunkc.explaining.formats.text import print_text, render_text
from chunkc.explaining.formats.trace import render_trace
from chunkc.ir.errors import OptionsError
from chunkc.ir.explanation import Explanation
from chunkc.ir.text import printable

__all__ = [
    "FORMATS",
    "diff",
    "parse_json",
    "print_text",
    "read_explanation",
    "render",
    "render_graph",
    "render_html",
    "render_json",
    "render_text",
    "render_trace",
    "write",
]


FORMATS: Mapping[str, Callable[[Explanation], str]] = MappingProxyType(
    {
        "text": render_text,
        "json": render_json,
        "graph": render_graph,
        "html": render_html,
        "trace": render_trace,
    }
)
"""Format -> the function that renders an explanation."""


def render(explanation: Explanation, format: str = "text") -> str:
    """Render an explanation in one of `FORMATS`; control characters in names are escaped.

    Raises:
        OptionsError: there is no such format.
        UnsupportedError: the format needs a package that is not installed.
    """
    if format not in FORMATS:
        raise OptionsError(f"there is no format {format!r}: use one of {', '.join(FORMATS)}")
    return printable(FORMATS[format](explanation))


def write(explanation: Explanation, format: str = "text", output: str | Path | TextIO | None = None) -> None:
    """Write to a file (in UTF-8, replacing it), to a stream, or to the standard output where `output` is None.

    On a terminal, `text` uses its colours and its width.

    Raises:
        OptionsError: there is no such format, or the file cannot be written.
        UnsupportedError: the format needs a package that is not installed.
    """
    if isinstance(output, (str, Path)):
        text = render(explanation, format)
        try:
            Path(output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise OptionsError(f"cannot write {output}: {error.strerror}") from None
        return
    stream = sys.stdout if output is None else output
    if format == "text" and stream.isatty():
        print_text(explanation, Console(file=stream))
    else:
        stream.write(render(explanation, format))
