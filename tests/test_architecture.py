"""The rooms and the doors between them, read off the sources."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

CORE = "chunkc, its core"
TOP = {"__init__", "__main__", "arguments", "cli", "transformers", "transformers_ranks", "trl"}
TOP |= {"lightning", "lightning_files", "lightning_ranks"}
"""Modules in the folder `chunkc/` that see everything and that nobody imports; the others there are its core."""

GROUND = {"chunkc.ir", "chunkc.torch_private", "chunkc.kernels", "chunkc.passes", "chunkc.runtime"}
LOWEST = {"chunkc.ir", "chunkc.torch_private"}
ALLOWED = {
    "chunkc.ir": set[str](),
    "chunkc.torch_private": set[str](),
    "chunkc.kernels": LOWEST,
    "chunkc.passes": LOWEST,
    "chunkc.runtime": LOWEST,
    "chunkc.models": {"chunkc.ir"},
    "chunkc.explaining.formats": {"chunkc.ir"},
    "chunkc.machines": GROUND,
    CORE: {*GROUND, "chunkc.machines"},
    "chunkc.weights": {*GROUND, "chunkc.machines", CORE},
    "chunkc.optim": {*GROUND, "chunkc.machines", CORE},
    "chunkc.engine": {*GROUND, "chunkc.machines", CORE, "chunkc.optim"},
    "chunkc.checkpoint": {*GROUND, "chunkc.machines", CORE, "chunkc.weights", "chunkc.optim"},
    "chunkc.explaining": {*GROUND, "chunkc.models", "chunkc.machines", CORE, "chunkc.optim"},
}
ALLOWED["chunkc"] = set(ALLOWED)
"""Which rooms each room may import from besides itself; `chunkc` stands for what is in `TOP`."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / SETUP["package-dir"][package]).glob("*.py"))


SOURCES = [(package, path) for package in SETUP["packages"] for path in sources(package)]
TREES = {path: ast.parse(path.read_text()) for _, path in SOURCES}
CORE_MODULES = {path.stem for path in sources("chunkc")} - TOP


def room_of(name: str) -> str:
    """The room of a module, or of what it offers; empty if it is none of chunkc's."""
    package, _, rest = name.partition(".")
    if package != "chunkc":
        return ""
    head = rest.partition(".")[0]
    if f"chunkc.{head}" in ALLOWED:
        return f"chunkc.{head}"
    return CORE if head in CORE_MODULES else "chunkc"


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """What a source names in imports, wherever they stand; relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def foreign_rooms(tree: ast.AST, module: str) -> set[str]:
    """Rooms from which a module imports, and may not."""
    package, _, stem = module.rpartition(".")
    room = room_of(module if stem != "__init__" else package)
    found = {room_of(name) for name in imports(tree, package)}
    return found - {"", room} - ALLOWED[room]


def test_rooms_import_only_what_they_may() -> None:
    modules = {f"{package}.{path.stem}": TREES[path] for package, path in SOURCES}
    found = {module: foreign_rooms(tree, module) for module, tree in modules.items()}
    assert {module: rooms for module, rooms in found.items() if rooms} == {}


def test_each_room_is_seen_from_above_only() -> None:
    for room, seen in ALLOWED.items():
        assert all(room not in ALLOWED[other] for other in seen), room


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("chunkc.ir.plan", "from chunkc.passes.planning import layout"),
        ("chunkc.ir.plan", "import chunkc.options"),
        ("chunkc.ir.plan", "def late():\n    from chunkc import kernels"),
        ("chunkc.passes.planning.layout", "from chunkc.runtime.store.store import ChunkStore"),
        ("chunkc.passes.planning.layout", "from ..runtime import store"),
        ("chunkc.passes.planning.layout", "from chunkc.session.session import Session"),
        ("chunkc.runtime.store.store", "import chunkc.passes.planning.layout as layout"),
        ("chunkc.runtime.store.store", "from chunkc import passes"),
        ("chunkc.kernels.split", "from chunkc.runtime.device import tier"),
        ("chunkc.kernels.split", "import chunkc"),
        ("chunkc.machines.presets", "from chunkc.options import parse_size"),
        ("chunkc.machines.__init__", "from chunkc import options"),
        ("chunkc.session.session", "from chunkc.optim.overlap_mode import OverlapMode"),
        ("chunkc.session.session", "from chunkc import optim"),
        ("chunkc.session.session", "from chunkc.optim import AdamW"),
        ("chunkc.session.session", "from .optim import overlap_mode"),
        ("chunkc.session.compiled_step", "import chunkc.explaining.offline"),
        ("chunkc.session.compiled_step", "if TYPE_CHECKING:\n    from chunkc.explaining.paper_step import Replay"),
        ("chunkc.session.compiled_step", "from chunkc.cli import command as cli"),
        ("chunkc.session.compiled_step", "from chunkc import explain"),
        ("chunkc.session.compiled_step", "from . import AdamW"),
        ("chunkc.session.compiled_step", "from chunkc.explaining.formats import write"),
        ("chunkc.optim.adam", "from chunkc.explaining.memory_timeline import peak_of"),
        ("chunkc.optim.adam", "from ..explaining import moments"),
        ("chunkc.optim.__init__", "from chunkc import synchronize"),
        ("chunkc.explaining.explain", "import chunkc.cli.command"),
        ("chunkc.explaining.explain", "from chunkc import explain"),
        ("chunkc.explaining.explain", "from chunkc import *"),
        ("chunkc.explaining.__init__", "import chunkc"),
    ],
)
def test_a_forbidden_import_would_be_seen(module: str, source: str) -> None:
    assert foreign_rooms(ast.parse(source), module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("chunkc.ir.plan", "import torch\nfrom . import chunks\nfrom chunkc.ir.errors import ChunkcError"),
        ("chunkc.machines.devices", "from chunkc import passes\nfrom .presets import preset"),
        (
            "chunkc.session.session",
            "from chunkc import early\nfrom .options import Options\nimport chunkc.machines.devices",
        ),
        (
            "chunkc.optim.adam",
            "from chunkc.session.session import Session\nfrom chunkc import moving\nfrom . import update",
        ),
        ("chunkc.explaining.explain", "from chunkc.optim import AdamW\nfrom ..machines import presets"),
        (
            "chunkc.cli.command",
            "import chunkc\nfrom chunkc.explaining import explain\nfrom chunkc.formats import write",
        ),
        ("chunkc.__init__", "from chunkc import optim\nfrom chunkc.report import report"),
    ],
)
def test_imports_from_below_are_allowed(module: str, source: str) -> None:
    assert not foreign_rooms(ast.parse(source), module)


def test_the_package_never_imports_its_benchmarks_tests_or_bare_folders() -> None:
    names = {"bench", "tests", "passes", "kernels", "runtime", *(p.stem for p in (ROOT / "bench").glob("*.py"))}
    for package, path in SOURCES:
        heads = {module.partition(".")[0] for module in imports(TREES[path], package) if module}
        assert not heads & names, path


def test_mypy_finds_every_room_outside_the_package_folder() -> None:
    """`.typings` is on mypy's path: without an `__init__.py` beside its links mypy takes those rooms for unknown."""
    links = ROOT / ".typings"
    elsewhere = {package: folder for package, folder in SETUP["package-dir"].items() if folder.count("/") == 0}
    for package, folder in elsewhere.items():
        found = links.joinpath(*package.split("."), "__init__.py")
        assert found.resolve() == (ROOT / folder / "__init__.py").resolve(), package


def test_the_packages_listed_are_the_folders_there_are() -> None:
    left_out = {"tests", "bench", "build", "runs"}
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("__init__.py")
        if path.relative_to(ROOT).parts[0] not in left_out and not path.relative_to(ROOT).parts[0].startswith(".")
    }
    assert folders == set(SETUP["package-dir"].values())
    assert set(SETUP["packages"]) == set(SETUP["package-dir"])
    rooms = {package for package in SETUP["packages"] if package.count(".") <= 1}  # others are parts of a room
    assert rooms == set(ALLOWED) - {CORE}


def test_every_mapped_folder_has_its_link_for_type_checkers() -> None:
    for package, folder in SETUP["package-dir"].items():
        name = package.rpartition(".")[2]
        if folder == name and package != "chunkc":
            link = ROOT / ".typings" / "chunkc" / name
            assert link.resolve() == ROOT / folder


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_library_neither_prints_nor_swallows_nor_leaves_stubs() -> None:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                allowed = ("print",) if path.name == "cli.py" else ()
                assert node.func.id not in {"print", "breakpoint"} - set(allowed), where
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{where}: a bare except"
            if isinstance(node, ast.Name):
                assert node.id != "NotImplementedError", where
        for word in ("TODO", "FIXME", "XXX"):
            assert word not in path.read_text(), path


MEANINGS = {
    "Run": {"Run", "PaperRun", "PlannedRun"},
    "Position": {"Position"},
    "Moment": {"Moment", "ExplainedMoment"},
    "Stage": {"UpdateStage", "Stage", "ZeroStage"},
    "Capture": set[str](),
    "Captured": {"Captured", "GraphCaptured", "PartlyCapturedError"},
    "Settle": {"_Settle"},
    "Place": {"_Place"},
}
"""Words that ARCHITECTURE.md defines -> the classes and types that are called so, or after it. All mean the same."""


def defined(tree: ast.Module) -> Iterator[str]:
    """Classes and types of a module."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [node.name] if isinstance(node, ast.ClassDef) else [t.id for t in targets if isinstance(t, ast.Name)]
        yield from (name for name in names if re.fullmatch(r"_?[A-Z][a-z]\w*", name))


def test_a_word_of_the_architecture_has_one_meaning() -> None:
    names = [name for tree in TREES.values() for name in defined(tree)]
    for word, allowed in MEANINGS.items():
        found = [name for name in names if word in re.findall(r"[A-Z][a-z]+", name)]
        assert sorted(found) == sorted(allowed), word


def test_every_module_says_what_it_is() -> None:
    assert [path for path, tree in TREES.items() if not ast.get_docstring(tree)] == []
