"""The compiled Triton update, read without a GPU: nothing spills, memory moves in vectors, nothing is contracted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import adam_cases
import numpy as np
import pytest
import torch
from offline import TARGETS, compile_offline, spilled, targets_with_marks, vector_accesses

from chunkc.kernels import elementwise_triton, lamb_triton
from chunkc.kernels.elementwise_triton import BLOCK, NUM_THREADS, launch_options
from chunkc.kernels.formats import AdamFormat, GradScale, Span, rounding_key
from chunkc.kernels.hyperparameters import AdamScalars, scalar_table
from chunkc.kernels.lamb_formats import ROW, LambHyper, lamb_work, lamb_work_of_tensors, new_partials
from chunkc.kernels.pointer_offsets import RoundingSeed, alignment_of, pointer_offsets_of

triton = pytest.importorskip("triton")

if triton.knobs.runtime.interpret:
    pytest.skip("Triton is interpreted in this process", allow_module_level=True)

FORMATS = adam_cases.FORMATS
QUICK = {"fp32", "bf16-master", "bf16-split", "bf16-only", "bf16-only-int8-moments"}
VARIANTS = [
    *(
        pytest.param(name, target, 0, marks=marks if name in QUICK else [pytest.mark.slow], id=f"{name}-{target}")
        for name in FORMATS
        for target, marks in targets_with_marks()
    ),
    *((name, target, 2) for name in ("fp32", "bf16-split", "bf16-only") for target in ("sm_70", "sm_90")),
]
"""Format, target, and how many tensors, each where it lies, but all aligned alike; 0: one chunk."""
VECTOR_NBYTES = 16
NUM_ELEMENTS_PER_THREAD = elementwise_triton.BLOCK // elementwise_triton.NUM_THREADS


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def compiled(name: str, target: str, fused: bool = False, num_tensors: int = 0) -> Any:
    """Compile what a launch would."""
    from chunkc.kernels.elementwise_triton_kernel import elementwise_kernel

    fmt = FORMATS[name]
    slots = adam_cases.make_slots(fmt, 4096 + 256).part(0, 4096)
    addresses = np.arange(num_tensors)[:, None] * alignment_of(fmt)
    seeds = [RoundingSeed(number, rounding_key(0, 1, number)) for number in range(num_tensors)]
    arguments = elementwise_triton.launch_arguments(
        fmt,
        slots,
        elementwise_triton.work_of_tensors([(4096, 0)] * num_tensors, fmt)
        if num_tensors
        else elementwise_triton.work_table([Span(0, 4096, 0)], fmt),
        scalar_table(adam_cases.HYPERS),
        scale=GradScale(*torch.ones(3).unbind()),
        key=rounding_key(0, 1, 0) if fmt.stochastic else None,
        pointer_offsets=pointer_offsets_of(addresses, fmt, seeds) if num_tensors else None,
    )
    backend, _, warp_size = TARGETS[target]
    options = elementwise_triton.launch_options(backend, warp_size) | ({"enable_fp_fusion": True} if fused else {})
    arguments["ARITHMETIC"] = fmt.arithmetic.in_triton
    return compile_offline(elementwise_kernel, arguments, target, options)


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


def scalar_accesses(target: str) -> Counter[str]:
    """The most that may load the scalars of a group: for AMD's devices they are loaded in pairs."""
    return Counter(ld8=len(AdamScalars._fields) // 2) if TARGETS[target][0] == "hip" else Counter()


@pytest.mark.parametrize(("name", "target", "num_tensors"), VARIANTS)
def test_nothing_spills_and_memory_moves_in_vectors(name: str, target: str, num_tensors: int, tmp_path: Path) -> None:
    kernel = compiled(name, target, num_tensors=num_tensors)
    assert not any(spilled(kernel, tmp_path).values())
    wanted = wanted_accesses(FORMATS[name])
    assert wanted <= vector_accesses(kernel) <= wanted + scalar_accesses(target)


def test_nothing_is_contracted_on_amd() -> None:
    """No multiply and add becomes one operation with one rounding. Of NVIDIA's code `test_rules` says so."""
    num_fma = [
        len(re.findall(r"\bv_(?:pk_)?fmac?_f32", compiled("bf16-master", "gfx942", fused=fused).asm["amdgcn"]))
        for fused in (False, True)
    ]
    assert num_fma[0] < num_fma[1]  # division and square root are made of some


# ---------------------------------------------------------------- LAMB: nothing adds atomically, either


FP32, BF16 = torch.float32, torch.bfloat16
LAMB_FORMATS = {"fp32": AdamFormat(FP32, FP32), "bf16-master": AdamFormat(BF16, BF16, master=True)}
LAMB_SCALARS = scalar_table([LambHyper(1e-2, weight_decay=0.1, step=3)])


def compiled_lamb(kernel_name: str, fmt: AdamFormat, target: str, num_tensors: int) -> Any:
    """Compile what a launch would."""
    from chunkc.kernels import lamb_triton_kernel

    slots = adam_cases.make_slots(fmt, 2 * ROW).part(0, ROW)
    (work,) = lamb_work([Span(0, ROW, 0)], [(0, ROW)])
    if num_tensors:
        addresses = np.arange(num_tensors)[:, None] * alignment_of(fmt)
        work = lamb_work_of_tensors([Span(number * ROW, (number + 1) * ROW, 0) for number in range(num_tensors)])
        work = replace(work, pointer_offsets=pointer_offsets_of(addresses, fmt))
    moments = kernel_name == "lamb_moments_kernel"
    arguments = (lamb_triton.moments_arguments if moments else lamb_triton.apply_arguments)(
        fmt, slots, work, LAMB_SCALARS, new_partials(work), GradScale(*torch.ones(3).unbind())
    )
    backend, _, warp_size = TARGETS[target]
    return compile_offline(
        getattr(lamb_triton_kernel, kernel_name), arguments, target, launch_options(backend, warp_size)
    )


def wanted_of_lamb(kernel_name: str, fmt: AdamFormat) -> Counter[str]:
    """For one block; each thread has 8 elements of it."""
    per_thread = BLOCK // NUM_THREADS
    moments = kernel_name == "lamb_moments_kernel"
    read = [FP32, FP32, FP32] + ([fmt.grad_dtype] if moments else [])
    written = [FP32, FP32] if moments else [fmt.param_dtype] + ([FP32] if fmt.master else [])
    nbytes = {"ld": sum(d.itemsize for d in read), "st": sum(d.itemsize for d in written)}
    return Counter({f"{kind}16": n * per_thread // 16 for kind, n in nbytes.items()})


LAMB_VARIANTS = [
    *(
        pytest.param(name, target, 0, marks=marks)
        for target, marks in targets_with_marks()
        for name in ("fp32", "bf16-master")
    ),
    *(("bf16-master", target, 2) for target in ("sm_70", "sm_90")),
]


@pytest.mark.parametrize(("name", "target", "num_tensors"), LAMB_VARIANTS)
@pytest.mark.parametrize("kernel_name", ["lamb_moments_kernel", "lamb_apply_kernel"])
def test_lamb_spills_nothing_and_moves_vectors(
    kernel_name: str, name: str, target: str, num_tensors: int, tmp_path: Path
) -> None:
    kernel = compiled_lamb(kernel_name, LAMB_FORMATS[name], target, num_tensors)
    assert not any(spilled(kernel, tmp_path).values())
    found, wanted = vector_accesses(kernel), wanted_of_lamb(kernel_name, LAMB_FORMATS[name])
    assert all(found[kind] >= wanted[kind] for kind in wanted), f"{found}, wanted {wanted}"
    if target == "sm_90":
        assert "atom" not in kernel.asm["ptx"]
        assert "fma" not in kernel.asm["ptx"]
