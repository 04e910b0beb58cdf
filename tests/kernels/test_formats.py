"""Which formats make sense, and the checks of slots and spans."""

from __future__ import annotations

from dataclasses import replace

import adam_cases
import pytest
import torch

from chunkc.kernels.formats import (
    NO_SCALE,
    AdamFormat,
    GradScale,
    RoundingKey,
    Span,
    check_spans,
    check_update,
    rounding_key,
)
from chunkc.kernels.hyperparameters import scalar_table

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SCALARS = scalar_table(adam_cases.HYPERS)
KEY = RoundingKey(1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"param_dtype": torch.complex64}, "parameters must be float64, float32, bfloat16 or float16"),
        ({"grad_dtype": torch.float64}, "gradients must be float32, bfloat16 or float16"),
        ({"param_dtype": torch.float64, "moments": "bfloat16"}, "float64 parameters are their own master"),
        ({"moments": "float16"}, "moments must be one of"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"master": True}, "their own master"),
        ({"param_dtype": FP16}, "float16 parameters need master=True"),
        ({"param_dtype": FP16, "master": True, "rounding": "stochastic"}, "need rounding='nearest'"),
        ({"param_dtype": BF16}, "need master=True or rounding='stochastic'"),
        ({"rounding": "stochastic"}, "needs something stored in bfloat16"),
        ({"split": True}, "split=True needs master=True and bfloat16"),
        ({"split": True, "param_dtype": BF16, "rounding": "stochastic"}, "split=True needs master=True"),
        ({"split": True, "param_dtype": BF16, "master": True, "rounding": "stochastic"}, "rounding='nearest'"),
        ({"split": True, "param_dtype": BF16, "master": True, "moments": "int8"}, "use split=False"),
    ],
)
def test_formats_that_make_no_sense(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamFormat(**{"param_dtype": FP32, "grad_dtype": FP32, **arguments})


def test_wrong_slots_are_refused() -> None:
    fmt = adam_cases.FORMATS["bf16-master-int8-moments"]
    slots = adam_cases.make_slots(fmt, 1000)
    flat = torch.zeros(1000)
    for change, message in [
        ({"param": flat}, "param must be contiguous torch.bfloat16"),
        ({"param": slots.param.view(10, 100)}, "param must be contiguous"),
        ({"grad": flat.bfloat16()[1:]}, r"grad must be contiguous .* of shape \(1000,\), got"),
        ({"exp_avg": flat}, "exp_avg must be contiguous torch.uint8"),
        ({"master": None}, "master is missing"),
        ({"master": torch.zeros(2000)[::2]}, "strides"),
        ({"master": torch.zeros(1000, device="meta")}, "master is on meta, param on cpu"),
        ({"exp_avg_scale": torch.zeros(3)}, r"exp_avg_scale must be contiguous torch.float32 of shape \(4,\)"),
        ({"exp_avg_sq_scale": None}, "exp_avg_sq_scale is missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_update(fmt, replace(slots, **change), SCALARS, NO_SCALE, None, 0)
    with pytest.raises(ValueError, match=r"scalars must be contiguous torch\.float32"):
        check_update(fmt, slots, SCALARS.double(), NO_SCALE, None, 0)
    with pytest.raises(ValueError, match="clip must be contiguous"):
        check_update(fmt, slots, SCALARS, GradScale(clip=torch.ones(1)), None, 0)
    with pytest.raises(ValueError, match="a rounding key is needed for rounding='stochastic'"):
        check_update(fmt, slots, SCALARS, NO_SCALE, KEY, 0)
    with pytest.raises(ValueError, match="begin at multiples of 256"):
        check_update(fmt, slots, SCALARS, NO_SCALE, None, 128)
    plain = adam_cases.FORMATS["fp32"]
    with pytest.raises(ValueError, match="master is not wanted"):
        check_update(plain, replace(adam_cases.make_slots(plain, 1000), master=flat), SCALARS, NO_SCALE, None, 0)


@pytest.mark.parametrize(
    ("name", "spans", "message"),
    [
        ("fp32", [Span(0, 101, 0)], "inside"),
        ("fp32", [Span(-1, 5, 0)], "inside"),
        ("fp32", [Span(5, 3, 0)], "in order"),
        ("fp32", [Span(0, 10, 0), Span(9, 20, 0)], "apart"),
        ("fp32", [Span(0, 10, 3)], "group that is not among the 3"),
        ("fp32-int8-moments", [Span(0, 3, 0), Span(3, 50, 1)], "begin at multiples of 256"),
    ],
)
def test_wrong_spans_are_refused(name: str, spans: list[Span], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_spans(spans, adam_cases.FORMATS[name], num_elements=100, num_groups=3)


def test_rounding_keys_differ() -> None:
    keys = {rounding_key(seed, step, chunk) for seed in (0, -1, 1 << 40) for step in range(30) for chunk in range(30)}
    assert len(keys) == 3 * 900
    assert len({key.low for key in keys}) > 2690
    assert all(0 <= word < 1 << 31 for key in keys for word in key)
