"""A model of four chunks that the backward updates, in slots or as residents, for the tests of `overlap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import array, compile_case, session_of
from overlap_cases import Trained, case, minimum_nbytes

import chunkc
from chunkc.ir.explanation import Explanation
from chunkc.ir.layout import GRAD, Chunk
from chunkc.runtime.store.consumed_gradients import ConsumedGradient

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

WITHOUT_GRADIENTS = 170_000
"""Bytes over the minimum with which all four chunks stay, but not their gradients."""


class Subject(Trained):
    """A model of four chunks, compiled with a given number of bytes more than its minimum."""

    def __init__(
        self,
        overlap: str,
        spare_nbytes: int = 1 << 16,
        dtype: torch.dtype = torch.float32,
        optimizer: Any = chunkc.optim.AdamW,
        arguments: dict[str, Any] = ADAMW,
        **options: Any,
    ) -> None:
        self.case = case(dtype)
        budget = minimum_nbytes(self.case) + spare_nbytes
        self.model, self.compiled = compile_case(self.case, memory_budget=budget, whole_graph="never", **options)
        self.session, self.store = session_of(self.model), session_of(self.model).store
        self.optimizer = optimizer(self.model.parameters(), overlap=overlap, **arguments)

    @property
    def used_names(self) -> set[str]:
        """Parameters with consumed gradients."""
        return {name for name, p in self.store.views.parameters().items() if isinstance(p.grad, ConsumedGradient)}

    @property
    def used(self) -> set[int]:
        """The groups of parameters with consumed gradients."""
        return set(self.store.layout.groups_of(self.used_names))

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes that have moved to the device, and home, so far."""
        traffic = self.store.slots.traffic
        return traffic.to_device_nbytes, traffic.to_home_nbytes

    @property
    def moving(self) -> set[int]:
        """Groups that are at home; the test makes sure that there are some."""
        found = {group.index for group in self.store.layout.groups} - self.store.resident
        assert found
        return found


def trained(overlap: str, *args: Any, num_steps: int = 4, **options: Any) -> tuple[list[Any], Subject]:
    made = Subject(overlap, *args, **options)
    losses = [made.step(batch) for batch in range(num_steps)]
    return [*losses, *made.state()], made


Act = Callable[[Subject, int], object]
"""What a user does between a backward and its step; what it returns is compared, too."""


def begun_groups(made: Subject) -> set[int]:
    """Return the groups with updates that a backward has begun, and the step has yet to commit or roll back."""
    begun = made.optimizer.scheduler.in_session(made.session).begun
    return {group.index for group in made.store.layout.groups if group.index in begun}


def trained_undoably(
    overlap: str, act: Act, num_steps: int = 5, **options: Any
) -> tuple[list[Any], Subject, list[set[int]]]:
    """Return losses with the results of `act`, the subject, and the groups begun before each act.

    `act` runs between backward and step. The losses are followed by its results and the final state.
    """
    arguments = {**options.pop("arguments", ADAMW), **({"undoable": True} if overlap != "none" else {})}
    made, found, begun = Subject(overlap, arguments=arguments, **options), [], []
    for step in range(num_steps):
        found.append(array(made.backward(step)))
        begun.append(begun_groups(made))
        told = act(made, step)
        found += [array(told)] if isinstance(told, torch.Tensor) else []
        made.optimizer.step()
        made.optimizer.zero_grad()
    return [*found, *made.state()], made, begun


def nothing(made: Subject, step: int) -> None:
    """Do nothing between backward and step."""


def clip_some(made: Subject, step: int) -> torch.Tensor:
    """Clip gradients, with a norm above the limit in two steps.

    In the second of these no update begins in the backward, nor in the step after it.
    """
    return made.optimizer.clip_grad_norm_(1e-3 if step in (1, 2) else 1e6)


def without_room(made: Subject) -> set[int]:
    """Return the groups that move, and whose gradients have no room at home."""
    return {index for index in made.moving if made.store.arena.is_promised(Chunk(GRAD, index))}


def explained(made: Subject, **updates: Any) -> Explanation:
    """Explain the model in its own budget and chunks."""
    with torch.device("meta"):
        model = made.case.build()
    return chunkc.explain(
        model, **{k: v.to("meta") for k, v in made.case.batch(0).items()}, activations="keep", whole_graph="never",
        memory_budget=made.session.budget_nbytes, chunk_size=made.store.layout.chunk_nbytes, **updates,
    )  # fmt: skip


def interrupt_a_backward(made: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the second batch's backward: one of four updates has ended, one is interrupted between its tiles."""
    loss = made.compiled(**made.case.batch(1))
    enqueue = type(made.store.tier).enqueue
    ran: list[Any] = []

    def interrupted(job: Any, *args: Any) -> None:
        if len(args) == 2 and isinstance(args[0], dict):  # an update of a tile
            ran.append(args[1])
            if len(ran) == 2:
                raise KeyboardInterrupt
        enqueue(job, *args)

    with monkeypatch.context() as patch:
        patch.setattr(type(made.store.tier), "enqueue", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    assert len(ran) == 2
