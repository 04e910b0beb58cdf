"""A small model with late updates and copies, for the tests of `overlap`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import optim_models
import pytest
import torch
from harness import TINY, array, compile_case, refuse, session_of
from plain_modules import Stack
from torch import Tensor, nn
from zoo import Case, floats

import chunkc
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.session import Session


def case(dtype: torch.dtype = torch.float32) -> Case:
    return Case("stack", lambda: Stack(dtype=dtype), lambda seed: {"x": floats(seed, (4, 64)).to(dtype)})


class Late:
    """Seconds by which jobs come late: drawn at random from a seed, or the same for all."""

    def __init__(self, seed: int | None = None, fixed_s: float = 0.0) -> None:
        self.random, self.fixed_s = random.Random(seed), fixed_s
        self.seed = seed

    def __call__(self) -> float:
        if self.seed is None or not self.fixed_s:
            return self.fixed_s
        return self.random.uniform(0.0, self.fixed_s) if self.random.random() < 0.5 else 0.0


class Trained:
    """A compiled model and its optimizer, in an ordinary loop."""

    case: Case
    model: nn.Module
    compiled: nn.Module
    optimizer: Any

    def backward(self, batch: int) -> Tensor:
        loss = self.compiled(**self.case.batch(batch))
        loss.backward()
        return loss

    def step(self, batch: int) -> Any:
        found = array(self.backward(batch))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def state(self) -> list[Any]:
        """Return parameters and states, when all updates are over."""
        self.optimizer.synchronize()
        return optim_models.results(self.model, self.optimizer)


class Subject(Trained):
    """A model compiled under slightly more than its minimum, each layer a chunk, with late copies and updates."""

    def __init__(
        self, overlap: str, copies: Callable[[], float], updates: Callable[[], float], of: Case | None = None
    ) -> None:
        self.case = of or case()
        nbytes = minimum_nbytes(self.case) + 1024  # masters of small parameters, where a rule keeps them whole
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("chunkc.runtime.storage.open_compute.CpuTier", lambda: CpuTier(delay=copies))
            self.model, self.compiled = compile_case(self.case, memory_budget=nbytes, whole_graph="never")
        self.session: Session = session_of(self.model)
        self.store: ChunkStore = self.session.store
        self.store.updates._stream._delay = updates
        self.optimizer = chunkc.optim.AdamW(
            self.model.parameters(), lr=1e-2, weight_decay=0.1, update_on="cpu", overlap=overlap
        )

    def train(self, steps: range, *, reading: bool) -> list[Any]:
        """Return losses and gradients, and, if `reading`, parameters right after each step."""
        results: list[Any] = []
        for step in steps:
            results.append(array(self.backward(step)))
            results += [array(p.grad) for p in self.model.parameters()]
            self.optimizer.step()
            results += [array(p) for p in self.model.parameters() if reading]
            self.optimizer.zero_grad()
        return results

    def weight_of(self, layer: int) -> Tensor:
        return self.model.get_parameter(f"layers.{layer}.weight")

    def gradient_of(self, layer: int) -> Tensor:
        """Return the gradient of a layer's weight, which has one."""
        gradient = self.weight_of(layer).grad
        assert gradient is not None
        return gradient

    @property
    def num_under_way(self) -> int:
        return len(self.store.updates._pending)


@functools.cache
def _minimum(dtype: torch.dtype) -> int:
    return refuse(case(dtype), memory_budget=TINY).minimum_nbytes


def minimum_nbytes(of: Case) -> int:
    return _minimum(next(of.build().parameters()).dtype)


def subject(overlap: str, **options: Any) -> Subject:
    return Subject(overlap, Late(), Late(), **options)


def results(made: Subject, mode: str) -> list[Any]:
    """Collect all that may be read with this mode."""
    return [*made.train(range(4), reading=mode == "backward"), *made.state()]


@functools.cache
def expected(mode: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return the results with `overlap="none"`."""
    return results(subject("none", of=case(dtype)), mode)
