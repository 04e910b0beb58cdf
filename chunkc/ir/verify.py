"""The verifier: from a rewritten graph alone, is every read safe, every write kept and every byte within budget?

It shares no code with the planner. It adds up itself what stays on the compute tier, walks the graph in order and
keeps, per chunk, what a device would: the slot (each time a chunk gets one, a new generation), whether the data in it
is ready, which copy is under way, whether it is newer than home. Bytes are counted by reference counts over storages,
not by lifetimes.

Rules, by the words their violations begin with:
    read      a parameter is read from the chunk it lies in, while that is in the same slot with its data ready
    write     gradients and updates go into their own chunk's slot, ready and under no copy; all that are due, once
    slot      a slot is given back only when no copy to or from it is under way
    dirty     a slot with data newer than home is not given back before it was written back
    state     no event makes sense twice: no prefetch of a present chunk, no wait or evict of an absent one
    home      of a settled group all gradients are at home or on their way, and no copy starts either way
    budget    bytes never exceed the budget
    end       the phase ends with exactly the chunks it should, clean and quiet
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from chunkc.ir.chunks import GRAD, PARAM, STEP_NBYTES, ChunkLayout, ParamSpec, chunk_name, split_chunk_name
from chunkc.ir.program import SegmentMemory
from chunkc.ir.states import num_entries
from chunkc.ir.updates import update_stages


@dataclass
class _Slot:
    generation: int
    ready: bool = False
    copying: str = ""  # "", "in" or "out"
    dirty: bool = False


class _Checker:
    def __init__(
        self,
        graph: fx.Graph,
        layout: ChunkLayout,
        memories: Mapping[str, SegmentMemory],
        staying_nbytes: int,
        budget_nbytes: int,
        present: Collection[str],
    ) -> None:
        self.graph, self.layout, self.memories = graph, layout, memories
        self.staying_nbytes, self.budget_nbytes = staying_nbytes, budget_nbytes
        self.violations: list[str] = []
        self.generations = 0
        self.slots: dict[str, _Slot] = {}
        for chunk in present:
            self.slots[chunk] = self._new_slot()
            self.slots[chunk].ready = True
        self.view_of: dict[fx.Node, tuple[str, int]] = {}  # parameter node -> (chunk, generation)
        self.storage_of: dict[fx.Node, str] = {}
        self.storage_nbytes: dict[str, int] = {}
        self.readers: dict[fx.Node, int] = {}  # value -> reads still to come
        self.holders: Counter[str] = Counter()  # storage -> values alive in it
        self.held: set[str] = set()
        self.value_nbytes = 0
        self.peak_nbytes = 0
        self.group_of = layout.group_of()
        self.sunk: Counter[str] = Counter()
        self.updated: dict[int, list[list[tuple[int, int]]]] = {}  # group -> tiles of each stage
        self.settled: set[int] = set()

    def _new_slot(self) -> _Slot:
        self.generations += 1
        return _Slot(self.generations)

    def fail(self, rule: str, node: fx.Node | None, text: str) -> None:
        where = f" at {node.name}" if node is not None else ""
        self.violations.append(f"{rule}{where}: {text}")

    # --- bytes ---

    def hold(self, storage: str, values: int) -> None:
        """Count values that come to a storage, or leave it; its bytes with the first and the last."""
        before = self.holders[storage]
        self.holders[storage] += values
        if before == 0 and values > 0:
            self.value_nbytes += self.storage_nbytes[storage]
        elif before > 0 and before + values == 0:
            self.value_nbytes -= self.storage_nbytes[storage]

    def slot_nbytes(self) -> int:
        return sum(self.layout.chunk_nbytes_of(chunk) for chunk in self.slots)

    def check_budget(self, node: fx.Node | None, extra_nbytes: int = 0) -> None:
        nbytes = self.staying_nbytes + self.value_nbytes + self.slot_nbytes() + extra_nbytes
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        if nbytes > self.budget_nbytes:
            self.fail("budget", node, f"{nbytes:,} bytes are in use, {self.budget_nbytes:,} allowed")

    def bind(self, node: fx.Node, storage: str, nbytes: int) -> None:
        self.storage_of[node] = storage
        self.storage_nbytes[storage] = nbytes
        self.readers[node] = sum(n is node for user in node.users for n in _reads(user))
        if self.readers[node]:
            self.hold(storage, 1)

    def read_once(self, node: fx.Node) -> None:
        if node in self.readers:
            self.readers[node] -= 1
            if self.readers[node] == 0:
                self.hold(self.storage_of[node], -1)

    # --- nodes ---

    def walk(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                storage, nbytes, held = node.meta["storage"]
                self.bind(node, storage, nbytes)
                if held and storage not in self.held:
                    self.held.add(storage)
                    self.hold(storage, 1)  # by the caller
            elif node.op == "call_module":
                self.call(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                handler = getattr(self, f"on_{node.target.__name__}", None)
                if handler is None:
                    self.fail("state", node, f"{node.target} is not a chunk operation")
                else:
                    handler(node, *node.args)
            if node.op not in ("placeholder", "output"):
                self.check_budget(node)

    def call(self, node: fx.Node) -> None:
        memory = self.memories[str(node.target)]
        given: dict[str, int] = {}  # storage whose last holders are this call's arguments -> first step without it
        leaving = Counter(n for n in node.args if isinstance(n, fx.Node) and n not in self.view_of)
        last = {n for n, times in leaving.items() if self.readers[n] == times}
        per_storage = Counter(self.storage_of[n] for n in last)
        for position, arg in enumerate(node.args):
            if arg in self.view_of:
                chunk, generation = self.view_of[arg]  # type: ignore[index]
                slot = self.slots.get(chunk)
                if slot is None or slot.generation != generation or not slot.ready:
                    self.fail("read", node, f"{arg} is a view of {chunk}, which is not in that slot any more")
            elif arg in last:
                storage = self.storage_of[arg]  # type: ignore[index]
                if storage not in self.held and per_storage[storage] == self.holders[storage]:
                    given[storage] = max(given.get(storage, 0), memory.input_released[position])
        around = self.value_nbytes - sum(self.storage_nbytes[s] for s in given)
        for index, step in enumerate(memory.steps):
            inside = step.nbytes + sum(self.storage_nbytes[s] for s, until in given.items() if index < until)
            self.check_budget(node, around + inside - self.value_nbytes)
        outputs = sorted((n for n in node.users), key=lambda n: n.args[1])  # type: ignore[arg-type, return-value]
        for output in outputs:
            number = memory.outputs[output.args[1]]  # type: ignore[index]
            if number >= 0:
                self.bind(output, f"{node.name}:{number}", memory.storage_nbytes[number])
            else:
                source = node.args[-1 - number]
                if source in self.view_of:
                    self.fail("read", node, f"{output} outlives the slot that {source} is a view of")
                    self.bind(output, f"{node.name}:view", 0)
                else:
                    storage = self.storage_of[source]  # type: ignore[index]
                    self.bind(output, storage, self.storage_nbytes[storage])
        for arg in node.args:
            self.read_once(arg)  # type: ignore[arg-type]

    def on_settle(self, node: fx.Node, group: int) -> None:
        self.settled.add(group)
        slot = self.slots.get(chunk_name(GRAD, group))
        if slot is not None and (slot.dirty or slot.copying == "in"):
            self.fail("home", node, f"group {group} is settled before its gradients are on their way home")
        for tensor_slice in self.layout.groups[group].slices:
            if not self.sunk[tensor_slice.spec.name]:
                self.fail("home", node, f"group {group} is settled without a gradient of {tensor_slice.spec.name}")

    def _copies(self, node: fx.Node, chunk: str) -> None:
        """A copy of the chunk starts, either way."""
        if split_chunk_name(chunk)[1] in self.settled:
            self.fail("home", node, f"{chunk} is copied after its group was settled")

    def on_prefetch(self, node: fx.Node, chunk: str) -> None:
        self._copies(node, chunk)
        if chunk in self.slots:
            return self.fail("state", node, f"{chunk} has a slot already")
        self.slots[chunk] = self._new_slot()
        self.slots[chunk].copying = "in"

    def on_wait(self, node: fx.Node, chunk: str) -> None:
        slot = self.slots.get(chunk)
        if slot is None:
            return self.fail("state", node, f"{chunk} has no slot to wait for")
        slot.copying, slot.ready = "", True

    def on_evict(self, node: fx.Node, chunk: str) -> None:
        slot = self.slots.pop(chunk, None)
        if slot is None:
            return self.fail("state", node, f"{chunk} has no slot")
        if slot.copying:
            self.fail("slot", node, f"{chunk} is given back while a copy {slot.copying} is under way")
        elif slot.dirty:
            self.fail("dirty", node, f"{chunk} is newer than its home and was not written back")

    def on_write_back(self, node: fx.Node, chunk: str) -> None:
        self._copies(node, chunk)
        slot = self.slots.get(chunk)
        if slot is None:
            return self.fail("state", node, f"{chunk} has no slot to write back")
        if slot.copying or not slot.ready:
            self.fail("state", node, f"{chunk} is written back while a copy is under way")
        slot.copying, slot.dirty = "out", False

    def on_parameter(self, node: fx.Node, chunk: str, name: str) -> None:
        if split_chunk_name(chunk) != (PARAM, self.group_of.get(name)):
            self.fail("read", node, f"{name} does not lie in {chunk}")
        slot = self.slots.get(chunk)
        if slot is None or not slot.ready:
            self.fail("read", node, f"{name} is read from {chunk}, which is not there and ready")
        self.view_of[node] = (chunk, slot.generation if slot else -1)

    def on_sink(self, node: fx.Node, name: str, chunk: str | None, gradient: fx.Node, owned: bool) -> None:
        self.sunk[name] += 1
        if chunk is not None:
            if split_chunk_name(chunk) != (GRAD, self.group_of.get(name)):
                self.fail("write", node, f"the gradient of {name} does not lie in {chunk}")
            self._write(node, chunk, f"the gradient of {name}")
        self.read_once(gradient)

    def on_update(self, node: fx.Node, group: int, begin: int, end: int, stage: int = 0, num_stages: int = 1) -> None:
        done = self.updated.setdefault(group, [[] for _ in range(num_stages)])
        if any(sum(e - b for b, e in tiles) < self.layout.groups[group].numel for tiles in done[:stage]):
            self.fail("write", node, f"stage {stage} of group {group} begins before the stages that it needs are done")
        done[stage].append((begin, end))
        of_stage = update_stages(self.layout.groups[group].update_kinds, num_stages)[stage]
        for kind in of_stage.reads:
            chunk = chunk_name(kind, group, (begin, end))
            slot = self.slots.get(chunk)
            if slot is None or not slot.ready:
                self.fail("read", node, f"the update reads {chunk}, which is not there and ready")
        for kind in of_stage.writes:
            self._write(node, chunk_name(kind, group, (begin, end)), "the update")
        self.check_budget(node, self.layout.groups[group].update_workspace_nbytes(end - begin))

    def _write(self, node: fx.Node, chunk: str, what: str) -> None:
        slot = self.slots.get(chunk)
        if slot is None or not slot.ready or slot.copying:
            self.fail("write", node, f"{what} goes into {chunk}, which is not there, ready and quiet")
        if slot is not None:
            slot.dirty = True


def _staying_nbytes(layout: ChunkLayout, resident: Collection[int]) -> int:
    """The overhead, all step counters, and small parameters and residents, each tensor as the allocator gives it."""
    total_nbytes = layout.overhead_nbytes
    for spec, stays in _specs(layout, resident):
        total_nbytes += STEP_NBYTES if spec.trainable else 0
        if stays:
            dtypes = spec.states.dtypes(spec.dtype) if spec.trainable else {}
            sizes = [spec.numel * spec.dtype.itemsize] * (2 if spec.trainable else 1)  # with the gradient
            sizes += [num_entries(kind, spec.numel) * dtype.itemsize for kind, dtype in dtypes.items()]
            total_nbytes += sum(-(-nbytes // spec.granule_nbytes) * spec.granule_nbytes for nbytes in sizes)
    return total_nbytes


def _specs(layout: ChunkLayout, resident: Collection[int]) -> Iterator[tuple[ParamSpec, bool]]:
    """Every parameter, and whether it stays on the compute tier."""
    yield from ((spec, True) for spec in layout.small)
    for group in layout.groups:
        yield from ((s.spec, group.index in resident) for s in group.slices)


def _reads(user: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), found.append)
    return found


def verify_phase(
    graph: fx.Graph,
    *,
    layout: ChunkLayout,
    memories: Mapping[str, SegmentMemory],
    resident: Collection[int],
    held_nbytes: int,
    budget_nbytes: int,
    present: Collection[str] = (),
    kept: Collection[str] = (),
    gradients: Collection[str] | None = None,
    updates: Collection[int] | None = None,
) -> list[str]:
    """Check one rewritten phase; the violations found, none when it is safe.

    Args:
        memories: what each segment allocates, by the name it is called by.
        resident: groups that stay on the compute tier, with their gradients and states.
        held_nbytes: bytes there that the phase does not touch: other graphs' values.
        present: chunks that have a ready, clean slot when the phase begins.
        kept: chunks that must have one, and no others, when it ends.
        gradients: parameters whose gradients must be sunk, once each, and no others'; None: whichever are.
        updates: groups that must be updated, every element once in each stage, and no others; None: whichever are.
    """
    staying_nbytes = _staying_nbytes(layout, resident) + held_nbytes
    checker = _Checker(graph, layout, memories, staying_nbytes, budget_nbytes, present)
    checker.walk()
    for chunk in sorted(set(checker.slots) ^ set(kept)):
        checker.fail("end", None, f"{chunk} {'is still' if chunk in checker.slots else 'is not'} in a slot")
    for chunk, slot in checker.slots.items():
        if slot.copying or slot.dirty or not slot.ready:
            checker.fail("end", None, f"{chunk} is left dirty or under a copy")
    if gradients is not None:
        for name in sorted(set(checker.sunk) | set(gradients)):
            if checker.sunk[name] != (1 if name in gradients else 0):
                checker.fail("write", None, f"the gradient of {name} is sunk {checker.sunk[name]} times")
    if updates is not None:
        for group in sorted(set(checker.updated) | set(updates)):
            for tiles in map(sorted, checker.updated.get(group, [[]])):
                ends = [0, *(end for _, end in tiles)]
                is_whole = [begin for begin, _ in tiles] == ends[:-1] and ends[-1] == layout.groups[group].numel
                if not is_whole or group not in updates:
                    checker.fail("write", None, f"the updates of group {group} cover {tiles}")
    return checker.violations
