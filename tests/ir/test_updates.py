"""Bytes of an update, against the very buffers that kernels change and that make a difference to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from adam_cases import make_slots
from lamb_reference import NUM_SCALARS, ON_CPU, REFERENCE, Kernel
from torch import Tensor

from chunkc.ir.states import BFLOAT16, FLOAT32, INT8, NONE, SPLIT, StateFormat
from chunkc.ir.updates import UpdateTraffic, update_traffic
from chunkc.kernels import elementwise_cpu, reference
from chunkc.kernels.formats import AdamFormat, AdamSlots, Span, rounding_key
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.kernels.lamb import LambHyper, LambMomentsFormat
from chunkc.kernels.summed_work import summed_work

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NUM_ELEMENTS = 512
LAMB_STATES = StateFormat(master=FLOAT32)

ADAM = [
    (FP32, FLOAT32, SPLIT, "nearest"),
    (FP32, BFLOAT16, SPLIT, "nearest"),
    (FP32, INT8, SPLIT, "nearest"),
    (BF16, FLOAT32, SPLIT, "nearest"),
    (BF16, BFLOAT16, SPLIT, "nearest"),
    (BF16, INT8, SPLIT, "nearest"),
    (BF16, FLOAT32, FLOAT32, "nearest"),
    (BF16, BFLOAT16, FLOAT32, "nearest"),
    (BF16, INT8, FLOAT32, "nearest"),
    (BF16, BFLOAT16, FLOAT32, "stochastic"),
    (BF16, FLOAT32, NONE, "stochastic"),
    (BF16, BFLOAT16, NONE, "stochastic"),
    (BF16, INT8, NONE, "stochastic"),
    (FP16, FLOAT32, SPLIT, "nearest"),
    (FP16, BFLOAT16, SPLIT, "nearest"),
    (FP16, INT8, SPLIT, "nearest"),
]  # fmt: skip
"""Every format there is: dtype of parameters, moments, master, rounding."""

SUMS = "sums of squares"
"""Small enough to stay in a cache, and not counted."""

Buffers = dict[str, Tensor]


def observed(buffers: Buffers, run: Callable[[Buffers], None]) -> UpdateTraffic:
    """The bytes of the buffers whose contents `run` changes, and of those whose contents change what comes out."""

    def after(start: Mapping[str, Tensor]) -> Buffers:
        copies = {name: tensor.clone() for name, tensor in start.items()}
        run(copies)
        return copies

    def nbytes(names: Sequence[str]) -> int:
        return sum(buffers[name].nbytes for name in names if name != SUMS)

    plain = after(buffers)
    written = [name for name, tensor in buffers.items() if not torch.equal(plain[name], tensor)]
    read = []
    for name, tensor in buffers.items():
        other = tensor + 1 if not tensor.dtype.is_floating_point else tensor * 1.5 + 0.25
        found = after({**buffers, name: other})
        if any(not torch.equal(found[k], plain[k]) for k in buffers if k != name or k in written):
            read.append(name)
    return UpdateTraffic(nbytes(read), nbytes(written))


def buffers_of(slots: AdamSlots) -> Buffers:
    found = {name: getattr(slots, name) for name in AdamSlots.__slots__}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize(
    "kernel", [pytest.param(reference, id="reference"), pytest.param(elementwise_cpu, marks=pytest.mark.slow, id="cpu")]
)
@pytest.mark.parametrize(("dtype", "moments", "master", "rounding"), ADAM)
def test_adam_reads_and_writes_what_is_counted(
    dtype: torch.dtype, moments: str, master: str, rounding: str, kernel: object
) -> None:
    states = StateFormat(moments, master)
    kinds = states.dtypes(dtype)
    fmt = AdamFormat(
        dtype, dtype, moments, master="master" in kinds or "master_low" in kinds,  # type: ignore[arg-type]
        split="master_low" in kinds, rounding=rounding,  # type: ignore[arg-type]
    )  # fmt: skip
    scalars = scalar_table([AdamHyper(lr=1e-2, weight_decay=0.1, step=3)])
    key = rounding_key(0, 3, 0) if rounding == "stochastic" else None

    def run(buffers: Buffers) -> None:
        kernel.chunk_update(  # type: ignore[attr-defined]
            fmt, AdamSlots(**buffers), [Span(0, NUM_ELEMENTS, 0)], scalars, key=key
        )

    buffers = buffers_of(make_slots(fmt, NUM_ELEMENTS))
    run(buffers)  # 8-bit moments are no zeros any more
    buffers["grad"] = buffers["grad"].flip(0)  # nor, in their codes, what the same gradient makes of them again
    assert update_traffic(dtype, states, NUM_ELEMENTS) == (observed(buffers, run),)


@pytest.mark.parametrize("kernel", [REFERENCE, ON_CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_both_stages_of_lamb(dtype: torch.dtype, kernel: Kernel) -> None:
    fmt = LambMomentsFormat(dtype, dtype, master=dtype != FP32)
    work = summed_work([(0, NUM_ELEMENTS)], [(0, NUM_ELEMENTS)], NUM_SCALARS)
    scalars = scalar_table([LambHyper(lr=1e-2, weight_decay=0.1, step=3)])
    buffers = {**buffers_of(make_slots(fmt, NUM_ELEMENTS)), SUMS: work.new_sums()}
    found = []
    for stage in (kernel.first, kernel.second):

        def run(buffers: Buffers, stage: Callable[..., None] = stage) -> None:
            slots = AdamSlots(**{name: tensor for name, tensor in buffers.items() if name != SUMS})
            stage(fmt, slots, work, 0, scalars, *([buffers[SUMS]] if stage is kernel.first else []))

        found.append(observed(buffers, run))
        run(buffers)
        kernel.totals(work, buffers[SUMS], scalars)
    assert update_traffic(dtype, LAMB_STATES, NUM_ELEMENTS, 2) == tuple(found)


@pytest.mark.parametrize(
    ("dtype", "states", "num_stages", "expected"),
    [
        (FP32, StateFormat(), 1, [(16, 12)]),
        (BF16, StateFormat(), 1, [(14, 12)]),
        (BF16, StateFormat(master=FLOAT32), 1, [(14, 14)]),
        (FP16, StateFormat(), 1, [(14, 14)]),
        (BF16, StateFormat(BFLOAT16, NONE), 1, [(8, 6)]),
        (FP32, LAMB_STATES, 2, [(16, 8), (12, 4)]),
        (BF16, LAMB_STATES, 2, [(14, 8), (12, 6)]),
    ],
)
def test_bytes_of_one_element(
    dtype: torch.dtype, states: StateFormat, num_stages: int, expected: list[tuple[int, int]]
) -> None:
    assert [(t.read_nbytes, t.written_nbytes) for t in update_traffic(dtype, states, 1, num_stages)] == expected


def test_scales_are_counted_by_the_block() -> None:
    """257 elements: two blocks of each scale, of four bytes, read and written."""
    (found,) = update_traffic(FP32, StateFormat(INT8), 257)
    assert (found.read_nbytes, found.written_nbytes) == (257 * 10 + 16, 257 * 6 + 16)
