"""Run a list of passes over graphs: each is named, timed, logged, dumped, and can be left out.

`CHUNKC_DISABLE_PASS=name,name` leaves passes out, to find the one that breaks a graph. `CHUNKC_VERIFY_PASSES=1` checks
the graphs before and after each pass; the tests set it. Graphs go to the log of `TORCH_LOGS="+chunkc"` and, as
artifacts, to `TORCH_TRACE`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.ir.errors import InternalError, OptionsError
from chunkc.passes.graphs.graphs import output_node
from chunkc.torch_private.engine import trace_artifact

DISABLE = "CHUNKC_DISABLE_PASS"
"""The environment variable with the names of passes to leave out, separated by commas."""

VERIFY = "CHUNKC_VERIFY_PASSES"
"""The environment variable that has graphs checked before and after each pass, where it is "1"."""

logger = logging.getLogger(__name__)

Graphs = tuple[fx.GraphModule, ...]
"""One graph (Dynamo's, the joint graph, a forward without backward), or a forward and its backward."""


class Context(Protocol):
    """The part of a pass's context that the runner reads."""

    @property
    def num_user_outputs(self) -> int | None:
        """The number of the forward's outputs that are the caller's, where a backward follows it; else None."""


C = TypeVar("C", bound=Context)


@dataclass(frozen=True)
class Pass(Generic[C]):
    """A rewrite of graphs.

    Attributes:
        run: maps graphs and a context to graphs; may change the graphs that it is given.
        required: why later stages cannot do without the pass; empty where they can.
    """

    name: str
    run: Callable[[Graphs, C], Graphs]
    required: str = ""


def are_all_run_unchecked() -> bool:
    """Whether no pass is left out, checked or dumped: then graphs need not go through them to be seen or changed."""
    asked = os.environ.get(DISABLE, "").strip() or os.environ.get(VERIFY) == "1"
    return not asked and not logger.isEnabledFor(logging.DEBUG)


def disabled(passes: Iterable[Pass]) -> frozenset[str]:
    """Return the names of the passes that the environment leaves out.

    Args:
        passes: all that there are, of every stage.

    Raises:
        OptionsError: a name is unknown, or its pass is required.
    """
    by_name = {each.name: each for each in passes}
    names = [name for name in map(str.strip, os.environ.get(DISABLE, "").split(",")) if name]
    for name in names:
        if name not in by_name:
            optional = ", ".join(each.name for each in by_name.values() if not each.required)
            required = ", ".join(each.name for each in by_name.values() if each.required)
            raise OptionsError(
                f"{DISABLE} names {name!r}, and there is no such pass; those that can be left out: {optional}; "
                f"required: {required}"
            )
        if by_name[name].required:
            raise OptionsError(f"{DISABLE} names {name!r}, which is required: {by_name[name].required}")
    return frozenset(names)


def run_passes(passes: Sequence[Pass[C]], graphs: Graphs, context: C, left_out: frozenset[str] = frozenset()) -> Graphs:
    """Run passes in their order, except those that are left out.

    Raises:
        InternalError: a pass broke a graph, and `CHUNKC_VERIFY_PASSES` is set.
    """
    verifies = os.environ.get(VERIFY) == "1"
    if verifies:
        _check("the passes before", graphs)
    for each in passes:
        if each.name in left_out:
            logger.info("pass %s: left out", each.name)
            continue
        results = _results(graphs, context.num_user_outputs) if verifies else []
        num_nodes, begin_s = _num_nodes(graphs), time.perf_counter()
        graphs = each.run(graphs, context)
        elapsed_s = time.perf_counter() - begin_s
        logger.info("pass %s: %.1f ms, %d nodes -> %d", each.name, 1e3 * elapsed_s, num_nodes, _num_nodes(graphs))
        if verifies:
            _check(f"pass {each.name}", graphs)
            _check_results(f"pass {each.name}", results, _results(graphs, context.num_user_outputs))
        for phase, module in zip(("forward", "backward") if len(graphs) > 1 else ("graph",), graphs, strict=True):
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s after pass %s:\n%s", phase, each.name, code_of(module.graph))
            trace_artifact(f"chunkc_pass_{each.name}_{phase}", partial(code_of, module.graph))
    return graphs


def code_of(graph: fx.Graph) -> str:
    """Return a graph's code as the graph is now; that of its module may be of the graph before a pass."""
    return graph.python_code("self").src


def _num_nodes(graphs: Graphs) -> int:
    return sum(len(module.graph.nodes) for module in graphs)


def _check(name: str, graphs: Graphs) -> None:
    """Check that each graph is well formed, and that its nodes and their users agree.

    Raises:
        InternalError: one is not, after what `name` says.
    """
    for module in graphs:
        try:
            module.graph.lint()
        except (RuntimeError, AssertionError) as error:
            raise InternalError(f"{name} made a graph that is not well formed: {error}") from error
        for fault in _faults(module.graph):
            raise InternalError(f"{name} made a graph with {fault}")


def _faults(graph: fx.Graph) -> Iterator[str]:
    """Yield where users and inputs differ, which `fx.Graph.lint` does not look at."""
    nodes = set(graph.nodes)
    for node in graph.nodes:
        for user in node.users:
            if user not in nodes or node not in user.all_input_nodes:
                yield f"a user of {node.name} that does not read it: {user.name}"
        for source in node.all_input_nodes:
            if node not in source.users:
                yield f"a reader of {source.name} that is none of its users: {node.name}"


def _results(graphs: Graphs, num_user_outputs: int | None) -> list[object]:
    """Return the fake values of what the graphs return to their caller and to autograd, in order."""
    forward, *backward = (pytree.tree_leaves(output_node(module.graph).args[0]) for module in graphs)
    values = [*(forward[:num_user_outputs] if backward else forward), *(value for phase in backward for value in phase)]
    return [
        value.meta.get("val", value.meta.get("example_value")) if isinstance(value, fx.Node) else value
        for value in values
    ]


def _check_results(name: str, before: Sequence[object], after: Sequence[object]) -> None:
    """Check that a pass has left shapes, dtypes and strides of results as they were. Results that were None may appear.

    Raises:
        InternalError: it has not.
    """
    if len(before) != len(after):
        raise InternalError(f"{name} made {len(after)} results of {len(before)}")
    for place, (former, value) in enumerate(zip(before, after, strict=True)):
        if former is not None and _form(former) != _form(value):
            raise InternalError(f"{name} changed result {place} from {_form(former)} to {_form(value)}")


def _form(value: object) -> str:
    """Describe a value; symbols by their names, so that no guard is made of a comparison."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}" if isinstance(value, int | float | bool) else type(value).__name__
    strides = list(map(str, value.stride())) if value.layout is torch.strided and not value.is_nested else value.layout
    return f"{value.dtype} {list(map(str, value.shape))} {strides}"
