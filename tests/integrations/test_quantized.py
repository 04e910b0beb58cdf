"""A frozen base in few bits with adapters beside it (QLoRA): the base moves in these, and is never written back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differences, limited, session_of, weights
from loops import assert_close, losses_of
from torch import Tensor, nn

import chunkc
from chunkc.ir.layout import PARAM

WIDTH, DEPTH, BLOCK = 128, 8, 64
OPTIONS: dict[str, Any] = {"whole_graph": "never", "debug": True, "activations": "keep"}


class Int8(nn.Module):
    """int8 weights with a scale per row, and an adapter of rank 4."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, WIDTH) / 50), nn.Parameter(torch.zeros(WIDTH, 4))

    def weight(self) -> Tensor:
        return self.codes * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight().t() + (x @ self.down.t()) @ self.up.t()


class FourBits(Int8):
    """Two codes in a byte, which a table makes numbers of, with a scale per block of 64 (NF4)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        blocks = weight.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True)
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        codes = ((blocks / scale + 1) * 7.5).round().to(torch.uint8)
        self.codes = nn.Parameter(codes[:, 0::2] << 4 | codes[:, 1::2], requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def weight(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1).reshape(-1, BLOCK)
        return (self.table[codes.int()] * self.scale).view(WIDTH, WIDTH)


class Net(nn.Module):
    def __init__(self, kind: type[Int8]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def batch(seed: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(kind: type[Int8], budget: int | None = None, **options: Any) -> tuple[nn.Module, nn.Module, list[float]]:
    """Without a budget: by plain PyTorch."""
    torch._dynamo.reset()
    model = call = Net(kind)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if budget is None:
        return model, model, losses_of(model, torch.optim.AdamW(trainable, lr=1e-2), map(batch, range(3)))
    chunkc.place(model)
    call = torch.compile(model, backend="chunkc", options={**OPTIONS, **options, "memory_budget": budget})
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)  # which may have what it could not train
    with limited(budget):
        return model, call, losses_of(call, optimizer, map(batch, range(3)))


@pytest.mark.parametrize(
    ("kind", "codegen"),
    [
        (Int8, "eager"),
        pytest.param(FourBits, "eager", marks=pytest.mark.second_tier),
        pytest.param(Int8, "inductor", marks=pytest.mark.slow),
        pytest.param(FourBits, "inductor", marks=pytest.mark.slow),
    ],
)
def test_the_base_moves_in_its_few_bits(kind: type[Int8], codegen: str) -> None:
    roomy, _, expected = trained(kind, 2**24, codegen=codegen)
    with pytest.raises(chunkc.BudgetError) as refused:
        trained(kind, 1, codegen=codegen)
    minimum = refused.value.minimum_nbytes
    in_floats = DEPTH * WIDTH * WIDTH * 4
    assert minimum < 0.8 * in_floats, "weights in floats are made when they are used, and not all at once"
    model, call, losses = trained(kind, minimum, codegen=codegen)
    assert losses == expected
    assert not differences(weights(model), weights(roomy))
    assert_close(losses, trained(kind)[2])
    report, layout = chunkc.report(call), session_of(model).store.layout
    assert report.num_resident_chunks < report.num_chunks
    base = [spec for spec in layout.specs().values() if not spec.trainable]
    assert sum(spec.nbytes for spec in base if not spec.dtype.is_floating_point) == sum(
        p.nbytes for p in model.parameters() if not p.is_floating_point()
    )
    base_nbytes = sum(group.nbytes(PARAM) for group in layout.groups if not group.trainable)
    trained_nbytes = sum(group.nbytes(PARAM) for group in layout.groups if group.trainable)
    assert report.home_nbytes == base_nbytes + 4 * trained_nbytes, "no room for gradients or states of the base"
    assert report.traffic_nbytes["to_home"] <= 3 * 5 * trained_nbytes, "nothing of the base goes home"


@pytest.mark.second_tier
def test_it_is_built_saved_and_resumed_as_any_other(tmp_path: Path) -> None:
    with chunkc.init(home=f"disk:{tmp_path}"):
        model = Net(FourBits)
    trainable = [p for p in model.parameters() if p.requires_grad]
    call = torch.compile(model, backend="chunkc", options={**OPTIONS, "memory_budget": 2**20, "codegen": "eager"})
    optimizer = chunkc.optim.AdamW(trainable, lr=1e-2)
    losses = losses_of(call, optimizer, map(batch, range(2)))
    with chunkc.Checkpoint(tmp_path / "checkpoints", model=model, optimizer=optimizer) as checkpoint:
        checkpoint.save(2)
    chunkc.save(model, tmp_path / "saved")
    torch._dynamo.reset()
    again = Net(FourBits)
    optimizer = chunkc.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    assert chunkc.Checkpoint(tmp_path / "checkpoints", model=again, optimizer=optimizer).load_latest() == 2
    call = torch.compile(again, backend="chunkc", options={**OPTIONS, "memory_budget": 2**20, "codegen": "eager"})
    losses += losses_of(call, optimizer, [batch(2)])
    assert losses == trained(FourBits, 2**24, codegen="eager")[2]
    loaded = Net(FourBits)
    missing, unexpected = chunkc.load(loaded, tmp_path / "saved")
    assert not missing
    assert not unexpected
    assert not differences(weights(loaded), weights(model))


def test_explain_takes_the_rate_of_the_numbers_that_are_multiplied() -> None:
    with torch.device("meta"):
        x = torch.empty(16, WIDTH)
    in_floats = chunkc.explain(Net(Int8), x, hardware="rtx3090", memory_budget="1GiB")
    assert in_floats.fits
    assert in_floats.step_time_s.compute > 0
