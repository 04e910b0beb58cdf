"""Optimizers with split masters: the same bits wherever they are kept, and never lower bits beside foreign contents."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_models import (
    MLP,
    MODES,
    assert_equal,
    backward,
    batch,
    build,
    copy_gradients,
    snapshot,
    states,
    through_a_file,
    train,
    twin_of,
)
from torch import nn

import chunkc
from chunkc.ir.states import MASTER, MASTER_LOW
from chunkc.optim import elementwise
from chunkc.optim.split_masters import NotedContents, checksum, decode, encode, replace_written
from chunkc.runtime.device import cpu_allocator

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BF16 = torch.bfloat16
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def trained(mode: str, dtype: torch.dtype = BF16) -> tuple[Any, Callable, Any]:
    model, call = build(mode, dtype=dtype)
    optimizer = chunkc.optim.AdamW(model.parameters(), **SETTINGS)
    train(call, optimizer, range(2), dtype)
    return model, call, optimizer


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Saved ones, in the order of the parameters."""
    return [state[MASTER] for _, state in sorted(optimizer.state_dict()["state"].items())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["copy", "load_state_dict", "init"])
def test_masters_are_made_anew_of_what_somebody_wrote(mode: str, way: str) -> None:
    """As in an optimizer that has the moments, and no masters."""
    model, call, optimizer = trained(mode)
    written = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    if way == "load_state_dict":
        model.load_state_dict(written)
    else:
        with torch.no_grad():
            for name, p in model.named_parameters():
                torch.manual_seed(0)
                nn.init.normal_(p) if way == "init" else p.copy_(written[name])
    shadow = twin_of(model)
    saved = copy.deepcopy(optimizer.state_dict())
    for (name, p), master in zip(model.named_parameters(), masters(optimizer), strict=True):
        assert torch.equal(master, p.float()), name
    for state in saved["state"].values():
        del state[MASTER]
    expected = chunkc.optim.AdamW(shadow.parameters())
    expected.load_state_dict(saved)
    backward(call, 2, BF16)
    copy_gradients(model, shadow)
    optimizer.step()
    expected.step()
    assert_equal(snapshot(model), snapshot(shadow))
    assert_equal(states(model, optimizer), states(shadow, expected))


def test_what_was_written_counts_however_late_the_update_comes() -> None:
    model, call, optimizer = trained("adopted")
    weight = model.layers[1].weight
    with torch.no_grad():
        weight.copy_(torch.randn_like(weight))
    for step in (2, 3):  # one step without a gradient, one with
        backward(call, step, BF16)
        if step == 2:
            weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    before = weight.float()
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    (index,) = [i for i, p in enumerate(model.parameters()) if p is weight]
    assert torch.equal(masters(optimizer)[index], before)
    assert not torch.equal(masters(optimizer)[index - 2], model.layers[0].weight.float())


def test_writing_past_version_counters_rounds_to_what_was_written() -> None:
    model, call, optimizer = trained("plain")
    weight = model.layers[0].weight
    weight.data.copy_(torch.randn_like(weight))
    weight.data[:, :9] = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-126, -(2.0**-130), 3e38, float("inf"), 2.0])
    written = weight.detach().clone()
    optimizer.param_groups[0].update(lr=0.0)
    backward(call, 2, BF16)
    weight.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    assert torch.equal(weight, written)


@pytest.mark.quick(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_run_goes_on_to_the_bit_whatever_is_loaded_first(mode: str, model_first: bool, dtype: torch.dtype) -> None:
    model, call, optimizer = trained(mode, dtype)
    saved = through_a_file((model.state_dict(), optimizer.state_dict()))
    train(call, optimizer, range(2, 4), dtype)
    again, again_call = build(mode, dtype=dtype, seed=1)
    if mode == "adopted":
        again_call(batch(0, dtype))
    again_optimizer = chunkc.optim.AdamW(again.parameters())
    loads = [lambda: again.load_state_dict(saved[0]), lambda: again_optimizer.load_state_dict(saved[1])]
    for load in loads if model_first else reversed(loads):
        load()
    train(again_call, again_optimizer, range(2, 4), dtype)
    assert_equal(snapshot(again), snapshot(model))
    assert_equal(states(again, again_optimizer), states(model, optimizer))


def test_masters_come_from_and_go_to_optimizers_with_fp32_ones() -> None:
    model, call, optimizer = trained("adopted")
    full_model, full_call = build("adopted", dtype=BF16, seed=1)
    full_model.load_state_dict(model.state_dict())
    full = chunkc.optim.AdamW(full_model.parameters(), master_weights="float32")
    full.load_state_dict(optimizer.state_dict())
    for p, master in zip(full_model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(full.state[p][MASTER], master)
    train(full_call, full, range(2, 3), BF16)
    train(call, optimizer, range(2, 3), BF16)
    assert_equal(snapshot(full_model), snapshot(model))
    optimizer.load_state_dict(full.state_dict())
    ties = sum(int(((master.view(torch.int32) & 0x1FFFF) == 0x8000).sum()) for master in masters(full))
    different = [int((a != b).sum()) for a, b in zip(masters(optimizer), masters(full), strict=True)]
    assert sum(different) == ties


def test_an_update_that_fails_leaves_no_stale_lower_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call, optimizer = trained("adopted")
    backward(call, 2, BF16)
    calls = []
    update = elementwise.chunk_update

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        update(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(elementwise, "chunk_update", failing)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for p, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(master, p.float())
    optimizer.step()
    assert any(not torch.equal(master, p.float()) for p, master in zip(model.parameters(), masters(optimizer)))


def test_states_are_saved_without_the_budget() -> None:
    _, _, optimizer = trained("adopted")
    cpu_allocator.install()
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + (2 << 20)):
        saved = optimizer.state_dict()
    assert all(state[MASTER].dtype == torch.float32 and MASTER_LOW not in state for state in saved["state"].values())
    assert all(MASTER_LOW in state and MASTER not in state for state in optimizer.state.values())


def test_hooks_of_users_see_fp32_masters() -> None:
    _, _, optimizer = trained("plain")
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, found: seen.append({*found["state"][0]}))
    optimizer.state_dict()
    assert seen == [{"step", "exp_avg", "exp_avg_sq", MASTER}]


@pytest.mark.parametrize(
    ("dtype", "options", "kinds"),
    [
        (BF16, {}, {MASTER_LOW}),
        (BF16, {"master_weights": True, "moments_dtype": BF16}, {MASTER_LOW}),
        (BF16, {"master_weights": "float32"}, {MASTER}),
        (BF16, {"moments_dtype": "int8"}, {MASTER}),
        (BF16, {"master_weights": True, "stochastic_rounding": True}, {MASTER}),
        (BF16, {"stochastic_rounding": True}, set()),
        (torch.float16, {}, {MASTER}),
        (torch.float16, {"master_weights": "split"}, {MASTER}),
        (torch.float32, {}, set()),
    ],
)
def test_which_master_is_kept(dtype: torch.dtype, options: dict[str, Any], kinds: set[str]) -> None:
    parameter = nn.Parameter(torch.ones(300, dtype=dtype))
    optimizer = chunkc.optim.AdamW([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {*optimizer.state[parameter]} & {MASTER, MASTER_LOW} == kinds


# ---------------------------------------------------------------- what is written is seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_a_backward_of_an_earlier_forward_is_refused_by_autograd(mode: str, update_on: str) -> None:
    """As in PyTorch: it would compute with parameters of two steps."""
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.parameters(), update_on=update_on)
    train(call, optimizer, range(1))
    first, second = call(batch(0)), call(batch(1))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_eager_code_that_saved_a_parameter_is_told(mode: str, overlap: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.parameters(), update_on="cpu", overlap=overlap)
    train(call, optimizer, range(1))
    optimizer.synchronize()
    x = torch.ones(1, 128, requires_grad=True)
    saved = model.layers[0](x).sum()
    backward(call, 1)
    optimizer.step()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def written(model: MLP) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))


@pytest.mark.parametrize("mode", ["plain", "placed"])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("before", [True, False])
def test_copies_leave_out_lower_bits_of_other_contents(mode: str, copied: Any, before: bool) -> None:
    """Written to before it was copied, or the copy is written to."""
    model, call = build(mode, dtype=BF16)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
    train(call, optimizer, range(2), BF16)
    if before:
        written(model)
    other, other_optimizer = copied((model, optimizer))
    kept = [state[MASTER] for state in copied(other_optimizer).state_dict()["state"].values()]
    assert before or any(not torch.equal(m, p.float()) for p, m in zip(other.parameters(), kept, strict=True))
    if not before:
        written(other)
    for found, of in ((other, other_optimizer), *(((model, optimizer),) if before else ())):
        masters = [state[MASTER] for _, state in sorted(of.state_dict()["state"].items())]
        assert all(torch.equal(m, p.float()) for p, m in zip(found.parameters(), masters, strict=True))


def test_a_copy_s_chunks_are_laid_out_for_its_states() -> None:
    """8-bit moments want tensors at multiples of 256, which the copied model's layout can only know from the copy."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 90, bias=False), torch.nn.Linear(90, 100, bias=False))
    optimizer = chunkc.optim.AdamW(model.parameters(), moments_dtype="int8")
    other, other_optimizer = copy.deepcopy((model, optimizer))
    chunkc.place(other, chunk_size="1MiB")
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    other_optimizer.step()
    assert all(other_optimizer.state[p]["exp_avg"].dtype == torch.uint8 for p in other.parameters())


# ---------------------------------------------------------------- lower bits and the contents they belong to


NUM_ELEMENTS = (1 << 17) + 77  # several pieces


def test_checksums_see_every_bit_and_every_place() -> None:
    parameter = nn.Parameter(torch.randn(1000).bfloat16())
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
