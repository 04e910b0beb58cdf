"""Values as JSON and tensors, and back."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch

from chunkc.checkpoint.data import Tensors, decoded, encoded
from chunkc.ir.errors import CheckpointError, UnsupportedError


def there_and_back(value: Any) -> Any:
    tensors: Tensors = {}
    text = json.dumps(encoded(value, "value", tensors))
    return decoded(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**40),
        0.1,
        -0.0,
        math.inf,
        "text \u2028 \U0001f600",
        [1, [2.5, None]],
        (1, (2, [3])),
        {"a": {"b": 1}},
        {1: "a", (2, 3): "b", "$x": 1},
        {"$tensor": "not one"},
        Counter({30: 1, 80: 2}),
        {1, 2},
        deque([1, 2]),
        b"\x00\xff",
        1 + 2j,
        torch.bfloat16,
        torch.device("cpu"),
        np.float64(0.1),
        np.int32(7),
    ],
    ids=str,
)
def test_values(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_and_tensors_and_arrays() -> None:
    assert math.isnan(there_and_back(math.nan))
    tensor = torch.randn(2, 3, dtype=torch.bfloat16)
    assert there_and_back([{"a": tensor}])[0]["a"] is tensor
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    found = there_and_back(array)
    assert found.dtype == array.dtype
    assert (found == array).all()


def test_what_is_no_data_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"value\.a\.1 is a .*object; a checkpoint holds data only"):
        encoded({"a": [1, object()]}, "value", {})
    with pytest.raises(UnsupportedError, match=r"value is a NumPy array of object"):
        encoded(np.array([object()]), "value", {})


@pytest.mark.parametrize(
    "value", [{"$import": "os"}, {"$tuple": [1], "more": 2}, {"$dtype": "nn"}, {"$number": ["O", "AAAA"]}]
)
def test_other_forms_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint"):
        decoded(value, lambda key: torch.empty(0))


def test_tensors_whose_places_have_one_name() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}
    found = decoded(encoded(value, "state", tensors), tensors.__getitem__)
    assert torch.equal(found["a"]["b"], value["a"]["b"])
    assert torch.equal(found["a.b"], value["a.b"])
