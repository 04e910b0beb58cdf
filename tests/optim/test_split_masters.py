"""Lower bits of masters are used with the contents they belong to and no others; states outside are fp32 masters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from chunkc.ir.states import MASTER, MASTER_LOW
from chunkc.kernels.split import join_master, split_master
from chunkc.optim.split_masters import NotedContents, checksum, decode, encode, replace_written
from chunkc.runtime.device import cpu_allocator

NUM_ELEMENTS = (1 << 17) + 77  # several pieces


def fresh(num_elements: int = 1000) -> tuple[nn.Parameter, torch.Tensor]:
    """A parameter after an update that ended, and the lower bits of its master."""
    param, lower = split_master(torch.randn(num_elements, generator=torch.Generator().manual_seed(0)))
    return nn.Parameter(param), lower


def updated(noted: NotedContents, parameter: nn.Parameter, lower: torch.Tensor) -> bool:
    """An update that changes nothing; whether it used the lower bits."""
    before = lower.clone()
    noted.begin(parameter, {MASTER_LOW: lower})
    used = torch.equal(lower, before)
    noted.end([parameter])
    return used


def test_lower_bits_stay_while_nobody_writes() -> None:
    noted = NotedContents()
    parameter, lower = fresh()
    assert all(updated(noted, parameter, lower) for _ in range(3))
    _ = parameter.detach().sum() + (parameter * 2).sum().detach()
    assert updated(noted, parameter, lower)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.copy_(p.clone()),
        lambda p: p.clamp_(-1, 1),
        lambda p: nn.init.zeros_(p),
        lambda p: p.detach().add_(1),
        lambda p: nn.ParameterList([p]).load_state_dict({"0": torch.ones_like(p)}),
    ],
)
@torch.no_grad()
def test_lower_bits_go_when_somebody_writes(write) -> None:
    noted = NotedContents()
    parameter, lower = fresh()
    updated(noted, parameter, lower)
    write(parameter)
    assert not noted.belong(parameter)
    noted.begin(parameter, {MASTER_LOW: lower})
    assert torch.equal(join_master(parameter.detach(), lower), parameter.float())
    noted.end([parameter])
    assert updated(noted, parameter, lower)


def test_an_update_that_did_not_end_makes_lower_bits_worthless() -> None:
    noted = NotedContents()
    parameter, lower = fresh()
    updated(noted, parameter, lower)
    noted.begin(parameter, {MASTER_LOW: lower})
    assert not noted.belong(parameter)
    assert not updated(noted, parameter, lower)


@torch.no_grad()
@pytest.mark.parametrize("same", [True, False])
def test_parameters_loaded_after_states_fit_if_they_are_the_same(same: bool) -> None:
    noted = NotedContents()
    parameter, lower = fresh()
    noted.loaded(parameter, changed=True)
    parameter.copy_(parameter.clone() if same else parameter * 2)
    assert updated(noted, parameter, lower) == same
    parameter.copy_(parameter.clone())
    assert not noted.belong(parameter)  # once only


def test_a_copy_has_parameters_and_lower_bits_from_one_moment() -> None:
    noted = NotedContents()
    parameter, lower = fresh()
    noted.begin(parameter, {MASTER_LOW: lower})
    for again in (copy.deepcopy(noted), pickle.loads(pickle.dumps(noted))):
        assert again.belong(nn.Parameter(parameter.detach().clone()))


def test_checksums_see_every_bit_and_every_place() -> None:
    parameter, _ = fresh()
    expected = checksum(parameter)
    for place in (0, 500, 999):
        with torch.no_grad():
            bits = parameter.detach().view(torch.int16)
            bits[place] ^= 1
            assert checksum(parameter) != expected
            bits[place] ^= 1
    assert checksum(parameter) == expected
    with torch.no_grad():
        parameter.copy_(parameter.flip(0).clone())
    assert checksum(parameter) != expected


@pytest.mark.parametrize("transposed", [False, True])
def test_states_outside_are_fp32_masters(transposed: bool) -> None:
    """To the bit and back, whatever the strides, with temporary tensors of a piece only."""
    master = torch.randn(NUM_ELEMENTS // 2, 2, generator=torch.Generator().manual_seed(0))
    param = torch.zeros(master.shape, dtype=torch.bfloat16)
    if transposed:
        param = param.t().contiguous().t()
    lower = torch.empty_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
    assert encode(master, param, lower)
    assert torch.equal(param, master.bfloat16())
    assert not encode(master, param, lower)
    cpu_allocator.install()
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + (8 << 20)):
        found = decode(param, lower)
        encode(master, param, lower)
    assert found.stride() == param.stride()
    ties = (master.view(torch.int32) & 0x1FFFF) == 0x8000
    assert torch.equal(found[~ties], master[~ties])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_fp32_master_follows_the_elements_that_were_written(dtype: torch.dtype, transposed: bool) -> None:
    """Others keep their precision, also where they were written with the same values."""
    master = torch.randn(NUM_ELEMENTS // 2, 2, generator=torch.Generator().manual_seed(0))
    master = master.t().contiguous().t() if transposed else master
    parameter, before = nn.Parameter(master.to(dtype)), master.clone()
    noted = NotedContents()
    noted.begin(parameter, {MASTER: master})
    noted.end([parameter])
    parameter.copy_(parameter.clone())
    parameter[7:9] = 1.5
    noted.begin(parameter, {MASTER: master})
    assert bool((master[7:9] == 1.5).all())
    before[7:9] = 1.5
    assert torch.equal(master, before)


@torch.no_grad()
def test_following_takes_nothing_of_the_compute_tier() -> None:
    master = torch.randn(NUM_ELEMENTS)
    parameter = torch.zeros(NUM_ELEMENTS, dtype=torch.float16)
    cpu_allocator.install()
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes()):
        replace_written(parameter, master)
    assert not master.any()
