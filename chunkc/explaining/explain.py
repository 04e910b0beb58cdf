"""Explain a training step (`chunkc.explain`): predict its bytes and seconds before anything runs or is allocated.

The model goes through the same capture, layout, planner and verifier as in training, without compiler and runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from chunkc.explaining.cuda_offline import captured_for, overhead_on, planned_on, storages_on
from chunkc.explaining.fake_copies import has_dynamic_dimensions
from chunkc.explaining.host import host_needs
from chunkc.explaining.measured import measured_side
from chunkc.explaining.memory_timeline import (
    StepPlans,
    explained_moments,
    offloaded_by_module,
    peak_of,
    recomputed_by_module,
)
from chunkc.explaining.offline import OfflineStep, PartlyCapturedError, capture_offline
from chunkc.explaining.optimizer_choice import ADAMW, OptimizerChoice
from chunkc.explaining.over_ranks import (
    check_layers,
    cut_over,
    layers_of,
    notes,
    ranks_of,
    refuse_distributed,
    with_ranks,
)
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.explaining.why import why_is
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.estimates import largest_of_each
from chunkc.ir.explanation import Chunks, Explanation, Texts
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import PARAM
from chunkc.ir.program import FORWARD
from chunkc.ir.shards import ZeroStage
from chunkc.ir.simulate import step_time, traffic
from chunkc.ir.states import StateFormat
from chunkc.ir.units import format_nbytes, short_nbytes
from chunkc.machines.presets import load_hardware, usual_host_nbytes
from chunkc.optim.over_ranks import refuse_over_ranks
from chunkc.optim.update_mode import AUTO, DEVICE
from chunkc.options import LossTileRows, Options, parse_options, resolve_budget
from chunkc.passes.planning.room import everything
from chunkc.passes.rewrite.runner import code_of
from chunkc.session.declared_states import state_format_of
from chunkc.torch_private.dynamo import unwrapped
from chunkc.tracing.dynamic_shapes import input_symbols
from chunkc.utils.garbage import no_automatic_collection

StateFormatOf = Callable[[nn.Parameter], StateFormat]
"""Return the form in which an optimizer keeps states for a parameter."""

Show = Callable[[str], None]
"""Show the work that begins, in a progress display."""


def explain(
    model: nn.Module,
    *args: Any,
    memory_budget: int | str | None = None,
    hardware: str | Hardware | None = None,
    home: str | None = None,
    disk_holds: str | None = None,
    chunk_size: int | str | None = None,
    codegen: str | None = None,
    whole_graph: str | None = None,
    activations: str | None = None,
    loss_tile_rows: LossTileRows | None = None,
    strict: bool | None = None,
    update_on: str = DEVICE,
    overlap: str = AUTO,
    undoable: bool = False,
    optimizer: str | None = None,
    moments_dtype: torch.dtype | str | None = None,
    master_weights: bool | str | None = None,
    stochastic_rounding: bool = False,
    momentum: float | None = None,
    name: str | None = None,
    why: str | None = None,
    world_size: int | None = None,
    mesh: str | None = None,
    zero_stage: ZeroStage | None = None,
    show: Show | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explain one training step of `model(*args, **kwargs)`: nothing runs and nothing is allocated.

    Args:
        model: real, on the meta device or on fake tensors.
        memory_budget: of one device, as in `torch.compile`'s options; "auto": 90 % of what the hardware's device
            has without the driver's context and page tables for all of the host's memory.
        hardware: a preset's name (`"rtx3090"`, `"8xv100-32g"`), a file, or a `Hardware`. Its devices train the model
            collectively, as with `chunkc.distribute`; one of them is explained.
        home, disk_holds, chunk_size, codegen, whole_graph, activations, loss_tile_rows, strict: as in `torch.compile`'s
            options, except that codegen is "eager" by default. For a model that chunkc has compiled, all defaults are
            its own, and the explanation also has the measurements of its latest step.
        optimizer: of `chunkc.optim`: "adamw", "adam", "lamb", "lion" or "sgd". None: the model's own, or else AdamW.
        update_on, overlap, undoable, moments_dtype, master_weights, stochastic_rounding, momentum: arguments of the
            optimizer; None is its default. A given format or momentum counts for all parameters, even if the model has
            another optimizer.
        why: a parameter, module, chunk (`param:3`) or saved value (`forward.2:0`). `Explanation.why` then says where it
            is at each moment, and what it would cost to have it elsewhere.
        world_size, mesh: how many of the hardware's devices train the model; or hosts and devices of each, such as
            `"2x8"`. The third of three numbers, `"2x4x2"`, is the number of devices that compute each layer together:
            `parallelize_module` has cut the model over as many ranks.
        zero_stage: as in `chunkc.distribute`.
        show: called with the work that begins, for a progress display.

    Dimensions of arguments that `torch._dynamo.mark_dynamic` marked are traced as symbols, and every moment then has
    its bytes as an expression of them.

    Raises:
        OptionsError: an argument has a wrong type or value, or the optimizer refuses it.
        UnsupportedError: the model cannot be captured; or with `strict`, it has an operator with unknown memory.
    """
    refuse_distributed(model)
    own, own_hardware, measured = measured_side(model)
    asked = {"memory_budget": memory_budget, "home": home, "disk_holds": disk_holds, "chunk_size": chunk_size}
    asked |= {"codegen": codegen, "whole_graph": whole_graph, "strict": strict, "activations": activations}
    asked |= {"loss_tile_rows": loss_tile_rows}
    given = {key: value for key, value in asked.items() if value is not None}
    options = parse_options({"codegen": "eager", **own, **given})
    formats = (moments_dtype, master_weights, stochastic_rounding)
    choice = OptimizerChoice(update_on, overlap, optimizer, *formats, momentum, undoable)
    hardware = hardware or own_hardware or "cpu"
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    machine = with_ranks(machine, world_size, mesh)
    options = options_on(machine, options)
    show = show or (lambda what: None)
    show("tracing the model")
    dynamic = has_dynamic_dimensions((args, kwargs))
    predicted = predicted_on(machine, model, args, kwargs, options, choice, dynamic=dynamic, zero_stage=zero_stage)
    show("planning")
    return replace(explain_step(predicted, name or type(unwrapped(model)).__name__, why=why), measured=measured)


def minimum_budget(
    model: nn.Module,
    *args: Any,
    hardware: str | Hardware = "cpu",
    choice: OptimizerChoice = ADAMW,
    zero_stage: ZeroStage | None = None,
    **kwargs: Any,
) -> int:
    """Return the smallest budget, in bytes, in which `model(*args, **kwargs)` trains.

    Arguments are as for `explain`, with its options among `kwargs`, but for those of the optimizer, which are in
    `choice`.
    """
    given = {key: kwargs.pop(key) for key in Options.model_fields if key in kwargs}
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    options = options_on(machine, parse_options({"codegen": "eager", **given}))
    predicted = predicted_on(machine, model, args, kwargs, options, choice, zero_stage=zero_stage)
    return predicted.minimum_nbytes(predicted.fitting(budget_of(options, machine)))


@no_automatic_collection()
def minimum_of_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    options: Options,
    hardware: Hardware,
    trains: bool | None = None,
) -> tuple[int, frozenset[str], int]:
    """Return the smallest budget, in bytes, of a step with this call of a model.

    Also the parameters in its graphs, and the number of these.

    Args:
        trains: in training mode, or in evaluation mode; None: in the mode that the model is in. The caller's grad mode
            decides whether there are gradients.

    Raises:
        UnsupportedError: the model cannot be captured.
    """
    predicted = predicted_on(hardware, model, args, kwargs, options, trains=trains)
    graphs = predicted.step.graphs
    names = frozenset(spec.name for graph in graphs for spec in (*graph.movable, *graph.fixed))
    return predicted.fitting(1).budget_nbytes, names, len(graphs)


def predicted_on(
    hardware: Hardware,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    choice: OptimizerChoice = ADAMW,
    *,
    dynamic: bool = False,
    zero_stage: ZeroStage | None = None,
    trains: bool | None = None,
) -> PredictedStep:
    """Capture one training step of a model as by `step_on`, to be planned for any budget.

    Raises:
        OptionsError, UnsupportedError: as `step_on`; or the optimizer refuses the parameters, or to be cut over ranks.
    """
    updates = choice.of(model)
    step = step_on(
        hardware, model, args, kwargs, options, dynamic=dynamic, state_format_of=updates.state_format_of,
        zero_stage=zero_stage, trains=trains,
    )  # fmt: skip
    specs = [spec for graph in step.graphs for spec in graph.movable if spec.trainable]
    for moments in sorted({str(spec.states.moments) for spec in specs}) if hardware.num_devices > 1 else ():
        refuse_over_ranks(updates.optimizer, moments)
    return PredictedStep(step, options, hardware, updates)


def step_on(
    hardware: Hardware,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    *,
    dynamic: bool = False,
    state_format_of: StateFormatOf = state_format_of,
    zero_stage: ZeroStage | None = None,
    trains: bool | None = None,
) -> OfflineStep:
    """Capture one training step of a model as the hardware runs it; of several devices, as rank 0 does.

    Args:
        dynamic: trace dimensions that are marked as dynamic as symbols.
        trains: as in `capture_offline`.

    Raises:
        OptionsError: the model's layers are cut over another number of ranks than the hardware says.
        UnsupportedError: there is no graph; or there are several, with symbols.
    """
    check_layers(model, hardware)

    def capture() -> OfflineStep:
        return capture_offline(
            model, args, kwargs, codegen=options.codegen, loss_tile_rows=options.loss_tile_rows,
            repeatable=options.may_repeat, dynamic=dynamic, state_format_of=state_format_of, trains=trains,
        )  # fmt: skip

    try:
        step = captured_for(hardware, capture)
    except PartlyCapturedError as error:
        raise UnsupportedError(f"{error}. {_of_the_first(error.before, hardware, options, zero_stage)}") from error
    if len(step.calls) > 1 and any(input_symbols(graph.capture) for graph in step.graphs):
        raise UnsupportedError(
            f"torch.compile splits this model into {len(step.graphs)} graphs; dimensions marked as dynamic are for "
            "models in one graph: leave the marks out, and explain each size for itself"
        )
    return on_hardware(hardware, step, options, zero_stage)


def options_on(hardware: Hardware, options: Options) -> Options:
    """Return the options as they apply on the hardware: to one process, or to ranks that train together."""
    return options if hardware.num_devices == 1 else options.over_ranks


def on_hardware(hardware: Hardware, step: OfflineStep, options: Options, zero_stage: ZeroStage | None) -> OfflineStep:
    """Return a captured step as the hardware runs it."""
    step = cut_over(step, hardware, zero_stage, options)
    graphs = tuple(planned_on(graph, hardware, options.codegen) for graph in step.graphs)
    return replace(step, graphs=graphs, storage_nbytes=storages_on(step.storage_nbytes, hardware))


def _of_the_first(before: OfflineStep, hardware: Hardware, options: Options, zero_stage: ZeroStage | None) -> str:
    """Say what the captured first graphs of a step need."""
    step = on_hardware(hardware, before, options, zero_stage)
    predicted = PredictedStep(step, options, hardware)
    needs = format_nbytes(predicted.fitting(1).budget_nbytes)
    names = [name for graph in step.graphs for name in graph.capture.order_of_use()]
    covered = f", from {names[0]} to {names[-1]}," if names else ""
    num_graphs = len(step.graphs)
    graphs = (
        f"The graph before that{covered} needs" if num_graphs == 1 else f"The {num_graphs} before that{covered} need"
    )
    return (
        f"{graphs} a budget of {needs}; what comes after depends on the values, and in training each BudgetError names "
        "the smallest for what was compiled by then"
    )


def budget_of(options: Options, hardware: Hardware) -> int:
    """Return the budget in bytes on given hardware.

    Raises:
        OptionsError: the budget is more than a GPU has; or a fraction of a memory that the hardware does not state.
    """
    usable, asked = hardware.usable_memory_nbytes, options.memory_budget
    if usable is None and not isinstance(asked, int):
        raise OptionsError(
            f"hardware {hardware.name!r} does not say how much memory its device has: give memory_budget in bytes"
        )
    budget = resolve_budget(asked, hardware.device_memory_nbytes or 0, hardware.automatic_memory_nbytes or 0)
    if hardware.kind == "cuda" and usable is not None and budget > usable:
        raise OptionsError(
            f"memory_budget is {format_nbytes(budget)}, but a device of {hardware.name} has {format_nbytes(usable)} "
            "without the driver's context"
        )
    return budget


@no_automatic_collection()
def explain_step(predicted: PredictedStep, name: str, *, why: str | None = None) -> Explanation:
    """Explain one captured step, and where the part of the model named `why` is in it."""
    captured, options, hardware = predicted.step, predicted.options, predicted.hardware
    budget = budget_of(options, hardware)
    updates = predicted.training.updates
    dry_run = predicted.fitting(budget)
    layout = dry_run.planner_state.layout
    step = predicted.planned(dry_run)
    events = predicted.events(step)
    at_home, again = offloaded_by_module(step), recomputed_by_module(step)
    expressions = () if at_home or again else predicted.expressions(dry_run)  # which are of a step that keeps all
    moments = tuple(explained_moments(step, events, expressions))
    leaving_nbytes = sum(at_home.values())
    host = hardware.host_memory_nbytes
    phases = [(captured.graphs[run.graph], run.phase) for run in dry_run.runs]
    home_nbytes = updates.home_nbytes(step) + leaving_nbytes
    disk_nbytes = updates.home_nbytes(step, layout.is_on_disk) + (leaving_nbytes if layout.is_on_disk(PARAM) else 0)
    page_table_nbytes = hardware.page_table_nbytes(home_nbytes - disk_nbytes)
    layers = layers_of([graph.phase(phase) for graph, phase in phases], hardware)
    ranks = ranks_of(layout, events, hardware, layers)
    found = Explanation(
        model=name,
        hardware=hardware.name,
        codegen=options.codegen,
        fits=dry_run.budget_nbytes == budget,
        host_fits=True,
        num_parameters=sum(spec.whole_numel for spec in layout.specs().values()) + captured.elsewhere_numel,
        memory_budget_nbytes=budget,
        minimum_budget_nbytes=predicted.minimum_nbytes(dry_run),
        predicted_peak_nbytes=max((m.nbytes for phase in step.phases for m in phase.moments), default=0),
        non_model_peak_nbytes=max((m.non_model_nbytes for run in step.runs for m in run.planned.moments), default=0),
        overhead_nbytes=hardware.context_nbytes + page_table_nbytes,
        home_nbytes=home_nbytes,
        disk_nbytes=disk_nbytes,
        saved_at_home=at_home,
        saved_again=again,
        device_memory_nbytes=hardware.device_memory_nbytes,
        host_memory_nbytes=host,
        peak=peak_of(step),
        chunks=Chunks(layout.chunk_nbytes, len(layout.groups), len(step.resident)),
        traffic_nbytes=traffic(events),
        step_time_s=step_time(events),
        moments=moments,
        events=events,
        notes=(
            *updates.notes(step, hardware),
            *_notes(step, options, hardware, page_table_nbytes),
            *_notes_of_losses(captured),
            *notes(ranks, hardware),
            *(f"{symbol}: {what}" for graph in captured.graphs for symbol, what in graph.sizes.items()),
        ),
        graphs=Texts({run.name: _writer(run.graph) for run in step.runs}),
        plan_text="".join(map(str, step.plans)),
        device_is_host=hardware.kind == "cpu",
        activation_checkpointing=any(graph.checkpointed for graph in captured.graphs),
        estimates=largest_of_each(call for found in dry_run.captured for call in found.unknown_operators),
        why=None if why is None else why_is(why, predicted, dry_run),
        ranks=ranks,
        activations=options.activations,
    )
    needs = host_needs(
        layout,
        step.resident,
        peak_nbytes=found.predicted_peak_nbytes if found.device_is_host else None,
        home_nbytes=found.home_nbytes - found.disk_nbytes,
        num_ranks=1 if ranks is None else ranks.ranks_per_host,
    )
    return replace(found, host=needs, host_fits=host is None or found.host_needs_nbytes <= host)


def _writer(module: fx.GraphModule) -> Callable[[], str]:
    """Return a function that writes a plan's graph as code, and that keeps none of its segments."""
    graph = module.graph
    graph.owning_module = None  # segments have the model's constants, which take memory
    return lambda: code_of(graph)


def _notes_of_losses(captured: OfflineStep) -> Iterator[str]:
    for losses in (graph.capture.losses for graph in captured.graphs):
        yield from (f"loss_tile_rows: {tiles}" for tiles in losses.tiled)
        yield from (f"loss_tile_rows: this loss is computed whole, {reason}" for reason in losses.whole)


def _notes(step: StepPlans, options: Options, hardware: Hardware, page_table_nbytes: int) -> Iterator[str]:
    if step.resident == everything(step.layout) and all(run.captured.whole for run in step.runs):
        yield "everything fits: the graph is compiled whole and nothing moves"
    num_forwards = sum(run.phase == FORWARD for run in step.runs)
    if num_forwards > 1:
        yield (
            f"torch.compile splits this model: {num_forwards} graphs run one after the other; what code between them "
            "keeps for itself is not counted"
        )
    if hardware.kind == "cuda":
        if options.codegen == "inductor":
            yield "fused as on a CPU: Inductor's Triton kernels may fuse other operators and so need other bytes"
        yield f"{overhead_on(hardware):,} bytes of the budget are for cuBLAS's workspaces and the optimizer's tables"
        yield (
            f"the driver's context and libraries take {hardware.context_nbytes:,} bytes more, and page tables of what "
            f"is at home {page_table_nbytes:,}, counted apart"
        )
    yield f"rates of {hardware.name}: {hardware.source or 'as given'}"
    if hardware.host_memory_nbytes is not None and hardware.host_memory_nbytes == usual_host_nbytes(hardware.name):
        nbytes = short_nbytes(hardware.host_memory_nbytes)
        yield f"a host with {nbytes} of RAM is assumed, as usual for {hardware.name}; --host-memory states another"
