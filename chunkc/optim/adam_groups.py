"""Adam's updates of chunk groups: of runs of elements, in slots or at home, by the kernel of the place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from chunkc.ir.chunks import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.kernels.adam_cpu import warm_up_format
from chunkc.kernels.formats import GradScale
from chunkc.optim.adam_rule import AdamRule, Place, Runs, adam_slots, clipped, update_on_cpu
from chunkc.optim.device_adam import DeviceAdam
from chunkc.optim.group_runs import flat_home
from chunkc.optim.update import GroupUpdate
from chunkc.session import Session


def update_in_slots(
    rule: AdamRule, index: int, runs: Runs, device_adam: DeviceAdam | None, scale: GradScale
) -> GroupUpdate:
    """The update of one group tile by tile: by Triton with a `DeviceAdam`, else on the CPU."""

    def update(slots: Mapping[str, torch.Tensor], tile: Tile) -> None:
        part, place = clipped(runs, tile.begin, tile.end), Place(index, tile.begin)
        if device_adam is not None:
            device_adam.update(rule, adam_slots(slots), part, scale, place)
        else:
            update_on_cpu(rule, adam_slots(slots), part, scale, place)

    return GroupUpdate(index, update)


def update_at_home(rule: AdamRule, session: Session, index: int, runs: Runs, scale: GradScale) -> Callable[[], None]:
    """The update of a group in home memory, by the CPU; home must be as all computation leaves it when it runs."""
    return partial(update_on_cpu, rule, adam_slots(flat_home(session, index)), runs, scale, Place(index, 0))


def compile_for_home(rule: AdamRule, session: Session, index: int, runs: Runs, scale: GradScale) -> None:
    """Compile whatever kernels that update may run."""
    group = session.store.layout.groups[index]
    fmt = rule.format(group.kind_dtype(PARAM), group.kind_dtype(GRAD))
    for l2 in {not hyper.decoupled and hyper.weight_decay != 0 for _, _, hyper in runs}:
        warm_up_format(fmt, l2=l2, scaled=scale.unscale is not None or scale.clip is not None)
