"""Generate the CPU pass for bf16 parameters with masters, whole or split, and for rules in stages, as a loop in C++.

Inductor does not vectorise 16-bit integers, and reinterprets bits element by element: for split masters (see
`chunkc.kernels.split`) its pass would be four times slower than this loop, which the compiler vectorises, and for whole
masters slower too. Terms of a rule are added up in it, row by row (see `chunkc.kernels.summed_work`). Inductor's own
compiler front end builds it, with the same requirements as any other pass.
"""

from __future__ import annotations

import ctypes
import functools
from string import Template
from typing import Any

import torch
from torch import Tensor

from chunkc.ir.layout import PARAM
from chunkc.kernels.formats import UpdateFormat
from chunkc.kernels.fused_pass import Pass, compiler_required
from chunkc.torch_private.inductor import CppCodeCache, patched

OPTIONS: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
# Inductor's flags leave loops alone, since its own kernels are vectorised by hand, and let a root set errno.
FLAGS = ("-ftree-loop-vectorize", "-fno-math-errno")

# C++ type, and the function to float. 16-bit floats are plain integers: the compiler does not vectorise structs.
TYPES = {
    torch.float32: ("float", "as_it_is"),
    torch.bfloat16: ("uint16_t", "widen_bf16"),
    torch.float16: ("uint16_t", "widen_fp16"),
}

# C++ type of the master, and code to read and to write it.
_SPLIT_MASTER = {
    "master": "int16_t",
    "read_master": """const float upper = widen_bf16(param_data[i]);
    const float joined = as_float(as_bits(upper) + uint32_t(int32_t(master_data[i])));
    const float target = joined != joined ? upper : joined;""",
    "write_master": """const uint32_t bits = as_bits(new_target);
    const uint32_t kept = bits - ((bits & 0x1FFFFu) == 0x8000u ? 1u : 0u);
    master_data[i] = int16_t(new_target != new_target ? 0u : kept);""",
}
_WHOLE_MASTER = {
    "master": "float",
    "read_master": "const float target = master_data[i];",
    "write_master": "master_data[i] = new_target;",
}

WIDENING = r"""
#include <cmath>
#include <cstdint>
#include <cstring>

static inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

static inline float as_it_is(float x) { return x; }
static inline float widen_bf16(uint16_t x) { return as_float(uint32_t(x) << 16); }
static inline float widen_fp16(uint16_t x) {
  // The exponent moves by a factor of 2 ** 112; subnormals are counted in steps of 2 ** -24. Chosen by masks: gcc makes
  // no vectors of branches.
  const uint32_t magnitude = (x & 0x7FFFu) << 13;
  const uint32_t infinite = 0u - uint32_t(magnitude >= 0x0F800000u), tiny = 0u - uint32_t(magnitude < 0x00800000u);
  const uint32_t normal = magnitude + 0x38000000u + (infinite & 0x38000000u);
  const uint32_t subnormal = as_bits(float(int32_t(x & 0x3FFu)) * 0x1p-24f);
  return as_float((subnormal & tiny) | (normal & ~tiny) | (uint32_t(x & 0x8000u) << 16));
}
"""
"""C++ that converts elements of `TYPES` to float."""

_HELPERS = (
    WIDENING
    + r"""
static inline uint16_t rounded(float x) {  // to nearest even
  const uint32_t bits = x != x ? 0x7FC00000u : as_bits(x);
  return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
static inline void store(float* target, float x) { *target = x; }
static inline void store(uint16_t* target, float x) { *target = rounded(x); }
"""
)

_ELEMENT = Template(
    """    float grad = $widen_grad(grad_data[i]);
    if ($scaled) grad = grad * factor * second_factor;
    $read_master
$old_moments
$inside
$stores"""
)

_RUN = Template(
    r"""
extern "C" void update(
    $param* param_data, const $grad* grad_data, $moment_parameters$master* master_data, const float* scalars,
    const float* unscale, const float* clip, int64_t num_elements, int num_threads) {
  const float $scalars;
  const float factor = $scaled ? *unscale : 1.0f, second_factor = $scaled ? *clip : 1.0f;
$before
  #pragma omp parallel for simd schedule(static) num_threads(num_threads) if(parallel: num_threads > 1)
  for (int64_t i = 0; i < num_elements; ++i) {
$element
  }
}
"""
)

# Terms go to 16 sums in turn, and these are added pairwise, as in `chunkc.kernels.row_sums_cpu`.
_ROWS = Template(
    r"""
static const int lanes = 16, block = 256;

extern "C" void update(
    $param* param_data, const $grad* grad_data, $moment_parameters$master* master_data, const float* table,
    const float* unscale, const float* clip, float* sums, const int64_t* rows, int64_t sums_stride, int64_t num_rows,
    int num_threads) {
  const float factor = $scaled ? *unscale : 1.0f, second_factor = $scaled ? *clip : 1.0f;
  #pragma omp parallel for schedule(static) num_threads(num_threads) if(num_threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t begin = rows[3 * row], end = rows[3 * row + 1];
    const float* scalars = table + rows[3 * row + 2] * $num_scalars;
    const float $scalars;
$before
    double totals[$num_sums][lanes] = {};
    float terms[$num_sums][block] = {};
    for (int64_t start = begin; start < end; start += block) {
      const int64_t until = start + block < end ? start + block : end;
      #pragma omp simd
      for (int64_t i = start; i < until; ++i) {
$element
$terms
      }
      for (int k = 0; k < $num_sums; ++k) {
        for (int64_t i = until - start; i < block; ++i) terms[k][i] = 0.0f;
        for (int i = 0; i < block; i += lanes) {
          #pragma omp simd
          for (int j = 0; j < lanes; ++j) totals[k][j] += double(terms[k][i + j]);
        }
      }
    }
    for (int k = 0; k < $num_sums; ++k) {
      for (int half = lanes / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) totals[k][j] += totals[k][j + half];
      sums[k * sums_stride + row] = float(totals[k][0]);
    }
  }
}
"""
)


def has_loop(fmt: UpdateFormat) -> bool:
    """Whether a format uses this loop: parameters as above, and rules in stages but for parameters in fp16.

    Scalars of the second stage are long computations, which Inductor would repeat for each vector.
    """
    rounds_to_nearest = fmt.param_dtype is torch.bfloat16 and fmt.master and not fmt.stochastic
    is_plain = rounds_to_nearest or (fmt.param_dtype is torch.float32 and len(fmt.kept) > 0)
    return fmt.num_sums > 0 or (is_plain and not fmt.quantised)


@functools.cache
def loop_pass(fmt: UpdateFormat, *, l2: bool, scaled: bool, parallel: bool) -> Pass:
    """Compile the pass over [param, grad, moments, (master,) scalars] and, where scaled, two 0-dim factors.

    `grad` may share `param`'s memory: it is read first. The pass empties its list.
    """
    update = library(fmt, l2=l2, scaled=scaled).update
    num_pointers = len(update.argtypes) - 2

    def run(tensors: list[Tensor]) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        if not fmt.master:
            pointers.insert(2 + len(fmt.kinds), 0)
        pointers += [0] * (num_pointers - len(pointers))
        update(*pointers, tensors[0].numel(), torch.get_num_threads() if parallel else 1)
        tensors.clear()

    return run


@functools.cache
def library(fmt: UpdateFormat, *, l2: bool, scaled: bool) -> ctypes.CDLL:
    """Compile and load the loop for a format: a library with the function `update`.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    grad, widen_grad = TYPES[fmt.grad_dtype]
    moment, widen_moment = TYPES[fmt.moment_dtype]
    names = {"grad": grad, "widen_grad": widen_grad}
    names["param"], widen_param = TYPES[fmt.param_dtype]
    names |= _SPLIT_MASTER if fmt.split else _WHOLE_MASTER
    if not fmt.master:
        names |= {"read_master": f"const float target = {widen_param}(param_data[i]);", "write_master": ""}
    names["moment_parameters"] = "".join(f"{moment}* {kind}_data, " for kind in fmt.kinds)
    names["scalars"] = ", ".join(f"{name} = scalars[{i}]" for i, name in enumerate(fmt.scalars._fields))
    names["old_moments"] = "\n".join(f"    const float {kind} = {widen_moment}({kind}_data[i]);" for kind in fmt.kinds)
    stores = [f"    store(&{kind}_data[i], new_{kind});" for kind in fmt.kinds if kind not in fmt.kept]
    if PARAM not in fmt.kept:
        stores += ["    store(&param_data[i], new_target);", f"    {names['write_master']}"]
    terms = [f"term_{number}" for number in range(fmt.num_sums)]
    results = [*(f"new_{name}" for name in ("target", *fmt.kinds)), *terms]
    names["before"], names["inside"] = fmt.arithmetic.in_cpp(l2, results)
    names |= {"scaled": str(scaled).lower(), "stores": "\n".join(stores)}
    names |= {"num_sums": str(fmt.num_sums), "num_scalars": str(len(fmt.scalars._fields))}
    names["terms"] = "\n".join(f"    terms[{k}][i - start] = {term};" for k, term in enumerate(terms))
    names["element"] = _ELEMENT.substitute(names)
    source = _HELPERS + (_ROWS if fmt.num_sums else _RUN).substitute(names)
    with patched(OPTIONS), compiler_required():
        loaded: ctypes.CDLL = CppCodeCache.load(source, extra_flags=FLAGS)
    pointers, sizes = (2, 2) if fmt.num_sums else (0, 1)
    loaded.update.argtypes = [ctypes.c_void_p] * (6 + len(fmt.kinds) + pointers)
    loaded.update.argtypes += [*[ctypes.c_int64] * sizes, ctypes.c_int]
    loaded.update.restype = None
    return loaded
