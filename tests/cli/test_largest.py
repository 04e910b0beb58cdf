"""`--largest` goes over one capture where it can, and says where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chunkc.cli import command as cli

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_own=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
        self.own = nn.Parameter(torch.zeros(num_own))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + self.own.sum()

def build(batch_size=8):
    return Net(), (torch.ones(batch_size, 256),)

def grows(batch_size=8):
    return Net(batch_size), (torch.ones(batch_size, 256),)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], factory: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list]:
    """The notes, and the sizes that were planned for themselves."""
    planned, minimum_budget = [], cli.minimum_budget

    def noted(model, x, **kwargs):
        planned.append(len(x))
        return minimum_budget(model, x, **kwargs)

    monkeypatch.setattr(cli, "minimum_budget", noted)
    arguments = ["explain", f"nets.py:{factory}", "--memory-budget", "2MiB", "--hardware", "cpu"]
    assert cli.main([*arguments, "--largest", "batch_size", "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["notes"], planned


def test_one_capture(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only size 1, which tracing treats apart, the answer and the next size are captured for themselves."""
    notes, planned = answer(capsys, "build", monkeypatch)
    size = int(notes[0].split()[2].replace(",", ""))
    assert sorted(planned) == [1, size, size + 1]
    assert not any("traced for itself" in note for note in notes)


@pytest.mark.second_tier
def test_every_size_for_itself(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    notes, planned = answer(capsys, "grows", monkeypatch)
    assert len(planned) > 3
    assert "every size was traced for itself: the model's own tensors depend on this size" in notes


@pytest.mark.second_tier
def test_the_answer_is_checked(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture in symbols that says something else than captures of the very sizes is not believed."""
    right, _ = answer(capsys, "build", monkeypatch)
    scaling = cli.Scaling

    class Wrong:
        def __init__(self, *args: object) -> None:
            self.known = scaling(*args)

        def minimum_nbytes(self, size: int) -> int | None:
            found = self.known.minimum_nbytes(size)
            return None if found is None else found + 100_000

    monkeypatch.setattr(cli, "Scaling", Wrong)
    wrong, planned = answer(capsys, "build", monkeypatch)
    assert wrong[0] == right[0]
    assert "the model takes other bytes" in wrong[1]
    assert len(planned) > 3
