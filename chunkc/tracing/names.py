"""Find the user's names of the parameters and modules of a graph.

Dynamo names them as the frame that it compiles reaches them: in a block that a loop with a graph break calls,
`down.weight`. To its user that is `blocks.2.down.weight`. While a graph is compiled the calls of modules that lead to
it are on the stack, and the outermost of them knows the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from chunkc.passes.graphs.graphs import placeholders, source_path
from chunkc.torch_private.dynamo import source_name
from chunkc.tracing.caller import called_modules

_WRAPPER = "_orig_mod"
"""What `torch.compile` calls the module that it wraps: no part of a name that the user gave."""


@dataclass(frozen=True)
class UserNames:
    """Names seen from one module.

    Attributes:
        parameters: by identity.
        module: the innermost module that is being called; "" for the one the names are seen from.
    """

    parameters: Mapping[int, str] = field(default_factory=dict)
    module: str = ""

    @staticmethod
    def seen_from(root: nn.Module) -> UserNames:
        """Return the names in `root`, while the innermost call on the stack is of itself or one of its modules."""
        innermost = next(called_modules(), root)
        modules = {id(module): without_wrapper(name) for name, module in root.named_modules()}
        parameters = {id(parameter): without_wrapper(name) for name, parameter in root.named_parameters()}
        return UserNames(parameters, modules.get(id(innermost), ""))

    @staticmethod
    def of_caller() -> UserNames:
        """Return the names seen from the outermost module with a call on the stack; no names if there is none."""
        called = list(called_modules())
        return UserNames.seen_from(called[-1]) if called else UserNames()


def without_wrapper(name: str) -> str:
    """Remove the parts of a module's or parameter's name that stand for `torch.compile`'s own module."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


@dataclass(frozen=True)
class _Reached:
    """The way by which a frame reaches something: from which of its variables, and by which attributes."""

    variable: str
    path: str


class GraphNames:
    """The names in one of Dynamo's graphs. It is compiled anew for blocks that look alike, with each one's names."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._inputs = [(_reached(source_name(node)), node.name) for node in placeholders(gm.graph)]
        self._modules = [(node, _module(node)) for node in _nodes(gm)]

    def take(self, inputs: Sequence[Any], user: UserNames) -> list[str]:
        """Return the user's name of every input, and note the names of modules in the nodes of the graph."""
        prefixes: dict[str, str] = {}
        names = []
        for (reached, own), value in zip(self._inputs, inputs, strict=True):
            known = user.parameters.get(id(value)) if isinstance(value, nn.Parameter) else None
            prefix = None if known is None else _prefix(known, reached.path)
            if prefix is not None:
                prefixes.setdefault(reached.variable, prefix)
            names.append(known or reached.path or own)
        for node, (stack, innermost) in self._modules:
            prefix = user.module if innermost is None else prefixes.get(innermost.variable, user.module)
            path = _joined(prefix, "" if innermost is None else innermost.path)
            key, kind = next(reversed(stack.items())) if stack else ("", ("", nn.Module))
            node.meta["nn_module_stack"] = {**stack, key: (path, *kind[1:])} if stack or path else {}
        return names


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of the graph and of graphs inside it, as checkpointing makes them."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op not in ("placeholder", "output"))


def _module(node: fx.Node) -> tuple[dict[str, Any], _Reached | None]:
    """Read from a node's meta the modules that it is called in, and the innermost."""
    stack = dict(node.meta.get("nn_module_stack") or {})
    return stack, _reached(str(next(reversed(stack.values()))[0])) if stack else None


def _reached(source: str) -> _Reached:
    variable, path = source_path(source)
    return _Reached(variable, without_wrapper(path))


def _prefix(name: str, path: str) -> str | None:
    """Return the part of a name before a path; None if the name ends otherwise, as that of a tied parameter may."""
    if name == path:
        return ""
    return name.removesuffix(f".{path}") if path and name.endswith(f".{path}") else None


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))
