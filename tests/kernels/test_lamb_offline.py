"""The compiled LAMB kernels, read without a GPU: nothing spills, memory moves in vectors, nothing adds atomically."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline import TARGETS, compile_offline, spilled, targets_with_marks, vector_accesses

from chunkc.kernels import lamb_triton
from chunkc.kernels.elementwise_triton import BLOCK, NUM_THREADS, launch_options
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Span
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.lamb_formats import ROW, LambHyper, lamb_work, lamb_work_of_tensors, new_partials
from chunkc.kernels.pointer_offsets import alignment_of, pointer_offsets_of

triton = pytest.importorskip("triton")

if triton.knobs.runtime.interpret:
    pytest.skip("Triton is interpreted in this process", allow_module_level=True)

FP32, BF16 = torch.float32, torch.bfloat16
FORMATS = {"fp32": AdamFormat(FP32, FP32), "bf16-master": AdamFormat(BF16, BF16, master=True)}
SCALARS = scalar_table([LambHyper(1e-2, weight_decay=0.1, step=3)])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def make_slots(fmt: AdamFormat) -> AdamSlots:
    dtypes = [fmt.param_dtype, fmt.grad_dtype, FP32, FP32, *([FP32] if fmt.master else [])]
    return AdamSlots(*[torch.zeros(2 * ROW, dtype=dtype) for dtype in dtypes])


def compiled(kernel_name: str, fmt: AdamFormat, target: str, offset: int = 0, num_tensors: int = 0) -> Any:
    """Compile what a launch would; `offset`: where, in elements, parameter and moments begin in aligned buffers."""
    from chunkc.kernels import lamb_triton_kernel

    slots = make_slots(fmt).part(offset, ROW + offset)
    (work,) = lamb_work([Span(0, ROW, 0)], [(0, ROW)])
    if num_tensors:
        addresses = np.arange(num_tensors)[:, None] * alignment_of(fmt)
        work = lamb_work_of_tensors([Span(number * ROW, (number + 1) * ROW, 0) for number in range(num_tensors)])
        work = replace(work, pointer_offsets=pointer_offsets_of(addresses, fmt))
    moments = kernel_name == "lamb_moments_kernel"
    arguments = (lamb_triton.moments_arguments if moments else lamb_triton.apply_arguments)(
        fmt, slots, work, SCALARS, new_partials(work), GradScale(*torch.ones(3).unbind())
    )
    backend, _, warp_size = TARGETS[target]
    return compile_offline(
        getattr(lamb_triton_kernel, kernel_name), arguments, target, launch_options(backend, warp_size)
    )


def num_wanted(kernel_name: str, fmt: AdamFormat) -> Counter[str]:
    """For one block; each thread has 8 elements of it."""
    per_thread = BLOCK // NUM_THREADS
    moments = kernel_name == "lamb_moments_kernel"
    target = FP32
    read = [FP32, FP32, target] + ([fmt.grad_dtype] if moments else [])
    written = [FP32, FP32] if moments else [fmt.param_dtype] + ([FP32] if fmt.master else [])
    nbytes = {"ld": sum(d.itemsize for d in read), "st": sum(d.itemsize for d in written)}
    return Counter({f"{kind}16": n * per_thread // 16 for kind, n in nbytes.items()})


@pytest.mark.parametrize("target", [pytest.param(t, marks=marks) for t, marks in targets_with_marks()])
@pytest.mark.parametrize("name", ["fp32", "bf16-master"])
@pytest.mark.parametrize("kernel_name", ["lamb_moments_kernel", "lamb_apply_kernel"])
def test_nothing_spills_and_memory_moves_in_vectors(kernel_name: str, name: str, target: str, tmp_path: Path) -> None:
    kernel = compiled(kernel_name, FORMATS[name], target)
    assert not any(spilled(kernel, tmp_path).values())
    found, wanted = vector_accesses(kernel), num_wanted(kernel_name, FORMATS[name])
    assert all(found[kind] >= wanted[kind] for kind in wanted), f"{found}, wanted {wanted}"
    if target == "sm_90":
        assert "atom" not in kernel.asm["ptx"]
        assert "fma" not in kernel.asm["ptx"]
        assert vector_accesses(compiled(kernel_name, FORMATS[name], target, offset=1)) == Counter()


@pytest.mark.parametrize("target", ["sm_70", "sm_90"])
@pytest.mark.parametrize("kernel_name", ["lamb_moments_kernel", "lamb_apply_kernel"])
def test_many_tensors_are_moved_in_vectors_too(kernel_name: str, target: str, tmp_path: Path) -> None:
    """Each where it lies, all aligned alike."""
    kernel = compiled(kernel_name, FORMATS["bf16-master"], target, num_tensors=2)
    assert not any(spilled(kernel, tmp_path).values())
    found, wanted = vector_accesses(kernel), num_wanted(kernel_name, FORMATS["bf16-master"])
    assert all(found[kind] >= wanted[kind] for kind in wanted), f"{found}, wanted {wanted}"
