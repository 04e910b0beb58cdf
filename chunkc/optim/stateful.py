"""What an optimizer has whose states may live in chunks: they are made, laid out, saved, loaded and copied here."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.states import EXP_AVG, MASTER, MASTER_LOW, StateFormat
from chunkc.optim.doubts import Doubts
from chunkc.optim.split_masters import NotedContents, load, put_masters_together
from chunkc.optim.states import KNOWN, Dtypes, converted, empty_state, initialise, is_kept, names_at_home, tensor_of
from chunkc.optim.waiting_optimizer import WaitingOptimizer
from chunkc.session import declare_states, declared_states, lay_out_states, managing


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
    def _check_group(self, group: Mapping[str, Any]) -> None:
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
            if sources is None:
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

        Raises:
            ValueError: the state does not fit the parameters, as in `torch.optim`.
        """
        for loaded in state_dict["param_groups"]:
            self._check_group({**self.defaults, **loaded})
        self._doubts.settle(wait=True)
        states = state_dict["state"]
        self._under_way.finish()
        self._in_backward.forget(self)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = self._parameters()
        loaded_into = [parameter for index, parameter in zip(ids, parameters, strict=True) if index in states]
        for (session, group), names in names_at_home(loaded_into).items():
            session.keep_states_of(self, group, names)
        with torch.no_grad():
            for index, parameter in zip(ids, parameters, strict=True):
                if index in states:
                    self._load_state(parameter, states[index])

    def _load_state(self, parameter: torch.Tensor, loaded: Mapping[str, Any]) -> None:
        unsupported = [k for k in loaded if k not in KNOWN]
        if unsupported:
            raise OptionsError(
                f"{type(self).__name__} cannot use the state {', '.join(map(str, unsupported))}; load it into the "
                "optimizer that saved it, or begin without it"
            )
        state: dict[str, Any] = {"step": tensor_of(loaded["step"]).to("cpu", torch.float32, copy=True)}
        dtypes, home = self._dtypes(parameter), managing(parameter)
        if home is not None:
            session, name = home
            self._lay_out([parameter])
            session.store.reserve_states(session.store.group_index(name))

        def room(kind: str) -> torch.Tensor:
            if home is None:
                return empty_state(parameter, kind, dtypes[kind])
            session, name = home
            return session.store.home_view(kind, name)

        for kind, source in converted(loaded, parameter, dtypes).items():
            state[kind] = room(kind)
            if home is None:
                state[kind].copy_(source)
            else:
                session.store.fill(kind, name, state[kind], source)
        if MASTER_LOW in dtypes:
            state[MASTER_LOW] = room(MASTER_LOW)
            load(self._noted_contents, loaded.get(MASTER), parameter, state[MASTER_LOW])
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
