"""Copies of a placed model, and of its states, are at home too: they take no memory of the device."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_in_ram
import pytest
import torch
from device_gpt import pinned_nbytes
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import chunkc
from chunkc.session.movable import present_nbytes

WIDTH = 1024
WEIGHT_NBYTES = 4 * WIDTH * WIDTH


@pytest.fixture
def in_place() -> Iterator[None]:
    """The device reads files where they are mapped."""
    with cuda_in_ram.choose(attribute_88=1):
        yield


@pytest.fixture(params=["pinned", "read in place"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "pinned":
        return placed()
    request.getfixturevalue("in_place")
    return placed(request.getfixturevalue("tmp_path"))


def placed(folder: Path | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    home, holds = ("cpu", "auto") if folder is None else (f"disk:{folder}", "everything")
    return chunkc.place(model, device="cuda", home=home, disk_holds=holds)


def taken_nbytes(work: Callable[[], Any]) -> int:
    """Of the device, at most, while this runs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = work()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in module.parameters()]


def write(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.full(p.shape, value))


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "model": copy.deepcopy,
    "state_dict": lambda model: copy.deepcopy(model.state_dict()),
    "average": AveragedModel,
    "average on the CPU": lambda model: AveragedModel(model, device=torch.device("cpu")),
    "parameter": lambda model: copy.deepcopy(model[0].weight),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_take_none_of_the_device(name: str, model: nn.Module) -> None:
    assert taken_nbytes(lambda: COPIES[name](model)) <= WEIGHT_NBYTES // 8, "what is small is copied there"


def test_a_copy_is_the_model_and_its_own(model: nn.Module) -> None:
    model[1].weight.requires_grad_(False)
    model[3].weight = model[2].weight
    expected = weights(model)
    copied = copy.deepcopy(model)
    write(model, 7.0)
    for found, wanted, p, original in zip(
        weights(copied), expected, copied.parameters(), model.parameters(), strict=True
    ):
        assert found.equal(wanted)
        assert (type(p), p.device, p.requires_grad) == (nn.Parameter, original.device, original.requires_grad)
    assert copied[3].weight is copied[2].weight
    assert "__deepcopy__" not in vars(copied[0].weight)
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)
    file.seek(0)
    kind = torch.load(file)["0.weight"].device.type
    assert kind == "cpu"


def test_copies_of_what_is_the_device_s_stay_there() -> None:
    placed()
    linear = nn.Linear(WIDTH, WIDTH, device="cuda")
    assert taken_nbytes(lambda: copy.deepcopy(linear)) >= WEIGHT_NBYTES
    assert taken_nbytes(lambda: copy.deepcopy(linear.state_dict())) >= WEIGHT_NBYTES


def test_a_copy_s_memory_is_given_back_with_it() -> None:
    model = placed()
    before = pinned_nbytes()
    copied = copy.deepcopy(model)
    assert pinned_nbytes() >= before + 4 * WEIGHT_NBYTES
    del copied
    assert pinned_nbytes() == before


def test_a_copy_outlives_the_model_and_can_be_copied() -> None:
    model = placed()
    expected = weights(model)
    copied = copy.deepcopy(model)
    del model
    gc.collect()
    again = copy.deepcopy(copied)
    assert all(found.equal(wanted) for found, wanted in zip(weights(again), expected, strict=True))
    assert taken_nbytes(lambda: copy.deepcopy(again)) <= WEIGHT_NBYTES // 8


@pytest.mark.usefixtures("in_place")
def test_a_copy_of_what_a_disk_had_is_refused_once_the_model_is_gone(tmp_path: Path) -> None:
    model = placed(tmp_path)
    copied = copy.deepcopy(model)
    del model
    gc.collect()
    with pytest.raises(chunkc.HomeError, match="cpu"):
        copy.deepcopy(copied)


def test_a_copy_can_be_trained() -> None:
    model = placed()
    copied = copy.deepcopy(model)
    compiled = torch.compile(copied, backend="chunkc", options={"memory_budget": 85 << 20, "codegen": "eager"})
    optimizer = chunkc.optim.AdamW(copied.parameters())
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        compiled(torch.ones(4, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert taken_nbytes(lambda: copy.deepcopy(optimizer.state_dict())) <= WEIGHT_NBYTES // 8
    report = chunkc.report(compiled)
    assert report.measured_peak_nbytes <= report.predicted_peak_nbytes <= 85 << 20
    assert torch.cuda.memory_allocated() - before < 85 << 20


def test_auto_does_not_count_a_copy_as_the_device_s() -> None:
    parameters = list(copy.deepcopy(placed()).parameters())
    assert present_nbytes(parameters, parameters[0].device) < WEIGHT_NBYTES


@pytest.mark.arithmetic
@pytest.mark.parametrize("where", ["home", "CPU"])
def test_an_average_is_updated_without_memory_of_the_device(where: str) -> None:
    model = placed()
    device = torch.device("cpu") if where == "CPU" else None
    average = AveragedModel(model, device=device, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    average.update_parameters(model)
    first = weights(model)
    write(model, 2.0)
    assert taken_nbytes(lambda: average.update_parameters(model)) <= WEIGHT_NBYTES // 8
    for found, before in zip(weights(average.module), first, strict=True):
        torch.testing.assert_close(found, before * 0.75 + 0.5)
    assert {p.device.type for p in average.module.parameters()} == {"cpu" if device else "cuda"}


# ---------------------------------------------------------------- saved tensors are the CPU's


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
