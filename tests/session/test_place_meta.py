"""`chunkc.place` of a model without memory: made at home, module by module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from built_modules import WIDTH, Tied, sequential
from harness import array, differences, segmented, weights
from optim_models import is_managed
from torch import nn

import chunkc
from chunkc.session.session import owner


def on_meta(build: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_reset_parameters_gives_the_values_of_ordinary_construction(home: str) -> None:
    torch.manual_seed(0)
    expected = sequential()
    torch.manual_seed(0)
    model = chunkc.place(on_meta(sequential), home=home, init="reset_parameters", chunk_size="16KiB")
    assert not differences(weights(model), weights(expected))
    assert all(owner(p) is not None for p in model.parameters())
    assert is_managed(model[0].weight)


def test_a_function_initialises_module_by_module_and_ties_stay() -> None:
    seen = []

    def initialise(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(len(seen))

    model = chunkc.place(on_meta(Tied), init=initialise, chunk_size="16KiB")
    assert seen == ["Embedding", "Linear", "Tied"]  # the head has nothing of its own
    assert model.head.weight is model.embedding.weight
    assert [float(t.detach().flatten()[0]) for t in (model.embedding.weight, model.body.weight, model.mask)] == [
        1,
        2,
        3,
    ]
    assert not model.scale.requires_grad
    call = segmented(model, "512KiB")
    call(torch.zeros(1, 4).long()).backward()
    assert model.body.weight.grad is not None


class Assigns(nn.Linear):
    """Its initialisation makes a parameter, as some libraries' do."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.randn(self.weight.shape))
        self.bias = nn.Parameter(torch.zeros(self.bias.shape))


class OfAssigned(nn.Module):
    """Two of them; with `tied`, of one weight."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Assigns(WIDTH, WIDTH), Assigns(WIDTH, WIDTH)
        if self.tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def test_an_initialisation_may_assign_parameters() -> None:
    torch.manual_seed(0)
    expected = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    torch.manual_seed(0)
    model = chunkc.place(on_meta(OfAssigned), init="reset_parameters", chunk_size="16KiB")
    for layer, values in zip((model.first, model.second), expected):
        assert is_managed(layer.weight)
        assert torch.equal(layer.weight, values)
    call = segmented(model, "512KiB")
    optimizer = chunkc.optim.SGD(model.parameters(), lr=1.0)
    call(torch.ones(1, WIDTH)).backward()
    optimizer.step()
    assert not any(torch.equal(layer.weight, values) for layer, values in zip((model.first, model.second), expected))


def test_assigned_parameters_that_cannot_stand_for_the_former_are_refused() -> None:
    class OfTied(OfAssigned):
        tied = True

    def half(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros(parameter.shape).half()))

    with pytest.raises(chunkc.UnsupportedError, match=r"first\.weight, which is a tied weight"):
        chunkc.place(on_meta(OfTied), init="reset_parameters")
    with pytest.raises(chunkc.UnsupportedError, match=r"made first\.weight a Parameter of torch\.float16"):
        chunkc.place(on_meta(OfAssigned), init=half)


def test_parameters_with_values_keep_them() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, device="meta"))
    first = model[0].weight
    before = array(first)
    chunkc.place(model, init="reset_parameters")
    assert model[0].weight is first
    assert not differences(array(first), before)
    assert model[1].weight.abs().sum() > 0


def test_what_cannot_be_made_is_refused_before_anything_is() -> None:
    with pytest.raises(chunkc.UnsupportedError, match="scale is on the meta device"):
        chunkc.place(on_meta(Tied))
    model = on_meta(Tied)
    with pytest.raises(chunkc.UnsupportedError, match=r"scale is on the meta device, and Tied has no reset_parameters"):
        chunkc.place(model, init="reset_parameters")
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(chunkc.OptionsError, match="init is"):
        chunkc.place(on_meta(Tied), init="xavier")


def test_an_error_in_the_function_ends_the_session() -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.LSTM):
            raise ValueError("no such luck")

    model = on_meta(sequential)
    with pytest.raises(ValueError, match="no such luck"):
        chunkc.place(model, init=initialise)
    assert all(owner(p) is None for p in model.parameters())


@pytest.mark.second_tier
def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    chunkc.place(model, home=f"disk:{tmp_path}", init=model._init_weights)
    ordinary = transformers.LlamaForCausalLM(config)
    assert not [name for name, tensor in model.named_buffers() if tensor.is_meta]
    for (name, ours), theirs in zip(model.named_parameters(), ordinary.parameters(), strict=True):
        assert float(ours.detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.2, abs=1e-6), name
    ordinary.load_state_dict(model.state_dict())
    ids = torch.randint(128, (1, 8))
    torch.testing.assert_close(model(input_ids=ids).logits, ordinary(input_ids=ids).logits)
