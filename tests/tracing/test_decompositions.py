"""What is taken apart computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkc.tracing.decompositions import transformer_encoder_layer

WIDTH, HEADS, BATCH, LENGTH = 16, 2, 3, 5
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDING[1, 3:] = True
EVERY_HEAD = (CAUSAL | PADDING[:, None, None, :]).expand(BATCH, HEADS, LENGTH, LENGTH)


@pytest.mark.parametrize(("mask", "mask_type"), [(None, None), (CAUSAL, 0), (PADDING, 1), (EVERY_HEAD, 2)])
@pytest.mark.parametrize(("use_gelu", "norm_first"), [(True, False), (False, True)])
def test_an_encoder_layer(use_gelu: bool, norm_first: bool, mask: Any, mask_type: int | None) -> None:
    torch.manual_seed(0)
    shapes = {
        "qkv": (3 * WIDTH, WIDTH), "qkv_bias": (3 * WIDTH,), "out": (WIDTH, WIDTH), "out_bias": (WIDTH,),
        "n1": (WIDTH,), "b1": (WIDTH,), "n2": (WIDTH,), "b2": (WIDTH,),
        "up": (4 * WIDTH, WIDTH), "up_bias": (4 * WIDTH,), "down": (WIDTH, 4 * WIDTH), "down_bias": (WIDTH,),
    }  # fmt: skip
    weights = [torch.randn(shape) / 4 for shape in shapes.values()]
    x = torch.randn(BATCH, LENGTH, WIDTH)
    args = (x, WIDTH, HEADS, *weights[:4], use_gelu, norm_first, 1e-5, *weights[4:], mask, mask_type)
    expected = torch.ops.aten._transformer_encoder_layer_fwd(*args)
    torch.testing.assert_close(transformer_encoder_layer(*args), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("region", [torch.bfloat16, None])
def test_an_encoder_is_evaluated_between_training_steps(region: torch.dtype | None, fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True), 2)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    options = {"memory_budget": "64MiB", "codegen": "eager", "whole_graph": "never"}

    def evaluated(**kwargs: Any) -> Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(model.train(), **kwargs)
        with torch.autocast("cpu", torch.bfloat16, enabled=region is not None):
            compiled(x).float().square().mean().backward()
            model.eval()
            with torch.no_grad():
                return compiled(x[:2].clone())

    found = evaluated(backend="chunkc", options=options)
    expected = evaluated(backend="aot_eager")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_noise_drawn_in_place_in_bfloat16_and_in_any_size(codegen: str, fresh_dynamo: None) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.empty_like(x).normal_(1.0, 0.5)

    options = {"memory_budget": "64MiB", "codegen": codegen}
    compiled = torch.compile(noisy, backend="chunkc", options=options, dynamic=True)
    for size in (1000, 2000):
        noise = compiled(torch.zeros(size, dtype=torch.bfloat16)).float()
        assert abs(noise.mean() - 1) < 0.1
        assert abs(noise.std() - 0.5) < 0.1
