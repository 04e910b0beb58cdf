"""Non-model bytes of hand-made programs, counted on one's fingers."""

from __future__ import annotations

from collections.abc import Mapping

from chunkc.ir.layout import Chunk
from chunkc.ir.program import MemoryStep, PhaseProgram, SegmentCall, SegmentMemory
from chunkc.passes.memory.profile import last_holds, positions


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


CHAIN = program(
    {"X": 100, "A": 10, "B": 20, "C": 40},
    "c",
    call("0", "s", "x", "a", "A"),
    call("1", "t", "a", "b", "B"),
    call("2", "u", "b", "c", "C"),
)


def chain_memories(released: int) -> dict[str, SegmentMemory]:
    return {
        "s": memory(10, released=(1,), storages=(10,)),
        "t": memory(20, 20, released=(released,), storages=(20,)),
        "u": memory(40, released=(1,), storages=(40,)),
    }


def test_a_storage_lives_from_its_call_to_its_last_reader() -> None:
    # call 0: X + A; call 1: X + A + B; call 2: X + B + C, A is gone
    assert nbytes(CHAIN, chain_memories(2)) == [110, 130, 160]


def test_the_peak_may_be_anywhere_inside_a_call() -> None:
    memories = chain_memories(2) | {"t": memory(5, 300, 20, released=(3,), storages=(20,))}
    (position,) = positions(CHAIN, memories, group_of={})[1:2]
    assert position.non_model_nbytes == 100 + 10 + 300
    assert position.op == "op1"


def test_a_donated_input_is_gone_after_the_step_that_lets_it_go() -> None:
    memories = chain_memories(1) | {"t": memory(1, 30, released=(1,), storages=(20,))}
    found = positions(CHAIN, memories, group_of={})[1]
    assert found.non_model_nbytes == 100 + 30, "A (10) is not there beside the 30 bytes of the second step"
    assert found.op == "op1"


def test_a_donated_input_counts_in_the_steps_before_it_is_released() -> None:
    memories = chain_memories(1) | {"t": memory(25, 30, released=(1,), storages=(20,))}
    found = positions(CHAIN, memories, group_of={})[1]
    assert found.non_model_nbytes == 100 + 10 + 25
    assert found.op == "op0"


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


def test_a_held_input_is_never_donated() -> None:
    memories = chain_memories(2) | {"s": memory(1, 50, released=(1,), storages=(10,))}
    assert nbytes(CHAIN, memories)[0] == 150


def test_aliases_count_once_and_keep_their_storage_alive() -> None:
    # b is a view of a, and is read at the end: A lives all along, and is counted once
    subject = program(
        {"X": 100, "A": 10, "C": 40, "D": 5},
        "d",
        call("0", "s", "x", "a b", "A A"),
        call("1", "t", "a", "c", "C"),
        call("2", "u", "c b", "d", "D"),
    )
    memories = {
        "s": memory(10, released=(1,), outputs=(0, 0)),
        "t": memory(40, released=(0,), storages=(40,)),
        "u": memory(5, released=(1, 1), storages=(5,)),
    }
    assert last_holds(subject) == {"X": 3, "A": 2, "C": 2, "D": 3}
    assert nbytes(subject, memories) == [110, 150, 155]


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


def test_what_is_returned_lives_to_the_end() -> None:
    subject = program(
        {"X": 100, "A": 10, "B": 20},
        "a -",
        call("0", "s", "x", "a", "A"),
        call("1", "t", "x", "b", "B"),
    )
    assert nbytes(subject, {"s": memory(10, released=(1,)), "t": memory(20, released=(1,))}) == [110, 130]


def test_inputs_nobody_holds_go_after_their_last_reader() -> None:
    subject = program(
        {"X": 100, "Y": 1000, "UNUSED": 5000, "A": 10, "B": 20},
        "b",
        call("0", "s", "y", "a", "A"),
        call("1", "t", "a", "b", "B"),
        inputs="x y unused",
    )
    memories = {"s": memory(10, released=(1,)), "t": memory(20, released=(1,), storages=(20,))}
    assert nbytes(subject, memories) == [1110, 130]


def test_held_storages_count_though_no_call_touches_them() -> None:
    subject = program({"X": 1, "H": 500, "A": 10}, "a", call("0", "s", "x", "a", "A"), held="X H")
    assert nbytes(subject, {"s": memory(10, released=(1,))}) == [511]


def test_a_result_that_nobody_reads_is_gone_after_its_call() -> None:
    subject = program(
        {"X": 1, "A": 10, "B": 20},
        "b",
        call("0", "s", "x", "a", "A"),
        call("1", "t", "x", "b", "B"),
    )
    assert nbytes(subject, {"s": memory(10, released=(1,)), "t": memory(20, released=(1,))}) == [11, 21]


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
