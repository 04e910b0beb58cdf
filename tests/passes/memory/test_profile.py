"""Non-model bytes of hand-made programs, counted on one's fingers."""

from __future__ import annotations

from collections.abc import Mapping

from chunkc.ir.layout import Chunk
from chunkc.ir.program import MemoryStep, PhaseProgram, SegmentCall, SegmentMemory
from chunkc.passes.memory.profile import positions


def memory(*nbytes: int, released: tuple[int, ...] = (), outputs: tuple[int, ...] = (0,), storages=(10,)):
    return SegmentMemory(
        tuple(MemoryStep(f"op{i}", "", n) for i, n in enumerate(nbytes)), released, outputs, tuple(storages)
    )


def call(name: str, segment: str, inputs: str, outputs: str, storages: str, **more) -> SegmentCall:
    fields = {"parameters": (), "gradients": (), "module": "", "cost_s": 1.0} | more
    return SegmentCall(name, segment, tuple(inputs.split()), tuple(outputs.split()), tuple(storages.split()), **fields)


def program(
    storages: Mapping[str, int], outputs: str, *calls: SegmentCall, inputs: str = "x", held: str = "X"
) -> PhaseProgram:
    """Each input lies in the storage of its letter."""
    by_input = {name: name.upper() for name in inputs.split()}
    returned = tuple(None if name == "-" else name for name in outputs.split())
    return PhaseProgram("forward", by_input, storages, frozenset(held.split()), {}, calls, returned, 1)


def nbytes(subject: PhaseProgram, memories: Mapping[str, SegmentMemory]) -> list[int]:
    return [position.non_model_nbytes for position in positions(subject, memories, group_of={})]


def chain_memories(released: int) -> dict[str, SegmentMemory]:
    return {
        "s": memory(10, released=(1,), storages=(10,)),
        "t": memory(20, 20, released=(released,), storages=(20,)),
        "u": memory(40, released=(1,), storages=(40,)),
    }


def test_an_input_that_is_read_again_is_not_donated() -> None:
    subject = program(
        {"X": 100, "A": 10, "B": 20, "C": 40},
        "c",
        call("0", "s", "x", "a", "A"),
        call("1", "t", "a", "b", "B"),
        call("2", "u", "b a", "c", "C"),
    )
    memories = chain_memories(1) | {"u": memory(40, released=(1, 1), storages=(40,))}
    assert nbytes(subject, memories) == [110, 130, 170]


def test_aliases_given_together_are_released_by_the_later_one() -> None:
    subject = program(
        {"X": 100, "A": 10, "C": 40},
        "c",
        call("0", "s", "x", "a b", "A A"),
        call("1", "t", "a b", "c", "C"),
    )
    memories = {
        "s": memory(10, released=(1,), outputs=(0, 0)),
        "t": memory(0, 7, 3, released=(1, 2), storages=(40,)),
    }
    assert nbytes(subject, memories)[1] == 100 + 10 + 7


def test_chunks_that_calls_read_and_write() -> None:
    used = {"parameters": ((0, "w"), (2, "bias")), "gradients": (("a", "v"), ("a", "bias"))}
    one_call = call("0", "s", "p x q", "a", "A", **used)
    subject = program({"P": 0, "Q": 0, "X": 1, "A": 10}, "-", one_call, inputs="p q x")
    (position,) = positions(subject, {"s": memory(10, released=(1, 1, 1))}, group_of={"w": 3, "v": 4})
    assert position.reads == {Chunk("param", 3)}
    assert position.writes == {Chunk("grad", 4)}
    assert position.phase == "forward"
    assert position.cost_s == 1.0


def test_the_module_is_the_steps_own_or_the_calls() -> None:
    steps = (MemoryStep("op", "h.0.mlp", 5), MemoryStep("op", "", 9))
    subject = program({"X": 1, "A": 10}, "a", call("0", "s", "x", "a", "A", module="h.0"))
    found = positions(subject, {"s": SegmentMemory(steps, (2,), (0,), (10,))}, group_of={})
    assert found[0].module == "h.0"
    found = positions(subject, {"s": SegmentMemory(steps[:1], (1,), (0,), (10,))}, group_of={})
    assert found[0].module == "h.0.mlp"
