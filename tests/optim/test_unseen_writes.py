"""Whatever a user writes between a backward that updates and its step, bits are those of overlap="none"."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from between_cases import ACTS, Between, UserAct, clip_in_the_step, nothing_but_reading
from harness import array, differences
from slot_cases import ADAMW, Subject, begun_groups

from chunkc.ir.layout import GRAD
from chunkc.runtime.store.checksums import ChecksumTable
from chunkc.runtime.store.shadow_copies import ShadowCopies

pytestmark = pytest.mark.timeout(120)

WEIGHT = "layers.2.weight"
SECOND, SLOW = pytest.mark.second_tier, pytest.mark.slow
WRITES = [act for act in ACTS if act is not clip_in_the_step]
"""All but the one after which a backward does not try: `test_undo`."""
IN_BF16: dict[str, dict[str, Any]] = {
    "split": {}, "whole": {"master_weights": "float32"}, "cpu": {"update_on": "cpu"}
}  # fmt: skip


def trained(overlap: str, act: UserAct, dtype: torch.dtype, **more: Any) -> tuple[list[Any], int]:
    """Losses and the final state; and how many updates of the steps with the act were rolled back."""
    undoable = {"undoable": True} if overlap != "none" else {}
    made = Subject(overlap, dtype=dtype, arguments={**ADAMW, **undoable, **more}, codegen="eager")
    undone = [0]
    now, found, roll_back = Between(made.model, made.optimizer, WEIGHT), [], ShadowCopies.roll_back

    def counting(shadows: ShadowCopies, group: int) -> None:
        undone[0] += 1
        roll_back(shadows, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShadowCopies, "roll_back", counting)
        for step in range(5):
            found.append(array(made.backward(step)))
            assert bool(begun_groups(made)) == (overlap != "none" and step > 0)
            if step in (1, 3):
                act(now)
            made.optimizer.step()
            made.optimizer.zero_grad()
    now.kept.clear()
    return [*found, *made.state()], undone[0]


@cache
def left_alone(dtype: torch.dtype) -> list[Any]:
    return trained("none", nothing_but_reading, dtype)[0]


@pytest.mark.quick(16)
@pytest.mark.parametrize("act", WRITES)
def test_no_write_is_lost(act: UserAct) -> None:
    expected, _ = trained("none", act, torch.float32)
    found, undone = trained("backward", act, torch.float32)
    assert not differences(found, expected)
    is_read = act is nothing_but_reading
    assert (undone > 0) != is_read
    assert bool(differences(expected, left_alone(torch.float32))) != is_read


@pytest.mark.parametrize(
    ("act", "more"),
    [
        pytest.param(act, more, id=f"{act.__name__}-{name}", marks=SECOND if (row + column) % 3 == 0 else SLOW)
        for row, act in enumerate(WRITES)
        for column, (name, more) in enumerate(IN_BF16.items())
    ],
)
def test_nor_in_bf16(act: UserAct, more: dict[str, Any]) -> None:
    """Each write in one of the formats in the second tier, in all of them in the slow tests."""
    found, _ = trained("backward", act, torch.bfloat16, **more)
    assert not differences(found, trained("none", act, torch.bfloat16, **more)[0])


def reads(act: UserAct) -> list[tuple[bool, bool]]:
    """Of the reads of homes before commits after the act: whether of a gradient, and whether of a sample."""
    made = Subject("backward", dtype=torch.float32, arguments={**ADAMW, "undoable": True}, codegen="eager")
    now, found, compute = Between(made.model, made.optimizer, WEIGHT), [], ChecksumTable.compute

    def noting(table: ChecksumTable, checksum: Any, kind: str, data: torch.Tensor, *, sample: bool) -> None:
        found.append((kind == GRAD, sample))
        compute(table, checksum, kind, data, sample=sample)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChecksumTable, "compute", noting)
        for step in range(3):
            made.backward(step)
            act(now)
            made.optimizer.clip_grad_norm_(1e9)
            made.optimizer.step()
            made.optimizer.zero_grad()
    return found


def test_gradients_without_a_use_are_read_in_part() -> None:
    """chunkc's own clipping and step are no use."""
    found = reads(lambda _: None)
    assert (True, True) in found
    assert (True, False) not in found
    assert (False, True) not in found


@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_writes_that_change_no_bit_undo_only_updates_at_home(update_on: str) -> None:
    """The CPU reads gradients at home while it updates them, and may have read what a later write took back."""

    def clip(now: Between) -> None:
        torch.nn.utils.clip_grad_norm_(now.model.parameters(), 1e9)

    expected, _ = trained("none", nothing_but_reading, torch.float32, update_on=update_on)
    found, undone = trained("backward", clip, torch.float32, update_on=update_on)
    assert (undone > 0) == (update_on == "cpu")
    assert not differences(found, expected)


def test_gradients_that_were_read_are_read_in_whole() -> None:
    found = reads(lambda now: now.grad.norm().item())
    assert (True, False) in found
    assert (True, True) in found
