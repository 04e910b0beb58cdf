"""Ask which instruction sets oneDNN uses in this process: the processor's, except those that the environment forbids.

oneDNN reads ONEDNN_MAX_CPU_ISA, else DNNL_MAX_CPU_ISA, once, at its first use. So answers are cached here, too.
ATEN_CPU_CAPABILITY limits ATen's own kernels only.
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
    """Whether oneDNN runs its kernels for AVX2 or a later instruction set."""
    return torch.cpu._is_avx2_supported() and _limit() not in _WITHOUT_AVX2


def is_x86() -> bool:
    """Whether the processor is one that oneDNN has these instruction sets' kernels for."""
    return platform.machine().lower() in ("x86_64", "amd64")


def uses_avx512() -> bool:
    """Whether oneDNN runs its kernels for AVX-512."""
    return is_x86() and computes(torch.bfloat16)


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 with AVX-512's instructions for it."""
    return uses_avx512() and torch.cpu._is_avx512_bf16_supported() and _limit() not in _AVX512_WITHOUT_BFLOAT16


@cache
def multiplies_tiles() -> bool:
    """Whether oneDNN multiplies with AMX."""
    return uses_avx512() and torch.cpu._is_amx_tile_supported() and _limit() not in _AVX512_WITHOUT_TILES


@cache
def computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in a floating-point dtype with the instructions that it may use.

    On x86, bfloat16 needs AVX-512, which may emulate it.
    """
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def description() -> str:
    """Describe all that this module answers, and the limit that the environment sets, in a text."""
    kinds = (is_x86, uses_avx2, uses_avx512, multiplies_bfloat16, multiplies_tiles)
    used = [kind.__name__ for kind in kinds if kind()]
    return " ".join([_limit(), *used, *(str(dtype) for dtype in (torch.bfloat16, torch.float16) if computes(dtype))])


def _limit() -> str:
    """Return the latest instruction set that the environment allows, in lower case, as oneDNN reads it.

    "" and unknown names allow all.
    """
    found = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return found.lower()
