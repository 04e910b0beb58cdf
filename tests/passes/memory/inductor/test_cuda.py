"""Options of Inductor for CUDA segments: in force for them alone, known to this version, given back."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode

from chunkc.passes.memory.inductor.cuda import steady_inductor


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
