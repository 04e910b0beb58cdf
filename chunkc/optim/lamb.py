"""LAMB, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chunkc.ir.chunks import GRAD, PARAM
from chunkc.ir.errors import OptionsError
from chunkc.ir.states import FLOAT32, MASTER, StateFormat
from chunkc.kernels.formats import AdamFormat, GradScale
from chunkc.kernels.lamb_cpu import warm_up
from chunkc.kernels.lamb_formats import LambHyper
from chunkc.optim import device_adam as device_adams
from chunkc.optim.chunked_optimizer import ChunkedOptimizer
from chunkc.optim.group_runs import Task, flat_home, runs_of
from chunkc.optim.lamb_groups import GroupLamb, LambWorks, rows_apart
from chunkc.optim.overlap_mode import NONE
from chunkc.optim.states import flats_of, place_in_group, put_back
from chunkc.optim.update import GroupUpdate, PreparedUpdate
from chunkc.optim.update_on import DEVICE
from chunkc.optim.values import flag, number
from chunkc.session import Session


class LAMB(ChunkedOptimizer):
    """LAMB (You et al., arXiv:1904.00962): Adam's direction, scaled tensor by tensor by norm(parameter) / norm(update).

    Args:
        params: parameters, or groups of them with their own values of all that follows but the last two.
        weight_decay: decoupled: it joins the direction before its norm is taken.
        always_adapt: also scale where `weight_decay` is 0, as the paper does (NVIDIA's "nvlamb"). By default groups
            without weight decay (biases, norms) have a ratio of 1, as in apex and timm.
        update_on, overlap: as for `AdamW`. Norms are summed up in fp32: on another device their last bits may differ.

    A parameter in bf16 or fp16 has an fp32 master. Gradients are not clipped: see `torch.nn.utils.clip_grad_norm_`.
    """

    _num_stages = 2

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        always_adapt: bool = False,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
    ) -> None:
        self._works: dict[tuple[torch.device, bool], LambWorks] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params, {**defaults, "always_adapt": always_adapt}, update_on, overlap, states=StateFormat(master=FLOAT32)
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_works": {}}

    def hyper_at(self, group: Mapping[str, Any], step: int) -> LambHyper:
        try:
            adapt = number(group, "weight_decay") != 0 or flag(group, "always_adapt")
            return LambHyper(**self._common_hyper(group, step), adapt=adapt)
        except ValueError as error:
            raise OptionsError(str(error)) from error

    def _works_on(self, device: torch.device, *, by_triton: bool) -> LambWorks:
        key = (device, by_triton)
        if key not in self._works:
            self._works[key] = LambWorks(device, by_triton=by_triton)
        return self._works[key]

    def runs(self, session: Session, index: int, tasks: Sequence[Task]) -> Sequence[Any]:
        return runs_of(session, index, tasks, merged=False)

    def _in_slots(
        self, prepared: PreparedUpdate, runs: Mapping[int, Sequence[Any]], scale: GradScale
    ) -> dict[int, GroupUpdate]:
        device = prepared.session.store.tier.device
        works = self._works_on(device, by_triton=device_adams.computes_by_triton(device))
        found = {}
        for index, of_group in runs.items():
            tiles = [(tile.begin, tile.end) for tile in prepared.tiles if tile.group == index and tile.stage == 0]
            found[index] = GroupUpdate(index, GroupLamb(works, of_group, tiles, scale).update)
        return found

    def at_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> Callable[[], None]:
        works = self._works_on(torch.device("cpu"), by_triton=False)
        whole = (0, session.store.layout.groups[index].numel)
        return partial(GroupLamb(works, runs, [whole], scale).update_whole, flat_home(session, index), *whole)

    def compile_for_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> None:
        home = flat_home(session, index)
        warm_up(AdamFormat(home[PARAM].dtype, home[GRAD].dtype, master=MASTER in home))

    def _in_place(self, tasks: list[tuple[torch.Tensor, int]], scale: GradScale) -> None:
        by_device: dict[torch.device, list[tuple[torch.Tensor, int]]] = {}
        for task in tasks:
            by_device.setdefault(task[0].device, []).append(task)
        for device, on_device in by_device.items():
            states = [self._state_on_tier(parameter) for parameter, _ in on_device]
            sizes = [parameter.numel() for parameter, _ in on_device]
            offsets = [(place_in_group(parameter) or (0, 0))[1] for parameter, _ in on_device]
            ranges = rows_apart(offsets, sizes)
            runs = [
                (*where, self.next_hyper(parameter, self.param_groups[index]))
                for where, (parameter, index) in zip(ranges, on_device, strict=True)
            ]
            works = self._works_on(device, by_triton=device_adams.computes_by_triton(device))
            lamb = GroupLamb(works, runs, ranges, scale)
            for where, (parameter, _), state in zip(ranges, on_device, states, strict=True):
                flats = flats_of(parameter, {kind: state[kind] for kind in self._dtypes(parameter)})
                lamb.update_whole(flats, *where)
                put_back(flats[PARAM], parameter)
