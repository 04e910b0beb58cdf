"""Common parts of the built-in models: configurations, positions, checkpointing, the loss and example inputs.

No model chooses a device: under `torch.device("meta")` or a fake tensor mode nothing is allocated. Weights are random;
a built-in model is a shape to plan for, not a checkpoint.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chunkc.torch_private.dynamo import TRACES_REGIONS_ONCE

INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights, as in GPT-2 and BERT."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """Sizes of one model. Subclasses add their own and build the module.

    Attributes:
        num_layers: number of blocks.
        width: features of the residual stream.
        num_heads: query heads of each attention.
        dtype: of parameters and activations; losses are computed in fp32.
        activation_checkpointing: save only each block's input, and recompute the block in the backward.
        blocks_are_regions: let Dynamo trace the first block only, and repeat it for equal ones. With activation
            checkpointing it traces all.
        only_dtype: the only dtype in which the model can be traced; None: any floating-point dtype.
        has_heads_apart: whether a block's heads and inner features can be divided over devices (see
            `chunkc.models.layers`).
    """

    only_dtype: ClassVar[torch.dtype | None] = None
    has_heads_apart: ClassVar[bool] = False

    num_layers: int
    width: int
    num_heads: int
    dtype: torch.dtype = torch.bfloat16
    activation_checkpointing: bool = False
    blocks_are_regions: bool = False

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.num_heads

    @abc.abstractmethod
    def module(self) -> nn.Module:
        """Make a module on the ambient device; `forward` takes what `example` makes, returns a scalar loss."""

    @abc.abstractmethod
    def example(self, batch_size: int, seq_len: int | None) -> tuple[Tensor, ...]:
        """Make positional arguments of `forward` on the ambient device, with the same values every time."""

    def for_length(self, seq_len: int) -> Self:
        """Return the configuration with at least `seq_len` rows in its table of positions, if it has one."""
        return self


@dataclass(frozen=True, kw_only=True)
class TextConfig(ModelConfig):
    """Sizes of a model over token ids: `forward(ids, labels)`, both int64 [batch, length].

    Attributes:
        vocabulary: number of distinct tokens.
        max_length: rows of the table of learned positions; None for models without such a table.
    """

    vocabulary: int
    max_length: int | None = None

    def example(self, batch_size: int, seq_len: int | None) -> tuple[Tensor, ...]:
        assert seq_len is not None, "a text model has a sequence length"
        return token_ids(batch_size, seq_len, self.vocabulary, 7919), token_ids(
            batch_size, seq_len, self.vocabulary, 104_729
        )

    def for_length(self, seq_len: int) -> Self:
        if self.max_length is None or seq_len <= self.max_length:
            return self
        return replace(self, max_length=seq_len)


def token_ids(batch_size: int, seq_len: int, vocabulary: int, stride: int) -> Tensor:
    """Make int64 [batch_size, seq_len] in [0, vocabulary): the multiples of `stride`, modulo `vocabulary`."""
    return (torch.arange(batch_size * seq_len) * stride % vocabulary).view(batch_size, seq_len)


class BlockLoop(Protocol):
    """Runs blocks in sequence."""

    def __call__(self, blocks: Iterable[nn.Module], x: Tensor, *others: Tensor) -> Tensor:
        """Pass `x` through all blocks; each block also gets `others`."""
        ...


def blocks_runner(config: ModelConfig) -> BlockLoop:
    """Return the loop over a model's blocks. It saves no random states for recomputation: no block draws numbers."""
    if config.activation_checkpointing:
        return _run_checkpointed
    return _run_regions if config.blocks_are_regions and TRACES_REGIONS_ONCE else _run


def _run(blocks: Iterable[nn.Module], x: Tensor, *others: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, *others)
    return x


def _run_checkpointed(blocks: Iterable[nn.Module], x: Tensor, *others: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, *others, use_reentrant=False, preserve_rng_state=False)
    return x


@torch.compiler.nested_compile_region
def _region(block: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
    return block(x, *others)  # the block is an argument: a method's region would read the first block's parameters


def _run_regions(blocks: Iterable[nn.Module], x: Tensor, *others: Tensor) -> Tensor:
    for block in blocks:
        x = _region(block, x, *others)
    return x


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, 0-dim float32, of logits [batch, length, vocabulary] and int64 [batch, length].

    The logits are cast to fp32, as in training scripts: for a large vocabulary they take most of the memory.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """View [batch, length, num_heads * d] as [batch, num_heads, length, d]."""
    batch, length, features = x.shape
    return x.view(batch, length, num_heads, features // num_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Invert `split_heads`; the result is contiguous."""
    return x.transpose(1, 2).flatten(2)


def rotary_angles(length: int, head_width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [length, head_width] of rotary positions, in `like`'s dtype and on its device.

    Source: Su et al., RoFormer (2021). Each forward computes them once for all layers, since buffers would have no
    values when the module is built on a meta device.
    """
    steps = torch.arange(0, head_width, 2, device=like.device, dtype=torch.float32)
    frequencies = torch.exp(steps * (-math.log(base) / head_width))
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d / 2) of x [batch, heads, length, d] by the angles of `rotary_angles`, [length, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def initialise(module: nn.Module) -> None:
    """Set small normal weights and zero biases, for `nn.Module.apply`."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def num_parameters(module: nn.Module) -> int:
    """Count the elements of a module's parameters; tied weights count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def linear(num_inputs: int, num_outputs: int, config: ModelConfig, **kwargs: Any) -> nn.Linear:
    """Make a linear layer in the configuration's dtype."""
    return nn.Linear(num_inputs, num_outputs, dtype=config.dtype, **kwargs)
