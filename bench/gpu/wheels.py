"""Fetches the wheels that a lent GPU machine lacks, and checks that all that is imported there works with them.

    python bench/gpu/wheels.py [FOLDER] [--check]       (default folder: .whl)

The machine reaches no package registry: `gpu_machine.json` has its Python, its platforms, and its packages with their
versions as far as they are known (null: not). Third-party imports are read from the sources of chunkc, of the
benchmarks and of the tests that `gpu_calls.py` runs; the least versions stand in pyproject.toml. What is missing or too
old there is fetched, and what that requires in turn, where the machine's version is too old or not known. `--check`
fetches nothing, and looks at the wheels that are there. Exits with 1, and a line for each, where something is lacking.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Path(__file__).with_name("machine.json")

SOURCES = ("chunkc", "passes", "runtime", "kernels", "bench")
TESTS = (
    "tests/conftest.py",
    "tests/support",
    "tests/gpu",
    "tests/kernels",
    "tests/runtime/device/test_gpu.py",
    "tests/machines/test_calibrate.py",
)
"""Tests of a GPU, and what is imported where they run."""

NAMED = ("pytest-timeout",)
"""Distributions that no source imports and command lines of the calls rely on."""

DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
"""Of modules that are called otherwise."""

OPTIONAL = {
    "deepspeed": "a peer, measured where it is installed",
    "torchao": "a peer, measured where it is installed",
    "bitsandbytes": "a peer, measured where it is installed",
    "plotly": "for HTML pages alone",
    "hypothesis": "tests/conftest.py asks whether it is there",
    "matplotlib": "for plots alone",
    "scipy": "for bench/plans/optimality.py alone",
    "timm": "for bench/coverage.py alone",
    "torchvision": "for bench/coverage.py alone",
    "lightning": "imported by no step of the calls",
    "trl": "imported by no step of the calls",
}
"""Imported modules that may be absent there, and why."""


@dataclass(frozen=True)
class Machine:
    """What a machine has: packages by canonical name, with a version or None where it is not known."""

    python: str
    platforms: tuple[str, ...]
    packages: Mapping[str, str | None]

    @staticmethod
    def load(path: Path = MACHINE) -> Machine:
        fields = json.loads(path.read_text())
        packages = {canonicalize_name(name): version for name, version in fields["packages"].items()}
        return Machine(fields["python"], tuple(fields["platforms"]), packages)

    @staticmethod
    def here() -> Machine:
        """The packages of this very interpreter."""
        found = {canonicalize_name(d.metadata["Name"]): d.version for d in reversed([*metadata.distributions()])}
        return Machine(".".join(map(str, sys.version_info[:3])), (), found)

    def with_wheels(self, wheels: Iterable[Wheel]) -> Machine:
        packages = {**self.packages, **{wheel.name: wheel.version for wheel in wheels}}
        return Machine(self.python, self.platforms, packages)

    def lacks(self, requirement: Requirement) -> str:
        """Why the requirement is not met; "" if it is, or is not for this Python or system."""
        if requirement.marker is not None and not requirement.marker.evaluate(self._environment()):
            return ""
        name = canonicalize_name(requirement.name)
        if name not in self.packages:
            return f"{requirement} is not there"
        version = self.packages[name]
        if version is None:
            return f"{requirement}: which version is there is not known" if requirement.specifier else ""
        if not requirement.specifier.contains(version, prereleases=True):
            return f"{requirement} is {version} there"
        return ""

    def _environment(self) -> dict[str, str]:
        return {
            "python_version": ".".join(self.python.split(".")[:2]),
            "python_full_version": self.python,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "implementation_name": "cpython",
            "os_name": "posix",
            "extra": "",
        }


@dataclass(frozen=True)
class Wheel:
    """A wheel file, by its own metadata."""

    name: str
    version: str
    requires_python: str
    requirements: tuple[Requirement, ...]

    @staticmethod
    def load(path: Path) -> Wheel:
        with zipfile.ZipFile(path) as archive:
            (info,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            fields = HeaderParser().parsestr(archive.read(info).decode())
        requirements = tuple(Requirement(text) for text in fields.get_all("Requires-Dist", ()))
        name = canonicalize_name(fields["Name"])
        return Wheel(name, fields["Version"], fields.get("Requires-Python", ""), requirements)


Fetch = Callable[[Requirement, Path], None]
"""Puts the wheel that meets a requirement into a folder."""


def imported(paths: Iterable[Path]) -> dict[str, str]:
    """Find the top-level modules that sources import at any depth, each with one place of its import.

    Left out are imports under `try` with a handler for ImportError, and under `if TYPE_CHECKING`.
    """
    found: dict[str, str] = {}
    for path in paths:
        for name, line in _imports_of(ast.parse(path.read_text())):
            found.setdefault(name, f"{path}:{line}")
    return found


def _imports_of(node: ast.AST) -> Iterator[tuple[str, int]]:
    match node:
        case ast.Import():
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        case ast.ImportFrom() if node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno
        case ast.Try() if any("ImportError" in ast.dump(h.type) for h in node.handlers if h.type is not None):
            return
        case ast.If() if "TYPE_CHECKING" in ast.dump(node.test):
            return
    for child in ast.iter_child_nodes(node):
        yield from _imports_of(child)


def sources(root: Path = ROOT) -> list[Path]:
    """The files whose imports must work on the machine."""
    found = [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]
    for name in TESTS:
        path = root / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def needed(paths: Sequence[Path], root: Path = ROOT) -> list[Requirement]:
    """What the sources import of others, with the least versions that pyproject.toml names."""
    own = {"chunkc", *(path.stem for path in (root / "bench").iterdir())}
    own |= {path.stem for path in (root / "tests").rglob("*.py")}
    names = set(imported(paths)) - own - set(sys.stdlib_module_names) - set(OPTIONAL)
    distributions = {*NAMED, *(canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in names)}
    floors = _floors(root)
    return [floors.get(name, Requirement(name)) for name in sorted(distributions)]


def _floors(root: Path) -> dict[str, Requirement]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for group in project["optional-dependencies"].values() for text in group)]
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, texts):
        requirement.marker = None
        name = canonicalize_name(requirement.name)
        if name not in found or requirement.specifier:
            found[name] = requirement
    return found


def lacking(requirements: Iterable[Requirement], machine: Machine, wheels: Sequence[Wheel] = ()) -> list[str]:
    """A line for each requirement, of the sources and of the wheels, that is not met."""
    there = machine.with_wheels(wheels)
    lines = [problem for requirement in requirements if (problem := there.lacks(requirement))]
    for wheel in wheels:
        problems = filter(None, map(there.lacks, wheel.requirements))
        lines += [f"{wheel.name} {wheel.version} needs {problem}" for problem in problems]
        python = Requirement(f"python{wheel.requires_python}")
        if not python.specifier.contains(machine.python):
            lines.append(f"{wheel.name} {wheel.version} is for {python}, there is {machine.python}")
    return lines


def fetch_all(requirements: Iterable[Requirement], machine: Machine, folder: Path, fetch: Fetch) -> list[Wheel]:
    """Fetch what the machine lacks, and what that requires, into an empty folder."""
    wheels: dict[str, Wheel] = {}
    waiting = [requirement for requirement in requirements if machine.lacks(requirement)]
    while waiting:
        requirement = waiting.pop(0)
        if canonicalize_name(requirement.name) in wheels:  # `lacking` says if two do not agree
            continue
        before = set(folder.glob("*.whl"))
        fetch(requirement, folder)
        (path,) = set(folder.glob("*.whl")) - before
        wheel = Wheel.load(path)
        wheels[wheel.name] = wheel
        waiting += [found for found in wheel.requirements if machine.lacks(found)]
    return list(wheels.values())


def download(machine: Machine) -> Fetch:
    """With pip: wheels for the machine; of what is installed here, if that will do, the version here."""

    def fetch(requirement: Requirement, folder: Path) -> None:
        wanted, here = f"{requirement.name}{requirement.specifier}", Machine.here()
        version = here.packages.get(canonicalize_name(requirement.name))
        if version is not None and not here.lacks(requirement):
            wanted = f"{requirement.name}=={version}"
        platforms = [word for platform in machine.platforms for word in ("--platform", platform)]
        python = [".".join(machine.python.split(".")[:2]), "--implementation", "cp"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--python-version", *python, *platforms, "--dest", str(folder), wanted], check=True)

    return fetch


def main(arguments: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".whl")
    parser.add_argument("--check", action="store_true", help="fetch nothing")
    options = parser.parse_args(arguments)
    folder, machine, requirements = options.folder, machine or Machine.load(), needed(sources())
    if not options.check:
        with tempfile.TemporaryDirectory() as fresh:
            fetch_all(requirements, machine, Path(fresh), download(machine))
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.whl"):  # two versions of one package stop an installation
                path.unlink()
            for path in Path(fresh).glob("*.whl"):
                (folder / path.name).write_bytes(path.read_bytes())
    paths = sorted(folder.glob("*.whl"))
    problems = lacking(requirements, machine, [Wheel.load(path) for path in paths])
    for path in paths:
        print(f"{path}: {path.stat().st_size:,} bytes")
    for problem in problems:
        print(f"lacking: {problem}", file=sys.stderr)
    if not problems:
        print(f"all of {', '.join(map(str, requirements))} is there, with {len(paths)} wheels")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
