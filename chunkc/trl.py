"""Train with trl's `SFTTrainer`: `from chunkc.trl import SFTConfig, SFTTrainer`; see `chunkc.transformers`."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from chunkc.transformers import ChunkcArguments, ChunkcTrainer

__all__ = ["SFTConfig", "SFTTrainer"]


@dataclass
class SFTConfig(ChunkcArguments, trl.SFTConfig):
    """`trl.SFTConfig` with the arguments of `chunkc.transformers.ChunkcArguments`."""


class SFTTrainer(ChunkcTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer` with the model compiled in place by chunkc."""
