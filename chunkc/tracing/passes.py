"""List the passes that rewrite a graph on its way from Dynamo to segments, in their order (see `rewrite.runner`).

Inserting a plan's chunk nodes is no pass: `passes.rewrite.insert` builds another graph from a program and a plan, and
`chunkc.ir.verify` walks that one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from chunkc.ir.layout import ChunkLayout
from chunkc.options import LossTileRows
from chunkc.passes.graphs.collectives import wait_at_once
from chunkc.passes.graphs.graphs import copy_of, placeholders, returned
from chunkc.passes.graphs.shapes import numbers_first
from chunkc.passes.memory.inductor.cuda import steady_inductor
from chunkc.passes.planning.recompute import draws
from chunkc.passes.rewrite.casts import read_as_casts, with_casts_given
from chunkc.passes.rewrite.loss_tiles import Losses, tile_losses
from chunkc.passes.rewrite.partition import (
    drop_detaches,
    hoist_for_backward,
    mark_frozen_values,
    mark_parameter_views,
    partition,
)
from chunkc.passes.rewrite.random_states import fix_lengths_of_random_states, note_values_drawn_again
from chunkc.passes.rewrite.regions import write_out_regions
from chunkc.passes.rewrite.repeats import Repeats
from chunkc.passes.rewrite.runner import C, Graphs, Pass, disabled, run_passes
from chunkc.passes.rewrite.unrolling import JointNames, NotAlike, joint_names, unroll, unroll_phases
from chunkc.passes.segments.cuts import (
    clone_parameter_views,
    copy_parameters_for_scatters,
    materialise_returned_placeholders,
    with_copies_of_changing,
    with_dropouts_from_masks,
)
from chunkc.torch_private.aot import LazyGraphModule
from chunkc.torch_private.inductor import (
    prepare_all_but_random,
    prepare_joint_graph,
    prepare_random,
    prepares_by_parts,
)

logger = logging.getLogger(__name__)

Keep = Callable[[Graphs, JointNames | None], None]


@dataclass
class TraceContext:
    """The inputs of passes over a traced graph besides the graph, and their findings.

    Attributes:
        parameter_names: per input of Dynamo's graph, the parameter's name; None for an input that is none.
        without_gradient: per input, whether it is a parameter or buffer of a module and needs no gradient.
        num_outputs: of Dynamo's graph.
        codegen, loss_tile_rows: as in `capture_graph`.
        repeats: equal blocks, most of which the graph that AOTAutograd traces leaves out; None: it has all.
        new_buffers, num_user_outputs: as of `TracedGraphs`.
        losses: those that are large enough for tiles, as `loss_tiles` found.
    """

    parameter_names: Sequence[str | None]
    without_gradient: Sequence[bool]
    num_outputs: int
    codegen: str
    loss_tile_rows: LossTileRows
    repeats: Repeats | None = None
    new_buffers: tuple[int, ...] = ()
    num_user_outputs: int | None = None
    losses: Losses = field(default_factory=Losses)


@dataclass
class JointContext:
    """The inputs of passes over a joint graph, or over a forward that has no backward, besides the graph.

    Attributes:
        example_inputs: the graph's inputs as AOTAutograd gives them, with its other arguments for a partitioner.
        is_prepared: whether `unroll` has run Inductor's passes, but for those that number random numbers.
        names: of the joint graph, if its forward and backward are to be unrolled.
    """

    capture: TraceContext
    example_inputs: Sequence[Any]
    partitioner: Mapping[str, Any] = field(default_factory=dict)
    is_prepared: bool = False
    names: JointNames | None = None

    @property
    def num_user_outputs(self) -> int | None:
        return self.capture.num_user_outputs


@dataclass
class CutContext:
    """The inputs of passes over phases that are cut into segments next, besides the phases, and their findings.

    Attributes:
        by_placeholder, num_user_outputs, new_buffers, may_repeat: as of `TracedGraphs`.
        repeats_operators: whether a backward may repeat single operations of the forward.
        read_as: parameters that the phases read as casts -> the kind of their chunks, as `casts` found.
    """

    by_placeholder: Mapping[str, str]
    num_user_outputs: int | None
    layout: ChunkLayout
    repeats_operators: bool
    may_repeat: bool = False
    new_buffers: tuple[int, ...] = ()
    read_as: Mapping[str, str] = field(default_factory=dict)


def _write_out_regions(graphs: Graphs, context: TraceContext) -> Graphs:
    (gm,) = graphs
    write_out_regions(gm)
    return graphs


def _tile_losses(graphs: Graphs, context: TraceContext) -> Graphs:
    (gm,) = graphs
    if context.loss_tile_rows != "never":
        context.losses = tile_losses(gm.graph, context.loss_tile_rows)
        gm.recompile()
    return graphs


def _unroll(graphs: Graphs, context: JointContext) -> Graphs:
    """Unroll the blocks, after preparing the short graph for Inductor if the result can still be unrolled.

    Inductor makes the same of each block, so most are left out until then."""
    (gm,) = graphs
    repeats, inputs = context.capture.repeats, context.example_inputs
    if repeats is None:
        return graphs

    def unrolled(graph: fx.Graph) -> Graphs:
        whole = unroll(graph, repeats, len(context.capture.parameter_names), context.capture.num_outputs)
        return (_with_graph(gm, whole),)

    if context.capture.codegen == "inductor" and prepares_by_parts():
        short = _with_graph(gm, copy_of(gm.graph))
        with steady_inductor(pytree.tree_leaves(inputs)):
            prepare_all_but_random(short, inputs)
        try:
            whole = unrolled(short.graph)
        except NotAlike as error:
            logger.debug("all layers are prepared: %s", error)
        else:
            context.is_prepared = True
            return whole
    return unrolled(gm.graph)


def _prepare_for_inductor(graphs: Graphs, context: JointContext) -> Graphs:
    (gm,) = graphs
    if context.capture.codegen == "inductor":
        with steady_inductor(pytree.tree_leaves(context.example_inputs)):
            (prepare_random if context.is_prepared else prepare_joint_graph)(gm, context.example_inputs)
    return graphs


def _mark_frozen_values(graphs: Graphs, context: JointContext) -> Graphs:
    (joint,) = graphs
    capture = context.capture
    # A forward that returns more than Dynamo's graph may return new values of its inputs: then none is frozen.
    writes_inputs = capture.num_user_outputs != capture.num_outputs
    mark_frozen_values(joint, [is_idle and not writes_inputs for is_idle in capture.without_gradient])
    return graphs


def _mark_parameter_views(graphs: Graphs, context: JointContext) -> Graphs:
    (joint,) = graphs
    mark_parameter_views(joint, [name is not None for name in context.capture.parameter_names])
    return graphs


def _partition(graphs: Graphs, context: JointContext) -> Graphs:
    (joint,) = graphs
    return partition(joint, context.example_inputs, **context.partitioner)


def _unroll_phases(graphs: Graphs, context: JointContext) -> Graphs:
    forward, backward = graphs
    capture = context.capture
    assert capture.repeats is not None
    assert context.names is not None
    num_inputs, num_outputs = len(capture.parameter_names), capture.num_outputs
    unrolled = unroll_phases(forward.graph, backward.graph, context.names, capture.repeats, num_inputs, num_outputs)
    return tuple(_with_graph(gm, graph) for gm, graph in zip(graphs, unrolled, strict=True))


def _drop_detaches(graphs: Graphs, context: JointContext) -> Graphs:
    forward, backward = graphs
    assert context.num_user_outputs is not None
    drop_detaches(forward, backward, context.num_user_outputs)
    return graphs


def _hoist_for_backward(graphs: Graphs, context: JointContext) -> Graphs:
    hoist_for_backward(graphs[0].graph)
    return graphs


def _numbers_first(graphs: Graphs, context: JointContext) -> Graphs:
    for module in graphs:
        numbers_first(module.graph)
    return graphs


def _wait_at_once(graphs: Graphs, context: TraceContext) -> Graphs:
    for module in graphs:
        wait_at_once(module.graph)
    return graphs


def _copy_gradients(graphs: Graphs, context: TraceContext) -> Graphs:
    for module in graphs[1:]:
        given = enumerate(zip(returned(module.graph), context.parameter_names))
        materialise_returned_placeholders(
            module.graph, [place for place, (result, name) in given if result is not None and name is not None]
        )
    return graphs


def _copy_parameter_views(graphs: Graphs, context: TraceContext) -> Graphs:
    inputs = placeholders(graphs[0].graph)
    names = {node.name for node, name in zip(inputs, context.parameter_names) if name is not None}
    for module in graphs:
        parameters = [node for node in placeholders(module.graph) if node.name in names]
        copy_parameters_for_scatters(module.graph, parameters)
        clone_parameter_views(module.graph, parameters)
    return graphs


def _complete_random_states(graphs: Graphs, context: TraceContext) -> Graphs:
    fix_lengths_of_random_states(graphs[0].graph)
    for module in graphs[1:]:
        note_values_drawn_again(module.graph)
    return graphs


def _read_casts(graphs: Graphs, context: CutContext) -> Graphs:
    context.read_as = read_as_casts([module.graph for module in graphs], context.by_placeholder, context.layout)
    if not context.read_as:
        return graphs
    given = [place for place, name in context.by_placeholder.items() if name in context.read_as]
    return tuple(with_casts_given(module, given) for module in graphs)


def _copy_changing(graphs: Graphs, context: CutContext) -> Graphs:
    if not (context.may_repeat and context.new_buffers and len(graphs) > 1):
        return graphs
    return with_copies_of_changing(graphs[0], context.new_buffers), *graphs[1:]


def _dropouts_from_masks(graphs: Graphs, context: CutContext) -> Graphs:
    if not context.repeats_operators:
        return graphs
    return with_dropouts_from_masks(graphs[0]), *graphs[1:]


# Stages stand in the order in which their graphs exist. Where the order within one matters, a comment says why.

UNROLL = Pass("unroll", _unroll)
UNROLL_PHASES = Pass("unroll", _unroll_phases)
PREPARE = Pass(
    "inductor_joint",
    _prepare_for_inductor,
    required='Inductor compiles random numbers only as this pass leaves them; codegen="eager" does without it',
)

DYNAMO: tuple[Pass[TraceContext], ...] = (
    # First: losses and equal blocks are looked for among a region's operations, too. Tiles come before blocks are
    # looked for (`find_repeats`, after this stage), which may not end within a loss.
    Pass("regions", _write_out_regions, required="a plan describes operations, not calls of other graphs"),
    Pass("loss_tiles", _tile_losses),
)
"""Passes over Dynamo's graph, where a cross entropy is still one node."""

JOINT: tuple[Pass[JointContext], ...] = (
    # Inductor's come last: some (a user's own, its chunker) look at the graph as a whole, which has all blocks by then.
    UNROLL,
    PREPARE,
)
"""Passes over a joint graph, or over a forward that has no backward."""

CUT_JOINT: tuple[Pass[JointContext], ...] = (
    # Marks before the partitioner, which obeys them.
    Pass("frozen_values", _mark_frozen_values),
    Pass("parameter_views", _mark_parameter_views, required="a saved view of a slot would outlive the chunk in it"),
    Pass("partition", _partition, required="plans are made of a forward and a backward"),
)
"""Passes that make a forward and a backward of a joint graph, which may lack most of the blocks that are alike."""

OF_PHASES: tuple[Pass[JointContext], ...] = (
    # In any order.
    Pass("detaches", _drop_detaches),
    Pass("hoist", _hoist_for_backward),
    Pass("numbers_first", _numbers_first),
)
"""Passes over a forward and a backward that have all blocks."""

TRACED: tuple[Pass[TraceContext], ...] = (
    # In any order.
    Pass("collective_waits", _wait_at_once, required="a collective and its wait are one segment"),
    Pass("gradient_copies", _copy_gradients, required="a gradient has a chunk of its own, and may be no input"),
    Pass("parameter_view_copies", _copy_parameter_views, required="no view of a slot may cross a cut"),
    Pass("random_states", _complete_random_states, required="bytes are counted off the values that it notes"),
)
"""Passes over the forward and the backward that AOTAutograd returns."""

CUT: tuple[Pass[CutContext], ...] = (
    # In any order.
    Pass("casts", _read_casts),
    Pass("changing_copies", _copy_changing, required="a repeated operation must read what it has read before"),
    Pass("dropout_masks", _dropouts_from_masks),
)
"""Passes over phases that are cut into segments next; not over a graph that is compiled whole."""

PASSES: tuple[Pass[Any], ...] = (*DYNAMO, *JOINT, *CUT_JOINT, *OF_PHASES, *TRACED, *CUT)


def run(stage: Sequence[Pass[C]], graphs: Graphs, context: C) -> Graphs:
    """Run the passes of a stage, but for those that `CHUNKC_DISABLE_PASS` names.

    Raises:
        OptionsError: it names a pass that is unknown or required.
    """
    return run_passes(stage, graphs, context, disabled(PASSES))


def partitioned(joint: fx.GraphModule, context: JointContext, keep: Keep = lambda graphs, names: None) -> Graphs:
    """Make a forward and a backward of a joint graph with all blocks, which it may lack.

    Blocks that are alike are repeated as late as can be: passes and the partitioner see few of them.

    Args:
        keep: called with graphs of which `finished` makes the result, and the names that it needs; the last time with
            those that the result was made of.

    Raises:
        NotAlike: blocks are not alike after all; all of them are to be traced.
    """
    capture = context.capture
    # Inductor numbers random operators over all blocks, and as a graph is prepared, before it is partitioned.
    is_local = capture.codegen != "inductor" or (prepares_by_parts() and not any(map(draws, joint.graph.nodes)))
    if capture.repeats is not None and is_local:
        try:
            (short,) = run((PREPARE,), (_with_graph(joint, copy_of(joint.graph)),), context)
            context.names = joint_names(short.graph, len(capture.parameter_names), capture.num_outputs)
            graphs = run(CUT_JOINT, (short,), context)
            keep(graphs, context.names)
            return finished(graphs, context)
        except NotAlike as error:
            logger.debug("the joint graph is unrolled: %s", error)
            context.names = None
    graphs = run(CUT_JOINT, run(JOINT, (joint,), context), context)
    keep(graphs, None)
    return finished(graphs, context)


def finished(graphs: Graphs, context: JointContext) -> Graphs:
    """Unroll a forward and a backward if they lack blocks, and run the passes over whole phases.

    Raises:
        NotAlike: blocks are not alike after all.
    """
    return run(OF_PHASES, graphs if context.names is None else run((UNROLL_PHASES,), graphs, context), context)


def is_left_out(one: Pass[Any]) -> bool:
    """Whether `CHUNKC_DISABLE_PASS` names a pass.

    Raises:
        OptionsError: it names a pass that is unknown or required.
    """
    return one.name in disabled(PASSES)


def _with_graph(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    made = LazyGraphModule(gm, graph)
    made.meta = gm.meta
    return made
