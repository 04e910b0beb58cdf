"""Compile loops in C++ by Inductor's own compiler front end, and define the elements of tensors in them.

So they need no more than models that are compiled for the CPU do. Results do not depend on the user's settings for
models.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.torch_private.inductor import CppCodeCache, CppCompileError, InvalidCxxCompiler, is_gcc, patched

SERIAL_NUM_ELEMENTS = 1 << 15
"""Shorter tensors are not worth waking threads for; torch's own grain size."""

_OPTIONS: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
# Inductor's flags let a root set errno.
_FLAGS = ("-fno-math-errno",)
# For GCC they also leave loops alone, since its own kernels are vectorised by hand; clang does not know this one.
_FLAGS_OF_GCC = ("-ftree-loop-vectorize",)


class ElementType(NamedTuple):
    """Type of a tensor's elements in C++, and the functions that widen one to a number and round a number to it."""

    type: str
    widen: str = ""
    round: str = ""


BFLOAT16 = ElementType("uint16_t", "widen_bf16", "round_bf16")
ELEMENTS = {
    torch.float64: ElementType("double", "double", "double"),
    torch.float32: ElementType("float", "float", "float"),
    torch.bfloat16: BFLOAT16,
    torch.float16: ElementType("uint16_t", "widen_fp16", "round_fp16"),
    torch.int16: ElementType("int16_t"),
    torch.uint8: ElementType("uint8_t"),
}
"""16-bit floats are plain integers: the compiler does not vectorise structs."""

WIDENING = r"""
#include <cmath>
#include <cstdint>
#include <cstring>

static inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
static inline float chosen(uint32_t mask, float a, float b) {
  return as_float((as_bits(a) & mask) | (as_bits(b) & ~mask));
}
static inline double chosen(uint32_t mask, double a, double b) { return mask ? a : b; }

static inline float widen_bf16(uint16_t x) { return as_float(uint32_t(x) << 16); }
static inline float widen_fp16(uint16_t x) {
  // The exponent moves by a factor of 2 ** 112; subnormals are made normal, and are less by 2 ** -14 then. Chosen by
  // masks of signed comparisons: gcc makes no vectors of branches, and AVX2 compares no unsigned integers.
  const int32_t magnitude = (x & 0x7FFF) << 13;
  const int32_t infinite = -int32_t(magnitude > 0x0F7FFFFF), tiny = -int32_t(magnitude < 0x00800000);
  const uint32_t normal = uint32_t(magnitude) + 0x38000000u + uint32_t(infinite & 0x38000000);
  const uint32_t subnormal = as_bits(as_float(uint32_t(magnitude) + 0x38800000u) - 0x1p-14f);
  return as_float((subnormal & uint32_t(tiny)) | (normal & ~uint32_t(tiny)) | (uint32_t(x & 0x8000u) << 16));
}
"""
"""C++ that widens elements to numbers, and chooses between numbers by a mask."""


def load(source: str) -> ctypes.CDLL:
    """Compile and load C++, vectorised, without contraction to fused multiply-adds.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    try:
        with patched(_OPTIONS):
            flags = _FLAGS + _FLAGS_OF_GCC * is_gcc()
            loaded: ctypes.CDLL = CppCodeCache.load(source, extra_flags=flags)
    except (InvalidCxxCompiler, CppCompileError) as error:
        raise UnsupportedError(
            "updates on the CPU cannot be compiled: install a C++ compiler such as g++, or set CXX to one"
        ) from error
    return loaded
