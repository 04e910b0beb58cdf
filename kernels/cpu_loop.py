"""Generate the CPU's update in a format as a loop in C++, in one pass over memory, which the compiler vectorises.

Every element goes through the same operations in the same order, in vectors or not, without contraction to fused
multiply-adds: bits depend neither on the number of threads nor on how a run of elements was cut, but for NaNs' in fp16.
"""

from __future__ import annotations

import ctypes
import functools
from string import Template

import torch

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import MASTER, is_scale
from chunkc.kernels.arithmetic import DOUBLE, FLOAT
from chunkc.kernels.cpp import BFLOAT16, ELEMENTS, WIDENING, ElementType, load
from chunkc.kernels.formats import QUANT_BLOCK, UpdateFormat
from chunkc.kernels.pointer_offsets import kinds_of
from chunkc.kernels.quant_cpu import QUANTISING
from chunkc.kernels.rounding import FIRST_MOMENT_STREAM, HIGH_FACTOR, MIX_FACTORS, PARAM_STREAM, STREAM_FACTOR

# C++ that reads and writes a master of which only the lower bits are kept (see `chunkc.kernels.split`).
_READ_SPLIT = """const float upper = widen_bf16(param_data[i]);
    const float joined = as_float(as_bits(upper) + uint32_t(int32_t(master_data[i])));
    const float target = joined != joined ? upper : joined;"""
_WRITE_SPLIT = """    const uint32_t bits = as_bits(new_target);
    const uint32_t kept = bits - ((bits & 0x1FFFFu) == 0x8000u ? 1u : 0u);
    master_data[i] = int16_t(new_target != new_target ? 0u : kept);"""

_ROUNDING = Template(
    r"""
static inline uint16_t round_bf16(float x) {  // to nearest even
  const uint32_t bits = x != x ? 0x7FC00000u : as_bits(x);
  return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
static inline uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * ${mix_0}u;
  x = (x ^ (x >> 15)) * ${mix_1}u;
  return x ^ (x >> 15);
}
static inline uint16_t round_stochastic(float x, uint32_t random) {
  const uint32_t bits = as_bits(x), special = x != x ? 0x7FC0u : bits >> 16;
  const uint32_t rounded = (bits + (random & 0xFFFFu)) >> 16;
  return uint16_t((bits & 0x7F800000u) == 0x7F800000u ? special : rounded);
}
"""
).substitute(mix_0=MIX_FACTORS[0], mix_1=MIX_FACTORS[1])

# Parameters in fp16 are converted block by block: gcc does not make vectors of the processor's conversion by itself.
_FP16 = r"""
#ifdef __F16C__
#include <immintrin.h>
#endif

static inline uint16_t round_fp16(float x) {  // to nearest even, by the rounding of a sum with a power of two
  const uint32_t bits = as_bits(x), twice = bits + bits;
  const uint32_t exponent = twice & 0xFF000000u;
  const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
  const float scaled = std::fabs(x) * 0x1p+112f * 0x1p-110f;
  const uint32_t sum = as_bits(as_float((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t magnitude = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
  const uint32_t nan = 0u - uint32_t(x != x);
  return uint16_t(((bits >> 16) & 0x8000u) | (nan & 0x7E00u) | (magnitude & ~nan));
}
static inline void round_fp16(const float* values, int num_values, uint16_t* rounded) {
  int i = 0;
#ifdef __F16C__
  for (; i + 8 <= num_values; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i*)(rounded + i), eight);
  }
#endif
  for (; i < num_values; ++i) rounded[i] = round_fp16(values[i]);
}
"""

_ELEMENT = Template(
    """    $wide grad = $widen_grad(grad_data[i]);
    if ($scaled) grad = grad * factor * second_factor;
    $read_target
$old_moments
$inside
$stores"""
)

_UPDATE = Template(
    r"""
extern "C" void update(
    void* const* data, const $wide* table, const float* unscale, const float* clip, int64_t num_elements,
    uint64_t first_element, uint32_t key_low, uint32_t key_high, int num_threads) {
$buffers
  const $wide* scalars = table;
  const $wide $scalars;
  const float factor = $scaled ? *unscale : 1.0f, second_factor = $scaled ? *clip : 1.0f;
$seed
$before
$loop
}
"""
)

_RUN = Template(
    r"""  #pragma omp parallel for simd schedule(static) num_threads(num_threads) if(parallel: num_threads > 1)
  for (int64_t i = 0; i < num_elements; ++i) {
$element
  }"""
)

# New moments stay in the cache until their block is quantised, and so do parameters until they are rounded to fp16.
_BLOCKS = Template(
    r"""  #pragma omp parallel for schedule(static) num_threads(num_threads) if(num_threads > 1)
  for (int64_t start = 0; start < num_elements; start += $block) {
    const int64_t until = start + $block < num_elements ? start + $block : num_elements, at = start / $block;
$of_block
    #pragma omp simd
    for (int64_t i = start; i < until; ++i) {
$element
    }
$round_block
  }"""
)

# Terms go to 16 sums in turn, and these are added pairwise, as in `chunkc.kernels.row_sums_cpu`.
_ROWS = Template(
    r"""
static const int lanes = 16, block = 256;

extern "C" void update(
    void* const* data, const $wide* table, const float* unscale, const float* clip, float* sums, const int64_t* rows,
    int64_t sums_stride, int64_t num_rows, int num_threads) {
$buffers
  const float factor = $scaled ? *unscale : 1.0f, second_factor = $scaled ? *clip : 1.0f;
  #pragma omp parallel for schedule(static) num_threads(num_threads) if(num_threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t begin = rows[3 * row], end = rows[3 * row + 1];
    const $wide* scalars = table + rows[3 * row + 2] * $num_scalars;
    const $wide $scalars;
$before
    double totals[$num_sums][lanes] = {};
    $wide terms[$num_sums][block] = {};
    for (int64_t start = begin; start < end; start += block) {
      const int64_t until = start + block < end ? start + block : end;
      #pragma omp simd
      for (int64_t i = start; i < until; ++i) {
$element
$terms
      }
      for (int k = 0; k < $num_sums; ++k) {
        for (int64_t i = until - start; i < block; ++i) terms[k][i] = 0;
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


@functools.cache
def library(fmt: UpdateFormat, *, l2: bool, scaled: bool) -> ctypes.CDLL:
    """Compile and load the loop for a format: a library with the function `update`.

    Its `data` are pointers to the buffers by `kinds_of`, and for each 8-bit moment to its `value_table` and its
    `bucket_table`. `grad` may share `param`'s memory: it is read first.

    Args:
        l2: weight decay is added to the gradient; of terms that are added up, never.
        scaled: gradients are multiplied by two factors first.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    number = DOUBLE if fmt.wide_dtype == torch.float64 else FLOAT
    terms = [f"term_{k}" for k in range(fmt.num_sums)]
    results = [*(f"new_{name}" for name in ("target", *fmt.kinds)), *terms]
    before, inside = fmt.arithmetic.in_cpp(l2, results, number)
    names = {
        "wide": number.type,
        "widen_grad": ELEMENTS[fmt.grad_dtype].widen,
        "scalars": ", ".join(f"{name} = scalars[{i}]" for i, name in enumerate(fmt.scalars._fields)),
        "num_scalars": str(len(fmt.scalars._fields)),
        "scaled": str(scaled).lower(),
        "buffers": _buffers(fmt),
        "read_target": _read_target(fmt, number.type),
        "old_moments": "\n".join(f"    const {number.type} {kind} = {_old_moment(fmt, kind)};" for kind in fmt.kinds),
        "before": before,
        "inside": inside,
        "stores": _stores(fmt),
        "num_sums": str(fmt.num_sums),
        "terms": "\n".join(f"    terms[{k}][i - start] = {term};" for k, term in enumerate(terms)),
        "block": str(QUANT_BLOCK),
        "seed": _seed(fmt) if fmt.stochastic else "",
    }
    names["element"] = _ELEMENT.substitute(names)
    names["of_block"], names["round_block"] = _blocks(fmt)
    names["loop"] = (_BLOCKS if names["of_block"] else _RUN).substitute(names)
    helpers = _FP16 * (fmt.param_dtype == torch.float16) + QUANTISING * fmt.quantised
    loaded = load(WIDENING + _ROUNDING + helpers + (_ROWS if fmt.num_sums else _UPDATE).substitute(names))
    pointers, integers = ctypes.c_void_p, ctypes.c_int64
    sizes = [pointers] * 2 + [integers] * 2 if fmt.num_sums else [integers] + [ctypes.c_uint64] + [ctypes.c_uint32] * 2
    loaded.update.argtypes = [*[pointers] * 4, *sizes, ctypes.c_int]
    loaded.update.restype = None
    return loaded


def _element_of(fmt: UpdateFormat, kind: str) -> ElementType:
    dtypes = {PARAM: fmt.param_dtype, GRAD: fmt.grad_dtype, MASTER: fmt.master_dtype or torch.float32}
    return ELEMENTS[torch.float32 if is_scale(kind) else dtypes.get(kind, fmt.moment_dtype)]


def _buffers(fmt: UpdateFormat) -> str:
    """Print the declarations of the buffers and tables."""
    types = {f"{kind}_data": _element_of(fmt, kind).type for kind in kinds_of(fmt)}
    if fmt.quantised:
        for kind in fmt.kinds:
            types |= {f"{kind}_values": "float", f"{kind}_buckets": "int32_t"}
    return "\n".join(f"  {type_}* const {name} = ({type_}*)data[{i}];" for i, (name, type_) in enumerate(types.items()))


def _read_target(fmt: UpdateFormat, wide: str) -> str:
    if fmt.split:
        return _READ_SPLIT
    source = "master_data[i]" if fmt.master else f"{_element_of(fmt, PARAM).widen}(param_data[i])"
    return f"const {wide} target = {source};"


def _old_moment(fmt: UpdateFormat, kind: str) -> str:
    if fmt.quantised:
        return f"{kind}_values[{kind}_data[i]] * {kind}_scale"
    return f"{_element_of(fmt, kind).widen}({kind}_data[i])"


def _blocks(fmt: UpdateFormat) -> tuple[str, str]:
    """Print what a block of elements needs before and after the loop over them; "" where the format has no blocks."""
    before, after = [], []
    if fmt.quantised:
        for kind in fmt.kinds:
            scale, block = f"{kind}_scale_data + at", f"{kind}_block, int(until - start), {kind}_data + start"
            before += [f"const float {kind}_scale = {kind}_scale_data[at];", f"float {kind}_block[{QUANT_BLOCK}];"]
            after.append(f"quantise({block}, {scale}, {kind}_buckets);")
    if fmt.param_dtype == torch.float16 and PARAM not in fmt.kept:
        before.append(f"float param_block[{QUANT_BLOCK}];")
        after.append("round_fp16(param_block, int(until - start), param_data + start);")
    return "\n".join(f"    {line}" for line in before), "\n".join(f"    {line}" for line in after)


def _stores(fmt: UpdateFormat) -> str:
    """Print the stores of the results that the rule does not keep."""
    lines = ["    const uint32_t scattered = mix32((first + uint32_t(i)) ^ key_low);"] if fmt.stochastic else []

    def store(kind: str, value: str, stream: int) -> None:
        element = _element_of(fmt, kind)
        rounded = f"{element.round}({value})"
        if fmt.stochastic and element is BFLOAT16:
            rounded = f"round_stochastic({value}, mix32(scattered + offset_{stream}))"
        lines.append(f"    {kind}_data[i] = {rounded};")

    for stream, kind in enumerate(fmt.kinds, start=FIRST_MOMENT_STREAM):
        if fmt.quantised:
            lines.append(f"    {kind}_block[i - start] = new_{kind};")
        elif kind not in fmt.kept:
            store(kind, f"new_{kind}", stream)
    if PARAM not in fmt.kept:
        if fmt.param_dtype == torch.float16:
            lines.append("    param_block[i - start] = new_target;")
        else:
            store(PARAM, "new_target", PARAM_STREAM)
        if fmt.split:
            lines.append(_WRITE_SPLIT)
        elif fmt.master:
            lines.append("    master_data[i] = new_target;")
    return "\n".join(lines)


def _seed(fmt: UpdateFormat) -> str:
    """Print the parts of random bits that all elements have in common, see `chunkc.kernels.rounding.random_bits16`."""
    streams = (PARAM_STREAM, *range(FIRST_MOMENT_STREAM, FIRST_MOMENT_STREAM + len(fmt.kinds)))
    return "\n".join(
        [
            "  const uint32_t first = uint32_t(first_element);",
            f"  const uint32_t high = (uint32_t(first_element >> 32) & 0x7FFFFFFFu) * {HIGH_FACTOR}u + key_high;",
            *(f"  const uint32_t offset_{stream} = high + {stream}u * {STREAM_FACTOR}u;" for stream in streams),
        ]
    )
