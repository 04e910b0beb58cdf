"""What ranks do in tests: each case runs in processes of its own, one for each rank, forked from one that has imported
everything.

    python rank_cases.py FOLDER NUM_RANKS TIMEOUT_S CASE ...

Prints what each rank of each case came to, as JSON: what the case returned, or the error's class and message.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import gc
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""What a loop has of its own beside what is planned: a loss, half of it, their gradients."""
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


# --- cases ---


def arrays(model: nn.Module) -> list[Any]:
    """Whole parameters in memory that torch does not know of."""
    values = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [value.detach().numpy().copy() for value in values]


def _as_one_process(codegen: str, stages: Sequence[int] = (3,)) -> Result:
    """Train in one process, then on the ranks in stages of ZeRO: each with room for all, and with none to spare under a
    hard limit."""
    reference: Any = made()
    plain: Any = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    expected = train(reference, reference, plain, range(3), lambda batch: batch)
    weights = arrays(reference)
    cpu_allocator.install()  # what was allocated before is not metered
    found: Result = {"expected": expected, "num_ranks": dist.get_world_size(), "runs": []}
    least = HUGE
    for stage, budget in ((stage, budget) for stage in stages for budget in (HUGE, None)):
        torch._dynamo.reset()
        budget = budget or least
        model = chunkc.distribute(made(), mesh(), zero_stage=stage)
        optimizer, run = adamw(model), compiled(model, budget, codegen)
        losses = train(run, model, optimizer, range(2))
        before = chunkc.report(model)
        (session,) = sessions_of(model.parameters())
        sent = dict(session.transport.sent_nbytes)
        with cpu_allocator.hard_limit(before.predicted_peak_nbytes + NUMBERS_NBYTES):
            losses += train(run, model, optimizer, range(2, 3))
        report, groups = chunkc.report(model), session.store.layout.groups
        gathered = [report.plan_text.count(f"prefetch(param:{group.index}, gather)") for group in groups]
        pairs = zip(arrays(model), weights, strict=True)
        found["runs"].append(
            {
                "losses": losses,
                "stage": stage,
                "bits": bits(model),
                "difference": max(float(abs(value - other).max()) for value, other in pairs),
                "peaks": (report.measured_peak_nbytes, report.predicted_peak_nbytes, budget),
                "sent": {channel: n - sent[channel] for channel, n in session.transport.sent_nbytes.items()},
                "gathered": [(n, sum(s.spec.home_nbytes for s in g.slices)) for n, g in zip(gathered, groups)],
                "lacking": sum(
                    s.spec.whole_nbytes - s.spec.home_nbytes for g in groups if g.trainable for s in g.slices
                ),
                "home": report.home_nbytes,
                "trained": sum(s.spec.home_nbytes for g in groups if g.trainable for s in g.slices),
            }
        )
        least = report.minimum_budget_nbytes
    return found


def as_one_process() -> Result:
    return _as_one_process("eager", STAGES)


def as_one_process_inductor() -> Result:
    return _as_one_process("inductor", STAGES)


def chosen() -> Result:
    """The plan chooses what is whole, from room for all down to none to spare; beside that, the forced stages."""
    found: Result = {"runs": []}
    cpu_allocator.install()

    def run_with(budget: int, stage: int | None) -> Any:
        torch._dynamo.reset()
        model = chunkc.distribute(made(), mesh(), zero_stage=stage)  # type: ignore[arg-type]
        optimizer, run = adamw(model), compiled(model, budget)
        losses = train(run, model, optimizer, range(2))
        before = chunkc.report(model)
        (session,) = sessions_of(model.parameters())
        with cpu_allocator.hard_limit(before.predicted_peak_nbytes + NUMBERS_NBYTES):
            losses += train(run, model, optimizer, range(2, 3))
        report, layout = chunkc.report(model), session.store.layout
        found["runs"].append(
            {
                "stage": stage,
                "budget": budget,
                "losses": losses,
                "bits": bits(model),
                "whole": sorted(layout.replicated_by_choice),
                "groups": len(layout.groups),
                "plan": report.plan_text.partition("\n")[2],
                "peaks": (report.measured_peak_nbytes, report.predicted_peak_nbytes),
            }
        )
        return report

    run_with(HUGE, 2)
    roomy = run_with(HUGE, None)
    run_with(roomy.minimum_budget_nbytes, None)
    return found


class Telling(nn.Module):
    """Returns, beside its loss, what callers may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(6)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.h:
            x = layer(x).tanh()
        return x.square().mean(), x


def leaving() -> Result:
    """One rank keeps outputs, for which what is whole has to go: on all ranks, for good, and without a changed bit."""
    found: Result = {"runs": []}
    cpu_allocator.install()
    for stage in (3, None):
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        model = chunkc.distribute(Telling(), mesh(), zero_stage=stage)  # type: ignore[arg-type]
        optimizer, run = adamw(model), compiled(model, 310_000)
        kept, whole = [], []
        for step in range(6):
            loss, told = run(torch.full((64, 64), 0.1 * (step + dist.get_rank())))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            (session,) = sessions_of(model.parameters())
            whole.append(sorted(session.store.layout.replicated_by_choice))
            if dist.get_rank() == 1:
                kept.append(told.detach())
        peaks = chunkc.report(model).measured_peak_nbytes, chunkc.report(model).predicted_peak_nbytes
        found["runs"].append({"bits": bits(model), "whole": whole, "peaks": peaks})
    return found


def let_go() -> Result:
    """Gradients at home, which between steps nobody has; then one that somebody has kept."""
    model: Any = chunkc.distribute(made(), mesh())
    optimizer, run = adamw(model), compiled(model, HUGE)
    cpu_allocator.install()
    train(run, model, optimizer, range(2))
    (session,) = sessions_of(model.parameters())
    arena = session.store.arena
    gradients = [chunk for chunk in arena.chunks if chunk.kind == GRAD]
    used = [chunk for chunk in gradients if not arena.is_zero(chunk)]
    batch = own(batches(0)[0])
    loss, before = run(batch), arena.used_nbytes
    found: Result = {"used": len(used), "left": sum(not arena.is_zero(chunk) for chunk in gradients)}
    loss.backward()
    found["grown"] = arena.used_nbytes - before - sum(session.store.layout.groups[c.group].nbytes(GRAD) for c in used)
    kept = model.embed.weight.grad.to_local()
    expected = kept.clone()
    optimizer.step()
    optimizer.zero_grad()
    run(batch)
    found |= {"kept": torch.equal(kept, expected), "values": bool(expected.any())}
    del kept
    run(batch)
    found["left at last"] = sum(not arena.is_zero(chunk) for chunk in gradients)
    report = chunkc.report(model)
    found["peaks"] = report.measured_peak_nbytes, report.measured_with_home_nbytes, report.home_nbytes
    return found


def loss_in_tiles() -> Result:
    """The head's weight is gathered for each tile, in the backward, too."""
    reference: Any = made(num_blocks=1)
    expected = train(reference, reference, adamw(reference), range(3), lambda batch: batch)
    found: Result = {"expected": expected, "runs": []}
    least = HUGE
    for stage, budget in ((stage, budget) for stage in (3, 1) for budget in (HUGE, None)):
        torch._dynamo.reset()
        model = chunkc.distribute(made(num_blocks=1), mesh(), zero_stage=stage)
        optimizer, run = adamw(model), compiled(model, budget or int(1.1 * least), loss_tile_rows=4)
        found["runs"].append({"losses": train(run, model, optimizer, range(3)), "bits": bits(model)})
        least = chunkc.report(model).minimum_budget_nbytes
    return found


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(x).tanh()


class Deep(nn.Module):
    """So many blocks that one more or less is a few percent."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Square() for _ in range(32)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean()


def sent() -> Result:
    """Bytes that this rank hands to the process group in a step, by stage, in a budget without room to spare."""
    counted = [0]
    isend = dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted[0] += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    dist.isend = counting
    found: Result = {"parameters": sum(p.nbytes for p in Deep().parameters()), "by stage": {}}
    least = HUGE
    for stage, budget in ((3, HUGE), (3, None), (2, HUGE), (1, HUGE), (None, None)):
        torch._dynamo.reset()
        budget = budget or least + (found["parameters"] // 2 if stage is None else 0)
        torch.manual_seed(0)
        model = chunkc.distribute(Deep(), mesh(), zero_stage=stage)  # type: ignore[arg-type]
        optimizer, run = adamw(model), compiled(model, budget, debug=False)
        for _ in range(2):
            before = counted[0]
            run(torch.ones(4, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        (session,) = sessions_of(model.parameters())
        least = min(least, chunkc.report(model).minimum_budget_nbytes)
        found["by stage"]["chosen" if stage is None else stage] = counted[0] - before
        found["whole"] = len(session.store.layout.replicated_by_choice) / len(session.store.layout.groups)
    return found


def announced() -> Result:
    """Stage 1: ranks exchange gradients in the last backward of a step alone, where the others are announced."""
    reference: Any = made()
    plain: Any = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    expected = train(reference, reference, plain, range(3), lambda batch: batch)
    found: Result = {"expected": expected, "runs": []}
    cpu_allocator.install()
    budget = HUGE
    for _ in range(2):
        torch._dynamo.reset()
        model = chunkc.distribute(made(), mesh(), zero_stage=1)
        optimizer, run = adamw(model), compiled(model, budget)
        losses = train_announced(run, model, optimizer, range(2))
        report = chunkc.report(model)
        (session,) = sessions_of(model.parameters())
        sent = dict(session.transport.sent_nbytes)
        with cpu_allocator.hard_limit(report.predicted_peak_nbytes + NUMBERS_NBYTES):
            losses += train_announced(run, model, optimizer, range(2, 3))
        groups = [g for g in session.store.layout.groups if g.trainable]
        lacking = sum(s.spec.whole_nbytes - s.spec.home_nbytes for g in groups for s in g.slices)
        scattered = session.transport.sent_nbytes["scatters"] - sent["scatters"]
        budget = report.minimum_budget_nbytes
        found["runs"].append({"losses": losses, "bits": bits(model), "scattered": scattered, "lacking": lacking})
    run(own(batches(0)[0])).backward()  # exchanged; then dropped, as are those that wait
    optimizer.zero_grad()
    for _ in range(2):
        with optimizer.accumulating():
            run(own(batches(1)[0])).backward()
        model.zero_grad()
    run(own(batches(0)[0])).backward()
    found["after dropping"] = [
        p.grad.to_local().flatten().tolist()[:4] for p in model.parameters() if p.grad is not None
    ]
    optimizer.zero_grad()
    run(own(batches(0)[0])).backward()
    found["alone"] = [p.grad.to_local().flatten().tolist()[:4] for p in model.parameters() if p.grad is not None]
    return found


def train_announced(run: Any, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        first, last = batches(step)
        with optimizer.accumulating():
            loss = run(own(first)) / 2
            loss.backward()
        losses.append(mean(loss))
        loss = run(own(last)) / 2
        loss.backward()
        losses.append(mean(loss))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def not_exchanged() -> Result:
    """What reads gradients that ranks have not exchanged, or adds them to others, is refused."""
    found: Result = {}
    model = chunkc.distribute(Tiny(), mesh(), zero_stage=1)
    optimizer, run = adamw(model), compiled(model, HUGE)

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except chunkc.ChunkcError as error:
            found[name] = f"{type(error).__name__}: {error}"

    with optimizer.accumulating():
        run(own(batches(0)[0])).backward()
    attempt("clipped", lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    attempt("read", lambda: model.head.weight.grad.full_tensor())
    attempt("stepped", optimizer.step)
    run(own(batches(0)[0])).backward()
    optimizer.step()
    with optimizer.accumulating():
        attempt("added", lambda: run(own(batches(0)[0])).backward())
    return found


def disk_home(folder: Path) -> Result:
    """Training with homes in RAM and on a disk, in every stage; the smallest budget moves most."""
    found: Result = {}
    for stage in STAGES:
        least = HUGE
        for home in ("cpu", "cpu", f"disk:{folder}"):
            torch._dynamo.reset()
            model = chunkc.distribute(made(num_blocks=1), mesh(), zero_stage=stage, home=home)
            optimizer, run = adamw(model), compiled(model, least)
            losses = train(run, model, optimizer, range(2))
            (session,) = sessions_of(model.parameters())
            found[f"{stage} {home.partition(':')[0]}"] = [losses, bits(model)]
            least = chunkc.report(model).minimum_budget_nbytes
        maps = Path("/proc/self/maps").read_text()
        addresses = {address_range(line) for line in maps.splitlines() if str(folder) in line}
        used = [p.to_local() for name, p in model.named_parameters() if not name.startswith("unused")]
        parts = [part for part in used if part.numel()]
        found[f"{stage} on disk"] = all(any(b <= p.data_ptr() < e for b, e in addresses) for p in parts)
        found[f"{stage} option"] = session.options.home
    place = str(folder) if dist.get_rank() == 0 else str(folder / "nowhere")
    model = nn.Linear(4, 4)
    try:
        chunkc.distribute(model, mesh(), home=f"disk:{place}")
    except chunkc.ChunkcError as error:
        found["nowhere"] = f"{type(error).__name__}: {error}"
    return found | {"kept": type(model.weight) is nn.Parameter}


def address_range(line: str) -> tuple[int, int]:
    """Of a line of /proc/self/maps."""
    begin, _, end = line.split()[0].partition("-")
    return int(begin, 16), int(end, 16)


def written() -> Result:
    """Between steps, all ranks or one of them write to parameters in ways that no version counter sees."""
    found: Result = {}
    for stage in STAGES:
        torch._dynamo.reset()
        model = chunkc.distribute(made(num_blocks=1), mesh(), zero_stage=stage)
        optimizer, run = adamw(model), compiled(model, HUGE)
        losses = train(run, model, optimizer, range(1))
        with torch.no_grad():
            model.embed.weight.mul_(1.5)
        losses += train(run, model, optimizer, range(1, 2))
        if dist.get_rank() == 1:
            model.blocks[0].up.weight.to_local().data.numpy()[0] += 1
        with torch.no_grad():
            losses.append(mean(run(own(batches(2)[0]))))
        model.load_state_dict(chunkc.distribute(made(seed=1, num_blocks=1), mesh()).state_dict())
        losses += train(run, model, optimizer, range(2, 3))
        found[str(stage)] = {"losses": losses, "bits": bits(model)}
    return found


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
        found.update(bytes_of(parameter.full_tensor()))
        if name.startswith("unused"):
            continue  # it has no states before a checkpoint is loaded, and zeros after that
        for _, value in sorted(by_number.get(numbers[id(parameter)], {}).items()):
            found.update(bytes_of(value.full_tensor() if isinstance(value, DTensor) else value))
    return found.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
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
        try:
            chunkc.distribute(model, **{"mesh": mesh(), "timeout_s": 20} | given)
            compiled(model, HUGE if dist.get_rank() else "a lot")(torch.ones(2, 4))
        except chunkc.ChunkcError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    start, backwards = time.monotonic(), list(reversed(range(dist.get_world_size())))
    messages = [attempt(views=1), attempt(views=0), attempt(home="cpu" if dist.get_rank() else "nowhere")]
    messages += [attempt(timeout_s=20 if dist.get_rank() else 0)]
    messages += [attempt(mesh=None if dist.get_rank() == number else mesh()) for number in (0, 1)]
    messages += [attempt(mesh=DeviceMesh("cpu", backwards) if differs() else mesh()), attempt()]
    return {"message": "\n".join(messages), "took": time.monotonic() - start}


def refused() -> Result:
    """What a distributed model does not do, by what was tried; each rank is refused by itself."""
    found: Result = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except chunkc.ChunkcError as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = chunkc.distribute(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), mesh())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make = chunkc.optim
    attempt("8 bits", lambda: make.AdamW(model.parameters(), moments_dtype="int8").step())
    attempt("twice", lambda: chunkc.distribute(model, mesh()))
    attempt("tensor parallel", lambda: chunkc.distribute(tensor_parallel(), mesh()))
    attempt("plain gradient", lambda: with_plain_gradient(model))
    attempt("copied", lambda: compiled(copy.deepcopy(model), HUGE)(torch.ones(2, 4)))
    numbers = nn.Linear(2, 2, device="meta")
    numbers.register_buffer("numbers", torch.ones(3, device="meta"), persistent=False)
    attempt("meta", lambda: chunkc.distribute(numbers, mesh()))
    attempt("stage", lambda: chunkc.distribute(nn.Linear(2, 2), mesh(), zero_stage=4))
    attempt("timeout", lambda: chunkc.distribute(nn.Linear(2, 2), mesh(), timeout_s=0))
    attempt("mesh", lambda: chunkc.distribute(nn.Linear(2, 2), None))
    others = DeviceMesh("cpu", [(dist.get_rank() + 1) % dist.get_world_size()], _init_backend=False)
    attempt("other ranks' mesh", lambda: chunkc.distribute(nn.Linear(2, 2), others))
    kept = model.state_dict()
    attempt("shared", lambda: compiled(model, HUGE)(torch.ones(2, 4)))
    del kept
    attempt("home", lambda: chunkc.distribute(nn.Linear(2, 2), mesh(), home="nowhere"))
    return found


def tensor_parallel() -> nn.Module:
    return parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh(), {"0": ColwiseParallel()})


def with_plain_gradient(model: nn.Module) -> None:
    parameter = next(model.parameters())
    parameter.grad = torch.zeros(parameter.shape)
    try:
        chunkc.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        parameter.grad = None


CASES: dict[str, Callable[..., Result]] = {
    case.__name__: case
    for case in (
        as_one_process,
        as_one_process_inductor,
        chosen,
        leaving,
        let_go,
        loss_in_tiles,
        sent,
        disk_home,
        written,
        announced,
        not_exchanged,
        announced_on_one,
        saved,
        loaded,
        killed,
        hung,
        another_phase,
        another_step,
        hooked_on_one,
        another_budget,
        another_stage,
        out_of_memory,
        interrupted,
        another_code,
        too_small_on_one,
        another_model,
        refused_on_one,
        refused,
    )
}
"""By name."""

WITH_FOLDER = {"disk_home", "saved", "loaded"}
"""Cases that get a folder, which all ranks share."""


# --- processes ---


def main(folder: Path, num_ranks: int, timeout_s: float, names: list[str]) -> Iterator[tuple[str, list[Result]]]:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in names:
        files = [folder / f"{name}.{rank}.json" for rank in range(num_ranks)]
        children = [fork(name, rank, num_ranks, folder / f"{name}.store", file) for rank, file in enumerate(files)]
        deadline = time.monotonic() + timeout_s
        for child, file in zip(children, files, strict=True):
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    late = f"it was still there after {timeout_s:g} s"
                    file.write_text(json.dumps({"error": "TimeoutError", "message": late, "traceback": late}))
                time.sleep(0.01)
        yield name, [json.loads(file.read_text()) if file.exists() else {"error": "killed"} for file in files]


def fork(name: str, rank: int, num_ranks: int, store: Path, file: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        mesh()
        started = time.monotonic()
        try:
            found = CASES[name](*([store.parent] if name in WITH_FOLDER else []))
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


def run_command_line(cases: Mapping[str, Callable[..., Result]], with_folder: Iterable[str] = ()) -> None:
    """Run what the command line names, of these cases and those of this file; some get a folder."""
    CASES.update(cases)
    WITH_FOLDER.update(with_folder)
    folder, num_ranks, timeout_s, *names = sys.argv[1:]
    print(json.dumps(dict(main(Path(folder), int(num_ranks), float(timeout_s), names))))


if __name__ == "__main__":
    run_command_line(CASES)
