"""Scratch bytes that `chunkc calibrate --operators` measured: what is measured, kept, and read by plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from metering import measure

from chunkc.cli import command as cli
from chunkc.ir.errors import OptionsError
from chunkc.machines.operators import measure_operators, operators_path, save_operators
from chunkc.passes.memory.scratch import cpu, declared
from chunkc.passes.memory.scratch.measured import record_calls
from chunkc.passes.memory.segment_memory import call_scratch
from chunkc.runtime.device import cpu_allocator

pytestmark = pytest.mark.usefixtures("two_threads")
aten = torch.ops.aten

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(16, 24, 3, padding=2, dilation=2), nn.Linear(24, 8)

    def forward(self, x):
        return self.linear(self.convolution(x).mean((2, 3))).square().mean()

def build(batch_size=None, seq_len=None):
    return Net(), (torch.ones(batch_size or 2, 16, 12, 12),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's own, without measured operators."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(declared, "_declared", dict(declared._declared))
    cpu_allocator.install()
    return tmp_path


def convolution(images: int = 2, dtype: torch.dtype = torch.float32) -> tuple:
    image, filters = torch.ones(images, 16, 12, 12, dtype=dtype), torch.ones(24, 16, 3, 3, dtype=dtype)
    return image, filters, torch.ones(24, dtype=dtype), [1, 1], [2, 2], [2, 2], False, [0, 0], 1


def predicted(args: tuple, num_threads: int = 2) -> int:
    outputs = aten.convolution.default(*args)
    return cpu.scratch_nbytes(aten.convolution.default, args, {}, outputs, num_threads)


def test_the_command_measures_what_plans_then_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "net.py").write_text(MODEL)
    bound = predicted(convolution())
    assert cli.main(["calibrate", "--operators", "net.py:build"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"measured: 2 calls of 2 operators\nsaved: {operators_path()}\n"
    truth = measure(aten.convolution.default, convolution(), {})[0]
    assert predicted(convolution()) == truth < bound
    assert predicted(convolution(images=4)) > measure(aten.convolution.default, convolution(images=4), {})[0]
    assert predicted(convolution(), num_threads=4) >= truth, "measured on two threads only"
    assert cli.main(["calibrate", "--operators", "net.py:build", "--batch-size", "4"]) == 0
    assert predicted(convolution(images=4)) == measure(aten.convolution.default, convolution(images=4), {})[0]
    assert predicted(convolution()) == truth, "earlier entries stay"


def test_only_operators_with_bounds_that_values_do_not_decide_are_measured() -> None:
    with record_calls() as calls:
        predicted(convolution())
        for target, args in (
            (aten.add.Tensor, (torch.ones(4), torch.ones(4))),
            (aten.mm.default, (torch.ones(4, 4), torch.ones(4, 4))),
            (aten.nonzero.default, (torch.ones(4),)),
            (aten.mm.default, (torch.ones(4, 4).bfloat16(), torch.ones(4, 4).bfloat16())),
        ):
            cpu.scratch_nbytes(target, args, {}, target(*args), 2)
    assert [call.target for call in calls] == [aten.convolution.default, aten.mm.default]


def test_operators_without_a_rule_are_no_guess_once_measured() -> None:
    with torch.library._scoped_library("machines_test", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: (x + x.clone()).clone(), "CPU")
        target, args = torch.ops.machines_test.doubled.default, (torch.ones(1000),)
        assert call_scratch(target, args, {}, args[0], 2).guessed == "machines_test::doubled"
        with record_calls() as calls:
            cpu.scratch_nbytes(target, args, {}, args[0], 2)
        measured, failed = measure_operators(calls, lambda what: None)
        save_operators(measured, operators_path())
        found = call_scratch(target, args, {}, args[0], 2)
        assert (found.guessed, found.nbytes, failed) == ("", measure(target, args, {})[0], {})
        declared.declare_scratch("machines_test::doubled", lambda *_: 1)
        assert call_scratch(target, args, {}, args[0], 2).nbytes == 1, "a declaration goes before"


def test_an_operator_that_cannot_run_is_named() -> None:
    with record_calls() as calls:
        predicted(convolution())
    (call,) = calls
    broken = type(call)(call.target, (*call.args[:-1], 5), {}, 2)
    measured, failed = measure_operators([broken], lambda what: None)
    assert measured == []
    assert list(failed) == ["aten.convolution.default"]


@pytest.mark.parametrize("content", ["[]", '{"cpu": 1}', '{"cpu": {"aten.mm": -1}}', "{"])
def test_a_file_that_cannot_be_used_is_one_line(content: str) -> None:
    operators_path().parent.mkdir(parents=True)
    operators_path().write_text(content)
    with pytest.raises(OptionsError) as raised:
        predicted(convolution())
    assert str(operators_path()) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_output_is_for_rates_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--operators", "net.py:build", "--output", "here.json"]) == 2
    assert "--output" in capsys.readouterr().err
