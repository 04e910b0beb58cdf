"""Report on a model's training (`chunkc.report`): predictions, measurements, traffic and times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from chunkc.ir.errors import ChunkcError
from chunkc.ir.estimates import EstimatedOperator
from chunkc.ir.text import first_of
from chunkc.ir.units import format_nbytes
from chunkc.session.session import Session, owner, sessions_of
from chunkc.torch_private.dynamo import unwrapped


@dataclass(frozen=True)
class Report:
    """Predictions and measurements of a model's training so far.

    Attributes:
        memory_budget_nbytes, predicted_peak_nbytes: of the compute tier.
        measured_peak_nbytes: all bytes in use at the peak; None if the tier is not metered (on a CPU:
            `chunkc.runtime.device.cpu_allocator.install`).
        measured_planned_nbytes: the same without tensors of the program that are in no plan, such as a copy of the
            model or an average of its weights; comparable with the prediction.
        unplanned_nbytes: those tensors' bytes in the run of the measured peak.
        minimum_budget_nbytes: the smallest budget that works for all graphs compiled so far, in segments where that
            takes less; an upper bound of it for a graph that Inductor has compiled whole.
        home_nbytes: bytes of home memory, with those of saved values that are offloaded.
        measured_with_home_nbytes: the measured peak of compute tier and home, counting home bytes in use at the time.
            With several processes and a home in RAM, it is less than the sum of both peaks: gradients take no home
            memory while a model has none.
        chunk_size_nbytes, num_chunks: chunks of parameters; gradients and states have as many again.
        num_resident_chunks: chunks that never leave the compute tier.
        traffic_nbytes: bytes copied `to_device` and `to_home` so far.
        gradients_read_nbytes: bytes of gradients that norms have read at home so far, on a GPU through the link, in
            addition to planned traffic: those of the first step, and those that were changed before `clip_grad_norm_`.
        time_s: seconds so far in `compute`, `host` (chunkc's own instructions without arithmetic, updates and waiting),
            `wait` (for copies), `to_device`, `to_home` (busy links).
        host_step_s: seconds of the host in the latest step's `forward`, `backward` and `update` (the optimizer's step),
            as far as it had them: planning, bookkeeping and launching, without waiting for copies. On a CPU the host
            computes, and arithmetic is part of it; on a GPU a step that lasts longer hides it.
        num_instructions: segments run, chunks moved and gradients sunk so far.
        moments: (label, predicted bytes, measured bytes or None) of the latest step.
        plan_text: the latest plans, printed.
        estimates: operators with a guess for their inner memory, each with the largest that plans use.
        loss_tiles: losses that are computed in tiles (option `loss_tile_rows`), each with its tiles.
        num_allocator_retries: how often a GPU's allocator emptied its cache to find room, so far: each time halts
            computation; a smaller budget leaves the cache more room.
        outside: parameters that no compiled graph takes, by name: with gradients and states they are outside of the
            budget; `outside_nbytes`: their bytes.
        overhead_nbytes: bytes of every prediction that no plan moves: on a GPU, workspaces of libraries and room for
            the optimizer's tables of work (`machines.devices.TABLES_NBYTES`), of which small models fill little.
    """

    memory_budget_nbytes: int
    predicted_peak_nbytes: int
    measured_peak_nbytes: int | None
    minimum_budget_nbytes: int
    home_nbytes: int
    chunk_size_nbytes: int
    num_chunks: int
    num_resident_chunks: int
    traffic_nbytes: Mapping[str, int]
    time_s: Mapping[str, float]
    moments: tuple[tuple[str, int, int | None], ...]
    plan_text: str
    measured_with_home_nbytes: int | None = None
    measured_planned_nbytes: int | None = None
    unplanned_nbytes: int = 0
    overhead_nbytes: int = 0
    outside: tuple[str, ...] = ()
    outside_nbytes: int = 0
    host_step_s: Mapping[str, float] = field(default_factory=dict)
    num_instructions: int = 0
    num_allocator_retries: int = 0
    gradients_read_nbytes: int = 0
    estimates: tuple[EstimatedOperator, ...] = ()
    loss_tiles: tuple[str, ...] = ()

    def __str__(self) -> str:
        measured = self.measured_peak_nbytes
        rows = [
            ("budget", format_nbytes(self.memory_budget_nbytes)),
            ("smallest budget", format_nbytes(self.minimum_budget_nbytes)),
            ("predicted peak", format_nbytes(self.predicted_peak_nbytes)),
            ("measured peak", "not metered" if measured is None else format_nbytes(measured)),
            *(self._divided() if self.unplanned_nbytes else ()),
            *(self._left_out() if self.outside else ()),
            *([("libraries, tables", format_nbytes(self.overhead_nbytes))] if self.overhead_nbytes else []),
            *([("allocator retries", str(self.num_allocator_retries))] if self.num_allocator_retries else []),
            *(("guessed inside", f"{e.operator}, {format_nbytes(e.nbytes)}") for e in self.estimates),
            *(("loss", tiles) for tiles in self.loss_tiles),
            ("at home", format_nbytes(self.home_nbytes)),
            (
                "chunks",
                f"{self.num_chunks} of {format_nbytes(self.chunk_size_nbytes)}, {self.num_resident_chunks} resident",
            ),
            *((f"moved {way.replace('_', ' ')}", format_nbytes(n)) for way, n in self.traffic_nbytes.items()),
            *([("read for norms", format_nbytes(self.gradients_read_nbytes))] if self.gradients_read_nbytes else []),
            *((f"time, {what.replace('_', ' ')}", f"{seconds:.3f} s") for what, seconds in self.time_s.items()),
            *((f"latest {phase}", f"{seconds:.3f} s of the host") for phase, seconds in self.host_step_s.items()),
        ]
        return "\n".join(f"{label:<18} {value}" for label, value in rows)

    def _divided(self) -> Iterator[tuple[str, str]]:
        """Yield the planned and the unplanned bytes of the measured peak."""
        assert self.measured_planned_nbytes is not None
        yield "  in the plan", format_nbytes(self.measured_planned_nbytes)
        yield "  in no plan", f"{format_nbytes(self.unplanned_nbytes)}, other tensors of the program"

    def _left_out(self) -> Iterator[tuple[str, str]]:
        """Yield the parameters that no compiled graph takes."""
        yield "in no graph", f"{first_of(self.outside)}, {format_nbytes(self.outside_nbytes)}"


def report(model: nn.Module) -> Report:
    """Report on a model that was placed or compiled by chunkc.

    Raises:
        ChunkcError: the model was not placed or compiled by chunkc (yet).
        TypeError: `model` is no module, such as a compiled function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"give the model that is trained, a torch.nn.Module, not {type(model).__name__}")
    sessions = sessions_of(model.parameters())
    if len(sessions) != 1:
        raise ChunkcError(
            "no parameter of this model was placed or compiled by chunkc: compilation happens at the first call, and "
            "leaves out what Dynamo leaves to eager PyTorch (TORCH_LOGS=graph_breaks names it, "
            "torch.compile(fullgraph=True) refuses it)"
            if not sessions
            else "parameters of this model belong to several compiled models; ask for them one by one"
        )
    outside = {name: p for name, p in unwrapped(model).named_parameters() if owner(p) is None}
    return replace(
        _report(sessions.pop()), outside=tuple(outside), outside_nbytes=sum(p.nbytes for p in outside.values())
    )


def _report(session: Session) -> Report:
    store = session.store
    moments: list[tuple[str, int, int | None]] = []
    plans: dict[str, None] = {}
    for phase, record in session.records.latest.items():
        planned = {m.name: m.nbytes for part in record.plan.phases if part.phase == phase for m in part.moments}
        moments += [(name, planned[name], measured) for name, measured in record.measurement.peaks if name in planned]
        plans[str(record.plan)] = None
    return Report(
        memory_budget_nbytes=session.budget_nbytes,
        predicted_peak_nbytes=session.records.predicted_peak_nbytes,
        measured_peak_nbytes=session.records.peak_nbytes,
        minimum_budget_nbytes=session.minimum_nbytes,
        home_nbytes=store.arena.nbytes + session.saved_room.nbytes,
        chunk_size_nbytes=store.layout.chunk_nbytes,
        num_chunks=len(store.layout.groups),
        num_resident_chunks=len(store.resident),
        traffic_nbytes={
            "to_device": store.slots.traffic.to_device_nbytes,
            "to_home": store.slots.traffic.to_home_nbytes,
        },
        time_s={
            "compute": session.records.compute_s,
            "host": session.records.host_s,
            "wait": store.slots.traffic.wait_s,
            "to_device": store.tier.links.busy_s(inward=True),
            "to_home": store.tier.links.busy_s(inward=False),
        },
        moments=tuple(moments),
        plan_text="\n".join(plans),
        measured_with_home_nbytes=session.records.with_home_nbytes,
        measured_planned_nbytes=session.records.planned_peak_nbytes,
        unplanned_nbytes=session.records.unplanned_nbytes,
        overhead_nbytes=session.overhead_nbytes,
        host_step_s=dict(session.records.latest_host_s),
        num_instructions=session.records.num_instructions,
        num_allocator_retries=store.tier.num_retries(),
        gradients_read_nbytes=store.sums.read_nbytes,
        estimates=session.estimates,
        loss_tiles=session.losses.tiled,
    )
