"""Compute checksums in Triton (see `chunkc.ir.sums.Checksum`): one launch for a table of rows, which allocates nothing.

Importing this needs no Triton; calling does. With `TRITON_INTERPRET=1` set before Triton is first imported the same
code runs on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from chunkc.kernels import elementwise_triton
from chunkc.kernels.elementwise_triton import launch, require_triton


def checksums(base: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Compute checksums on the current stream, see `chunkc.ir.sums.Checksum`. Waits for nothing.

    Raises:
        UnsupportedError: Triton is not installed, or does not compile for the device.
    """
    require_triton(base.device, "chunkc.kernels.checksums_cpu")
    from chunkc.kernels.checksums_triton_kernel import checksums_kernel

    if len(rows):
        launch(checksums_kernel, len(rows), arguments(base, rows, sums), base)


def arguments(base: Tensor, rows: Tensor, sums: Tensor) -> dict[str, Any]:
    """Return the kernel's arguments, by name."""
    return {"base": base, "rows": rows, "sums": sums, "BLOCK": elementwise_triton.BLOCK}
