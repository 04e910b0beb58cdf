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


HALF, I64 = torch.bfloat16, torch.int64
LONG = meta(dtype=I64)


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


def test_views_and_elementwise_operators_take_nothing() -> None:
    x = meta(64, 64)
    for op, args in (
        (aten.t.default, (x,)),
        (aten.add_.Tensor, (x, x)),
        (aten.gelu.default, (x,)),
        (aten.mm.default, (x, x)),
    ):
        assert cuda_scratch_nbytes(op, args, {}, x) == 0, op


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


def layer_norm_backward(rows: int, width: int) -> tuple[torch._ops.OpOverload, tuple[Any, ...], Any]:
    x, stat, weight = meta(rows, width), meta(rows, 1), meta(width)
    arguments = (x, x, [width], stat, stat, weight, weight, [True, True, True])
    return aten.native_layer_norm_backward.default, arguments, (x, weight, weight)


X, TURNED = meta(64, 1024), meta(1024, 64).t()
SECOND_PASS = [4 * 1024 * 16 * 32 * 4, 512]
"""16 blocks of 4 rows of 32 threads with 4 columns each share an output."""
HEADS_64, HEADS_192 = ((*[meta(2, 4, 256, width, dtype=HALF)] * 3, None, True) for width in (64, 192))
COPIES: dict[str, tuple[torch._ops.OpOverload, tuple[Any, ...], Any, list[int]]] = {
    # What runs, its arguments, its results, and the bytes inside: each a block of its own.
    "a softmax's gradient": (aten._softmax_backward_data.default, (X, X, 1, torch.float32), X, [X.nbytes]),
    "of what is turned": (aten._softmax_backward_data.default, (TURNED, TURNED, 1, torch.float32), X, 3 * [X.nbytes]),
    "a safe softmax": (aten._safe_softmax.default, (X, 1), X, [X.numel(), 64, 4]),
    "a layer norm's gradient": (*layer_norm_backward(65_536, 1024), []),
    "of many rows": (*layer_norm_backward(131_072, 1024), [*(2 * [4 * (32_768 // 32) * 1024]), *SECOND_PASS, 4 * 1024]),
    "a bias's gradient": (
        aten.sum.dim_IntList,
        (meta(1024, 1024, dtype=HALF), [0]),
        meta(1024, dtype=HALF),
        SECOND_PASS,
    ),
    "a sum of rows": (aten.sum.dim_IntList, (meta(1024, 2048, dtype=HALF), [1]), meta(1024, dtype=HALF), []),
    "whether one is true": (aten.any.default, (meta(1, 1),), meta(dtype=torch.bool), [1]),
    "a sum of bools": (aten.sum.default, (meta(3000, dtype=torch.bool),), LONG, [24_000]),
    "a sum of halves in fp32": (aten.sum.default, (meta(3000, dtype=HALF),), meta(), []),
    "a count": (aten.count_nonzero.default, (meta(3000),), LONG, [3000, 24_000]),
    "an extreme of what is turned": (aten.max.default, (meta(30, 50).t(),), meta(), [6000]),
    "a sum along what is turned": (aten.cumsum.default, (meta(30, 50).t(), 0), meta(50, 30), [6000]),
    "a sum along bools": (aten.cumsum.default, (meta(30, 50, dtype=torch.bool), 0), meta(30, 50, dtype=I64), [12_000]),
    "finite or not": (aten.isfinite.default, (meta(1000),), meta(1000), [4000, 1000, 1000]),
    "integers are": (aten.isfinite.default, (meta(1000, dtype=I64),), meta(1000), []),
    "bounds in fp32": (aten.clamp.default, (meta(1000, dtype=I64), 0.5), meta(1000), [4000]),
    "a selected number": (aten.where.ScalarOther, (meta(9, dtype=torch.bool), meta(9), 1.0), meta(9), [4]),
    "selected halves": (
        aten.where.self,
        (meta(900, dtype=torch.bool), meta(900), meta(900, dtype=HALF)),
        meta(900),
        [3600],
    ),
    "a base": (aten.pow.Scalar, (2.0, meta(9)), meta(9), [4]),
    "a size of complex numbers": (aten.abs.default, (meta(900, dtype=torch.complex64),), meta(900), [7200]),
    "a range": (aten.histc.default, (meta(900),), meta(100), [4, 4]),
    "a given range": (aten.histc.default, (meta(900), 100, 0, 9), meta(100), []),
    "a product": (aten.mm.default, (meta(30, 50), meta(40, 50).t()), meta(30, 40), []),
    "a product with gaps": (aten.mm.default, (meta(30, 100)[:, ::2], meta(50, 40)), meta(30, 40), [6000]),
    "a product of repeated rows": (
        aten.bmm.default,
        (meta(50).expand(2, 30, 50), meta(2, 50, 9)),
        meta(2, 30, 9),
        [12_000],
    ),
    "a sum with a product": (
        aten.addmm.default,
        (meta(40).expand(30, 40), meta(30, 50), meta(50, 40)),
        meta(30, 40),
        [],
    ),
    "a scattered mean": (
        aten.scatter_reduce.two,
        (meta(50, 9), 1, meta(50, 3, dtype=I64), meta(50, 3), "mean"),
        meta(50, 9),
        [600, 1800, 450],
    ),
    "chances": (aten.bernoulli.default, (meta(900, dtype=HALF),), meta(900, dtype=HALF), [3600]),
    "a chance": (aten.bernoulli.p, (meta(900, dtype=HALF), 0.5), meta(900, dtype=HALF), []),
    "deviations": (aten.normal.float_Tensor, (0.0, meta(900)), meta(900), [3600, 4, 4, 4]),
    "attention of narrow heads": (aten._scaled_dot_product_efficient_attention.default, HEADS_64, HEADS_64[0], []),
    "attention of wide heads": (
        aten._scaled_dot_product_efficient_attention.default,
        HEADS_192,
        HEADS_192[0],
        [4 * HEADS_192[0].numel()],
    ),
    "channels last": (
        aten.adaptive_max_pool2d.default,
        (meta(2, 8, 12, 12).to(memory_format=torch.channels_last), [3, 3]),
        (meta(2, 8, 3, 3), meta(2, 8, 3, 3, dtype=I64)),
        [9216, 576, 1152],
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_the_sources_copy_is_counted(name: str) -> None:
    op, args, outputs, parts = COPIES[name]
    assert cuda_scratch_nbytes(op, args, {}, outputs) == sum(map(rounded_nbytes, parts))


@pytest.mark.parametrize(
    ("dtype", "num_rows", "width", "workspace_nbytes"),
    [
        # As the kernels asked for them on capabilities 7.5 to 9.0; the last three on some.
        (torch.float32, 128, 16, 32_800),
        (torch.float32, 128, 64, 33_280),
        (HALF, 128, 64, 32_800),
        (torch.float32, 128, 128, 66_048),
        (HALF, 128, 192, 98_400 + 2 * 131_072),
    ],
)
def test_efficient_attention_s_backward_takes_tiles(
    dtype: torch.dtype, num_rows: int, width: int, workspace_nbytes: int
) -> None:
    x, rows = meta(4, 8, num_rows, width, dtype=dtype), meta(4, 8, num_rows)
    turned = meta(4, num_rows, 8, width, dtype=dtype).transpose(1, 2)
    seed = meta(dtype=I64)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    for gradient, copied in ((turned, 0), (x, x.nbytes)):
        args = (gradient, x, x, x, None, x, rows, seed, seed, 0.0, [True, True, True, False])
        taken = cuda_scratch_nbytes(backward, args, {}, (x, x, x, None))
        assert taken == sum(map(rounded_nbytes, (32 * workspace_nbytes, 4 * rows.numel(), copied)))


@pytest.mark.parametrize(
    ("shape", "forward_nbytes", "sums_nbytes"),
    [
        # As the kernels asked for them. Few rows of blocks need no sums of their own.
        ((8, 64, 32, 32), 32_768 + 512, 512),
        ((64, 32, 64, 64), 65_536 + 512, 512),
        ((2, 1024, 7, 7), 0, 4096),
    ],
)
def test_batch_norms_take_sums_where_channels_come_last(
    shape: tuple[int, ...], forward_nbytes: int, sums_nbytes: int
) -> None:
    forward, backward = aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default
    statistics = [meta(shape[1]) for _ in range(4)]
    for layout, taken, left in (
        (torch.contiguous_format, 0, 0),
        (torch.channels_last, forward_nbytes, 2 * sums_nbytes),
    ):
        x = meta(*shape).to(memory_format=layout)
        assert cuda_scratch_nbytes(forward, (x, *statistics, True, 0.1, 1e-5), {}, x) == taken
        assert cuda_scratch_nbytes(forward, (x, *statistics, False, 0.1, 1e-5), {}, x) == 0
        given = (x, x, *statistics[:3], *statistics[:2], True, 1e-5, [True, True, True])
        assert cuda_scratch_nbytes(backward, given, {}, x) == left


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
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
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


@pytest.mark.parametrize("name", CALLS)
def test_in_symbols_as_in_numbers(name: str) -> None:
    op, args = CALLS[name]
    nbytes = cuda_scratch_nbytes(op, args, {}, op(*args))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = tree_map_only(Tensor, lambda tensor: symbolic(tensor, mode), args)
    with mode:
        results = op(*given)
    found = cuda_scratch_nbytes(op, given, {}, results)
    assert isinstance(found, torch.SymInt)
    assert int(found) == nbytes


MIB = 1 << 20


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
