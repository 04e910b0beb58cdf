"""Predicted bytes against those that torch's allocator gave out, by PyTorch's own CUDA host code. No arithmetic."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from device_gpt import GPT, MEDIUM, SMALL, pinned_nbytes, smallest_budget, train
from device_overhead import MOST_LEFT_NBYTES, unused_nbytes
from device_process import on_a_device
from torch import nn

import chunkc
from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.cuda import cuda_scratch_nbytes
from chunkc.passes.memory.scratch.cuda_reduction import outputs_at_once, reduces_fastest, reduction_nbytes

BUDGET_NBYTES = 264 << 20
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.mark.parametrize("overlap", ["none", "backward"])
@DTYPES
def test_what_is_pinned_at_home_is_what_was_explained(dtype: torch.dtype, overlap: str) -> None:
    before_nbytes = pinned_nbytes()
    model = chunkc.place(GPT(**MEDIUM).to(dtype), device="cuda")
    options = {"memory_budget": BUDGET_NBYTES, "codegen": "eager", "whole_graph": "never", "activations": "keep"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), overlap=overlap)
    shape = 2, MEDIUM["sequence"]
    for _ in range(2):
        compiled(torch.zeros(shape, dtype=torch.long, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    chunkc.synchronize(model)
    with torch.device("meta"):
        on_paper, tokens = GPT(**MEDIUM).to(dtype), torch.zeros(shape, dtype=torch.long)
    explained = chunkc.explain(on_paper, tokens, hardware="h100", overlap=overlap, **options)
    assert pinned_nbytes() - before_nbytes == chunkc.report(model).home_nbytes == explained.home_nbytes


EAGER: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}),
    "fp32": (torch.float32, {}),
    "saved values offloaded": (torch.bfloat16, {"activations": "offload"}),
    "saved values recomputed": (torch.bfloat16, {"activations": "rerun"}),
    "losses in tiles": (torch.bfloat16, {"loss_tile_rows": 256}),
    "autocast": (torch.float32, {"autocast": torch.bfloat16}),
    "autocast, from a disk": (torch.float32, {"autocast": torch.bfloat16, "home": "disk"}),
}


@cache
def smallest(dtype: torch.dtype) -> int:
    return smallest_budget(MEDIUM, dtype, batch=4)


def assert_to_the_byte(report: chunkc.Report, budget_nbytes: int) -> None:
    """But for the same bytes at each moment, what is left of the tables' room."""
    (left_nbytes,) = set(unused_nbytes(report).values())
    assert 0 < left_nbytes <= MOST_LEFT_NBYTES
    assert report.predicted_peak_nbytes <= budget_nbytes


@pytest.mark.parametrize("name", EAGER)
def test_eager_code_takes_what_was_predicted_to_the_byte(name: str) -> None:
    """At every moment, with the smallest budget, which what is special makes smaller."""
    dtype, how = EAGER[name]
    budget_nbytes = smallest_budget(MEDIUM, dtype, batch=4, **how) if how else smallest(dtype)
    assert not how or budget_nbytes < smallest(dtype)
    assert_to_the_byte(train(MEDIUM, dtype, budget_nbytes, batch=4, keep=True, **how).report, budget_nbytes)


GENERATIONS = [
    (75, torch.float16),
    (75, torch.bfloat16),
    (75, torch.float32),
    (80, torch.bfloat16),
    (86, torch.float16),
]


@pytest.mark.parametrize(("capability", "dtype"), GENERATIONS, ids=[f"{c}-{d}" for c, d in GENERATIONS])
def test_so_it_does_on_other_generations(capability: int, dtype: torch.dtype) -> None:
    """Their attention differs: a Turing card has the memory-efficient one, and for bf16 none but the math."""
    script = f"""
import torch
from device_gpt import MEDIUM, smallest_budget, train
from device_overhead import unused_nbytes
dtype = {dtype}
shape = MEDIUM | {{"layers": 2}}
budget_nbytes = smallest_budget(shape, dtype, batch=4)
report = train(shape, dtype, budget_nbytes, batch=4, keep=True, steps=3).report
assert torch.cuda.get_device_capability() == divmod({capability}, 10)
assert report.predicted_peak_nbytes <= budget_nbytes
print(*set(unused_nbytes(report).values()))
"""
    (left_nbytes,) = map(int, on_a_device(f"capability={capability}", script).split())
    assert 0 < left_nbytes <= MOST_LEFT_NBYTES


@DTYPES
def test_nor_more_where_the_backward_updates_what_stays(dtype: torch.dtype) -> None:
    """All stays, but for its gradients. The updates are moments of the backward, too."""
    how: dict[str, Any] = {"batch": 4, "update_on": "device", "overlap": "backward"}
    budget_nbytes = train(MEDIUM, dtype, 1 << 34, keep=True, **how).report.predicted_peak_nbytes
    report = train(MEDIUM, dtype, budget_nbytes, keep=True, **how).report
    while report.num_resident_chunks < report.num_chunks:
        budget_nbytes += 4 << 20
        report = train(MEDIUM, dtype, budget_nbytes, keep=True, **how).report
    assert sum(name.startswith("update.") for name, _, _ in report.moments) == report.num_chunks
    assert_to_the_byte(report, budget_nbytes)


@DTYPES
def test_norms_are_taken_in_slots_and_no_gradient_is_read(dtype: torch.dtype) -> None:
    """But for the first step's, before which nobody has asked. At every moment, to the byte."""
    how: dict[str, Any] = {"batch": 4, "clip": 0.1, "clip_in_step": True}
    budget_nbytes = smallest_budget(MEDIUM, dtype, **how)
    reports = [train(MEDIUM, dtype, budget_nbytes, keep=True, steps=steps, **how).report for steps in (1, 4)]
    assert_to_the_byte(reports[1], budget_nbytes)
    assert reports[0].gradients_read_nbytes == reports[1].gradients_read_nbytes > 0


@DTYPES
def test_inductor_s_code_takes_hardly_less(dtype: torch.dtype) -> None:
    """At each moment within a thousandth. In fp32, attention's seeds are counted, which are on the CPU."""
    budget_nbytes = smallest_budget(MEDIUM, dtype, batch=4, codegen="inductor")
    report = train(MEDIUM, dtype, budget_nbytes, batch=4, keep=True, codegen="inductor").report
    unused = unused_nbytes(report).values()
    assert 0 < min(unused) <= MOST_LEFT_NBYTES
    assert max(unused) - min(unused) < 0.001 * budget_nbytes
    assert report.predicted_peak_nbytes <= budget_nbytes


SHAPES = [
    ((1024, 2048), [0]), ((1024, 2048), [1]), ((4096, 1024), [0]), ((1 << 20,), [0]), ((4, 256, 512), [0, 1]),
    ((4, 256, 512), [2]), ((100_000, 7), [0]), ((100_000, 6), [0]), ((7, 100_000), [1]), ((8, 64, 32, 32), [0, 2, 3]),
    ((2048, 8), [0]), ((3000, 30), [0]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_reductions_to_the_byte(shape: tuple[int, ...], dims: list[int], dtype: torch.dtype) -> None:
    given = torch.empty(shape, device="cuda", dtype=dtype)
    for op, itemsize in ((torch.sum, 4), (torch.amax, dtype.itemsize), (torch.var_mean, 16)):
        op(given, dims)
        before_nbytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = op(given, dims)
        made = made if isinstance(made, tuple) else (made,)
        taken_nbytes = torch.cuda.max_memory_allocated() - before_nbytes - sum(rounded_nbytes(t.nbytes) for t in made)
        num_outputs = made[0].numel()
        parts = reduction_nbytes(
            num_outputs,
            given.numel() // num_outputs,
            over_fastest=reduces_fastest(given, dims),
            vector=outputs_at_once(given, dims),
            itemsize=itemsize,
        )
        assert taken_nbytes == sum(map(rounded_nbytes, parts)), op.__name__


CONVOLUTIONS = {
    "of images": (nn.Conv2d(16, 24, 3, stride=2, padding=1), (4, 16, 33, 33)),
    "of pixels": (nn.Conv2d(16, 24, 1, bias=False), (4, 16, 20, 20)),
    "patches": (nn.Conv2d(3, 128, 8, stride=8), (2, 3, 32, 32)),
    "of a sequence": (nn.Conv1d(40, 64, 3, padding=1), (2, 40, 3000)),
    "depthwise": (nn.Conv2d(32, 32, 7, padding=3, groups=32), (4, 32, 56, 56)),
    "transposed": (nn.ConvTranspose2d(16, 8, 2, stride=2), (4, 16, 20, 20)),
    "of many results": (nn.Conv2d(4, 8, 3, padding=1), (32, 4, 96, 96)),
}


@pytest.mark.parametrize("needs_image", [True, False], ids=["", "first"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["", "channels last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_without_cudnn_to_the_byte(name: str, layout: torch.memory_format, needs_image: bool) -> None:
    """The device has no cuDNN: forward and backward as ATen's own kernels are planned."""
    assert not torch.backends.cudnn.enabled
    module, shape = CONVOLUTIONS[name]
    if len(shape) != 4 and layout is torch.channels_last:
        pytest.skip("images only")
    weight, bias = (None if p is None else p.detach().to("cuda") for p in (module.weight, module.bias))
    image = torch.empty(shape, device="cuda").contiguous(memory_format=layout)
    rest = (module.stride, module.padding, module.dilation, module.transposed, module.output_padding, module.groups)
    aten = torch.ops.aten
    given = (image, weight, bias, *map(list, rest[:3]), rest[3], list(rest[4]), rest[5])
    _took_its_bound(aten.convolution.default, given)
    grad = torch.empty_like(aten.convolution.default(*given), memory_format=layout)
    sizes = None if bias is None else list(bias.shape)
    mask = [needs_image, True, bias is not None]
    _took_its_bound(aten.convolution_backward.default, (grad, image, weight, sizes, *given[3:], mask))


def _took_its_bound(op: torch._ops.OpOverload, given: tuple[Any, ...]) -> None:
    op(*given)  # what libraries keep is there from now on
    before_nbytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = op(*given)
    results = [t for t in (made if isinstance(made, tuple) else (made,)) if t is not None]
    results_nbytes = sum(rounded_nbytes(t.untyped_storage().nbytes()) for t in results)
    taken_nbytes = torch.cuda.max_memory_allocated() - before_nbytes - results_nbytes
    assert taken_nbytes == cuda_scratch_nbytes(op, given, {}, made), op


# ---------------------------------------------------------------- a user's own statistics


HUGE = 1 << 34
MIB = 1 << 20


def test_a_user_s_peaks_are_since_his_own_last_reset() -> None:
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    report = train(SMALL, torch.float32, HUGE).report
    assert torch.cuda.max_memory_allocated() == report.measured_peak_nbytes
    larger = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    allocated = torch.cuda.memory_allocated()
    del larger
    again = train(SMALL, torch.float32, HUGE).report
    assert again.measured_peak_nbytes is not None
    assert again.measured_peak_nbytes < allocated
    assert torch.cuda.max_memory_allocated() == torch.accelerator.max_memory_allocated() == allocated
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] == allocated
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    train(SMALL, torch.float32, HUGE)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
