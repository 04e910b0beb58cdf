"""Verify a rewritten graph by itself: every read is safe, every write is kept, every byte is within budget.

The verifier shares no code with the planner. It adds up resident bytes itself, walks the graph in order and keeps, per
chunk, the state that a device would have: the slot (each time a chunk gets one, a new generation), whether its data is
ready, which copy is under way on which link, whether it is newer than home. Copies on one link complete in order, but
at an unknown time: only a wait makes data ready. Bytes are counted by reference counts over storages, not by lifetimes.

Rules, by the words their violations begin with:
    read      a parameter is read from the chunk it lies in, or its cast, while that is in the same slot, ready
    write     gradients and updates go into their own chunk's slot, ready and under no copy; all that are due, once
    slot      a slot is given back only when no copy to or from it is under way
    dirty     a slot with data newer than home is not given back before it was written back
    state     no event is repeated: no prefetch of a chunk with a slot, no wait or evict of a chunk without one
    overlap   no element of a chunk has two slots at once, as part of the whole or of two parts
    link      a copy goes by a link of its chunk's home; a wait names the link of a copy that is under way
    update    in a backward a group is updated after its last gradient; no gradient, or fetch or read of it, comes later
    home      of a group after `settle` all gradients are at home or on their way, and no copy starts either way
    budget    bytes never exceed the budget
    end       the phase ends with exactly the chunks it should, clean and quiet

The rule `saved` is in `verify.offload`, and `rerun` in `verify.recompute`.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache

from torch import fx

from chunkc.ir import chunk_ops, links
from chunkc.ir.items import SavedStorage
from chunkc.ir.layout import CASTS, GRAD, PARAM, Chunk, ChunkLayout
from chunkc.ir.program import SegmentMemory
from chunkc.ir.updates import update_stages
from chunkc.ir.verify.offload import SavedStorages
from chunkc.ir.verify.resident import ResidentGradients, resident_data_nbytes
from chunkc.ir.verify.updates import UpdatedGroups


@dataclass
class _Slot:
    generation: int
    ready: bool = False
    copying: str = ""  # "", "in" or "out"
    link: str = ""  # of that copy
    dirty: bool = False


class _Checker:
    """Walk over one rewritten graph, with the state of every chunk, value and storage at the current node."""

    def __init__(
        self,
        graph: fx.Graph,
        layout: ChunkLayout,
        memories: Mapping[str, SegmentMemory],
        all_resident_nbytes: int,
        budget_nbytes: int,
        present: Collection[Chunk],
        offloaded: Collection[str],
        resident: Collection[int],
    ) -> None:
        self.graph, self.layout, self.memories = graph, layout, memories
        self.all_resident_nbytes, self.budget_nbytes = all_resident_nbytes, budget_nbytes
        self.violations: list[str] = []
        self.generations = self.value_nbytes = self.peak_nbytes = 0
        self.slots: dict[Chunk, _Slot] = {}
        self.of_kind: defaultdict[tuple[str, int], set[Chunk]] = defaultdict(set)  # (kind, group) -> chunks in slots
        for chunk in present:
            self.take_slot(chunk).ready = True
        self.slot_nbytes = sum(map(layout.chunk_nbytes_of, self.slots))
        self.view_of: dict[fx.Node, tuple[Chunk, int]] = {}  # parameter node -> (chunk, generation)
        self.storage_of: dict[fx.Node, str] = {}
        self.storage_nbytes: dict[str, int] = {}
        self.readers: dict[fx.Node, int] = {}  # value -> reads still to come
        self.reads_of = cache(lambda user: Counter(_reads(user)))  # once per user: an output reads many values
        self.holders: Counter[str] = Counter()  # storage -> values alive in it
        self.held: set[str] = set()
        self.group_of = layout.group_of()
        self.sunk: Counter[str] = Counter()
        self.updated = UpdatedGroups(layout)
        self.complete: set[int] = set()  # groups after their `settle`
        self.waiting = ResidentGradients(layout, resident)
        medium = "disk" if layout.is_on_disk(PARAM) else "RAM"
        self.saved = SavedStorages(self, offloaded, {way: _LINKS[medium, way] for way in ("in", "out")})
        self.is_backward = any(node.target is chunk_ops.sink for node in graph.nodes)

    def take_slot(self, chunk: Chunk) -> _Slot:
        self.generations += 1
        self.slots[chunk] = slot = _Slot(self.generations)
        self.of_kind[chunk.kind, chunk.group].add(chunk)
        return slot

    def fail(self, rule: str, node: fx.Node | None, text: str) -> None:
        where = f" at {node.name}" if node is not None else ""
        self.violations.append(f"{rule}{where}: {text}")

    # --- bytes ---

    def hold(self, storage: str, values: int) -> None:
        """Count values added to a storage, or removed; its bytes count from the first value to the last."""
        before = self.holders[storage]
        self.holders[storage] += values
        if before == 0 and values > 0:
            self.value_nbytes += self.storage_nbytes[storage]
        elif before > 0 and before + values == 0:
            self.value_nbytes -= self.storage_nbytes[storage]

    def check_budget(self, node: fx.Node | None, extra_nbytes: int = 0) -> None:
        nbytes = self.all_resident_nbytes + self.waiting.nbytes + self.value_nbytes + self.slot_nbytes + extra_nbytes
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        if nbytes > self.budget_nbytes:
            self.fail("budget", node, f"{nbytes:,} bytes are in use, {self.budget_nbytes:,} allowed")

    def bind(self, node: fx.Node, storage: str, nbytes: int) -> None:
        self.storage_of[node] = storage
        self.storage_nbytes[storage] = nbytes
        self.readers[node] = sum(self.reads_of(user)[node] for user in node.users)
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
                if self.saved.placeholder(node, storage, nbytes):
                    continue
                self.bind(node, storage, nbytes)
                if held and storage not in self.held:
                    self.held.add(storage)
                    self.hold(storage, 1)  # by the caller
            elif node.op == "call_module":
                self.call(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                is_saved = bool(node.args) and isinstance(node.args[0], SavedStorage)
                handler = (_HANDLERS_OF_SAVED if is_saved else _HANDLERS).get(node.target)
                if handler is None:
                    self.fail("state", node, f"{node.target} is not a chunk operation")
                else:
                    handler(self.saved if is_saved else self, node, *node.args)
            if node.op not in ("placeholder", "output"):
                self.check_budget(node)

    def call(self, node: fx.Node) -> None:
        self.saved.call(node)
        memory = self.memories[str(node.target)]
        released: dict[str, int] = {}  # storage held only by this call's arguments -> first step without it
        arguments = Counter(n for n in node.args if isinstance(n, fx.Node) and n not in self.view_of)
        last = {n for n, times in arguments.items() if self.readers[n] == times}
        per_storage = Counter(self.storage_of[n] for n in last)
        for position, arg in enumerate(node.args):
            if arg in self.view_of:
                chunk, generation = self.view_of[arg]  # type: ignore[index]
                if chunk.group in self.updated:
                    self.fail("update", node, f"{arg} is read, but the update of group {chunk.group} has begun")
                slot = self.slots.get(chunk)
                if slot is None or slot.generation != generation or not slot.ready:
                    self.fail("read", node, f"{arg} is a view of {chunk}, which is not in that slot any more")
            elif isinstance(arg, fx.Node) and self.group_of.get(str(arg.meta.get("parameter"))) in self.updated:
                self.fail("update", node, f"{arg} is read, but the update of its group has begun")
            elif arg in last:
                storage = self.storage_of[arg]  # type: ignore[index]
                if storage not in self.held and per_storage[storage] == self.holders[storage]:
                    released[storage] = max(released.get(storage, 0), memory.input_released[position])
        outside = self.value_nbytes - sum(self.storage_nbytes[s] for s in released)
        for index, step in enumerate(memory.steps):
            inside = step.nbytes + sum(self.storage_nbytes[s] for s, until in released.items() if index < until)
            self.check_budget(node, outside + inside - self.value_nbytes)
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
        self.complete.add(group)
        slot = self.slots.get(Chunk(GRAD, group))
        if slot is not None and (slot.dirty or slot.copying == "in"):
            self.fail("home", node, f"group {group} is declared complete before its gradients are on their way home")
        for tensor_slice in self.layout.groups[group].slices:
            if not self.sunk[name := tensor_slice.spec.name]:
                self.fail("home", node, f"group {group} is declared complete without a gradient of {name}")

    def _copies(self, node: fx.Node, chunk: Chunk, way: str, link: str) -> None:
        """Check that a copy of the chunk may start, `in` or `out`."""
        kind, group = chunk.kind, chunk.group
        if group in self.complete:
            self.fail("home", node, f"{chunk} is copied after its group was declared complete")
        medium = "disk" if self.layout.is_on_disk(kind) else "RAM"
        if chunk.part is None and kind in (PARAM, GRAD):  # gathered: the shards of all ranks
            is_cut = any(s.spec.shards is not None for s in self.layout.groups[group].slices)
            medium = "the RAM of all ranks" if is_cut else medium
        if link != _LINKS[medium, way]:
            self.fail("link", node, f"{chunk} has its home in {medium}, where a copy {way} does not go by {link!r}")

    def on_prefetch(self, node: fx.Node, chunk: Chunk, link: str = "") -> None:
        self._copies(node, chunk, "in", link)
        if chunk.kind == GRAD and self.is_backward and chunk.group in self.updated:
            self.fail("update", node, f"{chunk} is fetched, but the update of its group has begun")
        if chunk in self.slots:
            return self.fail("state", node, f"{chunk} has a slot already")
        for other in sorted(self.of_kind[chunk.kind, chunk.group]):
            if self._overlap(chunk, other):
                self.fail("overlap", node, f"{chunk} gets a slot, but {other} has one")
        slot = self.take_slot(chunk)
        self.slot_nbytes += self.layout.chunk_nbytes_of(chunk)
        slot.copying, slot.link = "in", link

    def _overlap(self, chunk: Chunk, other: Chunk) -> bool:
        """Whether some elements belong to both chunks, of one kind and group."""
        whole = (0, self.layout.groups[chunk.group].numel)
        (begin, end), (other_begin, other_end) = chunk.part or whole, other.part or whole
        return begin < other_end and other_begin < end

    def on_wait(self, node: fx.Node, chunk: Chunk, link: str = "") -> None:
        slot = self.slots.get(chunk)
        if slot is None:
            return self.fail("state", node, f"{chunk} has no slot to wait for")
        if not slot.copying:
            return self.fail("link", node, f"{chunk} has no copy under way to wait for")
        if slot.link != link:
            return self.fail("link", node, f"{chunk} is waited for on {link!r}, its copy is on {slot.link!r}")
        slot.copying, slot.ready = "", True

    def on_evict(self, node: fx.Node, chunk: Chunk) -> None:
        slot = self.slots.pop(chunk, None)
        if slot is None:
            return self.fail("state", node, f"{chunk} has no slot")
        self.of_kind[chunk.kind, chunk.group].remove(chunk)
        self.slot_nbytes -= self.layout.chunk_nbytes_of(chunk)
        if slot.copying:
            self.fail("slot", node, f"{chunk} is given back while a copy {slot.copying} is under way")
        elif slot.dirty and not self._is_consumed(chunk):
            self.fail("dirty", node, f"{chunk} is newer than its home and was not written back")

    def _is_consumed(self, chunk: Chunk) -> bool:
        """Whether the group's update, in this backward, has fully consumed the gradient."""
        return chunk.kind == GRAD and self.is_backward and self.updated.has_consumed_gradients(chunk.group)

    def on_write_back(self, node: fx.Node, chunk: Chunk, link: str = "") -> None:
        self._copies(node, chunk, "out", link)
        if chunk.kind in CASTS:
            self.fail("write", node, f"{chunk} is a cast, which has no home of its own")
        slot = self.slots.get(chunk)
        if slot is None:
            return self.fail("state", node, f"{chunk} has no slot to write back")
        if slot.copying or not slot.ready:
            self.fail("state", node, f"{chunk} is written back while a copy is under way")
        slot.copying, slot.link, slot.dirty = "out", link, False

    def on_parameter(self, node: fx.Node, chunk: Chunk, name: str) -> None:
        if chunk.group != self.group_of.get(name) or not (chunk.kind == PARAM or chunk.kind in CASTS):
            self.fail("read", node, f"{name} does not lie in {chunk}")
        slot = self.slots.get(chunk)
        if slot is None or not slot.ready:
            self.fail("read", node, f"{name} is read from {chunk}, which is not there and ready")
        self.view_of[node] = (chunk, slot.generation if slot else -1)

    def on_sink(self, node: fx.Node, name: str, chunk: Chunk | None, gradient: fx.Node, owned: bool) -> None:
        self.sunk[name] += 1
        if self.group_of.get(name) in self.updated:
            self.fail("update", node, f"a gradient of {name} comes after the update of its group has begun")
        if chunk is not None:
            if (chunk.kind, chunk.group) != (GRAD, self.group_of.get(name)):
                self.fail("write", node, f"the gradient of {name} does not lie in {chunk}")
            self._write(node, chunk, f"the gradient of {name}")
        elif self.waiting.made(name) and not owned:
            self.check_budget(node)  # with the value that it is a copy of
        self.read_once(gradient)

    def on_update(self, node: fx.Node, group: int, begin: int, end: int, stage: int = 0, num_stages: int = 1) -> None:
        if self.is_backward and group not in self.updated:
            for tensor_slice in self.layout.groups[group].slices:
                if not self.sunk[tensor_slice.spec.name]:
                    name = tensor_slice.spec.name
                    self.fail("update", node, f"group {group} is updated without the gradient of {name}")
        if not self.updated.add(group, (begin, end), stage, num_stages):
            self.fail("write", node, f"stage {stage} of group {group} begins before the stages that it needs are done")
        if self.waiting.consumed(group):
            return
        kinds = update_stages(self.layout.groups[group].update_kinds, num_stages)[stage]
        for kind in kinds.reads:
            chunk = self._holding(kind, group, (begin, end))
            slot = self.slots.get(chunk)
            if slot is None or not slot.ready:
                self.fail("read", node, f"the update reads {chunk}, which is not there and ready")
        for kind in kinds.writes:
            self._write(node, self._holding(kind, group, (begin, end)), "the update")
        self.check_budget(node)

    def _holding(self, kind: str, group: int, part: tuple[int, int]) -> Chunk:
        """Return the chunk in which an update finds a part of a group.

        In a backward, chunks of parameters and gradients are whole.
        """
        return Chunk(kind, group, None if self.is_backward and kind in (PARAM, GRAD) else part)

    def _write(self, node: fx.Node, chunk: Chunk, what: str) -> None:
        slot = self.slots.get(chunk)
        if slot is None or not slot.ready or slot.copying:
            self.fail("write", node, f"{what} goes into {chunk}, which is not there, ready and quiet")
        if slot is not None:
            slot.dirty = True


_LINKS = {
    ("RAM", "in"): links.TO_DEVICE,
    ("RAM", "out"): links.TO_HOME,
    ("the RAM of all ranks", "in"): links.GATHER,
    ("the RAM of all ranks", "out"): links.SCATTER,
    ("disk", "in"): links.FROM_DISK,
    ("disk", "out"): links.TO_DISK,
}

_HANDLERS: Mapping[object, Callable[..., None]] = {
    chunk_ops.prefetch: _Checker.on_prefetch,
    chunk_ops.wait: _Checker.on_wait,
    chunk_ops.write_back: _Checker.on_write_back,
    chunk_ops.evict: _Checker.on_evict,
    chunk_ops.parameter: _Checker.on_parameter,
    chunk_ops.sink: _Checker.on_sink,
    chunk_ops.settle: _Checker.on_settle,
    chunk_ops.update: _Checker.on_update,
}

_HANDLERS_OF_SAVED: Mapping[object, Callable[..., None]] = {
    chunk_ops.prefetch: SavedStorages.on_prefetch,
    chunk_ops.wait: SavedStorages.on_wait,
    chunk_ops.write_back: SavedStorages.on_write_back,
    chunk_ops.evict: SavedStorages.on_evict,
    chunk_ops.recompute: SavedStorages.on_recompute,
}


def _reads(user: fx.Node) -> list[fx.Node]:
    reads: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), reads.append)
    return reads


def verify_phase(
    graph: fx.Graph,
    *,
    layout: ChunkLayout,
    memories: Mapping[str, SegmentMemory],
    resident: Collection[int],
    external_nbytes: int,
    budget_nbytes: int,
    present: Collection[Chunk] = (),
    kept: Collection[Chunk] = (),
    gradients: Collection[str] | None = None,
    updates: Collection[int] | None = None,
    undoable: Collection[int] = (),
    offloaded: Collection[str] = (),
) -> list[str]:
    """Check one rewritten phase; return the violations, none if it is safe.

    Args:
        memories: allocations of each segment, by the name it is called by.
        resident: groups that are resident, with their states, and gradients unless the group is transient.
        external_nbytes: bytes there that the phase does not touch: other graphs' values.
        present: chunks that have a ready, clean slot when the phase begins.
        kept: chunks that must have one, and no others, when it ends.
        gradients: parameters with gradients that must be sunk, once each, and no others'; None: any.
        updates: groups that must be updated, every element once in each stage, and no others; None: any.
        undoable: those of them that keep their gradients, which have to get home.
        offloaded: saved storages that are at home between the forward and the backward.
    """
    all_resident_nbytes = resident_data_nbytes(layout, resident) + external_nbytes
    checker = _Checker(graph, layout, memories, all_resident_nbytes, budget_nbytes, present, offloaded, resident)
    checker.updated.undoable = undoable
    checker.walk()
    for name in sorted(checker.waiting.left):
        checker.fail("update", None, f"the gradient of {name} is never consumed")
    checker.saved.end(iter(_reads(next(iter(reversed(graph.nodes))))))
    for chunk in sorted(set(checker.slots) ^ set(kept)):
        checker.fail("end", None, f"{chunk} {'is still' if chunk in checker.slots else 'is not'} in a slot")
    for chunk, slot in checker.slots.items():
        if slot.copying or slot.dirty or not slot.ready:
            checker.fail("end", None, f"{chunk} is left dirty or under a copy")
    wanted = checker.sunk if gradients is None else Counter(dict.fromkeys(gradients, 1))
    for name in sorted({*checker.sunk, *wanted}):
        if checker.sunk[name] != wanted[name]:
            checker.fail("write", None, f"the gradient of {name} is sunk {checker.sunk[name]} times")
    for wrong in () if updates is None else checker.updated.wrong(updates):
        checker.fail("write", None, wrong)
    return checker.violations
