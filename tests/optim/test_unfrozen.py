"""Parameters that were frozen when they were laid out, and are trained later; and the other way round."""

from __future__ import annotations

import pytest
import torch
from optim_models import TWO_PER_CHUNK, assert_close, assert_managed, backward, build, train, twin_of

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("mode", "update_on", "two_per_chunk"),
    [
        ("plain", "device", False),
        ("placed", "device", False),
        ("placed", "cpu", True),
        ("adopted", "device", True),
        ("adopted", "cpu", False),
    ],
)
def test_what_is_unfrozen_is_trained(mode: str, update_on: str, two_per_chunk: bool) -> None:
    model, call = build(mode, **(TWO_PER_CHUNK if two_per_chunk else {}))
    shadow = twin_of(model)
    for of in (model, shadow):
        for layer in of.layers[:2]:
            layer.weight.requires_grad_(False)
            layer.bias.requires_grad_(False)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, update_on=update_on)
    expected = torch.optim.AdamW(shadow.parameters(), lr=1e-2)
    for step, thaw in enumerate((None, 0, 1)):
        for of in (model, shadow):
            if thaw is not None:
                of.layers[thaw].requires_grad_(True)
        train(call, optimizer, range(2 * step, 2 * step + 2))
        train(shadow, expected, range(2 * step, 2 * step + 2))
        assert_close(model, shadow, atol=1e-5)
    assert_managed(model, mode)


def test_a_gradient_that_nobody_planned_is_used() -> None:
    """Of a parameter that was frozen when it was placed, and that no compiled code has trained."""
    model, _ = build("plain")
    shadow = twin_of(model)
    model.requires_grad_(False)
    chunkc.place(model)
    model.requires_grad_(True)
    optimizer, expected = chunkc.optim.AdamW(model.parameters()), torch.optim.AdamW(shadow.parameters())
    for of in (model, shadow):
        backward(of, 0)
    optimizer.step()
    expected.step()
    assert_managed(model, "placed")
    assert_close(model, shadow)
