"""Triton kernels compiled for GPUs that are not there, and figures from their code: vectors, spills."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from chunkc.kernels.elementwise_triton import BLOCK, NUM_THREADS, launch_options

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_70": ("cuda", 70, 32),
    "sm_75": ("cuda", 75, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and threads of a warp."""

_TIERS: dict[str, list[Any]] = {
    "sm_90": [],
    "gfx942": [],
    "sm_80": [pytest.mark.second_tier],
    "sm_100": [pytest.mark.second_tier],
}


def targets_with_marks() -> list[tuple[str, list[Any]]]:
    """Return the targets with their marks: one of each maker is of the quick tier.

    Those that differ little from another one are slow.
    """
    return [(name, _TIERS.get(name, [pytest.mark.slow])) for name in TARGETS]


_WIDE = {f"v4.{kind}32" for kind in "bfu"} | {f"v2.{kind}64" for kind in "bfu"}


def compile_offline(
    kernel: Any, arguments: Mapping[str, Any], target_name: str, folder: Path, options: Mapping[str, Any] = {}
) -> Any:
    """Compile for a target what a launch would: types and hints are read off a launch's own arguments.

    Args:
        folder: for Triton's cache.
        options: in place of a launch's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    maker, _, warp_size = TARGETS[target_name]
    options = {**launch_options(maker, warp_size), **options}
    target = GPUTarget(*TARGETS[target_name])
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, bound_options = binder(**arguments, **options)
    packed = kernel._pack_args(backend, dict(options), bound, specialization, bound_options)
    parsed, signature, constexprs, attributes = packed
    source = ASTSource(kernel, signature, constexprs, attributes)
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder / "triton")):
        return triton.compile(source, target=target, options=parsed.__dict__)


def fewest_accesses(read: Iterable[torch.dtype], written: Iterable[torch.dtype]) -> Counter[str]:
    """What moves the elements of one thread in the fewest vectors."""
    wanted: Counter[str] = Counter()
    for kind, dtypes in (("ld", read), ("st", written)):
        for dtype in dtypes:
            nbytes = BLOCK // NUM_THREADS * dtype.itemsize
            width = min(nbytes, 16)
            wanted[f"{kind}{width}"] += nbytes // width
    return wanted


def vector_accesses(kernel: Any) -> Counter[str]:
    """Loads and stores of device memory that move 16 bytes, and 8 bytes, at once: ld16, st16, ld8, st8."""
    if "ptx" in kernel.asm:
        found = re.findall(
            r"\b(ld|st)\.global(?:\.\w+::\w+)*\.(v4\.[bfu]32|v2\.[bfu]64|v2\.[bfu]32|v4\.[bfu]16)", kernel.asm["ptx"]
        )
        return Counter(f"{kind}{16 if width in _WIDE else 8}" for kind, width in found)
    found = re.findall(r"\b(?:global|buffer)_(load|store)_dwordx(4|2)\b", kernel.asm["amdgcn"])
    return Counter(f"{'ld' if kind == 'load' else 'st'}{4 * int(width)}" for kind, width in found)


def spilled(kernel: Any, tmp_path: Path) -> dict[str, int]:
    """Whatever says that registers did not suffice, in bytes or registers, by name."""
    import triton

    if "cubin" not in kernel.asm:
        names = r"vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
        found = re.findall(rf"\.({names}):\s+(\d+)", kernel.asm["amdgcn"])
    else:
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        output = subprocess.run([tool, "-res-usage", binary], check=True, capture_output=True, text=True).stdout
        found = re.findall(r"\b(STACK|LOCAL):(\d+)", output)
    assert len(found) >= 2, "the compiler's report has another form"
    return {name: int(count) for name, count in found}
