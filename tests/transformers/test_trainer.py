"""`chunkc.transformers`: Hugging Face's Trainer under a small budget, beside the Trainer as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import differences, limited, weights
from loops import assert_clipped_in_slots, assert_close, assert_moved, gpt, tokens
from torch import nn
from trainer_ranks import StopAt
from transformers import HfArgumentParser

import chunkc
from chunkc.transformers import TensorBoardCallback, Trainer, TrainingArguments
from chunkc.transformers.trainer import OPTIMIZERS

BUDGET = 1_600_000
"""Bytes: activations take 1.0 MB of them, and where everything fits the model takes 1.8 MB beside."""


def parsed(*words: str) -> TrainingArguments:
    (found,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "unused", *words])
    return found


# --- arguments ---


def test_a_command_line_chooses_backend_and_budget() -> None:
    words = ["--memory_budget", "6GiB", "--home", "disk:/var/tmp", "--backend_options", '{"chunk_size": "4MiB"}']
    arguments = parsed(*words)
    assert arguments.chunkc_options() == {"memory_budget": "6GiB", "home": "disk:/var/tmp", "chunk_size": "4MiB"}
    assert (arguments.torch_compile_backend, arguments.optim) == ("chunkc", "chunkc_adamw")
    assert parsed("--memory_budget", "1048576").chunkc_options() == {"memory_budget": 2**20}
    assert json.loads(arguments.to_json_string())["memory_budget"] == "6GiB"


def test_another_backend_and_optimizer_stay_what_they_are() -> None:
    arguments = parsed("--torch_compile_backend", "aot_eager", "--optim", "adamw_torch")
    assert (arguments.torch_compile_backend, arguments.optim) == ("aot_eager", "adamw_torch")
    trainer = Trainer(model=nn.Linear(2, 2), args=arguments)
    assert trainer.model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--memory_budget", "lots"), "option 'memory_budget' is 'lots'"),
        (("--home", "tape"), "option 'home' is 'tape'"),
        (("--backend_options", '{"chunk": 3}'), "unknown option 'chunk'"),
        (("--backend_options", "chunk"), "backend_options is no JSON"),
        (("--backend_options", "[1]"), "allowed: an object"),
    ],
)
def test_mistakes_are_told_when_arguments_are_made(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(chunkc.OptionsError, match=text):
        parsed(*words)


def test_optimizers_by_name() -> None:
    for name, cls in OPTIMIZERS.items():
        arguments = parsed("--optim", name, "--learning_rate", "0.5", "--adam_beta1", "0.7")
        found, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        assert found is cls
        made = found([nn.Parameter(torch.zeros(2))], **settings)
        assert made.defaults["lr"] == 0.5
        assert made.defaults.get("betas", (0.7, 0.999)) == (0.7, 0.999)
    with pytest.raises(chunkc.OptionsError, match="optimizer_cls_and_kwargs"):
        Trainer.get_optimizer_cls_and_kwargs(parsed("--optim_args", "a=1"))


def test_what_torch_compile_returned_is_refused() -> None:
    with pytest.raises(chunkc.OptionsError, match="_orig_mod"):
        Trainer(model=torch.compile(nn.Linear(2, 2), backend="chunkc"), args=parsed())


def test_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parsed()
    monkeypatch.setattr(arguments, "_n_gpu", 2)
    with pytest.raises(chunkc.UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        Trainer(model=nn.Linear(2, 2), args=arguments)


# --- training ---


def arguments_for(folder: Path, cls: Any = TrainingArguments, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1,
        "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "learning_rate": 1e-3, "prediction_loss_only": True, "max_grad_norm": 0.5,
    }  # fmt: skip
    if issubclass(cls, TrainingArguments):
        settings |= {
            "memory_budget": BUDGET,
            "backend_options": {"codegen": "eager", "whole_graph": "never", "activations": "keep"},
        }
    return cls(**settings | changes)


def losses(trainer: transformers.Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def made(cls: Any, arguments: Any, model: nn.Module, **settings: Any) -> Any:
    if not arguments.prediction_loss_only:
        settings["compute_metrics"] = lambda found: {"mean": float(abs(found.predictions).mean())}
    return cls(model=model, args=arguments, train_dataset=tokens(32), eval_dataset=tokens(32)[:4], **settings)


def plainly_trained(folder: Path, **changes: Any) -> transformers.Trainer:
    arguments = arguments_for(folder / "plain", transformers.TrainingArguments, **changes)
    trainer = made(transformers.Trainer, arguments, gpt())
    trainer.train()
    return trainer


def trained(
    folder: Path, *, resume: bool = False, callbacks: Any = (), outside_nbytes: int = 0, **changes: Any
) -> Trainer:
    """A run of our Trainer inside the hard limit; its model is placed, so that all of it is in the budget.

    Args:
        outside_nbytes: what is in no budget.
    """
    torch._dynamo.reset()
    trainer = made(Trainer, arguments_for(folder, **changes), chunkc.place(gpt()), callbacks=list(callbacks))
    with limited(changes.get("memory_budget", BUDGET) + outside_nbytes):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.second_tier
def test_trains_evaluates_saves_and_resumes_exactly(tmp_path: Path) -> None:
    plain = plainly_trained(tmp_path)
    whole = trained(tmp_path / "whole")
    assert isinstance(whole.optimizer.optimizer, chunkc.optim.AdamW)
    assert_close(losses(whole), losses(plain))
    assert_close(losses(whole, "eval_loss"), losses(plain, "eval_loss"))
    report = assert_moved(whole.model, BUDGET)
    assert_clipped_in_slots(whole.model)
    peaks = losses(whole, "chunkc/peak_bytes")
    assert len(peaks) == 7, "each step's, and the summary's"
    assert peaks[-1] == max(peaks) == (report.measured_peak_nbytes or report.predicted_peak_nbytes)

    trained(tmp_path / "parts", callbacks=[StopAt(3)])
    parts = trained(tmp_path / "parts", resume=True)
    assert losses(parts) == losses(whole)
    assert not differences(weights(parts.model), weights(whole.model))

    saved = tmp_path / "parts" / "checkpoint-6"
    names = set(torch.load(saved / "optimizer.pt", weights_only=True)["state"][0])
    assert names >= {"step", "exp_avg", "exp_avg_sq"}
    loaded = transformers.GPT2LMHeadModel.from_pretrained(saved)
    assert not differences(weights(loaded), weights(whole.model))
    assert not any(b"_orig_mod" in path.read_bytes() for path in (tmp_path / "parts").rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True, "memory_budget": 1_500_000},
        {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"gradient_checkpointing": True},
        {"optim": "chunkc_sgd", "learning_rate": 0.1},
        {"optim": "adamw_torch"},
        {"backend_options": {"codegen": "inductor", "whole_graph": "never"}},
        {"prediction_loss_only": False},
        {"load_best_model_at_end": True, "save_steps": 2, "metric_for_best_model": "eval_loss"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_arguments(tmp_path: Path, changes: dict[str, Any]) -> None:
    common = {key: value for key, value in changes.items() if key not in ("memory_budget", "backend_options")}
    common |= {"optim": "sgd"} if common.get("optim") == "chunkc_sgd" else {}
    outside_nbytes = 0
    if changes.get("optim") == "adamw_torch":  # its states are in no chunk, and it updates all together
        outside_nbytes = 3 * sum(p.nbytes for p in gpt().parameters())
    if "prediction_loss_only" in changes:
        outside_nbytes = 1 << 20
    plain, ours = plainly_trained(tmp_path, **common), trained(tmp_path, outside_nbytes=outside_nbytes, **changes)
    assert_moved(ours.model, changes.get("memory_budget", BUDGET))
    tolerance = 2e-2 if "bf16" in changes else 1e-3  # bf16 has 8 bits, and other orders of operations round otherwise
    for key in ("loss", "eval_loss", "eval_mean", "grad_norm"):
        assert losses(ours, key) == pytest.approx(losses(plain, key), rel=tolerance)
    assert bool(losses(ours, "eval_mean")) == ("prediction_loss_only" in changes)


@pytest.mark.slow
def test_a_model_made_by_the_trainer_is_compiled(tmp_path: Path) -> None:
    trainer = Trainer(
        model_init=lambda: gpt(), args=arguments_for(tmp_path), train_dataset=tokens(16), eval_dataset=tokens(4)
    )
    with limited(BUDGET):
        trainer.train()
    assert_moved(trainer.model, BUDGET)


@pytest.mark.slow
def test_the_batch_size_that_the_budget_allows_is_found(tmp_path: Path) -> None:
    """Hugging Face tries smaller batches where memory runs out, and a budget that is too small says that it would."""
    trainer = trained(tmp_path, per_device_train_batch_size=8, auto_find_batch_size=True)
    assert 1 < trainer._train_batch_size < 8
    assert len(losses(trainer)) == 6
    assert_moved(trainer.model, BUDGET)


@pytest.mark.slow
def test_a_budget_from_the_environment_and_plain_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that knows nothing of chunkc: its arguments and its optimizer, and our Trainer."""
    torch._dynamo.reset()
    monkeypatch.setenv("CHUNKC_MEMORY_BUDGET", "1600000")
    arguments = arguments_for(tmp_path, transformers.TrainingArguments, max_steps=2)
    trainer = Trainer(
        model=gpt(), args=arguments, train_dataset=tokens(16), eval_dataset=tokens(4),
        optimizer_cls_and_kwargs=(chunkc.optim.AdamW, {"lr": 1e-3}),
    )  # fmt: skip
    with limited(1_600_000):
        trainer.train()
    assert_moved(trainer.model, 1_600_000)


@pytest.mark.slow
def test_memory_traffic_and_stalls_go_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = trained(tmp_path / "run", callbacks=[TensorBoardCallback()])
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    per_step = {name: [entry.value for entry in board.Scalars(f"train/chunkc/{name}")] for name in (
        "peak_bytes", "home_bytes", "to_device_bytes", "to_home_bytes", "compute_s", "wait_s",
    )}  # fmt: skip
    report = chunkc.report(trainer.model)
    assert sum(per_step["to_device_bytes"]) == pytest.approx(report.traffic_nbytes["to_device"], rel=1e-6)
    assert sum(per_step["wait_s"]) == pytest.approx(report.time_s["wait"], rel=1e-3)
    assert per_step["home_bytes"][-1] == report.home_nbytes
    assert [entry.step for entry in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
