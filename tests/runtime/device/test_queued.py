"""Computation, copies and the host in three orders: always the same bits; without any one edge, other bits.

A small model trains on `QueuedTier`, where the host runs ahead and everything else is late at random. Then each edge
that orders bytes is left out in turn, and some seed shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import EDGES, FakeGpu, QueuedTier
from harness import TINY, adamw, array, differences, gradients, refuse, segmented, session_of, weights
from torch import Tensor, nn
from zoo import Case, floats

import chunkc
from chunkc.optim.rule import TileUpdate
from chunkc.optim.step import PreparedUpdate
from chunkc.runtime.device.cuda import CudaTier
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.storage.pinned import PinnedHome
from chunkc.runtime.storage.staging import StagedDiskHome
from chunkc.runtime.store.gradient_sums import GradientSums

pytestmark = pytest.mark.timeout(300)

NUM_SEEDS = 25
LONGEST_S = 0.003


class Stack(nn.Module):
    """Six equal layers, one chunk each, so that slots are reused; a norm that never moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.norm(x)))
        return x.square().mean()


CASE = Case("stack", Stack, lambda seed: {"x": floats(seed, (4, 64))})


class Subject:
    """The model, compiled once, whose second step is run again and again from the same state.

    A backward that accumulates onto gradients, the optimizer's step, and a forward with what it made.
    """

    norms: list[Any] | None = None
    """Of gradients, where they are asked for: that makes the host wait for computation."""

    def __init__(self, home: str, directory: Path, debug: bool) -> None:
        self.gpu = FakeGpu(longest_s=LONGEST_S, views_pageable=True)
        budget_nbytes = refuse(CASE, memory_budget=TINY).minimum_nbytes + 3 * 64 * 64 * 4
        torch._dynamo.reset()
        self.model = CASE.build()
        with pytest.MonkeyPatch.context() as patch:
            if home != "cpu":
                pinned = PinnedHome(self.gpu)
                disk = StagedDiskHome(
                    str(directory), self.gpu, pinned, piece_nbytes=4096, num_pieces=2, views_on_device=home == "disk"
                )
                patch.setattr("chunkc.runtime.storage.open_compute.CpuTier", lambda: QueuedTier(self.gpu))
                patch.setattr(
                    "chunkc.runtime.storage.open_compute.open_home", lambda spec: disk if home == "disk" else pinned
                )
            chunkc.place(self.model, debug=debug)
        self.session = session_of(self.model)
        self.tier: Any = self.session.store.tier
        if isinstance(self.tier, QueuedTier):
            self.tier.store = self.session.store
            if home == "mixed":
                self.session.store.arena.state_home = disk
        self.compiled = segmented(self.model, budget_nbytes, debug=debug)
        self.optimizer = adamw(self.model.parameters())
        self.train(0)
        self.tensors = [t for p in self.model.parameters() for t in (p.detach(), p.grad)]
        self.tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        self.start = [t.clone() for t in self.tensors]

    def train(self, seed: int) -> Any:
        """Everything that a step leaves, as arrays."""
        loss = self.compiled(**CASE.batch(seed))
        loss.backward()
        grads = gradients(self.model)
        if self.norms is not None:
            self.norms.append(array(self.optimizer.grad_norm()))
        self.optimizer.step()
        after = weights(self.model)
        states = {
            f"{index}.{kind}": array(tensor)
            for index, state in enumerate(self.optimizer.state.values())
            for kind, tensor in state.items()
        }
        with torch.no_grad():
            later = self.compiled(**CASE.batch(seed + 1))
        return array(loss), grads, after, states, array(later)

    def step(self) -> Any:
        self.session.store.release_slots()
        self.settle()
        saved = iter(self.tensors)
        for p in self.model.parameters():
            next(saved)
            p.grad = next(saved)
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.start):
                tensor.copy_(value)
        result = self.train(1)
        self.settle()
        return result

    def settle(self) -> None:
        if isinstance(self.tier, QueuedTier):
            self.tier.settle()

    def step_without(self, edge: str, seed: int) -> Any:
        self.gpu.reseed(seed)
        self.tier.left_out = frozenset({edge})
        try:
            return self.step()
        finally:
            self.tier.left_out = frozenset()


def enqueue_updates(patch: pytest.MonkeyPatch) -> None:
    """The optimizer's kernels are Python here: they must not run ahead with the host."""
    run = PreparedUpdate.run

    def enqueuing(step: PreparedUpdate, updates: Mapping[int, TileUpdate]) -> None:
        enqueue = step.session.store.tier.enqueue
        run(step, {i: functools.partial(enqueue, u) for i, u in updates.items()})

    patch.setattr(PreparedUpdate, "run", enqueuing)


@pytest.fixture(autouse=True)
def updates_are_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue_updates(monkeypatch)


@pytest.fixture(scope="module")
def expected() -> Any:
    subject = Subject("cpu", Path(), debug=False)
    assert isinstance(subject.tier, CpuTier)
    return subject.step()


SUBJECTS = [
    pytest.param("pinned", True, id="pinned-debug"),
    pytest.param("pinned", False, id="pinned"),
    pytest.param("mixed", False, id="states-on-disk"),
    pytest.param("mixed", True, id="states-on-disk-debug", marks=pytest.mark.slow),
    pytest.param("disk", False, id="disk", marks=pytest.mark.slow),
    pytest.param("disk", True, id="disk-debug", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Subject]:
    @functools.cache
    def get(home: str, debug: bool) -> Subject:
        with pytest.MonkeyPatch.context() as patch:
            enqueue_updates(patch)
            return Subject(home, tmp_path_factory.mktemp("home"), debug)

    return get


Subjects = Callable[[str, bool], Subject]


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(100, 150), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("home", "debug"), SUBJECTS)
def test_whatever_is_late_the_bits_are_the_same(
    subjects: Subjects, expected: Any, home: str, debug: bool, seeds: range
) -> None:
    subject = subjects(home, debug)
    assert isinstance(subject.tier, CudaTier)
    for seed in seeds:
        subject.gpu.reseed(seed)
        assert not differences(subject.step(), expected), f"seed {seed}"
    assert subject.tier.num_reused > 40


def norms_of(subject: Subject, seeds: Iterable[int]) -> Iterator[Any]:
    """The norms of gradients in a step, of sums that were taken in slots."""
    subject.norms = []
    try:
        subject.step()
        for seed in seeds:
            subject.gpu.reseed(seed)
            subject.step()
            yield subject.norms[-1]
    finally:
        subject.norms = None


def test_norms_are_those_of_gradients_as_computation_leaves_them(
    subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = next(norms_of(Subject("cpu", Path(), debug=False), [0]))
    subject, take = subjects("pinned", True), GradientSums.take
    read_nbytes = subject.session.store.sums.read_nbytes
    assert all(norm == expected for norm in norms_of(subject, range(3)))
    assert subject.session.store.sums.read_nbytes - read_nbytes == 6 * 64 * 64 * 4  # of the first step
    monkeypatch.setattr(GradientSums, "take", lambda sums, group, slot, own, _: take(sums, group, slot, own, CpuTier()))
    assert any(norm != expected for norm in norms_of(subject, range(NUM_SEEDS))), "they need not wait for it"


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("home", "debug"), SUBJECTS)
def test_every_edge_matters(subjects: Subjects, expected: Any, home: str, debug: bool, edge: str) -> None:
    if edge == "launch before hold" and home == "pinned":
        pytest.skip("no thread launches these copies")
    subject = subjects(home, debug)
    assert any(differences(subject.step_without(edge, seed), expected) for seed in range(NUM_SEEDS))
    assert not differences(subject.step(), expected)  # what was broken left nothing behind
