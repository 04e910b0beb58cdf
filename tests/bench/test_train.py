"""The training run: its command line, and that Ctrl-C and the same command again change no bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import train
from models.gpt import GPT, GPTConfig
from train import Trained, judge, latest_model, parse_args, sample

TRAIN = train.__file__ or ""


def test_a_folder_of_other_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Their losses would be taken for those of this command."""
    arguments = ["--steps", "100", "--out", str(tmp_path)]
    assert train.other_settings(parse_args(arguments)) == ""
    assert train.other_settings(parse_args([*arguments, "--prompt", "class ", "--picture", "a.png"])) == ""
    assert train.main([*arguments, "--steps", "1500"]) == 1
    assert "steps 100, not 1500" in capsys.readouterr().out.replace("\n", " ")


def test_a_sample_begins_with_the_prompt():
    torch.manual_seed(0)
    config = GPTConfig(num_layers=1, width=16, num_heads=2, length=8)
    one, two = (sample(GPT(config).eval(), config, b"def f", 12, seed=0) for _ in range(2))
    assert one.startswith(b"def f")
    assert len(one) == len(two) == 17


def test_the_latest_model_is_that_of_the_last_step(tmp_path: Path):
    for step in (2, 10, 9):
        (tmp_path / "checkpoints" / f"step-{step:012d}").mkdir(parents=True)
    assert latest_model(tmp_path).parent.name == "step-000000000010"


def test_broken_promises():
    end = {"measured_peak_nbytes": 90, "predicted_peak_nbytes": 100}
    plain = Trained((4.0,) * 10, 1.0, 5, end)
    kept = Trained((4.0,) * 9 + (1.99,), 1.0, 5, end)
    assert list(judge(kept, kept, 100).values()) == [True, True, True]
    assert list(judge(plain, kept, 99).values()) == [False, False, True]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ctrl_c_and_the_same_command_again(tmp_path: Path):
    def command(out: str) -> list[str]:
        arguments = ["--size", "tiny", "--steps", "150", "--fraction", "3/4", "--out", str(tmp_path / out)]
        return [sys.executable, TRAIN, *arguments]

    def losses(out: str, run: str) -> list[float]:
        path = tmp_path / out / run / "steps.jsonl"
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []

    for run in ("plain", "chunkc"):
        process = subprocess.Popen(command("stopped"), start_new_session=True, stdout=subprocess.DEVNULL)
        while len(losses("stopped", run)) < 20:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait() == 130
        assert 20 <= len(losses("stopped", run)) < 150
    for out in ("stopped", "never"):
        subprocess.run(command(out), stdout=subprocess.DEVNULL)
    for run in ("plain", "chunkc"):
        assert len(losses("never", run)) == 150
        assert losses("stopped", run) == losses("never", run)
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert summary["promises"]["measured peak <= predicted peak <= budget"]
    assert train.latest_model(tmp_path / "stopped" / "chunkc").exists()
