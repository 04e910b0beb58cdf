"""Every assumption about hardware that only hardware can confirm, one line each, within a minute.

    python bench/gpu_facts.py [--out FILE.json] [--time-limit SECONDS] [--only NAME ...] [--list] [--small]

Each group of facts runs in a child process with a limit of its own: an error that CUDA never forgets, a crash or a
hang costs one line (`fact_processes`). Each fact is printed at once, twice: PASS, FAIL or INFO with its name and
figures, and as a line of JSON. FILE.json has all facts so far, whole at any moment. Exit code: 0, 1 if an assumption
does not hold (FAIL), 2 for wrong arguments. Without a CUDA device, facts about one are INFO. FILE's key `is_complete`
says whether every group was begun.

`--only` takes names of groups as `--list` shows them, also patterns as in a shell. `--small` moves megabytes in the
place of gigabytes: its figures mean nothing, its values do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu.fact_processes import Fact, Group, info, run_group, serve

TIME_LIMIT_S = 60.0
_LEAST_S = 1.0
"""With less time left no group is begun."""
_IMPORTS_S = 20.0
"""More for a group whose child has to import everything itself."""

_HERE = Path(__file__).resolve()


def _find(module: str, function: str, small: bool, *arguments: object) -> Iterator[Fact]:
    """The facts of a function, whose module needs torch and chunkc: imported in the child, if not before."""
    found = importlib.import_module(module)
    return getattr(found, function)(found.SMALL if small else found.FULL, *arguments)


def groups(small: bool) -> list[Group]:
    """All groups, the most valuable first."""

    def device(name: str, limit_s: float = 10.0, function: str = "", *arguments: object, exit_name: str = "") -> Group:
        find = partial(_find, "gpu.device_facts", (function or name).replace("-", "_"), small, *arguments)
        return Group(name, find, limit_s, exit_name=exit_name)

    return [
        Group("imports", partial(_find, "gpu.import_facts", "imports", small), 40.0, cold=True, needs_device=False),
        Group("host", partial(_find, "gpu.host_facts", "host", small), needs_device=False),
        device("device"),
        device("view-read"),
        device("view-write"),
        device("copies-home", 10.0, "copies", "home"),
        device("copies-pin-memory", 10.0, "copies", "pin_memory"),
        device("register-1", 8.0, "register", 1),
        device("register-8", 20.0, "register", 8, exit_name="exit-with-pinned-memory"),
        device("context"),
        device("cublas"),
        device("attention-choice"),
        device("attention-flash", 12.0, "attention", "flash"),
        device("attention-cudnn", 20.0, "attention", "cudnn"),
        device("attention-efficient", 12.0, "attention", "efficient"),
        device("view-to-device", 10.0, "view_copies", "to device"),
        device("view-from-device", 10.0, "view_copies", "from device"),
        device("view-to-host", 10.0, "view_copies", "to host"),
        device("view-from-host", 10.0, "view_copies", "from host"),
        device("view-to-view", 10.0, "view_copies", "to view"),
        device("view-zero", 10.0, "view_copies", "zero"),
        device("view-triton", 25.0),
        device("expandable-segments"),
        device("unpin-in-capture"),
        device("pageable-memory", 25.0),
    ]


class Report:
    """Prints each fact, and keeps the file of all so far, with when each came: it is replaced as a whole."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.facts = path, list[Fact]()
        self._at_s = list[float]()
        self._begin_s = time.monotonic()
        self.save(is_complete=False)

    def add(self, fact: Fact) -> None:
        self.facts.append(fact)
        self._at_s.append(round(time.monotonic() - self._begin_s, 1))
        print(fact.line(), flush=True)
        print(json.dumps(asdict(fact)), flush=True)
        self.save(is_complete=False)

    def save(self, *, is_complete: bool) -> None:
        if self.path is None:
            return
        content = {
            "is_complete": is_complete,
            "seconds": round(time.monotonic() - self._begin_s, 1),
            "facts": [asdict(fact) | {"at_s": at_s} for fact, at_s in zip(self.facts, self._at_s, strict=True)],
        }
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            fresh.write_text(json.dumps(content, indent=1) + "\n")
            os.replace(fresh, self.path)
        finally:
            fresh.unlink(missing_ok=True)


def run(
    wanted: Sequence[Group],
    report: Report,
    limit_s: float,
    small: bool,
    prepare: Callable[[], bool] | None = None,
) -> bool:
    """Run groups one after the other; whether each was begun.

    Args:
        limit_s: of all together.
        prepare: imports what groups need, and says whether they may run in forks of this process.
    """
    prepare = prepare or _prepare
    deadline_s = time.monotonic() + limit_s
    forks, slow, has_device, all_begun = False, False, True, True
    for group in wanted:
        left_s = deadline_s - time.monotonic()
        if left_s < _LEAST_S:
            report.add(info(group.name, "not begun: the time is over"))
            all_begun = False
            continue
        if group.needs_device and not has_device:
            report.add(info(group.name, "no CUDA device"))
            continue
        if not (forks or group.cold or slow):
            forks = prepare()
            slow = not forks
            if slow:
                report.add(info("processes", "CUDA does not work in forks of this process: children import anew"))
        is_fork = forks and not group.cold
        group_s = min(group.limit_s + (0 if is_fork or group.cold else _IMPORTS_S), left_s)
        for fact in run_group(group, group_s, () if is_fork else _command(group, small, group_s)):
            report.add(fact)
            if group.cold and fact.status == "FAIL" and fact.name == group.name and "num_found" in fact.figures:
                slow = True  # what an interpreter of its own did not survive, this one is not to import
            if fact.name == "device" and fact.figures.get("num_devices") == 0:
                has_device = False
    return all_begun


def _prepare() -> bool:
    """Import what groups need, once for all forks; whether forks may be made."""
    with contextlib.suppress(Exception):  # the child says why, as it cannot import it either
        torch = importlib.import_module("torch")
        # Modules of torch's ask CUDA for devices when they are imported: `utils.cpp_extension` to print a warning,
        # Inductor's `runtime.benchmarking` to choose a clock. After that, CUDA works in no fork.
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            importlib.import_module("gpu.host_facts")
            importlib.import_module("gpu.device_facts")
    return not _has_touched_a_gpu()


def _has_touched_a_gpu() -> bool:
    """Whether CUDA would not work in a fork: this process has the driver open, or torch says so in one."""
    opened = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    if any(path.startswith("/dev/nvidia") for path in opened):
        return True
    pid = os.fork()
    if pid == 0:
        torch = sys.modules.get("torch")
        os._exit(int(torch is not None and torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _command(group: Group, small: bool, limit_s: float) -> list[str]:
    small_form = ["--small"] if small else []
    return [sys.executable, str(_HERE), *small_form, "--child", group.name, f"{limit_s:.2f}"]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of all groups")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    known = groups(options.small)
    if options.child is not None:
        name, limit_s, writing = options.child
        serve(next(group for group in known if group.name == name), int(writing), float(limit_s))
    if options.list:
        print("\n".join(group.name for group in known))
        return 0
    for pattern in options.only:
        if not any(fnmatchcase(group.name, pattern) for group in known):
            parser.error(f"no group is called {pattern!r}; --list shows them")
    wanted = [group for group in known if any(fnmatchcase(group.name, pattern) for pattern in options.only)]
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    report = Report(options.out)
    all_begun = run(wanted, report, options.time_limit, options.small)
    report.save(is_complete=all_begun)
    return int(any(fact.status == "FAIL" for fact in report.facts))


if __name__ == "__main__":
    sys.exit(main())
