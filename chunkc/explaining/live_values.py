"""Count the live values of a step on fake tensors, as training counts real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chunkc.explaining.offline_calls import PhaseCall
from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.policy.captured_step import Captured
from chunkc.policy.live_values import LiveValues


class PredictedValues(LiveValues[int | None]):
    """Live storages by their numbers in a step on fake tensors; None stands for a value without a storage.

    Args:
        is_on_gpu: the step ran with the CPU's operators, and is to run on a GPU.

    Attributes:
        alive: the storages that are alive now.
    """

    def __init__(self, storage_nbytes: Sequence[int], *, is_on_gpu: bool) -> None:
        super().__init__()
        self._storage_nbytes, self._is_on_gpu = storage_nbytes, is_on_gpu
        self._constants_nbytes = 0
        self._watched: dict[int, int] = {}
        self._returned: set[int | None] = set()
        self.alive: frozenset[int] = frozenset()

    def watch(self, values: Iterable[int | None], nbytes: int | None = None, *, returned: bool = False) -> None:
        for value in values:
            if value is not None:
                self._watched[value] = self._storage_nbytes[value] if nbytes is None else nbytes
                if returned:
                    self._returned.add(value)

    def returned(self, values: Sequence[int | None]) -> Sequence[int | None]:
        return [value for value in values if value in self._returned]

    def nbytes(self, leaving_out: Sequence[int | None] = ()) -> int:
        self._watched = {value: nbytes for value, nbytes in self._watched.items() if value in self.alive}
        return sum(nbytes for value, nbytes in self._watched.items() if value not in leaving_out)

    def constants_nbytes(self) -> int:
        return self._constants_nbytes

    def graph_compiled(self, captured: Captured) -> None:
        """Count a graph's constants from now on; on a GPU without single numbers, which PyTorch leaves on the CPU."""
        for value in captured.constants:
            if not self._is_on_gpu:
                self._constants_nbytes += value.untyped_storage().nbytes()
            elif value.dim() > 0:
                self._constants_nbytes += rounded_nbytes(value.untyped_storage().nbytes())

    def storage(self, value: int | None) -> tuple[int, int] | None:
        return None if value is None else (value, self._storage_nbytes[value])


def outputs_of(forward: PhaseCall, own: Captured) -> list[int | None]:
    """Return the storages of a forward's outputs; None also for saved values that only the hardware's operators have.

    The step ran with the CPU's operators. Outputs for the caller are the same on every device.
    """
    by_name = dict(zip(forward.names, forward.outputs, strict=True))
    program, num_user_outputs = own.forward, own.forward.num_user_outputs
    saved = [by_name.get(name) for name in program.outputs[num_user_outputs : len(program.outputs) - program.num_extra]]
    dropped = next(
        (by_name.get(names[0]) for names in program.remade.values()), None
    )  # alive as long as the extra outputs
    return [*forward.outputs[:num_user_outputs], *saved, *[dropped] * program.num_extra]


def freed_storages(forward: PhaseCall, own: Captured, alive: frozenset[int]) -> frozenset[str]:
    """Return the storages that a forward's backward counts as held and that are not alive any more."""
    if own.backward is None:
        return frozenset()
    program, storage_of = own.forward, own.forward.value_storages
    numbered = [
        *zip(program.inputs.values(), forward.arguments, strict=True),
        *(
            (storage_of[value], number)
            for value, number in zip(program.outputs, outputs_of(forward, own), strict=True)
            if value is not None
        ),
    ]
    number_of = {name: number for name, number in numbered if number is not None}
    inputs = tuple(own.backward.inputs.values())
    kept = inputs[len(inputs) - own.backward.num_extra :]
    freed = (name for name, number in number_of.items() if name in own.backward.held and number not in alive)
    return frozenset(freed).difference(kept)
