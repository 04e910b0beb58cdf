"""Build the architectures of transformers, timm and torchvision, shrunk by rule, with random weights and batches.

An architecture is named `library/family/class`: `transformers/llama/LlamaForCausalLM`, `timm/resnet/test_resnet`,
`torchvision/densenet/densenet121`. `build` tries rules, from the one that shrinks most to the one that shrinks least,
and ways to call the model, until plain PyTorch runs it forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from judging.table import first_line
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from architectures.batches import MakeBatch
from architectures.libraries import (
    timm_models,
    timm_names,
    torchvision_models,
    torchvision_names,
    transformers_models,
    transformers_names,
    without_compiled_operators,
)

LENGTH, BATCH = 16, 4

MAX_PARAMETERS = 30_000_000
"""Of a shrunk model; a rule that leaves more is not tried."""

DOZEN = (
    "transformers/llama/LlamaForCausalLM",  # a decoder with rotary positions
    "transformers/mixtral/MixtralForCausalLM",  # experts
    "transformers/qwen3_next/Qwen3NextForCausalLM",  # linear attention between ordinary ones
    "transformers/mamba/MambaForCausalLM",  # a state space
    "transformers/rwkv/RwkvForCausalLM",  # a recurrence
    "transformers/t5/T5ForConditionalGeneration",  # an encoder and a decoder that share words
    "transformers/deberta-v2/DebertaV2ForTokenClassification",  # disentangled attention
    "transformers/clip/CLIPModel",  # images and words
    "transformers/mobilevit/MobileViTForImageClassification",  # convolutions and attention
    "transformers/convnextv2/ConvNextV2ForImageClassification",  # depthwise convolutions
    "transformers/wav2vec2/Wav2Vec2ForCTC",  # waves
    "transformers/segformer/SegformerForSemanticSegmentation",  # a pyramid
)
"""A fixed sample, chosen to differ."""


class NotBuilt(Exception):
    """Raised where no rule made a model that plain PyTorch can train; the message says what went wrong last."""


@dataclass(frozen=True)
class Subject:
    """An architecture that can be trained.

    Attributes:
        make: builds the model from torch's random state.
        batch: what it is called with; models that take no length ignore it.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: MakeBatch
    num_parameters: int

    @property
    def supports_checkpointing(self) -> bool:
        with torch.device("meta"):
            model = self.make()
        is_marked = getattr(model, "supports_gradient_checkpointing", False)
        return bool(is_marked) or hasattr(model, "set_grad_checkpointing")


def loss_of(output: Any) -> Tensor:
    """The model's own loss where it computes one, else the mean square of the floating tensors that it returns."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad and leaf.numel()
    ]
    if not tensors:  # under no_grad
        leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]
    assert tensors, "the model returns no floating tensor"
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).mean()


def architectures() -> list[str]:
    """Names of the architectures of the installed libraries, sorted."""
    without_compiled_operators()
    return sorted([*transformers_names(), *timm_names(), *torchvision_names()])


def build(name: str) -> Subject:
    """The architecture at its smallest.

    Raises:
        NotBuilt: plain PyTorch runs none of what the rules make.
    """
    without_compiled_operators()
    library, family, title = name.split("/")
    makers = {"transformers": transformers_models, "timm": timm_models, "torchvision": torchvision_models}
    reasons = []
    try:
        candidates = list(makers[library](family, title))
    except Exception as error:
        raise NotBuilt(first_line(error)[:200]) from error
    for make, batches in candidates:
        try:
            with torch.device("meta"):
                num_parameters = sum(p.numel() for p in make().parameters())
        except Exception as error:
            reasons.append(first_line(error)[:200])
            continue
        if num_parameters > MAX_PARAMETERS:
            reasons.append(f"{num_parameters:,} parameters are left after shrinking")
            continue
        for batch in batches:
            try:
                _try(make, batch)
            except Exception as error:
                reasons.append(first_line(error)[:200])
                continue
            return Subject(name, make, batch, num_parameters)
    raise NotBuilt(next(iter(reasons), "no rule applies"))


def _try(make: Callable[[], nn.Module], batch: MakeBatch) -> None:
    torch.manual_seed(0)
    model = make().train()
    loss = loss_of(model(**batch(BATCH, LENGTH)))
    loss.backward()
    assert bool(torch.isfinite(loss)), "the loss is not finite"
    assert any(p.grad is not None for p in model.parameters()), "no parameter has a gradient"
