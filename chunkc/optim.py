"""Adam and AdamW as `torch.optim.Optimizer`s that update chunk by chunk, inside the memory budget.

Parameters that chunkc has sent home are updated in slots: parameter, gradient and states of one chunk group are
fetched, updated by one fused pass and written back, while the next group is on its way; or updated at home, on the
CPU. `state[p]` holds home views, so `state_dict`, schedulers and hooks see ordinary tensors. Every other parameter is
updated where it is. On a GPU updates are Triton's and nothing waits for them; `state[p]["step"]` is a CPU tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from chunkc.adam_groups import DEVICE, UPDATE_ON, Runs, Task, groups_at_home, home_update, runs_of, update_in_slots
from chunkc.device_adam import DeviceAdam, computes_by_triton
from chunkc.ir.chunks import EXP_AVG, EXP_AVG_SQ, MASTER
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.kernels.adam_cpu import prepare
from chunkc.kernels.formats import AdamSlots
from chunkc.kernels.hyper import GRAD_DTYPES, AdamHyper
from chunkc.overlap import NONE, Overlap
from chunkc.overlapping import Overlapping
from chunkc.session import Session, owner
from chunkc.update import PreparedUpdate, prepare_updates

_UNSUPPORTED = ("amsgrad", "differentiable", "capturable")


class _Adam(Overlapping):
    _decoupled: bool
    _update_on = DEVICE

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
        if update_on not in UPDATE_ON:
            allowed = ", ".join(f'"{name}"' for name in UPDATE_ON)
            raise OptionsError(f"update_on is {update_on!r}; allowed: {allowed}")
        self._update_on = update_on
        self._overlap = Overlap(overlap, update_on)
        self._device_adams: dict[torch.device, DeviceAdam] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_update_on": self._update_on, "_device_adams": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in `torch.optim`; one that is refused is not added.

        Raises:
            OptionsError: a value is out of range, or asks for something this optimizer does not do.
            UnsupportedError: a parameter's dtype has no kernel.
        """
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        self._check_group({**self.defaults, **param_group})
        for entry in param_group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(parameter, torch.Tensor) and parameter.dtype not in GRAD_DTYPES:
                raise UnsupportedError(f"{type(self).__name__} updates fp32, bf16 and fp16, not {parameter.dtype}")
        super().add_param_group(param_group)
        self._overlap.forget(self)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        for name in _UNSUPPORTED:
            if group.get(name):
                raise OptionsError(f"{type(self).__name__} does not support {name}=True")
        self.hyper_at(group, 1)

    def current_hyper(self, group: Mapping[str, Any], parameter: torch.Tensor) -> AdamHyper:
        """The hyper-parameters of the parameter's latest step, as its group has them now."""
        return self.hyper_at(group, int(self.states_of(parameter)["step"]))

    def hyper_at(self, group: Mapping[str, Any], step: int) -> AdamHyper:
        """The hyper-parameters of a parameter group's `step`-th update (from 1), as the kernels take them.

        Raises:
            OptionsError: a value is out of range.
        """
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

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        Raises:
            HomeError, StreamError: the home tier failed; parameters stay readable.
            UnsupportedError: a gradient is sparse, or of a dtype that no kernel takes.
        """
        for group in self.param_groups:
            self._check_group(group)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chunked: dict[Session, dict[int, list[Task]]] = {}
        in_place: list[tuple[torch.Tensor, int]] = []
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise UnsupportedError(f"{type(self).__name__} does not support sparse gradients")
                session, name = owner(parameter) or (None, "")
                if session is not None and session.store.is_managed(name):
                    task = Task(self, parameter, name, group)
                    by_group = chunked.setdefault(session, {})
                    by_group.setdefault(session.store.group_index(name), []).append(task)
                else:
                    in_place.append((parameter, index))
        begun = self._overlap.collect(self, chunked)
        # Whatever may fail for want of room fails here, before anything is updated.
        prepared = [
            (session, by_group, *self._prepare(session, by_group, begun.get(session, frozenset())))
            for session, by_group in chunked.items()
        ]
        for device_adam in self._device_adams.values():
            device_adam.begin_step()
        self._update_in_place(in_place)
        for session, by_group, at_home, in_slots in prepared:
            self._update_chunks(session, by_group, at_home, in_slots)
        return loss

    def _prepare(
        self, session: Session, by_group: Mapping[int, list[Task]], begun: frozenset[int]
    ) -> tuple[frozenset[int], PreparedUpdate | None]:
        """Which groups are updated at home, and the plan for the others; room for all states.

        Those that have `begun` count: where a group is updated does not depend on when.
        """
        at_home = groups_at_home(session, sorted({*by_group, *begun}), self._update_on)
        if self._overlap.beside_backward:
            self._overlap.prepare(self, session, at_home)
        for index in sorted(by_group):
            session.store.updates.wait(index)
        for index in sorted(at_home - begun):
            session.store.reserve_states(index)
        in_slots = [index for index in by_group if index not in at_home]
        return at_home - begun, prepare_updates(session, in_slots) if in_slots else None

    def _update_chunks(
        self,
        session: Session,
        by_group: Mapping[int, list[Task]],
        at_home: frozenset[int],
        in_slots: PreparedUpdate | None,
    ) -> None:
        """Update a session's groups: the device's are only enqueued where it can run on, then the CPU does its own.

        The CPU begins when all that was computed before the step has arrived at home.
        """
        store, overlapped = session.store, self._overlap.mode != NONE
        runs: dict[int, Runs] = {index: runs_of(session, index, tasks) for index, tasks in by_group.items()}
        moments: list[Any] = []
        if at_home:
            store.release_slots()
            for index in sorted(at_home):
                store.collect_gradients(index)
            moments += store.tier.mark()
        if overlapped:
            self._overlap.submit(session, {index: runs[index] for index in at_home}, moments)
        if in_slots is not None:
            adam = self._device_adam(store.tier.device)
            if adam is not None:  # one table of scalars for all that is to come
                adam.declare([hyper for index in by_group if index not in at_home for _, _, hyper in runs[index]])
            in_slots.run({i: update_in_slots(i, runs[i], adam) for i in by_group if i not in at_home})
        if overlapped:
            self._overlap.end_step(session, at_home)
            return
        for moment in moments:
            moment.wait()
        for index in sorted(at_home):
            home_update(session, index, runs[index])()

    def _device_adam(self, device: torch.device) -> DeviceAdam | None:
        """Triton's updates on a device; None where the CPU computes."""
        if not computes_by_triton(device):
            return None
        if device not in self._device_adams:
            self._device_adams[device] = DeviceAdam(device)
        return self._device_adams[device]

    def _update_in_place(self, tasks: list[tuple[torch.Tensor, int]]) -> None:
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
            runs = [_flat(t) for t in (parameter, _like(grad, parameter), *(state[k] for k in _kinds(parameter)))]
            device_adam = self._device_adam(parameter.device)
            if device_adam is not None:
                hyper = self.hyper_at(self.param_groups[index], int(state["step"]))
                device_adam.update(AdamSlots(*runs), [(0, parameter.numel(), hyper)])
                continue
            key = (index, float(state["step"]), parameter.dtype, grad.dtype)
            update = updates.get(key)
            if update is None:
                hyper = self.hyper_at(self.param_groups[index], int(state["step"]))
                update = prepare(parameter.dtype, grad.dtype, hyper)
                updates[key] = update
            update(runs)
            written += [parameter, *(state[kind] for kind in _kinds(parameter))]
        torch.autograd.graph.increment_version(written)

    def _state_on_tier(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter that does not move, made on its first update."""
        state = self.states_of(parameter)
        if len(state) == 1 + len(_kinds(parameter)) and state[EXP_AVG].stride() == parameter.stride():
            return state
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        if "exp_avg" not in state:
            for kind in _kinds(parameter):
                state[kind] = torch.zeros_like(
                    parameter, dtype=_state_dtype(parameter), memory_format=torch.preserve_format
                )
                if kind == MASTER:
                    state[kind].copy_(parameter)
        for kind in _kinds(parameter):
            if state[kind].stride() != parameter.stride():
                state[kind] = _like(state[kind], parameter)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state in this optimizer's or `torch.optim.AdamW`'s format.

        States of chunked parameters are copied home one by one; fp32 states of 16-bit parameters keep their
        precision. A missing master copy is made from the parameter.

        Raises:
            ValueError: the state does not fit the parameters, as in `torch.optim`.
        """
        for loaded in state_dict["param_groups"]:
            self._check_group({**self.defaults, **loaded})
        states = state_dict["state"]
        self._overlap.finish()
        self._overlap.forget(self)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for index, parameter in zip(ids, parameters, strict=True):
                if index in states:
                    self._load_state(parameter, states[index])

    def _load_state(self, parameter: torch.Tensor, loaded: Mapping[str, Any]) -> None:
        unsupported = [k for k in loaded if k not in ("step", EXP_AVG, EXP_AVG_SQ, MASTER)]
        if unsupported:
            raise OptionsError(f"{type(self).__name__} cannot use the state {', '.join(map(str, unsupported))}")
        state: dict[str, Any] = {"step": torch.as_tensor(loaded["step"], dtype=torch.float32).to("cpu", copy=True)}
        session, name = owner(parameter) or (None, "")
        managed = session is not None and session.store.is_managed(name)
        if managed:
            session.store.reserve_states(session.store.group_index(name))  # type: ignore[union-attr]
        for kind in _kinds(parameter):
            source = loaded.get(kind, parameter if kind == MASTER else None)
            if source is None:
                raise ValueError(f"the loaded state lacks {kind}")
            if managed:
                state[kind] = session.store.home_view(kind, name)  # type: ignore[union-attr]
                session.store.fill(kind, name, state[kind], torch.as_tensor(source))  # type: ignore[union-attr]
            else:
                state[kind] = torch.empty_strided(
                    parameter.shape,
                    parameter.stride(),
                    dtype=_state_dtype(parameter),
                    device=parameter.device,
                )
                state[kind].copy_(source)
        self.__dict__["state"][parameter] = state


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


def _kinds(parameter: torch.Tensor) -> tuple[str, ...]:
    return (EXP_AVG, EXP_AVG_SQ) if parameter.dtype.itemsize >= 4 else (EXP_AVG, EXP_AVG_SQ, MASTER)


def _state_dtype(parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32


def _like(tensor: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor with the parameter's strides; itself if it has them."""
    assert tensor is not None
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=parameter.device).copy_(
        tensor
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order, as a flat view."""
    return tensor.as_strided((tensor.numel(),), (1,))
