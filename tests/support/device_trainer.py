"""Hugging Face's Trainer on several GPUs made of RAM, one for each process, and plain in one process on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SETTINGS: dict[str, Any] = {
    "max_steps": 3, "gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
    "learning_rate": 1e-3, "max_grad_norm": 0.5, "adam_epsilon": 1e-3, "save_steps": 2,
}  # fmt: skip
"""eps is large: where gradients are nearly zero, rounding would become steps."""


def logged(trainer: Any) -> dict[str, list[float]]:
    history = trainer.state.log_history
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "grad_norm")}


def plain(folder: Path) -> dict[str, list[float]]:
    """Train with the plain Trainer on the batches of both ranks; return its log."""
    import transformers
    from loops import gpt, tokens

    settings = SETTINGS | {"output_dir": str(folder), "per_device_train_batch_size": 4, "use_cpu": True}
    arguments = transformers.TrainingArguments(**settings)
    trainer = transformers.Trainer(model=gpt(), args=arguments, train_dataset=tokens(32))
    trainer.train()
    return logged(trainer)


def main(folder: str) -> None:
    """Train in a roomy budget, in the smallest one, and from its checkpoint on; print the logs and the weights."""
    from loops import gpt, tokens

    import chunkc
    from chunkc.transformers import Trainer, TrainingArguments

    runs, budget = [], 1 << 30
    for resumes in (False, False, True):
        torch._dynamo.reset()
        options = {"codegen": "eager", "whole_graph": "never", "debug": True}
        settings = SETTINGS | {"output_dir": folder, "per_device_train_batch_size": 2}
        arguments = TrainingArguments(**settings, memory_budget=budget, backend_options=options)
        trainer = Trainer(model=gpt(seed=int(os.environ["RANK"])), args=arguments, train_dataset=tokens(32))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
        assert dist.get_backend() == "nccl"
        assert next(trainer.model.parameters()).device.type == "cuda"
        budget = chunkc.report(trainer.model).minimum_budget_nbytes
        sums = [p.full_tensor().detach().double().sum().item() for p in trainer.model.parameters()]
        runs.append({**logged(trainer), "sums": sums})
    print(json.dumps({"runs": runs}), flush=True)
    os._exit(0)
