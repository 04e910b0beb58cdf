"""Arguments of every suite (size, device, time, cases), and its progress messages."""

from __future__ import annotations

import getpass
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

Show = Callable[[str, int, int], None]
"""Told of progress: what is being done, how many parts are done, of how many."""


@dataclass(frozen=True)
class Context:
    """Settings of a suite's run.

    Attributes:
        is_small: use tiny models, hardly repeated.
        device: "cpu" or "cuda", where models compute.
        show: gets progress.
        deadline_s: of `time.monotonic`; cases that would begin later are left out, and say so. None: no limit.
        case_pattern: cases with matching names are run, as in a shell: `llama3-8b@6*`.
        systems: those to run, names or patterns; empty for all.
        facts: what `gpu_facts.py` has written about this machine, if there is such a file.
    """

    is_small: bool
    device: str
    show: Show
    deadline_s: float | None = None
    case_pattern: str = "*"
    systems: tuple[str, ...] = ()
    facts: Path | None = None

    def left_s(self, at_most_s: float) -> float:
        """Seconds until the deadline, not more than `at_most_s`, and 0 once it has passed."""
        if self.deadline_s is None:
            return at_most_s
        return max(0.0, min(at_most_s, self.deadline_s - time.monotonic()))

    @contextmanager
    def code_cache(self) -> Iterator[Path]:
        """Yield a folder for compiled code: Inductor's own if the environment names one, else a temporary one.

        A small run keeps its folder, so that the next one is quick.
        """
        if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
            yield Path(named)
            return
        if self.is_small:
            yield Path(tempfile.gettempdir()) / f"chunkc-bench-{getpass.getuser()}"
            return
        with tempfile.TemporaryDirectory(prefix="chunkc-bench-") as folder:
            yield Path(folder)

    def reply_timeout(self, at_most_s: float) -> Callable[[], float]:
        """Timeout of an answer, to be computed anew each time: until the deadline, and a second more."""
        return lambda: self.left_s(at_most_s) + 1

    @property
    def is_out_of_time(self) -> bool:
        return self.left_s(1.0) <= 0

    def wants_case(self, name: str) -> bool:
        """Whether the case was asked for."""
        return fnmatchcase(name, self.case_pattern)

    def wants_system(self, name: str) -> bool:
        """Whether the subject or peer was asked for."""
        return not self.systems or any(fnmatchcase(name, pattern) for pattern in self.systems)


class Progress:
    """Counts parts and shows them."""

    def __init__(self, show: Show, num_parts: int) -> None:
        self._show, self._num_parts, self._num_done = show, num_parts, 0

    def __call__(self, what: str, num_parts: int = 1) -> None:
        """`what` begins; it is `num_parts` parts of the whole."""
        self._show(what, min(self._num_done, self._num_parts - 1), self._num_parts)
        self._num_done += num_parts
