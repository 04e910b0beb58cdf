"""Trace Dynamo's graph into a forward and a backward graph by AOTAutograd; nothing is compiled or run here."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.ir.errors import UnsupportedError
from chunkc.options import LossTileRows
from chunkc.passes.graphs.graphs import module_path, output_node, placeholders, returned, value_of
from chunkc.passes.rewrite.loss_tiles import Losses
from chunkc.passes.rewrite.repeats import find_repeats, shortened
from chunkc.passes.rewrite.runner import Graphs
from chunkc.passes.rewrite.unrolling import NotAlike
from chunkc.torch_private.aot import (
    NotCopied,
    aot_module_simplified,
    forbid_donation,
    in_a_tracing_context,
    linalg_checks_decomposed,
    marked_as_boxed,
    outside_alias_check,
    random_states_as_values,
    without_unread_code,
    without_unread_texts,
)
from chunkc.torch_private.dynamo import is_of_a_module, source_name
from chunkc.torch_private.engine import without_autocast
from chunkc.torch_private.fake import TracingContext, is_traceable_wrapper_subclass
from chunkc.torch_private.trace_cache import Boxed, Phase, serializable
from chunkc.torch_private.versions import warn_if_newer
from chunkc.tracing import passes
from chunkc.tracing.decompositions import decompositions
from chunkc.tracing.passes import JointContext, TraceContext
from chunkc.tracing.trace_cache import BACKWARD, Entry, stand_in

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"^[LG]\['([^']*)'\]")
"""The variable that Dynamo's expression for an input begins with."""


@dataclass
class TracedGraphs:
    """The graphs that AOTAutograd hands over, piece by piece.

    Attributes:
        num_user_outputs: how many of the forward's outputs are the caller's; the rest is saved for the backward.
        new_buffers: positions of the inputs that the first of these outputs replace: buffers.
        by_placeholder: the forward's (and so the backward's) placeholders that are parameters -> the parameters' names.
        gradients: positions among the backward's outputs -> the parameters they are gradients of.
        losses: those that are large enough for tiles, tiled or not.
        may_repeat: parts of the forward may be repeated in the backward.
    """

    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    num_user_outputs: int | None = None
    new_buffers: tuple[int, ...] = ()
    by_placeholder: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[int, str] = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    may_repeat: bool = False

    def graphs(self) -> Graphs:
        """Return the forward and, if there is one, the backward."""
        assert self.forward is not None
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def order_of_use(self) -> list[str]:
        """Parameter names in the order in which the forward reads them first; those it never reads come last."""
        assert self.forward is not None
        found: dict[str, None] = {}
        for node in self.forward.graph.nodes:
            for source in node.all_input_nodes:
                if source.name in self.by_placeholder and node.op != "output":
                    found.setdefault(self.by_placeholder[source.name])
        return [*found, *(name for name in self.by_placeholder.values() if name not in found)]

    def renamed(self, names: Mapping[str, str]) -> TracedGraphs:
        """Return the same graphs with other names of the parameters; `names`: the present ones -> the new ones."""
        by_placeholder = {placeholder: names[name] for placeholder, name in self.by_placeholder.items()}
        return replace(
            self, by_placeholder=by_placeholder, gradients={at: names[name] for at, name in self.gradients.items()}
        )


def _with_numbers(run: Boxed, graph: fx.Graph) -> Boxed:
    """Add to the results of `run` what `graph` returns that no node makes: sizes that tracing made numbers."""
    (values,) = output_node(graph).args
    assert isinstance(values, (tuple, list))
    numbers = {place: v for place, v in enumerate(values) if v is not None and not isinstance(v, fx.Node)}

    def with_numbers(arguments: list[Any]) -> list[Any]:
        results = run(arguments)
        for place, number in numbers.items():
            results[place] = number
        return results

    return with_numbers if numbers else run


def unique_name(name: str, is_free: Callable[[str], bool]) -> str:
    """Return the name, or the first of `name#2`, `name#3`, ... that is free."""
    unique, number = name, 2
    while not is_free(unique):
        unique, number = f"{name}#{number}", number + 1
    return unique


def capture_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    parameter_names: Sequence[str | None],
    *,
    codegen: str,
    loss_tile_rows: LossTileRows = "never",
    repeatable: bool = False,
    run_forward: Boxed,
    run_backward: Boxed,
) -> tuple[Callable[..., Any], TracedGraphs]:
    """Trace `gm` for `inputs`.

    Args:
        parameter_names: per input, the parameter's name; None for an input that is none.
        codegen: what will compile the segments; decides what is decomposed.
        loss_tile_rows: compute losses of more rows in tiles of so many (see `passes.loss_tiles`).
        repeatable: parts of the forward may be repeated in the backward: they read copies of buffers that it updates.
        run_forward, run_backward: called with a list of arguments, which they empty, when the graph runs.

    Returns:
        What Dynamo is to call, and the graphs. Parameters' views are copied to their readers in them.

    Raises:
        UnsupportedError: the graph changes inputs that share memory, has an operator with an effect of its own, or
            makes nested tensors and is traced outside of Dynamo.
    """
    warn_if_newer()
    if TracingContext.try_get() is None:
        _refuse_nested_tensors(gm.graph)
    # Nothing below keeps the inputs: PyTorch 2.11 keeps these functions with the graph.
    context = TraceContext(
        parameter_names,
        [
            (name is not None or is_of_a_module(node)) and isinstance(value, torch.Tensor) and not value.requires_grad
            for node, name, value in zip(placeholders(gm.graph), parameter_names, inputs, strict=True)
        ],
        num_outputs=len(returned(gm.graph)),
        codegen=codegen,
        loss_tile_rows=loss_tile_rows,
    )
    capture, wrappers = TracedGraphs(may_repeat=repeatable), _wrapper_inputs(gm, inputs)
    (gm,) = passes.run(passes.DYNAMO, (gm,), context)
    capture.losses = context.losses
    entry: Entry | None = None

    def partition_fn(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        of_joint = JointContext(context, joint_inputs, kwargs)
        capture.num_user_outputs = context.num_user_outputs = kwargs["num_fwd_outputs"]
        if entry is None:
            forward, backward = passes.partitioned(joint, of_joint)
        else:
            forward, backward = passes.partitioned(joint, of_joint, entry.keep)
        capture.backward = NotCopied(backward, backward.graph)  # `backward_compiler` reads none
        return forward, capture.backward if entry is None else stand_in(backward.graph)

    def forward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        capture.forward = gm
        capture.new_buffers = context.new_buffers = forbid_donation()
        run = boxed(_with_numbers(run_forward, gm.graph))
        return run if entry is None else Phase(run, entry.content(capture.num_user_outputs, capture.new_buffers))

    def inference_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        (gm,) = passes.run(passes.JOINT, (gm,), JointContext(context, example_inputs))
        if entry is not None:
            entry.keep((gm,), None)
        return forward_compiler(gm, example_inputs)

    # AOTAutograd may ask for the backward at its first run only; it was planned with the forward all the same.
    def backward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        run = boxed(run_backward)
        return run if entry is None else Phase(run, BACKWARD)

    def restore(content: bytes) -> Boxed:
        if content == BACKWARD:
            return boxed(run_backward)
        assert entry is not None
        kept = entry.trace(content)
        capture.num_user_outputs = context.num_user_outputs = kept.num_user_outputs
        capture.new_buffers = context.new_buffers = kept.new_buffers
        graphs = kept.graphs
        if len(graphs) > 1:
            graphs = passes.finished(graphs, JointContext(context, inputs, names=kept.names))
        capture.forward, *backward = graphs
        capture.backward = next(iter(backward), None)
        return boxed(_with_numbers(run_forward, capture.forward.graph))

    def trace(traced: fx.GraphModule) -> Any:
        nonlocal entry
        entry = Entry.of(traced, gm, inputs, context)
        with (
            nullcontext() if entry is None else entry.looked_up(restore),
            random_states_as_values(),
            linalg_checks_decomposed(),
            in_a_tracing_context(),
            without_unread_texts(),
            without_unread_code(),
        ):
            return aot_module_simplified(
                traced,
                inputs,
                fw_compiler=forward_compiler if entry is None else serializable(forward_compiler),
                bw_compiler=backward_compiler,
                inference_compiler=inference_compiler,
                partition_fn=partition_fn,
                decompositions=decompositions(codegen),
            )

    context.repeats = None if passes.is_left_out(passes.UNROLL) else find_repeats(gm.graph)
    if context.repeats is None:
        call = trace(gm)
    else:
        try:
            with shortened(gm, context.repeats) as short:
                call = trace(short)
            _forget_autograd(short, are_inputs_read=False)
        except NotAlike as error:
            logger.debug("all layers are traced: %s", error)
            context.repeats = None
            call = trace(gm)
    _name_parameters(capture, parameter_names, wrappers)
    capture.forward, *backward = passes.run(passes.TRACED, capture.graphs(), context)
    capture.backward = next(iter(backward), None)
    _forget_autograd(gm)
    return call, capture


def _forget_autograd(gm: fx.GraphModule, *, are_inputs_read: bool = True) -> None:
    """Drop the fake values that Dynamo noted in its graph, which lives as long as the compiled model.

    Their autograd nodes hold real tensors: the `128` of `x / 128` as an int64, in memory that no plan counts. Of the
    graph's inputs the values stay, without autograd, if they are read: they say what is dynamic.
    """
    inputs = set(placeholders(gm.graph)) if are_inputs_read else set()
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            value = node.meta.pop("example_value", None)
            if node in inputs and value is not None:
                node.meta["example_value"] = pytree.tree_map_only(torch.Tensor, detached, value)


def boxed(function: Boxed) -> Boxed:
    """Wrap a phase for AOTAutograd: it takes one list, which it may empty (the boxed calling convention).

    It runs without autocast: its casts are operators of the graph, and `backward()` may be called in an autocast block.
    Dynamo does not trace into it, though a function that Dynamo compiles may run the backward.
    """

    @torch.compiler.disable
    def call(arguments: list[Any]) -> list[Any]:
        with outside_alias_check(), without_autocast():
            return function(arguments)

    return marked_as_boxed(call)


def detached(traced: torch.Tensor) -> torch.Tensor:
    """Detach a fake tensor from autograd's graph; one that stands for a number keeps that number's symbol."""
    found = traced.detach()
    if hasattr(traced, "item_memo"):
        found.item_memo = traced.item_memo  # type: ignore[attr-defined]
    return found


def _refuse_what_no_plan_describes(graph: fx.Graph) -> None:
    """Refuse operators that plans do not describe.

    AOTAutograd keeps the order of operators that act on nothing in the graph, by tokens that are inputs of it. Some
    operators call graphs of their own. And a sparse tensor has no storage with bytes to count.

    Raises:
        UnsupportedError: there is such an operator.
    """
    for node in graph.nodes:
        if (layout := _unstrided_layout(node)) is not None:
            where = f" in {module_path(node)}" if module_path(node) else ""
            raise UnsupportedError(
                f"{node.target}{where} makes a tensor of layout {layout}, and no plan counts its bytes; use dense "
                "tensors there, or keep it out of the graph with torch.compiler.disable"
            )
        if getattr(node.target, "__name__", "") == "with_effects":
            raise UnsupportedError(
                f"{node.args[1]} has an effect besides its outputs, which no plan keeps in order; keep it out of the "
                "graph with torch.compiler.disable"
            )
        if any(source.op == "get_attr" and "val" not in source.meta for source in node.all_input_nodes):
            where = f" in {module_path(node)}" if module_path(node) else ""
            raise UnsupportedError(
                f"the higher-order operator {node.target}{where} calls graphs of its own, which no plan describes; "
                "write that part of the model without it, or keep it out of the graph with torch.compiler.disable"
            )


def _refuse_nested_tensors(graph: fx.Graph) -> None:
    """Refuse to trace anew, outside of Dynamo, what makes a nested tensor: only Dynamo has symbols for its lengths.

    Raises:
        UnsupportedError: the graph makes one.
    """
    for node in graph.nodes:
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("torch.nested"):
            where = f" in {module_path(node)}" if module_path(node) else ""
            raise UnsupportedError(
                f"a nested tensor is made{where}, which Dynamo alone can trace, and a call has other shapes or "
                "parameters than those that it traced; say torch.compile(..., dynamic=False), by which it traces each "
                "shape, or compute on padded tensors"
            )


def _wrapper_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
    """Return the inputs that are tensors made of other tensors, as text such as `batch['x'] (NestedTensor)`."""
    found = []
    for node, value in zip(placeholders(gm.graph), inputs, strict=True):
        if is_traceable_wrapper_subclass(value):
            path = _VARIABLE.sub(r"\1", source_name(node))
            found.append(f"{path or node.name} ({type(value).__name__})")
    return found


def _unstrided_layout(node: fx.Node) -> torch.layout | None:
    """Return the layout of a node's value if it is a sparse tensor, else None."""
    layouts = (leaf.layout for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, torch.Tensor))
    return next((layout for layout in layouts if layout is not torch.strided), None)


def _refuse_sparse_gradients(backward: fx.Graph, names: Sequence[str | None]) -> None:
    """Refuse parameters with sparse gradients.

    Raises:
        UnsupportedError: there are some.
    """
    sparse = [
        name
        for gradient, name in zip(returned(backward), names)
        if name is not None and gradient is not None and _unstrided_layout(gradient) is not None
    ]
    if sparse:
        more = f" and of {len(sparse) - 1} more parameters" if len(sparse) > 1 else ""
        raise UnsupportedError(
            f"the gradient of {sparse[0]}{more} is sparse, and chunks have room for dense gradients alone; use "
            "sparse=False in nn.Embedding or nn.EmbeddingBag"
        )


def _name_parameters(capture: TracedGraphs, names: Sequence[str | None], wrappers: Sequence[str]) -> None:
    """Note which placeholders and gradients belong to which parameters.

    Args:
        names: per input of Dynamo's graph, the parameter's name; None for an input that is none.
        wrappers: inputs that are tensors around other tensors, as text.
    """
    forward, backward = capture.forward, capture.backward
    assert forward is not None
    if backward is not None:
        _refuse_sparse_gradients(backward.graph, names)
    for phase in capture.graphs():
        _refuse_what_no_plan_describes(phase.graph)
    primals = placeholders(forward.graph)
    if len(primals) != len(names):
        if wrappers:
            raise UnsupportedError(
                f"{wrappers[0]} is a tensor made of other tensors, which no plan describes; pass those (of a jagged "
                "nested tensor: values() and offsets()) and put them together inside the model, or pass a padded tensor"
            )
        raise UnsupportedError("the model changes inputs that share memory; pass copies of them")
    capture.by_placeholder = {node.name: name for node, name in zip(primals, names) if name is not None}
    if backward is not None:
        results = returned(backward.graph)
        capture.gradients = {i: name for i, name in enumerate(names) if name is not None and results[i] is not None}
