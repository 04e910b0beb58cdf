"""Sum up terms of rows in Triton (see `chunkc.ir.sums`): one launch for a table of rows, which allocates nothing.

Importing this needs no Triton; calling does. With `TRITON_INTERPRET=1` set before Triton is first imported the same
code runs on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from chunkc.kernels import elementwise_triton
from chunkc.kernels.arithmetic import Arithmetic
from chunkc.kernels.elementwise_triton import launch, require_triton
from chunkc.kernels.row_sums import ITSELF, MIXED_WORD, SQUARE


def sum_rows(term: Arithmetic, base: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Sum up a term of each row's elements on the current stream, see `chunkc.ir.sums`. Waits for nothing.

    Sums may be fp32, to which they are rounded.

    Raises:
        UnsupportedError: Triton is not installed, or does not compile for the device.
    """
    require_triton(base.device, "chunkc.kernels.row_sums_cpu")
    from chunkc.kernels.row_sums_triton_kernel import row_sums_kernel

    if len(rows):
        launch(row_sums_kernel, len(rows), arguments(term, base, rows, sums), base)


sum_elements = partial(sum_rows, ITSELF)
sum_squares = partial(sum_rows, SQUARE)
checksums = partial(sum_rows, MIXED_WORD)


def arguments(term: Arithmetic, base: Tensor, rows: Tensor, sums: Tensor) -> dict[str, Any]:
    """Return the kernel's arguments, by name. Imports Triton."""
    return {"base": base, "rows": rows, "sums": sums, "TERM": term.in_triton, "BLOCK": elementwise_triton.BLOCK}
