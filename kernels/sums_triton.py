"""Sum up squares in Triton (see `chunkc.ir.sums`): one launch for a table of rows, which allocates nothing.

Importing this needs no Triton; calling does. With `TRITON_INTERPRET=1` set before Triton is first imported the same
code runs on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from chunkc.kernels import elementwise_triton
from chunkc.kernels.elementwise_triton import launch, require_triton


def sum_squares(base: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Sum up squares on the current stream, see `chunkc.ir.sums.SumSquares`. Waits for nothing.

    Raises:
        UnsupportedError: Triton is not installed, or does not compile for the device.
    """
    require_triton(base.device, "chunkc.kernels.sums_cpu")
    from chunkc.kernels.sums_triton_kernel import sum_squares_kernel

    if len(rows):
        launch(sum_squares_kernel, len(rows), arguments(base, rows, sums), base)


def arguments(base: Tensor, rows: Tensor, sums: Tensor) -> dict[str, Any]:
    """Return the kernel's arguments, by name."""
    return {"base": base, "rows": rows, "sums": sums, "BLOCK": elementwise_triton.BLOCK}
