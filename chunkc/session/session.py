"""Tie the graphs of one model together: a session has its budget, store and records.

Sessions are found by the parameters they own, or by the options they were compiled with. The registries below are
the only state of this kind that lives in a module, besides that of `chunkc.session.declared_states`; they hold
parameters and sessions weakly.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.estimates import EstimatedOperator, largest_of_each
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ChunkLayout, ParamSpec
from chunkc.ir.program import UPDATE
from chunkc.ir.states import StateFormat
from chunkc.machines.devices import granule_of, hardware_of, memory_of, overhead_of
from chunkc.options import Options, resolve_budget
from chunkc.passes.planning.layout import EMPTY_LAYOUT, extended, restated, unfrozen
from chunkc.passes.rewrite.loss_tiles import Losses
from chunkc.policy.live_values import RealValues
from chunkc.policy.needs import SessionNeeds
from chunkc.policy.plans import UpdatePlan
from chunkc.policy.seen_steps import SeenSteps
from chunkc.policy.state import Key, PlannerState
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.execution.executor import Executable
from chunkc.runtime.execution.saved import SavedRoom
from chunkc.runtime.storage.open_compute import open_compute
from chunkc.runtime.store.consumed_gradients import gradient_of
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.declared_states import declare_states, declared, declared_states, stages_of_updates, state_format_of
from chunkc.session.in_backward import UpdatesInBackward
from chunkc.session.protocols import StateKeeper
from chunkc.session.records import Records
from chunkc.session.state_keepers import StateKeepers
from chunkc.utils.identity import ByIdentity, WeakIdentity
from chunkc.utils.recent import Recent

DEFAULTS: Mapping[str, object] = MappingProxyType({})
"""Stands for the options of a model that was compiled without any."""

MAX_UPDATE_PLANS = 64
"""Plans of the optimizer's step that are kept; the one that was not used for longest goes."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Terms:
    """The user's options, and their budget in bytes.

    `source`: the options as they were given. Their identity ties the graphs of one model together.
    """

    options: Options
    source: object
    budget_nbytes: int


class Session:
    """The state that all graphs compiled for one model share.

    Attributes:
        device: where the model computes.
        hardware: what the planner takes it for.
        granule_nbytes: the compute tier's allocator gives multiples of this.
        overhead_nbytes: what libraries and tables keep on the compute tier, inside the budget.
        terms: options and budget.
        store: the layout, the resident groups, homes and slots.
        saved_room: home memory of saved values that are offloaded between forward and backward.
        num_graphs, trained, num_stages: as of a `PlannerState`.
        live: values of earlier calls.
        records: what runs have measured.
        known: what is known of the smallest budget.
        seen: what is known of the other graphs of a step.
        update_plans: the latest plans of the optimizer's step, by what was asked for.
        keepers: the optimizers with states in chunks.
        modules: those that were placed, or called when a graph was compiled: what has its parameters. Held weakly.
        in_backward: updates that begin during the backward.
        estimates: operators of every graph so far with a guess for their scratch memory.
        losses: those of every graph so far that are large enough for tiles, tiled or not.
        is_over: whether it has ended: everything was given back, and what was compiled for it refuses.
        number: in the order in which sessions are made.
    """

    def __init__(
        self, options: Options, source: object = None, device: torch.device = _CPU, *, present_nbytes: int = 0
    ) -> None:
        """Open the session's tier and homes.

        Args:
            present_nbytes: bytes of its parameters on the device already, which a budget of "auto" includes.
        """
        self.device = device
        self.hardware: Hardware = hardware_of(device)
        self.granule_nbytes = granule_of(device)
        self.overhead_nbytes = overhead_of(device)
        total_nbytes, available_nbytes = memory_of(device, self.hardware)
        budget_nbytes = resolve_budget(options.memory_budget, total_nbytes, available_nbytes + present_nbytes)
        self.terms = Terms(options, source, budget_nbytes)
        tier, arena = open_compute(device, options.home, options.disk_holds_everything(device.type))
        layout = replace(EMPTY_LAYOUT, overhead_nbytes=self.overhead_nbytes, disk_holds=options.on_disk(device.type))
        self.store = ChunkStore(layout, arena, tier, options.debug)
        self.saved_room = SavedRoom(arena.home)
        self.num_graphs = 0
        self.trained: frozenset[str] = frozenset()
        self.num_stages = 1
        self.live = RealValues(self.granule_nbytes)
        self.records = Records()
        self.known = SessionNeeds()
        self.seen = SeenSteps()
        self.update_plans: Recent[Key, tuple[UpdatePlan, Executable]] = Recent(MAX_UPDATE_PLANS)
        self.keepers = StateKeepers(self.store)
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.in_backward = UpdatesInBackward(self.store)
        self.estimates: tuple[EstimatedOperator, ...] = ()
        self.losses = Losses()
        self._lock = threading.RLock()
        self._num_entered = 0
        self._alive: set[WeakIdentity] = set()
        self._had_parameters = False
        self.is_over = False
        self.number = next(_numbers)
        _by_store[id(self.store)] = self

    @property
    def options(self) -> Options:
        return self.terms.options

    @property
    def budget_nbytes(self) -> int:
        """The limit for the compute tier, in bytes."""
        return self.terms.budget_nbytes

    @property
    def planner_state(self) -> PlannerState:
        """The inputs of `policy.decide` that outlive a call."""
        return PlannerState(
            self.terms.budget_nbytes,
            self.store.layout,
            self.store.resident,
            self.num_graphs,
            self.trained,
            self.options.activations,
            self.hardware,
            self.num_stages,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keep other threads out: a phase moves chunks that another would compute with.

        A phase of one thread may run between forward and backward of another.

        Raises:
            UnsupportedError: the model is gone, or was laid out anew, but code that was compiled before still runs.
        """
        with self._lock:
            if self.is_over:
                raise UnsupportedError(
                    "this code was compiled for a model that is gone, or has parameters of another dtype or shape "
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
        for parameter in self.store.views.parameters().values():
            if (hit := owner(parameter)) is not None and hit[0] is self:
                del _owners[parameter]
        self._alive.clear()
        self.update_plans.clear()
        self.saved_room.close()
        self.store.close()

    def _lost(self, reference: WeakIdentity) -> None:
        """Note that a parameter is gone, and end the session with its last one.

        The garbage collector calls this at any time, on any thread, so it does not wait for the lock: the thread that
        holds it ends the session as it leaves `entered`.
        """
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
        if source is self.terms.source:
            return
        budget_nbytes = resolve_budget(options.memory_budget, *memory_of(self.device, self.hardware))
        self.agree(Terms(options.at_home(self.options.home, self.options.disk_holds, source), source, budget_nbytes))

    def agree(self, terms: Terms) -> None:
        """Take over terms."""
        self.terms = terms
        self.store.slots.debug = terms.options.debug

    @property
    def transport(self) -> Transport | None:
        """The connection of the ranks that train this model; None: one process does."""
        return self.store.slots.transport

    def extend_layout(self, specs: Iterable[ParamSpec], fixed: Iterable[ParamSpec] = ()) -> ChunkLayout:
        """Return the layout with room for new parameters, given in order of use. Moves nothing.

        `fixed` are parameters that cannot live in chunks; they count among the small ones.
        """
        chunk_nbytes = self.options.chunk_size if isinstance(self.options.chunk_size, int) else None
        return extended(self.store.layout, specs, fixed, chunk_nbytes)

    def spec_of(self, name: str, parameter: nn.Parameter) -> ParamSpec:
        """Describe a parameter for the planner, on this session's device."""
        return replace(spec_of(name, parameter), granule_nbytes=self.granule_nbytes, states=state_format_of(parameter))

    def restate(self) -> None:
        """Lay out states anew in the formats that optimizers declare by now (see `declare_states`), inside `entered`.

        Home states of another format leave their chunk: from then on only their optimizer has them.

        Raises:
            OptionsError: parameters of one chunk have optimizers that keep states in different formats, or are not
                where this format needs them.
        """
        store = self.store
        named = {
            name: found for name, p in store.views.parameters().items() if (found := declared_states(p)) is not None
        }
        layout = restated(store.layout, named)
        self.num_stages = stages_of_updates(store.views.parameters().values())
        if layout != store.layout:
            for old, new in zip(store.layout.groups, layout.groups, strict=True):
                if old.states != new.states:
                    self.keepers.leave(old.index)
            store.set_state_kinds(layout)

    def unfreeze(self, names: Collection[str]) -> None:
        """Make room at home for the gradients of parameters that were frozen when they were laid out, if there are any.

        Raises:
            HomeError: there is no room.
        """
        layout = unfrozen(self.store.layout, names)
        if layout != self.store.layout:
            self.store.place(layout, {}, self.store.resident)

    def resident_gradients(self) -> frozenset[str]:
        """Return the parameters with a gradient on the compute tier now, and those that another thread trains."""
        store = self.store
        readable = store.gradients.readable()
        resident = {name: p for name, p in store.views.parameters().items() if not store.views.is_managed(name)}
        return frozenset(name for name, p in resident.items() if name not in readable or gradient_of(p) is not None)

    @property
    def minimum_nbytes(self) -> int:
        """The smallest budget that fits every graph compiled so far, with the external bytes of their runs."""
        return self.known.minimum_nbytes(self.store.layout, self.options.activations)

    def note_estimates(self, calls: Iterable[EstimatedOperator]) -> tuple[EstimatedOperator, ...]:
        """Keep the operators with a guess for their scratch memory. Return those that are new."""
        before = {operator.operator for operator in self.estimates}
        self.estimates = largest_of_each((*self.estimates, *calls))
        return tuple(operator for operator in self.estimates if operator.operator not in before)

    def note_losses(self, losses: Losses) -> Losses:
        """Keep what became of a graph's losses. Return what is new."""
        new = losses.without(self.losses)
        self.losses = Losses(self.losses.tiled + new.tiled, self.losses.whole + new.whole)
        return new

    def own(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Register parameters as this session's, which ends with the last of them."""
        session = weakref.ref(self)

        def lost(reference: WeakIdentity) -> None:
            if (found := session()) is not None:
                found._lost(reference)

        for name, parameter in parameters.items():
            _owners[parameter] = (self, name)
            self._alive.add(WeakIdentity(parameter, lost))
        self._had_parameters |= bool(parameters)


_numbers = itertools.count()
_owners: ByIdentity[tuple[Session, str]] = ByIdentity()
_by_store: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()  # by id, while the session lives
OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


def owner(parameter: torch.Tensor) -> tuple[Session, str] | None:
    """Return the session that owns a parameter, and the parameter's name in it."""
    return _owners.get(local_shard_of(parameter))


def session_with(store: ChunkStore) -> Session:
    """Return the session that made a store."""
    return _by_store[id(store)]


def readable_parameters() -> list[torch.Tensor]:
    """Return the parameters of all sessions, but for those with a `.grad` that this thread may not read."""
    sessions = dict.fromkeys(session for session, _ in _owners.values())
    return [parameter for session in sessions for parameter in session.store.gradients.readable().values()]


def sessions_of(parameters: Iterable[torch.Tensor]) -> list[Session]:
    """Return the sessions that own some of the parameters, in the parameters' order."""
    return list(dict.fromkeys(hit[0] for parameter in parameters if (hit := owner(parameter)) is not None))


def managing(parameter: torch.Tensor) -> tuple[Session, str] | None:
    """Return the session with a parameter's home, and its name there; None for a parameter on the compute tier."""
    hit = owner(parameter)
    return hit if hit is not None and hit[0].store.views.is_managed(hit[1]) else None


@contextmanager
def all_entered(sessions: Iterable[Session]) -> Iterator[None]:
    """Enter several sessions, in an order that is the same for all threads."""
    with ExitStack() as stack:
        for session in sorted(sessions, key=lambda session: session.number):
            stack.enter_context(session.entered())
        yield


@contextmanager
def stepping(sessions: Collection[Session]) -> Iterator[None]:
    """Enter the sessions with parameters that an optimizer's step changes, and time the step."""
    with all_entered(sessions), ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.records.timed(UPDATE, session.store.slots.traffic))
        yield


def lay_out_states(
    parameters: Collection[torch.Tensor],
    states: StateFormat,
    num_stages: int = 1,
    keeper: weakref.ref[StateKeeper] | None = None,
) -> None:
    """Declare states (`declare_states`), and lay them out in existing layouts. Waits for phases of other threads.

    Raises:
        OptionsError: they cannot (see `Session.restate`); nothing has changed.
    """
    sessions = sessions_of(parameters)
    with all_entered(sessions):
        before = [declared(p) for p in parameters]
        declare_states(parameters, states, num_stages, keeper)
        try:
            for session in sessions:
                session.restate()
        except OptionsError:
            for parameter, former in zip(parameters, before, strict=True):
                declare_states([parameter], *(former or (None,)))
            raise


def spec_of(name: str, parameter: nn.Parameter) -> ParamSpec:
    """Describe a parameter for the planner."""
    shards = parameter.shards if isinstance(parameter, LocalShard) else None
    layout = tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype
    return ParamSpec(name, *layout, parameter.requires_grad, shards=shards)
