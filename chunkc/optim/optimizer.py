"""A `torch.optim.Optimizer` that updates chunk by chunk, inside the memory budget, by a rule (see `rule`).

Parameters that chunkc has sent home are updated in slots: parameter, gradient and states of one chunk group are
fetched, updated by one fused pass and written back, while the next group is on its way; or updated at home, on the
CPU. `state[p]` holds home views, so `state_dict`, schedulers and hooks see ordinary tensors. Every other parameter is
updated where it is. On a GPU updates are Triton's and nothing waits for them; `state[p]["step"]` is a CPU tensor.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.optim import on_device
from chunkc.optim import pending_steps as pending_steps
from chunkc.optim.backward_starter import BackwardStarter
from chunkc.optim.gradient_scaling import AssumedScale, ClipsGradients, grad_scale_of, is_skipped, on_the_cpu
from chunkc.optim.group_spans import Due
from chunkc.optim.loading import LoadedState, checked_state_dict, load, prepared_to_load
from chunkc.optim.memory_checks import title_of
from chunkc.optim.over_ranks import agree_on_overflow, as_saved, no_exchange
from chunkc.optim.rule import DIFFERENTIABLE, MAXIMIZE, WITHOUT_EFFECT, Rule, Updater
from chunkc.optim.running_updates import UpdatesUnderWay
from chunkc.optim.split_masters import NotedContents, has_master
from chunkc.optim.states import Dtypes, is_kept, made_on_tier
from chunkc.optim.step import prepare_step, take_over_changes, update_chunks, update_in_place
from chunkc.optim.update_mode import DEVICE, NONE, UpdateMode
from chunkc.optim.update_scheduler import BackwardUpdates
from chunkc.runtime.store.shards import leaf_of, local_shard_of
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.declared_states import declare_states, declared_states
from chunkc.session.pending_readers import await_readers
from chunkc.session.protocols import Starter
from chunkc.session.session import lay_out_states, session_with, sessions_of, stepping

logger = logging.getLogger(__name__)

_told: set[str] = set()
"""Arguments without effect that were logged."""


class ChunkedOptimizer(ClipsGradients):
    """What all rules share.

    Attributes:
        rule: by which elements change.
        states: the form in which it keeps states of these parameters.
        overlap: what updates run beside, and where they happen.
        under_way, in_backward: updates that go on after a step, or begin before it.
        doubts: the steps of which only the device knows whether they happened.
        contents: whose masters are.
        grad_scale, found_inf: a `GradScaler`'s: what gradients are divided by; no step is made if not 0.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule,
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
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
        """Nothing is under way, in doubt or noted yet."""
        self.overlap = overlap
        self.under_way = UpdatesUnderWay(overlap)
        self.assumed_scale = AssumedScale()
        starter = partial(BackwardStarter, weakref.ref(self))
        self.in_backward = BackwardUpdates(overlap, self.under_way, starter, self.assumed_scale)
        self.pending_steps, self.contents = pending_steps.PendingSteps(), NotedContents()
        self._updaters: dict[tuple[torch.device, bool], Updater] = {}

    def __getstate__(self) -> dict[str, Any]:
        self.pending_steps.resolve(wait=True)
        self.follow_written()  # a copy takes masters as they are
        own = {"rule": self.rule, "states": self.states, "overlap": self.overlap, "_made": True}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "overlap" in state:  # a copy, which has nothing under way; `load_state_dict` comes here too
            self._begin(state["overlap"])
        super().__setstate__(state)
        for group in self.param_groups:
            for name in self.rule.optional:
                if name in self.defaults:
                    group.setdefault(name, self.defaults[name])
        undeclared = [p for p in self._parameters() if declared_states(p) is None]
        declare_states(undeclared, self.states, self.rule.num_stages, weakref.ref(self))
        for parameter, of_parameter in self.state.items():
            if has_master(of_parameter):
                self.contents.loaded(parameter, changed=False)

    # --- what is asked of it while it steps ---

    @property
    def state(self) -> Any:
        """Each parameter's states, as in `torch.optim`; waits for updates that are under way."""
        self.under_way.finish()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states, without waiting for updates under way."""
        return self.__dict__["state"][leaf_of(parameter)]

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The same, of a parameter that may have none: nothing then."""
        return self.__dict__["state"].get(leaf_of(parameter), {})

    def starter_in(self, store: ChunkStore) -> Starter | None:
        """Return this optimizer's updates in the backwards of the session with this store; None: it makes none."""
        return self.in_backward.starter_in(session_with(store)) if self.overlap.in_backward else None

    def dtypes_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Dtypes:
        """The kinds of states that an update of a parameter of a group needs or finds, with their dtypes."""
        dtypes = self.states.dtypes(parameter.dtype)
        if not (idle := self.rule.idle(group)):
            return dtypes
        kept = self.kept_states_of(parameter)
        return {kind: dtype for kind, dtype in dtypes.items() if kind not in idle or kind in kept}

    def state_on_tier(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter that does not move, made on its first update, which begins."""
        dtypes, state = self.dtypes_of(parameter, group), self.states_of(parameter)
        if not is_kept(state, parameter, dtypes):
            self.begin_states(state, dtypes)
            made_on_tier(state, parameter, dtypes)
        self.begin_update_of(parameter, state)
        return state

    def begin_states(self, state: Mapping[str, Any], kinds: Iterable[str]) -> None:
        """Where all moments are about to be made, count a parameter's steps anew, once all are known."""
        moments = set(self.states.kinds).intersection(kinds)
        if "step" in state and moments and moments.isdisjoint(state):
            self.pending_steps.resolve(wait=True)
            state["step"].zero_()

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """An update of a parameter begins, whose states are all there.

        Kernels see other tensors over its memory, with version counters of their own. So it is said here that it
        changes: code that saved it for a backward of its own is told by autograd.
        """
        self.contents.begin(parameter, state)
        torch.autograd.graph.increment_version(leaf_of(parameter))

    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any:
        """The hyper-parameters of one update.

        Raises:
            OptionsError: one is out of range.
        """
        try:
            return self.rule.hyper(group, step)
        except ValueError as error:
            raise OptionsError(str(error)) from error

    def hyper_now(self, group: Mapping[str, Any], parameter: torch.Tensor) -> Any:
        """The hyper-parameters of the parameter's latest step, as its group has them now."""
        return self.hyper_at(group, int(self.states_of(parameter)["step"]))

    def next_hyper(self, parameter: torch.Tensor, at: Callable[[int], Any]) -> Any:
        """Count a step of a parameter and return its hyper-parameters; of a step in doubt, all that they may be.

        Allocates no tensor: in a backward, the compute tier may be full.
        """
        step = self.states_of(parameter)["step"]
        number = int(step) + 1
        step.fill_(number)
        return self.pending_steps.hyper(parameter, number, at)

    def updater(self, device: torch.device, *, by_triton: bool | None = None) -> Updater:
        """The rule's updates on a device, which are Triton's where that is what computes."""
        by_triton = on_device.computes_by_triton(device) if by_triton is None else by_triton
        if (device, by_triton) not in self._updaters:
            self._updaters[device, by_triton] = self.rule.updater(device, by_triton=by_triton)
        return self._updaters[device, by_triton]

    def _parameters(self) -> list[torch.Tensor]:
        return [local_shard_of(parameter) for group in self.param_groups for parameter in group["params"]]

    def lay_out(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make sure that chunks of these parameters have the states that this optimizer keeps.

        Raises:
            OptionsError: they cannot.
        """
        if any(declared_states(p) != self.states.seen_by(p.dtype) for p in parameters):
            self._lay_out_states(self._parameters())

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Keep the states that parameters in these groups need, beside those kept before; whether that makes more.

        Raises:
            OptionsError: chunks cannot have them; nothing has changed.
        """
        before, wanted = self.states, self.rule.states(groups)
        if set(wanted.kinds) <= set(before.kinds):
            return False
        self.states = wanted
        try:
            self._lay_out_states(self._parameters())
        except OptionsError:
            self.states = before
            raise
        return True

    def _lay_out_states(self, parameters: Sequence[torch.Tensor]) -> None:
        lay_out_states(parameters, self.states, self.rule.num_stages, weakref.ref(self))

    # --- what its user calls ---

    def synchronize(self) -> None:
        """Wait until every update that goes on after `step()` has ended (see `chunkc.synchronize`).

        Raises:
            StreamError: an update failed; named.
        """
        self.under_way.finish()

    def follow_written(self) -> None:
        """Masters of parameters that somebody has written to become what was written, as at the next update."""
        for parameter, state in self.state.items():
            self.contents.follow(parameter, state)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, more gradients will be added: with `overlap="backward"` or `"both"` no backward begins updates, and
        ranks of a model with `zero_stage=1` exchange nothing."""
        with self.in_backward.announced(), no_exchange(self._parameters()):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `torch.optim`. Gradients that become zeros are waited for, if an update still reads them."""
        if not set_to_none:
            self.under_way.finish()
        _kept = [p.grad for group in self.param_groups for p in group["params"]]  # see `chunkc.runtime.store.trainers`
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in `torch.optim`; one that is refused is not added.

        Raises:
            OptionsError: a value is out of range, or asks for something this optimizer does not do.
            UnsupportedError: a parameter that wants a gradient has a dtype without a kernel.
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
                    self._lay_out_states([local_shard_of(p) for p in self.param_groups[-1]["params"]])
            except OptionsError:
                self.param_groups.pop()
                raise
        self.in_backward.forget()

    def check_dtype(self, parameter: torch.Tensor, name: str = "") -> None:
        """Refuse a parameter whose dtype no update takes.

        Raises:
            OptionsError, UnsupportedError: none does with these options, or none at all.
        """
        try:
            self.rule.check_dtype(parameter.dtype, type(self).__name__)
        except (OptionsError, UnsupportedError) as error:
            title = (
                f"the parameter {name}" if name else f"{title_of(self, parameter)} of shape {tuple(parameter.shape)}"
            )
            raise type(error)(f"{error} ({title})") from None

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse values of a parameter group that are out of range.

        Raises:
            OptionsError: one is.
        """
        self._check_supported(group)
        self.hyper_at(group, 1)

    def _check_supported(self, group: Mapping[str, Any]) -> None:
        unknown = {"amsgrad", "capturable"}.difference(self.rule.optional)
        for name in (DIFFERENTIABLE, *sorted(unknown)):
            if group.get(name):
                raise OptionsError(f"{type(self).__name__} does not support {name}=True")
        for name, reason in WITHOUT_EFFECT.items():
            if group.get(name) and name not in _told:
                _told.add(name)
                logger.info("%s=True has no effect in chunkc.optim: %s", name, reason)

    def state_dict(self) -> dict[str, Any]:
        """The state in `torch.optim`'s format, with fp32 masters.

        Split masters are put together for this: 4 bytes per parameter of RAM, outside the budget, while the result
        lives. All else is not copied. Waits for a device that still knows alone which steps were skipped.
        """
        self.pending_steps.resolve(wait=True)
        self.follow_written()
        handle = self.register_state_dict_post_hook(partial(as_saved, self.contents), prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state in this optimizer's format or that of `torch.optim`'s optimizer of its name.

        States of chunked parameters are copied home one by one; fp32 states of 16-bit ones keep their precision. A
        missing master is made from the parameter. A parameter whose master is split becomes its master's rounded copy,
        as it does in the next step otherwise; its model may be loaded before or after.

        Hooks run as in `torch.optim`: those before may change what is loaded, those after find it loaded.

        Raises:
            OptionsError: the state does not fit the parameters; nothing has changed.
            HomeError: there is no room at home for the states; nothing has changed.
        """
        found: list[LoadedState] = []

        def take(_: Any, given: Mapping[str, Any]) -> dict[str, Any]:
            found.extend(prepared_to_load(self, given["param_groups"], checked_state_dict(self, given)))
            return {**given, "state": {}}

        def load_all(_: Any) -> None:
            with torch.no_grad():
                for loaded in found:
                    self.__dict__["state"][leaf_of(loaded.parameter)] = load(self, loaded)

        hooks = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(load_all, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)  # type: ignore[arg-type]
        finally:
            for hook in hooks:
                hook.remove()

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        Raises:
            HomeError, StreamError: the home tier failed; parameters stay readable.
            BudgetError: not even a part of a chunk fits beside what the caller holds; nothing is updated.
            OptionsError: a parameter group's options make no sense, or chunks are not where `update_on` needs them.
            UnsupportedError: a gradient is sparse or has no memory, is of a dtype that no kernel takes, or in memory
                of which a parameter has a part; or elements of a parameter are one place in memory. Nothing is updated.
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
        scale, must_know = grad_scale_of(self, self.clip_factor()), self.rule.must_know_steps or self.overlap.undoable
        agree_on_overflow(self, scale)
        self.in_backward.settle(self, scale)
        take_over_changes(self._parameters())
        if must_know and bool(on_the_cpu(scale).found_inf):
            return
        self.pending_steps.resolve(wait=must_know)
        if is_skipped(scale):
            return
        due, prepared = prepare_step(self)
        self.in_backward.adopt(self)
        if any(one.at_home for one in prepared) or any(p.device.type == "cpu" for p, _ in due.in_place):
            self.pending_steps.resolve(wait=True)  # the CPU is about to wait for this step's gradients anyway
        for updater in self._updaters.values():
            updater.begin_step()
        with self._gradients_apart(due):
            update_in_place(self, due.in_place, scale)
            for of_session in prepared:
                update_chunks(self, of_session, scale)
        self.contents.end(due.changing)
        if scale.found_inf is not None and not must_know and pending_steps.is_remote(scale.found_inf):
            self.pending_steps.add(
                scale.found_inf, {parameter: self.states_of(parameter) for parameter in due.changing}
            )

    @contextlib.contextmanager
    def _gradients_apart(self, due: Due) -> Iterator[None]:
        """Inside, a gradient that is its parameter's own memory is what `torch.optim` reads there."""
        gradients = {parameter: parameter.grad for parameter, _ in due.aliased}
        for parameter, group in due.aliased:
            assert parameter.grad is not None
            parameter.grad = self.rule.gradient_apart(parameter.grad.clone(), self.hyper_at(group, 1))
        try:
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
