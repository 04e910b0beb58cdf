"""Names, sizes and kinds of chunks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from chunk_names import chunk
from hypothesis import given
from hypothesis import strategies as st

from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, FLOAT32, MASTER, MASTER_LOW, StateFormat

KINDS = (PARAM, GRAD, MASTER, EXP_AVG, EXP_AVG_SQ)


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> ParamSpec:
    return ParamSpec(name, shape, torch.empty(shape, device="meta").stride(), dtype, trainable)


def group(dtype: torch.dtype = torch.float32, trainable: bool = True) -> ChunkGroup:
    one, two = (
        spec("a.w", 10, 10, dtype=dtype, trainable=trainable),
        spec("a.b", 7, dtype=dtype, trainable=trainable),
    )
    return ChunkGroup(0, dtype, trainable, 256, (TensorSlice(one, 0), TensorSlice(two, 128)))


PARTS = st.none() | st.tuples(st.integers(0, 10**9), st.integers(0, 10**9))
CHUNKS = st.builds(Chunk, st.sampled_from(KINDS), st.integers(0, 10**6), PARTS)


@given(CHUNKS, CHUNKS)
def test_an_identity_is_its_name(one: Chunk, other: Chunk) -> None:
    assert (one == other) == (str(one) == str(other))
    assert (one < other) == (str(one) < str(other))
    assert hash(one) == hash(Chunk(one.kind, one.group, one.part))
    assert repr(one) == repr(str(one))
    assert one.whole == Chunk(one.kind, one.group)


@given(CHUNKS)
def test_an_identity_goes_to_other_processes(one: Chunk) -> None:
    """Where the same text has another hash."""
    from_there = Chunk(one.kind, one.group, one.part)
    object.__setattr__(from_there, "_hash", hash(one) ^ 1)
    for copied in (pickle.loads(pickle.dumps(from_there)), copy.deepcopy(from_there)):
        assert copied == one
        assert hash(copied) == hash(one)


@pytest.mark.parametrize(
    ("holds", "of_parameters", "of_states"),
    [
        ("nothing", ("to_device", "to_home"), ("to_device", "to_home")),
        ("states", ("to_device", "to_home"), ("from_disk", "to_disk")),
        ("everything", ("from_disk", "to_disk"), ("from_disk", "to_disk")),
    ],
)
def test_chunks_come_and_leave_by_the_links_of_their_home(
    holds: Any, of_parameters: tuple[str, str], of_states: tuple[str, str]
) -> None:
    layout = ChunkLayout(4096, (), (), disk_holds=holds)
    assert layout.links_of(PARAM) == layout.links_of(GRAD) == of_parameters
    assert layout.links_of(EXP_AVG) == of_states


def test_a_parameters_bytes() -> None:
    assert (spec("w", 3, 5).numel, spec("w", 3, 5).nbytes) == (15, 60)
    assert spec("w").numel == 1, "a scalar has one element"
    assert spec("w", 0, 5).nbytes == 0


@pytest.mark.parametrize(
    ("dtype", "nbytes_per_element"),
    [
        (torch.float32, 4 + 2 * 4),
        (torch.bfloat16, 2 + 2 + 2 * 4),
        (torch.float16, 2 + 3 * 4),
        (torch.float64, 8 + 2 * 8),
    ],
)
def test_gradients_and_states_of_a_parameter(dtype: torch.dtype, nbytes_per_element: int) -> None:
    assert spec("w", 10, dtype=dtype).training_nbytes == 10 * nbytes_per_element
    assert spec("w", 10, dtype=dtype, trainable=False).training_nbytes == 0


def test_dtypes_and_bytes_of_each_kind() -> None:
    full, half = group(), group(torch.bfloat16)
    assert full.update_kinds == (PARAM, GRAD, EXP_AVG, EXP_AVG_SQ)
    assert half.update_kinds == (PARAM, GRAD, MASTER_LOW, EXP_AVG, EXP_AVG_SQ)
    assert half.kind_dtype(MASTER_LOW) is torch.int16
    half = dataclasses.replace(half, states=StateFormat(master=FLOAT32))
    assert half.update_kinds == (PARAM, GRAD, MASTER, EXP_AVG, EXP_AVG_SQ)
    assert {full.kind_dtype(kind) for kind in KINDS if kind != MASTER} == {torch.float32}
    assert [half.kind_dtype(kind) for kind in KINDS] == [torch.bfloat16] * 2 + [torch.float32] * 3
    assert group(torch.float64).kind_dtype(EXP_AVG) is torch.float64
    assert [half.nbytes(kind) for kind in (PARAM, EXP_AVG)] == [512, 1024]
    assert half.update_nbytes_per_element == 2 + 2 + 3 * 4


def test_a_resident_group_takes_no_gaps() -> None:
    assert group().resident_nbytes == 107 * 4 * 4
    assert group(trainable=False).resident_nbytes == 107 * 4


def test_a_layout_knows_its_chunks() -> None:
    layout = ChunkLayout(1024, (group(), dataclasses.replace(group(torch.bfloat16), index=1)), ())
    assert layout.group_of()["a.w"] in (0, 1)
    assert layout.groups_of(["a.b", "elsewhere", "a.w"]) == {layout.group_of()["a.w"]}
    assert layout.groups_of(["elsewhere"]) == frozenset()
    assert layout.chunk_nbytes_of(chunk("param:0")) == 1024
    assert layout.chunk_nbytes_of(chunk("param:1")) == 512
    assert layout.chunk_nbytes_of(chunk("master_low:1")) == 512
    assert layout.chunk_nbytes_of(chunk("param:1[64:128]")) == 128
    assert layout.chunk_nbytes_of(chunk("exp_avg:1[64:128]")) == 256


def test_slices_end_where_their_elements_do() -> None:
    assert [s.end for s in group().slices] == [100, 135]
