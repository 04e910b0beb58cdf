"""The rooms and the doors between them, read off the sources."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

FLOORS = (
    ("chunkc.ir", "chunkc.torch_private", "chunkc.utils"),
    ("chunkc.ir.verify", "chunkc.models", "chunkc.options", "chunkc.recompile_limit", "chunkc.variants"),
    ("chunkc.explaining.formats", "chunkc.kernels", "chunkc.passes.graphs", "chunkc.runtime.device"),
    ("chunkc.passes.planning", "chunkc.runtime.storage"),
    ("chunkc.machines", "chunkc.passes.segments", "chunkc.runtime.distributed"),
    ("chunkc.passes.memory", "chunkc.passes.rewrite", "chunkc.runtime.store"),
    ("chunkc.distributed", "chunkc.passes.codegen", "chunkc.runtime.execution"),
    ("chunkc.policy",),
    ("chunkc.tracing",),
    ("chunkc.program_text", "chunkc.session"),
    ("chunkc.compile", "chunkc.distribute", "chunkc.optim", "chunkc.report", "chunkc.weights"),
    ("chunkc.checkpoint", "chunkc.engine", "chunkc.explaining", "chunkc.scalars"),
    ("chunkc.backend",),
    ("chunkc", "chunkc.cli", "chunkc.lightning", "chunkc.transformers"),
    ("chunkc.__main__", "chunkc.trl"),
)
"""Rooms, and modules beside them in `chunkc/`, the lowest floor first. Each imports itself and lower floors only."""

APART = ("chunkc.kernels", "chunkc.passes", "chunkc.runtime")
"""Rooms and those inside them: none of one imports any of another."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / SETUP["package-dir"][package]).glob("*.py"))


SOURCES = [(package, path) for package in SETUP["packages"] for path in sources(package)]
MODULES = {package if path.stem == "__init__" else f"{package}.{path.stem}": path for package, path in SOURCES}
"""Every module by its dotted name; a package stands for its `__init__.py`."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(name: str) -> str:
    """The room of a module, or of a name in it; empty if it is not chunkc's."""
    parts = name.split(".")
    if parts[0] != "chunkc":
        return ""
    heads = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(head for head in heads if head in FLOOR)


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
    module = package if stem == "__init__" else module
    room = room_of(module)
    named = {room_of(name): name for name in imports(tree, package) if room_of(name) not in ("", room)}
    return {other for other, name in named.items() if FLOOR[other] >= FLOOR[room] or are_apart(module, name)}


def are_apart(module: str, name: str) -> bool:
    """Whether two names are of different rooms of `APART`."""
    rooms = {room for room in APART for found in (module, name) if f"{found}.".startswith(f"{room}.")}
    return len(rooms) > 1


def imported_modules(module: str) -> set[str]:
    """Modules of chunkc that a module's source names, itself left out."""
    path = MODULES[module]
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    names = list(imports(tree_of(path), package))
    found = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return (found & set(MODULES)) - {module}


def test_rooms_import_only_lower_floors() -> None:
    modules = {f"{package}.{path.stem}": tree_of(path) for package, path in SOURCES}
    found = {module: foreign_rooms(tree, module) for module, tree in modules.items()}
    assert {module: rooms for module, rooms in found.items() if rooms} == {}


def test_every_room_and_module_of_the_package_has_its_floor() -> None:
    beside = {f"chunkc.{path.stem}" for path in sources("chunkc") if path.stem != "__init__"}
    rooms = {room_of(package) for package in SETUP["packages"]} | {"chunkc.passes.codegen"}
    assert set(FLOOR) == beside | rooms
    assert len(beside) + 1 <= 12  # with __init__: what a reader of the folder sees first stays a short list


def test_no_modules_import_each_other() -> None:
    """Tarjan's strongly connected components, by reachability: there are few hundred modules."""
    direct = {module: imported_modules(module) for module in MODULES}
    reached = {module: reachable(direct, module) for module in MODULES}
    circles = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in MODULES
        if module in reached[module]
    }
    assert circles == set()


def reachable(direct: dict[str, set[str]], start: str) -> set[str]:
    """Every module that one imports, and those that these import, and so on."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = direct[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


IMPORTS = {
    # What a module imports, and whether it may.
    ("chunkc.ir.plan", "from chunkc.passes.planning import layout"): False,
    ("chunkc.ir.plan", "from chunkc.ir.verify.verifier import verify"): False,
    ("chunkc.passes.planning.layout", "from chunkc.runtime.device.tier import Tier"): False,
    ("chunkc.kernels.split", "from chunkc.runtime.device import tier"): False,
    ("chunkc.session.session", "from ..optim import update_mode"): False,
    ("chunkc.session.compiled_step", "if TYPE_CHECKING:\n    from chunkc.explaining.dry_run import DryRun"): False,
    ("chunkc.optim.__init__", "from chunkc import synchronize"): False,
    ("chunkc.explaining.explain", "from chunkc import *"): False,
    ("chunkc.ir.plan", "import torch\nfrom . import layout\nfrom chunkc.ir.errors import ChunkcError"): True,
    ("chunkc.explaining.explain", "from chunkc.optim import AdamW\nfrom ..machines import presets"): True,
    ("chunkc.__init__", "from chunkc import optim\nfrom chunkc.report import report"): True,
}


def test_a_forbidden_import_would_be_seen_and_imports_from_below_are_allowed() -> None:
    for (module, source), allowed in IMPORTS.items():
        assert bool(foreign_rooms(ast.parse(source), module)) != allowed, (module, source)


def test_the_package_never_imports_its_benchmarks_tests_or_bare_folders() -> None:
    names = {"bench", "tests", "passes", "kernels", "runtime", *(p.stem for p in (ROOT / "bench").glob("*.py"))}
    for package, path in SOURCES:
        heads = {module.partition(".")[0] for module in imports(tree_of(path), package) if module}
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


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_library_neither_prints_nor_swallows_nor_leaves_stubs() -> None:
    for path, tree in ((path, tree_of(path)) for _, path in SOURCES):
        for node in ast.walk(tree):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                allowed = ("print",) if path.parent.name == "cli" else ()
                assert node.func.id not in {"print", "breakpoint"} - set(allowed), where
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{where}: a bare except"
            if isinstance(node, ast.Name):
                assert node.id != "NotImplementedError", where
        for word in ("TODO", "FIXME", "XXX"):
            assert word not in path.read_text(), path


MEANINGS = {
    "Run": {"Run", "PredictedRun", "PlannedRun", "DryRun", "_DryRunState"},
    "Position": {"Position"},
    "Moment": {"Moment", "ExplainedMoment"},
    "Stage": {"UpdateStage", "ZeroStage"},
    "Capture": set[str](),
    "Captured": {"Captured", "GraphCaptured", "PartlyCapturedError"},
    "Settle": set[str](),
    "Place": set[str](),
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
    names = [name for _, path in SOURCES for name in defined(tree_of(path))]
    for word, allowed in MEANINGS.items():
        found = [name for name in names if word in re.findall(r"[A-Z][a-z]+", name)]
        assert sorted(found) == sorted(allowed), word


def test_every_module_says_what_it_is() -> None:
    assert [path for _, path in SOURCES if not ast.get_docstring(tree_of(path))] == []
