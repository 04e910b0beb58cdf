"""Whose an error is: the user's factory's, a module's of the user's model, or chunkc's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkc
from chunkc.cli import command as cli
from chunkc.explaining import offline
from chunkc.explaining import predicted_step as predicted_step
from chunkc.explaining.error_attribution import is_own_fault, module_that_raises, raised_in
from chunkc.ir.errors import UnsupportedError

FILE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fails, self.linear = fails, nn.Linear(8, 8)

    def forward(self, x):
        if self.fails == "eager":
            torch._dynamo.graph_break()
            raise KeyError("scale")
        if self.fails == "shape":
            x = x @ torch.ones(3, 3)
        if self.fails == "inner":
            x = self.linear(x[:, :4])
        return self.linear(x)

def build(fails=""):
    return nn.Sequential(Block(""), Block(""), Block(fails)), (torch.ones(4, 8),)

def eager():
    return build("eager")

def shape():
    return build("shape")

def inner():
    return build("inner")

def factory():
    raise AssertionError("mine")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    return tmp_path


def run(target: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["explain", target, "--memory-budget", "1GiB"])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("factory", "train.py:factory raised AssertionError: mine (train.py:33)\n"),
        ("eager", "train.py:eager raised KeyError in 2 (Block): 'scale' (train.py:13)\n"),
        ("shape", "the model cannot be traced: 2 (Block): "),
        ("inner", "the model cannot be traced: 2.linear (Linear): "),
    ],
)
def test_the_user_s_own_and_what_cannot_be_traced_name_the_module(
    target: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run(f"train.py:{target}", capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"chunkc: {says}")


FAULTS = {
    "while tracing": (offline, "unique_name"),
    "while planning": (predicted_step, "step_plan"),
    "in the calls": (offline._Recorder, "step"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_chunkc_s_own(
    where: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so, and the traceback is there for who asks."""

    def fault(*args: Any, **kwargs: Any) -> None:
        exec(
            compile("raise AssertionError('impossible')", "planning.py", "exec"),
            {"__name__": "chunkc.passes.planning.residency"},
        )

    monkeypatch.setattr(*FAULTS[where], fault)
    says = "chunkc: a fault in chunkc itself, not in what it was given: AssertionError: impossible (planning.py:1)"
    hint = '; TORCH_LOGS="+chunkc" shows the traceback\n'
    assert run("train.py:build", capsys) == (1, says + hint)
    monkeypatch.setenv("TORCH_LOGS", "+chunkc")
    code, err = run("train.py:build", capsys)
    assert code == 1
    assert says + hint in err
    assert "Traceback (most recent call last)" in err
    assert "AssertionError: impossible" in err.rstrip().splitlines()[-1]


def test_in_python_a_fault_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_step, "step_plan", lambda *args, **kwargs: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        chunkc.explain(nn.Linear(8, 8), torch.ones(4, 8), memory_budget="1GiB")


class Fails(nn.Module):
    def __init__(self, caught: bool) -> None:
        super().__init__()
        self.caught, self.inner = caught, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.caught:
            return self.inner(x)
        return self.inner(x[:, :4]) @ torch.ones(3)


def test_the_innermost_module_that_raises() -> None:
    x = torch.ones(2, 8)
    for caught, says in ((True, "one.inner (Linear)"), (False, "one (Fails)")):
        model = nn.ModuleDict({"one": Fails(caught)})
        assert module_that_raises(model, lambda model=model: model["one"](x)) == says
        assert not model["one"]._forward_hooks
    assert module_that_raises(nn.Linear(8, 8), lambda: None) == ""
    with pytest.raises(UnsupportedError, match=r"cannot be traced: Linear: "):
        chunkc.explain(nn.Linear(4, 4), x, memory_budget="1GiB")


def test_errors_that_nobody_raised() -> None:
    assert not is_own_fault(ValueError("new"))
    assert raised_in(ValueError("new")) == ""
