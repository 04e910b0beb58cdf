"""A `torch.optim.Optimizer` that updates chunk by chunk, inside the memory budget, by a rule that subclasses know.

Parameters that chunkc has sent home are updated in slots: parameter, gradient and states of one chunk group are
fetched, updated by one fused pass and written back, while the next group is on its way; or updated at home, on the
CPU. `state[p]` holds home views, so `state_dict`, schedulers and hooks see ordinary tensors. Every other parameter is
updated where it is. On a GPU updates are Triton's and nothing waits for them; `state[p]["step"]` is a CPU tensor.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.states import DEFAULT_STATES, StateFormat
from chunkc.kernels.formats import GradScale
from chunkc.kernels.hyper import GRAD_DTYPES
from chunkc.optim import doubts
from chunkc.optim.grad_scale import grad_scale_of, is_skipped, on_the_cpu
from chunkc.optim.group_runs import Due, Task, due_of, runs_of
from chunkc.optim.overlap_mode import NONE as NO_OVERLAP
from chunkc.optim.overlap_mode import OverlapMode
from chunkc.optim.split_masters import NotedContents
from chunkc.optim.stateful import Stateful
from chunkc.optim.update import GroupUpdate, PreparedUpdate, ResidentsLeft, prepare_updates
from chunkc.optim.update_on import groups_at_home
from chunkc.optim.values import flag, number, pair
from chunkc.reconcile import gradients_of_several, reconcile
from chunkc.session import Session, all_entered, lay_out_states, managing, sessions_of

Prepared = tuple[Session, dict[int, list[Task]], frozenset[int], PreparedUpdate | None]
"""A session, the updates that are due in its groups, the groups that the CPU updates at home, the others' plan."""

_UNSUPPORTED = ("amsgrad", "differentiable", "capturable")


class ChunkedOptimizer(Stateful):
    """What Adam and LAMB share: everything but the rule by which elements change.

    Attributes:
        grad_scale, found_inf: what `torch.amp.GradScaler.step` sets: gradients are divided by the one, and nothing
            changes, steps neither, where the other is not 0.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        update_on: str,
        overlap: str,
        *,
        states: StateFormat = DEFAULT_STATES,
        implementation: Mapping[str, bool | None] = MappingProxyType({}),
    ) -> None:
        self._set_overlap(OverlapMode(overlap, update_on))
        self._states = states
        self._doubts = doubts.Doubts()
        self._noted_contents = NotedContents()
        self._check_supported(implementation)
        if implementation.get("foreach") and implementation.get("fused"):
            raise OptionsError("foreach and fused cannot both be True")
        self._made = False
        super().__init__(params, defaults)
        self._made = True
        lay_out_states(self._parameters(), self._states, self._num_stages, weakref.ref(self))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_made": True}

    @staticmethod
    def _common_hyper(group: Mapping[str, Any], step: int) -> dict[str, Any]:
        """What the hyper-parameters of Adam and of LAMB have in common, by name."""
        beta1, beta2 = pair(group, "betas")
        found = {name: number(group, name) for name in ("lr", "eps", "weight_decay")}
        return found | {"beta1": beta1, "beta2": beta2, "step": step, "maximize": flag(group, "maximize")}

    def next_hyper(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
        """Count a step of a parameter and return its hyper-parameters; of a step in doubt, all that they may be."""
        step = self.states_of(parameter)["step"].add_(1)
        return self._doubts.hyper(parameter, int(step), lambda number: self.hyper_at(group, number))

    def _must_know_steps(self) -> bool:
        """Whether the host needs the number of a step before its update, as random bits do that depend on it."""
        return False

    def runs(self, session: Session, index: int, tasks: Sequence[Task]) -> Sequence[Any]:
        """The elements of a chunk group to update."""
        return runs_of(session, index, tasks)

    def _begin_step(self) -> None:
        """Forget the former step."""

    @abstractmethod
    def _in_slots(
        self, prepared: PreparedUpdate, runs: Mapping[int, Sequence[Any]], scale: GradScale
    ) -> dict[int, GroupUpdate]:
        """The updates of chunk groups in slots."""

    @abstractmethod
    def at_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> Callable[[], None]:
        """The update of a chunk group in home memory, to be run on any thread once all that it needs is there."""

    @abstractmethod
    def compile_for_home(self, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> None:
        """Compile whatever `at_home` may run: Inductor's code generation is not known to be safe on other threads."""

    @abstractmethod
    def _in_place(self, tasks: list[tuple[torch.Tensor, int]], scale: GradScale) -> None:
        """Update parameters that do not move, given with the index of their group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in `torch.optim`; one that is refused is not added.

        Raises:
            OptionsError: a value is out of range, or asks for something this optimizer does not do.
            UnsupportedError: a parameter's dtype has no kernel.
        """
        if not isinstance(param_group, dict) or isinstance(params := param_group["params"], set):
            super().add_param_group(param_group)  # which refuses it
            return
        param_group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        self.check_group({**self.defaults, **param_group})
        for entry in param_group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(parameter, torch.Tensor):
                self._check_dtype(parameter.dtype)
        super().add_param_group(param_group)
        if self._made:
            try:
                added = self.param_groups[-1]["params"]
                lay_out_states(added, self._states, self._num_stages, weakref.ref(self))
            except OptionsError:
                self.param_groups.pop()
                raise
        self._in_backward.forget(self)

    def check_group(self, group: Mapping[str, Any]) -> None:
        self._check_supported(group)
        self.hyper_at(group, 1)

    def _check_supported(self, group: Mapping[str, Any]) -> None:
        for name in _UNSUPPORTED:
            if group.get(name):
                raise OptionsError(f"{type(self).__name__} does not support {name}=True")

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse parameters that have no kernel.

        Raises:
            OptionsError, UnsupportedError: there is none with these options, or none at all.
        """
        if dtype not in GRAD_DTYPES:
            raise UnsupportedError(f"{type(self).__name__} updates fp32, bf16 and fp16, not {dtype}")

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        Raises:
            HomeError, StreamError: the home tier failed; parameters stay readable.
            BudgetError: not even a part of a chunk fits beside what the caller holds; nothing is updated.
            OptionsError: a parameter group's options make no sense, or chunks are not where `update_on` needs them.
            UnsupportedError: a gradient is sparse, of a dtype that no kernel takes, or in memory of which a parameter
                has a part; or elements of a parameter are one place in memory. Nothing is updated.
        """
        for group in self.param_groups:
            self.check_group(group)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with all_entered(sessions_of(self._parameters())):
            self._step()
        return loss

    def _step(self) -> None:
        self._reconcile()
        scale = grad_scale_of(self)
        self._in_backward.check_scale(scale)
        if self._must_know_steps() and bool(on_the_cpu(scale).found_inf):
            return
        self._doubts.settle(wait=self._must_know_steps())
        if is_skipped(scale):
            return
        # Whatever may fail for want of room fails here, before anything is updated.
        due, prepared = self._due_and_prepared()
        self._in_backward.end(self)
        if any(at_home for _, _, at_home, _ in prepared):
            self._doubts.settle(wait=True)  # the CPU is about to wait for this step's gradients anyway
        self._begin_step()
        with self._gradients_apart(due):
            self._in_place(due.in_place, scale)
            for session, by_group, at_home, in_slots in prepared:
                self._update_chunks(session, by_group, at_home, in_slots, scale)
        self._noted_contents.end(due.changing)
        if scale.found_inf is not None and doubts.is_remote(scale.found_inf):
            self._doubts.add(scale.found_inf, {parameter: self.states_of(parameter) for parameter in due.changing})

    def _reconcile(self) -> None:
        """Take over what the user has changed of parameters at home (see `chunkc.reconcile`)."""
        names: dict[Session, list[str]] = {}
        for parameter in self._parameters():
            if (hit := managing(parameter)) is not None:
                names.setdefault(hit[0], []).append(hit[1])
        for session, of_session in names.items():
            reconcile(session, of_session)
            gradients_of_several(session, of_session)

    @contextlib.contextmanager
    def _gradients_apart(self, due: Due) -> Iterator[None]:
        """Inside, a gradient that is its parameter's own memory is what `torch.optim` reads there."""
        gradients = {parameter: parameter.grad for parameter, _ in due.aliased}
        for parameter, group in due.aliased:
            parameter.grad = self._gradient_apart(parameter, group)
        try:
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _gradient_apart(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """What the rule reads of a gradient that is the parameter's own memory."""
        assert parameter.grad is not None
        return parameter.grad.clone()

    def _due_and_prepared(self) -> tuple[Due, list[Prepared]]:
        """What is updated and how, once residents have left that had to make room for it."""
        while True:
            due = due_of(self)
            begun = self._in_backward.collect(self, due.chunked)
            try:
                return due, [
                    (session, by_group, *self._prepare(session, by_group, begun.get(session, frozenset())))
                    for session, by_group in due.chunked.items()
                ]
            except ResidentsLeft:
                continue

    def _prepare(
        self, session: Session, by_group: Mapping[int, list[Task]], begun: frozenset[int]
    ) -> tuple[frozenset[int], PreparedUpdate | None]:
        """Which groups are updated at home, and the plan for the others; room for all states.

        Those that have `begun` count: where a group is updated does not depend on when.
        """
        groups = session.store.layout.groups
        session.unfreeze({t.name for index in by_group if not groups[index].trainable for t in by_group[index]})
        self._lay_out([task.parameter for tasks in by_group.values() for task in tasks])
        at_home = groups_at_home(session, sorted({*by_group, *begun}), self._overlap.update_on, self._num_stages)
        if self._overlap.beside_backward:
            self._in_backward.prepare(self, session, at_home)
        for index in sorted(by_group):
            session.store.updates.wait(index)
            session.keep_states_of(self, index, [task.name for task in by_group[index]])
        for index in sorted(at_home - begun):
            session.store.reserve_states(index)
        in_slots = [index for index in by_group if index not in at_home]
        return at_home - begun, prepare_updates(session, in_slots, num_stages=self._num_stages) if in_slots else None

    def _update_chunks(
        self,
        session: Session,
        by_group: Mapping[int, list[Task]],
        at_home: frozenset[int],
        in_slots: PreparedUpdate | None,
        scale: GradScale,
    ) -> None:
        """Update a session's groups: the device's are only enqueued where it can run on, then the CPU does its own.

        The CPU begins when all that was computed before the step has arrived at home.
        """
        store = session.store
        runs = {index: self.runs(session, index, tasks) for index, tasks in by_group.items()}
        marks: list[Any] = []
        if at_home:
            store.release_slots()
            for index in sorted(at_home):
                store.collect_gradients(index)
            marks += store.tier.mark()
        if self._overlap.mode != NO_OVERLAP:
            self._under_way.submit(self, session, {index: runs[index] for index in at_home}, scale, marks)
        if in_slots is not None:
            moving = {index: found for index, found in runs.items() if index not in at_home}
            in_slots.run(self._in_slots(in_slots, moving, scale))
        if self._overlap.mode != NO_OVERLAP:
            self._under_way.end_step(session, at_home)
            return
        for mark in marks:
            mark.wait()
        if at_home and not is_skipped(scale := on_the_cpu(scale)):
            for index in sorted(at_home):
                self.at_home(session, index, runs[index], scale)()
