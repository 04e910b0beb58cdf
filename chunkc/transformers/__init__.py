"""Train with Hugging Face's Trainer: its classes, with chunkc as backend and optimizer."""

from chunkc.transformers.trainer import (
    ChunkcArguments,
    ChunkcTrainer,
    TensorBoardCallback,
    Trainer,
    TrainingArguments,
)

__all__ = ["ChunkcArguments", "ChunkcTrainer", "TensorBoardCallback", "Trainer", "TrainingArguments"]
