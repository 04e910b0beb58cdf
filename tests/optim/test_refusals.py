"""`chunkc.optim`: what it refuses, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_models import MLP, WITHOUT_SENSE, train
from torch import nn

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("optimizer", [chunkc.optim.AdamW, chunkc.optim.Adam, chunkc.optim.LAMB])
@pytest.mark.parametrize(
    "settings", [{name: value} for name, values in WITHOUT_SENSE.items() for value in values], ids=str
)
def test_values_that_make_no_sense(optimizer: type, settings: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(chunkc.OptionsError, match=next(iter(settings)).removesuffix("s") + "|eps"):
        optimizer([weight], **settings)
    with pytest.raises(chunkc.OptionsError):
        optimizer([{"params": [weight], **settings}])
    made = optimizer([weight])
    weight.grad = torch.ones(3)
    made.param_groups[0].update(settings)
    with pytest.raises(chunkc.OptionsError):
        made.step()
    assert torch.equal(weight, torch.ones(3))


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
REFUSED: list[tuple[type, torch.dtype, dict[str, Any], str]] = [
    (chunkc.optim.AdamW, FP32, {"moments_dtype": []}, "moments_dtype"),
    (chunkc.optim.AdamW, FP32, {"moments_dtype": torch.ones(2)}, "moments_dtype"),
    (chunkc.optim.AdamW, FP32, {"moments_dtype": FP16}, "moments_dtype is torch.float16; allowed: torch.float32"),
    (chunkc.optim.AdamW, FP32, {"master_weights": 1.5}, "master_weights"),
    (chunkc.optim.AdamW, BF16, {"master_weights": "half"}, "master_weights is 'half'; allowed"),
    (chunkc.optim.AdamW, BF16, {"master_weights": False}, "need master_weights=True or stochastic_rounding=True"),
    (chunkc.optim.AdamW, FP16, {"master_weights": False}, "float16 parameters need master_weights=True"),
    (chunkc.optim.AdamW, BF16, {"master_weights": "split", "moments_dtype": "int8"}, 'use master_weights="float32"'),
    (chunkc.optim.AdamW, BF16, {"master_weights": "split", "stochastic_rounding": True}, 'master_weights="float32"'),
    (chunkc.optim.AdamW, FP32, {"stochastic_rounding": "no"}, "stochastic_rounding"),
    (chunkc.optim.AdamW, FP32, {"stochastic_rounding": None}, "stochastic_rounding"),
    (chunkc.optim.AdamW, FP16, {"stochastic_rounding": True}, "float16"),
    (chunkc.optim.AdamW, FP32, {"rounding_seed": "7"}, "rounding_seed"),
    (chunkc.optim.AdamW, FP32, {"rounding_seed": 0.5}, "rounding_seed"),
    (chunkc.optim.AdamW, FP32, {"foreach": True, "fused": True}, "foreach and fused cannot both be True"),
    (chunkc.optim.AdamW, FP32, {"capturable": 1, "amsgrad": 1}, "amsgrad is 1"),
    (chunkc.optim.AdamW, FP32, {"differentiable": True}, "does not support differentiable=True"),
    (chunkc.optim.Adam, FP32, {"differentiable": True}, "does not support differentiable=True"),
    (chunkc.optim.AdamW, FP32, {"update_on": []}, "update_on"),
    (chunkc.optim.AdamW, FP32, {"update_on": "gpu"}, '"auto", "device", "cpu"'),
    (chunkc.optim.AdamW, FP32, {"overlap": None}, "overlap"),
    (chunkc.optim.AdamW, FP32, {"update_on": "cpu", "overlap": "always"}, '"none", "forward", "backward", "both"'),
    (chunkc.optim.AdamW, FP32, {"overlap": "forward"}, 'use update_on="cpu" or "auto"'),
    (chunkc.optim.AdamW, FP32, {"undoable": True}, r'undoable=True is for updates in the backward: use overlap="backw'),
    (chunkc.optim.SGD, FP32, {"lr": -1.0}, "lr must not be negative"),
    (chunkc.optim.SGD, FP32, {"lr": float("nan")}, "lr must not be negative"),
    (chunkc.optim.SGD, FP32, {"momentum": -0.1}, "momentum must not be negative"),
    (chunkc.optim.SGD, FP32, {"momentum": None}, "momentum is None"),
    (chunkc.optim.SGD, FP32, {"dampening": float("nan")}, "dampening must be a number"),
    (chunkc.optim.SGD, FP32, {"weight_decay": -1}, "weight_decay must not be negative"),
    (chunkc.optim.SGD, FP32, {"nesterov": True}, "nesterov needs a momentum above 0"),
    (chunkc.optim.SGD, FP32, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening 0"),
    (chunkc.optim.SGD, FP32, {"nesterov": 1}, "nesterov is 1"),
    (chunkc.optim.SGD, FP32, {"differentiable": True}, "SGD does not support differentiable=True"),
    (chunkc.optim.SGD, FP32, {"foreach": True, "fused": True}, "foreach and fused cannot both be True"),
    (chunkc.optim.SGD, FP32, {"moments_dtype": "int4"}, "moments_dtype is 'int4'"),
    (chunkc.optim.SGD, FP32, {"master_weights": "split", "stochastic_rounding": True}, "parameters rounded to nearest"),
    (chunkc.optim.SGD, FP16, {"master_weights": False}, "float16 parameters need master_weights=True"),
]


@pytest.mark.parametrize(("kind", "dtype", "settings", "text"), REFUSED, ids=str)
def test_options_that_make_no_sense(kind: type, dtype: torch.dtype, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(chunkc.OptionsError, match=text):
        kind([nn.Parameter(torch.ones(3, dtype=dtype))], **settings)


def test_arguments_that_an_optimizer_does_not_have() -> None:
    for kind, argument in ((chunkc.optim.SGD, "capturable"), (chunkc.optim.AdamW, "momentum")):
        with pytest.raises(TypeError, match=argument):
            kind([nn.Parameter(torch.ones(3))], **{argument: True})


@pytest.mark.parametrize("made", [chunkc.optim.AdamW, torch.optim.AdamW])
def test_what_torch_refuses_too(made: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="ordered"):
        made([{"params": {weight}}])
    with pytest.raises(TypeError, match="must be a dict"):
        made([weight]).add_param_group([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="more than one parameter group"):
        made([weight]).add_param_group({"params": [weight]})


def test_states_of_another_optimizer_are_named() -> None:
    shadow = MLP()
    other = torch.optim.SGD(shadow.parameters(), momentum=0.9)
    train(shadow, other, range(1))
    optimizer = chunkc.optim.AdamW(MLP().parameters())
    found = {**optimizer.state_dict(), "state": other.state_dict()["state"]}
    with pytest.raises(chunkc.OptionsError, match=r"momentum_buffer.*load it into the optimizer that saved it"):
        optimizer.load_state_dict(found)
    weight = nn.Parameter(torch.ones(3))
    sgd = chunkc.optim.SGD([weight], momentum=0.9)
    for state, text in (
        (dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(3)), "SGD cannot use the state exp_avg"),
        ({"momentum_buffer": torch.ones(2)}, "momentum_buffer has the shape"),
    ):
        with pytest.raises(chunkc.OptionsError, match=text):
            sgd.load_state_dict({**sgd.state_dict(), "state": {0: state}})


def test_a_refused_group_is_not_added() -> None:
    optimizer = chunkc.optim.AdamW([nn.Parameter(torch.ones(3))], moments_dtype="int8")
    layers = nn.Sequential(nn.Linear(99, 91, bias=False), nn.Linear(91, 99, bias=False))
    laid_out = chunkc.place(layers, chunk_size="1MiB")
    for group in (
        {"params": [nn.Parameter(torch.ones(3).to(torch.float8_e5m2))]},
        {"params": [nn.Parameter(torch.ones(3))], "differentiable": True},
        {"params": [nn.Parameter(torch.ones(3))], "lr": -1.0},
        {"params": laid_out.parameters()},  # for states without blocks
    ):
        with pytest.raises(chunkc.ChunkcError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    chunkc.optim.AdamW(laid_out.parameters())
