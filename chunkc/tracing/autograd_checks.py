"""Find out how autograd uses the gradients of a compiled backward, before the backward changes anything.

A compiled backward puts gradients into `.grad` as they are made and returns None for them. So it must

- refuse to be differentiated again (`create_graph=True`);
- return gradients that `torch.autograd.grad` returns, or that hooks on autograd's nodes see;
- leave `.grad` alone for parameters that the call does not ask about (`backward(inputs=...)`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from chunkc.ir.errors import UnsupportedError
from chunkc.torch_private.dynamo import in_compiled_autograd
from chunkc.torch_private.engine import (
    current_graph_task,
    current_node,
    is_batched,
    latest_node_hook,
    leaf_at,
    will_execute,
)

MAX_BACKWARDS = 64
"""Backwards with `create_graph=True` that are remembered: more than are ever nested."""

COMPILED_AUTOGRAD = (
    "compiled autograd would run the backward of a model compiled by chunkc without its plan; turn it off "
    "(torch._dynamo.config.compiled_autograd = False) for this model"
)


class OutputHooks:
    """Hooks on the autograd nodes of a call's outputs, which see two things that a compiled backward cannot.

    - Whether the running backward makes a graph of its own (`create_graph=True`). AOTAutograd runs a compiled backward
      in an `autograd.Function`, where grad mode is off; in a hook of the node before, it is as the caller set it.
    - The outputs' gradients as they were given. AOTAutograd copies those with other strides than the outputs' before it
      hands them over, and the giver may keep the originals.
    """

    def __init__(self, given: Callable[[Sequence[object]], None]) -> None:
        """`given` is called with the outputs' gradients, before the backward that takes them."""
        self._given = given
        self._with_graph: deque[int] = deque(maxlen=MAX_BACKWARDS)
        self._hook = torch.compiler.disable(self._note, reason=COMPILED_AUTOGRAD)

    def watch(self, arguments: Iterable[object], outputs: Iterable[object]) -> None:
        """Hook all backwards that come through these outputs of a call with these arguments."""
        given = {id(value) for value in arguments}
        made = [value for value in outputs if isinstance(value, torch.Tensor) and id(value) not in given]
        for node in {value.grad_fn for value in made if value.grad_fn is not None}:
            node.register_prehook(self._hook)

    def _note(self, gradients: Sequence[object]) -> None:
        if in_compiled_autograd():
            raise UnsupportedError(COMPILED_AUTOGRAD)
        if any(isinstance(gradient, torch.Tensor) and is_batched(gradient) for gradient in gradients):
            raise UnsupportedError(
                "a model compiled by chunkc has no backward for several gradients at once, as is_grads_batched=True of "
                "torch.autograd.grad and vectorize=True of torch.autograd.functional ask for; take one at a time"
            )
        if torch.is_grad_enabled():
            self._with_graph.append(current_graph_task())
        self._given(gradients)

    def refuse_graph(self) -> None:
        """Refuse the compiled backward that runs now, which calls this, if it makes a graph of its own.

        Raises:
            UnsupportedError: it does.
        """
        if torch.is_grad_enabled() or current_graph_task() in self._with_graph:
            raise UnsupportedError(
                "gradients that a model compiled by chunkc makes cannot be differentiated again, so "
                "backward(create_graph=True) and torch.autograd.grad(create_graph=True) do not work through it; "
                "compute what needs them, such as a gradient penalty, by calling the model that was not compiled"
            )


@dataclass(frozen=True)
class Asked:
    """Uses that the running backward has for the gradients of a graph's parameters.

    Attributes:
        nodes: autograd nodes that add to `.grad`, by their parameters' names.
        returned: names of parameters with gradients that `torch.autograd.grad` returns.
        left_out: names of parameters with gradients that nothing reads: `backward(inputs=...)` does not name them.
    """

    nodes: Mapping[str, Node]
    returned: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    @property
    def adds_all(self) -> bool:
        """Whether the backward is a plain `backward()`: all gradients are added to `.grad`."""
        return not self.returned and not self.left_out


def asked_of(parameters: Mapping[str, torch.Tensor]) -> Asked:
    """Ask autograd what the running backward does with the gradients of these parameters, given by name."""
    running = current_node()
    names = {id(parameter): name for name, parameter in parameters.items()}
    nodes: dict[str, Node] = {}
    returned, left_out = set(), set()
    for node, _ in running.next_functions if running is not None and names else ():
        name = names.get(id(leaf_at(node)))
        if node is None or name is None:
            continue
        try:
            if will_execute(node):
                nodes[name] = node
            else:
                left_out.add(name)
        except RuntimeError:  # "a leaf node was passed ... but we are currently running autograd.grad()"
            returned.add(name)
    return Asked(nodes, frozenset(returned), frozenset(left_out))


class NodeHooks:
    """Tells which parameters have hooks on the autograd nodes that add to their `.grad`.

    PyTorch shows a node's hooks only through the handle that registering a hook returns. So a hook is registered and
    removed, and the handle's weak reference to the node's dict of hooks is kept. It is valid for as long as the node
    lives, often until the next forward, which makes new nodes. All this takes time, so a node without hooks is not
    looked at again until a hook is registered on any node (`latest_node_hook`).
    """

    def __init__(self) -> None:
        self._hooks_of: dict[str, tuple[Callable[[], Any], ...]] = {}
        self._unhooked: dict[str, weakref.ref[torch.Tensor]] = {}
        self._latest = latest_node_hook()

    def hooked(self, nodes: Mapping[str, Node]) -> frozenset[str]:
        """Return the names of the parameters with hooks on their nodes; `nodes` is by parameters' names."""
        if (latest := latest_node_hook()) is not self._latest:
            self._latest = latest
            self._unhooked.clear()
        asked = {name: node for name, node in nodes.items() if not self._is_known(name, node)}
        found = frozenset(name for name, node in asked.items() if self._is_hooked(name, node))
        self._unhooked |= {name: weakref.ref(leaf_at(node)) for name, node in asked.items() if name not in found}
        return found

    def _is_known(self, name: str, node: Node) -> bool:
        leaf = self._unhooked.get(name, _nothing)()
        return leaf is not None and leaf is leaf_at(node)

    def _is_hooked(self, name: str, node: Node) -> bool:
        known = [hooks() for hooks in self._hooks_of.get(name, (_nothing,))]
        if None in known:
            references = tuple(_hooks(register) for register in (node.register_prehook, node.register_hook))
            self._hooks_of[name] = references
            known = [hooks() for hooks in references]
        return any(known)


def _hooks(register: Callable[[Callable[..., None]], Any]) -> weakref.ref[dict[int, Any]]:
    """Return a weak reference to a node's dict of the hooks that `register` registers."""
    handle = register(_nothing)
    handle.remove()
    return handle.hooks_dict_ref


def _nothing(*_: object) -> None:
    """Do nothing: a hook that is removed at once, and what stands for a reference that is dead."""
