"""Measure the share of planning in a cold compilation: a deep GPT's first step, under half of the memory that it needs.

    python bench/plans/planning_share.py [--layers 90] [--small]

Inductor's cache is empty, values that the forward saves may be offloaded or recomputed (`activations="auto"`), and the
backward updates (`overlap="backward"`). Prints the seconds of the first step, which compiles, and those in it in which
the policy decides and plans are made, put into graphs and verified. Time to compile grows with the number of layers,
not with their width. A wide model's plans take longer: `planning.py` says how long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from models.gpt import GPT, GPTConfig
from torch._inductor.utils import fresh_cache

import chunkc
from chunkc import compile as compilation
from chunkc.optim import step as optimizer_step
from chunkc.optim.update_mode import BACKWARD
from chunkc.session import compiled_step as graph

PLANNING = (
    (compilation, "decide"),
    (graph, "decide"),
    (graph, "step_plan"),
    (optimizer_step, "decide"),
    (optimizer_step, "update_plan"),
)
"""Where a step asks for decisions and plans; none of these calls another."""


@contextmanager
def timed_planning() -> Iterator[list[float]]:
    """Inside, the seconds of each decision and each plan are added to the list."""
    found: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                found.append(time.perf_counter() - begun_s)

        return call

    with ExitStack() as stack:
        for module, name in PLANNING:
            stack.enter_context(mock.patch.object(module, name, timed(getattr(module, name))))
        yield found


def first_step(config: GPTConfig, batch_size: int) -> tuple[float, float]:
    """Seconds of a model's first step, and of the planning in it."""
    torch.manual_seed(0)
    model = GPT(config)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    options = {"memory_budget": 2 * nbytes, "activations": "auto"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, overlap=BACKWARD)
    batch = torch.randint(config.vocabulary, (2, batch_size, config.length))
    with fresh_cache(), timed_planning() as planning_s:
        begun_s = time.perf_counter()
        compiled(*batch).backward()
        optimizer.step()
        return time.perf_counter() - begun_s, sum(planning_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=90, metavar="N")
    parser.add_argument("--small", action="store_true", help="two small layers")
    options = parser.parse_args(arguments)
    if options.small:
        config, batch_size = GPTConfig(num_layers=2, width=64, num_heads=2, length=32), 2
    else:
        config, batch_size = GPTConfig(num_layers=options.layers, width=256, num_heads=4, length=128), 6
    all_s, planning_s = first_step(config, batch_size)
    layers = f"{config.num_layers} layers"
    print(f"{layers}: first step {all_s:.1f} s, of it planning {planning_s:.2f} s ({planning_s / all_s:.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
