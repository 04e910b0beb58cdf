"""Read JSON and YAML files of users; every defect is an error of one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from chunkc.ir.errors import OptionsError
from chunkc.ir.text import message_of

MAX_NBYTES = 256 << 20
"""Limit on a file: a device such as /dev/zero has no end."""

MAX_DIGITS = 100
"""Limit on an integer."""


def read_text(path: Path, *, what: str = "", language: str = "JSON") -> str:
    """Read a UTF-8 text file.

    Args:
        what: noun for the file, for errors.
        language: language the file should be written in, for errors.

    Raises:
        OptionsError: the file cannot be read, or is not text.
    """
    named = f"{what} {path}".strip()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_NBYTES + 1)
    except OSError as error:
        raise OptionsError(f"cannot read {named}: {error.strerror}") from None
    except ValueError as error:  # not a legal file name
        raise OptionsError(f"cannot read {named}: {error}") from None
    if len(content) > MAX_NBYTES:
        raise OptionsError(f"cannot read {named}: it has more than {MAX_NBYTES >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise OptionsError(f"{path} is not {language}: it is not a text file in UTF-8") from None


def parse_json(text: str, name: str, *, finite: bool = True) -> Any:
    """Parse a JSON text; `name` names it in errors.

    Args:
        finite: refuse `Infinity`, `NaN` and numbers too large for a float.

    Raises:
        OptionsError: the text is not JSON, is nested too deeply, or has a number outside these limits.
    """

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise OptionsError(f"{name} has a number of {len(digits):,} digits; allowed: {MAX_DIGITS}")
        return int(digits)

    def refused(constant: str) -> NoReturn:
        raise OptionsError(f"{name} has {constant} among its numbers, which must be finite")

    def fraction(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            refused(digits if len(digits) < MAX_DIGITS else "a number of too many digits")
        return number

    try:
        if finite:
            return json.loads(text, parse_int=whole, parse_float=fraction, parse_constant=refused)
        return json.loads(text, parse_int=whole)
    except json.JSONDecodeError as error:
        raise OptionsError(f"{name} is not JSON: line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise OptionsError(f"{name} is nested too deeply") from None


def parse_yaml(text: str, name: str) -> Any:
    """Parse a YAML text; `name` names it in errors.

    Raises:
        OptionsError: the text is not YAML or is nested too deeply, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise OptionsError(f"{name}: reading YAML needs PyYAML: run `pip install pyyaml`, or write JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionsError(f"{name} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise OptionsError(f"{name} is nested too deeply") from None
    except Exception as error:  # a scalar that fails to convert: a date in month 13, too many digits
        raise OptionsError(f"{name} is not YAML: {message_of(error)}") from None
