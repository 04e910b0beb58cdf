"""Update by LAMB in Triton: two launches per tile, or for many tensors anywhere (see `chunkc.kernels.lamb_formats`).

Importing this needs no Triton; updating does. With `TRITON_INTERPRET=1` set before Triton is first imported the same
code runs on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from chunkc.kernels.elementwise_triton import BLOCK, RAGGED_BLOCK, launch, require_triton
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale
from chunkc.kernels.lamb_formats import LambWork
from chunkc.kernels.lamb_host import apply_stage, moments_stage


@moments_stage
def lamb_moments(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Run stage 1 in one launch on the current stream, see `moments_stage`. Never waits.

    Raises:
        ValueError: see `check_lamb`.
        UnsupportedError: Triton is not installed, or the slots are not on a device that it compiles for.
    """
    arguments = moments_arguments(fmt, slots, work, scalars, partials, scale)
    _launch(lambda device_code: device_code.lamb_moments_kernel, slots, work, arguments)


@apply_stage
def lamb_apply(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Run stage 2 in one launch on the current stream, see `apply_stage`. Never waits.

    Each program adds up its tensor's partial sums itself: at most one pair for 16,384 elements of the tensor.

    Raises:
        ValueError: see `check_lamb`.
        UnsupportedError: Triton is not installed, or the slots are not on a device that it compiles for.
    """
    arguments = apply_arguments(fmt, slots, work, scalars, partials, scale)
    _launch(lambda device_code: device_code.lamb_apply_kernel, slots, work, arguments)


def moments_arguments(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> dict[str, Any]:
    """Return the arguments of stage 1's kernel, by name."""
    arguments = apply_arguments(fmt, slots, work, scalars, partials, scale)
    return arguments | {
        "grad": slots.grad,
        "unscale": scale.unscale,
        "clip": scale.clip,
        "partial": work.partial,
    }


def apply_arguments(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> dict[str, Any]:
    """Return the arguments of stage 2's kernel, by name."""
    return {
        "param": slots.param.detach(),
        "exp_avg": slots.exp_avg,
        "exp_avg_sq": slots.exp_avg_sq,
        "master": slots.master,
        "work": work.rows,
        "scalars": scalars,
        "partials": partials,
        "found_inf": scale.found_inf,
        "num_partials": work.num_partials,
        "pointer_offsets": work.pointer_offsets,
        "BLOCK": BLOCK,
        "RAGGED_BLOCK": RAGGED_BLOCK,
        "NUM_COLUMNS": work.rows.shape[1],
        "NUM_POINTER_OFFSETS": 0 if work.pointer_offsets is None else work.pointer_offsets.shape[1],
    }


def _launch(
    kernel_of: Callable[[ModuleType], Any], slots: AdamSlots, work: LambWork, arguments: dict[str, Any]
) -> None:
    require_triton(slots.param.device, "chunkc.kernels.lamb_cpu")
    from chunkc.kernels import lamb_triton_kernel

    if len(work.rows):
        launch(kernel_of(lamb_triton_kernel), len(work.rows), arguments, slots.param)
