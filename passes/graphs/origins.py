"""Find the module and line of the user's program that an operation comes from, as tracing noted them on the node."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx

from chunkc.ir.program import Origin
from chunkc.passes.graphs.graphs import is_compute, module_path

_FRAME = re.compile(
    r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n(?! *File ") *(?P<code>[^\n]*))?', re.MULTILINE
)
_TORCH = str(Path(torch.__file__).parent)


def origins(graph: fx.Graph) -> tuple[Origin, ...]:
    """Return the origin of every operation of a graph, in order."""
    return tuple(origin_of(node) for node in graph.nodes if is_compute(node))


def origin_of(node: fx.Node) -> Origin:
    """Return the user's module and line of a node; each empty if the trace does not say."""
    return _interned(module_path(node), source_line(node.meta.get("stack_trace") or ""))


@lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """Return `file.py:12, code` of the innermost line of a stack trace outside PyTorch; empty if there is none.

    Args:
        stack_trace: frames as Python's `traceback` prints them, outermost first, as tracing leaves them on a node.
    """
    for frame in reversed(list(_FRAME.finditer(stack_trace))):
        path = frame["file"]
        if not path.startswith((_TORCH, "<")):  # "<": code without a file, such as the caller of the model in tracing
            return sys.intern(", ".join(filter(None, (f"{Path(path).name}:{frame['line']}", frame["code"]))))
    return ""


@lru_cache(maxsize=4096)
def _interned(module: str, source: str) -> Origin:
    """Share one record among equal origins: a deep model has few, and a million operations."""
    return Origin(module, source)
