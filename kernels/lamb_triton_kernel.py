"""Device code of the LAMB update. Imports Triton: use it through `chunkc.kernels.lamb_triton`.

Compiled without contraction to fused multiply-adds: moments have the same bits as from every other kernel. Sums of
squares are added in an order of their own, the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.kernels.formats import UNIT
from chunkc.kernels.lamb import LAMB_APPLY, LAMB_MOMENTS
from chunkc.kernels.lamb_formats import LambScalars
from chunkc.kernels.triton_formats import factors_of, load_target, load_wide, pointer_of_tensor, store_target

_UNIT = tl.constexpr(UNIT)
_NUM_SCALARS = tl.constexpr(len(LambScalars._fields))
_new_moments = LAMB_MOMENTS.in_triton
_new_target = LAMB_APPLY.in_triton

_UNSPECIALIZED = ["work", "pointer_offsets", "scalars", "partials", "unscale", "clip", "found_inf"]


@triton.jit(
    do_not_specialize=["partial", "num_partials"],
    do_not_specialize_on_alignment=_UNSPECIALIZED,
)
def lamb_moments_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    master,
    work,
    pointer_offsets,
    scalars,
    partials,
    unscale,
    clip,
    found_inf,
    partial: tl.int64,
    num_partials: tl.int64,
    BLOCK: tl.constexpr,
    RAGGED_BLOCK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_POINTER_OFFSETS: tl.constexpr,
):
    """Compute new moments and two sums of squares, a program per row (begin, end, group, first, last) of `work`, int64.

    With `pointer_offsets`, as in Adam's kernel, a row ends with its tensor's number.
    """
    program = tl.program_id(0).to(tl.int64)
    row = work + program * NUM_COLUMNS
    begin = tl.load(row)
    end = tl.load(row + 1)
    group = scalars + tl.load(row + 2) * _NUM_SCALARS
    if pointer_offsets is not None:
        pointer_offsets += tl.load(row + 5) * NUM_POINTER_OFFSETS
        param = pointer_of_tensor(param, pointer_offsets, 0)
        grad = pointer_of_tensor(grad, pointer_offsets, 1)
        exp_avg = pointer_of_tensor(exp_avg, pointer_offsets, 2)
        exp_avg_sq = pointer_of_tensor(exp_avg_sq, pointer_offsets, 3)
        if master is not None:
            master = pointer_of_tensor(master, pointer_offsets, 4)
    sums = partials + partial + program
    update = tl.full((), True, tl.int1)
    if found_inf is not None:
        update = tl.load(found_inf) == 0
    factor, second_factor = factors_of(unscale, clip)
    if update:
        rest = begin
        of_params = tl.zeros((BLOCK,), tl.float32)
        of_updates = tl.zeros((BLOCK,), tl.float32)
        if begin % _UNIT == 0:
            rest = end // _UNIT * _UNIT
            for start in range(begin, rest, BLOCK):
                # Divided and multiplied only to tell the compiler the branch's condition: multiples of _UNIT.
                of_params, of_updates = _moments_of_block(
                    param, grad, exp_avg, exp_avg_sq, master, group, factor, second_factor,
                    start // _UNIT * _UNIT, rest // _UNIT * _UNIT, of_params, of_updates, BLOCK,
                )  # fmt: skip
        rest_of_params = tl.zeros((RAGGED_BLOCK,), tl.float32)
        rest_of_updates = tl.zeros((RAGGED_BLOCK,), tl.float32)
        for start in range(rest, end, RAGGED_BLOCK):
            rest_of_params, rest_of_updates = _moments_of_block(
                param, grad, exp_avg, exp_avg_sq, master, group, factor, second_factor,
                start, end, rest_of_params, rest_of_updates, RAGGED_BLOCK,
            )  # fmt: skip
        tl.store(sums, tl.sum(of_params) + tl.sum(rest_of_params))
        tl.store(sums + num_partials, tl.sum(of_updates) + tl.sum(rest_of_updates))


@triton.jit(
    do_not_specialize=["num_partials"],
    do_not_specialize_on_alignment=_UNSPECIALIZED,
)
def lamb_apply_kernel(
    param,
    exp_avg,
    exp_avg_sq,
    master,
    work,
    pointer_offsets,
    scalars,
    partials,
    found_inf,
    num_partials: tl.int64,
    BLOCK: tl.constexpr,
    RAGGED_BLOCK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_POINTER_OFFSETS: tl.constexpr,
):
    """Update parameters, a program per row of `work`, by the trust ratio of all the tensor's partial sums."""
    row = work + tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    begin = tl.load(row)
    end = tl.load(row + 1)
    group = scalars + tl.load(row + 2) * _NUM_SCALARS
    if pointer_offsets is not None:
        pointer_offsets += tl.load(row + 5) * NUM_POINTER_OFFSETS
        param = pointer_of_tensor(param, pointer_offsets, 0)
        exp_avg = pointer_of_tensor(exp_avg, pointer_offsets, 2)
        exp_avg_sq = pointer_of_tensor(exp_avg_sq, pointer_offsets, 3)
        if master is not None:
            master = pointer_of_tensor(master, pointer_offsets, 4)
    first = tl.load(row + 3)
    last = tl.load(row + 4)
    update = tl.full((), True, tl.int1)
    if found_inf is not None:
        update = tl.load(found_inf) == 0
    if update:
        of_params = _total(partials, first, last, BLOCK)
        of_updates = _total(partials + num_partials, first, last, BLOCK)
        param_norm = tl.sqrt_rn(of_params)
        update_norm = tl.sqrt_rn(of_updates)
        adapted = (param_norm != 0) & (update_norm != 0) & (tl.load(group + 9) != 0)
        ratio = tl.div_rn(param_norm, tl.where(adapted, update_norm, 1.0))
        ratio = tl.maximum(ratio, tl.load(group + 10), propagate_nan=tl.PropagateNan.ALL)
        ratio = tl.minimum(ratio, tl.load(group + 11), propagate_nan=tl.PropagateNan.ALL)
        ratio = tl.where(adapted, ratio, 1.0)
        rest = begin
        if begin % _UNIT == 0:
            rest = end // _UNIT * _UNIT
            for start in range(begin, rest, BLOCK):
                _apply_to_block(
                    param, exp_avg, exp_avg_sq, master, group, ratio,
                    start // _UNIT * _UNIT, rest // _UNIT * _UNIT, BLOCK,
                )  # fmt: skip
        for start in range(rest, end, RAGGED_BLOCK):
            _apply_to_block(param, exp_avg, exp_avg_sq, master, group, ratio, start, end, RAGGED_BLOCK)


@triton.jit
def _moments_of_block(
    param, grad, exp_avg, exp_avg_sq, master, scalars, factor, second_factor, begin, end, of_params, of_updates,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the moments of elements `[begin, end)`, at most BLOCK, and add squares to the two sums `[BLOCK]`."""
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < end
    wide = load_wide(grad, offsets, mask) * factor * second_factor
    old_avg = tl.load(exp_avg + offsets, mask=mask, other=0.0)
    old_avg_sq = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)
    target = load_target(param, master, offsets, mask)
    new_avg, new_avg_sq, direction = _new_moments(wide, target, old_avg, old_avg_sq, scalars)
    tl.store(exp_avg + offsets, new_avg, mask=mask)
    tl.store(exp_avg_sq + offsets, new_avg_sq, mask=mask)
    of_params += tl.where(mask, target * target, 0.0)
    of_updates += tl.where(mask, direction * direction, 0.0)
    return of_params, of_updates


@triton.jit
def _apply_to_block(
    param, exp_avg, exp_avg_sq, master, scalars, ratio, begin, end, BLOCK: tl.constexpr
):  # fmt: skip
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < end
    avg = tl.load(exp_avg + offsets, mask=mask, other=0.0)
    avg_sq = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)
    target = load_target(param, master, offsets, mask)
    new_target = _new_target(target, avg, avg_sq, ratio, scalars)
    store_target(param, master, new_target, offsets, mask, offsets, offsets, False)


@triton.jit
def _total(partials, first, last, BLOCK: tl.constexpr):
    """Sum up `partials[first:last]`."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(partials + offsets, mask=offsets < last, other=0.0)
    return tl.sum(total)
