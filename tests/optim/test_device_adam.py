"""A GPU's Adam without a GPU: what it asks of its kernel, and how many bytes its tables take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chunkc.ir.states import num_entries
from chunkc.kernels import reference
from chunkc.kernels.elementwise_triton import WorkTable
from chunkc.kernels.formats import NO_SCALE, AdamFormat, AdamSlots, GradScale, Span
from chunkc.kernels.hyperparameters import AdamHyper
from chunkc.kernels.sgd import SgdHyper
from chunkc.optim import AdamW, elementwise, on_device
from chunkc.optim.adam import AdamRule
from chunkc.optim.elementwise import ByTriton, ElementwiseRule, Formats, update_on_cpu
from chunkc.optim.on_device import TABLE_NBYTES
from chunkc.optim.rule import Extent
from chunkc.optim.sgd import SgdRule

CPU = torch.device("cpu")
PLAIN = AdamRule(Formats.of(torch.float32, None, False, 0))
HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, decoupled=True)


def slots_of(rule: ElementwiseRule, dtype: torch.dtype, numel: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random data, and states as before the first step."""
    generator = torch.Generator().manual_seed(0)
    param, grad = (
        torch.randn(numel, generator=generator).to(dtype) if device == "cpu" else torch.empty(numel, device=device)
        for _ in range(2)
    )
    states = {
        kind: torch.zeros(num_entries(kind, numel), dtype=of_kind, device=device)
        for kind, of_kind in rule.states([{"momentum": 0.9, "amsgrad": False}]).dtypes(dtype).items()
    }
    return {"param": param, "grad": grad, **states}


def by_reference(
    fmt: AdamFormat, slots: AdamSlots, work: WorkTable, scalars: torch.Tensor, *, key: Any, **rest: Any
) -> None:
    """The kernel's work table, row by row, in plain PyTorch."""
    spans = [Span(*row) for row in work.rows.tolist()]
    if fmt.quantised:  # which updates whole blocks
        spans = [Span(spans[0].begin, spans[-1].end, 0)]
    reference.chunk_update(fmt, slots, spans, scalars, key=key, **rest)


@pytest.mark.parametrize(
    ("rule", "dtype", "hyper"),
    [
        (PLAIN, torch.float32, HYPER),
        (PLAIN, torch.bfloat16, HYPER),
        (PLAIN, torch.float64, HYPER),
        (AdamRule(Formats.of("int8", None, False, 0)), torch.float32, HYPER),
        (AdamRule(Formats.of(torch.bfloat16, None, True, 7)), torch.bfloat16, HYPER),
        (SgdRule(PLAIN.formats), torch.float64, SgdHyper(1e-2, momentum=0.9, weight_decay=0.1, step=3)),
    ],
    ids=["fp32", "split", "fp64", "int8", "stochastic", "fp64 momentum"],
)
def test_pieces_have_the_bits_of_the_whole(
    rule: ElementwiseRule, dtype: torch.dtype, hyper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64 without a kernel: plain PyTorch updates small pieces, whose temporary tensors have little room."""
    monkeypatch.setattr(elementwise.elementwise_triton, "update", by_reference)
    for bound in ("PIECE_NUM_ELEMENTS", "PIECE_BY_REFERENCE"):
        monkeypatch.setattr(elementwise, bound, 1024)
    numel, extent = 3000, Extent(5, 256)
    in_pieces, whole = slots_of(rule, dtype, numel), slots_of(rule, dtype, numel)
    updater, scale = ByTriton(rule, CPU), GradScale(clip=torch.tensor(0.5))
    updater.update(in_pieces, [(0, numel, hyper)], scale, extent)
    update_on_cpu(rule, whole, [(0, numel, hyper)], scale, extent)
    for kind, wanted in whole.items():
        assert torch.equal(in_pieces[kind], wanted), kind
    assert len(updater.tables) == (0 if dtype == torch.float64 else 2)  # equal pieces share one


def test_a_part_of_a_tensor_is_updated_as_its_clone_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise.elementwise_triton, "update", by_reference)
    monkeypatch.setattr(on_device, "computes_by_triton", lambda device: True)
    monkeypatch.setattr(on_device, "can_be_batched", lambda tensor: False)
    base = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    before, part = base.clone(), torch.nn.Parameter(base[:, :3])
    shadow = torch.nn.Parameter(part.detach().clone())
    part.grad, shadow.grad = torch.ones(8, 3), torch.ones(8, 3)
    AdamW([part]).step()
    AdamW([shadow]).step()
    assert torch.equal(part, shadow)
    assert torch.equal(base[:, 3:], before[:, 3:])


def test_a_large_tensor_that_stays_takes_no_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        elementwise.elementwise_triton, "update", lambda fmt, slots, work, *rest, **more: seen.append(work)
    )
    numel = 1 << 28
    adam = ByTriton(PLAIN, CPU)
    slots = slots_of(PLAIN, torch.float32, numel, "meta")
    adam.update(slots, [(0, numel, HYPER)], NO_SCALE, Extent(0, 0))
    assert sum(int((work.rows[:, 1] - work.rows[:, 0]).sum()) for work in seen) == numel
    assert adam.tables.size <= TABLE_NBYTES
    assert max(work.rows.nbytes for work in seen) <= TABLE_NBYTES // 4


def test_a_table_that_does_not_get_to_the_device_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    adam, fmt = ByTriton(PLAIN, CPU), PLAIN.format(torch.float32, torch.float32, ("exp_avg", "exp_avg_sq"))
    with monkeypatch.context() as patched:
        patched.setattr(on_device, "upload", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            adam.table_of([Span(0, 64, 0)], fmt)
    assert (len(adam.tables), adam.tables.size) == (0, 0)
    assert adam.table_of([Span(0, 64, 0)], fmt).rows.nbytes == adam.tables.size
