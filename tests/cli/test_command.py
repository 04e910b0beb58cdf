"""The command `chunkc explain` as a user types it: exit codes, one line on standard error, and every format."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chunkc.cli import command as cli
from chunkc.explaining.formats import FORMATS
from chunkc.explaining.scaling import Scaling
from chunkc.machines.datasheets import DATASHEETS
from chunkc.machines.presets import PRESETS, load_hardware

GOLDEN = Path(__file__).parents[1] / "golden" / "cli_tiny.txt"

TINY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def build(batch_size=8):
    return Net(), (torch.ones(batch_size, 256),)

def ignores_the_size(batch_size=8):
    return build(8)

def grows(batch_size=8):
    net = Net()
    net.own = nn.Parameter(torch.zeros(batch_size))
    return net, (torch.ones(batch_size, 256),)

def prints():
    print("loading")
    return build()

def raises():
    raise ValueError("the data is missing")

class Looks(Net):
    def forward(self, x):
        return super().forward(x * x.sum().item())

def looks():
    return Looks(), (torch.ones(8, 256),)

def no_argument():
    return Net(), ()
"""

FITS = ("--memory-budget", "2MiB")
FITS_A_GPU = ("--memory-budget", "23.5MiB")
"""Most of it are the workspaces of a GPU's libraries."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `tiny.py`, and no hardware saved by `calibrate`."""
    (tmp_path / "tiny.py").write_text(TINY)
    for name in ("notes.txt", "locked.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_is_as_it_was(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To accept a change, delete the file and run twice: the first run writes it and fails."""
    _, out, _ = run(capsys, "explain", "tiny.py:build", *FITS_A_GPU, "--hardware", "rtx3090", "--batch-size", "4")
    if not GOLDEN.exists():
        GOLDEN.write_text(out)
        pytest.fail(f"{GOLDEN} was missing and has been written: read it")
    assert out == GOLDEN.read_text()


def test_it_does_not_fit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", "tiny.py:build", "--memory-budget", "64KiB")
    assert (code, err) == (3, "")
    assert "does not fit: the smallest budget that works is" in out
    assert "what to do" in out


def test_the_host_is_too_small(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("explain", "tiny.py:build", *FITS_A_GPU, "--hardware", "rtx3090", "--overlap", "none")
    home_nbytes = json.loads(run(capsys, *command, "--format", "json")[1])["home_nbytes"]
    too_small = (*command, "--host-memory", str(home_nbytes * 3 // 4))
    code, out, _ = run(capsys, *too_small)
    assert code == 3
    assert "home does not fit the host" in out
    assert run(capsys, *too_small, "--home", "disk")[0] == 0  # half of it is optimizer states
    code, out, _ = run(capsys, *command, "--host-memory", str(home_nbytes // 4), "--home", "disk")
    assert code == 3
    assert "with the optimizer states on disk" in out
    everything = ("--home", "disk", "--disk-holds", "everything")
    assert run(capsys, *command, "--host-memory", str(home_nbytes // 4), *everything)[0] == 0


BAD = {
    "no model": ([], "give a MODEL, FILE.py:FACTORY or --module"),
    "unknown model": (["gpt-19b"], "no built-in model is called 'gpt-19b'; did you mean 'gpt-1"),
    "no Python file": (["notes.txt:build"], r"notes.txt is no Python file: its name must end in \.py"),
    "no factory named": (["tiny.py"], r"which function of tiny.py\? Write tiny.py:FACTORY"),
    "factory raises": (
        ["./tiny.py:raises"],
        r"^chunkc: \./tiny.py:raises raised ValueError: the data is missing \(tiny",
    ),
    "needs values": (["tiny.py:looks"], r"needs the values of tensors outside its graphs \(Looks: "),
    "argument missing": (["tiny.py:no_argument"], "raised TypeError in Net: .*missing 1 required positional .*: 'x'"),
    "size not taken": (["tiny.py:build", "--seq-len", "8"], "no parameter 'seq_len'"),
    "budget": (["tiny.py:build", "--memory-budget", "lots"], "'memory_budget' is 'lots'; allowed: .*6GiB"),
    "budget of no bytes": (["tiny.py:build", "--memory-budget", "0"], "'memory_budget' is 0"),
    "budget of nothing": (["tiny.py:build", "--memory-budget", "0%"], "'memory_budget' is '0%'"),
    "budget beyond": (["tiny.py:build", "--memory-budget", "80GB", "--hardware", "rtx3090"], "rtx3090 has 23.11 GiB"),
    "chunk size": (["tiny.py:build", "--chunk-size", "1"], "'chunk_size' is 1 "),
    "home": (["tiny.py:build", "--home", "cloud"], "'home' is 'cloud'"),
    "host memory": (["tiny.py:build", "--host-memory", "much"], "--host-memory is 'much'; allowed: bytes, or a size"),
    "hardware": (["tiny.py:build", "--hardware", "rtx3091"], "no hardware is called 'rtx3091'; did you mean"),
    "hardware file": (["tiny.py:build", "--hardware", "none.json"], "cannot read the hardware file none.json"),
    "batch size": (["tiny.py:build", "--batch-size", "lots"], "'lots' is not a whole number of at least 1"),
    "batch size 0": (["tiny.py:build", "--batch-size", "0"], "'0' is not a whole number of at least 1"),
    "dtype": (["tiny.py:build", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    "format": (["tiny.py:build", "--format", "pdf"], "argument --format: invalid choice: 'pdf'"),
    "flag": (["tiny.py:build", "--budget", "6GB"], "unrecognized arguments: --budget 6GB"),
    "two models": (["gpt2-small", "--module", "transformers:BertModel"], "give a MODEL or --module, not both"),
    "config alone": (["gpt2-small", "--config", "x.json"], "--config goes with --module"),
    "module": (["--module", "transformers:Nothing"], "--module takes a model class of transformers"),
    "no folder": (["tiny.py:raises", "--output", "none/x"], "^chunkc: cannot write none/x: there is no folder none$"),
    "output is a folder": (["tiny.py:raises", "--output", "folder"], "^chunkc: cannot write folder: it is a folder$"),
    "locked": (["tiny.py:raises", "--output", "locked.txt"], "^chunkc: cannot write locked.txt: permission denied$"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written is said before any work."""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked.txt" and allowed(path, mode))
    arguments, match = BAD[name]
    code, out, err = run(capsys, "explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("chunkc: ")
    assert err.count("\n") == 1, err
    assert re.search(match, err.rstrip("\n")), err


def test_what_the_code_prints_is_not_the_answer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", "tiny.py:prints", *FITS, "--format", "json")
    assert (code, json.loads(out)["model"], err) == (0, "tiny.py:prints", "loading\n")


@pytest.mark.parametrize("arguments", [[], ["explode"], ["diff", "a.json"]])
def test_bad_commands_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkc.cli.command.calibrate", lambda **_: pytest.fail("measured"))
    code, out, err = run(capsys, "calibrate", "--output", "none/x.json")
    assert (code, out) == (2, "")
    assert "cannot write none/x.json: there is no folder none" in err
    monkeypatch.setattr("chunkc.cli.command.calibrate", lambda **_: load_hardware("cpu"))
    monkeypatch.setattr("chunkc.cli.command.default_hardware_path", lambda: here / "tiny.py" / "x.json")
    code, out, err = run(capsys, "calibrate")
    assert (code, out) == (2, "")
    assert "tiny.py/x.json: Not a directory" in err or "tiny.py/x.json: File exists" in err


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_goes_to_a_file(format: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if format == "html":
        pytest.importorskip("plotly")
    path = here / "out"
    arguments = ("explain", "tiny.py:build", *FITS, "--hardware", "cpu", "--format", format)
    assert run(capsys, *arguments, "--output", str(path)) == (0, "", "")
    text = path.read_text()
    begin = {"text": "tiny.py:build on cpu", "json": "{", "graph": "# tiny.py:build", "html": "<!", "trace": "{"}
    assert text.lower().startswith(begin[format].lower())
    if format in ("json", "trace"):
        json.loads(text)
    if format != "html":  # which is a page for its own sake
        assert run(capsys, *arguments) == (0, text, "")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are planned for themselves."""
    sizes, minimum_budget = list[int](), cli.minimum_budget

    def noted(model: Any, x: Any, **kwargs: Any) -> int:
        sizes.append(len(x))
        return minimum_budget(model, x, **kwargs)

    monkeypatch.setattr(cli, "minimum_budget", noted)
    return sizes


LARGEST = (*FITS, "--hardware", "cpu", "--largest", "batch_size", "--format", "json")


def test_the_largest_batch_takes_one_capture_and_is_checked(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, planned: list[int]
) -> None:
    """Only size 1, which tracing treats apart, the answer and the next size are captured for themselves. A capture in
    symbols that says something else than captures of the very sizes is not believed."""
    code, out, err = run(capsys, "explain", "tiny.py:build", *LARGEST)
    assert (code, err) == (0, "")
    values = json.loads(out)
    size = int(values["model"].rpartition(" ")[2])
    assert values["notes"][0].startswith(f"batch size {size:,} is the largest that fits: {size + 1:,} needs ")
    assert not any("traced for itself" in note for note in values["notes"])
    assert sorted(planned) == [1, size, size + 1]
    for number, code in ((size, 0), (size + 1, 3)):
        arguments = (*FITS, "--hardware", "cpu", "--batch-size", str(number))
        assert run(capsys, "explain", "tiny.py:build", *arguments)[0] == code
    planned.clear()
    told = Scaling.minimum_nbytes

    def too_much(known: Scaling, size: int) -> int | None:
        found = told(known, size)
        return None if found is None else found + 100_000

    monkeypatch.setattr(Scaling, "minimum_nbytes", too_much)
    wrong = json.loads(run(capsys, "explain", "tiny.py:build", *LARGEST)[1])["notes"]
    assert wrong[0] == values["notes"][0]
    assert "the model takes other bytes" in wrong[1]
    assert len(planned) > 3


@pytest.mark.second_tier
def test_every_size_for_itself(here: Path, capsys: pytest.CaptureFixture[str], planned: list[int]) -> None:
    notes = json.loads(run(capsys, "explain", "tiny.py:grows", *LARGEST)[1])["notes"]
    assert len(planned) > 3
    assert "every size was traced for itself: the model's own tensors depend on this size" in notes


def test_updates_ranks_and_whys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("explain", "tiny.py:build", "--hardware", "2x8xh100", "--memory-budget", "1GiB")
    by_the_cpu = ("--hardware", "rtx3090", "--update-on", "cpu", "--overlap", "forward", "--format", "json")
    _, out, _ = run(capsys, "explain", "tiny.py:build", *FITS_A_GPU, *by_the_cpu)
    assert any(note.startswith("the CPU updates") for note in json.loads(out)["notes"])
    code, out, _ = run(capsys, *ask, "--world-size", "4")
    assert code == 0
    assert "rank 0 of 4 on 1 host, in stages of ZeRO chosen per chunk\n" in out
    assert "4 ranks of a host" in out
    assert "between devices, in one step" in out
    ranks = json.loads(run(capsys, *ask, "--mesh", "2x2", "--format", "json")[1])["ranks"]
    assert (ranks["num_ranks"], ranks["num_hosts"]) == (4, 2)
    code, _, err = run(capsys, *ask, "--mesh", "2x9")
    assert code == 2
    assert "18 ranks on 2 hosts need a device each" in err
    smaller = ("--largest", "batch_size", "--memory-budget", "100MiB")
    assert "is the largest that fits" in run(capsys, *ask, "--mesh", "2x2", *smaller)[1]
    alone = (*ask, "--world-size", "1")
    said = json.loads(run(capsys, *alone, "--why", "layers.0.weight", "--format", "json")[1])["why"]
    assert said["name"] == "layers.0.weight"
    assert said["chosen"]
    code, _, err = run(capsys, *alone, "--why", "layers.0.wait")
    assert code == 2
    assert "near it are layers.0.weight" in err


def test_not_even_one_fits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--memory-budget", "64KiB", "--largest", "batch_size")
    code, out, err = run(capsys, "explain", "tiny.py:build", *arguments)
    assert (code, err) == (3, "")
    assert "tiny.py:build, batch size 1" in out
    assert "not even batch size 1 fits: it needs" in out


def test_a_size_that_makes_no_difference(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", "tiny.py:ignores_the_size", *FITS, "--largest", "batch_size")
    assert (code, out) == (2, "")
    assert "the budget does not limit this size" in err


@pytest.mark.slow
def test_what_was_chosen_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--batch-size", "1", "--seq-len", "16", "--dtype", "float32", "--activation-checkpointing")
    _, out, _ = run(capsys, "explain", "gpt2-small", *chosen, "--hardware", "rtx3090")
    wanted = "gpt2-small, batch size 1, seq len 16, float32, activation checkpointing on rtx3090"
    assert " ".join(out.split()).startswith(wanted)


def test_diff(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, budget in (("small", "1200KiB"), ("large", "2MiB")):
        arguments = ("--memory-budget", budget, "--hardware", "cpu", "--format", "json", "--output", f"{name}.json")
        assert run(capsys, "explain", "tiny.py:build", *arguments)[0] == 0
    code, out, err = run(capsys, "diff", "small.json", "large.json")
    assert (code, err) == (0, "")
    assert re.search(r"budget +1\.17 MiB +2\.00 MiB", out)
    assert run(capsys, "diff", "small.json", "small.json") == (0, "the two explanations are equal\n", "")
    for other, match in (("tiny.py", "tiny.py is not JSON"), ("none.json", "cannot read none.json: No such file")):
        code, out, err = run(capsys, "diff", "small.json", other)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert match in err


def test_saved_hardware_is_the_default(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = here / "saved.json"
    saved.write_text(json.dumps({"based_on": "rtx4090", "name": "mine"}))
    monkeypatch.setattr(cli, "default_hardware_path", lambda: saved)
    assert "on mine   262,144" in run(capsys, "explain", "tiny.py:build", *FITS)[1]
    assert "on cpu   262,144" in run(capsys, "explain", "tiny.py:build", *FITS, "--hardware", "cpu")[1]


@pytest.mark.parametrize("written", ["list", " LIST "])
def test_the_list_of_hardware_has_all_presets(capsys: pytest.CaptureFixture[str], written: str) -> None:
    code, out, err = run(capsys, "explain", "--hardware", written)
    assert (code, err) == (0, "")
    titles, *rows = out.splitlines()
    assert re.split("  +", titles) == [
        *("name", "memory", "fp16/bf16 TFLOPS", "memory GB/s", "link GB/s", "host RAM", "source")
    ]
    cells = {row[0]: row[1:] for row in (re.split("  +", row) for row in rows)}
    assert list(cells) == list(PRESETS)
    assert {len(row) for row in cells.values()} == {6}
    assert cells["rtx3090"][:-1] == ["23.50 GiB", "71.2", "936", "31.5", "64.00 GiB"], "as the datasheet states them"
    assert cells["v100-32g"][1] == "125/-", "no unit for bf16"
    for name, sheet in DATASHEETS.items():
        assert cells[name][-1] == sheet.source


@pytest.mark.slow
def test_torchs_own_warnings_stay_out(here: Path) -> None:
    command = [sys.executable, "-m", "chunkc", "explain", "tiny.py:looks"]
    looks = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert (looks.returncode, looks.stdout, looks.stderr.count("\n")) == (2, "", 1), looks.stderr
