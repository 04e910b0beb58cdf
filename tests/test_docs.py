"""README and the pages under `docs/` name what there is, and their links, anchors and commands lead somewhere."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from doc_pages import DOCS, PAGES, REASONS, ROOT, Block, anchors, blocks, links, named, printed_differs, prose, rows
from file_modules import load

import chunkc
from chunkc.cli.arguments import build_parser
from chunkc.cli.command import FITS, OWN_FAULT
from chunkc.explaining.formats import FORMATS
from chunkc.explaining.formats.json_ import VERSION
from chunkc.ir import explanation as explanations
from chunkc.ir.estimates import EstimatedOperator
from chunkc.machines.presets import KEYS, PRESETS
from chunkc.options import VARIABLES, Options

README = ROOT / "README.md"
TEXTS = {path.name: path.read_text() for path in PAGES}
BLOCKS = [pytest.param(block, id=f"{path.name}:{block.line}") for path in PAGES for block in blocks(path.read_text())]
MAX_NOT_RUN = 14


def first_column(page: str, header: str) -> list[str]:
    """Names in the first column of the page's tables with that header, in order."""
    return [name for row in rows(TEXTS[page], header) for name in named(row[0])]


# --- README ---


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_the_readme_has_its_two_commands() -> None:
    assert any(
        [line.split("#")[0].strip() for line in b.text.splitlines()] == ["make demo", "make test"]
        for b in blocks(TEXTS["README.md"])
    )


def test_the_readme_leads_to_every_page() -> None:
    assert {f"docs/{path.name}" for path in DOCS} <= set(links(TEXTS["README.md"]))


# --- links, commands, blocks ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_resolve(page: Path) -> None:
    for link in links(page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """What stands in backticks and looks like a path from the root, and is no scalar of a log."""
    for name in set(named(prose(page.read_text()))).difference(first_column("loops.md", "scalar")):
        if re.fullmatch(r"(bench|chunkc|passes|runtime|kernels|tests|docs|\.ci)/[\w./-]+", name):
            path = ROOT / name
            assert path.exists() or path.with_suffix(".py").exists() or list(path.parent.glob(f"{path.name}*")), name


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_not_run_says_why_and_makes_sense(block: Block) -> None:
    assert block.language in ("python", "sh", "text", "json", "yaml", "diff", "")
    assert block.not_run in (None, *REASONS)
    if block.language == "python":
        tree = ast.parse(block.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "chunkc":
                is_module = any((ROOT / "chunkc").glob(f"{node.attr}*"))
                assert is_module or hasattr(chunkc, node.attr), ast.unparse(node)
    for command in block.commands if block.language == "sh" else ():
        check_command(shlex.split(command))


def check_command(words: list[str]) -> None:
    """What a line of a `sh` block starts is there, and takes these arguments."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program == "chunkc":
        build_parser().parse_args(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
        assert arguments[0] in " ".join(targets).split(), words
        suites = [argument.removeprefix("ARGS=").split()[0] for argument in arguments if argument.startswith("ARGS=")]
        assert arguments[0] != "bench" or set(suites) <= bench_suites()
        variables = {argument.partition("=")[0] for argument in arguments[1:]}
        assert variables <= set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M)), words
    elif program == "bench/on_gpu.sh":
        assert re.fullmatch(r"(first|second|third)( [0-9]+)?|wheels", " ".join(arguments)), words
    elif program == "python" and arguments[:2] == ["-m", "pytest"]:
        assert all((ROOT / path).exists() for path in arguments[2:]), words
    else:
        assert program in ("python", "pip"), words
        assert program == "pip" or (ROOT / arguments[0]).exists(), words
        if arguments[0] == "tests/gpu_in_ram/run.py":
            check_on_the_device(arguments[1:])


def check_on_the_device(arguments: list[str]) -> None:
    """What `run.py` is given: its options, choices that the device has, a command."""
    options = load(ROOT / "tests/gpu_in_ram/run.py").build_parser().parse_args(arguments)
    there = re.findall(r"NAME\((\w+)\)", (ROOT / "tests/gpu_in_ram/device/settings.c").read_text())
    assert {choice.partition("=")[0] for choice in options.set.split(",")} <= {"", *there}, arguments
    check_command(options.command)


def bench_suites() -> set[str]:
    source = (ROOT / "bench" / "run.py").read_text()
    return set(re.findall(r'^    "(\w+)": \w+\.run\w*,$', source, re.M))


def test_few_blocks_are_left_out() -> None:
    assert sum(param.values[0].not_run is not None for param in BLOCKS) <= MAX_NOT_RUN


# --- the architecture ---


def rooms() -> str:
    text = TEXTS["ARCHITECTURE.md"]
    return text[text.index("\n## Rooms\n") : text.index("\n## One step\n")]


def modules() -> dict[str, str]:
    """Every module by its path from the root, without its ending -> its name."""
    package_dir = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    paths = [path for folder in package_dir.values() for path in (ROOT / folder).glob("*.py")]
    return {str(path.relative_to(ROOT).with_suffix("")): path.stem for path in paths if not path.stem.startswith("__")}


def rooms_named() -> dict[str, list[str]]:
    """Folder -> the modules that its row of the rooms' table gives a job."""
    table = {named(row[0])[0]: row[1] for row in rows(rooms(), "room") if named(row[0])}
    return {folder: re.findall(r"`(\w+)`(?=[:,])", jobs) for folder, jobs in table.items()}


def test_the_rooms_name_every_module_where_it_is() -> None:
    """One by one, except in rooms that are described as a whole: of these the table names no module."""
    described, wholly = (
        rooms_named(),
        ("passes/memory/scratch/", "passes/memory/inductor/", "chunkc/explaining/formats/"),
    )
    left_out = [
        path
        for path, name in modules().items()
        if (folder := f"{path.rpartition('/')[0]}/") not in wholly
        and (described.get(folder, [""]) or [name]).count(name) != 1
    ]
    assert left_out == []


def test_the_rooms_name_nothing_that_is_gone() -> None:
    found = {f"{folder}{name}" for folder, names in rooms_named().items() for name in names}
    assert found - set(modules()) == set()


# --- everything there is has its place ---


def test_every_name_of_the_package_is_on_a_page() -> None:
    everything = "\n".join(TEXTS.values())
    assert [name for name in chunkc.__all__ if not re.search(rf"`[^`]*\b{name}\b[^`]*`", everything)] == []


def test_options() -> None:
    """In order, with their defaults."""
    described = {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows(TEXTS["options.md"], "option")}
    assert described == {name: field.default for name, field in Options.model_fields.items()}


def test_the_arguments_of_place_and_explain() -> None:
    for function, page in ((chunkc.place, "options.md"), (chunkc.explain, "explain.md")):
        names = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert names <= set(named(prose(TEXTS[page]))), function


def test_the_report() -> None:
    described = first_column("options.md", "attribute")
    assert set(described) == {field.name for field in dataclasses.fields(chunkc.Report)}


def test_errors() -> None:
    described = first_column("options.md", "error")
    errors = {name for name in chunkc.__all__ if name.endswith("Error")}
    assert set(described) == errors - {"ChunkcError"}


@pytest.mark.parametrize("name", chunkc.optim.__all__)
def test_the_arguments_of_optimizers(name: str) -> None:
    """Each is described, and a default that a page names is the constructor's."""
    described = {name: row[1] for row in rows(TEXTS["optimizers.md"], "argument") for name in named(row[0])}
    parameters = inspect.signature(getattr(chunkc.optim, name)).parameters
    assert set(parameters) <= set(described)
    for argument, parameter in parameters.items():
        stated = [
            eval(text, {"torch": torch}) for text in named(described[argument]) if not text.isalpha() or text in KNOWN
        ]
        assert parameter.default in stated or not stated, argument


KNOWN = ("None", "True", "False")


def test_no_argument_of_optimizers_is_invented() -> None:
    there = {
        argument
        for name in chunkc.optim.__all__
        for argument in inspect.signature(getattr(chunkc.optim, name)).parameters
    }
    assert set(first_column("optimizers.md", "argument")) <= there


def explain_flags() -> set[str]:
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {flag for action in commands.choices["explain"]._actions for flag in action.option_strings} - {
        "-h",
        "--help",
    }


def test_flags() -> None:
    described = [name.split()[0] for name in first_column("explain.md", "flag") if name.startswith("--")]
    assert set(described) == explain_flags()
    assert len(described) == len(set(described))


def test_formats_and_exit_codes() -> None:
    assert first_column("explain.md", "format") == list(FORMATS)
    codes = {int(row[0]) for row in rows(TEXTS["explain.md"], "exit code")}
    assert {FITS, OWN_FAULT, 2, 3, 130} == codes


PARTS = {
    "peak": explanations.Peak,
    "chunks": explanations.Chunks,
    "traffic_nbytes": explanations.Traffic,
    "step_time_s": explanations.StepTime,
    "host": explanations.HostNeeds,
    "ranks": explanations.Ranks,
    "moments": explanations.ExplainedMoment,
    "events": explanations.TimedEvent,
    "estimates": EstimatedOperator,
    "measured": explanations.Measured,
    "why": explanations.Why,
}


def test_keys_of_the_json() -> None:
    table = {name: row[1] for row in rows(TEXTS["explain.md"], "key") for name in named(row[0])}
    keys = {field.name: str(field.type) for field in dataclasses.fields(chunkc.Explanation)}
    assert set(table) == {*keys, "version"}
    assert str(VERSION) in table["version"]
    for key, part in PARTS.items():
        assert {field.name for field in dataclasses.fields(part)} <= set(named(table[key])), key
    records = {key for key, kind in keys.items() if re.search(r"\b(?!None|Mapping)[A-Z]", kind)}
    assert records == set(PARTS)


def test_environment_variables() -> None:
    found = [(named(row[0])[0], named(row[1])[0]) for row in rows(TEXTS["loops.md"], "environment variable")]
    assert found == [(variable, option) for option, variable in VARIABLES.items()]


def test_scalars_and_arguments_of_other_libraries_loops() -> None:
    read = ast.parse((ROOT / "chunkc" / "scalars.py").read_text())
    names = {n.value for n in ast.walk(read) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert set(first_column("loops.md", "scalar")) == {name for name in names if re.fullmatch(r"chunkc/\w+", name)}
    tree = ast.parse((ROOT / "chunkc" / "transformers" / "trainer.py").read_text())
    (arguments,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ChunkcArguments")
    fields = {n.target.id for n in arguments.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert set(first_column("loops.md", "argument")) == fields


def test_diffs_change_three_lines_at_most() -> None:
    for block in (block for block in blocks(TEXTS["loops.md"]) if block.language == "diff"):
        lines = block.text.splitlines()
        assert max(sum(line.startswith(sign) for line in lines) for sign in "+-") <= 3


def test_machines_by_name() -> None:
    names = [name for row in rows(TEXTS["explain.md"], "machine by name") for name in named(row[0])]
    assert sorted(names) == sorted(PRESETS)


def test_keys_of_hardware_files() -> None:
    assert set(first_column("explain.md", "key of the file")) == set(KEYS)


def test_suites() -> None:
    assert set(first_column("results.md", "`make bench ARGS=...`")) == bench_suites()


def test_results_that_pages_name_are_there() -> None:
    for name in re.findall(r"bench/results/[\w.-]+\.json", "\n".join(TEXTS.values())):
        assert (ROOT / name).exists(), name


# --- the comparison of what is printed ---


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("budget  32.00 MiB", "budget 30.1 MiB", True),
        ("budget  32.00 MiB", "budget 3.2 MiB", False),
        ("budget  32.00 MiB", "peak 32.00 MiB", False),
        ("took 3 s", "took 140 ms", True),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb", False),
        ("a", "a\nb", False),
        ("a\nc", "a\nb\nc", False),
    ],
)
def test_what_is_printed_is_compared(expected: str, printed: str, same: bool) -> None:
    assert (printed_differs(expected, printed) is None) == same
