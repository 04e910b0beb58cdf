"""Explanations as JSON, and back.

| key | value |
|---|---|
| `version` | of these keys: 1 |
| `model`, `hardware`, `codegen` | what was explained, for which machine, compiled by whom |
| `fits` | a plan exists within the budget |
| `host_fits` | home's bytes are within the host's memory, with the peak where `device_is_host` |
| `num_parameters` | of the model |
| `memory_budget_nbytes` | of the compute tier |
| `minimum_budget_nbytes` | the smallest budget with a plan |
| `predicted_peak_nbytes` | on the compute tier; of the plan for the minimum budget where `fits` is false |
| `non_model_peak_nbytes` | the most that activations and temporaries take |
| `overhead_nbytes` | context and libraries, counted apart from all others |
| `home_nbytes`, `disk_nbytes` | at home, and how many of these on disk |
| `device_memory_nbytes`, `host_memory_nbytes` | of the machine; null where unknown |
| `peak` | the fullest moment: `moment`, `op`, `module`, `contents` (`kind: module` to bytes), `source` |
| `chunks` | of parameters: `size_nbytes`, `count`, `resident` (never leave the compute tier) |
| `traffic_nbytes` | copied in one step: `to_device`, `to_home` |
| `step_time_s` | predicted: `total`, `compute`, `to_device`, `to_home`, `optimizer`, `stall` |
| `moments` | `call`, `phase`, `op`, `module`, `source` (`file.py:12, code`), `start_s`, `contents`, `expression` |
| `events` | `stream`, `kind`, `name`, `start_s`, `end_s`, `nbytes` (copied, or an update's), `phase`, `module` |
| `notes` | assumptions and limits, one sentence each |
| `graphs` | phase to the graph's code |
| `plan_text` | the plan, printed |
| `device_is_host` | the compute tier is the host's memory, as on a CPU |
| `activation_checkpointing` | the model recomputes parts of its forward in the backward |
| `estimates` | operators whose inner memory is a guess: `operator`, `module` of the first, `nbytes` of the largest |
| `measured` | null, or of a model that has run: `peak_nbytes`, `moments`, `time_s`, `events` |

Moments and events stand on one line each, so that two files compare well.
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
    """The keys above, as text that `parse_json` reads back to an equal explanation."""
    values = {"version": VERSION} | explanation.to_dict()
    lines = (f"{json.dumps(key)}: {_value(value)}" for key, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_json(text: str, *, name: str = "this text") -> Explanation:
    """The explanation that `render_json` wrote; `name` names the text in errors.

    Raises:
        OptionsError: one line that says what is wrong with the text.
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
    """An explanation from a file of `chunkc explain MODEL --format json`.

    Raises:
        OptionsError: the file cannot be read or is none; one line that says why.
    """
    return parse_json(documents.read_text(Path(path)), name=str(path))


def _value(value: Any) -> str:
    """JSON of one value; a list of records gets a line for each."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
