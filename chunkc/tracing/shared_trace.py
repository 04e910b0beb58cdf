"""Share one trace of a Dynamo graph between equal modules, each with parameters of its own.

Dynamo gives one graph to blocks that look alike (`for block in layers: block.compile()`, or a loop with a graph break).
AOTAutograd would make the same forward and backward of it for each. It is asked once; at run time the trace finds out
which module it runs for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from chunkc.torch_private.engine import current_node, leaf_at
from chunkc.torch_private.fake import FakeTensor
from chunkc.tracing.capture import TracedGraphs
from chunkc.utils.recent import Recent


class Runs(Protocol):
    """A compiled graph: runs both phases with AOTAutograd's arguments."""

    def forward(self, arguments: list[Any]) -> list[Any]: ...

    def backward(self, arguments: list[Any]) -> list[Any]: ...


@dataclass(frozen=True)
class Binding:
    """A module that uses a trace.

    Attributes:
        trained: its parameters that need gradients.
        graphs: the compiled graph, once there is one.
    """

    trained: tuple[ref[nn.Parameter], ...]
    graphs: Sequence[Runs]

    @property
    def is_gone(self) -> bool:
        return any(parameter() is None for parameter in self.trained)

    def trains(self, leaves: set[int]) -> bool:
        """Whether all its trained parameters are alive and among these, given by `id`."""
        return all((parameter := known()) is not None and id(parameter) in leaves for known in self.trained)


class Bindings:
    """The modules that share a trace, and the one of them that runs now."""

    def __init__(self) -> None:
        self._running = threading.local()
        self._bindings: list[Binding] = []

    def run_forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward of the module that this thread calls."""
        running: Binding = self._running.binding
        return running.graphs[0].forward(arguments)

    def run_backward(self, arguments: list[Any]) -> list[Any]:
        """Run the backward of the module with the parameters that autograd's running node leads to."""
        return self._of_running_node().graphs[0].backward(arguments)

    def _of_running_node(self) -> Binding:
        if len(self._bindings) == 1:
            return self._bindings[0]
        node = current_node()
        leaves = {id(leaf_at(source)) for source, _ in (() if node is None else node.next_functions)}
        (found,) = (binding for binding in self._bindings if binding.trains(leaves))
        return found

    def can_add(self, trained: Sequence[nn.Parameter]) -> bool:
        """Whether a backward could tell a module with these parameters from the others."""
        leaves = {id(parameter) for parameter in trained}
        return bool(trained) and not any(binding.trains(leaves) for binding in self._bindings)

    def add(
        self, trained: Sequence[nn.Parameter], graphs: Sequence[Runs], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return `call`, which calls back `run_forward`, for a module with these parameters."""
        added = Binding(tuple(ref(parameter) for parameter in trained), graphs)
        self._bindings = [added, *(binding for binding in self._bindings if not binding.is_gone)]

        def called(*args: Any) -> Any:
            before = getattr(self._running, "binding", None)
            self._running.binding = added
            try:
                return call(*args)
            finally:
                self._running.binding = before

        return called


@dataclass(frozen=True)
class SharedTrace:
    """The forward and backward that AOTAutograd made of a graph, for several modules.

    Attributes:
        call: for Dynamo to call, inside a function of `bindings`.
        parameter_names: per input, the parameter's name in `capture`; None for an input that is none.
    """

    bindings: Bindings
    call: Callable[..., Any]
    capture: TracedGraphs
    parameter_names: Sequence[str | None]

    def named(self, parameter_names: Sequence[str | None]) -> TracedGraphs:
        """Return the graphs with other names of the parameters."""
        pairs = zip(self.parameter_names, parameter_names, strict=True)
        return self.capture.renamed({old: new for old, new in pairs if old is not None and new is not None})


MAX_TRACES = 64
"""Traces of one graph that are kept, each for other shapes; the one not used for longest goes. Modules keep theirs."""

Traces = Recent[Hashable, SharedTrace]
"""Traces of one Dynamo graph, by `trace_key`."""


def trace_key(inputs: Sequence[Any], parameter_names: Sequence[str | None]) -> Hashable | None:
    """Return what two calls must share to be traced once, or None if the trace serves these inputs alone.

    AOTAutograd reads of its inputs their layouts, whether they need gradients, and which of them share memory.
    """
    storages: dict[int, int] = {}
    found: list[Hashable] = []
    for place, (value, name) in enumerate(zip(inputs, parameter_names, strict=True)):
        if isinstance(value, (bool, int, float, str, type(None))):
            found.append((type(value), value))
            continue
        if type(value) not in (torch.Tensor, nn.Parameter, FakeTensor) or value.layout is not torch.strided:
            return None
        sizes = (*value.shape, *value.stride())
        if not all(isinstance(size, int) for size in sizes):
            return None
        shared = storages.setdefault(value.untyped_storage()._cdata, place)
        flags = value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), name is None
        found.append((sizes, value.dtype, value.device, flags, shared))
    return tuple(found)
