"""Update chunk by chunk, inside the memory budget, by a rule (see `rule`), as a `torch.optim.Optimizer`.

Parameters that chunkc has moved home are updated in slots: parameter, gradient and states of one chunk group are
fetched, updated by one fused pass and written back, while the next group is on its way; or updated at home, by the
CPU. `state[p]` holds home views, so `state_dict`, schedulers and hooks see ordinary tensors. Every other parameter is
updated in place. On a GPU updates are Triton's and the host waits for none; `state[p]["step"]` is a CPU tensor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.optim import pending_steps as pending_steps
from chunkc.optim.clipping import CHANGED, EPS, SAME, Clipped, ClippedGradient, kept_value
from chunkc.optim.grad_scale import inverted, is_skipped, on_the_cpu
from chunkc.optim.group_updates import update_in_place
from chunkc.optim.loading import LoadedState, checked_state_dict, load, put_aside
from chunkc.optim.memory_checks import check_memory
from chunkc.optim.norms import sum_of_squares, summing_on
from chunkc.optim.over_ranks import agree_on_overflow, as_saved, no_exchange
from chunkc.optim.rule import MAXIMIZE, Rule
from chunkc.optim.split_masters import has_master
from chunkc.optim.states import names_at_home
from chunkc.optim.step import Due, prepare_step, take_over_changes, update_chunks
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.optim.update_mode import AUTO, DEVICE, UpdateMode
from chunkc.optim.update_scheduler import UpdateScheduler
from chunkc.runtime.store.consumed_gradients import GradientPlaceholder
from chunkc.runtime.store.gradient_sums import request_sums
from chunkc.runtime.store.shards import leaf_of, local_shard_of, local_shards_in
from chunkc.runtime.store.store import ChunkStore
from chunkc.runtime.store.watched_gradients import unwatched
from chunkc.session.declared_states import declare_states, declared_states
from chunkc.session.pending_readers import await_readers
from chunkc.session.protocols import Starter
from chunkc.session.session import Session, managing, session_with, sessions_of, stepping


class ChunkedOptimizer(SteppingOptimizer):
    """The base of all of chunkc's optimizers: everything except the rule.

    Attributes:
        scheduler: updates that begin before a step, run at home, or go on after it.
        grad_scale, found_inf: set by a `GradScaler`: the divisor of gradients; no step is made if not 0.
    """

    grad_scale: torch.Tensor | None  # no value but in a scaler's step, which multiplies a value that it finds
    found_inf: torch.Tensor | None
    _step_supports_amp_scaling = True
    _clipped: Clipped | None = None
    _norm_requested: bool = False

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule,
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = AUTO,
        undoable: bool = False,
        **as_in_torch: bool | None,
    ) -> None:
        self.rule = rule
        self._begin(UpdateMode(overlap, update_on, undoable))
        defaults = defaults | {MAXIMIZE: maximize} | as_in_torch
        self._check_supported(defaults)
        if defaults.get("foreach") and defaults.get("fused"):
            raise OptionsError("foreach and fused cannot both be True")
        self._made = False
        super().__init__(params, defaults)
        self._made = True
        self.states = rule.states(self.param_groups)
        self._lay_out_states(self._parameters())

    def _begin(self, overlap: UpdateMode) -> None:
        super()._begin(overlap)
        self.scheduler = UpdateScheduler(self)  # no update is running

    def __getstate__(self) -> dict[str, Any]:
        self.pending_steps.resolve(wait=True)
        self.follow_written()  # a copy takes masters as they are
        own = {"rule": self.rule, "states": self.states, "overlap": self.overlap, "_made": True}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "overlap" in state:  # a copy, which has no update running; `load_state_dict` comes here too
            self._begin(state["overlap"])
        super().__setstate__(state)
        for group in self.param_groups:
            for name in self.rule.optional:
                if name in self.defaults:
                    group.setdefault(name, self.defaults[name])
        undeclared = [p for p in self._parameters() if declared_states(p) is None]
        declare_states(undeclared, self.states, self.rule.num_stages, weakref.ref(self))
        for parameter, states in self.state.items():
            if has_master(states):
                self.contents.loaded(parameter, changed=False)

    @property
    def state(self) -> Any:
        """The states by parameter, as in `torch.optim`; waits for running updates. `step()` undoes staged ones then."""
        self.scheduler.finish()
        for updates in self.scheduler:
            updates.states_were_read |= bool(updates.begun)
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def starter_in(self, store: ChunkStore) -> Starter | None:
        updates = self.scheduler.in_session(session_with(store))
        return updates if updates.in_backward else None

    # --- called by users ---

    def synchronize(self) -> None:
        """Wait until every update that goes on after `step()` has ended (see `chunkc.synchronize`).

        Raises:
            StreamError: an update failed; named.
        """
        self.scheduler.finish()

    def follow_written(self) -> None:
        """Replace masters of parameters that were written to by what was written, as the next update would."""
        for parameter, state in self.state.items():
            self.contents.follow(parameter, state)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Announce that more gradients will be added to those of the backwards inside.

        With `overlap="backward"` or `"both"` no backward begins updates, and ranks of a model with `zero_stage=1`
        exchange nothing.
        """
        before, self.is_accumulating = self.is_accumulating, True
        try:
            with no_exchange(self._parameters()):
                yield
        finally:
            self.is_accumulating = before

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as in `torch.optim`. Before they become zeros, wait for updates that still read them."""
        if not set_to_none:
            self.scheduler.finish()
        self._clipped = None
        _kept = [p.grad for group in self.param_groups for p in group["params"]]  # see `Trainers`
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in `torch.optim`; one that is refused is not added.

        Raises:
            OptionsError: a value is out of range, or asks for something that this optimizer does not do.
            UnsupportedError: a parameter that requires a gradient has a dtype without a kernel.
        """
        if not isinstance(param_group, dict) or isinstance(params := param_group["params"], set):
            super().add_param_group(param_group)  # which refuses it
            return
        param_group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        self.check_group({**self.defaults, **param_group})
        for entry in param_group["params"]:
            name, parameter = entry if isinstance(entry, tuple) else ("", entry)
            if isinstance(parameter, torch.Tensor) and parameter.requires_grad:
                self.check_dtype(parameter, name)
        super().add_param_group(param_group)
        if self._made:
            try:
                if not self.follow(self.param_groups):
                    self._lay_out_states(list(local_shards_in(self.param_groups[-1:])))
            except OptionsError:
                self.param_groups.pop()
                raise
        for updates in self.scheduler:
            updates.forget(loaded=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in `torch.optim`'s format, with fp32 masters.

        Split masters are joined for this: 4 bytes per parameter of RAM, outside the budget, while the result lives.
        Nothing else is copied. Waits for the device if it alone knows which steps were skipped.
        """
        self.pending_steps.resolve(wait=True)
        self.follow_written()
        handle = self.register_state_dict_post_hook(as_saved, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state in this optimizer's format or that of `torch.optim`'s optimizer of its name.

        States of chunked parameters are copied home one by one; fp32 states of 16-bit ones keep their precision. A
        missing master is made from the parameter. A parameter with a split master becomes the rounded copy of that
        master; its model may be loaded before or after.

        Hooks run as in `torch.optim`: pre-hooks may change what is loaded, post-hooks find it loaded.

        Raises:
            OptionsError: the state does not fit the parameters; nothing has changed.
            HomeError: there is no room at home for the states; nothing has changed.
        """
        states: list[LoadedState] = []

        def take(_: Any, given: Mapping[str, Any]) -> dict[str, Any]:
            states.extend(self._prepare_to_load(given["param_groups"], checked_state_dict(self, given)))
            return {**given, "state": {}}

        def load_all(_: Any) -> None:
            with torch.no_grad():
                for loaded in states:
                    self.__dict__["state"][leaf_of(loaded.parameter)] = load(self.states, self.contents, loaded)

        hooks = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(load_all, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)  # type: ignore[arg-type]
        finally:
            for hook in hooks:
                hook.remove()

    def _prepare_to_load(self, groups: Sequence[Mapping[str, Any]], states: Sequence[LoadedState]) -> list[LoadedState]:
        """Make room at home for states that are to be loaded, once nothing uses the present ones.

        Returns:
            The states to load, with copies of those that lie where loading writes.

        Raises:
            OptionsError: chunks cannot have states of this optimizer's format.
            HomeError: there is no room.
        """
        parameters = [loaded.parameter for loaded in states]
        await_readers(parameters)
        self.follow(groups)
        self.lay_out(parameters)
        self.pending_steps.resolve(wait=True)
        self.scheduler.finish()
        for (session, group), names in names_at_home(parameters).items():
            session.keepers.keep(self, group, names)
            session.store.reserve_states(group)
        for updates in self.scheduler:
            updates.forget(loaded=True)
        written = {
            state[kind].data_ptr(): (parameter, kind)
            for parameter, state in self.state.items()
            if managing(parameter) is not None
            for kind in self.states.dtypes(parameter.dtype)
            if kind in state
        }
        return [put_aside(loaded, written) for loaded in states]

    # --- clipping: gradients are multiplied inside the updates, without traffic ---

    @torch.compiler.disable
    @torch.no_grad()
    @unwatched()
    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False, loss_scale: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Clip all gradients of this optimizer as `torch.nn.utils.clip_grad_norm_` does, but in the next `step()`.

        Nothing is copied for it if gradients are as the backward left them. `.grad` stays as it is.

        Args:
            error_if_nonfinite: raise an error if the norm is not finite; waits for the device.
            loss_scale: the factor of the loss, by which `GradScaler.step` will divide gradients.

        Returns:
            The norm of all gradients, divided by the loss scale: 0-dim fp32.

        Raises:
            RuntimeError: see `error_if_nonfinite`.
            UnsupportedError: gradients have been added to some that were clipped, or updates begin in the backward.
        """
        gradients = self._gradients()
        before = self._clipped if self._is_clipped(gradients) else None
        if before is None:
            unclipped = self.grad_norm() if loss_scale is None else self.grad_norm() / loss_scale
            norm = unclipped
        else:
            unclipped, norm = before.norm, before.norm * before.factor
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                "The total norm of order 2 for gradients from `parameters` is non-finite, so it cannot be clipped: "
                "set error_if_nonfinite=False to clip by it all the same"
            )
        factor = torch.clamp(max_norm / (norm + EPS), max=1.0).float()
        if before is not None:
            factor = factor * before.factor
        unclipped, factor, result = kept_value(unclipped), kept_value(factor), kept_value(norm.float())
        for session in sessions_of(self._all_parameters()):
            session.live.watch(value for value in (unclipped, factor, result) if value.device.type != "cpu")
        self._clipped = Clipped(unclipped, factor, {id(p): ClippedGradient.of(p, g) for p, g in gradients})
        return result

    @unwatched()
    def scale_of_step(self) -> GradScale:
        """Return the scale of this step's gradients, as kernels take it: a scaler's, and the clipping factor.

        Raises:
            UnsupportedError: some gradients are not those that were clipped.
        """
        clip, scale, found_inf = self.clip_factor(), getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None and clip is None:
            return NO_SCALE
        unscale = None if scale is None else inverted(scale)
        return GradScale(unscale, clip, None if found_inf is None else found_inf.detach().float().reshape(()))

    @torch.no_grad()
    @unwatched()
    def grad_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all gradients as they are: 0-dim fp64, finite if and only if each element is.

        From the next backward on, sums of squares are taken while gradients are in slots, for as long as each step
        is preceded by a call of this method, directly or by another one.

        Raises:
            UnsupportedError: gradients cannot be read, or were consumed by updates.
        """
        if self.overlap.is_final:
            raise UnsupportedError(
                f'overlap="{self.overlap.mode}" updates during the backward, before the norm of all gradients is '
                'known; use undoable=True with it, or overlap="forward" or "none"'
            )
        gradients = self._gradients()
        self._norm_requested = True
        for session in sessions_of(self._all_parameters()):
            request_sums(self, [session.store.sums], summing_on(session.device))
        return sum_of_squares(gradients, self._groups_read_at).sqrt()

    @torch.no_grad()
    @unwatched()
    def overflows(self) -> torch.Tensor:
        """Return whether an element of a gradient is not finite: 0-dim fp32, 1 or 0.

        Raises:
            UnsupportedError: as `clip_grad_norm_`.
        """
        clipped = self._clipped
        norm = clipped.norm if clipped is not None and self._is_clipped(self._gradients()) else self.grad_norm()
        return (~torch.isfinite(norm)).float()

    def has_all_gradients_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether those of the parameters that have a gradient are this optimizer's."""
        own = set(map(id, self._all_parameters()))
        return all(id(local_shard_of(parameter)) in own for parameter in parameters if parameter.grad is not None)

    def clip_factor(self) -> torch.Tensor | None:
        """Return the factor of the gradients of this step: 0-dim fp32; None: they are not clipped.

        Raises:
            UnsupportedError: some gradients are not those that were clipped.
        """
        clipped, gradients = self._clipped, self._gradients(read=False)
        if clipped is None or not gradients or not self._is_clipped(gradients):
            if clipped is not None and gradients and not clipped.stepped:
                raise UnsupportedError(
                    "the gradients are not those that clip_grad_norm_ has clipped: call optimizer.zero_grad() where "
                    "gradients are dropped, and clip_grad_norm_ after the last backward of each step"
                )
            return None
        clipped.stepped = True
        is_one = clipped.factor.device.type == "cpu" and float(clipped.factor) == 1.0
        return None if is_one else clipped.factor

    def end_of_step(self, sessions: list[Session]) -> None:
        """Stop taking sums if no norm was requested since the step before."""
        if not self._norm_requested:
            for session in sessions:
                session.store.sums.requesters.pop(self, None)
        self._norm_requested = False

    def _is_clipped(self, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether these gradients are those that were clipped last.

        Raises:
            UnsupportedError: only some are, or some have been changed since.
        """
        statuses = set() if self._clipped is None else self._clipped.statuses(gradients)
        if CHANGED in statuses or len(statuses) > 1:
            raise UnsupportedError(
                "gradients were changed, or added to, after clip_grad_norm_ of their optimizer, which multiplies them "
                "in step() only: clip after the last change, call zero_grad() after each step, or use "
                "torch.nn.utils.clip_grad_norm_, which multiplies at once"
            )
        return statuses == {SAME}

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        return local_shards_in(self.own_groups)

    def _gradients(self, *, read: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters that have a gradient, with it.

        Raises:
            UnsupportedError: a gradient is sparse, or cannot be `read`.
        """
        gradients = []
        for parameter in self._all_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if read and isinstance(gradient, GradientPlaceholder):
                raise gradient.refusal()
            check_memory(self, parameter, gradient)
            gradients.append((parameter, gradient))
        return gradients

    # --- the step ---

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Raises:
            HomeError, StreamError: the home tier failed, or an update at home, after which the parameters that it names
                may be half updated; parameters stay readable.
            BudgetError: not even one tile of a chunk fits with what the caller holds; nothing is updated.
            OptionsError: options of a parameter group are invalid, or chunks are not where `update_on` needs them.
            UnsupportedError: a gradient is sparse or has no memory, has a dtype that no kernel takes, or overlaps a
                parameter; or elements of a parameter share one memory location. Nothing is updated.
        """
        for group in self.param_groups:
            self.check_group(group)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with stepping(sessions := sessions_of(self._parameters())):
            self._step()
            self.end_of_step(sessions)
        return loss

    def _step(self) -> None:
        await_readers(self._parameters())
        self.follow(self.param_groups)
        scale, must_know = self.scale_of_step(), self.rule.must_know_steps or self.scheduler.stages
        agree_on_overflow(self, scale)
        self.scheduler.validate(scale)
        take_over_changes(self._parameters())
        if must_know and bool(on_the_cpu(scale).found_inf):
            return
        self.pending_steps.resolve(wait=must_know)
        if is_skipped(scale):
            return
        due, prepared = prepare_step(self.scheduler)
        for updates in self.scheduler:
            updates.commit()
        if any(part.at_home for part in prepared) or any(task.parameter.device.type == "cpu" for task in due.in_place):
            self.pending_steps.resolve(wait=True)  # the CPU is about to wait for this step's gradients anyway
        for updater in self._updaters.values():
            updater.begin_step()
        with self._gradients_apart(due), contextlib.ExitStack() as waits:
            for part in prepared:  # also after an error: nothing may be written once `step` has raised it
                waits.callback(part.session_updates.wait_after_step, part.at_home)
            update_in_place(self, due.in_place, scale)
            for part in prepared:
                update_chunks(part, scale)
            self.contents.end(due.changing)  # before the waits: an update that was waited for in vain has begun
        if scale.found_inf is not None and not must_know and pending_steps.is_remote(scale.found_inf):
            self.pending_steps.add(
                scale.found_inf, {parameter: self.states_of(parameter) for parameter in due.changing}
            )

    @contextlib.contextmanager
    def _gradients_apart(self, due: Due) -> Iterator[None]:
        """Replace a gradient that is its parameter's own memory, inside, by what `torch.optim` reads there."""
        gradients = [(task.parameter, task.parameter.grad) for task in due.aliased]
        for task in due.aliased:
            assert task.parameter.grad is not None
            gradient = self.rule.gradient_apart(task.parameter.grad.clone(), self.hyper_at(task.group, 1))
            task.parameter.grad = gradient
        try:
            yield
        finally:
            for parameter, aliased in gradients:
                parameter.grad = aliased
