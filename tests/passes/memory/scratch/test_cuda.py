"""Scratch on CUDA devices: what nobody knows is guessed, what users declare counts, and formulas as the sources have
them. What they give is checked by measuring where there is a GPU (`tests/gpu`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map_only

import chunkc
from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch import declared
from chunkc.passes.memory.scratch.cuda import cuda_scratch_nbytes, is_known_on_cuda
from chunkc.passes.memory.scratch.cuda_rules import CONVOLUTION_NBYTES
from chunkc.passes.memory.scratch.cuda_sorting import scan_nbytes, sort_nbytes

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


HALF, I64, MIB = torch.bfloat16, torch.int64, 1 << 20
Call = tuple[Any, tuple[Any, ...]]


@pytest.fixture
def odd() -> Iterator[torch._ops.OpOverload]:
    """An operator that chunkc has never seen."""
    with torch.library._scoped_library("chunkc_cuda_tests", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        yield torch.ops.chunkc_cuda_tests.odd.default
    declared._declared.pop("chunkc_cuda_tests::odd", None)


def test_of_an_unknown_operator_operands_and_results_once_more_are_a_guess(odd: torch._ops.OpOverload) -> None:
    assert not is_known_on_cuda(odd)
    assert cuda_scratch_nbytes(odd, (meta(4),), {}, meta(200)) == 512 + 1024
    assert is_known_on_cuda(aten._assert_async.msg)
    assert cuda_scratch_nbytes(aten._assert_async.msg, (meta(1), "no"), {}, None) == 0


def test_what_is_declared_counts_rounded_and_before_the_table(odd: torch._ops.OpOverload) -> None:
    x = meta(4)
    chunkc.declare_scratch("chunkc_cuda_tests::odd", lambda args, kwargs, outputs, threads: 3 * args[0].nbytes + 1)
    assert is_known_on_cuda(odd)
    assert cuda_scratch_nbytes(odd, (x,), {}, x) == 512
    image, kernel = meta(1, 3, 8, 8), meta(4, 3, 3, 3)
    arguments = (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    before = cuda_scratch_nbytes(aten.convolution.default, arguments, {}, meta(1, 4, 8, 8))
    try:
        chunkc.declare_scratch("aten::convolution", lambda args, kwargs, outputs, threads: 1024)
        assert cuda_scratch_nbytes(aten.convolution.default, arguments, {}, meta(1, 4, 8, 8)) == 1024 < before
    finally:
        declared._declared.pop("aten::convolution")


def test_what_is_set_aside_for_a_convolution_grows_with_it_up_to_a_limit() -> None:
    def of(width: int) -> int:
        image, kernel = meta(8, 64, width, width), meta(64, 64, 3, 3)
        arguments = (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        operands = 4 * (2 * image.numel() + kernel.numel())
        return cuda_scratch_nbytes(aten.convolution.default, arguments, {}, image) - operands

    assert of(8) < of(64) < of(1024) == CONVOLUTION_NBYTES


def test_without_cudnn_a_convolution_takes_its_columns() -> None:
    """What it takes is compared with what it took in `tests/gpu_in_ram`."""
    image, kernel = meta(8, 64, 56, 56), meta(64, 64, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    columns = 64 * 9 * 56 * 56 * 4
    with torch.backends.cudnn.flags(enabled=False):
        assert cuda_scratch_nbytes(aten.convolution.default, (image, kernel, None, *rest), {}, image) == columns
        given = (image, image, kernel, None, *rest, [True, True, False])
        backward = cuda_scratch_nbytes(aten.convolution_backward.default, given, {}, (image, kernel))
        assert backward == columns
        dilated = (image, kernel, None, [1, 1], [2, 2], [2, 2], False, [0, 0], 1)
        assert cuda_scratch_nbytes(aten.convolution.default, dilated, {}, image) > 10 * columns  # as with cuDNN


def test_cudnn_s_attention_makes_gradients_per_query_head_where_heads_share_keys() -> None:
    """As fp32 at most: `dK_fullhead` and `dV_fullhead` of cuDNN's frontend."""
    half = torch.bfloat16
    query, lse, seed = meta(2, 8, 1024, 64, dtype=half), meta(2, 8, 1024, 1), meta(dtype=torch.int64)
    op = aten._scaled_dot_product_cudnn_attention_backward.default

    def nbytes(num_heads: int) -> int:
        key = meta(2, num_heads, 1024, 64, dtype=half)
        given = (query, query, key, key, query, lse, seed, seed, None, None, None, 1024, 1024, 0.0, True)
        return cuda_scratch_nbytes(op, given, {}, (query, key, key))

    sums = 4 * query.numel() + 4 * lse.numel()
    assert nbytes(8) >= sums
    assert nbytes(2) - nbytes(8) == 2 * 4 * query.numel()


def bools(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.bool)


def last(*shape: int) -> Tensor:
    """Images with channels last."""
    return meta(*shape).to(memory_format=torch.channels_last)


def layer_norm_backward(rows: int, width: int) -> Call:
    x, stat, weight = meta(rows, width), meta(rows, 1), meta(width)
    return aten.native_layer_norm_backward.default, (x, x, [width], stat, stat, weight, weight, [True] * 3)


def batch_norm(x: Tensor, trains: bool = True) -> Call:
    statistics = [meta(x.shape[1]) for _ in range(4)]
    return aten._native_batch_norm_legit_functional.default, (x, *statistics, trains, 0.1, 1e-5)


def batch_norm_backward(x: Tensor) -> Call:
    statistics = [meta(x.shape[1]) for _ in range(5)]
    return aten.native_batch_norm_backward.default, (x, x, *statistics, True, 1e-5, [True] * 3)


def attention(width: int) -> Call:
    return aten._scaled_dot_product_efficient_attention.default, (*[meta(2, 4, 256, width, dtype=HALF)] * 3, None, True)


def attention_backward(width: int, dtype: torch.dtype, *, turned: bool = True) -> Call:
    x, rows, seed = meta(4, 8, 128, width, dtype=dtype), meta(4, 8, 128), meta(dtype=I64)
    gradient = meta(4, 128, 8, width, dtype=dtype).transpose(1, 2) if turned else x
    args = (gradient, x, x, x, None, x, rows, seed, seed, 0.0, [True, True, True, False])
    return aten._scaled_dot_product_efficient_attention_backward.default, args


X, TURNED = meta(64, 1024), meta(1024, 64).t()
SECOND_PASS = [4 * 1024 * 16 * 32 * 4, 512]
"""16 blocks of 4 rows of 32 threads with 4 columns each share an output."""
ROWS_NBYTES = 4 * 8 * 128 * 4
CALLS: list[tuple[Call, list[int]]] = [
    # What runs, its arguments, and the bytes inside: each a block of its own.
    ((aten.add_.Tensor, (X, X)), []),
    ((aten.gelu.default, (X,)), []),
    ((aten.t.default, (X,)), []),
    ((aten._softmax_backward_data.default, (X, X, 1, torch.float32)), [X.nbytes]),
    ((aten._softmax_backward_data.default, (TURNED, TURNED, 1, torch.float32)), 3 * [X.nbytes]),
    ((aten._safe_softmax.default, (X, 1)), [X.numel(), 64, 4]),
    (layer_norm_backward(65_536, 1024), []),
    (layer_norm_backward(131_072, 1024), [*(2 * [4 * (32_768 // 32) * 1024]), *SECOND_PASS, 4 * 1024]),
    ((aten.sum.dim_IntList, (meta(1024, 1024, dtype=HALF), [0])), SECOND_PASS),
    ((aten.sum.dim_IntList, (meta(1024, 2048, dtype=HALF), [1])), []),
    ((aten.any.default, (meta(1, 1),)), [1]),
    ((aten.sum.default, (bools(3000),)), [24_000]),
    ((aten.count_nonzero.default, (meta(3000),)), [3000, 24_000]),
    ((aten.max.default, (meta(30, 50).t(),)), [6000]),
    ((aten.cumsum.default, (meta(30, 50).t(), 0)), [6000]),
    ((aten.cumsum.default, (bools(30, 50), 0)), [12_000]),
    ((aten.isfinite.default, (meta(1000),)), [4000, 1000, 1000]),
    ((aten.isfinite.default, (meta(1000, dtype=I64),)), []),
    ((aten.clamp.default, (meta(1000, dtype=I64), 0.5)), [4000]),
    ((aten.where.ScalarOther, (bools(9), meta(9), 1.0)), [4]),
    ((aten.where.self, (bools(900), meta(900), meta(900, dtype=HALF))), [3600]),
    ((aten.pow.Scalar, (2.0, meta(9))), [4]),
    ((aten.abs.default, (meta(900, dtype=torch.complex64),)), [7200]),
    ((aten.histc.default, (meta(900),)), [4, 4]),
    ((aten.histc.default, (meta(900), 100, 0, 9)), []),
    ((aten.mm.default, (meta(30, 50), meta(40, 50).t())), []),
    ((aten.mm.default, (meta(30, 100)[:, ::2], meta(50, 40))), [6000]),
    ((aten.bmm.default, (meta(50).expand(2, 30, 50), meta(2, 50, 9))), [12_000]),
    ((aten.addmm.default, (meta(40).expand(30, 40), meta(30, 50), meta(50, 40))), []),
    (
        (aten.scatter_reduce.two, (meta(50, 9), 1, meta(50, 3, dtype=I64), meta(50, 3), "mean")),
        [600, 1800, 450],
    ),
    ((aten.bernoulli.default, (meta(900, dtype=HALF),)), [3600]),
    ((aten.bernoulli.p, (meta(900, dtype=HALF), 0.5)), []),
    ((aten.normal.float_Tensor, (0.0, meta(900))), [3600, 4, 4, 4]),
    ((aten.adaptive_max_pool2d.default, (last(2, 8, 12, 12), [3, 3])), [9216, 576, 1152]),
    (attention(64), []),
    (attention(192), [4 * 2 * 4 * 256 * 192]),
    # As the kernels asked for them on capabilities 7.5 to 9.0; those of halves and wide heads on some.
    (attention_backward(16, torch.float32), [32 * 32_800, ROWS_NBYTES]),
    (attention_backward(64, torch.float32), [32 * 33_280, ROWS_NBYTES]),
    (attention_backward(64, HALF), [32 * 32_800, ROWS_NBYTES]),
    (attention_backward(64, HALF, turned=False), [32 * 32_800, ROWS_NBYTES, 2 * 32 * 128 * 64]),
    (attention_backward(128, torch.float32), [32 * 66_048, ROWS_NBYTES]),
    (attention_backward(192, HALF), [32 * (98_400 + 2 * 131_072), ROWS_NBYTES]),
    # Where channels come last; few rows of blocks need no sums of their own.
    (batch_norm(meta(8, 64, 32, 32)), []),
    (batch_norm(last(8, 64, 32, 32)), [32_768, 512]),
    (batch_norm(last(64, 32, 64, 64)), [65_536, 512]),
    (batch_norm(last(2, 1024, 7, 7)), []),
    (batch_norm(last(8, 64, 32, 32), trains=False), []),
    (batch_norm_backward(meta(8, 64, 32, 32)), []),
    (batch_norm_backward(last(8, 64, 32, 32)), 2 * [256]),
    (batch_norm_backward(last(2, 1024, 7, 7)), 2 * [4096]),
]


@pytest.mark.parametrize(("called", "parts"), CALLS, ids=[str(called[0]) for called, _ in CALLS])
def test_what_the_sources_allocate_is_counted(called: Call, parts: list[int]) -> None:
    op, args = called
    assert cuda_scratch_nbytes(op, args, {}, op(*args)) == sum(map(rounded_nbytes, parts))


def test_halves_are_summed_in_fp32_without_a_copy() -> None:
    assert cuda_scratch_nbytes(aten.sum.default, (meta(3000, dtype=HALF),), {"dtype": torch.float32}, meta()) == 0


def test_a_mask_may_select_all_and_becomes_an_index_for_each_dimension() -> None:
    values, rows = meta(30, 50), meta(30, dtype=torch.bool)
    given = ([meta(30, 50, dtype=torch.bool)], [rows, meta(dtype=I64)], [rows, meta(3, dtype=I64)])
    found = [cuda_scratch_nbytes(aten.index_put.default, (values, of, meta()), {}, values) for of in given]
    assert found[0] == 2 * rounded_nbytes(8 * 1500)
    assert 0 < found[1] < found[2]


@pytest.mark.parametrize("enabled", [True, False])
def test_where_cudnn_may_be_chosen_its_policy_stands(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", enabled)
    x, statistics = meta(8, 64, 32, 32), [meta(64) for _ in range(4)]
    backward = (x, x, *statistics[:3], *statistics[:2], True, 1e-5, [True, True, True], meta(0))
    for op, args in (
        (aten._batch_norm_with_update_functional.default, (x, *statistics, 0.1, 1e-5)),
        (aten.batch_norm_backward.default, backward),
    ):
        policy_nbytes = x.nbytes + rounded_nbytes(2052 * 64)
        assert cuda_scratch_nbytes(op, args, {}, x) == (policy_nbytes if enabled else 0)


# ---------------------------------------------------------------- what sorts and indexes

NUM = 5000
GRADIENT, POSITIONS, ROWS = meta(NUM, 64), meta(NUM, dtype=torch.int64), meta(300, 64)
SIZED: dict[str, Call] = {
    "embedding": (aten.embedding_dense_backward.default, (GRADIENT, POSITIONS, 50_257, -1, False)),
    "added": (aten.index_put.default, (ROWS, [POSITIONS], GRADIENT, True)),
    "looked up": (aten.index.Tensor, (ROWS, [POSITIONS[:, None], POSITIONS.int()])),
    "sorted": (aten.sort.default, (POSITIONS,)),
    "sorted columns": (aten.sort.default, (GRADIENT, 0)),
    "summed up": (aten.cumsum.default, (POSITIONS, 0)),
}


def symbolic(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    sizes = [DimDynamic.DYNAMIC if size == NUM else DimDynamic.STATIC for size in tensor.shape]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


@pytest.mark.parametrize("name", SIZED)
def test_in_symbols_as_in_numbers(name: str) -> None:
    op, args = SIZED[name]
    nbytes = cuda_scratch_nbytes(op, args, {}, op(*args))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = tree_map_only(Tensor, lambda tensor: symbolic(tensor, mode), args)
    with mode:
        results = op(*given)
    found = cuda_scratch_nbytes(op, given, {}, results)
    assert isinstance(found, torch.SymInt)
    assert int(found) == nbytes


@pytest.mark.parametrize(
    ("num", "key", "value", "taken_nbytes", "slack_nbytes"),
    [
        # Int64 on Turing, the largest; the last on Hopper and Ampere.
        (2304, 8, 8, 1, 0),
        (3073, 8, 8, 68_607, 32 << 10),
        (3_000_000, 8, 8, 49_108_479, MIB),
        (4097, 4, 8, 59_391, 32 << 10),
        (100_000, 1, 8, 32_255, 8 * MIB),
        (5000, 2, 8, 4_519_423, 3 * MIB),
    ],
)
def test_what_cub_asks_for_is_bounded(num: int, key: int, value: int, taken_nbytes: int, slack_nbytes: int) -> None:
    """As PyTorch 2.13 for CUDA 13 asked for it on the GPU made of RAM."""
    assert taken_nbytes <= sort_nbytes(num, key, value) <= taken_nbytes + slack_nbytes


@pytest.mark.parametrize(
    ("num", "itemsize", "taken_nbytes"), [(1, 4, 1023), (1_000_000, 2, 3327), (3_000_000, 8, 54_783)]
)
def test_sums_up_to_each(num: int, itemsize: int, taken_nbytes: int) -> None:
    assert taken_nbytes <= scan_nbytes(num, itemsize) <= 2 * taken_nbytes + 8192


def test_deterministic_code_sorts_all_that_is_written_by_index() -> None:
    index, values = POSITIONS, GRADIENT
    for op, args in (
        (aten.index_put.default, (ROWS, [index], values)),
        (aten.index_add.default, (ROWS, 0, index, values)),
        (aten.index_copy.default, (ROWS, 0, index, values)),
        (aten.scatter_add.default, (ROWS, 0, index[:, None].expand(NUM, 64), values)),
    ):
        assert cuda_scratch_nbytes(op, args, {}, ROWS) in (0, values.numel() * 8)
        torch.use_deterministic_algorithms(True)
        try:
            assert cuda_scratch_nbytes(op, args, {}, ROWS) > 4 * 8 * NUM
        finally:
            torch.use_deterministic_algorithms(False)
