"""The models that benchmarks train: chunkc's built-in shapes, Hugging Face's from their configurations, tiny ones.

Weights are random and cheap to make: every tensor is filled from one small block of normal numbers, since filling
billions of elements one random number at a time takes longer than training steps do. All systems that build a model
by the same name get the same values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chunkc.models import MODELS, find_model, num_parameters
from chunkc.models.gpt import GPTConfig as BuiltinGPTConfig
from models.gpt import GPT, GPTConfig

INITIAL_DEVIATION = 0.02
_BLOCK_LENGTH = 1_048_573
"""A prime, so that rows of a matrix differ."""

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (class of the configuration, its fields); shapes as published, weights random
    "hf-llama3-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "vocab_size": 128_256,
            "rms_norm_eps": 1e-5,
        },
    ),
    "hf-qwen3-4b": (
        "Qwen3Config",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "hf-tiny": (
        "LlamaConfig",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 256,
        },
    ),
}

TINY: dict[str, tuple[int, int]] = {
    # layers, width; for small runs
    "tiny-1": (2, 64),
    "tiny-2": (4, 64),
    "tiny-3": (4, 128),
    "tiny-4": (8, 128),
    "tiny-5": (8, 256),
}


@dataclass(frozen=True)
class ModelChoice:
    """A text model by name (a key of `chunkc.models.MODELS`, TRANSFORMERS or TINY), with the batches it sees.

    `dtype` names the precision of the arithmetic, a floating-point dtype of torch.
    """

    name: str
    length: int
    dtype: str = "bfloat16"


AnyModel = GPTConfig | ModelChoice


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, in layers, elements and parameters.

    Attributes:
        num_matmul_parameters: parameters of matrix products, a tied head's among them.
    """

    num_layers: int
    width: int
    vocabulary: int
    num_parameters: int
    num_matmul_parameters: int

    def flops_per_step(self, batch_size: int, length: int) -> float:
        """Floating-point operations of one training step, without recomputation.

        6 per token and parameter of a matrix product, and 6 x layers x width x length per token for causal attention.

        Source: Kaplan et al. (2020), appendix; Narayanan et al. (2021), without their factor for recomputation.
        """
        tokens = batch_size * length
        return tokens * (6.0 * self.num_matmul_parameters + 6.0 * self.num_layers * self.width * length)


def is_patrickstar(name: str) -> bool:
    """Whether the model is of PatrickStar's family."""
    return name.startswith("gpt-") and name in MODELS


def construct(model: AnyModel, *, is_checkpointed: bool = False, dtype: torch.dtype | None = None) -> nn.Module:
    """The module on the ambient device, with whatever values its classes give it.

    forward(x, y), both int64 [batch, length], gives the mean loss of y, a 0-dim tensor.

    Args:
        is_checkpointed: each block keeps its input only and is recomputed in the backward.
        dtype: of the parameters; None: the choice's.

    Raises:
        ValueError: checkpointing is not available for this model.
        OptionsError: there is no such model.
    """
    if isinstance(model, GPTConfig):
        if is_checkpointed:
            raise ValueError("bench/models/gpt.py knows no activation checkpointing")
        return GPT(model)
    dtype = dtype or getattr(torch, model.dtype)
    if model.name in TRANSFORMERS:
        return _Causal(model, is_checkpointed, dtype)
    if model.name in TINY:
        num_layers, width = TINY[model.name]
        config = BuiltinGPTConfig(
            num_layers=num_layers, width=width, num_heads=2, vocabulary=256, max_length=model.length
        )
        return replace(config, dtype=dtype, activation_checkpointing=is_checkpointed).module()
    return find_model(model.name).build(activation_checkpointing=is_checkpointed, dtype=dtype, seq_len=model.length)


def build(model: AnyModel, *, is_checkpointed: bool = False, dtype: torch.dtype | None = None) -> nn.Module:
    """The module on the CPU with random values; of `GPTConfig`, with GPT-2's start."""
    if isinstance(model, GPTConfig):
        return construct(model)
    with _NoRandomValues():
        module = construct(model, is_checkpointed=is_checkpointed, dtype=dtype)
    block = random_block()
    for index, parameter in enumerate(module.parameters()):
        fill(parameter, index, block)
    return module


@torch.no_grad()
def fill(parameter: Tensor, index: int, block: Tensor) -> None:
    """Values for the `index`-th parameter: of `random_block` for matrices; vectors are scales (1) or biases (0)."""
    if parameter.dim() < 2:
        # Of the norms' scales and the biases, only the scales are made of ones by their classes.
        is_scale = parameter.numel() > 0 and bool(parameter.flatten()[0] == 1)
        parameter.fill_(1.0 if is_scale else 0.0)
        return
    flat = parameter.view(-1)
    start = index * 7919 % (_BLOCK_LENGTH // 2)  # another one for each parameter
    for begin in range(0, flat.numel(), _BLOCK_LENGTH - start):
        part = flat[begin : begin + _BLOCK_LENGTH - start]
        part.copy_(block[start : start + part.numel()])


def vocabulary(model: AnyModel) -> int:
    """Size of the model's vocabulary."""
    if isinstance(model, GPTConfig):
        return model.vocabulary
    if model.name in TRANSFORMERS:
        return TRANSFORMERS[model.name][1]["vocab_size"]
    if model.name in TINY:
        return 256
    return find_model(model.name).config.vocabulary  # type: ignore[attr-defined]


@functools.cache
def sizes(model: AnyModel) -> Sizes:
    """Counts, from the model on the meta device: nothing is allocated."""
    with torch.device("meta"):
        module = construct(model)
    tables = {id(m.weight): m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding)}
    num_matmul = sum(p.numel() for p in module.parameters() if p.dim() >= 2 and id(p) not in tables)
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == vocabulary(model)]
    if not heads or any(id(head.weight) in tables for head in heads):
        num_matmul += next(iter(tables.values()))  # the table of tokens is the head too
    if isinstance(model, GPTConfig):
        num_layers, width = model.num_layers, model.width
    elif model.name in TRANSFORMERS:
        fields = TRANSFORMERS[model.name][1]
        num_layers, width = fields["num_hidden_layers"], fields["hidden_size"]
    elif model.name in TINY:
        num_layers, width = TINY[model.name]
    else:
        config = find_model(model.name).config
        num_layers, width = config.num_layers, config.width
    return Sizes(num_layers, width, vocabulary(model), num_parameters(module), num_matmul)


def blocks_of(module: nn.Module) -> nn.ModuleList:
    """The model's layers: the module list with most parameters.

    Raises:
        ValueError: there is none.
    """
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    if not lists:
        raise ValueError("the model has no list of layers")
    return max(lists, key=lambda child: sum(parameter.numel() for parameter in child.parameters()))


class _Causal(nn.Module):
    """A causal language model of Hugging Face, with the loss of the built-in models around it."""

    def __init__(self, model: ModelChoice, is_checkpointed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        import transformers

        kind, fields = TRANSFORMERS[model.name]
        config = getattr(transformers, kind)(**fields, max_position_embeddings=model.length, use_cache=False)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        if is_checkpointed:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.model(input_ids=x).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


class _NoRandomValues(torch.overrides.TorchFunctionMode):
    """Random initialisations do nothing inside."""

    _SKIPPED = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self._SKIPPED:
            return args[0] if args else (kwargs or {})["tensor"]
        return function(*args, **(kwargs or {}))


def random_block() -> Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(_BLOCK_LENGTH, generator=torch.Generator().manual_seed(0)) * INITIAL_DEVIATION
