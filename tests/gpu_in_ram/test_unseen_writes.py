"""overlap="auto" on a device: updates in the backward, with the bits of "none" whatever is written in between."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cuda_in_ram
import pytest
import torch
from between_cases import ACTS, Between, UserAct, clip_in_the_step, data_of_a_gradient, nothing_but_reading
from harness import session_of
from torch import Tensor, nn

import chunkc
from chunkc.ir.hardware import Hardware
from chunkc.runtime.store.shadow_copies import ShadowCopies

pytestmark = pytest.mark.arithmetic

NUM_STEPS, WIDTH = 6, 128


@pytest.fixture(autouse=True)
def both_read_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device and the CPU read homes at one rate before a commit, so that each gets some."""
    monkeypatch.setattr(Hardware, "home_read_rates", property(lambda _: (1.0, 1.0)))


def options(budget_nbytes: int, home: str = "cpu") -> dict[str, object]:
    where = {"memory_budget": budget_nbytes, "home": home}
    return {"codegen": "eager", "whole_graph": "never", "activations": "keep", **where}


def built(home: str = "cpu") -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return chunkc.place(nn.Sequential(*layers).to(torch.bfloat16), device="cuda", home=home)


@cache
def smallest() -> int:
    """The smallest budget, and a little more, in which no chunk stays."""
    model = built()
    compiled = torch.compile(model, backend="chunkc", options=options(4096))
    optimizer = chunkc.optim.AdamW(model.parameters())
    with pytest.raises(chunkc.BudgetError) as refused:
        compiled(torch.zeros(4, WIDTH, dtype=torch.bfloat16, device="cuda")).square().mean().backward()
    del optimizer
    return refused.value.minimum_nbytes + (16 << 10)


def trained(overlap: str, act: UserAct, home: str = "cpu") -> tuple[list[Tensor], list[bool], int]:
    """Losses, weights and states; in which steps updates had begun; and how many were rolled back."""
    model = built(home)
    compiled = torch.compile(model, backend="chunkc", options=options(smallest(), home))
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, overlap=overlap)
    now, losses, begun, undone = Between(model, optimizer, "2.weight"), [], [], [0]
    roll_back = ShadowCopies.roll_back

    def counting(shadows: ShadowCopies, group: int) -> None:
        undone[0] += 1
        roll_back(shadows, group)

    with pytest.MonkeyPatch.context() as patch, cuda_in_ram.choose(late=3):
        patch.setattr(ShadowCopies, "roll_back", counting)
        for step in range(NUM_STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
            loss = compiled(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach().cpu())
            del loss
            begun.append(bool(optimizer.scheduler.in_session(session_of(model)).begun))
            if step in (1, 4):
                act(now)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
    now.kept.clear()
    states = [value.cpu() for p in model.parameters() for value in optimizer.state[p].values()]
    return [*losses, *(p.detach().cpu() for p in model.parameters()), *states], begun, undone[0]


@pytest.mark.parametrize("act", ACTS)
def test_no_write_is_lost(act: UserAct) -> None:
    expected, begun, undone = trained("none", act)
    assert not any(begun)
    assert undone == 0
    found, begun, undone = trained("auto", act)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert begun[:2] == [False, True]
    if act is nothing_but_reading:
        assert undone == 0
        assert begun == [False, *[True] * 5]
    elif act is not clip_in_the_step:
        assert undone > 0
    if act is data_of_a_gradient:
        assert begun == [False, True, False, True, True, False]


@pytest.mark.parametrize("act", [nothing_but_reading, data_of_a_gradient])
def test_states_on_a_disk(act: UserAct, tmp_path: Path) -> None:
    home = f"disk:{tmp_path}"
    expected, *_ = trained("none", act, home)
    found, begun, undone = trained("auto", act, home)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert begun[:2] == [False, True]
    assert (undone == 0) == (act is nothing_but_reading)


@pytest.mark.parametrize("act", [nothing_but_reading, data_of_a_gradient])
def test_a_host_with_room_for_one_group_s_copies(act: UserAct, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, *_ = trained("none", act)
    room_nbytes = int(1.5 * 12 * WIDTH * WIDTH)  # a parameter's bytes, with its states
    monkeypatch.setattr("chunkc.optim.update_scheduler.compute_tier_memory", lambda: (1 << 40, 2 * room_nbytes))
    staged, begin = set[int](), ShadowCopies.begin

    def noting(shadows: ShadowCopies, group: int) -> None:
        staged.add(group)
        begin(shadows, group)

    monkeypatch.setattr(ShadowCopies, "begin", noting)
    found, begun, undone = trained("auto", act)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert len(staged) == 1
    assert begun[:2] == [False, True]
    assert undone == 0 or act is data_of_a_gradient
