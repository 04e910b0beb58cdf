"""What the CUDA allocator and cuBLAS take, against figures of their documentation and sources."""

from __future__ import annotations

import pytest
import torch

from chunkc.passes.graphs.cuda_memory import (
    cublas_workspace_nbytes,
    cublaslt_workspace_nbytes,
    default_workspaces_nbytes,
    rounded_nbytes,
    shares_workspaces,
    workspaces_nbytes,
)

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB, MIB)])
def test_requests_are_rounded_to_512(nbytes: int, expected: int) -> None:
    assert rounded_nbytes(nbytes) == expected


@pytest.mark.parametrize(
    ("capability", "config", "expected"),
    [
        ((7, 0), None, 8 * MIB + 128 * KIB),
        ((8, 9), None, 8 * MIB + 128 * KIB),
        ((9, 0), None, 32 * MIB),
        ((10, 0), None, 32 * MIB),
        ((9, 0), ":4096:8", 32 * MIB),
        ((9, 0), ":16:8", 128 * KIB),
        ((9, 0), ":4096:2:16:8", 8 * MIB + 128 * KIB),
        ((9, 0), "nonsense", 4 * MIB),
    ],
)
def test_workspaces_of_cublas(capability: tuple[int, int], config: str | None, expected: int) -> None:
    assert cublas_workspace_nbytes(capability, config) == expected


def test_both_threads_have_a_workspace_of_each_library() -> None:
    assert cublaslt_workspace_nbytes() == MIB
    assert cublaslt_workspace_nbytes("2048") == 2 * MIB
    assert workspaces_nbytes(32 * MIB, MIB) == default_workspaces_nbytes((9, 0)) == 2 * 33 * MIB


def test_or_both_libraries_share_it() -> None:
    assert workspaces_nbytes(32 * MIB, MIB, shared=True) == 2 * 32 * MIB
    assert workspaces_nbytes(0, MIB, shared=True) == 2 * MIB, "there is none to share"
    assert shares_workspaces({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"})
    assert not shares_workspaces({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"})
    assert shares_workspaces({}) == hasattr(torch.backends.cuda, "cublas_workspace_size")
