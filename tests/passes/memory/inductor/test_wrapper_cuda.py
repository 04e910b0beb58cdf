"""Wrappers that Inductor generated for CUDA devices, replayed without one: what they hold, when, and rounded. Options
for such segments: in force for them alone, known to this version, given back.
"""

from __future__ import annotations

import pytest
import torch
from cuda_wrappers import LAYER, OLDER
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode

from chunkc.ir.errors import UnsupportedError
from chunkc.passes.memory.inductor.cuda import steady_inductor
from chunkc.passes.memory.inductor.memory import inductor_memory
from chunkc.passes.memory.scratch.cuda import cuda_scratch_nbytes

BF16 = torch.bfloat16
aten = torch.ops.aten


def fakes(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cuda:0") -> list[torch.Tensor]:
    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def test_a_layer_is_replayed_kernel_by_kernel() -> None:
    inputs = fakes((128, 256), (256, 256), (256,), dtype=BF16) + fakes((512,), dtype=torch.int64)
    memory = inductor_memory(LAYER, inputs, 1)
    ops = [step.op for step in memory.steps if step.op != "start"]
    kernels = [op for op in ops if op.startswith("triton")]
    assert list(dict.fromkeys(kernels)) == [
        "triton_per_fused_0", "triton_red_fused_1", "triton_per_fused_exp_prepare_softmax_online_sub_2",
        "triton_per_fused_prepare_softmax_online_3", "triton_per_fused_sub_4",
    ]  # fmt: skip
    assert memory.storage_nbytes == (512, 512)  # a scalar, and 256 numbers of 2 bytes
    # addmm's result, two rows of sums of 128 fp32, three tensors of 2 x 4 x 64 x 64 fp32.
    peak = max(step.nbytes for step in memory.steps if step.op == "triton_per_fused_0")
    assert peak == 128 * 256 * 2 + 2 * 512 + 3 * 131072
    # Scores, their two operands and the values, and the sums that are returned.
    assert max(step.nbytes for step in memory.steps) == 4 * 131072 + 512
    released = memory.input_released
    assert released[0] < released[3] == len(memory.steps)


def test_the_shape_of_older_wrappers() -> None:
    memory = inductor_memory(OLDER, fakes((100, 100), (100, 100)), 1)
    ops = [step.op for step in memory.steps]
    assert {"aten.mm", "triton_poi_fused_relu_0", "triton_red_fused_sum_1", "aten.full"} <= set(ops)
    assert memory.outputs[-1] == -1  # the first input is returned
    rounded = -(-40000 // 512) * 512
    # buf1, the scalar and the workspace, while the sum runs.
    assert max(s.nbytes for s in memory.steps if s.op == "triton_red_fused_sum_1") == rounded + 512 + 4096
    assert memory.storage_nbytes[:2] == (512, rounded)
    attention = max(s.nbytes for s in memory.steps if "attention" in s.op)
    assert attention > rounded * 2 + 100 * 64 * 4


@pytest.mark.parametrize("inputs_on", ["cpu", "cuda:1"])
def test_where_the_inputs_lie_changes_nothing(inputs_on: str) -> None:
    """Fake inputs may say anything; the wrapper says where it computes."""
    memory = inductor_memory(OLDER, fakes((100, 100), (100, 100), device=inputs_on), 1)
    assert memory == inductor_memory(OLDER, fakes((100, 100), (100, 100)), 1)


@pytest.mark.parametrize("index", [0, 1])
def test_nor_does_which_gpu_the_wrapper_is_for(index: int) -> None:
    """An operator may meet an input, a buffer of the wrapper's own, and one that an operator made."""
    meets = "buf7 = torch.ops.aten.addmm.default(primals_1, buf1, buf4)\n        buf6 = buf5[0]"
    source = OLDER.replace("buf6 = buf5[0]", meets).replace("index=0", f"index={index}")
    memory = inductor_memory(source, fakes((100, 100), (100, 100), device=f"cuda:{index}"), 1)
    assert [step.op for step in memory.steps].count("aten.addmm") == 1
    assert memory == inductor_memory(source, fakes((100, 100), (100, 100), device="cpu"), 1)


def test_pinned_host_memory_is_refused() -> None:
    source = OLDER.replace("workspace_0.zero_()", "empty_strided_cpu_pinned((4, ), (1, ), torch.float32)")
    with pytest.raises(UnsupportedError, match="pinned"):
        inductor_memory(source, fakes((100, 100), (100, 100)), 1)


def attention(heads: int = 4, keys: int = 4, width: int = 64, rows: int = 256) -> list[torch.Tensor]:
    return fakes((2, heads, rows, width), (2, keys, rows, width), (2, keys, rows, width), dtype=BF16)


def test_flash_attention_s_backward_sums_queries_gradients_in_fp32() -> None:
    query, key, value = attention()
    op = aten._scaled_dot_product_flash_attention_backward.default
    lse = fakes((2, 4, 256))[0]
    seq = torch.empty(0, dtype=torch.int32)
    arguments = (query, query, key, value, query, lse, seq, seq, 256, 256, 0.0, True, seq, seq)
    nbytes = cuda_scratch_nbytes(op, arguments, {}, (query, key, value))
    assert nbytes >= query.numel() * 4 + lse.numel() * 4
    shared = attention(keys=1)
    arguments = (query, query, *shared[1:], query, lse, seq, seq, 256, 256, 0.0, True, seq, seq)
    # Heads that share keys: gradients per query head first.
    assert cuda_scratch_nbytes(op, arguments, {}, (query, *shared[1:])) >= nbytes + 2 * query.numel() * 2 - 4096


def test_flash_attention_splits_keys_only_where_the_device_would_idle() -> None:
    op = aten._scaled_dot_product_flash_attention.default
    small = attention(rows=64)
    large = fakes(*[(16, 16, 2048, 64)] * 3, dtype=BF16)
    assert cuda_scratch_nbytes(op, tuple(small), {}, small[0]) > small[0].numel() * 4
    assert cuda_scratch_nbytes(op, tuple(large), {}, large[0]) < large[0].nbytes // 100


def test_an_odd_head_size_is_copied() -> None:
    op = aten._scaled_dot_product_flash_attention.default
    odd = fakes(*[(16, 16, 2048, 60)] * 3, dtype=BF16)
    assert cuda_scratch_nbytes(op, tuple(odd), {}, odd[0]) >= 3 * odd[0].numel() // 60 * 64 * 2


def test_only_cuda_segments_are_compiled_that_way() -> None:
    with FakeTensorMode():
        there = torch.empty(2, device="cuda:0")
    before = config.shape_padding, config.triton.autotune_pointwise, config.deterministic
    with steady_inductor([torch.zeros(2), 3, None]):
        assert (config.shape_padding, config.triton.autotune_pointwise, config.deterministic) == before
    with steady_inductor([torch.zeros(2), there]):
        assert (config.shape_padding, config.triton.autotune_pointwise, config.deterministic) == (False, False, True)
    assert (config.shape_padding, config.triton.autotune_pointwise, config.deterministic) == before


def test_what_a_user_has_set_that_measures_on_the_device_is_without_effect_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeTensorMode():
        there = torch.empty(2, device="cuda:0")
    with config.patch({"max_autotune": True, "triton.cudagraphs": True}):
        for _ in range(2):
            with steady_inductor([there]):
                assert (config.max_autotune, config.triton.cudagraphs) == (False, False)
        assert config.max_autotune
    (record,) = caplog.records
    assert "options max_autotune, triton.cudagraphs are without effect" in record.getMessage()
    with steady_inductor([there]):
        pass
    assert len(caplog.records) == 1
