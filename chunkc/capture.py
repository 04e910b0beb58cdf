"""From Dynamo's graph to a forward and a backward graph, by AOTAutograd; nothing is compiled here and nothing runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._prims.rng_prims import run_and_save_rng_state
from torch.utils import _pytree as pytree

from chunkc.ir.errors import UnsupportedError
from chunkc.passes.alias_check import outside_alias_check
from chunkc.passes.graphs import attribute_path, placeholders, returned
from chunkc.passes.inductor.cuda import steady_inductor
from chunkc.passes.layouts import OPERANDS_ALIKE
from chunkc.passes.partition import partition
from chunkc.passes.segments import RUN_BY_ATEN, clone_parameter_views, materialise_returned_placeholders

Boxed = Callable[[list[Any]], list[Any]]


@dataclass
class Capture:
    """What AOTAutograd hands over, piece by piece.

    Attributes:
        num_user_outputs: how many of the forward's outputs are the caller's; the rest is saved for the backward.
        num_new_buffers: how many of these, the first ones, are new values of buffers.
        by_placeholder: the forward's (and so the backward's) placeholders that are parameters -> the parameters' names.
        gradients: positions among the backward's outputs -> the parameters whose gradients these are.
    """

    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    num_user_outputs: int | None = None
    num_new_buffers: int = 0
    by_placeholder: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[int, str] = field(default_factory=dict)

    def order_of_use(self) -> list[str]:
        """Parameter names in the order in which the forward reads them first; those it never reads come last."""
        assert self.forward is not None
        found: dict[str, None] = {}
        for node in self.forward.graph.nodes:
            for source in node.all_input_nodes:
                if source.name in self.by_placeholder and node.op != "output":
                    found.setdefault(self.by_placeholder[source.name])
        return [*found, *(name for name in self.by_placeholder.values() if name not in found)]


def input_names(gm: fx.GraphModule) -> list[str]:
    """The user's name of every input of Dynamo's graph: a parameter's attribute path, an argument's own name."""
    names = []
    for node in placeholders(gm.graph):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        names.append(attribute_path(name() if callable(name) else name) or node.name)
    return names


def unique_name(name: str, is_free: Callable[[str], bool]) -> str:
    """The name, or the first of `name#2`, `name#3`, ... that is free."""
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
    run_forward: Boxed,
    run_backward: Boxed,
) -> tuple[Callable[..., Any], Capture]:
    """Trace `gm` for `inputs`.

    Args:
        parameter_names: per input, the parameter's name; None for an input that is none.
        codegen: who will compile the segments; decides what is decomposed.
        run_forward, run_backward: called with a list of arguments, which they empty, when the graph runs.

    Returns:
        What Dynamo is to call, and the graphs. Parameters' views are copied to their readers in them.

    Raises:
        UnsupportedError: the graph changes inputs that share memory.
    """
    capture = Capture()

    def partition_fn(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        capture.num_user_outputs = kwargs["num_fwd_outputs"]
        if codegen == "inductor":
            with V.set_fake_mode(detect_fake_mode(joint_inputs)), steady_inductor(pytree.tree_leaves(joint_inputs)):
                joint_graph_passes(joint)
        is_parameter = [name is not None for name in parameter_names]
        forward, capture.backward = partition(joint, joint_inputs, is_parameter=is_parameter, **kwargs)
        return forward, capture.backward

    def forward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        capture.forward = gm
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            capture.num_new_buffers = context.fw_metadata.num_mutated_inp_runtime_indices
        return boxed(run_forward)

    # AOTAutograd may ask for the backward at its first run only; it was planned with the forward all the same.
    def backward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return boxed(run_backward)

    # States of random generators are values as on a CPU: on CUDA they would else be inputs that nobody gave.
    with functorch_config.patch(graphsafe_rng_functionalization=False):
        call = aot_module_simplified(
            gm,
            inputs,
            fw_compiler=forward_compiler,
            bw_compiler=backward_compiler,
            inference_compiler=forward_compiler,
            partition_fn=partition_fn,
            decompositions=_decompositions(codegen),
        )
    _name_parameters(capture, parameter_names)
    assert capture.forward is not None
    _fix_lengths_of_random_states(capture.forward.graph)
    _forget_autograd(gm)
    return call, capture


def _forget_autograd(gm: fx.GraphModule) -> None:
    """Detach the fake values that Dynamo noted in its graph, which lives as long as the compiled model.

    Their autograd nodes hold real tensors: the `128` of `x / 128` as an int64, in memory that no plan counts.
    """
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if value is not None:
            node.meta["example_value"] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def _fix_lengths_of_random_states(graph: fx.Graph) -> None:
    """Take them for what they are: AOTAutograd makes a symbol of the length of a state that it saves."""
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[1] == 0 and node.args[0].target is run_and_save_rng_state:
            for length in node.meta["val"].shape:
                int(length)  # from now on the symbol is this number


def boxed(function: Boxed) -> Boxed:
    """A phase for AOTAutograd: marked as taking one list that it may empty (the boxed convention)."""

    def call(arguments: list[Any]) -> list[Any]:
        with outside_alias_check():
            return function(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _decompositions(codegen: str) -> dict[Any, Callable[..., Any]]:
    """What AOTAutograd takes apart: for Inductor its own table, but for the operators that run as they are
    (`segments.RUN_BY_ATEN`); for eager, next to nothing, but `layouts.OPERANDS_ALIKE` get operands of one order."""
    if codegen == "eager":
        return {**OPERANDS_ALIKE, **get_decompositions(_KEEP_MORE_THAN_THEY_SHOW)}
    return {op: decompose for op, decompose in select_decomp_table().items() if op not in RUN_BY_ATEN}


_KEEP_MORE_THAN_THEY_SHOW = [
    torch.ops.aten.mse_loss,
    torch.ops.aten.smooth_l1_loss,
    torch.ops.aten.huber_loss,
    torch.ops.aten.binary_cross_entropy,
    torch.ops.aten.soft_margin_loss,
]
"""Losses whose scalar result lives in storage of the unreduced size on a CPU: bytes that no shape tells of."""


def _name_parameters(capture: Capture, names: Sequence[str | None]) -> None:
    """Note which placeholders and gradients belong to which parameters, and copy parameters' views to their readers."""
    forward, backward = capture.forward, capture.backward
    assert forward is not None
    primals = placeholders(forward.graph)
    if len(primals) != len(names):
        raise UnsupportedError("the model changes inputs that share memory; pass copies of them")
    capture.by_placeholder = {node.name: name for node, name in zip(primals, names) if name is not None}
    clone_parameter_views(forward.graph, [n for n in primals if n.name in capture.by_placeholder])
    if backward is not None:
        results = returned(backward.graph)
        capture.gradients = {i: name for i, name in enumerate(names) if name is not None and results[i] is not None}
        materialise_returned_placeholders(backward.graph, list(capture.gradients))
        views_of = [n for n in placeholders(backward.graph) if n.name in capture.by_placeholder]
        clone_parameter_views(backward.graph, views_of)
