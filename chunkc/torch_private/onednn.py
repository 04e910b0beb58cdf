"""Asks which instructions oneDNN uses in this process: the processor's, but for those that the environment forbids.

oneDNN reads ONEDNN_MAX_CPU_ISA, else DNNL_MAX_CPU_ISA, once, at its first use. So these answers are kept too.
ATEN_CPU_CAPABILITY forbids instructions to ATen's own kernels only.
"""

from __future__ import annotations

import os
import platform
from functools import cache

import torch

_WITHOUT_AVX2 = ("sse41", "avx")
_AVX512_WITHOUT_BFLOAT16 = ("avx512_core", "avx512_core_vnni")
_AVX512_WITHOUT_TILES = (
    *_AVX512_WITHOUT_BFLOAT16,
    "avx512_core_bf16",
    "avx512_core_fp16",
    "avx10_1_512",
    "avx10_2_512",
)


@cache
def uses_avx2() -> bool:
    """Whether oneDNN's kernels for AVX2 run, or later ones."""
    return torch.cpu._is_avx2_supported() and _limit() not in _WITHOUT_AVX2


def uses_avx512() -> bool:
    """Whether oneDNN's kernels for AVX-512 run."""
    return platform.machine().lower() in ("x86_64", "amd64") and computes(torch.bfloat16)


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 with instructions of AVX-512."""
    return uses_avx512() and torch.cpu._is_avx512_bf16_supported() and _limit() not in _AVX512_WITHOUT_BFLOAT16


@cache
def multiplies_tiles() -> bool:
    """Whether oneDNN multiplies with AMX."""
    return uses_avx512() and torch.cpu._is_amx_tile_supported() and _limit() not in _AVX512_WITHOUT_TILES


@cache
def computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in a floating-point dtype with the instructions it may use. Of bfloat16, on x86: with
    AVX-512, native or emulated."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def _limit() -> str:
    """The instruction sets that the environment allows at most, as oneDNN reads it: case does not matter; an unknown
    name allows all."""
    found = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return found.lower()
