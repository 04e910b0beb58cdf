"""Adam and AdamW, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from chunkc.ir.chunks import GRAD, PARAM
from chunkc.ir.errors import OptionsError
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, FLOAT32, MASTER, MASTER_LOW
from chunkc.kernels.adam_cpu import prepare
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.kernels.hyper import AdamHyper
from chunkc.optim import device_adam as device_adams
from chunkc.optim.adam_groups import compile_for_home, update_at_home, update_in_slots
from chunkc.optim.adam_rule import AdamRule, Place, adam_slots, update_on_cpu
from chunkc.optim.chunked_optimizer import ChunkedOptimizer
from chunkc.optim.device_adam import DeviceAdam
from chunkc.optim.overlap_mode import NONE
from chunkc.optim.states import flats_of, place_in_group, put_back
from chunkc.optim.update import GroupUpdate, PreparedUpdate
from chunkc.optim.update_on import DEVICE
from chunkc.optim.values import flag
from chunkc.session import Session


class _Adam(ChunkedOptimizer):
    _decoupled: bool

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
        moments_dtype: torch.dtype | str = torch.float32,
        master_weights: bool | str | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        self._device_adams: dict[torch.device, DeviceAdam] = {}
        self._rule = AdamRule.of(moments_dtype, master_weights, stochastic_rounding, rounding_seed)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        implementation = {"foreach": foreach, "fused": fused, "amsgrad": amsgrad}
        implementation |= {"capturable": capturable, "differentiable": differentiable}
        super().__init__(params, defaults, update_on, overlap, states=self._rule.states, implementation=implementation)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_device_adams": {}, "_rule": self._rule}

    def hyper_at(self, group: Mapping[str, Any], step: int) -> AdamHyper:
        try:
            decoupled = self._decoupled or flag(group, "decoupled_weight_decay")  # as torch.optim.AdamW saves it
            return AdamHyper(**self._common_hyper(group, step), decoupled=decoupled)
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
        return {index: update_in_slots(self._rule, index, found, adam, scale) for index, found in runs.items()}

    def at_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> Callable[[], None]:
        return update_at_home(self._rule, session, index, runs, scale)

    def compile_for_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> None:
        compile_for_home(self._rule, session, index, runs, scale)

    def _device_adam(self, device: torch.device) -> DeviceAdam | None:
        """Triton's updates on a device; None where the CPU computes."""
        if not device_adams.computes_by_triton(device):
            return None
        if device not in self._device_adams:
            self._device_adams[device] = DeviceAdam(device)
        return self._device_adams[device]

    def _must_know_steps(self) -> bool:
        return self._rule.stochastic

    def _check_dtype(self, dtype: torch.dtype) -> None:
        super()._check_dtype(dtype)
        self._rule.format(dtype, dtype)

    def _gradient_apart(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        gradient = super()._gradient_apart(parameter, group)
        hyper = self.hyper_at(group, 1)
        # Decay changes the parameter first; `maximize` has negated the gradient before that.
        return gradient if hyper.maximize else gradient.mul_(hyper.scalars().decay)

    def _in_place(self, tasks: list[tuple[torch.Tensor, int]], scale: GradScale) -> None:
        """Update parameters that do not move, given with the index of their group; each is one run of its own."""
        states = [self._state_on_tier(parameter) for parameter, _ in tasks]
        numbers = {p: number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}
        is_plain = self._rule.states.moments == FLOAT32 and not self._rule.stochastic and scale is NO_SCALE
        updates: dict[tuple, Callable[[list[torch.Tensor]], None]] = {}
        written = []
        for (parameter, index), state in zip(tasks, states):
            kinds = self._dtypes(parameter)
            flats = flats_of(parameter, {kind: state[kind] for kind in kinds})
            device_adam = self._device_adam(parameter.device)
            if device_adam is None and is_plain:
                step = int(state["step"].add_(1))
                key = (index, step, parameter.dtype, flats[GRAD].dtype)
                if key not in updates:
                    hyper = self.hyper_at(self.param_groups[index], step)
                    updates[key] = prepare(parameter.dtype, flats[GRAD].dtype, hyper, split=MASTER_LOW in kinds)
                updates[key]([flats[kind] for kind in _PREPARED if kind in flats])
                written += [parameter, *(state[kind] for kind in kinds)]
            else:
                place = Place(*(place_in_group(parameter) or (-1 - numbers[parameter], 0)))
                runs = [(0, parameter.numel(), self.next_hyper(parameter, self.param_groups[index]))]
                if device_adam is not None:
                    device_adam.update(self._rule, adam_slots(flats), runs, scale, place)
                else:
                    update_on_cpu(self._rule, adam_slots(flats), runs, scale, place)
            put_back(flats[PARAM], parameter)
        torch.autograd.graph.increment_version(written)


_PREPARED = (PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, MASTER_LOW)
"""The order that `chunkc.kernels.adam_cpu.prepare` wants."""


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

        moments_dtype: how `state[p]["exp_avg"]` and `["exp_avg_sq"]` are stored: `torch.float32`, `torch.bfloat16`, or
            `"int8"`: a code of one byte per element, with `["exp_avg_scale"]` for each 256 (Dettmers et al.,
            arXiv:2110.02861).
        master_weights: whether bf16 and fp16 parameters have fp32 masters. None: they do, unless `stochastic_rounding`
            makes up for it. Without one, fp16 is not possible, nor is rounding to nearest. `"float32"`: a copy,
            `state[p]["master"]`, 4 bytes per parameter. `"split"`: `state[p]["master_low"]` has the lower 16 bits of
            the master of a bf16 parameter, which has the others: 2 bytes, the same master (but for one place in the
            last bit where a tie is rounded, see `chunkc.kernels.split`), and fewer bytes to move. True: split where
            that is possible, for bf16 parameters rounded to nearest with moments that are not 8-bit; else fp32.
            Saved states have fp32 masters either way. Whoever writes to a parameter with a split master, writes the
            master. With an fp32 one the next update writes the parameter anew from the master.
        stochastic_rounding: round what is stored in bf16 (parameters, moments) up or down with the probability of the
            distance. The random bits depend on the seed, the step and the element's place alone: not on the budget, the
            home, `update_on` or what ran before. Fp32 is not rounded.
        rounding_seed: of those bits.
        foreach, fused: as in `torch.optim`, and without effect: an update is one fused pass whatever they say.
        amsgrad, capturable, differentiable: refused if true.

    Where a gradient is None, nothing happens to that parameter. With `torch.amp.GradScaler` gradients are unscaled
    inside the update.
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
        moments_dtype: torch.dtype | str = torch.float32,
        master_weights: bool | str | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            update_on=update_on,
            overlap=overlap,
            moments_dtype=moments_dtype,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )


class Adam(_Adam):
    """Adam (Kingma and Ba, arXiv:1412.6980) with `torch.optim.Adam`'s semantics: weight decay joins the gradient.

    Its arguments are those of `AdamW`.
    """

    _decoupled = False
