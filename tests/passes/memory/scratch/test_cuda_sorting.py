"""Rules of what sorts and indexes on CUDA devices, which `tests/gpu_in_ram/test_sorting.py` holds to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only

from chunkc.passes.memory.scratch.cuda import cuda_scratch_nbytes

aten = torch.ops.aten
HOPPER = (9, 0)
NUM = 5000


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


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
    nbytes = cuda_scratch_nbytes(op, args, {}, op(*args), capability=HOPPER)
    assert 0 < nbytes <= cuda_scratch_nbytes(op, args, {}, op(*args))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = tree_map_only(Tensor, lambda tensor: symbolic(tensor, mode), args)
    with mode:
        results = op(*given)
    found = cuda_scratch_nbytes(op, given, {}, results, capability=HOPPER)
    assert isinstance(found, torch.SymInt)
    assert int(found) == nbytes


@pytest.mark.parametrize(
    ("version", "nbytes"), [("2.11.0+cu130", 2_652_672), ("2.12.1", 2_652_672), ("2.13.0+cu130", 2_099_200)]
)
def test_embeddings_are_sorted_by_all_bits_before_2_13(
    monkeypatch: pytest.MonkeyPatch, version: str, nbytes: int
) -> None:
    """As 2.11.0 and 2.13.0 asked the allocator for it; 2.12 is taken for the one that needs more."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    gradient, positions = meta(65_536, 1), meta(65_536, dtype=torch.int64)
    args = (gradient, positions, 255, -1, False)
    found = cuda_scratch_nbytes(aten.embedding_dense_backward.default, args, {}, meta(255, 1), capability=HOPPER)
    assert found == nbytes


def test_deterministic_code_sorts_all_that_is_written_by_index() -> None:
    index, values = POSITIONS, GRADIENT
    for op, args in (
        (aten.index_put.default, (ROWS, [index], values)),
        (aten.index_add.default, (ROWS, 0, index, values)),
        (aten.index_copy.default, (ROWS, 0, index, values)),
        (aten.scatter_add.default, (ROWS, 0, index[:, None].expand(NUM, 64), values)),
    ):
        assert cuda_scratch_nbytes(op, args, {}, ROWS, capability=HOPPER) in (0, values.numel() * 8)
        torch.use_deterministic_algorithms(True)
        try:
            assert cuda_scratch_nbytes(op, args, {}, ROWS, capability=HOPPER) > 4 * 8 * NUM
        finally:
            torch.use_deterministic_algorithms(False)
