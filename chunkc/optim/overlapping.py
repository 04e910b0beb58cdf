"""What an optimizer whose updates may overlap has besides its arithmetic: doors that wait, and words for the user."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from chunkc.optim.overlap import Overlap
from chunkc.session import Session


class Overlapping(Optimizer, ABC):
    """A `torch.optim.Optimizer` whose own methods wait for updates that are under way.

    A subclass sets `_overlap` before it calls `super().__init__`.
    """

    _overlap: Overlap

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_overlap": self._overlap}

    @property
    def state(self) -> Any:
        """Each parameter's states, as in `torch.optim`; waits for updates that are under way."""
        self._overlap.finish()
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
        self._overlap.finish()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, with `overlap="backward"` or `"both"`, no backward begins updates: more gradients will be added."""
        before, self._overlap.accumulating = self._overlap.accumulating, True
        try:
            yield
        finally:
            self._overlap.accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `torch.optim`. Gradients that become zeros are waited for, if an update still reads them."""
        if not set_to_none:
            self._overlap.finish()
        super().zero_grad(set_to_none)

    def begin_update(self, session: Session, group: int) -> bool:
        """Begin the update of a chunk group during the backward (see `chunkc.early`)."""
        return self._overlap.begin(self, session, group)

    def begun_in(self, session: Session) -> Container[int]:
        """Chunk groups whose updates have begun in the backward (see `chunkc.early`)."""
        return self._overlap.begun_in(session)
