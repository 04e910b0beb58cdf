"""Which attention kernel a CUDA device takes, by its capability, by what it computes, and by what torch was told. What
the allocator and cuBLAS take, against figures of their documentation and sources.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chunkc.passes.graphs.attention_cuda import attention_kernel, may_take_cudnn, prefers_cudnn
from chunkc.passes.graphs.cuda_memory import (
    cublas_workspace_nbytes,
    cublaslt_workspace_nbytes,
    default_workspaces_nbytes,
    rounded_nbytes,
    shares_workspaces,
    workspaces_nbytes,
)

HALF, FULL = torch.bfloat16, torch.float32
HOPPER, BLACKWELL, ULTRA, AMPERE = (9, 0), (10, 0), (10, 3), (8, 0)
RELEASES = ("2.11.0", "2.12.1+cu130", "2.13.0+cpu")


def heads(width: int = 64, *, rows: int = 16, num: int = 4, batch: int = 2, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(batch, num, rows, width, dtype=dtype, device="meta")


def kernel(capability: tuple[int, int] | None, *tensors: Tensor, mask: Tensor | None = None, **kwargs: Any) -> str:
    query, key, value = tensors if len(tensors) == 3 else tensors * 3
    return attention_kernel(query, key, value, mask, capability, **kwargs)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        *((capability, True) for capability in (HOPPER, BLACKWELL, ULTRA)),
        *((capability, False) for capability in ((7, 0), (7, 5), AMPERE, (8, 6), (8, 9), (11, 0), (12, 0), (12, 1))),
    ],
)
def test_hopper_and_blackwell_of_data_centres_prefer_cudnn(
    capability: tuple[int, int], expected: bool, version: str
) -> None:
    assert prefers_cudnn(capability, version) == expected
    otherwise = "flash" if capability >= AMPERE else "math"
    assert kernel(capability, heads(), version=version) == ("cudnn" if expected else otherwise)
    assert kernel(capability, heads(), version=version, cudnn=False) == otherwise
    assert prefers_cudnn((10, 7), version) == (version >= "2.13"), "any minor of them from 2.13 on"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mask_changes_the_kernel_elsewhere_only(dtype: torch.dtype) -> None:
    tensor, mask = heads(dtype=dtype), torch.empty(2, 1, 16, 16, dtype=dtype, device="meta")
    assert [kernel(on, tensor) for on in (HOPPER, AMPERE, None)] == ["cudnn", "flash", "flash"]
    assert [kernel(on, tensor, mask=mask) for on in (HOPPER, AMPERE, None)] == ["cudnn", "efficient", "efficient"]
    strided = torch.empty(2, 1, 16, 1, dtype=dtype, device="meta").expand(2, 1, 16, 16)
    assert kernel(HOPPER, tensor, mask=strided) == "efficient"


@pytest.mark.parametrize(
    ("width", "hopper", "blackwell"),
    [(8, "cudnn", "cudnn"), (60, "flash", "flash"), (128, "cudnn", "cudnn"), (136, "cudnn", "flash"),
     (256, "cudnn", "flash"), (264, "efficient", "efficient"), (260, "math", "math")],
)  # fmt: skip
def test_head_sizes(width: int, hopper: str, blackwell: str) -> None:
    assert (kernel(HOPPER, heads(width)), kernel(BLACKWELL, heads(width))) == (hopper, blackwell)


def test_a_head_size_of_its_own_for_values() -> None:
    def with_values(width: int, of_values: int, capability: tuple[int, int]) -> str:
        return kernel(capability, heads(width), heads(width), heads(of_values))

    assert with_values(192, 128, BLACKWELL) == with_values(192, 128, HOPPER) == "cudnn"
    assert with_values(192, 64, BLACKWELL) == "efficient"
    assert with_values(64, 60, HOPPER) == "math"


def test_heads_may_share_keys_and_lengths_may_differ() -> None:
    shared = heads(num=1, rows=48)
    assert kernel(HOPPER, heads(), shared, shared) == "cudnn"
    assert kernel(AMPERE, heads(), shared, shared) == "flash"


def test_what_flash_refuses() -> None:
    """Before Ampere, wide heads, and some widths where there is little shared memory; a triangle that is no square."""
    for dtype, before in ((torch.float16, "efficient"), (torch.bfloat16, "math")):
        found = [kernel(on, heads(dtype=dtype)) for on in ((7, 0), (7, 5), AMPERE, None)]
        assert found == [before, before, "flash", "flash"]
    assert [kernel(AMPERE, heads(width)) for width in (256, 264, 512)] == ["flash", "efficient", "efficient"]
    for on, expected in (((8, 6), "efficient"), ((8, 9), "efficient"), (AMPERE, "flash")):
        assert [kernel(on, heads(width)) for width in (192, 200, 224, 256)] == ["flash", expected, expected, "flash"]
    other = heads(rows=48)
    assert kernel(AMPERE, heads(), other, other) == "flash"
    assert kernel(AMPERE, heads(), other, other, causal=True) == "efficient"
    assert kernel(AMPERE, heads(), causal=True) == "flash"


def test_what_no_kernel_can() -> None:
    """bf16 before Ampere, heads that share keys where FlashAttention cannot, widths that are not aligned."""
    shared, mask = heads(num=1), torch.empty(16, 16, dtype=HALF, device="meta")
    assert kernel((7, 5), heads()) == "math"
    assert kernel(AMPERE, heads(), shared, shared, mask=mask) == "math"
    assert kernel(AMPERE, *(heads(num=num, dtype=FULL) for num in (4, 2, 2))) == "math"
    for dtype, aligned, on in ((HALF, 8, AMPERE), (FULL, 4, AMPERE), (torch.float16, 8, (7, 5)), (FULL, 1, (7, 5))):
        found = [kernel(on, heads(width, dtype=dtype), mask=mask) for width in (264, 264 + aligned, 265)]
        assert found == ["efficient", "efficient", "efficient" if aligned == 1 else "math"]


def test_what_cudnn_refuses() -> None:
    assert [kernel(on, heads(dtype=FULL)) for on in (HOPPER, BLACKWELL, None)] == ["efficient"] * 3
    one = heads(rows=1)
    assert kernel(HOPPER, heads(), one, one) == "flash"
    assert kernel(HOPPER, one, heads(), heads()) == "cudnn"  # one query, such as of a pooling head
    transposed = torch.empty(2, 4, 64, 16, dtype=HALF, device="meta").transpose(2, 3)
    assert kernel(HOPPER, transposed, heads(), heads()) == "flash"
    many = heads(batch=65536)
    assert [kernel(HOPPER, many, version=version) for version in RELEASES] == ["cudnn", "cudnn", "flash"]


def test_what_torch_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    assert may_take_cudnn()
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0")
    assert may_take_cudnn()
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not may_take_cudnn()
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED")
    for version, expected in ((91002, False), (91500, False), (91900, True)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert may_take_cudnn() == expected


def test_deterministic_algorithms_and_torch_s_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert not may_take_cudnn()
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert may_take_cudnn()
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert not may_take_cudnn()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(enabled)


# ---------------------------------------------------------------- the allocator and cuBLAS

KIB, MIB = 1 << 10, 1 << 20


def test_requests_are_rounded_to_512() -> None:
    assert [rounded_nbytes(nbytes) for nbytes in (0, 1, 512, 513, MIB)] == [0, 512, 512, 1024, MIB]


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
