"""Count external bytes: values of earlier calls that are alive during a phase, for training and for `explain`.

Training watches storages without keeping them alive; `explain` knows from a step on fake tensors which are alive when
(`explaining.live_values`). Both watch the same values, and count the same ones for each phase.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.policy.captured_step import Captured
from chunkc.policy.needs import ExternalBytes

V = TypeVar("V")


class LiveValues(ABC, Generic[V]):
    """Storages of values that calls returned, saved or were given."""

    def __init__(self) -> None:
        self._caller_nbytes = 0

    @abstractmethod
    def watch(self, values: Iterable[V], nbytes: int | None = None, *, returned: bool = False) -> None:
        """Watch the storages of those values that have one.

        Args:
            nbytes: counts for each in place of its own bytes.
            returned: a call has returned them.
        """

    @abstractmethod
    def returned(self, values: Sequence[V]) -> Sequence[V]:
        """Return the values in storages that an earlier call has returned."""

    @abstractmethod
    def nbytes(self, leaving_out: Sequence[V] = ()) -> int:
        """Return the bytes of watched storages that are alive, without the storages of `leaving_out`."""

    @abstractmethod
    def storage(self, value: V) -> tuple[int, int] | None:
        """Return the key of a value's storage, valid while it is alive, and its bytes; None: the value has none."""

    @abstractmethod
    def constants_nbytes(self) -> int:
        """Return the bytes of the constants of compiled code."""

    def given_nbytes(self, values: Iterable[V]) -> int:
        """Return the bytes of the values' storages, each storage once."""
        return sum(dict(storage for value in values if (storage := self.storage(value)) is not None).values())

    def external_to_forward(self, captured: Captured, inputs: Sequence[V]) -> ExternalBytes:
        """Return the external bytes for a graph that is about to run its forward with these inputs."""
        live_nbytes, constants_nbytes = self.nbytes(leaving_out=inputs), self.constants_nbytes()
        nbytes = captured.external_in_forward(live_nbytes, self.given_nbytes(inputs)) + constants_nbytes
        return ExternalBytes(nbytes, nbytes + min(live_nbytes, captured.loss_nbytes), constants_nbytes)

    def forward_ran(self, captured: Captured, inputs: Sequence[V], outputs: Sequence[V]) -> None:
        """Watch a forward's inputs, and its outputs with storages of their own."""
        own = captured.own_memory
        passed_on_nbytes = self.given_nbytes(self.returned(inputs))
        self.watch(inputs)
        self.watch((outputs[position] for position in own.user_outputs), returned=True)
        saved = [outputs[position] for position in own.saved if outputs[position] is not None]
        self.watch(saved[:1], captured.saved_nbytes)  # all are freed at once, so the first counts for all
        self._caller_nbytes = captured.caller_nbytes - passed_on_nbytes

    def external_to_backward(self, captured: Captured, arguments: Sequence[V]) -> int:
        """Return the external bytes for a graph that is about to run its backward with these arguments."""
        return max(0, self.net_external_to_backward(captured, arguments)) + self.constants_nbytes()

    def net_external_to_backward(self, captured: Captured, arguments: Sequence[V]) -> int:
        """Return the same without constants; it is below zero by the bytes of the graph's own values that are freed."""
        tangents = _tangents(captured, arguments)
        live_nbytes = self.nbytes(leaving_out=tangents) + self._external_tangents_nbytes(captured, tangents)
        return live_nbytes - captured.between_nbytes

    def _external_tangents_nbytes(self, captured: Captured, tangents: Sequence[V]) -> int:
        """Return the bytes of the storages of a backward's tangents that its program does not count.

        There are such bytes where a tangent is a view of a larger tensor.
        """
        if captured.backward is None:
            return 0
        beyond_nbytes: dict[int, int] = {}
        for name, value in zip(captured.tangents, tangents, strict=True):
            if (storage := self.storage(value)) is not None:
                key, nbytes = storage
                counted_nbytes = captured.backward.storages[captured.backward.inputs[name]]
                beyond_nbytes[key] = beyond_nbytes.get(key, nbytes) - counted_nbytes
        return sum(max(0, nbytes) for nbytes in beyond_nbytes.values())

    def backward_begins(self, captured: Captured, arguments: Sequence[V]) -> None:
        """Watch a backward's tangents; in this run its program counts them."""
        self.watch(_tangents(captured, arguments))

    def external_to_update(self) -> int:
        """Return the external bytes for the optimizer's step.

        They are no less than the latest forward's inputs and outputs. Inputs that an earlier graph returned are left
        out: they are watched already.
        """
        return max(self._caller_nbytes, self.nbytes()) + self.constants_nbytes()


def _tangents(captured: Captured, arguments: Sequence[V]) -> Sequence[V]:
    """Return the backward's arguments that are gradients of the forward's outputs."""
    return arguments[len(arguments) - len(captured.tangents) :]


class RealValues(LiveValues[object]):
    """Real tensors' storages, watched without keeping them alive.

    Args:
        granule_nbytes: the allocator rounds storages up to a multiple of this.
    """

    def __init__(self, granule_nbytes: int = 1) -> None:
        super().__init__()
        self.granule_nbytes = granule_nbytes
        self._watched: dict[int, tuple[StorageWeakRef, int]] = {}
        self._returned: dict[int, StorageWeakRef] = {}
        self._constants: dict[int, tuple[StorageWeakRef, int]] = {}

    def watch_constants(self, values: Iterable[torch.Tensor]) -> None:
        """Watch the constants of compiled code."""
        for value in values:
            storage = value.untyped_storage()
            nbytes = rounded_nbytes(storage.nbytes(), self.granule_nbytes)
            self._constants[storage.data_ptr()] = StorageWeakRef(storage), nbytes

    def constants_nbytes(self) -> int:
        return sum(nbytes for ref, nbytes in self._constants.values() if not ref.expired())

    def watch(self, values: Iterable[object], nbytes: int | None = None, *, returned: bool = False) -> None:
        for value in values:
            if (storage := self.storage(value)) is not None:
                assert isinstance(value, torch.Tensor)
                key, taken_nbytes = storage
                self._watched[key] = StorageWeakRef(value.untyped_storage()), taken_nbytes if nbytes is None else nbytes
                if returned:
                    self._returned[key] = self._watched[key][0]

    def returned(self, values: Sequence[object]) -> Sequence[object]:
        self._returned = {key: ref for key, ref in self._returned.items() if not ref.expired()}
        return [t for t in values if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in self._returned]

    def nbytes(self, leaving_out: Sequence[object] = ()) -> int:
        self._watched = {key: (ref, n) for key, (ref, n) in self._watched.items() if not ref.expired()}
        skipped = {t.untyped_storage().data_ptr() for t in leaving_out if isinstance(t, torch.Tensor)}
        return sum(n for key, (_, n) in self._watched.items() if key not in skipped)

    def storage(self, value: object) -> tuple[int, int] | None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        storage = value.untyped_storage()
        return storage.data_ptr(), rounded_nbytes(storage.nbytes(), self.granule_nbytes)
