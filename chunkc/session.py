"""One session per model: its chunk store, its budget, and the values of earlier calls that are still alive.

Sessions are found by the parameters they own, or by the options they were compiled with. The registries below are
the only state of this kind that lives in a module, beside that of `chunkc.declared`; they hold parameters and sessions
weakly.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from chunkc.declared import StateKeeper, declare_states, declared, declared_states, state_format_of
from chunkc.early import EarlyUpdates
from chunkc.identity import WeakIdentity
from chunkc.ir.chunks import ChunkLayout, ParamSpec
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.estimates import EstimatedOperator, largest_of_each
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import Plan, Tile
from chunkc.ir.states import StateFormat
from chunkc.known_needs import KnownNeeds
from chunkc.live_values import LiveValues
from chunkc.machines.devices import granule_of, hardware_of, memory_of, overhead_of
from chunkc.options import Options, resolve_budget
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
        is_over: whether it has ended: everything was given back, and what was compiled for it refuses.
        number: the sessions' own, in the order in which they were made.
        estimates: operators of every graph so far whose inner memory is a guess.
        num_restatements: how often groups have got other data: states in other formats, or gradients where there were
            none. Plans made before do not count.
    """

    def __init__(
        self, options: Options, source: object = None, device: torch.device = _CPU, *, present_nbytes: int = 0
    ) -> None:
        """Open the session's tier and homes.

        Args:
            present_nbytes: what its parameters take on the device already: theirs to use, so not taken from a budget
                of "auto".
        """
        self.options = options
        self.options_source = source
        self.device = device
        self.hardware: Hardware = hardware_of(device)
        self.granule_nbytes = granule_of(device)
        self.overhead_nbytes = overhead_of(device)
        total_nbytes, available_nbytes = memory_of(device)
        self.budget_nbytes = resolve_budget(options.memory_budget, total_nbytes, available_nbytes + present_nbytes)
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
        self.estimates: tuple[EstimatedOperator, ...] = ()
        self.trained: frozenset[str] = frozenset()
        self.early = EarlyUpdates()
        self._keepers: dict[str, weakref.ref[object]] = {}
        self._lock = threading.RLock()
        self._num_entered = 0
        self._alive: set[WeakIdentity] = set()
        self._had_parameters = False
        self.is_over = False
        self.number = next(_numbers)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, no other thread is: a phase moves chunks that another would compute with.

        A phase of one thread may run between forward and backward of another.

        Raises:
            UnsupportedError: the model is gone, or was laid out anew, but code that was compiled before still runs.
        """
        with self._lock:
            if self.is_over:
                raise UnsupportedError(
                    "this code was compiled for a model that is gone, or whose parameters have another dtype or shape "
                    "now; call the compiled model again, and backward() of what it returns"
                )
            self._num_entered += 1
            try:
                yield
            finally:
                self._num_entered -= 1
                self._end_if_gone()

    def end(self) -> None:
        """Give back home, threads and file descriptors. Parameters are ordinary tensors from now on, as they are.

        What is at home stays in memory for as long as there are tensors over it.
        """
        self.is_over = True
        for parameter in self.store.parameters().values():
            if (hit := owner(parameter)) is not None and hit[0] is self:
                del _owners[parameter]
        self._alive.clear()
        self.update_plans.clear()
        self.store.close()

    def _lost(self, reference: WeakIdentity) -> None:
        """A parameter is gone. Called by the garbage collector, at any time."""
        self._alive.discard(reference)
        if not self._alive and not self.is_over and self._lock.acquire(blocking=False):
            try:
                self._end_if_gone()
            finally:
                self._lock.release()

    def _end_if_gone(self) -> None:
        if self._had_parameters and not self._alive and not self.is_over and self._num_entered == 0:
            self.end()

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

    def note_estimates(self, calls: Iterable[EstimatedOperator]) -> tuple[EstimatedOperator, ...]:
        """Keep which operators' inner memory is a guess; returns those that are new."""
        before = {operator.operator for operator in self.estimates}
        self.estimates = largest_of_each((*self.estimates, *calls))
        return tuple(operator for operator in self.estimates if operator.operator not in before)

    def own(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Register parameters as this session's: with the last of them the session ends."""
        session = weakref.ref(self)

        def lost(reference: WeakIdentity) -> None:
            if (found := session()) is not None:
                found._lost(reference)

        for name, parameter in parameters.items():
            _owners[parameter] = (self, name)
            self._alive.add(WeakIdentity(parameter, lost))
        self._had_parameters |= bool(parameters)


_numbers = itertools.count()
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def owner(parameter: torch.Tensor) -> tuple[Session, str] | None:
    """The session that owns a parameter, and the parameter's name in it."""
    return _owners.get(parameter)


def owned_parameters() -> list[torch.Tensor]:
    """All parameters that some session owns."""
    return list(_owners.keys())


def sessions_of(parameters: Iterable[torch.Tensor]) -> list[Session]:
    """The sessions that own some of the parameters, in the parameters' order."""
    return list(dict.fromkeys(hit[0] for parameter in parameters if (hit := owner(parameter)) is not None))


def managing(parameter: torch.Tensor) -> tuple[Session, str] | None:
    """The session at whose home a parameter lives, and its name there; None if it stays on the compute tier."""
    hit = owner(parameter)
    return hit if hit is not None and hit[0].store.is_managed(hit[1]) else None


@contextmanager
def all_entered(sessions: Iterable[Session]) -> Iterator[None]:
    """`Session.entered` of several, in an order that is the same for all threads."""
    with ExitStack() as stack:
        for session in sorted(sessions, key=lambda session: session.number):
            stack.enter_context(session.entered())
        yield


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
    """
    parameters = list(parameters)
    found = sessions_of(parameters)
    if len(found) > 1:
        raise UnsupportedError(
            "the graph uses parameters of models that were compiled or placed apart; compile them as one model"
        )
    session = next(iter(found), None)
    source = DEFAULTS if source is None else source
    if session is None:
        session = next((s for s in _sessions if _serves(s, source, device)), None)
    if session is None:
        session = Session(options, source, device, present_nbytes=_present_nbytes(parameters, device))
        _sessions.add(session)
    return session


def _present_nbytes(parameters: Sequence[nn.Parameter], device: torch.device) -> int:
    """Bytes that parameters take on a GPU already. RAM has what is not free counted elsewhere."""
    storages = [p.untyped_storage() for p in parameters if p.device == device and device.type == "cuda"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _serves(session: Session, source: object, device: torch.device) -> bool:
    return session.options_source is source and session.device == device and not session.is_over


def spec_of(name: str, parameter: nn.Parameter) -> ParamSpec:
    """What the planner needs to know of a parameter."""
    return ParamSpec(name, tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype, parameter.requires_grad)
