"""Adam and AdamW, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from chunkc import device_adam as device_adams
from chunkc.adam_groups import (
    DEVICE,
    compile_for_home,
    update_at_home,
    update_in_slots,
    update_on_cpu,
)
from chunkc.chunked_optimizer import ChunkedOptimizer
from chunkc.device_adam import DeviceAdam
from chunkc.ir.errors import OptionsError
from chunkc.kernels.adam_cpu import prepare
from chunkc.kernels.formats import NO_SCALE, AdamSlots, GradScale
from chunkc.kernels.hyper import AdamHyper
from chunkc.optim_states import flat, like, state_kinds
from chunkc.overlap import NONE
from chunkc.session import Session
from chunkc.update import GroupUpdate, PreparedUpdate


class _Adam(ChunkedOptimizer):
    _decoupled: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
    ) -> None:
        self._device_adams: dict[torch.device, DeviceAdam] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, update_on, overlap)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_device_adams": {}}

    def hyper_at(self, group: Mapping[str, Any], step: int) -> AdamHyper:
        beta1, beta2 = group["betas"]
        try:
            return AdamHyper(
                lr=float(group["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                step=step,
                decoupled=self._decoupled,
                maximize=bool(group.get("maximize", False)),
            )
        except ValueError as error:
            raise OptionsError(str(error)) from error

    def _begin_step(self) -> None:
        for device_adam in self._device_adams.values():
            device_adam.begin_step()

    def _in_slots(
        self, prepared: PreparedUpdate, runs: Mapping[int, Sequence[Any]], scale: GradScale
    ) -> dict[int, GroupUpdate]:
        adam = self._device_adam(prepared.session.store.tier.device)
        if adam is not None:  # one table of scalars for all that is to come
            adam.declare([hyper for of_group in runs.values() for _, _, hyper in of_group])
        return {index: update_in_slots(index, found, adam, scale) for index, found in runs.items()}

    def at_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> Callable[[], None]:
        return update_at_home(session, index, runs, scale)

    def compile_for_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> None:
        compile_for_home(session, index, runs, scale)

    def _device_adam(self, device: torch.device) -> DeviceAdam | None:
        """Triton's updates on a device; None where the CPU computes."""
        if not device_adams.computes_by_triton(device):
            return None
        if device not in self._device_adams:
            self._device_adams[device] = DeviceAdam(device)
        return self._device_adams[device]

    def _in_place(self, tasks: list[tuple[torch.Tensor, int]], scale: GradScale) -> None:
        """Update parameters that do not move, given with the index of their group; each is one run of its own."""
        states = [self._state_on_tier(parameter) for parameter, _ in tasks]
        if not tasks:
            return
        torch._foreach_add_([state["step"] for state in states], 1)
        updates: dict[tuple, Callable[[list[torch.Tensor]], None]] = {}
        written = []
        for (parameter, index), state in zip(tasks, states):
            grad = parameter.grad
            assert grad is not None
            runs = [flat(t) for t in (parameter, like(grad, parameter), *(state[k] for k in state_kinds(parameter)))]
            device_adam = self._device_adam(parameter.device)
            if device_adam is not None:
                hyper = self.hyper_at(self.param_groups[index], int(state["step"]))
                device_adam.update(AdamSlots(*runs), [(0, parameter.numel(), hyper)], scale)
                continue
            if scale is not NO_SCALE:
                hyper = self.hyper_at(self.param_groups[index], int(state["step"]))
                update_on_cpu(AdamSlots(*runs), [(0, parameter.numel(), hyper)], scale)
                continue
            key = (index, float(state["step"]), parameter.dtype, grad.dtype)
            update = updates.get(key)
            if update is None:
                hyper = self.hyper_at(self.param_groups[index], int(state["step"]))
                update = prepare(parameter.dtype, grad.dtype, hyper)
                updates[key] = update
            update(runs)
            written += [parameter, *(state[kind] for kind in state_kinds(parameter))]
        torch.autograd.graph.increment_version(written)


class AdamW(_Adam):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with `torch.optim.AdamW`'s semantics.

    Args:
        params: parameters, or groups of them with their own `lr`, `betas`, `eps`, `weight_decay`, `maximize`.
        update_on: where parameters at home are updated: `"device"`: in slots on the compute tier; `"cpu"`: at home, by
            the CPU, so that states never cross the link (only with `home="cpu"`); `"auto"`: on a CUDA device some here
            and some there, such that both are done the soonest, on the CPU in slots. The two kernels may differ in the
            last bit, so with `"auto"` results may depend on the budget.
        overlap: what updates by the CPU (`update_on="cpu"` or `"auto"`) run beside; the bits are the same.
            `"none"`: nothing; `step()` returns when all is updated.
            `"forward"`: the next forward. `step()` returns at once, and the compiled model waits for each chunk when it
            needs it. Until then, anything else that reads or writes parameters or gradients must call `synchronize()`
            first; the optimizer's own `state`, `state_dict`, `load_state_dict` and `zero_grad` wait by themselves.
            `"backward"`: a chunk's update begins when the backward has made its gradients; from the second step on.
            `step()` waits for the rest, so afterwards all is ordinary again, but between `backward()` and `step()`
            nothing may change gradients, parameters or hyper-parameters, or read parameters: no clipping, no
            GradScaler. Each `backward()` is followed by `step()`, but for those inside `with
            optimizer.accumulating():`. What is changed all the same raises, at the latest in `step()`.
            `"both"`: both, with the rules of both.

    fp32 parameters, or bf16/fp16 ones with an fp32 master copy in `state[p]["master"]`. Where a gradient is None,
    nothing happens to that parameter.
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, update_on=update_on, overlap=overlap)


class Adam(_Adam):
    """Adam (Kingma and Ba, arXiv:1412.6980) with `torch.optim.Adam`'s semantics: weight decay joins the gradient."""

    _decoupled = False
