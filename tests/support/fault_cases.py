"""A stack of layers with its home on a disk."""

from __future__ import annotations

import functools

import numpy as np
from harness import HUGE, TINY, Optimizer, adamw, array, compile_case, refuse, weights
from plain_modules import Stack
from torch import nn
from zoo import Case, floats

CASE = Case("stack", Stack, lambda seed: {"x": floats(seed, (8, 64))})


@functools.cache
def small_budget() -> int:
    """Return a budget slightly above the minimum, in bytes."""
    return int(1.05 * refuse(CASE, memory_budget=TINY, home="disk").minimum_nbytes)


def train_steps(compiled: nn.Module, optimizer: Optimizer, steps: range) -> list[np.ndarray]:
    """Run ordinary training steps; return the losses."""
    losses = []
    for step in steps:
        loss = compiled(**CASE.batch(step))
        loss.backward()
        losses.append(array(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def expected_losses(num_steps: int) -> list[np.ndarray]:
    """Return the losses of an undisturbed training."""
    return undisturbed()[0][:num_steps]


@functools.cache
def undisturbed(num_steps: int = 3) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return losses, and weights at the end, of the first steps."""
    model, compiled = compile_case(CASE, memory_budget=HUGE, whole_graph="never")
    return train_steps(compiled, adamw(model.parameters()), range(num_steps)), weights(model)
