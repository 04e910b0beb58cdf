"""Compile and launch one Triton kernel: exits with what is missing where that fails (`bench/on_gpu.sh` asks first)."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(pointer, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer + at, tl.load(pointer + at, mask=at < num) + 1, mask=at < num)


def add_one(values: torch.Tensor, pointer: Any = None) -> None:
    """Add one to a flat tensor in place.

    Args:
        pointer: what the kernel is launched with, the tensor by default.
    """
    _add_one[(triton.cdiv(len(values), 1024),)](values if pointer is None else pointer, len(values), BLOCK=1024)


def main() -> None:
    values = torch.zeros(1000, device="cuda")
    try:
        add_one(values)
        torch.cuda.synchronize()
    except Exception as error:
        sys.exit(
            "Triton cannot compile and launch a kernel here. It needs a C compiler and Python's headers (Debian, "
            f"Ubuntu: apt install gcc python3-dev), or CC set to a compiler: {type(error).__name__}: {error}"
        )
    print("a Triton kernel was compiled and launched")


if __name__ == "__main__":
    main()
