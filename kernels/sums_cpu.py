"""Sum up squares on the CPU (see `chunkc.ir.sums`), by one loop in C++. Takes no memory of torch's allocator.

Elements go to 16 sums in turn, and these are added pairwise: the compiler vectorises them, and bits depend neither on
the machine's vector size nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from string import Template

import torch
from torch import Tensor

from chunkc.ir.sums import ROW
from chunkc.kernels.cpu_loop import FLAGS, OPTIONS, TYPES, WIDENING
from chunkc.kernels.fused_pass import SERIAL_NUM_ELEMENTS, compiler_required
from chunkc.torch_private.inductor import CppCodeCache, patched

_SOURCE = Template(
    WIDENING
    + r"""
static const int lanes = 16, block = 256;

static inline void add_squares(const $type* data, double* sums) {
  $wide wide[block];
  #pragma omp simd
  for (int i = 0; i < block; ++i) wide[i] = $widen(data[i]);
  for (int i = 0; i < block; i += lanes) {
    #pragma omp simd
    for (int j = 0; j < lanes; ++j) sums[j] += double(wide[i + j]) * double(wide[i + j]);
  }
}

static inline double sum_of_row(const $type* data, int64_t numel) {
  double sums[lanes] = {};
  const int64_t whole = numel / block * block;
  for (int64_t i = 0; i < whole; i += block) add_squares(data + i, sums);
  $type rest[block] = {};
  if (whole < numel) {
    std::memcpy(rest, data + whole, size_t(numel - whole) * sizeof($type));
    add_squares(rest, sums);
  }
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

extern "C" void sum_squares(
    const $type* base, const int64_t* rows, double* sums, int64_t num_rows, int num_threads) {
  #pragma omp parallel for schedule(static) num_threads(num_threads) if(num_threads > 1)
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t* row = rows + 3 * i;
    sums[row[2]] = sum_of_row(base + row[0], row[1] - row[0]);
  }
}
"""
)


def sum_squares(base: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Sum up squares, see `chunkc.ir.sums.SumSquares`.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    assert base.is_cpu
    assert rows.is_contiguous()
    num_rows = len(rows)
    threads = torch.get_num_threads() if num_rows * ROW > SERIAL_NUM_ELEMENTS and num_rows > 1 else 1
    library(base.dtype).sum_squares(base.data_ptr(), rows.data_ptr(), sums.data_ptr(), num_rows, threads)


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Compile and load the loop for a dtype.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    element, widen = ("double", "double") if dtype == torch.float64 else TYPES[dtype]
    names = {"type": element, "widen": widen, "wide": "double" if dtype == torch.float64 else "float"}
    with patched(OPTIONS), compiler_required():
        loaded: ctypes.CDLL = CppCodeCache.load(_SOURCE.substitute(names), extra_flags=FLAGS)
    loaded.sum_squares.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int]
    loaded.sum_squares.restype = None
    return loaded
