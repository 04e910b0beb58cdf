"""A placed model's tensors are the device's, over the host's memory: what leaves the process is the CPU's."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import cuda_in_ram
import pytest
import torch
from torch import nn

import chunkc


@pytest.fixture(params=[0, 1], ids=["pinned", "read in place"])
def attribute(request: pytest.FixtureRequest) -> Iterator[int]:
    """Whether the device reads files where they are mapped."""
    with cuda_in_ram.choose(attribute_88=request.param):
        yield request.param


def test_a_saved_model_comes_back_on_the_cpu(attribute: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    home, holds = (f"disk:{tmp_path}", "everything") if attribute else ("cpu", "auto")
    chunkc.place(model, device="cuda", home=home, disk_holds=holds)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    before_nbytes = torch.cuda.memory_allocated()
    file.seek(0)
    loaded = torch.load(file)
    assert torch.cuda.memory_allocated() - before_nbytes <= 4096, "what is small stays on the device, as it was"
    for name in ("0.weight", "1.weight"):
        assert loaded[name].device.type == "cpu"
        assert loaded[name].equal(expected[name])
    on_device = torch.ones(8, device="cuda")
    file = io.BytesIO()
    torch.save(on_device, file)
    file.seek(0)
    assert torch.load(file).is_cuda, "other tensors are none of chunkc's business"
