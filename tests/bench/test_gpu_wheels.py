"""What must travel to a lent GPU machine: imports of the sources against a list of what is there; no network."""

import zipfile
from pathlib import Path

import pytest
from gpu import wheels as gpu_wheels
from gpu.wheels import Machine, Wheel, lacking, needed
from packaging.requirements import Requirement

MACHINE = Machine.load()


def _wheel(folder: Path, name: str, version: str, *requirements: str, python: str = ">=3.10") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")
    return path


def _machine(**packages: str | None) -> Machine:
    return Machine("3.12.3", ("manylinux_2_17_x86_64",), {name.replace("_", "-"): v for name, v in packages.items()})


def test_all_that_is_imported_is_there_but_pydantic():
    """So nothing else needs to travel; a new dependency fails here first."""
    assert lacking(needed(gpu_wheels.sources()), MACHINE) == ["pydantic>=2 is not there"]
    assert MACHINE.packages["torch"] == "2.11.0"
    assert MACHINE.packages["pytest"] is None


def test_imports_are_found_at_any_depth_and_not_where_their_absence_is_caught(tmp_path: Path):
    source = tmp_path / "source.py"
    source.write_text(
        "import a.b, c\nfrom d.e import f\nfrom . import g\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import h\n"
        "try:\n    import i\nexcept (ImportError, OSError):\n    i = None\n"
        "def late():\n    try:\n        import j\n    except OSError:\n        raise\n"
    )
    found = gpu_wheels.imported([source])
    assert set(found) == {"a", "c", "d", "typing", "j"}
    assert found["j"] == f"{source}:13"


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("there", ""),
        ("there>=1.5", ""),
        ("there>=2", "there>=2 is 1.5 there"),
        ("unknown", ""),
        ("unknown>=1", "unknown>=1: which version is there is not known"),
        ("absent", "absent is not there"),
        ("absent; extra == 'html'", ""),
        ("absent; python_version < '3.12'", ""),
        ("absent; sys_platform == 'linux'", 'absent; sys_platform == "linux" is not there'),
    ],
)
def test_what_a_machine_lacks(requirement: str, problem: str):
    assert _machine(there="1.5", unknown=None).lacks(Requirement(requirement)) == problem


def test_what_is_fetched_requires_more_until_nothing_lacks(tmp_path: Path):
    """A too old package, one that it pins, and one whose version there is not known; what will do stays."""
    machine = _machine(old="1.0", unknown=None, fine="3.0")
    shelf = {
        "old": ("2.1", "core==7.0", "fine>=2", "unknown>=4.16", "absent; extra == 'email'"),
        "core": ("7.0", "unknown>=4.14"),
        "unknown": ("4.16",),
    }
    asked: list[str] = []

    def fetch(requirement: Requirement, folder: Path) -> None:
        asked.append(str(requirement))
        version, *requirements = shelf[requirement.name]
        _wheel(folder, requirement.name, version, *requirements)

    wanted = [Requirement("old>=2"), Requirement("fine>=1")]
    wheels = gpu_wheels.fetch_all(wanted, machine, tmp_path, fetch)
    assert asked == ["old>=2", "core==7.0", "unknown>=4.16"]
    assert lacking(wanted, machine, wheels) == []
    shelf["unknown"] = ("4.15",)
    for path in tmp_path.iterdir():
        path.unlink()
    wheels = gpu_wheels.fetch_all(wanted, machine, tmp_path, fetch)
    assert lacking(wanted, machine, wheels) == ["old 2.1 needs unknown>=4.16 is 4.15 there"]
    another = Wheel.load(_wheel(tmp_path, "new", "1.0", python=">=3.13"))
    assert lacking([], machine, [another]) == ["new 1.0 is for python>=3.13, there is 3.12.3"]
