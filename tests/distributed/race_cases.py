"""Exchanges that come late, and waits and agreements that are left out; run as `rank_cases` is."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import rank_cases
from late_tiers import LateTier, tier_of_new_sessions
from missing_waits import ForcedState
from rank_cases import HUGE, STAGES, Result, Tiny, adamw, batches, bits, compiled, made, mesh, of_all, own, train

import chunkc
from chunkc.ir.layout import GRAD
from chunkc.ir.links import GATHER, SCATTER
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.execution import executor
from chunkc.session.session import sessions_of


@contextmanager
def random_delays(seed: int) -> Iterator[None]:
    """Every exchange of this rank, and every agreement, begins after another while."""
    generator, exchange = random.Random(seed), Transport.exchange

    def late(*args: Any) -> None:
        time.sleep(generator.uniform(0, 0.01))
        exchange(*args)

    with patch.object(Transport, "exchange", late):
        yield


def delayed() -> None:
    """A training with and without delays, in every stage; the smallest budget has the most exchanges."""
    found = []
    for stage in STAGES:
        least = HUGE
        for is_late in (False, True):
            torch._dynamo.reset()
            model = chunkc.distribute(made(num_blocks=1), mesh(), zero_stage=stage)  # type: ignore[arg-type]
            run, optimizer = compiled(model, least), adamw(model)
            with random_delays(dist.get_rank()) if is_late else nullcontext():
                found.append([train(run, model, optimizer, range(2)), bits(model)])
            least = chunkc.report(model).minimum_budget_nbytes
    assert all(run == found[0] for run in found)


# --- waits ---


def without(executable: executor.Executable, index: int) -> executor.Executable:
    """The instructions without one wait; the chunk's state goes on as if it were there."""
    instructions = list(executable.instructions)
    wait: Any = instructions[index]

    instructions[index] = ForcedState(wait.chunk)
    return dataclasses.replace(executable, instructions=tuple(instructions))


def waits_of(executable: executor.Executable) -> list[int]:
    """Waits for exchanges; gradients are not fetched."""
    return [
        index
        for index, event in enumerate(executable.instructions)
        if isinstance(event, executor._Wait)
        if event.link == SCATTER or (event.link == GATHER and event.chunk.kind != GRAD)
    ]


def every_wait() -> None:
    """Each wait for an exchange left out once, where every exchange comes as late as it may: NaN or stale data in the
    result of some rank."""
    for stage in STAGES:
        least = HUGE
        for _ in range(2):
            torch._dynamo.reset()
            with tier_of_new_sessions(LateTier):
                model = chunkc.distribute(made(), mesh(), zero_stage=stage)  # type: ignore[arg-type]
                run = compiled(model, least)
                run(own(batches(0)[0])).backward()
            least = chunkc.report(model).minimum_budget_nbytes
        unseen = of_all(_without_each_wait(run, model))
        assert not set(unseen[0]).intersection(*unseen[1:]), stage


def _without_each_wait(run: Any, model: Any) -> list[str]:
    """Waits that this rank does not miss."""
    (session,) = sessions_of(model.parameters())
    store = session.store
    ran: list[executor.Executable] = []
    call = executor.Executable.__call__
    broken: dict[int, executor.Executable] = {}

    def noting(executable: executor.Executable, *args: Any) -> list[Any]:
        ran.append(executable)
        return call(broken.get(id(executable), executable), *args)

    def step() -> str:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().fill_(torch.nan)  # its home has nothing that could be taken for the next one
        model.zero_grad()
        store.replicated.current.clear()  # as after a change: all is gathered
        loss = run(own(batches(1)[0]))
        loss.backward()
        values = [loss.detach(), *(p.grad.to_local() for p in model.parameters() if p.grad is not None)]
        text = repr([value.flatten().tolist() for value in values])  # before the rest of what is late comes
        store.release_slots()
        store.tier.drain()
        return text

    with patch.object(executor.Executable, "__call__", noting):
        expected = [step(), step()]
        phases = ran[-2:]
        unseen, num_waits = [], 0
        for executable in phases:
            for index in waits_of(executable):
                broken = {id(executable): without(executable, index)}
                num_waits += 1
                if step() == expected[1]:
                    unseen.append(str(executable.instructions[index]))
        broken = {}
        expected.append(step())
    assert len(set(expected)) == 1, "not repeatable"
    assert num_waits > 6, "in forward and backward"
    return unseen


# --- agreements ---

PATIENCE = {"s": 30.0}
"""How long ranks wait for each other: where they agree, long enough for a busy machine."""


def another_plan() -> Result:
    """A rank that plans otherwise where something else is held."""

    def action(run: Any, model: Any) -> None:
        import chunkc.session.compiled_step as graph

        planned_step = graph.planned_step

        def planned(*args: Any) -> Any:
            made = planned_step(*args)
            plan = dataclasses.replace(made.plan, minimum_nbytes=made.plan.minimum_nbytes + dist.get_rank())
            return dataclasses.replace(made, plan=plan)

        with patch.object(graph, "planned_step", planned):
            kept = run(own(batches(0)[0]))  # whose saved values are held beside the next
            run(own(batches(0)[0]))
            del kept

    return rank_cases.ended_by(action, timeout_s=PATIENCE["s"])


def changed_on_one() -> Result:
    """What a rank has changed all gather anew."""
    model = chunkc.distribute(Tiny(), mesh(), zero_stage=2, timeout_s=PATIENCE["s"])
    run = compiled(model, HUGE)
    with torch.no_grad():
        before = float(run(own(batches(0)[0])))
        if dist.get_rank() == 1:
            model.head.weight.to_local().data.numpy()[0] += 1
        return {"changed": float(run(own(batches(0)[0]))) != before}


def lost_phase() -> Result:
    """A rank runs a forward where the other runs a backward."""

    def action(run: Any, model: Any) -> None:
        loss = run(own(batches(0)[0]))
        if dist.get_rank() == 1:
            run(own(batches(0)[0]))
        loss.backward()

    return rank_cases.ended_by(action, timeout_s=PATIENCE["s"])


@contextmanager
def _none(*args: Any) -> Iterator[Callable[[Any], None]]:
    yield lambda facts: None


LEFT_OUT: dict[str, tuple[str, Any, Callable[[], Result]]] = {
    "of models": ("chunkc.distribute.agree", lambda *args: None, rank_cases.another_stage),
    "of a compilation": ("chunkc.compile.rendezvous", _none, rank_cases.another_budget),
    "of a phase": ("chunkc.session.rank_phases.begin_phase", lambda transport, own, facts: [own], lost_phase),
    "of what is outdated": (
        "chunkc.session.rank_phases.begin_phase",
        lambda transport, own, facts: [own],
        changed_on_one,
    ),
    "of a plan": ("chunkc.session.compiled_step.agree", lambda *args: None, another_plan),
}
"""Agreements: where each is called, what stands in its place, and the case that fails without it."""


def left_out(name: str) -> Result:
    place, nothing, case = LEFT_OUT[name]
    with patch(place, nothing), patch.dict(PATIENCE, s=3.0):
        return outcome_of(case)


def outcome_of(case: Callable[[], Result]) -> Result:
    """What a rank says of a case, or the message of its error."""
    try:
        found = case()
    except chunkc.ChunkcError as error:
        found = {"message": str(error)}
    return {"outcome": found.get("message", "nothing" if not found.get("changed") else "changed")}


if __name__ == "__main__":
    cases: dict[str, Callable[[], Result | None]] = {"delayed": delayed, "every_wait": every_wait}
    for agreement, (*_, its_case) in LEFT_OUT.items():
        cases[f"with that {agreement}"] = partial(outcome_of, its_case)
        cases[f"without that {agreement}"] = partial(left_out, agreement)
    rank_cases.run_command_line(cases)
