"""Measure scratch bytes of single operators on this machine's CPU at the user's request, and keep them in a file.

`chunkc calibrate --operators` runs each operator of a model that has no exact rule, on real tensors of the sizes in the
model's graphs. The file has an entry for each operator and metadata of its arguments. Entries hold for the CPU
instructions, the number of threads and the version of torch that they were measured with. Training and `explain` read
the same file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from chunkc.ir.documents import parse_json, read_text
from chunkc.ir.errors import OptionsError
from chunkc.ir.text import message_of
from chunkc.machines.presets import default_hardware_path
from chunkc.runtime.device import cpu_allocator
from chunkc.torch_private import onednn

_NUM_RUNS = 2
"""Runs of each call; the largest scratch counts."""


@dataclass(frozen=True)
class _Spec:
    """Metadata of a tensor on the CPU."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{list(self.stride)}"

    def real(self) -> Tensor:
        """Make a tensor: random if floating-point or complex, else zeros, which are valid indices."""
        numel = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        numel = numel if all(self.shape) else 0
        floats = self.dtype.is_floating_point or self.dtype.is_complex
        storage = torch.randn(numel).to(self.dtype) if floats else torch.zeros(numel, dtype=self.dtype)
        return storage.as_strided(self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """A call of an operator with the metadata of its arguments."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_threads: int

    @property
    def key(self) -> str:
        """Key of the file's entry, the same for calls that take the same bytes."""
        named = [f"{name}={_text(value)}" for name, value in sorted(self.kwargs.items())]
        return f"{self.target}({', '.join([*map(_text, self.args), *named])})"


def operator_call(
    target: torch._ops.OpOverload, args: tuple, kwargs: Mapping[str, Any], num_threads: int
) -> OperatorCall | None:
    """Describe a call; None if a size is symbolic, or a tensor is not strided."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    described = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or any(isinstance(n, torch.SymInt) for n in (*leaf.shape, *leaf.stride())):
                return None
            leaf = _Spec(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)
        elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
        described.append(leaf)
    args, kwargs = pytree.tree_unflatten(described, spec)
    return OperatorCall(target, args, kwargs, num_threads)


def operators_path() -> Path:
    """Return the file of measured operators, in the folder of `default_hardware_path`."""
    return default_hardware_path().with_name("operators.json")


def measured_nbytes(call: OperatorCall) -> int | None:
    """Return the scratch bytes that were measured for a call on this machine; None if it was not measured.

    Raises:
        OptionsError: the file cannot be read, or has other content.
    """
    path = operators_path()
    try:
        changed_ns = os.stat(path).st_mtime_ns
    except OSError:
        return None
    return _entries(path, changed_ns).get(_surroundings(call.num_threads), {}).get(call.key)


def measure_operators(
    calls: Iterable[OperatorCall], show: Callable[[str], None]
) -> tuple[list[tuple[OperatorCall, int]], dict[str, str]]:
    """Run each distinct call, and measure its scratch.

    Args:
        show: called with a line of text before each call.

    Returns:
        (call, bytes) of those that ran; and name of an operator -> why a call of it failed.

    Raises:
        UnsupportedError: the CPU's allocator cannot be metered.
    """
    cpu_allocator.install()
    distinct = {(call.key, call.num_threads): call for call in calls}
    former = torch.get_num_threads()
    measured: list[tuple[OperatorCall, int]] = []
    failed: dict[str, str] = {}
    try:
        for index, call in enumerate(distinct.values(), 1):
            show(f"{call.target} ({index} of {len(distinct)})")
            torch.set_num_threads(call.num_threads)
            try:
                measured.append((call, max(_scratch_nbytes(call) for _ in range(_NUM_RUNS))))
            except Exception as error:
                failed[str(call.target)] = message_of(error)
    finally:
        torch.set_num_threads(former)
    return measured, failed


def save_operators(measured: Iterable[tuple[OperatorCall, int]], path: Path) -> None:
    """Add entries to a file of measured operators; create it and its folder if missing.

    Raises:
        OptionsError: the file cannot be read or written.
    """
    entries = {surroundings: dict(known) for surroundings, known in (_read(path) if path.exists() else {}).items()}
    for call, nbytes in measured:
        entries.setdefault(_surroundings(call.num_threads), {})[call.key] = nbytes
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(entries, indent=1) + "\n")
        partial.replace(path)  # a training that reads meanwhile finds the old file or the new one
    except OSError as error:
        raise OptionsError(f"cannot write {path}: {error.strerror}") from error


@torch.no_grad()
def _scratch_nbytes(call: OperatorCall) -> int:
    """Run a call on new tensors; return the bytes at its peak beyond its operands and results."""
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.real() if isinstance(leaf, _Spec) else leaf, (call.args, dict(call.kwargs))
    )
    before = cpu_allocator.current_nbytes()
    cpu_allocator.reset_peak()
    outputs = call.target(*args, **kwargs)
    nbytes = cpu_allocator.peak_nbytes() - max(cpu_allocator.current_nbytes(), before)
    del outputs
    return nbytes


def _surroundings(num_threads: int) -> str:
    """Describe the CPU instructions, threads and version of torch for which entries hold."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "all"
    kinds = {
        "AVX2": onednn.uses_avx2(),
        "AVX-512": onednn.uses_avx512(),
        "bfloat16": onednn.multiplies_bfloat16(),
        "AMX": onednn.multiplies_tiles(),
    }
    capability = " ".join([torch.backends.cpu.get_cpu_capability(), *(kind for kind, used in kinds.items() if used)])
    return f"cpu {capability}, oneDNN {limit.lower()}, {num_threads} threads, torch {torch.__version__}"


@lru_cache(maxsize=4)
def _entries(path: Path, changed_ns: int) -> dict[str, dict[str, int]]:
    """Read the file once for each of its modification times (`changed_ns`)."""
    return _read(path)


def _read(path: Path) -> dict[str, dict[str, int]]:
    content = parse_json(read_text(path, what="the file of measured operators"), str(path))
    sections = list(content.values()) if isinstance(content, dict) else [None]
    numbers = [n for section in sections if isinstance(section, dict) for n in section.values()]
    if not all(isinstance(s, dict) for s in sections) or not all(type(n) is int and n >= 0 for n in numbers):
        raise OptionsError(f"{path} is no file of measured operators; delete it and run chunkc calibrate --operators")
    return content


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
