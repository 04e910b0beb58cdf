"""What ranks do in tests: each case runs in processes of its own, one for each rank, forked from one that has imported
everything.

    python rank_cases.py FOLDER NUM_RANKS TIMEOUT_S CASE ...

A case checks what it can by itself. Prints what each rank of each case came to, as JSON: what the case returned, or the
error's class and message.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import gc
import hashlib
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import chunkc
from chunkc.ir.layout import GRAD
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.device.tier import CpuTier
from chunkc.session.session import sessions_of

VOCABULARY, WIDTH, BATCH, LENGTH = 11, 24, 8, 5
HUGE = 1 << 30
STAGES = (3, 2, 1)
NUMBERS_NBYTES = 64
"""Bytes of a loop that no plan counts: a loss, half of it, their gradients."""
Result = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 57), nn.Linear(57, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)  # one row: rank 0 has all of it

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        return x + self.gate(inner).sigmoid() * self.down(nn.functional.gelu(self.up(inner)))


class Model(nn.Module):
    """Tied weights, a frozen matrix, one that is never used, and rows that ranks cannot share evenly."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.frozen(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Tiny(nn.Module):
    """Quickly compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).square().mean()


def made(seed: int = 0, num_blocks: int = 3) -> Model:
    torch.manual_seed(seed)
    return Model(num_blocks)


def batches(step: int) -> list[Tensor]:
    """The micro-batches of a step, for all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator))


@functools.cache
def mesh() -> DeviceMesh:
    """All ranks; made before the meter, since it has tensors of its own."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def own(batch: Tensor) -> Tensor:
    """This rank's part of a batch."""
    each = len(batch) // dist.get_world_size()
    return batch[dist.get_rank() * each :][:each]


def mean(loss: Tensor) -> float:
    """Of a loss, over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def train(
    run: Any, model: nn.Module, optimizer: Any, steps: range, part: Callable[[Tensor], Tensor] = own
) -> list[float]:
    """Steps of two micro-batches with clipped gradients; the losses, of which each is the mean over all ranks."""
    losses = []
    for step in steps:
        for batch in batches(step):
            loss = run(part(batch)) / 2
            loss.backward()
            losses.append(mean(loss) if part is own else loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def take_step(loss: Tensor, optimizer: Any) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> Any:
    """eps is large: where gradients are nearly zero, rounding would become steps."""
    return chunkc.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def compiled(model: nn.Module, budget: int | str, codegen: str = "eager", **more: Any) -> Any:
    options = {"memory_budget": budget, "codegen": codegen, "debug": True, **more}
    return torch.compile(model, backend="chunkc", options=options)


def bits(model: nn.Module) -> str:
    """A hash of this rank's parts."""
    found = hashlib.blake2b()
    for parameter in model.parameters():
        found.update(parameter.to_local().detach().numpy().tobytes())
    return found.hexdigest()


def arrays(model: nn.Module) -> list[Any]:
    """Whole parameters in memory that torch does not know of."""
    values = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [value.detach().numpy().copy() for value in values]


def check_close(found: Sequence[float], expected: Sequence[float], within: float = 0.0, relative: float = 0.0) -> None:
    """Check numbers, such as losses, within the larger of two distances."""
    for one, other in zip(found, expected, strict=True):
        assert abs(one - other) <= max(within, relative * abs(other)), (found, expected)


def check_weights(model: nn.Module, expected: list[Any], within: float = 1e-6) -> None:
    """Check that whole parameters are nearly what `arrays` has given of another model."""
    difference = max(float(abs(value - other).max()) for value, other in zip(arrays(model), expected, strict=True))
    assert difference < within, difference


def check_peak(model: nn.Module, budget: int, beside: int = NUMBERS_NBYTES) -> None:
    """Check that the measured bytes are those that were predicted, but for the loop's own, and these in the budget."""
    measured, predicted = chunkc.report(model).measured_peak_nbytes, chunkc.report(model).predicted_peak_nbytes
    assert 0 <= measured - predicted <= beside, (measured, predicted)
    assert predicted <= budget


def of_all(value: Any) -> list[Any]:
    """What each rank gives."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def told(action: Callable[[], Any]) -> str:
    """The error of chunkc's that something raises, in words."""
    try:
        action()
    except chunkc.ChunkcError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def trained(
    run: Any, model: nn.Module, optimizer: Any, steps: Callable[..., list[float]] = train
) -> tuple[list[float], dict[str, int]]:
    """Losses of three steps, of which the last keeps to a hard limit; and what it has sent, by channel."""
    losses = steps(run, model, optimizer, range(2))
    (session,) = sessions_of(model.parameters())
    before, sent = dict(session.transport.sent_nbytes), session.transport.sent_nbytes
    with cpu_allocator.hard_limit(chunkc.report(model).predicted_peak_nbytes + NUMBERS_NBYTES):
        losses += steps(run, model, optimizer, range(2, 3))
    return losses, {channel: nbytes - before[channel] for channel, nbytes in sent.items()}


# --- cases ---


@contextlib.contextmanager
def counting_messages() -> Iterator[list[int]]:
    """Bytes of each message that this rank hands to a process group."""
    sizes: list[int] = []
    isend = dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    with patch.object(dist, "isend", counting):
        yield sizes


def as_one_process(codegen: str = "eager") -> None:
    """Train in one process, then on the ranks in stages of ZeRO: each with room for all, and with none to spare under a
    hard limit."""
    reference: Any = made()
    plain: Any = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    expected = train(reference, reference, plain, range(3), lambda batch: batch)
    weights = arrays(reference)
    cpu_allocator.install()  # what was allocated before is not metered
    others, least = dist.get_world_size() - 1, HUGE
    found, homes, gathers = set(), [], {}
    for stage, is_roomy in ((stage, is_roomy) for stage in STAGES for is_roomy in (True, False)):
        torch._dynamo.reset()
        budget = HUGE if is_roomy else least
        with counting_messages() as messages:
            model = chunkc.distribute(made(), mesh(), zero_stage=stage)  # type: ignore[arg-type]
            losses, sent = trained(compiled(model, budget, codegen), model, adamw(model))
        report, (session,) = chunkc.report(model), sessions_of(model.parameters())
        check_close(losses, expected, within=1e-6)
        check_weights(model, weights)
        if codegen == "eager":
            check_peak(model, budget)
        groups = session.store.layout.groups
        parts = [(group, slice.spec) for group in groups for slice in group.slices]
        fetched = [report.plan_text.count(f"prefetch(param:{group.index}, gather)") for group, _ in parts]
        gathered = 2 * sum(number * spec.home_nbytes for number, (_, spec) in zip(fetched, parts, strict=True))
        if stage < 3:
            gathered = sum(spec.home_nbytes for group, spec in parts if group.trainable)
        lacking = sum(spec.whole_nbytes - spec.home_nbytes for group, spec in parts if group.trainable)
        assert sent["gathers"] == others * gathered, "each gather sends this rank's part"
        assert sent["scatters"] == 2 * lacking, "what others have of trained parameters"
        assert sum(messages) == sum(session.transport.sent_nbytes.values()), "all that was sent is counted"
        gathers[stage, is_roomy] = sent["gathers"]
        found.add(bits(model))
        homes.append(report.home_nbytes)
        least = report.minimum_budget_nbytes
    assert len(found) == 1, "a budget or a stage changed the result"
    assert max(gathers[2, True], gathers[1, True]) < gathers[3, True] < gathers[3, False]
    homes = [nbytes for of_rank in of_all(homes) for nbytes in of_rank]
    assert max(homes) < 1.25 * min(homes), "parts differ by a row at most"


def as_one_process_inductor() -> None:
    as_one_process("inductor")


def chosen() -> None:
    """The plan chooses what is whole: all with room for all, as stage 2, and none with none to spare."""
    cpu_allocator.install()
    budget, found, plans, whole = HUGE, set(), [], []
    for stage in (2, None, None):
        torch._dynamo.reset()
        model = chunkc.distribute(made(), mesh(), zero_stage=stage)  # type: ignore[arg-type]
        losses, _ = trained(compiled(model, budget), model, adamw(model))
        check_peak(model, budget)
        found.add((*losses, bits(model)))
        report, (session,) = chunkc.report(model), sessions_of(model.parameters())
        plans.append(report.plan_text.partition("\n")[2])
        whole.append(sorted(session.store.layout.replicated_by_choice))
        if stage is None:
            budget = report.minimum_budget_nbytes
    assert len(found) == 1, "a choice changed the result"
    assert plans[0] == plans[1]
    assert whole[1:] == [list(range(len(session.store.layout.groups))), []]


class Telling(nn.Module):
    """Returns its loss, and values that callers may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(6)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.h:
            x = layer(x).tanh()
        return x.square().mean(), x


def leaving() -> None:
    """One rank keeps outputs, for which what is whole has to go: on all ranks, for good, and without a changed bit."""
    cpu_allocator.install()
    found = set()
    for stage in (3, None):
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        model = chunkc.distribute(Telling(), mesh(), zero_stage=stage)  # type: ignore[arg-type]
        optimizer, run = adamw(model), compiled(model, 310_000)
        kept, whole = [], []
        for step in range(6):
            loss, output = run(torch.full((64, 64), 0.1 * (step + dist.get_rank())))
            take_step(loss, optimizer)
            (session,) = sessions_of(model.parameters())
            whole.append(sorted(session.store.layout.replicated_by_choice))
            if dist.get_rank() == 1:
                kept.append(output.detach())
        if dist.get_rank() == 1:
            check_peak(model, HUGE)
        else:
            assert chunkc.report(model).measured_peak_nbytes <= chunkc.report(model).predicted_peak_nbytes
        found.add(bits(model))
    assert len(found) == 1, "a choice changed the result"
    assert of_all(whole) == [whole] * dist.get_world_size(), "ranks choose alike"
    numbers = [len(groups) for groups in whole]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[2] > numbers[-1] == 0, "some were whole, and others not"


def let_go() -> None:
    """Gradients at home, which no program holds between steps, take no memory; one that a program has kept stays."""
    model: Any = chunkc.distribute(made(), mesh())
    optimizer, run = adamw(model), compiled(model, HUGE)
    cpu_allocator.install()
    train(run, model, optimizer, range(2))
    (session,) = sessions_of(model.parameters())
    arena = session.store.arena
    gradients = [chunk for chunk in arena.chunks if chunk.kind == GRAD]
    used = [chunk for chunk in gradients if not arena.is_zero(chunk)]
    assert len(used) > 1
    batch = own(batches(0)[0])
    loss, before = run(batch), arena.used_nbytes
    assert all(map(arena.is_zero, gradients))
    loss.backward()
    grown = arena.used_nbytes - before
    assert grown == sum(session.store.layout.groups[c.group].nbytes(GRAD) for c in used), "they are home again"
    kept = model.embed.weight.grad.to_local()
    expected = kept.clone()
    optimizer.step()
    optimizer.zero_grad()
    run(batch)
    assert torch.equal(kept, expected), "a gradient that the program holds keeps its values"
    assert expected.any()
    del kept
    run(batch)
    assert all(map(arena.is_zero, gradients))
    report = chunkc.report(model)
    peak_nbytes = report.measured_peak_nbytes
    assert peak_nbytes < report.measured_with_home_nbytes <= peak_nbytes + report.home_nbytes


def loss_in_tiles() -> None:
    """The head's weight is gathered for each tile, in the backward, too."""
    reference: Any = made(num_blocks=1)
    expected = train(reference, reference, adamw(reference), range(3), lambda batch: batch)
    least, found = HUGE, set()
    for stage, is_roomy in ((stage, is_roomy) for stage in (3, 1) for is_roomy in (True, False)):
        torch._dynamo.reset()
        model = chunkc.distribute(made(num_blocks=1), mesh(), zero_stage=stage)  # type: ignore[arg-type]
        run = compiled(model, HUGE if is_roomy else int(1.1 * least), loss_tile_rows=4)
        check_close(train(run, model, adamw(model), range(3)), expected, within=1e-6)
        found.add(bits(model))
        least = chunkc.report(model).minimum_budget_nbytes
    assert len(found) == 1, "a budget or a stage changed the result"


def announced() -> None:
    """Stage 1: ranks exchange gradients in the last backward of a step alone, where the others are announced. What was
    announced and then dropped leaves nothing behind."""
    reference: Any = made()
    plain: Any = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    expected = train(reference, reference, plain, range(3), lambda batch: batch)
    cpu_allocator.install()
    budget, found = HUGE, set()
    for _ in range(2):
        torch._dynamo.reset()
        model = chunkc.distribute(made(), mesh(), zero_stage=1)
        optimizer, run = adamw(model), compiled(model, budget)
        losses, sent = trained(run, model, optimizer, train_announced)
        check_close(losses, expected, within=1e-6)
        (session,) = sessions_of(model.parameters())
        groups = [g for g in session.store.layout.groups if g.trainable]
        lacking = sum(s.spec.whole_nbytes - s.spec.home_nbytes for g in groups for s in g.slices)
        assert sent["scatters"] == lacking, "once in a step of two micro-batches"
        found.add(bits(model))
        budget = chunkc.report(model).minimum_budget_nbytes
    assert len(found) == 1, "the budget changed the result"

    def gradients() -> list[list[float]]:
        run(own(batches(0)[0])).backward()
        values = [p.grad.to_local().flatten().tolist()[:4] for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        return values

    gradients()  # exchanged; then dropped, as are those that wait
    for _ in range(2):
        with optimizer.accumulating():
            run(own(batches(1)[0])).backward()
        model.zero_grad()
    assert gradients() == gradients()


def train_announced(run: Any, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for batch, announced in zip(batches(step), (optimizer.accumulating(), contextlib.nullcontext()), strict=True):
            with announced:
                loss = run(own(batch)) / 2
                loss.backward()
            losses.append(mean(loss))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def not_exchanged() -> None:
    """What reads gradients that ranks have not exchanged, or adds them to others, is refused."""
    model = chunkc.distribute(Tiny(), mesh(), zero_stage=1)
    optimizer, run = adamw(model), compiled(model, HUGE)
    with optimizer.accumulating():
        run(own(batches(0)[0])).backward()
    for action in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: model.head.weight.grad.full_tensor(),  # type: ignore[union-attr]
        optimizer.step,
    ):
        found = told(action)
        assert found.startswith("UnsupportedError: ranks have not exchanged the gradient of "), found
    run(own(batches(0)[0])).backward()
    optimizer.step()
    with optimizer.accumulating():
        found = told(lambda: run(own(batches(0)[0])).backward())
    assert "has a gradient, which ranks have exchanged already: call optimizer.zero_grad()" in found


def disk_home(folder: Path) -> None:
    """Training with homes in RAM and on a disk; the smallest budget moves most. Parameters lie in its own file."""
    for stage in (3, 1):
        least, found = HUGE, []
        for home in ("cpu", "cpu", f"disk:{folder}"):
            torch._dynamo.reset()
            model = chunkc.distribute(made(num_blocks=1), mesh(), zero_stage=stage, home=home)  # type: ignore[arg-type]
            found.append([train(compiled(model, least), model, adamw(model), range(2)), bits(model)])
            least = chunkc.report(model).minimum_budget_nbytes
        assert found[1] == found[2]
        maps = Path("/proc/self/maps").read_text()
        addresses = {address_range(line) for line in maps.splitlines() if str(folder) in line}
        used = [p.to_local() for name, p in model.named_parameters() if not name.startswith("unused")]
        assert all(any(b <= p.data_ptr() < e for b, e in addresses) for p in used if p.numel())
        (session,) = sessions_of(model.parameters())
        assert session.options.home == f"disk:{folder}"
    place = str(folder) if dist.get_rank() == 0 else str(folder / "nowhere")
    kept = nn.Linear(4, 4)
    found_by_rank = told(lambda: chunkc.distribute(kept, mesh(), home=f"disk:{place}"))
    assert found_by_rank.startswith("HomeError: " if dist.get_rank() == 1 else "DistributedError: rank 1 of 2: ")
    assert type(kept.weight) is nn.Parameter


def address_range(line: str) -> tuple[int, int]:
    """Of a line of /proc/self/maps."""
    begin, _, end = line.split()[0].partition("-")
    return int(begin, 16), int(end, 16)


def written() -> None:
    """Between steps, all ranks or one of them write to parameters in ways that no version counter sees: it counts in
    every stage."""
    found = []
    for stage in STAGES:
        torch._dynamo.reset()
        model = chunkc.distribute(made(num_blocks=1), mesh(), zero_stage=stage)  # type: ignore[arg-type]
        optimizer, run = adamw(model), compiled(model, HUGE)
        losses = train(run, model, optimizer, range(1))
        with torch.no_grad():
            model.embed.weight.mul_(1.5)
        losses += train(run, model, optimizer, range(1, 2))
        if dist.get_rank() == 1:
            model.blocks[0].up.weight.to_local().data.numpy()[0] += 1  # type: ignore[union-attr, index, operator]
        with torch.no_grad():
            losses.append(mean(run(own(batches(2)[0]))))
        model.load_state_dict(chunkc.distribute(made(seed=1, num_blocks=1), mesh()).state_dict())
        losses += train(run, model, optimizer, range(2, 3))
        found.append((losses, bits(model)))
    assert found[0] == found[1] == found[2]


FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json", "state.safetensors"]
"""Of a checkpoint of chunkc's, beside each rank's own."""


def saved(folder: Path) -> Result:
    """Train, and save with PyTorch's own checkpoints what any number of ranks can load."""
    model = chunkc.distribute(made(), mesh(), zero_stage=2)
    optimizer, run = adamw(model), compiled(model, HUGE)
    train(run, model, optimizer, range(2))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "checkpoint")
    return {"whole": whole_bits(model, optimizer)}


def loaded(folder: Path) -> Result:
    """Load it on these ranks and go on."""
    model = chunkc.distribute(made(seed=1), mesh())
    optimizer = adamw(model)
    weights, states = get_state_dict(model, optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # no states were saved of what is never used
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "checkpoint", planner=planner)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    del weights, states, planner
    gc.collect()
    found = whole_bits(model, optimizer)
    return {"whole": found, "losses": train(compiled(model, HUGE), model, optimizer, range(2, 3))}


def whole_bits(model: nn.Module, optimizer: Any) -> str:
    """A hash of all ranks' parameters and states together, whatever the number of ranks."""
    found = hashlib.blake2b()
    numbers = {id(p): number for number, p in enumerate(optimizer.param_groups[0]["params"])}
    by_number = optimizer.state_dict()["state"]
    for name, parameter in model.named_parameters():
        found.update(bytes_of(parameter))
        if name.startswith("unused"):
            continue  # it has no states before a checkpoint is loaded, and zeros after that
        for _, value in sorted(by_number.get(numbers[id(parameter)], {}).items()):
            found.update(bytes_of(value))
    return found.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """Of all of it, wherever it is."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()


def tiny(**how: Any) -> Any:
    """What faults are tried with."""
    return chunkc.distribute(Tiny(), mesh(), **how)


def differs() -> bool:
    """Whether this is the rank that has the fault: the others are alike, however many there are."""
    return dist.get_rank() == 1


def ended_by(action: Callable[[Any, nn.Module], Any], *, timeout_s: float = 30) -> Result:
    """Train for a step, then do something; how long that takes to raise an error."""
    model = tiny(timeout_s=timeout_s)
    run = compiled(model, HUGE)
    run(own(batches(0)[0])).backward()
    start = time.monotonic()
    try:
        action(run, model)
    except chunkc.ChunkcError as error:
        return {"error": type(error).__name__, "message": str(error), "took": time.monotonic() - start}
    except (MemoryError, KeyboardInterrupt) as error:
        time.sleep(20)  # others are told: they do not wait until this rank ends
        return {"error": type(error).__name__}
    return {"took": time.monotonic() - start}


def fault(action: Callable[[Any, nn.Module], Any]) -> Callable[[], Result]:
    """Make a case of what is done after a step."""
    return functools.wraps(action)(lambda: ended_by(action))


@fault
def killed(run: Any, model: nn.Module) -> None:
    loss = run(own(batches(0)[0]))
    if differs():
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def hung() -> Result:
    def action(run: Any, model: nn.Module) -> None:
        if differs():
            time.sleep(14)
        run(own(batches(0)[0])).backward()

    return ended_by(action, timeout_s=10)


@fault
def another_phase(run: Any, model: nn.Module) -> None:
    loss = run(own(batches(0)[0]))
    if differs():
        run(own(batches(0)[0]))
    loss.backward()


@fault
def another_step(run: Any, model: nn.Module) -> None:
    """A rank has a learning rate of its own, such as of a scheduler that goes by the loss."""
    chunkc.optim.SGD(model.parameters(), lr=0.2 if differs() else 0.1).step()
    run(own(batches(0)[0]))


@fault
def hooked_on_one(run: Any, model: nn.Module) -> None:
    """A rank refuses in the middle of a step, and stays: the others are told."""
    loss = run(own(batches(0)[0]))
    if differs():
        next(model.parameters()).register_hook(lambda grad: grad)
    loss.backward()


@fault
def out_of_memory(run: Any, model: nn.Module) -> None:
    """A rank lacks room in the middle of a backward, says so, and stays."""
    loss = run(own(batches(0)[0]))
    if differs():
        with patch.object(CpuTier, "allocate_slot", side_effect=MemoryError("no room")):
            loss.backward()
    loss.backward()


@fault
def interrupted(run: Any, model: nn.Module) -> None:
    """Ctrl-C reaches one rank, which stays."""
    if differs():
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    while True:
        run(own(batches(0)[0])).backward()


@fault
def announced_on_one(run: Any, model: nn.Module) -> None:
    loss = run(own(batches(0)[0]))
    with adamw(model).accumulating() if differs() else contextlib.nullcontext():
        loss.backward()


class AnotherTiny(Tiny):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).abs().mean()


def refusal(action: Callable[[], Any]) -> Result:
    """Return the error that something raises."""
    try:
        action()
    except chunkc.ChunkcError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def another_code() -> Result:
    """A rank has another version of the model's code."""
    model = chunkc.distribute((AnotherTiny if differs() else Tiny)(), mesh(), timeout_s=30)
    return refusal(lambda: compiled(model, HUGE)(own(batches(0)[0])))


def another_budget() -> Result:
    model = tiny()
    return refusal(lambda: compiled(model, HUGE + differs())(own(batches(0)[0])))


def too_small_on_one() -> Result:
    model = tiny()
    return refusal(lambda: compiled(model, 512 if differs() else HUGE)(own(batches(0)[0])))


def another_stage() -> Result:
    model = nn.Linear(4, 4)
    found = refusal(lambda: chunkc.distribute(model, mesh(), zero_stage=2 + differs()))
    return {**found, "kept": type(model.weight) is nn.Parameter}


def another_model() -> Result:
    model = nn.Linear(4, 4 + differs())
    return {**refusal(lambda: chunkc.distribute(model, mesh())), "kept": type(model.weight) is nn.Parameter}


def refused_on_one() -> Result:
    """A rank refuses its model before ranks have met; then a model of another rank is refused, and its arguments."""

    def attempt(**given: Any) -> str:
        model = nn.Linear(4, 4)
        if dist.get_rank() == given.pop("views", None):
            model.weight.data = model.weight.data.t()

        def distributed_and_called() -> None:
            chunkc.distribute(model, **{"mesh": mesh(), "timeout_s": 20} | given)
            compiled(model, HUGE if dist.get_rank() else "a lot")(torch.ones(2, 4))

        return told(distributed_and_called)

    start, backwards = time.monotonic(), list(reversed(range(dist.get_world_size())))
    messages = [attempt(views=1), attempt(views=0), attempt(home="cpu" if dist.get_rank() else "nowhere")]
    messages += [attempt(timeout_s=20 if dist.get_rank() else 0)]
    messages += [attempt(mesh=None if dist.get_rank() == number else mesh()) for number in (0, 1)]
    messages += [attempt(mesh=DeviceMesh("cpu", backwards) if differs() else mesh()), attempt()]
    return {"message": "\n".join(messages), "took": time.monotonic() - start}


def refused() -> None:
    """What a distributed model does not do: each rank is refused by itself."""
    model = chunkc.distribute(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), mesh())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    numbers = nn.Linear(2, 2, device="meta")
    numbers.register_buffer("numbers", torch.ones(3, device="meta"), persistent=False)
    others = DeviceMesh("cpu", [(dist.get_rank() + 1) % dist.get_world_size()], _init_backend=False)

    def small(place: Any = None, **how: Any) -> Callable[[], Any]:
        return lambda: chunkc.distribute(nn.Linear(2, 2), place or mesh(), **how)

    for action, message in (
        (
            lambda: chunkc.optim.AdamW(model.parameters(), moments_dtype="int8").step(),
            "UnsupportedError: AdamW updates distributed parameters with fp32 or bf16 moments",
        ),
        (
            lambda: chunkc.distribute(model, mesh()),
            "UnsupportedError: 0.weight is distributed or compiled already",
        ),
        (
            lambda: chunkc.distribute(tensor_parallel(), mesh()),
            "UnsupportedError: 0.weight is a DTensor over ranks that have no mesh in common",
        ),
        (
            lambda: with_plain_gradient(model),
            "UnsupportedError: the gradient of a distributed parameter must be cut",
        ),
        (
            lambda: compiled(copy.deepcopy(model), HUGE)(torch.ones(2, 4)),
            "UnsupportedError: the model takes a DTensor that chunkc.distribute has not made",
        ),
        (
            lambda: chunkc.distribute(numbers, mesh()),
            "UnsupportedError: the buffer numbers is on the meta device, and no file of weights has it",
        ),
        (small(zero_stage=4), "OptionsError: zero_stage is 4; allowed: "),
        (small(timeout_s=0), "OptionsError: timeout_s is 0"),
        (
            lambda: chunkc.distribute(nn.Linear(2, 2), None),  # type: ignore[arg-type]
            "OptionsError: mesh must be a DeviceMesh of one or two dimensions",
        ),
        (small(others), "OptionsError: mesh must be .*; this process is in none"),
        (small(home="nowhere"), "OptionsError: option 'home' is 'nowhere'"),
    ):
        assert re.match(message, found := told(action)), found
    kept = model.state_dict()
    shared = told(lambda: compiled(model, HUGE)(torch.ones(2, 4)))
    assert shared.startswith("UnsupportedError: this rank's part of 0.weight shares its memory")
    del kept


def tensor_parallel() -> nn.Module:
    return parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh(), {"0": ColwiseParallel()})


def with_plain_gradient(model: nn.Module) -> None:
    parameter = next(model.parameters())
    parameter.grad = torch.zeros(parameter.shape)
    try:
        chunkc.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        parameter.grad = None


# --- processes ---


def main(
    folder: Path, num_ranks: int, timeout_s: float, cases: Mapping[str, Callable[..., Result | None]]
) -> Iterator[tuple[str, list[Result]]]:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, case in cases.items():
        files = [folder / f"{name}.{rank}.json" for rank in range(num_ranks)]
        children = [fork(case, rank, num_ranks, folder / f"{name}.store", file) for rank, file in enumerate(files)]
        deadline = time.monotonic() + timeout_s
        for child, file in zip(children, files, strict=True):
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    late = f"it was still there after {timeout_s:g} s"
                    file.write_text(json.dumps({"error": "TimeoutError", "message": late, "traceback": late}))
                time.sleep(0.01)
        yield name, [json.loads(file.read_text()) if file.exists() else {"error": "killed"} for file in files]


def fork(case: Callable[..., Result | None], rank: int, num_ranks: int, store: Path, file: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        mesh()
        started = time.monotonic()
        try:
            takes_folder = "folder" in inspect.signature(case, follow_wrapped=False).parameters
            found = case(*([store.parent] if takes_folder else [])) or {}
        except BaseException as error:  # that of a checkpoint of PyTorch is no Exception
            found = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        found["seconds"] = time.monotonic() - started
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(found))
        partial.rename(file)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    finally:
        sys.stdout.flush()
        os._exit(0)


def run_command_line(cases: Mapping[str, Any]) -> None:
    """Run what the command line names of these cases; one with a parameter `folder` gets one that all ranks share."""
    folder, num_ranks, timeout_s, *names = sys.argv[1:]
    wanted = {name: cases[name] for name in names}
    print(json.dumps(dict(main(Path(folder), int(num_ranks), float(timeout_s), wanted))))


if __name__ == "__main__":
    run_command_line(globals())
