"""Every snippet and command of README, ARCHITECTURE and `docs/` runs, and prints what the page shows."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from doc_pages import DOCS, ROOT, Block, blocks, mark, printed_differs, write_script

from chunkc.cli import command as cli

pytestmark = pytest.mark.second_tier

PAGES = (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *DOCS)


def printed_by(done: subprocess.CompletedProcess[str]) -> str:
    """Standard output of a program that has ended well."""
    assert done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def surroundings() -> dict[str, str]:
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("PYTHONSAFEPATH", None)  # `from train import build`, as where a user starts Python
    return environment


def check(block: Block, printed: str) -> None:
    if block.expected is not None:
        differs = printed_differs(block.expected, printed)
        assert differs is None, f"line {block.line}: {differs}"


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """With the page's files."""
    for block in blocks(request.param.read_text()):
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.text)
    return tmp_path


def of(page: Path, language: str, *, files: bool = False) -> list[Block]:
    found = [block for block in blocks(page.read_text()) if block.language == language and block.not_run is None]
    return [block for block in found if (block.file_name is not None) == files]


SNIPPETS = [pytest.param(page, page, id=page.name) for page in PAGES if of(page, "python")]
COMMANDS = [pytest.param(page, block, id=f"{page.name}:{block.line}") for page in PAGES for block in of(page, "sh")]
PROGRAMS = [
    pytest.param(page, block, id=f"{page.name}:{block.line}")
    for page in PAGES
    for block in of(page, "python", files=True)
    if block.expected is not None
]


@pytest.mark.parametrize(("folder", "page"), SNIPPETS, indirect=["folder"])
def test_snippets(folder: Path, page: Path) -> None:
    found = of(page, "python")
    script = folder / write_script(found, folder)
    starts: list[str] | None = [] if any("sys.executable" in block.text for block in found) else None
    printed = printed_by(forked.run(script, folder=folder, environment=surroundings(), starts=starts))
    for block in reversed(found):
        printed, _, after = printed.partition(mark(block))
        check(block, after)


@pytest.mark.parametrize(("folder", "block"), COMMANDS, indirect=["folder"])
def test_commands(
    folder: Path, block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch already."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "train", None)  # each page has its own
    monkeypatch.delitem(sys.modules, "train")
    for command in block.commands:
        program, *arguments = shlex.split(command)
        assert program == "chunkc", command
        assert cli.main(arguments) == cli.FITS, f"{command}\n{capsys.readouterr().err}"
    check(block, capsys.readouterr().out)


@pytest.mark.parametrize(("folder", "block"), PROGRAMS, indirect=["folder"])
def test_programs(folder: Path, block: Block) -> None:
    assert block.file_name is not None
    check(block, printed_by(forked.run(folder / block.file_name, folder=folder, environment=surroundings())))


def test_something_of_each_kind_is_run() -> None:
    assert SNIPPETS
    assert COMMANDS
    assert PROGRAMS
