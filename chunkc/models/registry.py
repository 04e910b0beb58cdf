"""Built-in models by name. Sizes are their authors'; the large GPTs are PatrickStar's benchmark family.

PatrickStar (Fang et al., 2021) states layers and widths; its benchmark builds post-norm encoders of them. Here they are
GPTs, as its paper calls them, with GPT-2's vocabulary of 50,257 tokens and a tied head.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from chunkc.ir.errors import OptionsError
from chunkc.models.bert import BertConfig
from chunkc.models.common import ModelConfig
from chunkc.models.gpt import GPTConfig
from chunkc.models.llama import LlamaConfig
from chunkc.models.mixtral import MixtralConfig
from chunkc.models.palm import PalmConfig
from chunkc.models.vit import VitConfig


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be built by name.

    Attributes:
        name: as in `MODELS`.
        config: the sizes, with the default dtype.
        batch_size: default number of examples in a batch.
        seq_len: default number of tokens in an example; None for models of images.
    """

    name: str
    config: ModelConfig
    batch_size: int
    seq_len: int | None

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of parameters and activations."""
        return self.config.dtype

    def build(
        self,
        *,
        activation_checkpointing: bool = False,
        blocks_are_regions: bool = False,
        dtype: torch.dtype | None = None,
        seq_len: int | None = None,
    ) -> nn.Module:
        """Make a module with random weights on the ambient device, in training mode.

        Under `torch.device("meta")` or a fake tensor mode nothing is allocated.

        Args:
            activation_checkpointing, blocks_are_regions: see `ModelConfig`.
            dtype: of parameters and activations; None: the spec's.
            seq_len: tokens for which a table of learned positions must have rows; None: the spec's.

        Raises:
            OptionsError: `seq_len` is not positive or the model reads images, or it cannot be built in `dtype`.
        """
        config = self._config(dtype)
        length = self._length(seq_len)
        if length is not None:
            config = config.for_length(length)
        config = replace(
            config, activation_checkpointing=activation_checkpointing, blocks_are_regions=blocks_are_regions
        )
        return config.module()

    def example(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Make (args, kwargs) of one call of `forward` on the ambient device, with the same values every time.

        Args:
            batch_size, seq_len: None: the spec's.
            dtype: of images; None: the spec's. Tokens and labels are int64.

        Raises:
            OptionsError: a size is not positive, `seq_len` is given for a model of images, or the model cannot be built
                in `dtype`.
        """
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size < 1:
            raise OptionsError(f"batch_size is {batch_size}; it must be at least 1")
        return self._config(dtype).example(batch_size, self._length(seq_len)), {}

    def _config(self, dtype: torch.dtype | None) -> ModelConfig:
        if dtype is None:
            return self.config
        if not dtype.is_floating_point:
            raise OptionsError(f"{self.name} cannot be built in {dtype}; use a floating-point dtype such as bfloat16")
        if self.config.only_dtype not in (None, dtype):
            raise OptionsError(
                f"{self.name} cannot be built in {dtype}: PyTorch has its grouped matrix products in bfloat16 only; "
                "leave dtype out"
            )
        return replace(self.config, dtype=dtype)

    def _length(self, seq_len: int | None) -> int | None:
        if seq_len is None:
            return self.seq_len
        if self.seq_len is None:
            raise OptionsError(f"{self.name} reads images of one size and has no sequence length: leave seq_len out")
        if seq_len < 1:
            raise OptionsError(f"seq_len is {seq_len}; it must be at least 1")
        return seq_len


_PATRICKSTAR = {
    # billions of parameters: (layers, width, heads)
    1: (20, 2048, 16),
    2: (40, 2048, 16),
    4: (64, 2304, 16),
    6: (53, 3072, 16),
    8: (72, 3072, 16),
    10: (50, 4096, 16),
    12: (60, 4096, 16),
    15: (78, 4096, 16),
    18: (90, 4096, 16),
    20: (25, 8192, 16),
    30: (37, 8192, 16),
    40: (50, 8192, 16),
    60: (75, 8192, 16),
    68: (66, 9216, 16),
    175: (96, 12288, 96),
}


def _gpt(num_layers: int, width: int, num_heads: int) -> GPTConfig:
    return GPTConfig(num_layers=num_layers, width=width, num_heads=num_heads)


def _llama(num_layers: int, width: int, num_heads: int, inner_width: int, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        num_layers=num_layers, width=width, num_heads=num_heads, num_kv_heads=8, inner_width=inner_width, tied=tied
    )


def _specs() -> Iterator[ModelSpec]:
    gpt2 = {"small": _gpt(12, 768, 12), "medium": _gpt(24, 1024, 16), "large": _gpt(36, 1280, 20)}
    for size, config in (gpt2 | {"xl": _gpt(48, 1600, 25)}).items():
        yield ModelSpec(f"gpt2-{size}", config, 4, 1024)
    for billions, sizes in _PATRICKSTAR.items():
        yield ModelSpec(f"gpt-{billions}b", _gpt(*sizes), 4, 1024)
    yield ModelSpec("t-nlg-17b", _gpt(78, 4256, 28), 4, 1024)

    bert_base = BertConfig(num_layers=12, width=768, num_heads=12)
    bert_large = BertConfig(num_layers=24, width=1024, num_heads=16)
    yield ModelSpec("bert-base", bert_base, 8, 512)
    yield ModelSpec("bert-large", bert_large, 8, 512)

    vit_base = VitConfig(num_layers=12, width=768, num_heads=12, patch=32)
    vit_large = VitConfig(num_layers=24, width=1024, num_heads=16, patch=16)
    yield ModelSpec("vit-base-32", vit_base, 32, None)
    yield ModelSpec("vit-large", vit_large, 32, None)
    yield ModelSpec("vit-large-32", replace(vit_large, patch=32), 32, None)

    yield ModelSpec("palm-8b", PalmConfig(num_layers=32, width=4096, num_heads=16), 1, 2048)
    yield ModelSpec("llama3-1b", _llama(16, 2048, 32, 8192, tied=True), 1, 4096)
    yield ModelSpec("llama3-8b", _llama(32, 4096, 32, 14_336), 1, 4096)
    yield ModelSpec("llama3-70b", _llama(80, 8192, 64, 28_672), 1, 4096)
    mixtral = MixtralConfig(num_layers=32, width=4096, num_heads=32, num_kv_heads=8, inner_width=14_336)
    yield ModelSpec("mixtral-8x7b", mixtral, 1, 4096)


MODELS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in _specs()})
"""Every built-in model, by name."""


def find_model(name: str) -> ModelSpec:
    """Return the built-in model of that name; case and punctuation do not matter (`Llama-3-8B`).

    Raises:
        OptionsError: there is none; one line with the nearest names, or with all.
    """
    wanted = _plain(name)
    plain = {_plain(known): known for known in MODELS}
    if wanted in plain:
        return MODELS[plain[wanted]]
    longer = [plain[key] for key in plain if wanted and key.startswith(wanted)]  # "gpt2" means one of a family
    nearest = longer or [plain[match] for match in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.6)]
    if nearest:
        hint = f"did you mean {' or '.join(repr(match) for match in nearest)}?"
    else:
        hint = f"built in are {', '.join(MODELS)}"
    raise OptionsError(f"no built-in model is called {name!r}; {hint}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
