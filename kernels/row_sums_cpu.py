"""Sum up terms of rows on the CPU (see `chunkc.ir.sums`), by one loop in C++. Takes no memory of torch's allocator.

Terms go to 16 sums in turn, and these are added pairwise: the compiler vectorises them, and bits depend neither on
the machine's vector size nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from string import Template
from typing import NamedTuple

import torch
from torch import Tensor

from chunkc.ir.sums import COLUMNS, ROW
from chunkc.kernels.arithmetic import DOUBLE, UINT32, Arithmetic, CppNumber
from chunkc.kernels.cpp import ELEMENTS, SERIAL_NUM_ELEMENTS, WIDENING, load
from chunkc.kernels.row_sums import ITSELF, MIXED_WORD, SQUARE


class _Types(NamedTuple):
    """C++ types of a row: its elements, these widened by a function, its terms, and their sum before it is rounded."""

    element: str
    wide: str
    widen: str
    term: CppNumber
    sum: str


_TYPES = {
    dtype: _Types(ELEMENTS[dtype].type, wide, ELEMENTS[dtype].widen, DOUBLE, "double")
    for dtype, wide in (
        (torch.float64, "double"),
        (torch.float32, "float"),
        (torch.bfloat16, "float"),
        (torch.float16, "float"),
    )
} | {
    torch.int16: _Types("int16_t", "uint32_t", "uint32_t", UINT32, "int64_t"),
    torch.int32: _Types("int32_t", "uint32_t", "uint32_t", UINT32, "int64_t"),
}

_SOURCE = Template(
    WIDENING
    + r"""
static const int lanes = 16, block = 256;

static inline $term term_of($term $input, uint32_t place) {
$code
  return term;
}

static inline void add_block(const $element* data, uint32_t place, $sum* sums) {
  $wide wide[block];
  #pragma omp simd
  for (int i = 0; i < block; ++i) wide[i] = $widen(data[i]);
  for (int i = 0; i < block; i += lanes) {
    #pragma omp simd
    for (int j = 0; j < lanes; ++j) sums[j] += $sum(term_of($term(wide[i + j]), place + i + j));
  }
}

static inline $sum sum_of_row(const $element* data, int64_t numel) {
  $sum sums[lanes] = {};
  const int64_t whole = numel / block * block;
  for (int64_t i = 0; i < whole; i += block) add_block(data + i, uint32_t(i), sums);
  for (int64_t i = whole; i < numel; ++i)
    sums[i % lanes] += $sum(term_of($term($wide($widen(data[i]))), uint32_t(i)));
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

extern "C" void sum_rows(
    const $element* base, const int64_t* rows, $result* sums, int64_t num_rows, int num_threads) {
  #pragma omp parallel for schedule(static) num_threads(num_threads) if(num_threads > 1)
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t* row = rows + $columns * i;
    sums[row[2]] = $result(sum_of_row(base + row[0], row[1] - row[0]));
  }
}
"""
)


def sum_rows(term: Arithmetic, base: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Sum up a term of each row's elements, see `chunkc.ir.sums`. Sums may be fp32, to which they are rounded.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    assert base.is_cpu
    assert rows.is_contiguous()
    num_rows = len(rows)
    threads = torch.get_num_threads() if num_rows * ROW > SERIAL_NUM_ELEMENTS and num_rows > 1 else 1
    loop = library(term, base.dtype, rounded=sums.dtype == torch.float32).sum_rows
    loop(base.data_ptr(), rows.data_ptr(), sums.data_ptr(), num_rows, threads)


sum_elements = functools.partial(sum_rows, ITSELF)
sum_squares = functools.partial(sum_rows, SQUARE)
checksums = functools.partial(sum_rows, MIXED_WORD)


@functools.cache
def library(term: Arithmetic, dtype: torch.dtype, *, rounded: bool) -> ctypes.CDLL:
    """Compile and load the loop for elements of a dtype, and sums that are rounded to fp32 or are not.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    types = _TYPES[dtype]
    _, code = term.in_cpp(None, ["term"], types.term)
    names = types._asdict() | {"term": types.term.type, "input": term.inputs[0], "code": code, "columns": COLUMNS}
    names["result"] = "float" if rounded else types.sum
    loaded = load(_SOURCE.substitute(names))
    loaded.sum_rows.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int]
    loaded.sum_rows.restype = None
    return loaded
