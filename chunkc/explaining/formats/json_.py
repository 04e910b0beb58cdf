"""Write explanations as JSON, and read them back.

The keys are those of `chunkc.ir.explanation.Explanation`, and `version`; `docs/explain.md` describes them. Moments and
events have a line each, so that two files compare well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chunkc.ir import documents
from chunkc.ir.errors import OptionsError
from chunkc.ir.explanation import Explanation
from chunkc.ir.text import short

VERSION = 1


def render_json(explanation: Explanation) -> str:
    """Render all keys; `parse_json` reads an equal explanation back."""
    values = {"version": VERSION} | explanation.to_dict()
    lines = (f"{json.dumps(key)}: {_value(value)}" for key, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_json(text: str, *, name: str = "this text") -> Explanation:
    """Read an explanation that `render_json` wrote; errors call the text `name`.

    Raises:
        OptionsError: the text is invalid; the error says why in one line.
    """
    values = documents.parse_json(text, name)
    if not isinstance(values, dict) or "version" not in values:
        raise OptionsError(f"{name} is no chunkc explanation: make one with `chunkc explain MODEL --format json`")
    if (version := values.pop("version")) != VERSION:
        raise OptionsError(
            f"{name} has version {short(version)} of the keys, this chunkc reads {VERSION}: make the explanation again"
        )
    try:
        return Explanation.from_dict(values)
    except OptionsError as error:
        raise OptionsError(f"{name} is {error}") from None


def read_explanation(path: str | Path) -> Explanation:
    """Read an explanation from a file of `chunkc explain MODEL --format json`.

    Raises:
        OptionsError: the file cannot be read, or has no explanation; the error says why in one line.
    """
    return parse_json(documents.read_text(Path(path)), name=str(path))


def _value(value: Any) -> str:
    """Render a value; a list of records gets a line for each."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
