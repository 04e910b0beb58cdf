"""Check sections of a configuration by pydantic, with errors of one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from chunkc.engine.keys import AUTO, unknown_key
from chunkc.ir.errors import OptionsError
from chunkc.ir.text import short


class Section(BaseModel):
    """A section with a field for each key; other keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def checked(kind: type[S], values: Mapping[str, Any], path: str = "") -> S:
    """Return a checked section of these values; a key with null counts as missing.

    Args:
        path: dotted name of the section, for errors; empty at the top.

    Raises:
        OptionsError: a key is unknown, `"auto"` or missing, or has an invalid value; the message names it.
    """
    prefix = f"{path}." if path else ""
    given = {key: value for key, value in values.items() if value is not None}
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    for key, value in given.items():
        if key not in fields:
            raise OptionsError(unknown_key(prefix + str(key), [prefix + name for name in fields]))
        if isinstance(value, str) and value == AUTO:
            raise OptionsError(left_open(prefix + key))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        wrong = {".".join(map(str, detail["loc"][:1])): detail["msg"] for detail in reversed(error.errors())}
        lines = [
            f"{prefix}{key} is {short(given[key])}: {message}" if key in given else f"{prefix}{key}: {message}"
            for key, message in reversed(wrong.items())
        ]
    raise OptionsError("; ".join(lines))


def left_open(name: str) -> str:
    """Return the error text for an `"auto"` that was not filled in."""
    return (
        f'{name} is "auto", which the Trainer of transformers fills elsewhere: write a value, or pass '
        f"initialize_engine(auto=...) the TrainingArguments or {{{name!r}: ...}}"
    )
