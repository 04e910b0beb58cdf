"""Compute checksums of rows of words on the CPU (see `chunkc.ir.sums.Checksum`), by one loop in C++.

Takes no memory of torch's allocator.
"""

from __future__ import annotations

import ctypes
import functools
from string import Template

import torch
from torch import Tensor

from chunkc.ir.sums import MIX, PLACE, ROW
from chunkc.kernels.cpu_loop import FLAGS, OPTIONS
from chunkc.kernels.fused_pass import SERIAL_NUM_ELEMENTS, compiler_required
from chunkc.torch_private.inductor import CppCodeCache, patched

_TYPES = {torch.int16: "int16_t", torch.int32: "int32_t"}

_SOURCE = Template(
    r"""
#include <cstdint>

static inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * ${first}u;
  x = (x ^ (x >> 13)) * ${second}u;
  return x ^ (x >> 16);
}

extern "C" void checksums(
    const $type* base, const int64_t* rows, int64_t* sums, int64_t num_rows, int num_threads) {
  #pragma omp parallel for schedule(static) num_threads(num_threads) if(num_threads > 1)
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t* row = rows + 3 * i;
    const $type* words = base + row[0];
    const uint32_t numel = uint32_t(row[1] - row[0]);
    uint64_t sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (uint32_t j = 0; j < numel; ++j) sum += mixed(uint32_t(int32_t(words[j])) ^ (j * ${place}u));
    sums[row[2]] = int64_t(sum);
  }
}
"""
)


def checksums(base: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Compute checksums, see `chunkc.ir.sums.Checksum`.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    assert base.is_cpu
    assert rows.is_contiguous()
    num_rows = len(rows)
    threads = torch.get_num_threads() if num_rows * ROW > SERIAL_NUM_ELEMENTS and num_rows > 1 else 1
    library(base.dtype).checksums(base.data_ptr(), rows.data_ptr(), sums.data_ptr(), num_rows, threads)


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Compile and load the loop for words of a dtype.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    names = {"type": _TYPES[dtype], "first": MIX[0], "second": MIX[1], "place": PLACE}
    with patched(OPTIONS), compiler_required():
        loaded: ctypes.CDLL = CppCodeCache.load(_SOURCE.substitute(names), extra_flags=FLAGS)
    loaded.checksums.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int]
    loaded.checksums.restype = None
    return loaded
