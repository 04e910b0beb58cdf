"""One session per model: its chunk store, its budget, and the values of earlier calls that are still alive.

Sessions are found by the parameters they own, or by the options they were compiled with. The registries below are
the only state of this kind that lives in a module; they hold parameters and sessions weakly. One of them has the form
of the states that a parameter's optimizer declares, which may exist before any session does.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from chunkc.early import EarlyUpdates
from chunkc.ir.chunks import ChunkLayout, ParamSpec
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import Plan, Tile
from chunkc.ir.states import DEFAULT_STATES, StateFormat
from chunkc.known_needs import KnownNeeds
from chunkc.machines.devices import granule_of, hardware_of, memory_of, overhead_of
from chunkc.options import Options, resolve_budget
from chunkc.passes.cuda_memory import rounded_nbytes
from chunkc.passes.layout import EMPTY_LAYOUT, extended, restated, unfrozen
from chunkc.passes.planning import everything
from chunkc.recent import Recent
from chunkc.runtime.executor import Executable, Measurement
from chunkc.runtime.open_compute import open_compute
from chunkc.runtime.store import ChunkStore

DEFAULTS: Mapping[str, object] = MappingProxyType({})
"""Stands for the options of a model that was compiled without any."""

MAX_UPDATE_PLANS = 64
"""Plans of the optimizer's step that are kept; the one that was not used for longest goes."""

_CPU = torch.device("cpu")


def storages_nbytes(values: Iterable[object]) -> int:
    """Bytes of the storages of the tensors among `values`, each storage once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass
class LiveValues:
    """Storages that calls returned, saved or were given, watched without keeping them alive.

    Args:
        granule_nbytes: the allocator gives each a multiple of this.
    """

    granule_nbytes: int = 1
    _watched: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def watch(self, tensors: Iterable[object], nbytes: int | None = None) -> None:
        """Watch tensors' storages; with `nbytes`, let each stand for so many bytes."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                taken_nbytes = rounded_nbytes(storage.nbytes(), self.granule_nbytes) if nbytes is None else nbytes
                self._watched[storage.data_ptr()] = StorageWeakRef(storage), taken_nbytes

    def nbytes(self, leaving_out: Iterable[object] = ()) -> int:
        """Bytes of those still alive, without the storages of `leaving_out`."""
        self._watched = {key: (ref, n) for key, (ref, n) in self._watched.items() if not ref.expired()}
        skipped = {t.untyped_storage().data_ptr() for t in leaving_out if isinstance(t, torch.Tensor)}
        return sum(n for key, (_, n) in self._watched.items() if key not in skipped)


@dataclass(frozen=True)
class Record:
    """The latest run of a phase: by which plan, and what was measured."""

    plan: Plan
    measurement: Measurement


class Session:
    """What all graphs compiled for one model share.

    Attributes:
        device: where the model computes.
        budget_nbytes: the limit for the compute tier, in bytes.
        granule_nbytes: the compute tier's allocator gives multiples of this.
        overhead_nbytes: what libraries and tables keep on the compute tier, inside the budget.
        live: values of earlier calls.
        records: the latest run of each phase, by phase name.
        peak_nbytes: the largest measured bytes of any run, None where nothing meters the compute tier.
        predicted_peak_nbytes: the largest predicted bytes of any phase that ran.
        trained: parameters whose gradients some graph compiled so far makes.
        num_graphs: that were compiled so far.
        unplanned: whether no graph has been compiled yet, so that any group may still become resident.
        known: what is known of the smallest budget.
        update_plans: the latest plans of the optimizer's step, by what they depend on.
        early: updates that begin during the backward.
        update_held_nbytes: what the caller still holds of the latest forward when the optimizer steps.
        num_restatements: how often groups have got other data: states in other formats, or gradients where there were
            none. Plans made before do not count.
    """

    def __init__(self, options: Options, source: object = None, device: torch.device = _CPU) -> None:
        self.options = options
        self.options_source = source
        self.device = device
        self.hardware: Hardware = hardware_of(device)
        self.granule_nbytes = granule_of(device)
        self.overhead_nbytes = overhead_of(device)
        self.budget_nbytes = resolve_budget(options.memory_budget, *memory_of(device))
        tier, arena = open_compute(device, options.home, options.disk_holds_everything(device.type))
        layout = replace(EMPTY_LAYOUT, overhead_nbytes=self.overhead_nbytes)
        self.store = ChunkStore(layout, arena, tier, options.debug)
        self.live = LiveValues(self.granule_nbytes)
        self.records: dict[str, Record] = {}
        self.peak_nbytes: int | None = None
        self.predicted_peak_nbytes = 0
        self.known = KnownNeeds()
        self.compute_s = self.host_s = 0.0
        self.num_instructions = 0
        self.update_held_nbytes = 0
        self.update_plans: Recent[tuple, tuple[Executable, Plan, tuple[Tile, ...]]] = Recent(MAX_UPDATE_PLANS)
        self.num_restatements = 0
        self.unplanned = True
        self.num_graphs = 0
        self.trained: frozenset[str] = frozenset()
        self.early = EarlyUpdates()
        self._keepers: dict[str, weakref.ref[object]] = {}

    def configure(self, options: Options, source: Mapping[str, object]) -> None:
        """Take over the options of a (later) compilation, all but where home is, which stays as it is.

        Raises:
            OptionsError: they ask for another home.
        """
        if source is self.options_source:
            return
        present = {"home": self.options.home, "disk_holds": self.options.disk_holds}
        for option, value in present.items():
            if option in source and source[option] != value:
                raise OptionsError(
                    f"{option} is {source[option]!r}, but the model's parameters already live where it is {value!r}; "
                    f"give place() and torch.compile() the same {option}"
                )
        self.options, self.options_source = options.model_copy(update=present), source
        self.budget_nbytes = resolve_budget(options.memory_budget, *memory_of(self.device))
        self.store.debug = options.debug

    def extend_layout(self, specs: Iterable[ParamSpec], fixed: Iterable[ParamSpec] = ()) -> ChunkLayout:
        """The layout with room for parameters it does not know yet, given in order of use. Moves nothing.

        `fixed` are parameters that cannot live in chunks; they count among the small ones.
        """
        chunk_nbytes = self.options.chunk_size if isinstance(self.options.chunk_size, int) else None
        return extended(self.store.layout, specs, fixed, chunk_nbytes)

    def spec_of(self, name: str, parameter: nn.Parameter) -> ParamSpec:
        """A parameter as the planner sees it on this session's device."""
        return replace(spec_of(name, parameter), granule_nbytes=self.granule_nbytes, states=state_format_of(parameter))

    def restate(self) -> None:
        """Lay out states in the formats that the parameters' optimizers declare by now (see `declare_states`).

        States at home that have another format are their optimizer's from then on, and no longer in a chunk.

        Raises:
            OptionsError: parameters of one chunk have optimizers that keep states in different formats, or are not
                where this format needs them.
        """
        store = self.store
        named = {name: found for name, p in store.parameters().items() if (found := declared_states(p)) is not None}
        layout = restated(store.layout, named)
        if layout != store.layout:
            for old, new in zip(store.layout.groups, layout.groups, strict=True):
                if old.states != new.states:
                    store.leave_states(old.index)
                    for of_group in old.slices:
                        self._keepers.pop(of_group.spec.name, None)
            store.restate(layout)
            self.num_restatements += 1

    def has_states_of(self, optimizer: object, names: Iterable[str]) -> bool:
        """Whether chunks have room for this optimizer's states of these parameters, and not for another's."""
        return all(name in self._keepers and self._keepers[name]() is optimizer for name in names)

    def keep_states_of(self, optimizer: object, group: int, names: Collection[str]) -> None:
        """From now on the states of these parameters of a group, at home, are those of this optimizer.

        If others' were there, they stay with who has views of them, as the states of two optimizers in PyTorch do.
        """
        if self.has_states_of(optimizer, names):
            return
        if any(name in self._keepers and self._keepers[name]() is not optimizer for name in names):
            self.store.leave_states(group)
        self._keepers.update(dict.fromkeys(names, weakref.ref(optimizer)))

    def unfreeze(self, names: Collection[str]) -> None:
        """Make room at home for the gradients of parameters that were frozen when they were laid out, if there are any.

        Raises:
            HomeError: there is no room.
        """
        layout = unfrozen(self.store.layout, names)
        if layout != self.store.layout:
            self.store.place(layout, {}, self.store.resident)
            self.num_restatements += 1

    def staying_gradients(self) -> frozenset[str]:
        """Parameters that have a gradient now which stays on the compute tier."""
        store = self.store
        return frozenset(
            name for name, p in store.parameters().items() if not store.is_managed(name) and p.grad is not None
        )

    @property
    def minimum_nbytes(self) -> int:
        """The smallest budget that every graph compiled so far can work with, beside what was held in its runs."""
        return self.known.minimum_nbytes(self.store.layout)

    def all_may_stay(self) -> bool:
        """Whether no group has been sent home already by another graph's plan."""
        return self.unplanned or self.store.resident == everything(self.store.layout)

    def record(self, phase: str, plan: Plan, measurement: Measurement) -> None:
        """Keep what a run measured."""
        self.records[phase] = Record(plan, measurement)
        predicted = [moment.nbytes for moment in plan.moments if moment.phase == phase]
        self.predicted_peak_nbytes = max([self.predicted_peak_nbytes, *predicted])
        self.compute_s += measurement.compute_s
        self.host_s += measurement.host_s
        self.num_instructions += measurement.num_instructions
        readings = [nbytes for _, nbytes in measurement.peaks if nbytes is not None]
        if readings:
            self.peak_nbytes = max(self.peak_nbytes or 0, measurement.between_nbytes, *readings)

    def own(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Register parameters as this session's."""
        for name, parameter in parameters.items():
            _owners[parameter] = (self, name)


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def owner(parameter: torch.Tensor) -> tuple[Session, str] | None:
    """The session that owns a parameter, and the parameter's name in it."""
    return _owners.get(parameter)


def sessions_of(parameters: Iterable[torch.Tensor]) -> list[Session]:
    """The sessions that own some of the parameters, in the parameters' order."""
    return list(dict.fromkeys(hit[0] for parameter in parameters if (hit := owner(parameter)) is not None))


def managing(parameter: torch.Tensor) -> tuple[Session, str] | None:
    """The session at whose home a parameter lives, and its name there; None if it stays on the compute tier."""
    hit = owner(parameter)
    return hit if hit is not None and hit[0].store.is_managed(hit[1]) else None


class StateKeeper(Protocol):
    """An optimizer whose states of a parameter move with it."""

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states, to be replaced by the same elsewhere; empty where there are none yet."""


class Declared(NamedTuple):
    """What an optimizer said of a parameter: in what form it keeps states, in how many stages it updates, and who it is
    (None: nobody who keeps any yet)."""

    states: StateFormat
    num_stages: int
    keeper: weakref.ref[StateKeeper] | None


def declare_states(
    parameters: Iterable[torch.Tensor],
    states: StateFormat | None,
    num_stages: int = 1,
    keeper: weakref.ref[StateKeeper] | None = None,
) -> None:
    """Say in what form an optimizer keeps states for parameters: layouts made from now on reckon with it.

    The latest counts; None: no optimizer does. Layouts made before follow with `Session.restate`.
    """
    for parameter in parameters:
        if states is None:
            _states.pop(parameter, None)
        else:
            _states[parameter] = Declared(states.seen_by(parameter.dtype), num_stages, keeper)


def declared(parameter: torch.Tensor) -> Declared | None:
    """What `declare_states` said of a parameter."""
    return _states.get(parameter)


def lay_out_states(
    parameters: Collection[torch.Tensor],
    states: StateFormat,
    num_stages: int = 1,
    keeper: weakref.ref[StateKeeper] | None = None,
) -> None:
    """As `declare_states`; layouts made before follow.

    Raises:
        OptionsError: they cannot (see `Session.restate`); nothing has changed.
    """
    before = [declared(p) for p in parameters]
    declare_states(parameters, states, num_stages, keeper)
    try:
        for session in sessions_of(parameters):
            session.restate()
    except OptionsError:
        for parameter, former in zip(parameters, before, strict=True):
            declare_states([parameter], *(former or (None,)))
        raise


def declared_states(parameter: torch.Tensor) -> StateFormat | None:
    """The form of states that `declare_states` said of a parameter."""
    found = declared(parameter)
    return None if found is None else found.states


def state_format_of(parameter: torch.Tensor) -> StateFormat:
    """The form of a parameter's states: what was declared, else the default."""
    return declared_states(parameter) or DEFAULT_STATES


def session_for(
    parameters: Iterable[nn.Parameter],
    options: Options,
    source: Mapping[str, object] | None,
    device: torch.device = _CPU,
) -> Session:
    """The session of a graph being compiled: its parameters' own, else that of the same options object, else new.

    All models compiled without options are one to the budget, which is the device's.

    Raises:
        UnsupportedError: the parameters belong to several sessions.
        OptionsError: see `Session.configure`.
    """
    found = sessions_of(parameters)
    if len(found) > 1:
        raise UnsupportedError(
            "the graph uses parameters of models that were compiled or placed apart; compile them as one model"
        )
    session = next(iter(found), None)
    source = DEFAULTS if source is None else source
    if session is None:
        session = next((s for s in _sessions if s.options_source is source and s.device == device), None)
    if session is None:
        session = Session(options, source, device)
        _sessions.add(session)
    session.configure(options, source)
    return session


def spec_of(name: str, parameter: nn.Parameter) -> ParamSpec:
    """What the planner needs to know of a parameter."""
    return ParamSpec(name, tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype, parameter.requires_grad)


def can_move(parameter: nn.Parameter) -> bool:
    """Whether a parameter can live in a chunk: a dense tensor in memory that fills its own storage."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type in ("cpu", "cuda")
        and is_chunkable(parameter)
        and parameter.untyped_storage().nbytes() == parameter.nbytes
    )


def is_chunkable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be laid into a chunk as they lie: dense floating-point numbers."""
    return (
        tensor.layout is torch.strided and tensor.dtype.is_floating_point and tensor.numel() > 0 and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill its span without gaps or overlap, in whatever order of dimensions."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    return tensor.detach().permute(order).is_contiguous()
