"""Describe what an optimizer updates, and the optimizer as its updates see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from chunkc.ir.states import StateFormat
from chunkc.optim.grad_scale import AssumedScale
from chunkc.optim.rule import Rule, Updater
from chunkc.optim.split_masters import NotedContents
from chunkc.optim.states import Dtypes
from chunkc.optim.update_mode import UpdateMode
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.session import Session, owner


class ParameterGroups(Protocol):
    """An optimizer as far as its parameter groups."""

    @property
    def param_groups(self) -> Any: ...


class SteppingOptimizer(ParameterGroups, Protocol):
    """An optimizer as its updates see it. `chunkc.optim.optimizer.ChunkedOptimizer` is one."""

    rule: Rule
    states: StateFormat
    overlap: UpdateMode
    contents: NotedContents
    assumed_scale: AssumedScale

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]: ...

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]: ...

    def state_on_tier(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]: ...

    def dtypes_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Dtypes: ...

    def begin_states(self, state: Mapping[str, Any], kinds: Iterable[str]) -> None: ...

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None: ...

    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any: ...

    def hyper_now(self, group: Mapping[str, Any], parameter: torch.Tensor) -> Any: ...

    def next_hyper(self, parameter: torch.Tensor, at: Callable[[int], Any]) -> Any: ...

    def updater(self, device: torch.device, *, by_triton: bool | None = None) -> Updater: ...

    def lay_out(self, parameters: Iterable[torch.Tensor]) -> None: ...

    def check_group(self, group: Mapping[str, Any]) -> None: ...

    def check_dtype(self, parameter: torch.Tensor, name: str = "") -> None: ...


class Task(NamedTuple):
    """A parameter to update, its name in its session (empty: it is in none), and its parameter group."""

    parameter: torch.Tensor
    name: str
    group: Mapping[str, Any]


def tasks_of(optimizer: ParameterGroups) -> Iterator[tuple[Session | None, Task]]:
    """Iterate over an optimizer's parameters in order, each with its session; of those that are cut over ranks, this
    rank's shards."""
    for group in optimizer.param_groups:
        for parameter in map(local_shard_of, group["params"]):
            session, name = owner(parameter) or (None, "")
            yield session, Task(parameter, name, group)
