"""Run Hugging Face's Trainer on several processes: gradient accumulation, saving and loading of a sharded model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from chunkc.checkpoint.training import Checkpoint
from chunkc.engine.in_place import is_distributed
from chunkc.ir.errors import UnsupportedError
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.weights.load import load
from chunkc.weights.save import save

STATES = "chunkc"
"""Name of the folder of the `chunkc.Checkpoint` in a checkpoint of the Trainer."""


class TrainerOverRanks:
    """Mix-in to put before `transformers.Trainer`: saves and loads a model that `chunkc.distribute` has sharded.

    All ranks call these methods. Weights are Hugging Face's files, streamed to rank 0, which writes them. Optimizer
    states and the schedule are in a `chunkc.Checkpoint` in the same directory, to which each rank writes its shards; it
    has the parameters, too.
    """

    model: Any
    args: transformers.TrainingArguments

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer as the Trainer does, and set `model.no_sync` to its `accumulating`.

        accelerate enters `model.no_sync`, which DDP has, too, for backwards after which gradients are added to.
        """
        found = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_distributed(self.model) and isinstance(found, ChunkedOptimizer):
            self.model.no_sync = found.accumulating
        return found

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not is_distributed(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        self._refuse_adapters()
        trainer: Any = self
        folder = Path(output_dir or self.args.output_dir or ".")
        save(self.model, folder)
        if self.args.should_save:
            processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_distributed(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        trainer: Any = self
        with self._states(output_dir) as states:
            states.save(trainer.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not is_distributed(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif checkpoint is not None and os.path.isdir(os.path.join(checkpoint, STATES)):
            self._states(checkpoint).load_latest()

    def _states(self, folder: str) -> Checkpoint:
        trainer: Any = self
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate has wrapped both
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        return Checkpoint(
            os.path.join(folder, STATES), model=self.model, optimizer=optimizer, scheduler=scheduler, keep=1
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_distributed(self.model):
            self._refuse_adapters()
            load(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if is_distributed(self.model):
            trainer: Any = self
            load(self.model, trainer.state.best_model_checkpoint)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _refuse_adapters(self) -> None:
        if hasattr(self.model, "peft_config"):
            raise UnsupportedError(
                "adapters of peft are not saved or loaded with several processes so far: merge them "
                "(`model.merge_and_unload()`) and use chunkc.save, or train in one process"
            )
