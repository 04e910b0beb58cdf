"""`overlap="backward"` with every rule, budget, code generator and home: the bits of updates in the step.

Where the optimizer may undo them, two steps are clipped on the way, and their updates undone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import differences
from slot_cases import WITHOUT_GRADIENTS, clip_some, trained, trained_undoably

import chunkc

pytestmark = [pytest.mark.timeout(120), pytest.mark.second_tier]

IN_ADAM = {"lr": 1e-2, "moments_dtype": "int8", "stochastic_rounding": True}
CASES: dict[str, dict[str, Any]] = {
    "adamw, bf16, split masters": {"dtype": torch.bfloat16},
    "adam, 8 bits": {"optimizer": chunkc.optim.Adam, "arguments": IN_ADAM, "dtype": torch.bfloat16},
    "sgd, fp16": {
        "optimizer": chunkc.optim.SGD,
        "arguments": {"lr": 1e-2, "momentum": 0.9},
        "dtype": torch.float16,
    },
    "lamb": {"optimizer": chunkc.optim.LAMB, "arguments": {"lr": 1e-2, "weight_decay": 0.1}},
    "no room for updates": {"spare_nbytes": 0},
    "9,000 bytes of room": {"spare_nbytes": 9_000},
    "some stays": {"spare_nbytes": WITHOUT_GRADIENTS},
    "inductor": {"codegen": "inductor"},
    "disk": {"home": "disk"},
}
ALONE = {("undoable", "lamb"), ("consumed", "some stays")}
"""The first is refused; the second is `test_resident_updates`'s."""


@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way in ("consumed", "undoable") for name in CASES if (way, name) not in ALONE]
)
def test_the_bits_are_those_of_updates_in_the_step(way: str, name: str, tmp_path: Any) -> None:
    options = {key: f"disk:{tmp_path}" if value == "disk" else value for key, value in CASES[name].items()}
    if way == "consumed":
        found, made = trained("backward", num_steps=3, **options)
        expected, _ = trained("none", num_steps=3, **options)
        made.backward(4)
        updated = made.used
    else:
        found, made, (*_, updated) = trained_undoably("backward", clip_some, **options)
        expected, _, _ = trained_undoably("none", clip_some, **options)
    assert not differences(found, expected)
    if options.get("spare_nbytes") == 9_000 and way == "consumed":
        assert updated
    else:
        assert updated == (set() if name == "no room for updates" else made.moving)
