"""Hold the answer of `chunkc.explain` as data: one frozen tree of plain values that every format is made from.

`to_dict` gives the documented JSON; `from_dict` reads it back, so that two saved explanations can be compared.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from chunkc.ir.errors import OptionsError
from chunkc.ir.estimates import EstimatedOperator
from chunkc.ir.links import TO_DEVICE, TO_HOME
from chunkc.ir.program import is_repeated

COMPUTE = "compute"
STREAMS = (COMPUTE, TO_DEVICE, TO_HOME)
"""Streams of every step; the disk's links and updates by the CPU have streams of their own, if there are any."""

HOST_UPDATES = "at_home"
"""Stream of updates by the CPU, if there are any."""

KINDS = ("parameters", "gradients", "optimizer states", "slots", "activations", "temporaries", "others")
"""Kinds of bytes on the compute tier. Slots hold chunks of all three kinds of model data."""


@dataclass(frozen=True)
class TimedEvent:
    """An activity on a stream of the predicted step.

    Attributes:
        stream: of `STREAMS`, another link (see `chunkc.ir.links`), or `HOST_UPDATES`.
        kind: `call` (a segment), `update` (the optimizer's, of a part of a chunk group), `prefetch`, `write_back`,
            or `stall` (the computation waits for a copy).
        name: the call, or the chunk or storage that moves (or is waited for).
        start_s, end_s: seconds from the beginning of the step.
        nbytes: copied; of an update, the bytes it reads and writes where it runs; else 0.
        phase: `forward`, `backward` or `update`.
        module: the user's module; empty if there is none.
    """

    stream: str
    kind: str
    name: str
    start_s: float
    end_s: float
    nbytes: int
    phase: str
    module: str


@dataclass(frozen=True)
class ExplainedMoment:
    """Bytes on the compute tier while one operation runs.

    Attributes:
        call: the segment call that the operation belongs to; several moments share one.
        op, module, source: the operation, the user's module, and `file.py:12, code` of the user's code (may be empty).
        start_s: predicted time of the moment from the beginning of the step.
        contents: bytes by kind (see `KINDS`).
        expression: activations and temporaries in the symbols of the input's sizes; None if shapes are static.
    """

    call: str
    phase: str
    op: str
    module: str
    source: str
    start_s: float
    contents: Mapping[str, int]
    expression: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.contents.values())


@dataclass(frozen=True)
class Peak:
    """The fullest moment. `contents`: its bytes by kind and module (`activations: model.layers.3`).

    `source`: `file.py:12, code` of the user's code; empty if it is not known, as for the optimizer's update.
    """

    moment: str
    op: str
    module: str
    contents: Mapping[str, int]
    source: str = ""


@dataclass(frozen=True)
class Chunks:
    """Chunks of parameters; gradients and optimizer states have as many each.

    `size_nbytes`: of a parameter chunk. `resident`: number of chunks that never leave the compute tier.
    """

    size_nbytes: int
    count: int
    resident: int


@dataclass(frozen=True)
class Traffic:
    """Bytes copied in one step, over all links of each direction."""

    to_device: int
    to_home: int


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step.

    `compute` is forward and backward arithmetic, `optimizer` the updates'; `to_device` and `to_home` are the busy time
    of the links of each direction meanwhile, a disk's included; `stall` is time in which the computation waits for a
    copy. `total` is compute, optimizer and stall. Updates by the CPU count where they are waited for: in `optimizer` at
    the step's end, in `stall` by a copy.
    """

    total: float
    compute: float
    to_device: float
    to_home: float
    optimizer: float
    stall: float


@dataclass(frozen=True)
class HostNeeds:
    """Peak bytes of host memory that a model takes on top of the process itself, at each stage of its life.

    Attributes:
        building: inside `chunkc.init`.
        loading: `chunkc.load`, before the first step.
        training: a step; if the device is the host, with the predicted peak.
        saving: `chunkc.save`, between steps.
        resuming: a training checkpoint, read chunk by chunk.
    """

    building: int
    loading: int
    training: int
    saving: int
    resuming: int


@dataclass(frozen=True)
class GatheredGroup:
    """Parameters that share a chunk and are sharded over ranks.

    Attributes:
        chunk, title: the plan's name and the readable name.
        nbytes: of the shards of all ranks.
        is_whole: replicated: every rank keeps all of them from one step to the next.
        gathers, gather_s: number in a step, and the seconds of all of them.
    """

    chunk: str
    title: str
    nbytes: int
    is_whole: bool
    gathers: int
    gather_s: float


@dataclass(frozen=True)
class Layers:
    """Tensor-parallel layers, and the bytes that their ranks exchange in a step.

    Attributes:
        num_ranks: of a layer.
        collectives: of rank 0, one after the other; nothing else is computed meanwhile.
        nbytes: that rank 0 sends in them, and receives.
        seconds: of them; they are part of forward and backward.
    """

    num_ranks: int
    collectives: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Ranks:
    """The step of rank 0, the rank with the largest shards, of a model that is sharded over ranks.

    Attributes:
        num_ranks, num_hosts: that train the model; `ranks_per_host`: on each host, at most.
        zero_stage: the data that is replicated in addition to the shards (see `chunkc.ir.shards`); None: the plan has
            chosen that for each group.
        num_parameters: in this rank's shards.
        gathers: chunks that all ranks gather from all shards.
        scatters: chunks of gradients that they reduce, of which each takes its shard home.
        link_nbytes: by link, the bytes it carries for one device: `between_devices` and `between_hosts` each way, for
            ranks with a neighbour there.
        groups: in order of use, with the replicated ones marked.
        layers: None if each rank computes all of a layer.
    """

    num_ranks: int
    num_hosts: int
    ranks_per_host: int
    zero_stage: int | None
    num_parameters: int
    gathers: int
    scatters: int
    link_nbytes: Mapping[str, int]
    groups: tuple[GatheredGroup, ...] = ()
    layers: Layers | None = None


@dataclass(frozen=True)
class Measured:
    """The measured side of a model that has run. `moments`: (call, bytes or None if the tier is not metered).

    `peak_nbytes` and `moments` exclude bytes that no plan counts; `unplanned_nbytes` is these, in the run with the
    largest total.

    `time_s`: seconds so far in `compute`, `host`, `wait`, `to_device`, `to_home`, as in `chunkc.Report`.
    """

    peak_nbytes: int | None
    moments: tuple[tuple[str, int | None], ...]
    time_s: Mapping[str, float]
    events: tuple[TimedEvent, ...] = ()
    unplanned_nbytes: int = 0


@dataclass(frozen=True)
class Happening:
    """An event of the plan that concerns the part of the model.

    Attributes:
        at_s: seconds from the beginning of the predicted step.
        copy_s: of a copy, its seconds once its link is free; else 0.
        stall_s: seconds that the computation waits for the copy here; else 0.
        before: the call, or the update, that comes next; empty at a phase's end.
        module: the user's module of that call.
    """

    at_s: float
    phase: str
    item: str
    what: str
    nbytes: int
    copy_s: float
    stall_s: float
    before: str
    module: str


@dataclass(frozen=True)
class Alternative:
    """The step with the part of the model placed differently.

    Attributes:
        step_time_s: predicted; None if the budget is too small for it.
        minimum_nbytes: the smallest budget of the graph, or the update, that lacked room; None if it fits.
    """

    what: str
    step_time_s: float | None
    minimum_nbytes: int | None = None


@dataclass(frozen=True)
class Why:
    """The planned place of a part of the model at each moment, with reasons and the cost of alternatives.

    Attributes:
        name: as the user gave it.
        chosen: the plan's decisions about it, a sentence each.
        happenings: in order of time; empty if nothing moves.
        alternatives: each for all of the part.
    """

    name: str
    chosen: tuple[str, ...]
    happenings: tuple[Happening, ...]
    alternatives: tuple[Alternative, ...]


class Texts(Mapping[str, str]):
    """Texts by name, each written as it is read for the first time; a copy is a plain `dict`."""

    def __init__(self, writers: Mapping[str, Callable[[], str]]) -> None:
        self._texts: dict[str, str | Callable[[], str]] = {**writers}

    def __getitem__(self, name: str) -> str:
        text = self._texts[name]
        if not isinstance(text, str):
            text = self._texts[name] = text()
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(self),)


@dataclass(frozen=True)
class Explanation:
    """A training step of a model on given hardware, before it ran.

    Attributes:
        model: a built-in name, `file.py:factory`, or a class name, with its batch.
        hardware: the name of the hardware; `device_memory_nbytes`, `host_memory_nbytes`: None if unknown.
        fits: a plan exists within the budget. `host_fits`: home's bytes are within the host's memory; if that is the
            compute tier too (`device_is_host`), together with the predicted peak.
        activation_checkpointing: whether the model recomputes parts of its forward in the backward.
        minimum_budget_nbytes: the smallest budget with a plan.
        predicted_peak_nbytes, non_model_peak_nbytes: on the compute tier; of the plan for the budget or, if it does not
            fit, for the minimum budget.
        overhead_nbytes: bytes that the driver's counters see beyond the plan's (context, libraries, page tables of
            homes in RAM), counted apart.
        home_nbytes: on the home tier: parameters, gradients, optimizer states of every chunk that is not resident.
        disk_nbytes: of these on disk.
        estimates: operators with an estimated inner memory, each with the most that the plan counts for it.
        host: the host's memory at each stage from building to resuming; None in files of older versions.
        notes: assumptions and limits, one sentence each.
        graphs: phase -> the FX graph with its chunk nodes as readable code; most formats do without.
        plan_text: the plan, printed.
        saved_at_home: offloaded bytes of saved values, by module.
        saved_again: recomputed bytes of saved values, by module.
        why: answer about the part of the model that was asked about.
        ranks: of a sharded model: all of the above is then of one rank, except `num_parameters` and the fields of the
            host.
        activations: the option, as it applies: `auto`, `keep`, `offload` or `rerun`.
    """

    model: str
    hardware: str
    codegen: str
    fits: bool
    host_fits: bool
    num_parameters: int
    memory_budget_nbytes: int
    minimum_budget_nbytes: int
    predicted_peak_nbytes: int
    non_model_peak_nbytes: int
    overhead_nbytes: int
    home_nbytes: int
    disk_nbytes: int
    device_memory_nbytes: int | None
    host_memory_nbytes: int | None
    peak: Peak
    chunks: Chunks
    traffic_nbytes: Traffic
    step_time_s: StepTime
    moments: tuple[ExplainedMoment, ...]
    events: tuple[TimedEvent, ...]
    notes: tuple[str, ...]
    graphs: Mapping[str, str]
    plan_text: str
    measured: Measured | None = None
    device_is_host: bool = False
    activation_checkpointing: bool = False
    estimates: tuple[EstimatedOperator, ...] = ()
    host: HostNeeds | None = None
    saved_at_home: Mapping[str, int] = field(default_factory=dict)
    saved_again: Mapping[str, int] = field(default_factory=dict)
    why: Why | None = None
    ranks: Ranks | None = None
    activations: str = "auto"

    @property
    def recompute_s(self) -> float:
        """Seconds of a step in which the backward repeats calls of the forward."""
        return sum(e.end_s - e.start_s for e in self.events if e.kind == "call" and is_repeated(e.name))

    @property
    def host_needs_nbytes(self) -> int:
        """Host memory of all its ranks: homes in RAM, and the compute tier if it is the same memory."""
        own_nbytes = self.home_nbytes - self.disk_nbytes + (self.predicted_peak_nbytes if self.device_is_host else 0)
        return own_nbytes * (1 if self.ranks is None else self.ranks.ranks_per_host)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Explanation:
        """Read back the output of `to_dict`.

        Raises:
            OptionsError: the values are not an explanation's.
        """
        try:
            explanation = TypeAdapter(Explanation).validate_python(dict(values))
            json.dumps(explanation.to_dict(), allow_nan=False)
            return explanation
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise OptionsError(f"not a chunkc explanation: {where}: {first['msg']}") from None
        except ValueError:  # of `json.dumps`; a text such as "INF" is a number, too
            raise OptionsError("not a chunkc explanation: one of its numbers is not finite") from None
