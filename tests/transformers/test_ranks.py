"""Hugging Face's Trainer and accelerate's loop with two processes, beside one; see `trainer_ranks`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import forked
import pytest
import transformers
from loops import gpt, tokens

LAUNCHER = ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2"]
"""The launcher has no other name for several processes; the script says that they compute on CPUs."""


def launched(folder: Path) -> dict[str, Any]:
    words = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    script = Path(forked.__file__).with_name("trainer_ranks.py")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = forked.run(*LAUNCHER, *words, script, folder, environment=environment, starts=["chunkc.transformers"])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.second_tier
def test_several_processes_train_as_one_does(tmp_path: Path) -> None:
    """Accumulation, clipping, evaluation, the schedule; the same bits after a resume; files."""
    found = launched(tmp_path)
    examples, num_steps = tokens(32), found["settings"]["max_steps"]
    settings = found["settings"] | {"output_dir": str(tmp_path / "plain"), "per_device_train_batch_size": 4}
    plain = transformers.Trainer(
        model=gpt(num_layers=1), args=transformers.TrainingArguments(**settings, save_strategy="no"),
        train_dataset=examples, eval_dataset=examples[:16],
    )  # fmt: skip
    plain.train()
    history = plain.state.log_history
    for key in ("loss", "eval_loss", "grad_norm"):
        expected = [entry[key] for entry in history if key in entry]
        assert found["whole"][key] == pytest.approx(expected, rel=1e-5), key
    assert found["first"]["loss"] == pytest.approx(found["whole"]["loss"][:2], rel=1e-5)
    in_stage_1, in_stage_3 = found["scattered"]
    assert 4 * in_stage_1 == in_stage_3, "once in each of 2 steps, instead of twice in each of 4"
    assert found["is model"], "accelerate has wrapped it in nothing"
    assert found["moved"]
    assert found["parts"]["loss"] == found["whole"]["loss"]
    assert len(found["parts"]["loss"]) == num_steps
    assert found["resumed weights"] == found["weights"]
    assert found["evaluated"] == pytest.approx(found["whole"]["eval_loss"][-1], rel=1e-6)

    for saved in (tmp_path / "saved", tmp_path / "parts" / f"checkpoint-{num_steps}"):
        loaded = transformers.GPT2LMHeadModel.from_pretrained(saved)
        sums = [p.detach().double().sum().item() for p in loaded.parameters()]
        assert sums == pytest.approx(found["weights"], rel=1e-9)
        assert (saved / "training_args.bin").exists()
    names = {path.name for path in (tmp_path / "parts" / f"checkpoint-{num_steps}").iterdir()}
    assert names >= {"model.safetensors", "config.json", "chunkc", "rng_state_0.pth", "rng_state_1.pth"}
    assert "optimizer.pt" not in names

    by_accelerate = found["accelerate"]
    assert by_accelerate["losses"] == pytest.approx(by_accelerate["expected"], rel=1e-5)
