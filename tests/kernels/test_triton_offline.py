"""The compiled Triton update, read without a GPU: nothing spills, memory moves in vectors, nothing is contracted."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import adam_cases
import pytest
import torch

from chunkc.kernels import adam_triton
from chunkc.kernels.formats import AdamFormat, GradScale, Run, rounding_key
from chunkc.kernels.hyper import scalar_table

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton is interpreted in this process", allow_module_level=True)

FORMATS = adam_cases.FORMATS
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
QUICK = {"fp32", "bf16-master", "bf16-split", "bf16-only", "bf16-only-int8-moments"}
VARIANTS = [
    pytest.param(name, target, marks=[] if name in QUICK else [pytest.mark.slow], id=f"{name}-{target}")
    for name in FORMATS
    for target in TARGETS
]
VECTOR_NBYTES = 16
NUM_ELEMENTS_PER_THREAD = adam_triton.BLOCK // adam_triton.NUM_THREADS


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def compiled(name: str, target: GPUTarget, offset: int = 0, fused: bool = False) -> Any:
    """Compile for a target what a launch would: types and hints are read off a launch's own arguments.

    `offset`: in elements, where every slot begins in an aligned buffer.
    """
    from chunkc.kernels.adam_triton_kernel import adam_kernel

    fmt = FORMATS[name]
    slots = adam_cases.make_slots(fmt, 4096 + 256).part(0, 4096)
    if offset:
        flat = {field: getattr(slots, field) for field in ("param", "grad", "exp_avg", "exp_avg_sq", "master")}
        slots = replace(slots, **{k: None if t is None else torch.cat([t, t])[offset:][:4096] for k, t in flat.items()})
    arguments = adam_triton.launch_arguments(
        fmt,
        slots,
        adam_triton.work_table([Run(0, 4096, 0)], fmt),
        scalar_table(adam_cases.HYPERS),
        scale=GradScale(*torch.ones(3).unbind()),
        key=rounding_key(0, 1, 0) if fmt.stochastic else None,
        first_element=offset,
    )
    options = adam_triton.launch_options(target.backend, target.warp_size) | (
        {"enable_fp_fusion": True} if fused else {}
    )
    backend = make_backend(target)
    binder = create_function_from_signature(adam_kernel.signature, adam_kernel.params, backend)
    bound, specialization, bound_options = binder(**arguments, **options)
    packed = adam_kernel._pack_args(backend, dict(options), bound, specialization, bound_options)
    parsed, signature, constexprs, attributes = packed
    source = ASTSource(adam_kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def vector_accesses(kernel: Any) -> Counter[str]:
    """Loads and stores of device memory that move 16 bytes, and 8 bytes, at once."""
    if "ptx" in kernel.asm:
        found = re.findall(
            r"\b(ld|st)\.global(?:\.\w+::\w+)*\.(v4\.[bfu]32|v2\.[bfu]64|v2\.[bfu]32|v4\.[bfu]16)", kernel.asm["ptx"]
        )
        return Counter(f"{kind}{16 if width[1:] in WIDE else 8}" for kind, width in ((k, f".{w}") for k, w in found))
    found = re.findall(r"\b(?:global|buffer)_(load|store)_dwordx(4|2)\b", kernel.asm["amdgcn"])
    return Counter(f"{'ld' if kind == 'load' else 'st'}{4 * int(width)}" for kind, width in found)


WIDE = {f"v4.{kind}32" for kind in "bfu"} | {f"v2.{kind}64" for kind in "bfu"}


def wanted_accesses(fmt: AdamFormat) -> Counter[str]:
    """What moves the elements of one thread in the fewest vectors."""
    wanted: Counter[str] = Counter()
    read = [fmt.grad_dtype, fmt.moment_dtype, fmt.moment_dtype, fmt.master_dtype or fmt.param_dtype]
    read += [fmt.param_dtype] if fmt.split else []
    written = [fmt.param_dtype, fmt.moment_dtype, fmt.moment_dtype] + ([fmt.master_dtype] if fmt.master_dtype else [])
    for kind, dtypes in (("ld", read), ("st", written)):
        for dtype in dtypes:
            nbytes = NUM_ELEMENTS_PER_THREAD * dtype.itemsize
            width = min(nbytes, VECTOR_NBYTES)
            wanted[f"{kind}{width}"] += nbytes // width
    return wanted


def spilled(kernel: Any, tmp_path: Path) -> dict[str, int]:
    """Whatever says that registers did not suffice, in bytes or registers, by name."""
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


@pytest.mark.parametrize(("name", "target"), VARIANTS)
def test_nothing_spills_and_memory_moves_in_vectors(name: str, target: str, tmp_path: Path) -> None:
    kernel = compiled(name, TARGETS[target])
    assert not any(spilled(kernel, tmp_path).values())
    assert vector_accesses(kernel) == wanted_accesses(FORMATS[name])


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_slots_at_odd_addresses_lose_the_vectors(target: str) -> None:
    """The check above can fail: with slots that begin at odd elements the launch gives no hints."""
    assert vector_accesses(compiled("bf16-master", TARGETS[target], offset=1)) == Counter()
    assert vector_accesses(compiled("bf16-master", TARGETS[target], offset=8)) != Counter()


def test_lost_alignment_of_rows_loses_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a kernel that does not know that rows begin at multiples of 16."""
    from chunkc.kernels import adam_triton_kernel

    monkeypatch.setattr(adam_triton_kernel, "_UNIT", triton.language.constexpr(1))
    kernel = adam_triton_kernel.adam_kernel
    monkeypatch.setattr(adam_triton_kernel, "adam_kernel", triton.runtime.jit.JITFunction(kernel.fn))
    assert vector_accesses(compiled("fp32", TARGETS["sm_90"])) == Counter()


def test_too_few_registers_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = adam_triton.launch_options("cuda", 32) | {"maxnreg": 32}
    monkeypatch.setattr(adam_triton, "launch_options", lambda *_: options)
    assert any(spilled(compiled("fp32", TARGETS["sm_90"]), tmp_path).values())


def test_nothing_is_contracted() -> None:
    """No multiply and add of the update becomes one operation with one rounding."""
    assert "fma" not in compiled("bf16-master", TARGETS["sm_90"]).asm["ptx"]
    assert "fma" in compiled("bf16-master", TARGETS["sm_90"], fused=True).asm["ptx"]
    num_fma = [
        len(re.findall(r"\bv_(?:pk_)?fmac?_f32", compiled("bf16-master", TARGETS["gfx942"], fused=fused).asm["amdgcn"]))
        for fused in (False, True)
    ]
    assert num_fma[0] < num_fma[1]  # division and square root are made of some
