"""Plant each fault of `mutations.toml` in a copy of the tree, one at a time, and run the tests that should catch it.

    python tests/mutations/run.py [--only N] [--seconds S] [NAME ...]

Prints a line for each: `caught` with the first test that failed, or `survived`. A fault that leaves the tests running
after S seconds is caught, too: it shows as a test run that does not end. Ends with 1 if a fault has survived.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LIST = Path(__file__).with_name("mutations.toml")

NOT_COPIED = (".git", ".venv*", ".versions", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


@dataclass(frozen=True)
class Mutation:
    """Fault in one line.

    Attributes:
        file: the source, under the root; `old` stands there once, and `new` takes its place.
        tests: files or folders with tests that fail then.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: `old` does not stand in it exactly once.
        """
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old.strip()!r} stands {times} times in {self.file}")
        return source.replace(self.old, self.new)


def mutations() -> tuple[Mutation, ...]:
    """Read the list."""
    rows = tomllib.loads(LIST.read_text())["mutation"]
    return tuple(Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows)


def copied(folder: Path) -> dict[str, str]:
    """Copy the tree to `folder/tree`; return the environment in which `chunkc` and its rooms are the copy's."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    package = folder / "path" / "chunkc"
    package.mkdir(parents=True)
    for path in (tree / "chunkc").iterdir():
        (package / path.name).symlink_to(path)
    for name, place in tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ].items():
        if name.count(".") == 1 and not place.startswith("chunkc/"):
            (package / name.partition(".")[2]).symlink_to(tree / place)
    return os.environ | {
        "PYTHONPATH": str(package.parent),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault may keep a source's size, and follow within the same second
    }


def outcome(tree: Path, environment: dict[str, str], tests: Sequence[str], most_s: float) -> str | None:
    """Run tests until the first failure; return what failed, None if nothing did.

    Raises:
        SystemExit: there are no such tests.
    """
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow"]
    try:
        ended = subprocess.run(
            [*command, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=most_s
        )
    except subprocess.TimeoutExpired:
        return f"no end in {most_s:.0f} s"
    if ended.returncode == 0:
        return None
    if ended.returncode not in (1, 2):  # failed tests; errors of collection
        raise SystemExit(f"pytest {' '.join(tests)} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    return failed[0] if failed else "an error outside the tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults by name; without names, all")
    parser.add_argument("--only", type=int, metavar="N", help="at most N of them, spread evenly")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the tests of one fault (300)")
    options = parser.parse_args()
    listed = mutations()
    if unknown := set(options.names) - {mutation.name for mutation in listed}:
        parser.error(f"no faults are called {', '.join(sorted(unknown))}")
    chosen = [mutation for mutation in listed if not options.names or mutation.name in options.names]
    number = min(options.only or len(chosen), len(chosen))
    chosen = [chosen[index * len(chosen) // number] for index in range(number)]
    survived = []
    with tempfile.TemporaryDirectory(prefix="chunkc-mutations-") as folder:
        environment, tree = copied(Path(folder)), Path(folder) / "tree"
        for mutation in chosen:
            path, start_s = tree / mutation.file, time.monotonic()
            source = path.read_text()
            path.write_text(mutation.planted(source))
            failed = outcome(tree, environment, mutation.tests, options.seconds)
            path.write_text(source)
            survived += [mutation.name] if failed is None else []
            verdict = "survived" if failed is None else f"caught by {failed}"
            print(f"{mutation.name:52} {time.monotonic() - start_s:5.0f} s  {verdict}", flush=True)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} faults are caught")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
