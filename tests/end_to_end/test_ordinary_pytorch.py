"""Between calls, parameters and gradients under a small budget are ordinary tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from harness import HUGE, adamw, compile_case, differences, weights
from scripts import CASE, assert_close, backward, compile_small, sgd, train_steps
from torch import Tensor, nn


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_state_dict_round_trip(home: str) -> None:
    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(2))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = CASE.build(1)
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    assert not differences(weights(model), weights(plain))
    train_steps(compiled, optimizer, range(2, 3))
    assert differences(weights(model), weights(plain))
    model.load_state_dict(state)
    assert not differences(weights(model), weights(plain))


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_every_parameter_is_saved_with_its_own_bytes_only(home: str) -> None:
    model, compiled = compile_small(home)
    backward(compiled, 0)
    for name, parameter in model.named_parameters():
        for tensor in (parameter, parameter.detach(), parameter.grad):
            file = io.BytesIO()
            torch.save(tensor, file)
            nbytes = tensor.numel() * tensor.element_size()
            assert file.tell() <= nbytes + 4096, f"{name}: {file.tell()} bytes for {nbytes}"
            file.seek(0)
            assert torch.equal(torch.load(file), tensor)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = model.state_dict()
    assert file.tell() <= sum(t.nbytes for t in state.values()) + 1024 * len(state) + 4096
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_a_deep_copy_trains_on_its_own(home: str) -> None:
    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(2))
    before = weights(model)
    clone = copy.deepcopy(model)
    assert not differences(weights(clone), before)
    losses = [float(loss) for loss in train_steps(clone, sgd(clone.parameters()), range(4))]
    repeated = clone(**CASE.batch(3)).detach()
    assert float(repeated) < losses[3]
    assert not differences(weights(model), before)
    reference = copy.deepcopy(clone)
    backward(compiled, 7)
    optimizer.step()
    assert differences(weights(model), before)
    assert not differences(weights(clone), weights(reference))


# ---------------------------------------------------------------- optimizers and gradients


OPTIMIZERS = {
    "chunkc.AdamW": adamw,
    "SGD": sgd,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
}


@pytest.mark.quick(3, second=1)
@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_optimizers_give_the_same_bits_under_every_budget(optimizer: str, home: str) -> None:
    make = OPTIMIZERS[optimizer]

    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        return [*train_steps(call, make(model.parameters()), range(3)), weights(model)]

    small = script(*compile_small(home))
    assert not differences(small, script(*compile_case(CASE, memory_budget=HUGE, whole_graph="never")))
    plain = CASE.build(0)  # torch's own optimizer stands for chunkc's, which wants a compiled model
    make = OPTIMIZERS[optimizer.removeprefix("chunkc.")]
    assert_close(small[:-1], script(plain, plain)[:-1])
