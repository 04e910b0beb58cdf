"""The layout: nothing lost, nothing overlapping, blocks torn alike."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.ir.layout import ALIGNMENT_NBYTES, ChunkLayout, ParamSpec
from chunkc.passes.planning.layout import SMALL_FRACTION, auto_chunk_nbytes, block_of, lay_out, unfrozen


def spec(name: str, numel: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> ParamSpec:
    return ParamSpec(name, (numel,), (1,), dtype, trainable)


def names(layout: ChunkLayout) -> list[list[str]]:
    return [[s.spec.name for s in group.slices] for group in layout.groups]


def check_invariants(layout: ChunkLayout, specs: list[ParamSpec]) -> None:
    placed = [s.spec for group in layout.groups for s in group.slices] + list(layout.small)
    assert sorted(s.name for s in placed) == sorted(s.name for s in specs)
    for index, group in enumerate(layout.groups):
        assert group.index == index
        assert group.slices
        assert {s.spec.dtype for s in group.slices} == {group.dtype}
        assert {s.spec.trainable for s in group.slices} == {group.trainable}
        for this, after in itertools.pairwise(group.slices):
            assert this.end <= after.offset
        for tensor in group.slices:
            assert tensor.offset * group.dtype.itemsize % ALIGNMENT_NBYTES == 0
        assert group.slices[-1].end <= group.numel
        assert group.nbytes("param") <= layout.chunk_nbytes or len(group.slices) == 1
    assert all(s.nbytes * SMALL_FRACTION <= layout.chunk_nbytes for s in layout.small)
    assert layout.group_of().keys() == {s.name for s in specs} - {s.name for s in layout.small}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("h.3.mlp.weight", ("h.3", True)),
        ("encoder.layer.11.output.dense.weight", ("encoder.layer.11", True)),
        ("h.0.experts.7.weight", ("h.0", True)),
        ("wte.weight", ("wte", False)),
        ("model.embed.weight", ("model.embed", False)),
        ("weight", ("weight", False)),
    ],
)
def test_blocks_end_at_the_first_number(name: str, block: tuple[str, bool]) -> None:
    assert block_of(name) == block


def blocks(num: int, **numels: int) -> list[ParamSpec]:
    return [spec(f"h.{i}.{part}", numel) for i in range(num) for part, numel in numels.items()]


LAID_OUT: dict[str, tuple[list[ParamSpec], int, list[str]]] = {
    # Parameters, elements of a chunk; and the groups.
    "a block that fits is never torn": (
        blocks(5, a=640, b=640, c=640), 4 * 640, [f"h.{i}.a h.{i}.b h.{i}.c" for i in range(5)]
    ),
    "blocks share where they fit whole": (
        blocks(5, a=640, b=640), 4 * 640, ["h.0.a h.0.b h.1.a h.1.b", "h.2.a h.2.b h.3.a h.3.b", "h.4.a h.4.b"]
    ),
    "larger blocks are torn at the same places everywhere": (
        [spec("wte.weight", 64), *blocks(4, a=640, b=640, c=1280), spec("head.weight", 640)],
        2 * 640,
        ["wte.weight", *(group for i in range(4) for group in (f"h.{i}.a h.{i}.b", f"h.{i}.c")), "head.weight"],
    ),
    "what follows a torn block does not join its rest": (
        [spec("h.0.a", 1280), spec("h.0.b", 64), spec("h.1.a", 64)], 1280, ["h.0.a", "h.0.b", "h.1.a"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAID_OUT)
def test_blocks_are_laid_out(name: str) -> None:
    specs, chunk_numel, groups = LAID_OUT[name]
    layout = lay_out(specs, chunk_numel * 4)
    check_invariants(layout, specs)
    assert [" ".join(group) for group in names(layout)] == groups


def test_parameters_below_a_share_of_a_chunk_stay() -> None:
    chunk_nbytes = 4096 * SMALL_FRACTION
    layout = lay_out([spec("a.bias", 1024), spec("a.weight", 1025)], chunk_nbytes)
    assert [s.name for s in layout.small] == ["a.bias"]
    assert names(layout) == [["a.weight"]]


def test_chosen_chunks_hold_a_block_each() -> None:
    specs = [spec("wte.weight", 5000)] + [spec(f"h.{i}.{p}", 3000) for i in range(6) for p in ("a", "b")]
    nbytes = auto_chunk_nbytes(specs)
    assert nbytes % 4096 == 0
    layout = lay_out(specs)
    assert layout.chunk_nbytes == nbytes
    assert [f"h.{i}.a" for i in range(6)] == [g[0] for g in names(layout) if g[0] != "wte.weight"]


def test_of_blocks_that_differ_half_are_no_larger_than_a_chunk() -> None:
    """A few huge blocks are torn, a few tiny ones share."""
    sizes = [256_000, 256_000, 384_000, 512_000, 768_000]
    specs = [spec(f"up.{i}.{p}", numel // 4) for i, numel in enumerate(sizes) for p in "abcd"]
    assert 4 * 384_000 <= auto_chunk_nbytes(specs) < 4 * 384_000 + 4096
    layout = lay_out(specs)
    check_invariants(layout, specs)
    assert names(layout)[-2:] == [["up.4.a", "up.4.b"], ["up.4.c", "up.4.d"]]
    small = [spec(f"up.{i}.{p}", numel // 1024) for i, numel in enumerate(sizes) for p in "abcd"]
    assert auto_chunk_nbytes(small) >= 4 * 768_000 // 256, "the largest is a chunk"
    alike = [spec(f"up.{i}.a", 3000) for i in range(6)]
    assert auto_chunk_nbytes(alike) == auto_chunk_nbytes([*alike, spec("norms.0.a", 64), spec("norms.1.a", 64)])


@pytest.mark.parametrize(("scale", "expected"), [(1, 1 << 20), (16, 4 * 384_000 * 16 // 4)])
def test_of_blocks_that_differ_widely_chunks_are_parts(scale: int, expected: int) -> None:
    sizes = [256_000, 256_000, 384_000, 512_000, 2_560_000]
    specs = [spec(f"up.{i}.{p}", scale * numel // 64) for i, numel in enumerate(sizes) for p in "abcdefgh" * 8]
    specs = [replace(one, name=f"{one.name}{number}") for number, one in enumerate(specs)]
    assert expected <= auto_chunk_nbytes(specs) < expected + 4096
    check_invariants(lay_out(specs), specs)


def test_without_repetition_a_chunk_holds_the_largest_tensor() -> None:
    specs = [spec("a.weight", 5000), spec("b.weight", 100)]
    assert 20_000 <= auto_chunk_nbytes(specs) < 20_000 + 4096
    assert auto_chunk_nbytes([]) == 4096


def test_extending_leaves_what_is_there() -> None:
    first = lay_out([spec("h.0.a", 640), spec("h.0.bias", 1)], 4096)
    more = lay_out([spec("h.1.a", 640), spec("h.1.bias", 1)], extending=first)
    assert more.chunk_nbytes == first.chunk_nbytes
    assert more.groups[: len(first.groups)] == first.groups
    assert more.small[: len(first.small)] == first.small
    check_invariants(more, [spec(f"h.{i}.{p}", n) for i in (0, 1) for p, n in (("a", 640), ("bias", 1))])


SPECS = st.lists(
    st.builds(
        lambda block, numel, dtype, trainable: (block, numel, dtype, trainable),
        st.sampled_from(["h.0", "h.1", "h.2", "wte", "head"]),
        st.integers(1, 4000),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.booleans(),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(SPECS, st.integers(256, 20_000))
def test_nothing_is_lost_and_nothing_overlaps(rows: list[tuple], chunk_nbytes: int) -> None:
    specs = [spec(f"{block}.p{i}", numel, dtype, train) for i, (block, numel, dtype, train) in enumerate(rows)]
    check_invariants(lay_out(specs, chunk_nbytes), specs)
    check_invariants(lay_out(specs), specs)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(512, 12_000), st.integers(3, 6))
def test_repeated_blocks_larger_than_half_a_chunk_are_laid_out_alike(
    numels: list[int], chunk_nbytes: int, num_blocks: int
) -> None:
    specs = [spec(f"h.{i}.p{k}", numel) for i in range(num_blocks) for k, numel in enumerate(numels)]
    room = sum(-(-n // 64) * 256 for n in numels if n * 4 * SMALL_FRACTION > chunk_nbytes)
    layout = lay_out(specs, chunk_nbytes)
    check_invariants(layout, specs)
    shapes = [[(s.spec.numel, s.offset) for s in g.slices] for g in layout.groups]
    if 2 * room > chunk_nbytes and shapes:
        per_block = len(shapes) // num_blocks
        assert shapes == shapes[:per_block] * num_blocks


def test_a_group_with_an_unfrozen_parameter_has_gradients() -> None:
    specs = [spec("a", 4096, trainable=False), spec("b", 4096, trainable=False), spec("tiny", 1, trainable=False)]
    before = lay_out(specs, 64 * 1024)
    after = unfrozen(before, {"b", "tiny"})
    assert [(s.spec.name, s.spec.trainable) for s in after.groups[0].slices] == [("a", False), ("b", True)]
    assert after.groups[0].trainable
    assert after.offsets == before.offsets
    assert [small.trainable for small in after.small] == [True]
    assert after.version == before.version + 1, "plans are kept by the layout's version"
    assert unfrozen(before, set()) is before
