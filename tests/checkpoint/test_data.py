"""Values as JSON and tensors, and back; checksums of pieces; the state that a rank loads."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch

from chunkc.checkpoint.checksums import Piece, joined
from chunkc.checkpoint.data import Tensors, decoded, encoded
from chunkc.checkpoint.manifest import File
from chunkc.checkpoint.restoring import _saved_rank
from chunkc.ir.errors import CheckpointError, UnsupportedError


def there_and_back(value: Any) -> Any:
    tensors: Tensors = {}
    text = json.dumps(encoded(value, "value", tensors))
    return decoded(json.loads(text), tensors.__getitem__)


VALUES: list[Any] = [
    None, True, -(10**40), 0.1, -0.0, math.inf, "text \u2028 \U0001f600", [1, [2.5, None]], (1, (2, [3])),
    {"a": {"b": 1}}, {1: "a", (2, 3): "b", "$x": 1}, {"$tensor": "not one"}, Counter({30: 1, 80: 2}), {1, 2},
    deque([1, 2]), b"\x00\xff", 1 + 2j, torch.bfloat16, torch.device("cpu"), np.float64(0.1), np.int32(7),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
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


# ---------------------------------------------------------------- checksums of pieces, put together


@pytest.mark.parametrize("seed", range(5))
def test_pieces_in_any_order(seed: int) -> None:
    generator = random.Random(seed)
    content = generator.randbytes(generator.randrange(1, 5000))
    ends = [*sorted(generator.choices(range(len(content) + 1), k=generator.randrange(6))), len(content)]
    pieces, begin = [], 0
    for end in ends:  # some are empty
        pieces.append(Piece(begin, end - begin, zlib.crc32(content[begin:end])))
        begin = end
    generator.shuffle(pieces)
    assert joined(pieces) == File(len(content), zlib.crc32(content))


def test_a_gap_and_an_overlap_are_found() -> None:
    whole = Piece(0, 4, zlib.crc32(b"abcd"))
    for other in (Piece(5, 1, 1), Piece(3, 1, 1)):
        with pytest.raises(AssertionError):
            joined([whole, other])


@pytest.mark.parametrize("seed", range(5))
def test_pieces_with_gaps_that_others_fill(seed: int) -> None:
    """As of columns: each rank writes a part of every row."""
    generator = random.Random(seed)
    rows, row_nbytes, cut = generator.randrange(1, 50), 40, generator.randrange(1, 40)
    content = generator.randbytes(rows * row_nbytes)
    whole = []
    for begin, end in ((0, cut), (cut, row_nbytes)):
        runs = [(row * row_nbytes + begin, content[row * row_nbytes :][begin:end]) for row in range(rows)]
        one, *others = (Piece(offset, len(run), zlib.crc32(run)) for offset, run in runs)
        for other in others:
            one = one.followed_by(other)
        assert (one.offset_nbytes, one.nbytes) == (begin, rows * (end - begin))
        whole.append(one)
    generator.shuffle(whole)
    assert joined(whole) == File(len(content), zlib.crc32(content))
    with pytest.raises(AssertionError):
        joined(whole[:1])


# ---------------------------------------------------------------- the state that a rank loads


@pytest.mark.parametrize(
    ("of_a_layer", "saved_of_a_layer", "expected"),
    [
        (1, 1, [0, 1, 2, 3]),
        (2, 2, [0, 1, 2, 3]),
        (1, 2, [0, 2, 4, 6]),  # each row's data goes to one rank
        (2, 1, [0, 0, 1, 1]),  # each rank's data goes to a row
        (4, 2, [0, 1, 0, 0]),
        (2, 4, [0, 1, 4, 5]),
    ],
)
def test_the_rank_that_had_this_rank_s_data(of_a_layer: int, saved_of_a_layer: int, expected: list[int]) -> None:
    assert [_saved_rank(rank, of_a_layer, saved_of_a_layer) for rank in range(4)] == expected
