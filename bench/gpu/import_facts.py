"""Whether every package that the project needs can be imported, and its version. Needs nothing but Python."""

from __future__ import annotations

import importlib
import platform
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from gpu.fact_processes import Fact, info, judged

FULL = SMALL = None

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_FOR_BENCHMARKS = ("triton>=3.6", "transformers>=5", "pytest>=7", "pytest-timeout>=2")
_OPTIONAL = ("pytest-xdist", "ninja", "safetensors", "accelerate", "torchao", "bitsandbytes", "deepspeed", "matplotlib")
_MODULES = {"nvidia-ml-py": "pynvml", "pytest-timeout": "pytest_timeout", "pytest-xdist": "xdist"}
_REQUIREMENT = re.compile(r"([A-Za-z0-9-]+)(?:>=([0-9.]+))?")


def imports(size: None) -> Iterator[Fact]:
    """Import all, one by one; what is printed last names the one at fault."""
    needed = (*tomllib.loads(_PROJECT.read_text())["project"]["dependencies"], *_FOR_BENCHMARKS)
    versions: dict[str, str] = {"python": platform.python_version()}
    problems: list[str] = []
    for requirement in needed:
        match = _REQUIREMENT.match(requirement)
        assert match is not None
        name, least = match[1], match[2] or "0"
        found, problem = _version(name)
        versions[name] = found
        if problem:
            problems.append(problem)
        elif _numbers(found) < _numbers(least):
            problems.append(f"{name} is {found}, and {least} is needed")
    yield judged(not problems, "imports", "; ".join(problems), **versions)
    print("importing chunkc", flush=True)
    package = importlib.import_module("chunkc")
    backend = importlib.import_module("torch._dynamo").lookup_backend("chunkc")
    problem = "torch.compile knows no backend of that name"
    yield judged(callable(backend), "imports-chunkc", problem, path=package.__file__)
    others = {name: _version(name)[0] for name in _OPTIONAL}
    yield info("imports-optional", **others)


def _version(name: str) -> tuple[str, str]:
    """The version of a package, and what is wrong with it."""
    print("importing", name, flush=True)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing", f"{name} is not installed"
    try:
        importlib.import_module(_MODULES.get(name, name))
    except Exception as error:
        return version, f"{name} {version} cannot be imported: {type(error).__name__}: {error}"
    return version, ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:2])
