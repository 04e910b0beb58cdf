"""Update by LAMB on the CPU: a fused pass over memory for each stage, by Inductor (see `chunkc.kernels.fused_pass`).

Rows of 16,384 elements are summed by one thread each, so sums do not depend on the number of threads.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale
from chunkc.kernels.fused_pass import SERIAL_NUM_ELEMENTS, Pass, compile_pass, host_empty, host_tensor
from chunkc.kernels.lamb import LAMB_APPLY, LAMB_MOMENTS
from chunkc.kernels.lamb_formats import ROW, LambPiece, LambScalars, LambWork
from chunkc.kernels.lamb_host import apply_stage, moments_stage

_ONE = host_tensor(1.0, np.float32)
_LIMITS = slice(LambScalars._fields.index("adapt"), LambScalars._fields.index("max_coeff") + 1)
_SCALARS = (torch.float32, (len(LambScalars._fields),))


@moments_stage
def lamb_moments(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Run stage 1, see `moments_stage`.

    `found_inf` is read before the pass: where it is set, no other memory is read.

    Raises:
        ValueError: a tensor is not on the CPU, or see `check_lamb`.
    """
    if _skip(slots, scale):
        return
    unscale, clip = (_ONE if factor is None else factor for factor in (scale.unscale, scale.clip))
    for piece, cuts in zip(work.pieces, work.cuts, strict=True):
        row = 0
        while row < len(cuts) - 1:
            # All whole rows from here, or one shorter row.
            last = row
            while last + 1 < len(cuts) and cuts[last + 1] - cuts[last] == ROW:
                last += 1
            whole = last > row
            last = max(last, row + 1)
            begin, end = cuts[row], cuts[last]
            tensors = [slots.grad[begin:end], slots.exp_avg[begin:end], slots.exp_avg_sq[begin:end]]
            tensors.append((slots.param if slots.master is None else slots.master).detach()[begin:end])
            sums = partials[:, piece.partial + row : piece.partial + last]
            if whole:
                tensors = [*[tensor.view(-1, ROW) for tensor in tensors], *sums.unbind()]
            else:
                squares = host_empty((2, end - begin), torch.float32)
                tensors += squares.unbind()
            unscales = host_empty((last - row if whole else end - begin,), torch.float32).copy_(unscale)
            _moments_pass(fmt.grad_dtype, whole, last - row > 1)([*tensors, unscales, scalars[piece.group], clip])
            if not whole:
                torch.sum(squares, dim=1, keepdim=True, out=sums)
            row = last


@apply_stage
def lamb_apply(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Run stage 2, see `apply_stage`.

    Raises:
        ValueError: a tensor is not on the CPU, or see `check_lamb`.
    """
    if _skip(slots, scale):
        return
    for piece in work.pieces:
        tensors = _apply_arguments(slots, piece, scalars, partials)
        parallel = piece.end - piece.begin >= SERIAL_NUM_ELEMENTS
        _apply_pass(fmt.param_dtype, fmt.master, parallel)(tensors)


def warm_up(fmt: AdamFormat) -> None:
    """Compile the passes of both stages for a format. Idempotent."""
    for rows, parallel in ((False, False), (True, False), (True, True)):
        _moments_pass(fmt.grad_dtype, rows, parallel)
    for parallel in (False, True):
        _apply_pass(fmt.param_dtype, fmt.master, parallel)


def _skip(slots: AdamSlots, scale: GradScale) -> bool:
    if not slots.param.is_cpu:
        raise ValueError(f"lamb_cpu needs tensors on the CPU, got {slots.param.device}")
    return scale.found_inf is not None and scale.found_inf.item() != 0


def _apply_arguments(slots: AdamSlots, piece: LambPiece, scalars: Tensor, partials: Tensor) -> list[Tensor]:
    row = scalars[piece.group]
    ratio = host_tensor(_trust_ratio(partials, piece, *row[_LIMITS].tolist()), np.float32)
    tensors = [slots.param.detach(), slots.exp_avg, slots.exp_avg_sq, slots.master]
    parts = [tensor[piece.begin : piece.end] for tensor in tensors if tensor is not None]
    return [*parts, row, ratio]


def _trust_ratio(partials: Tensor, piece: LambPiece, adapt: float, least: float, most: float) -> float:
    """Compute a tensor's trust ratio from its partial sums, without memory of torch's allocator."""
    if not adapt:
        return 1.0
    wide = host_empty((2, piece.last_partial - piece.first_partial), torch.float64)
    wide.copy_(partials[:, piece.first_partial : piece.last_partial])
    param_norm, update_norm = torch.sum(wide, 1, out=host_empty((2,), torch.float64)).sqrt_().tolist()
    if param_norm == 0 or update_norm == 0:
        return 1.0
    return min(max(param_norm / update_norm, least), most)


@functools.cache
def _moments_pass(grad_dtype: torch.dtype, rows: bool, parallel: bool) -> Pass:
    """Compile a pass over [grad, exp_avg, exp_avg_sq, target, param_sums, update_sums, unscales, scalars, clip].

    With `rows`, the first four are `[n, ROW]`, and the sums of squares of parameters and updates are `[n]`. Otherwise
    all are `[n]`, and the squares themselves are stored. `unscales` is one factor, repeated for each row: with a factor
    that could vary by row, Inductor keeps the update of moments and the sums in one loop.
    """
    row: tuple[int, ...] = (ROW,) if rows else ()
    runs = [(grad_dtype, row), *[(torch.float32, row)] * 3, *[(torch.float32, ())] * 3]
    function = functools.partial(_new_moments, rows)
    return compile_pass(function, runs, [_SCALARS, (torch.float32, ())], parallel=parallel)


@functools.cache
def _apply_pass(param_dtype: torch.dtype, master: bool, parallel: bool) -> Pass:
    """Compile a pass over [param, exp_avg, exp_avg_sq, (master,) scalars, ratio]."""
    dtypes = [param_dtype, torch.float32, torch.float32, *([torch.float32] if master else [])]
    runs = [(dtype, ()) for dtype in dtypes]
    return compile_pass(_new_parameters, runs, [_SCALARS, (torch.float32, ())], parallel=parallel)


def _new_moments(
    rows: bool,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    target: Tensor,
    param_sums: Tensor,
    update_sums: Tensor,
    unscales: Tensor,
    scalars: Tensor,
    clip: Tensor,
) -> tuple[()]:
    """Run stage 1 on rows or elements: the function that is compiled."""
    wide = grad.to(torch.float32) * (unscales.unsqueeze(1) if rows else unscales) * clip
    inputs = [wide, target, exp_avg, exp_avg_sq]
    new_avg, new_avg_sq, update = LAMB_MOMENTS.in_torch(inputs, scalars, l2=False, root=torch.sqrt)
    for sums, values in ((param_sums, target), (update_sums, update)):
        squares = values * values
        sums.copy_(squares.sum(1) if rows else squares)
    exp_avg.copy_(new_avg)
    exp_avg_sq.copy_(new_avg_sq)
    return ()


def _new_parameters(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Tensor) -> tuple[()]:
    """Run stage 2: the function that is compiled; `rest` is (master,) scalars, ratio."""
    *master, scalars, ratio = rest
    target = master[0] if master else param
    inputs = [target, exp_avg, exp_avg_sq, ratio]
    (new_target,) = LAMB_APPLY.in_torch(inputs, scalars, l2=False, root=torch.sqrt)
    target.copy_(new_target)
    if target is not param:
        param.copy_(new_target)
    return ()
