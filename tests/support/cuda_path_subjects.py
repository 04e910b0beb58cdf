"""Models on a fake GPU, for the cases of `cuda_path_cases.py`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from fake_gpu import FakeGpu, QueuedTier
from harness import TINY, array, refuse, session_of, train_steps
from torch import Tensor, nn
from zoo import Case, floats

import chunkc
import chunkc.optim.on_device
import chunkc.session.session
from chunkc.runtime.storage.staging import open_arena

HUGE = 1 << 34
STEPS = 3


class Stack(nn.Module):
    """Equal layers, one chunk each, and a norm that never moves."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False, dtype=dtype) for _ in range(4))
        self.norm = nn.LayerNorm(48, dtype=dtype)
        self.register_buffer("offset", torch.ones(48, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.norm(x))) + self.offset
        return x.float().square().mean()


@functools.cache
def case(dtype: torch.dtype = torch.float32) -> Case:
    return Case("stack", lambda: Stack(dtype), lambda seed: {"x": floats(seed, (4, 48)).to(dtype)})


@contextlib.contextmanager
def on_fake_gpu(gpu: FakeGpu | None = None) -> Iterator[FakeGpu]:
    """Let sessions made inside compute on a fake GPU, with Triton's updates."""
    gpu = gpu or FakeGpu(longest_s=0.001, views_pageable=True)
    former, by_triton = chunkc.session.session.open_compute, chunkc.optim.on_device.computes_by_triton
    chunkc.session.session.open_compute = lambda device, *where: (QueuedTier(gpu), open_arena(where[0], gpu, where[1]))  # type: ignore[assignment,return-value]
    chunkc.optim.on_device.computes_by_triton = lambda device: True
    try:
        yield gpu
    finally:
        chunkc.session.session.open_compute, chunkc.optim.on_device.computes_by_triton = former, by_triton


@functools.cache
def budget(of: Case, percent: int) -> int:
    """Return a roomy budget; for 0 percent the smallest that works, with room to overlap."""
    return refuse(of, memory_budget=TINY).minimum_nbytes + 4 * 48 * 48 * 4 if not percent else HUGE


class Subject:
    """A model placed and compiled, on whatever sessions compute on now."""

    def __init__(self, of: Case, budget_nbytes: int, codegen: str = "eager", **place: Any) -> None:
        torch._dynamo.reset()
        self.case, self.model = of, of.build()
        chunkc.place(self.model, **place)
        self.session: Any = session_of(self.model)
        self.tier = self.session.store.tier
        if isinstance(self.tier, QueuedTier):
            self.tier.store = self.session.store
        options = {"memory_budget": budget_nbytes, "whole_graph": "never", "codegen": codegen, "activations": "keep"}
        self.compiled = torch.compile(self.model, backend="chunkc", options=options)

    def train(self, optimizer: Any, steps: int = STEPS) -> list[Any]:
        results = train_steps(self.case, self.compiled, optimizer, range(steps))
        chunkc.synchronize(self.model)
        self.settle()
        return [*results, *(array(p) for p in self.model.parameters())]

    def settle(self) -> None:
        if isinstance(self.tier, QueuedTier):
            self.tier.settle()


def adamw(subject: Subject, update_on: str = "device", **options: Any) -> Any:
    return chunkc.optim.AdamW(subject.model.parameters(), lr=1e-2, weight_decay=0.1, update_on=update_on, **options)


@functools.cache
def on_gpu(of: Case, percent: int, update_on: str = "device") -> list[Any]:
    """Train on a fake GPU, once for all cases that compare with it: losses and weights."""
    with on_fake_gpu():
        subject = Subject(of, budget(of, percent))
        if not percent:
            assert not subject.session.store.resident
        return subject.train(adamw(subject, update_on))
