"""A new user's mistakes: files that fail, names that are nearly right, code that prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chunkc.cli import command as cli

FILE = """
import torch
from torch import nn

def build():
    print("loading")
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), (torch.ones(4, 64),)

def raises():
    settings = {}
    return settings["data"]

class Prints(nn.Linear):
    def forward(self, x):
        return super().forward(x[0])

def forward_fails():
    return Prints(4, 4), (3,)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `train.py`, and no hardware saved by `calibrate`."""
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "notes.txt").write_text("build\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_what_the_code_prints_is_not_the_answer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "train.py:build", "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"] == "train.py:build"
    assert captured.err == "loading\n"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("train.py:raises", "train.py:raises raised KeyError: 'data' (train.py:11)"),
        ("./train.py:raises", "./train.py:raises raised KeyError: 'data' (train.py:11)"),
        ("broken.py:build", "broken.py raised SyntaxError: invalid syntax (broken.py, line 1)"),
        ("gpt2", "no built-in model is called 'gpt2'; did you mean 'gpt2-small' or 'gpt2-medium' or"),
        ("gpt-18", "no built-in model is called 'gpt-18'; did you mean 'gpt-18b'?"),
        ("transformers:LlamaModel", "there is no file transformers; for a model class of a package write --module"),
        ("/nowhere:build", "there is no file /nowhere\n"),
        ("notes.txt:build", "notes.txt is no Python file: its name must end in .py"),
    ],
)
def test_one_line_says_what_to_do(target: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", target]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("chunkc: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_what_cannot_be_written_is_said_before_any_work(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "folder").mkdir()
    (here / "locked.txt").write_text("")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked.txt" and allowed(path, mode))
    for name, says in (
        ("folder", "it is a folder"),
        ("locked.txt", "permission denied"),
        ("x/y", "there is no folder x"),
    ):
        assert cli.main(["explain", "train.py:raises", "--output", name]) == 2
        assert capsys.readouterr() == ("", f"chunkc: cannot write {name}: {says}\n")
