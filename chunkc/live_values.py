"""Values of earlier calls, and how many bytes of them others hold beside a run: counted here for both who ask.

Training watches storages without keeping them alive; `explain` knows from a step on fake tensors which are alive when
(`explaining.held`). What is watched, and what counts beside which phase, is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.captured import Captured
from chunkc.known_needs import Held
from chunkc.passes.cuda_memory import rounded_nbytes

V = TypeVar("V")


class HeldValues(ABC, Generic[V]):
    """Values that calls returned, saved or were given."""

    def __init__(self) -> None:
        self._caller_nbytes = 0

    @abstractmethod
    def watch(self, values: Iterable[V], nbytes: int | None = None, *, returned: bool = False) -> None:
        """Watch the storages of those values that have one; with `nbytes`, let each stand for so many bytes.

        Args:
            returned: a call has returned them.
        """

    @abstractmethod
    def returned(self, values: Sequence[V]) -> Sequence[V]:
        """Those in storages that an earlier call has returned."""

    @abstractmethod
    def nbytes(self, leaving_out: Sequence[V] = ()) -> int:
        """Bytes of those still alive, without the storages of `leaving_out`."""

    @abstractmethod
    def given_nbytes(self, values: Sequence[V]) -> int:
        """Bytes of the values' storages, each storage once."""

    @abstractmethod
    def constants_nbytes(self) -> int:
        """Bytes of the constants of compiled code."""

    def beside_forward(self, captured: Captured, inputs: Sequence[V]) -> Held:
        """What others hold beside a graph that is about to run its forward with these inputs."""
        held = Held.around(captured, self.nbytes(leaving_out=inputs), self.given_nbytes(inputs))
        always_nbytes = self.constants_nbytes()
        return Held(held.forward_nbytes + always_nbytes, held.backward_nbytes + always_nbytes, always_nbytes)

    def forward_ran(self, captured: Captured, inputs: Sequence[V], outputs: Sequence[V]) -> None:
        """Watch what a forward was given, and of what it returned all that takes memory."""
        own = captured.own_memory
        passed_on_nbytes = self.given_nbytes(self.returned(inputs))
        self.watch(inputs)
        self.watch((outputs[position] for position in own.user_outputs), returned=True)
        saved = [outputs[position] for position in own.saved if outputs[position] is not None]
        self.watch(saved[:1], captured.saved_nbytes)  # they live and die together: one stands for all
        self._caller_nbytes = captured.caller_nbytes - passed_on_nbytes

    def beside_backward(self, captured: Captured) -> int:
        """What others hold beside a graph that is about to run its backward."""
        return max(0, self.values_beside_backward(captured)) + self.constants_nbytes()

    def values_beside_backward(self, captured: Captured) -> int:
        """The same without constants; below zero where values of its own are gone, by so many bytes."""
        return self.nbytes() - captured.between_nbytes

    def backward_begins(self, captured: Captured, arguments: Sequence[V]) -> None:
        """Watch the gradients that a backward is given: in this run the program counts them."""
        self.watch(arguments[len(arguments) - len(captured.tangents) :])

    def beside_update(self) -> int:
        """What others hold beside the optimizer's step: no less than the caller gave to the latest forward, or has of
        it. What one graph hands to the next is held by whoever still has it."""
        return max(self._caller_nbytes, self.nbytes()) + self.constants_nbytes()


class LiveValues(HeldValues[object]):
    """Real tensors' storages, watched without keeping them alive.

    Args:
        granule_nbytes: the allocator gives each a multiple of this.
    """

    def __init__(self, granule_nbytes: int = 1) -> None:
        super().__init__()
        self.granule_nbytes = granule_nbytes
        self._watched: dict[int, tuple[StorageWeakRef, int]] = {}
        self._returned: dict[int, StorageWeakRef] = {}
        self._constants: dict[int, tuple[StorageWeakRef, int]] = {}

    def watch_constants(self, values: Iterable[torch.Tensor]) -> None:
        """Watch the constants of code that was compiled."""
        for value in values:
            storage = value.untyped_storage()
            nbytes = rounded_nbytes(storage.nbytes(), self.granule_nbytes)
            self._constants[storage.data_ptr()] = StorageWeakRef(storage), nbytes

    def constants_nbytes(self) -> int:
        return sum(nbytes for ref, nbytes in self._constants.values() if not ref.expired())

    def watch(self, values: Iterable[object], nbytes: int | None = None, *, returned: bool = False) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                taken_nbytes = rounded_nbytes(storage.nbytes(), self.granule_nbytes) if nbytes is None else nbytes
                self._watched[storage.data_ptr()] = StorageWeakRef(storage), taken_nbytes
                if returned:
                    self._returned[storage.data_ptr()] = self._watched[storage.data_ptr()][0]

    def returned(self, values: Sequence[object]) -> Sequence[object]:
        self._returned = {key: ref for key, ref in self._returned.items() if not ref.expired()}
        return [t for t in values if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in self._returned]

    def nbytes(self, leaving_out: Sequence[object] = ()) -> int:
        self._watched = {key: (ref, n) for key, (ref, n) in self._watched.items() if not ref.expired()}
        skipped = {t.untyped_storage().data_ptr() for t in leaving_out if isinstance(t, torch.Tensor)}
        return sum(n for key, (_, n) in self._watched.items() if key not in skipped)

    def given_nbytes(self, values: Sequence[object]) -> int:
        storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(rounded_nbytes(nbytes, self.granule_nbytes) for nbytes in sizes.values())
