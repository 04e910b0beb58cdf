"""What a launcher starts in `tests/transformers`: Hugging Face's Trainer, or accelerate's loop, on every rank.

    accelerate launch ... trainer_ranks.py FOLDER

Rank 0 writes what came of each case into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import loops
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import chunkc
from chunkc.session.session import sessions_of
from chunkc.transformers import Trainer, TrainingArguments

NUM_STEPS, NUM_EXAMPLES = 4, 32
SETTINGS: dict[str, Any] = {
    "max_steps": NUM_STEPS, "gradient_accumulation_steps": 2, "logging_steps": 1, "eval_strategy": "steps",
    "eval_steps": 2, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "prediction_loss_only": True, "adam_epsilon": 1e-3,
}  # fmt: skip
"""Of all runs, also in one process; eps is large: where gradients are nearly zero, rounding would become steps."""
OURS: dict[str, Any] = {"memory_budget": 1_700_000, "backend_options": {"codegen": "eager", "whole_graph": "never"}}


class StopAt(TrainerCallback):
    """Ends the training after some steps, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def logged(trainer: Any) -> dict[str, list[float]]:
    history = trainer.state.log_history
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss", "grad_norm")}


def bits(model: torch.nn.Module) -> list[Any]:
    return [p.full_tensor().detach().double().sum().item() for p in model.parameters()]


def scattered(model: torch.nn.Module) -> int:
    """Bytes of gradients that this rank has sent."""
    return next(session.transport.sent_nbytes["scatters"] for session in sessions_of(model.parameters()))


def trained(folder: Path, *, resume: Path | None = None, callbacks: Any = (), **changes: Any) -> Trainer:
    torch._dynamo.reset()
    model, examples = loops.gpt(dist.get_rank(), num_layers=1), loops.tokens(NUM_EXAMPLES)  # rank 0's values are used
    settings = {"output_dir": str(folder), "per_device_train_batch_size": 2, "save_steps": 2, "eval_strategy": "no"}
    trainer = Trainer(
        model=model, args=TrainingArguments(**SETTINGS | settings | OURS | changes), train_dataset=examples,
        eval_dataset=examples[:16], callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def with_accelerate() -> dict[str, list[float]]:
    """accelerate's own loop, with a model that the user distributes; and a plain one with all ranks' batches."""
    from accelerate import Accelerator

    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (accelerator.num_processes,))
    model = chunkc.distribute(loops.gpt(num_layers=1), mesh)
    model.compile(backend="chunkc", options={"memory_budget": "3MiB", "codegen": "eager"})
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    model.no_sync = optimizer.accumulating
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    loader = torch.utils.data.DataLoader(loops.tokens(16), batch_size=2)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    assert accelerator.unwrap_model(model) is model

    plain, expected = loops.gpt(num_layers=1), []
    by_torch = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3)
    for step, batch in enumerate(loops.batches(loops.tokens(16), 4)):
        loss = plain(**batch).loss
        (loss / 2).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            by_torch.step()
            by_torch.zero_grad()
        expected.append(loss.item())
    return {"losses": losses, "expected": expected}


def main(folder: Path) -> None:
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True)  # meets the other ranks
    assert dist.get_world_size() == arguments.world_size
    whole = trained(folder / "whole", eval_strategy="steps")
    found: dict[str, Any] = {"settings": SETTINGS, "whole": logged(whole), "weights": bits(whole.model)}
    found["is model"] = whole.model_wrapped is whole.model
    first = trained(folder / "first", callbacks=[StopAt(2)], zero_stage=1, memory_budget=2_300_000)
    found |= {"first": logged(first), "scattered": [scattered(first.model), scattered(whole.model)]}
    parts = trained(folder / "parts", resume=folder / "whole" / "checkpoint-2")
    found |= {"parts": logged(parts), "resumed weights": bits(parts.model)}
    report = chunkc.report(parts.model)
    found["moved"] = report.num_resident_chunks < report.num_chunks
    found["evaluated"] = parts.evaluate()["eval_loss"]
    parts.save_model(str(folder / "saved"))
    found["accelerate"] = with_accelerate()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
