"""Rules of what sorts and indexes on CUDA devices; `tests/gpu_in_ram/test_sorting.py` measures."""

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
from chunkc.passes.memory.scratch.cuda_sorting import radix_sort_nbytes, scan_nbytes, unique_nbytes

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


TURING, AMPERE, RTX_30 = (7, 5), (8, 0), (8, 6)


@pytest.mark.parametrize(
    ("num", "key", "value", "num_bits", "capability", "nbytes"),
    [
        (2304, 8, 8, 64, HOPPER, 1),
        (3073, 8, 8, 8, HOPPER, 3583),
        (3_000_000, 8, 8, 17, HOPPER, 48_674_303),
        (3_000_000, 8, 8, 8, AMPERE, 803_327),
        (3_000_000, 8, 8, 8, TURING, 1_094_143),
        (4097, 4, 8, 32, HOPPER, 59_391),
        (100_000, 1, 8, 8, HOPPER, 32_255),
        (5000, 2, 8, 16, AMPERE, 4_519_423),
    ],
)
def test_what_cub_asks_for_is_exact_for_int64_and_else_bounded(
    num: int, key: int, value: int, num_bits: int, capability: tuple[int, int], nbytes: int
) -> None:
    """As PyTorch 2.13 for CUDA 13 asked for it on the GPU made of RAM."""
    bound_nbytes = radix_sort_nbytes(num, key, value, num_bits, capability)
    if key == value == 8:
        assert bound_nbytes == nbytes
    sorted_nbytes = num * (key + value)
    assert nbytes <= bound_nbytes <= nbytes + 0.05 * sorted_nbytes + (3 << 20 if capability < HOPPER else 4096)
    assert bound_nbytes <= radix_sort_nbytes(num, key, value, num_bits, None)


@pytest.mark.parametrize(
    ("num", "key", "capability", "nbytes"),
    [
        (3_000_000, 8, HOPPER, 11_007),
        (3_000_000, 8, AMPERE, 36_863),
        (3_000_000, 8, RTX_30, 151_039),
        (3_000_000, 4, TURING, 69_375),
    ],
)
def test_unique_keys(num: int, key: int, capability: tuple[int, int], nbytes: int) -> None:
    bound_nbytes = unique_nbytes(num, key, capability)
    assert bound_nbytes == nbytes if key == 8 else nbytes <= bound_nbytes
    assert bound_nbytes <= unique_nbytes(num, key, None)


@pytest.mark.parametrize(
    ("num", "itemsize", "halves", "nbytes"),
    [(1, 4, False, 1023), (1, 2, True, 1279), (1_000_000, 2, True, 3327), (3_000_000, 8, False, 54_783)],
)
def test_sums_up_to_each(num: int, itemsize: int, halves: bool, nbytes: int) -> None:
    assert scan_nbytes(num, itemsize, halves=halves) == nbytes


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
