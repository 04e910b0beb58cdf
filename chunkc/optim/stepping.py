"""Keep what every update of an optimizer needs: states, hyperparameters and step counters, by parameter.

The modules that update stand between two classes: they take a `SteppingOptimizer`, and are called by
`optimizer.ChunkedOptimizer`, which adds the step, their scheduler, and what users call. So imports go one way.
"""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.states import StateFormat
from chunkc.optim import on_device
from chunkc.optim.grad_scale import AssumedScale
from chunkc.optim.pending_steps import PendingSteps
from chunkc.optim.rule import DIFFERENTIABLE, WITHOUT_EFFECT, Rule, Updater
from chunkc.optim.split_masters import NotedContents
from chunkc.optim.states import Dtypes, has_states, make_states_on_tier
from chunkc.optim.update_mode import UpdateMode
from chunkc.optim.update_task import Task
from chunkc.runtime.store.gradient_sums import clock
from chunkc.runtime.store.shards import leaf_of, local_shard_of, local_shards_in
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.declared_states import declared_states
from chunkc.session.protocols import Starter
from chunkc.session.session import Session, lay_out_states, owner

logger = logging.getLogger(__name__)

_told: set[str] = set()
"""Arguments without effect that have been logged."""


class SteppingOptimizer(torch.optim.Optimizer):
    """An optimizer as its updates see it.

    Attributes:
        rule: how elements change.
        states: the format in which states of these parameters are kept.
        overlap: when and where updates run.
        pending_steps: steps of which only the device knows whether they happened.
        contents: the contents of each parameter that its master belongs to.
        assumed_scale: the scale of gradients with which updates in a backward begin that can be undone.
        is_accumulating: whether more gradients will be added, so that no update may begin in a backward.
    """

    rule: Rule
    states: StateFormat
    overlap: UpdateMode
    is_accumulating: bool = False
    _groups_read_at: int = 0

    def _begin(self, overlap: UpdateMode) -> None:
        """Begin with no step pending and no contents noted."""
        self.overlap, self.assumed_scale = overlap, AssumedScale()
        self.pending_steps, self.contents = PendingSteps(), NotedContents()
        self._updaters: dict[tuple[torch.device, bool], Updater] = {}

    # --- parameters ---

    @property
    def param_groups(self) -> Any:
        """The parameter groups, as in `torch.optim`.

        Code that reads them may change gradients without a count, as `torch.amp.GradScaler.unscale_` does. So sums of
        gradients that were taken before are not used any more.
        """
        if "param_groups" not in self.__dict__:
            raise AttributeError("param_groups")  # a wrapper, as Lightning's, then asks the optimizer that it wraps
        self._groups_read_at = next(clock)
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def own_groups(self) -> Any:
        """The parameter groups, for code of chunkc, which changes no gradient: does not count as reading them."""
        return self.__dict__["param_groups"]

    def tasks(self) -> Iterator[tuple[Session | None, Task]]:
        """Iterate over the parameters in order, each with its session.

        Of parameters that are sharded over ranks these are this rank's shards.
        """
        for group in self.own_groups:
            for parameter in map(local_shard_of, group["params"]):
                session, name = owner(parameter) or (None, "")
                yield session, Task(parameter, name, group)

    def _parameters(self) -> list[torch.Tensor]:
        return list(local_shards_in(self.param_groups))

    def title_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's title for messages: its name in a model or the optimizer, else its number."""
        _, name = owner(parameter) or (None, "")
        if name:
            return f"the parameter {name}"
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is parameter:
                    names = group.get("param_names")
                    return (
                        f"the parameter {names[index]}" if names else f"parameter {index} of parameter group {number}"
                    )
        return "a parameter"

    def check_dtype(self, parameter: torch.Tensor, name: str = "") -> None:
        """Refuse a parameter with a dtype that no update takes.

        Raises:
            OptionsError, UnsupportedError: no update takes it with these options, or with any.
        """
        try:
            self.rule.check_dtype(parameter.dtype, type(self).__name__)
        except (OptionsError, UnsupportedError) as error:
            shape = tuple(parameter.shape)
            title = f"the parameter {name}" if name else f"{self.title_of(parameter)} of shape {shape}"
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

    # --- states ---

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states, without waiting for running updates; the parameter has some from now on."""
        return self.__dict__["state"][leaf_of(parameter)]

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states, empty if it has none."""
        return self.__dict__["state"].get(leaf_of(parameter), {})

    def dtypes_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Dtypes:
        """Return the kinds of states that an update of a parameter of a group needs or finds, with their dtypes."""
        dtypes = self.states.dtypes(parameter.dtype)
        if not (idle := self.rule.idle(group)):
            return dtypes
        kept = self.kept_states_of(parameter)
        return {kind: dtype for kind, dtype in dtypes.items() if kind not in idle or kind in kept}

    def state_on_tier(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the update of a parameter that does not move, and return its state, made if need be."""
        dtypes, state = self.dtypes_of(parameter, group), self.states_of(parameter)
        if not has_states(state, parameter, dtypes):
            self.begin_states(state, dtypes)
            make_states_on_tier(state, parameter, dtypes)
        self.begin_update_of(parameter, state)
        return state

    def begin_states(self, state: Mapping[str, Any], kinds: Iterable[str]) -> None:
        """Count a parameter's steps anew, once all are known, if all its moments are about to be made."""
        moments = set(self.states.kinds).intersection(kinds)
        if "step" in state and moments and moments.isdisjoint(state):
            self.pending_steps.resolve(wait=True)
            state["step"].zero_()

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Begin the update of a parameter; all its states exist.

        Kernels see other tensors over its memory, with version counters of their own. So its own counter is
        incremented here: autograd then refuses a backward for which it was saved.
        """
        self.contents.begin(parameter, state)
        torch.autograd.graph.increment_version(leaf_of(parameter))

    def lay_out(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make sure that chunks of these parameters have room for the states that this optimizer keeps.

        Raises:
            OptionsError: they cannot have it.
        """
        if any(declared_states(p) != self.states.seen_by(p.dtype) for p in parameters):
            self._lay_out_states(self._parameters())

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Keep the states that parameters in these groups need, too. Return whether these are more than before.

        Raises:
            OptionsError: chunks cannot have room for them; nothing has changed.
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

    @abstractmethod
    def starter_in(self, store: ChunkStore) -> Starter | None:
        """Return this optimizer's updates in the backwards of the session with this store; None: it makes none."""

    def _lay_out_states(self, parameters: Sequence[torch.Tensor]) -> None:
        lay_out_states(parameters, self.states, self.rule.num_stages, weakref.ref(self))

    # --- hyperparameters and kernels ---

    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any:
        """Return the hyperparameters of one update.

        Raises:
            OptionsError: one is out of range.
        """
        try:
            return self.rule.hyper(group, step)
        except ValueError as error:
            raise OptionsError(str(error)) from error

    def next_hyper(self, parameter: torch.Tensor, at: Callable[[int], Any]) -> Any:
        """Count a step of a parameter and return its hyperparameters: all candidates, if steps before are pending.

        Allocates no tensor: in a backward, the compute tier may be full.
        """
        step = self.states_of(parameter)["step"]
        number = int(step) + 1
        step.fill_(number)
        return self.pending_steps.hyper(parameter, number, at)

    def updater(self, device: torch.device, *, by_triton: bool | None = None) -> Updater:
        """Return the rule's updates on a device, by Triton where that computes."""
        by_triton = on_device.computes_by_triton(device) if by_triton is None else by_triton
        if (device, by_triton) not in self._updaters:
            self._updaters[device, by_triton] = self.rule.updater(device, by_triton=by_triton)
        return self._updaters[device, by_triton]
