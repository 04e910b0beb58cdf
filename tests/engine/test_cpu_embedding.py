"""Embeddings that the CPU looks up, as far as that can be seen without a GPU: here rows go from the CPU to the CPU.

`tests/gpu_in_ram/test_cpu_embedding.py` trains with them on a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import segmented
from torch import Tensor, nn

import chunkc
from chunkc.engine.cpu_embedding import CpuEmbedding, chosen, look_up_on_cpu, set_apart

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CPU = torch.device("cpu")


class Scaled(nn.Embedding):
    """As some models of transformers have it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


class Model(nn.Module):
    """ids int64 [batch, sequence] -> logits [batch, sequence, 32]."""

    def __init__(self, embed: Callable[..., nn.Embedding] = nn.Embedding, tied: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = embed(32, 64, **options)
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.embed(ids))))


def ids(seed: int = 0) -> Tensor:
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(seed))


def kept(model: nn.Module) -> nn.Module:
    look_up_on_cpu(chosen(model), CPU)
    return model


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding_idx": {"padding_idx": 3},
    "max_norm": {"max_norm": 1.0},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
    "a subclass": {"embed": Scaled},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_rows_and_gradients_are_those_of_the_embedding(kind: str, compiled: bool) -> None:
    expected, found = Model(**KINDS[kind]), kept(Model(**KINDS[kind]))
    assert isinstance(found.embed, CpuEmbedding)
    assert isinstance(found.embed, type(expected.embed))
    call: Any = found
    if compiled:
        call = segmented(found, "1MiB")
    for model in (expected, call):
        model(ids()).square().mean().backward()
    for p, q in zip(expected.parameters(), found.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.detach(), q.detach())  # max_norm writes to it
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)
    if kind == "padding_idx":
        gradient = found.embed.weight.grad
        assert not gradient[3].any()
    with torch.no_grad():
        assert torch.equal(found.eval()(ids(1)), expected.eval()(ids(1)))


def test_names_order_and_copies_stay() -> None:
    model = Model(embed=Scaled)
    names = list(model.state_dict())
    embedding, weight = model.embed, model.embed.weight
    look_up_on_cpu(chosen(model), CPU)
    assert model.embed is embedding
    assert model.embed.weight is weight
    assert list(model.state_dict()) == names
    assert type(model.embed).__name__ == "Scaled"
    again = copy.deepcopy(model)
    assert torch.equal(again(ids()), model(ids()))
    assert again.embed.weight is not weight


def test_what_is_set_apart_is_not_among_the_parameters() -> None:
    model = Model()
    names, weight = [name for name, _ in model.named_parameters()], model.embed.weight
    with set_apart(chosen(model)):
        assert [name for name, _ in model.named_parameters()] == names[1:]
    assert [name for name, _ in model.named_parameters()] == names
    assert model.embed.weight is weight
    with pytest.raises(KeyError), set_apart(chosen(model)):
        raise KeyError
    assert model.embed.weight is weight


def of_three() -> nn.Module:
    model = nn.ModuleDict({"encoder": nn.Embedding(32, 64), "decoder": nn.Embedding(32, 64), "head": nn.Linear(64, 32)})
    model["decoder"].weight = model["head"].weight = model["encoder"].weight
    return model


def parametrized() -> nn.Module:
    model = Model()
    nn.utils.parametrizations.weight_norm(model.embed)
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Model(tied=True), "embed.weight is head.weight too"),
        (of_three, "encoder.weight is head.weight too"),
        (parametrized, "embed"),
    ],
)
def test_what_others_use_is_left_to_the_plan(
    build: Callable[[], nn.Module], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(build()) == []
    assert caplog.text.count("use_cpu_embedding") == 1
    assert said in caplog.text


def test_embeddings_that_share_a_weight_are_kept_together(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"encoder": nn.Embedding(32, 64), "decoder": nn.Embedding(32, 64)})
    model["decoder"].weight = model["encoder"].weight
    assert chosen(model) == [model["encoder"], model["decoder"]]
    look_up_on_cpu(chosen(model), CPU)
    assert model["decoder"].weight is model["encoder"].weight
    assert not caplog.text


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(chunkc.UnsupportedError, match=r"embed\.weight .*sparse=True.*sparse=False"):
        chosen(Model(sparse=True))
    frozen = Model(sparse=True)
    frozen.embed.weight.requires_grad_(False)
    assert chosen(frozen) == [frozen.embed]


def test_a_weight_that_is_elsewhere_already_is_refused() -> None:
    model = Model()
    with pytest.raises(chunkc.UnsupportedError, match=r"embed\.weight is on meta.*on the CPU"):
        chosen(model.to("meta"))
    placed = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512))
    chunkc.place(placed)
    with pytest.raises(chunkc.UnsupportedError, match=r"0\.weight is placed or compiled already"):
        chosen(placed)
