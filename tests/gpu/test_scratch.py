"""What operators really take inside on a GPU, against the bounds of `passes.scratch.cuda`.

`pytest tests/gpu/test_scratch.py -m gpu -s` prints both, so that a bound far too wide is seen as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_calls import FAMILIES
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from gpu.attention_calls import Call, attention, taken_nbytes

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.cuda import cuda_output_nbytes, cuda_scratch_nbytes, is_known_on_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(120),
]

aten = torch.ops.aten
HALF = torch.bfloat16
DEVICE = torch.device("cuda")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, device="cuda")


def layer_norm_backward(rows: int, width: int) -> Call:
    x, weight = normal(rows, width), normal(width)
    _, mean, deviation = aten.native_layer_norm.default(x, [width], weight, weight, 1e-5)
    arguments = (x, x, [width], mean, deviation, weight, weight, [True, True, True])
    return aten.native_layer_norm_backward.default, arguments


def softmax_backward(x: Tensor) -> Call:
    return aten._softmax_backward_data.default, (x, aten._softmax.default(x, 1, False), 1, x.dtype)


def embedding_backward(num: int, num_weights: int) -> Call:
    indices = torch.arange(num, device="cuda") % num_weights
    return aten.embedding_dense_backward.default, (normal(num, 256, dtype=HALF), indices, num_weights, -1, False)


def group_norm_backward() -> Call:
    x, weight = normal(8, 64, 32, 32), normal(64)
    _, mean, deviation = aten.native_group_norm.default(x, weight, weight, 8, 64, 1024, 8, 1e-5)
    arguments = (x, x, mean, deviation, weight, 8, 64, 1024, 8, [True, True, True])
    return aten.native_group_norm_backward.default, arguments


def batch_norm(layout: torch.memory_format) -> Call:
    x = normal(8, 64, 32, 32).contiguous(memory_format=layout)
    stats = [normal(64).abs() for _ in range(4)]
    return aten._native_batch_norm_legit_functional.default, (x, *stats, True, 0.1, 1e-5)


CALLS: dict[str, Callable[[], Call]] = {
    "sum": lambda: (aten.sum.default, (normal(1 << 26),)),
    "sum of rows": lambda: (aten.sum.dim_IntList, (normal(4096, 1024), [0])),
    "sum of rows of even width": lambda: (aten.sum.dim_IntList, (normal(6013, 598, dtype=HALF), [0])),
    "count of rows with gaps": lambda: (aten.count_nonzero.dim_IntList, (normal(1155, 3800)[:, ::2], [0])),
    "logsumexp of rows with gaps": lambda: (aten.logsumexp.default, (normal(28_045, 704, dtype=HALF)[:, ::2], [0])),
    "sum of strided": lambda: (aten.sum.dim_IntList, (normal(1024, 4096).t(), [1])),
    "argmax": lambda: (aten.argmax.default, (normal(1 << 24),)),
    "variance": lambda: (aten.var_mean.correction, (normal(256, 65_536), [1])),
    "logsumexp": lambda: (aten.logsumexp.default, (normal(512, 32_000), [1])),
    "softmax of strided": lambda: (aten._softmax.default, (normal(512, 4096).t(), 1, False)),
    "softmax, backward": lambda: softmax_backward(normal(512, 4096)),
    "softmax of strided, backward": lambda: softmax_backward(normal(4096, 512).t()),
    "safe softmax": lambda: (aten._safe_softmax.default, (normal(4, 8, 256, 256), -1)),
    "safe softmax of halves": lambda: (aten._safe_softmax.default, (normal(4, 256, 256, dtype=HALF), -1)),
    "mse_loss": lambda: (aten.mse_loss.default, (normal(1 << 22), normal(1 << 22))),
    "layer norm": lambda: layer_norm_backward(4096, 1024),
    "layer norm of many rows": lambda: layer_norm_backward(131_072, 512),
    "group norm": group_norm_backward,
    "batch norm": lambda: batch_norm(torch.contiguous_format),
    "batch norm, channels last": lambda: batch_norm(torch.channels_last),
    "embedding, all different": lambda: embedding_backward(50_000, 60_000),
    "embedding, few": lambda: embedding_backward(50_000, 100),
    "index": lambda: (aten.index.Tensor, (normal(1000, 64), [integers(1000, 5000)])),
    "index_put, adding": lambda: (
        aten.index_put.default,
        (normal(1000, 64), [integers(1000, 5000)], normal(5000, 64), True),
    ),
    "sort": lambda: (aten.sort.default, (normal(1 << 20),)),
    "sort of rows": lambda: (aten.sort.default, (normal(64, 50_000),)),
    "topk": lambda: (aten.topk.default, (normal(64, 50_000), 50)),
    "cumsum of rows": lambda: (aten.cumsum.default, (integers(9, 64, 1024), -1)),
    "cumsum of columns": lambda: (aten.cumsum.default, (integers(9, 64, 1024), 0)),
    "cummax of rows": lambda: (aten.cummax.default, (integers(9, 64, 1024), -1)),
    "logcumsumexp of rows": lambda: (aten.logcumsumexp.default, (normal(64, 1024), -1)),
    "layer norm, small": lambda: layer_norm_backward(64, 512),
    "layer norm, 65,536 rows": lambda: layer_norm_backward(65_536, 64),
    "layer norm, 65,537 rows": lambda: layer_norm_backward(65_537, 64),
    "cumsum": lambda: (aten.cumsum.default, (normal(1 << 24), 0)),
    "randperm": lambda: (aten.randperm.default, (1 << 20,)),
    "multinomial": lambda: (aten.multinomial.default, (normal(16, 50_000).abs(), 4)),
    "masked_scatter": lambda: (
        aten.masked_scatter.default,
        (normal(1 << 20), integers(2, 1 << 20).bool(), normal(1 << 20)),
    ),
    "convolution": lambda: (
        aten.convolution.default,
        (normal(8, 64, 56, 56), normal(64, 64, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    **{
        f"{kind} attention{', backward' if backward else ''}": lambda kind=kind, backward=backward: attention(
            kind, backward=backward
        )
        for kind in ("flash", "efficient", "cudnn")
        for backward in (False, True)
    },
    "flash attention, odd width": lambda: attention("flash", shape=(4, 8, 512, 40)),
    "efficient attention, fp32, backward": lambda: attention("efficient", backward=True, dtype=torch.float32),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_operator_takes_more_than_its_bound(name: str) -> None:
    torch.manual_seed(0)
    try:
        op, arguments = CALLS[name]()
        kwargs = {"device": DEVICE} if name == "randperm" else {}
        nbytes, results = taken_nbytes(op, arguments, kwargs)
    except RuntimeError as error:
        if "cudnn" in name:
            pytest.skip(f"cuDNN does not do this here: {error}")
        raise
    bound_nbytes = cuda_scratch_nbytes(op, arguments, kwargs, results)
    print(f"\n{name}: took {nbytes:,} of {bound_nbytes:,} bytes")
    assert nbytes <= bound_nbytes


def moved(tensor: Tensor) -> Tensor:
    """On the GPU, with the same strides in as large a storage."""
    if tensor.is_sparse:
        return tensor
    storage = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="cuda").untyped_storage()
    found = torch.empty(0, dtype=tensor.dtype, device="cuda")
    found.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return found if 0 in tensor.stride() else found.copy_(tensor)


def selects(args: tuple[Any, ...]) -> bool:
    """Whether a mask is an index. How much it selects is for a kernel to say, and on the GPU made of RAM none does."""
    indices = (index for given in args if isinstance(given, list) for index in given)
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


REFUSED = {
    "aten::native_group_norm": "images with gaps",
    "aten::native_group_norm_backward": "images with gaps",
    "aten::native_layer_norm": "16 bits with weights of 32",
    "aten::native_layer_norm_backward": "16 bits with weights of 32",
    "aten::native_batch_norm_backward": "statistics of 16 bits, which the CPU keeps",
    "aten::channel_shuffle": "images with gaps, of which it wants a view",
    "aten::native_dropout_backward": "gradients that are integers",
    "aten::_functional_assert_async": "the CPU has it alone",
}
"""Of these ATen does not do each call on a GPU."""

READS_VALUES = {
    "aten::normal": "that no deviation is below zero",
    "aten::histc": "the range",
    "aten::searchsorted": "that no position of a sorter is beyond the sequence",
    "aten::_linalg_check_errors": "that all are zero",
}
"""These operators read the value on the host before they begin. On the GPU made of RAM kernels inside of an operator do
nothing, so the value is wrong and the operator raises."""


def refused() -> Mapping[str, str]:
    """Operators of which ATen does not do each call here, and why."""
    return {**REFUSED, **READS_VALUES} if "CUDA_IN_RAM" in os.environ else REFUSED


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_call_of_the_cpu_s_tests_takes_more_than_its_bound_here(name: str, dtype: torch.dtype) -> None:
    """Of operators that are known on a GPU."""
    torch.manual_seed(0)
    may_refuse, beyond = refused(), dict[str, str]()
    for op, args, kwargs in FAMILIES[name](dtype):
        if not isinstance(op, torch._ops.OpOverload) or not is_known_on_cuda(op) or selects(args):
            continue
        args, kwargs = tree_map_only(Tensor, moved, (args, kwargs))
        try:
            nbytes, results = taken_nbytes(op, args, {k: DEVICE if k == "device" else v for k, v in kwargs.items()})
        except RuntimeError as error:
            # An error that leaves this would be shown with its tensors, whose printing asks kernels that do nothing.
            if op._schema.name not in may_refuse:
                beyond[str(op)] = str(error)
            continue
        bound_nbytes = cuda_scratch_nbytes(op, args, kwargs, results)
        if nbytes > bound_nbytes:
            like = [(tuple(t.shape), t.stride(), t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            beyond[str(op)] = f"took {nbytes:,} of {bound_nbytes:,} bytes: {like}"
    assert not beyond


def weights(num: int) -> list[Tensor]:
    return [normal(num, dtype=HALF) for _ in range(2)]


RESULTS: dict[str, Callable[[], Call]] = {
    **{name: make for name, make in CALLS.items() if name not in ("randperm", "mse_loss")},  # decomposed: mse_loss
    "layer norm, forward": lambda: (
        aten.native_layer_norm.default, (normal(4, 64, 512, dtype=HALF), [512], *weights(512), 1e-5)
    ),
    "group norm, forward": lambda: (
        aten.native_group_norm.default, (normal(4, 64, 512, dtype=HALF), *weights(64), 4, 64, 512, 8, 1e-5)
    ),
    "rms norm": lambda: (aten._fused_rms_norm.default, (normal(4, 64, 512, dtype=HALF), [512], weights(512)[0], 1e-5)),
    "embedding bag": lambda: (
        aten._embedding_bag.default,
        (normal(100, 64), integers(100, 50), torch.arange(0, 50, 5, device="cuda"), False, 1),
    ),
    "col2im": lambda: (aten.col2im.default, (normal(2, 576, 100), [12, 12], [3, 3], [1, 1], [0, 0], [1, 1])),
    "uniform": lambda: (aten.uniform.default, (normal(64, 64).t()[::2],)),
    "efficient attention, dropout": lambda: (
        aten._scaled_dot_product_efficient_attention.default,
        (*(normal(4, 8, 512, 64) for _ in range(3)), None, True, 0.1, True),
    ),
}  # fmt: skip


DETERMINISTIC = [(1, 2, 64, 64), (1, 12, 256, 64), (2, 8, 512, 128), (4, 32, 128, 64), (1, 1, 512, 96)]
"""Batch, heads, rows, width: from few heads, which leave multiprocessors without one, to many."""


@pytest.mark.parametrize("kind", ["flash", "efficient"])
@pytest.mark.parametrize("shape", DETERMINISTIC)
def test_deterministic_attention_takes_no_more_than_its_bound(kind: str, shape: tuple[int, int, int, int]) -> None:
    """FlashAttention then adds up the query's gradient apart for each of several blocks, and has room for each."""
    try:
        torch.use_deterministic_algorithms(True)
        op, arguments = attention(kind, backward=True, shape=shape)
        taken, results = taken_nbytes(op, arguments, {})
        known = cuda_scratch_nbytes(op, arguments, {}, results)
    finally:
        torch.use_deterministic_algorithms(False)
    print(f"{kind} {shape}: takes {taken:,}, bound {known:,}")
    assert taken <= known


@pytest.mark.parametrize("name", RESULTS)
def test_results_take_what_their_fake_tensors_say_or_what_is_known_better(name: str) -> None:
    """Of an operator that saves bytes for the backward, what its results take is in every later moment."""
    try:
        op, arguments = RESULTS[name]()
        results = op(*arguments)
    except RuntimeError as error:
        if "cudnn" in name:
            pytest.skip(f"cuDNN does not do this here: {error}")
        raise
    with FakeTensorMode() as mode:
        fake = op(*tree_map_only(Tensor, mode.from_tensor, arguments))
    known = cuda_output_nbytes(op, arguments, {}, fake)
    pairs = zip(tree_leaves(results), tree_leaves(fake), strict=True)
    for position, (made, said) in enumerate(pairs):
        if isinstance(made, Tensor):
            nbytes = rounded_nbytes(made.untyped_storage().nbytes()) if made.is_cuda else 0
            assert nbytes == known.get(position, rounded_nbytes(said.untyped_storage().nbytes())), position
