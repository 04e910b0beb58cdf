"""What an optimizer whose updates may overlap has besides its arithmetic: doors that wait."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from chunkc.optim.backward_updates import BackwardUpdates
from chunkc.optim.overlap_mode import OverlapMode
from chunkc.optim.updates_under_way import UpdatesUnderWay
from chunkc.session import Session


class WaitingOptimizer(Optimizer, ABC):
    """A `torch.optim.Optimizer` whose own methods wait for updates that are under way.

    A subclass calls `_set_overlap` before it calls `super().__init__`.
    """

    _overlap: OverlapMode
    _under_way: UpdatesUnderWay
    _in_backward: BackwardUpdates

    def _set_overlap(self, overlap: OverlapMode) -> None:
        """When updates may run; none is under way yet."""
        self._overlap = overlap
        self._under_way = UpdatesUnderWay(overlap)
        self._in_backward = BackwardUpdates(overlap, self._under_way)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_overlap": self._overlap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_overlap" in state:  # a copy, which has nothing under way; `load_state_dict` comes here too
            self._set_overlap(state["_overlap"])
        super().__setstate__(state)

    @property
    def state(self) -> Any:
        """Each parameter's states, as in `torch.optim`; waits for updates that are under way."""
        self._under_way.finish()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states, without waiting for updates under way."""
        return self.__dict__["state"][parameter]

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The same, of a parameter that may have none: nothing then."""
        return self.__dict__["state"].get(parameter, {})

    @abstractmethod
    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any:
        """The hyper-parameters of one update.

        Raises:
            OptionsError: one is out of range.
        """

    def hyper_now(self, group: Mapping[str, Any], parameter: torch.Tensor) -> Any:
        """The hyper-parameters of the parameter's latest step, as its group has them now."""
        return self.hyper_at(group, int(self.states_of(parameter)["step"]))

    def synchronize(self) -> None:
        """Wait until every update that goes on after `step()` has ended (see `chunkc.synchronize`).

        Raises:
            StreamError: an update failed; named.
        """
        self._under_way.finish()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, with `overlap="backward"` or `"both"`, no backward begins updates: more gradients will be added."""
        before, self._in_backward.accumulating = self._in_backward.accumulating, True
        try:
            yield
        finally:
            self._in_backward.accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `torch.optim`. Gradients that become zeros are waited for, if an update still reads them."""
        if not set_to_none:
            self._under_way.finish()
        super().zero_grad(set_to_none)

    def begin_update(self, session: Session, group: int) -> bool:
        """Begin the update of a chunk group during the backward (see `chunkc.early`)."""
        return self._in_backward.begin(self, session, group)

    def begun_in(self, session: Session) -> Container[int]:
        """Chunk groups whose updates have begun in the backward (see `chunkc.early`)."""
        return self._in_backward.begun_in(session)
