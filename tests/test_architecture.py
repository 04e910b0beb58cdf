"""The rooms and the doors between them, read off the sources."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MAX_LINES = 400

ALLOWED = {
    "chunkc.ir": {"chunkc.ir"},
    "chunkc.kernels": {"chunkc.ir", "chunkc.kernels"},
    "chunkc.passes": {"chunkc.ir", "chunkc.passes"},
    "chunkc.runtime": {"chunkc.ir", "chunkc.kernels", "chunkc.runtime"},
    "chunkc.models": {"chunkc.ir", "chunkc.models"},
    "chunkc.formats": {"chunkc.ir", "chunkc.formats"},
    "chunkc": {
        *("chunkc", "chunkc.ir", "chunkc.formats", "chunkc.models"),
        *("chunkc.kernels", "chunkc.passes", "chunkc.runtime"),
    },
}
"""Which rooms each room may import from; `chunkc` itself is the roof."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / SETUP["package-dir"][package]).glob("*.py"))


SOURCES = [(package, path) for package in ALLOWED for path in sources(package)]


def room_of(module: str) -> str:
    rooms = [room for room in ALLOWED if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default="")


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Modules that a source names in imports, wherever they stand; relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def foreign_rooms(source: str, package: str) -> set[str]:
    found = {room_of(module) for module in imports(ast.parse(source), package)}
    return found - {""} - ALLOWED[package] - ({"chunkc"} if package != "chunkc.ir" else set())


def roof_imports(source: str, package: str) -> set[str]:
    """Modules of the roof (`chunkc` or `chunkc.x` that is no room) that a source imports."""
    names = {path.stem for path in sources("chunkc")} - {"__init__"}
    wanted = set()
    for module in imports(ast.parse(source), package):
        head, _, rest = module.partition(".")
        if head == "chunkc" and (not rest or rest.partition(".")[0] in names):
            wanted.add(module)
    # `from chunkc import kernels` names the package only to reach a room
    reaches_room = any(room_of(m) in ALLOWED and room_of(m) != "chunkc" for m in imports(ast.parse(source), package))
    return wanted - ({"chunkc"} if reaches_room else set())


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=[f"{p}/{f.name}" for p, f in SOURCES])
def test_rooms_import_only_what_they_may(package: str, path: Path) -> None:
    source = path.read_text()
    assert not foreign_rooms(source, package)
    if package != "chunkc":
        assert not roof_imports(source, package), "a room below imports from the roof"


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("chunkc.ir", "from chunkc.passes import layout"),
        ("chunkc.ir", "import chunkc.options"),
        ("chunkc.ir", "def late():\n    from chunkc import kernels"),
        ("chunkc.passes", "from chunkc.runtime.store import ChunkStore"),
        ("chunkc.passes", "from ..runtime import store"),
        ("chunkc.passes", "from chunkc.session import Session"),
        ("chunkc.runtime", "import chunkc.passes.layout as layout"),
        ("chunkc.runtime", "from chunkc import passes"),
        ("chunkc.kernels", "from chunkc.runtime import tier"),
        ("chunkc.kernels", "import chunkc"),
    ],
)
def test_a_forbidden_import_would_be_seen(package: str, source: str) -> None:
    assert foreign_rooms(source, package) or roof_imports(source, package)


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=[f"{p}/{f.name}" for p, f in SOURCES])
def test_the_package_never_imports_its_benchmarks_tests_or_bare_folders(package: str, path: Path) -> None:
    names = {
        "bench",
        "tests",
        "passes",
        "kernels",
        "runtime",
        *(p.stem for p in (ROOT / "bench").glob("*.py")),
    }
    heads = {module.partition(".")[0] for module in imports(ast.parse(path.read_text()), package) if module}
    assert not heads & names


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
    assert set(SETUP["packages"]) == set(SETUP["package-dir"]) == set(ALLOWED)


def test_every_mapped_folder_has_its_link_for_type_checkers() -> None:
    for package, folder in SETUP["package-dir"].items():
        name = package.rpartition(".")[2]
        if folder == name and package != "chunkc":
            link = ROOT / ".typings" / "chunkc" / name
            assert link.resolve() == ROOT / folder


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("path", [path for _, path in SOURCES], ids=[f"{p}/{f.name}" for p, f in SOURCES])
def test_no_module_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", [path for _, path in SOURCES], ids=[f"{p}/{f.name}" for p, f in SOURCES])
def test_the_library_neither_prints_nor_swallows_nor_leaves_stubs(path: Path) -> None:
    tree = ast.parse(path.read_text())
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
        assert word not in path.read_text()


@pytest.mark.parametrize("path", [path for _, path in SOURCES], ids=[f"{p}/{f.name}" for p, f in SOURCES])
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
