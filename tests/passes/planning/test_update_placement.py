"""Where groups are updated: neither side idle, none where one side cannot, and the best of all splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chunkc.ir.hardware import CPU, Hardware
from chunkc.ir.layout import ChunkGroup, ParamSpec, TensorSlice
from chunkc.ir.links import host_links
from chunkc.ir.states import StateFormat
from chunkc.passes.planning.update_placement import cpu_update_s, device_update_s, groups_for_cpu

GPU = Hardware(
    name="gpu", kind="cuda", flops_per_s=1e15, memory_bytes_per_s=4e12, links=host_links(50e9, 50e9),
    cpu_update_bytes_per_s=50e9,
)  # fmt: skip


def group(index: int, numel: int = 1 << 20, dtype: torch.dtype = torch.bfloat16) -> ChunkGroup:
    spec = ParamSpec(f"h.{index}.w", (numel,), (1,), dtype, True)
    return ChunkGroup(index, dtype, True, numel, (TensorSlice(spec, 0),))


GROUPS = [group(index) for index in range(10)]


def test_bytes_of_one_group() -> None:
    """bf16: 2 + 2 + 10 bytes in and 2 + 10 out per element, here and there; with an fp32 master, which alone is read
    of the two, the CPU reads 2 + 12 and writes 2 + 12."""
    assert device_update_s(GROUPS[:1], GPU) == pytest.approx((1 << 20) * 14 / 50e9)
    assert cpu_update_s(GROUPS[:1], GPU) == pytest.approx((1 << 20) * 26 / 50e9)
    full = [replace(GROUPS[0], states=StateFormat(master="float32"))]
    assert device_update_s(full, GPU) == pytest.approx((1 << 20) * 16 / 50e9)
    assert cpu_update_s(full, GPU) == pytest.approx((1 << 20) * 28 / 50e9)
    assert cpu_update_s([group(0, dtype=torch.float32)], GPU) == pytest.approx((1 << 20) * 28 / 50e9)


def test_two_stages_cross_the_link_twice() -> None:
    """LAMB, fp32: all four in (16) and moments out (8); then moments and parameter in (12), and that out (4)."""
    states = [replace(group(0, dtype=torch.float32), states=StateFormat(master="float32"))]
    assert device_update_s(states, GPU, num_stages=2) == pytest.approx((1 << 20) * (16 + 12) / 50e9)
    assert cpu_update_s(states, GPU, num_stages=2) == pytest.approx((1 << 20) * 40 / 50e9)
    assert groups_for_cpu(states * 3, GPU, num_stages=2) == frozenset({0})


def test_no_split_is_better() -> None:
    def seconds(count: int) -> float:
        at_home = cpu_update_s(GROUPS[len(GROUPS) - count :], GPU)
        assert at_home is not None
        return max(at_home, device_update_s(GROUPS[: len(GROUPS) - count], GPU))

    chosen = groups_for_cpu(GROUPS, GPU)
    assert 0 < len(chosen) < 10
    assert chosen == frozenset(range(10 - len(chosen), 10))  # the last ones
    assert seconds(len(chosen)) == min(seconds(count) for count in range(11))


@pytest.mark.parametrize(("rate", "num_at_home"), [(None, 0), (1e6, 0), (1e15, 10)])
def test_extremes(rate: float | None, num_at_home: int) -> None:
    assert len(groups_for_cpu(GROUPS, replace(GPU, cpu_update_bytes_per_s=rate))) == num_at_home


def test_the_cpu_s_rate_is_shared_by_all_devices() -> None:
    one, eight = cpu_update_s(GROUPS, GPU), cpu_update_s(GROUPS, replace(GPU, num_devices=8))
    assert one is not None
    assert eight == pytest.approx(8 * one)
    assert groups_for_cpu([], CPU) == frozenset()
