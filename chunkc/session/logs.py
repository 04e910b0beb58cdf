"""Log the compilation through PyTorch's logging: `TORCH_LOGS="+chunkc"`, and artifacts in `TORCH_TRACE` for tlparse."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial

from torch import fx

from chunkc.ir.estimates import EstimatedOperator, how_to_avoid, not_known, reckoned_with
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.plan import Plan
from chunkc.ir.units import format_nbytes
from chunkc.passes.rewrite.loss_tiles import Losses
from chunkc.policy.captured_step import Captured
from chunkc.torch_private.engine import trace_artifact
from chunkc.tracing.capture import TracedGraphs

logger = logging.getLogger(__name__)


def log_capture(capture: TracedGraphs, new_losses: Losses) -> None:
    """Log the graphs that AOTAutograd and the partitioner made, and what became of losses that were not seen before."""
    for tiles in new_losses.tiled:
        logger.info("loss %s", tiles)
    for reason in new_losses.whole:
        logger.warning("option loss_tile_rows: this loss is computed whole, in %s", reason)
    for phase, graph in (("forward", capture.forward), ("backward", capture.backward)):
        if graph is not None:
            logger.info("captured %s: %d nodes", phase, len(graph.graph.nodes))
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("captured %s:\n%s", phase, graph.code)


def log_build(captured: Captured, layout: ChunkLayout) -> None:
    """Log how parameters were laid into chunks and graphs cut into segments."""
    logger.info(
        "layout: %d chunks of %s, %d small parameters stay",
        len(layout.groups),
        format_nbytes(layout.chunk_nbytes),
        len(layout.small),
    )
    for group in layout.groups:
        logger.debug("chunk group %d: %s", group.index, ", ".join(s.spec.name for s in group.slices))
    for program in captured.programs.values():
        distinct = len({call.segment for call in program.calls})
        how = "whole" if captured.whole else "in segments"
        logger.info("%s, %s: %d calls of %d distinct segments", program.phase, how, len(program.calls), distinct)
    for name, memory in captured.memories.items():
        peak = max(memory.steps, key=lambda step: step.nbytes)
        logger.debug("%s: %s at %s", name, format_nbytes(peak.nbytes), peak.op)


def warn_of_estimates(operators: Iterable[EstimatedOperator]) -> None:
    """Warn once of each operator with a guess for its scratch memory."""
    for operator in operators:
        logger.warning(
            "%s: plans reckon with %s (%s in its largest call), and what it takes "
            'beyond that is not under the budget; %s, or refuse it with options={"strict": True}',
            not_known(operator),
            reckoned_with(operator),
            format_nbytes(operator.nbytes),
            how_to_avoid(operator),
        )


def log_plan(plan: Plan, graphs: Mapping[str, fx.GraphModule]) -> None:
    """Log the plan, and the graphs with their chunk nodes."""
    logger.info(
        "plan: budget %s, minimum %s, predicted peak %s at %s %s, %d resident groups",
        *map(format_nbytes, (plan.budget_nbytes, plan.minimum_nbytes, plan.predicted_peak_nbytes)),
        plan.peak.name if plan.peak else "no moment",
        plan.peak.module if plan.peak else "",
        len(plan.resident),
    )
    logger.debug("%s", plan)
    trace_artifact("chunkc_plan", lambda: str(plan))
    for phase, graph in graphs.items():
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s with chunk nodes:\n%s", phase, graph.code)
        trace_artifact(f"chunkc_{phase}", partial(_code, graph))


def _code(graph: fx.GraphModule) -> str:
    return graph.code
