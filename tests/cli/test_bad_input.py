"""Bad input of all kinds: the exit code is 2, one line says why, and no control character reaches the terminal."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkc.cli import command as cli
from chunkc.explaining.formats import read_explanation, render_text
from chunkc.explaining.formats.text import print_text
from chunkc.ir.errors import OptionsError
from chunkc.machines.presets import load_hardware

NAME = "\x1b]0;gone\x07\x1b[31mred\x9b1m\u202e"
ESCAPE = f"{NAME}\ud800"

FILE = r"""
import torch
from torch import nn

print("importing")

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        setattr(self, "\x1b[31mred", nn.Linear(64, 64))

    def forward(self, x):
        return getattr(self, "\x1b[31mred")(x).sum()

class Silent(Exception):
    def __str__(self):
        raise ValueError

class NotAnException(BaseException):
    pass

def build():
    return nn.Linear(64, 1), (torch.ones(4, 64),)

def named():
    return Named(), (torch.ones(4, 64),)

def huge():
    return nn.Linear(10**9, 10**9), (torch.ones(1, 10**9),)

def keywords():
    return nn.Linear(4, 4), (torch.ones(4, 4),), {1: 2}

def says():
    raise ValueError("\x1b[31mred\nand more")

def silent():
    raise Silent

def other():
    raise NotAnException("stop")

def interrupted():
    raise KeyboardInterrupt

no_signature = max
"""

FILES: dict[str, str | bytes] = {
    "train.py": FILE,
    "own.json": '{"based_on": "own.json"}',
    "one.yaml": "based_on: two.yaml",
    "two.yaml": "based_on: one.yaml",
    "deep.json": "[" * 100_000,
    "deeper.json": '{"a":' * 100_000,
    "deep.yaml": "[" * 5000 + "]" * 5000,
    "deep_block.yaml": "\n".join(" " * i + "a:" for i in range(2000)),
    "digits.json": '{"based_on": "cpu", "num_devices": ' + "9" * 5000 + "}",
    "float.json": '{"based_on": "cpu", "flops_per_s": ' + "9" * 400 + "}",
    "digits.yaml": "based_on: cpu\nnum_devices: " + "9" * 5000,
    "hex.yaml": "based_on: cpu\nflops_per_s: 0x" + "f" * 9000,
    "date.yaml": "name: 2001-13-01",
    "int.yaml": "name: !!int x",
    "infinity.json": '{"based_on": "cpu", "flops_per_s": Infinity}',
    "binary.json": bytes(range(256)),
    "binary.yaml": bytes(range(256)),
    "empty.json": "",
    "empty.yaml": "",
    "empty.py": "",
    "null.json": '{"based_on": "a\\u0000.json"}',
    "escape.json": json.dumps({ESCAPE: 1}),
    "escape_value.json": json.dumps({"based_on": ESCAPE}),
}
CASES: dict[str, list[str]] = {
    **{name: ["explain", "train.py:build", "--hardware", name] for name in FILES if name.endswith((".json", ".yaml"))},
    **{f"diff {name}": ["diff", name, name] for name in FILES if name.endswith(".json")},
    **{
        f"config {n}": ["explain", "--module", "transformers:BertModel", "--config", n]
        for n in ("deep.json", "digits.json")
    },
    "hardware folder": ["explain", "train.py:build", "--hardware", "folder.json"],
    "hardware's name": ["explain", "train.py:build", "--hardware", f"{ESCAPE}.json"],
    "long name": ["explain", "train.py:build", "--hardware", "9" * 400 + ".json"],
    "null": ["explain", "train.py:build", "--hardware", "a\0.json"],
    "no user": ["explain", "train.py:build", "--hardware", "~no\nbody/x.json"],
    "diff escape": ["diff", ESCAPE, "x"],
    "diff folder": ["diff", "folder.json", "folder.json"],
    "diff device": ["diff", "/dev/zero", "/dev/zero"],
    "relative": ["explain", "--module", "..x:Y"],
    "dot": ["explain", "--module", ".:Y"],
    "package escape": ["explain", "--module", f"{ESCAPE}:Y"],
    "class escape": ["explain", "--module", f"json:{ESCAPE}"],
    "package that fails": ["explain", "--module", "fails:Y"],
    "config missing": ["explain", "--module", "transformers:BertModel", "--config", ESCAPE],
    "target escape": ["explain", ESCAPE],
    "target lines": ["explain", "a\nb.py:build"],
    "long target": ["explain", "9" * 400 + ".py:build"],
    "null target": ["explain", "\0.py:build"],
    "folder": ["explain", "folder.py:build"],
    "empty": ["explain", "empty.py:build"],
    "no name": ["explain", ":"],
    "factory escape": ["explain", f"train.py:{ESCAPE}"],
    "keywords": ["explain", "train.py:keywords"],
    "says": ["explain", "train.py:says"],
    "silent": ["explain", "train.py:silent"],
    "other": ["explain", "train.py:other"],
    "no signature": ["explain", "train.py:no_signature"],
    "batch": ["explain", "train.py:build", "--batch-size", "9" * 5000],
    "largest": ["explain", "train.py:build", "--largest", ESCAPE],
    "budget": ["explain", "train.py:build", "--memory-budget", "9" * 5000],
    "budget escape": ["explain", "train.py:build", "--memory-budget", ESCAPE],
    "host memory": ["explain", "train.py:build", "--host-memory", "9" * 5000],
    "home": ["explain", "train.py:build", "--home", ESCAPE],
    "argument": ["explain", "train.py:build", ESCAPE],
    "command": [ESCAPE],
    "output": ["explain", "train.py:build", "--output", f"{ESCAPE}/x"],
    "long output": ["explain", "train.py:build", "--output", "9" * 400],
    "null output": ["explain", "train.py:build", "--output", "a\0b"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (path / "folder.json").mkdir()
    (path / "folder.py").mkdir()
    (path / "fails.py").write_text("raise TypeError('\\x1b[31mred')")
    return path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def run(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as error:  # argparse's
        return int(error.code or 0)


def assert_safe(text: str) -> None:
    assert not [c for c in text if not (c.isprintable() or c in "\n\t")]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_said_in_one_line(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = CASES[case]
    assert run(*arguments) == cli.BAD_INPUT
    captured = capsys.readouterr()
    said = captured.err.removeprefix("importing\n")
    assert captured.out == ""
    assert said.startswith("chunkc: ")
    assert said.count("\n") == 1
    assert len(said) < 2200
    assert_safe(said)


def test_an_interrupt_is_no_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "train.py:interrupted") == cli.INTERRUPTED
    assert capsys.readouterr().err == "importing\nchunkc: interrupted\n"


def test_a_matrix_of_10_to_the_18_elements_is_explained(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "train.py:huge") == cli.DOES_NOT_FIT
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("format", ["text", "graph", "html", "json", "trace"])
def test_names_are_shown_as_escapes(format: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.json").write_text(json.dumps({"based_on": "cpu", "name": NAME}))
    assert run("explain", "train.py:named", "--hardware", "mine.json", "--format", format) == 0
    answer = capsys.readouterr().out
    assert_safe(answer)
    assert "x1b" in answer or "u001b" in answer
    if format == "json":
        assert json.loads(answer)["hardware"] == NAME


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_are_shown_as_escapes_on_a_terminal_and_in_a_diff(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    assert run("explain", "train.py:named", "--format", "json", "--output", "named.json") == 0
    values = json.loads((here / "named.json").read_text())
    (here / "other.json").write_text(json.dumps({**values, "model": ESCAPE, "plan_text": f"plan\n{ESCAPE}"}))
    assert run("diff", "named.json", "other.json") == 0
    assert_safe(capsys.readouterr().out)
    console = Console(file=Terminal(), force_terminal=True, width=90)
    found = read_explanation(here / "other.json")
    print_text(found, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1m" in shown
    assert "\x1b[31mred" not in shown
    assert "\\x1b[31mred" in shown
    assert_safe(render_text(found).replace("\x1b", ""))


FIGURES = st.one_of(
    st.integers(-10, 10**20),
    st.floats(),
    st.just(10**400),
    st.text(max_size=5),
    st.none(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all that a JSON value holds."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


@pytest.mark.second_tier
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_spoilt_explanation_is_compared_or_refused(data: st.DataObject, folder: Path) -> None:
    path = folder / "good.json"
    if not path.exists():
        assert run("explain", f"{folder}/train.py:build", "--format", "json", "--output", str(path)) == 0
    text = path.read_text()
    values = json.loads(text)
    for place in data.draw(st.lists(st.sampled_from(places(values)[1:]), min_size=1, max_size=3)):
        target = values
        try:
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = data.draw(FIGURES)
        except (TypeError, KeyError, IndexError):
            continue
    spoilt = folder / "spoilt.json"
    spoilt.write_text(json.dumps(values))
    assert run("diff", str(path), str(spoilt)) in (cli.FITS, cli.BAD_INPUT)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    content=st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.dictionaries(
            st.sampled_from(["based_on", "name", "kind", "num_devices", "flops_per_s", "host_memory_nbytes", "x"]),
            FIGURES,
        ).map(lambda values: json.dumps(values).encode()),
    ),
    ending=st.sampled_from(["json", "yaml"]),
)
def test_any_hardware_file_is_read_or_refused(content: bytes, ending: str, folder: Path) -> None:
    (folder / f"any.{ending}").write_bytes(content)
    with contextlib.suppress(OptionsError):
        load_hardware(str(folder / f"any.{ending}"))
