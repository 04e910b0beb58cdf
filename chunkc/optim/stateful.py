"""What an optimizer has whose states may live in chunks: they are made, laid out, saved, loaded and copied here."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chunkc.declared import declare_states, declared_states
from chunkc.ir.states import EXP_AVG, MASTER, MASTER_LOW, StateFormat
from chunkc.optim.doubts import Doubts
from chunkc.optim.loading import LoadedState, checked_state_dict, put_aside
from chunkc.optim.split_masters import NotedContents, load, put_masters_together
from chunkc.optim.states import Dtypes, converted, empty_state, initialise, is_kept, names_at_home
from chunkc.optim.waiting_optimizer import WaitingOptimizer
from chunkc.session import lay_out_states, managing


class Stateful(WaitingOptimizer):
    """A `torch.optim.Optimizer` that keeps states in a format, of parameters that move and of others.

    A subclass sets `_states`, `_noted_contents` and `_doubts` before it calls `super().__init__`.
    """

    _num_stages = 1
    _states: StateFormat
    _noted_contents: NotedContents
    _doubts: Doubts

    def __getstate__(self) -> dict[str, Any]:
        self._doubts.settle(wait=True)
        for parameter, state in self.state.items():
            if MASTER_LOW in state:  # a copy takes lower bits as they are
                self._noted_contents.leave_out_stale(parameter, state[MASTER_LOW])
        own = {"_states": self._states, "_noted_contents": self._noted_contents, "_doubts": Doubts()}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        undeclared = [p for p in self._parameters() if declared_states(p) is None]
        declare_states(undeclared, self._states, self._num_stages, weakref.ref(self))
        for parameter, of_parameter in self.state.items():
            if MASTER_LOW in of_parameter:
                self._noted_contents.loaded(parameter, changed=False)

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """An update of a parameter begins, whose states are all there.

        Kernels see other tensors over the same memory, with version counters of their own. So it is said here that the
        parameter changes: code that saved it for a backward of its own is told by autograd.
        """
        if MASTER_LOW in state:
            self._noted_contents.begin(parameter, state[MASTER_LOW])
        torch.autograd.graph.increment_version(parameter)

    @abstractmethod
    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse values of a parameter group that are out of range.

        Raises:
            OptionsError: one is.
        """

    def _dtypes(self, parameter: torch.Tensor) -> Dtypes:
        """The kinds of states that a parameter has here, with their dtypes."""
        return self._states.dtypes(parameter.dtype)

    def _state_on_tier(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter that does not move, made on its first update."""
        state, dtypes = self.states_of(parameter), self._dtypes(parameter)
        if is_kept(state, parameter, dtypes):
            self.begin_update_of(parameter, state)
            return state
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        sources = converted(state, parameter, dtypes) if EXP_AVG in state else None
        for kind, dtype in dtypes.items():
            state[kind] = empty_state(parameter, kind, dtype)
            if sources is None or kind not in sources:
                initialise(kind, state[kind], parameter)
            else:
                state[kind].copy_(sources[kind])
        self.begin_update_of(parameter, state)
        return state

    def state_dict(self) -> dict[str, Any]:
        """The state in `torch.optim`'s format, with fp32 masters.

        Split masters are put together for this: 4 bytes per parameter of RAM, outside the memory budget, for as long as
        the result lives. All else is not copied. Waits for a device that still knows alone which steps were skipped.
        """
        self._doubts.settle(wait=True)
        handle = self.register_state_dict_post_hook(partial(put_masters_together, self._noted_contents), prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state in this optimizer's or `torch.optim.AdamW`'s format.

        States of chunked parameters are copied home one by one; fp32 states of 16-bit parameters keep their
        precision. A missing master copy is made from the parameter. A parameter whose master is split becomes its
        master's rounded copy, as it does in the next step otherwise; its model may be loaded before or after.

        Hooks run as in `torch.optim`: those before may change what is loaded, those after find it loaded.

        Raises:
            OptionsError: the state does not fit the parameters; nothing has changed.
            HomeError: there is no room at home for the states; nothing has changed.
        """
        found: list[LoadedState] = []

        def take(_: Any, given: Mapping[str, Any]) -> dict[str, Any]:
            found.extend(self._prepared_to_load(checked_state_dict(self, given)))
            return {**given, "state": {}}

        def load_all(_: Any) -> None:
            with torch.no_grad():
                for loaded in found:
                    self._load_state(loaded)

        hooks = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(load_all, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)  # type: ignore[arg-type]
        finally:
            for hook in hooks:
                hook.remove()

    def _prepared_to_load(self, found: Sequence[LoadedState]) -> list[LoadedState]:
        """The same once there is room at home, and nobody uses the present states; put aside where loading writes.

        Raises:
            OptionsError: chunks cannot have states of this optimizer's format.
            HomeError: there is no room.
        """
        parameters = [loaded.parameter for loaded in found]
        self._lay_out(parameters)
        self._doubts.settle(wait=True)
        self._under_way.finish()
        for (session, group), names in names_at_home(parameters).items():
            session.keep_states_of(self, group, names)
            session.store.reserve_states(group)
        self._in_backward.forget(self)
        places = {
            state[kind].data_ptr(): (parameter, kind)
            for parameter, state in self.state.items()
            if managing(parameter) is not None
            for kind in self._dtypes(parameter)
            if kind in state
        }
        return [put_aside(loaded, places) for loaded in found]

    def _load_state(self, loaded: LoadedState) -> None:
        parameter = loaded.parameter
        state: dict[str, Any] = {"step": torch.tensor(loaded.step, dtype=torch.float32, device="cpu")}
        dtypes, home = self._dtypes(parameter), managing(parameter)

        def room(kind: str) -> torch.Tensor:
            if home is None:
                return empty_state(parameter, kind, dtypes[kind])
            session, name = home
            return session.store.home_view(kind, name)

        for kind, source in converted(loaded.tensors, parameter, dtypes).items():
            state[kind] = room(kind)
            if home is None:
                state[kind].copy_(source)
            else:
                session, name = home
                session.store.fill(kind, name, state[kind], source)
        if MASTER_LOW in dtypes:
            state[MASTER_LOW] = room(MASTER_LOW)
            load(self._noted_contents, loaded.tensors.get(MASTER), parameter, state[MASTER_LOW])
        self.__dict__["state"][parameter] = state

    def _lay_out(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make sure that chunks of these parameters have the states that this optimizer keeps.

        Raises:
            OptionsError: they cannot.
        """
        if any(declared_states(p) != self._states.seen_by(p.dtype) for p in parameters):
            lay_out_states(self._parameters(), self._states, self._num_stages, weakref.ref(self))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
