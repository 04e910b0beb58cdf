"""A run that is killed again and again, in processes that are forked from one that has imported everything.

    python killed_runs.py calls FOLDER           # before each system call of saving
    python killed_runs.py moments FOLDER 100     # a hundred times, at random moments

Each process goes on from the latest checkpoint and writes the bits of every loss into a file. Prints what came out of
a run that was never killed, and of the one that was, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import chunkc

NUM_STEPS_OF_CALLS = 4
CALLS = ("open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir")


def train(folder: Path, log: Path, last_step: int, *, compiles: bool, after: Callable[[], None] | None = None) -> None:
    """Go on until `last_step` is done, with a checkpoint at every second step; log each loss, and the weights at last.

    `after` is called when the first checkpoint is loaded and everything is compiled.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 64 if compiles else 8
    model: Any = nn.Sequential(nn.Linear(width, 2 * width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(2 * width, width))
    run = model
    if compiles:
        options = {"memory_budget": 600_000, "codegen": "eager", "whole_graph": "never", "chunk_size": 65536}
        run = torch.compile(model, backend="chunkc", options=options)
        optimizer: Any = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with chunkc.Checkpoint(folder, model=run, optimizer=optimizer, keep=2) as ck:
        step = ck.load_latest() or 0
        while step < last_step:
            loss = run(torch.randn(8, width)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            note(fd, f"{step} {struct.pack('<f', loss.item()).hex()}\n")
            if step % 2 == 0:
                ck.save(step)
            if after is not None:
                after()
                after = None
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    note(fd, f"{last_step} weights {hashlib.sha256(weights).hexdigest()}\n")


def note(fd: int, line: str) -> None:
    REAL["write"](fd, line.encode())


def num_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")


REAL = {name: getattr(os, name) for name in CALLS}


def forked(run: Callable[[], None]) -> int:
    """The id of a child that runs this and exits with 0, or with 1."""
    child = os.fork()
    if child:
        return child
    try:
        run()
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(1)


def ended(child: int) -> int:
    """How a child ended: 0, 1, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(log: Path) -> dict[str, Any]:
    """The set of what was said of each step: one thing, if nothing was resumed wrongly."""
    found: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        step, said = line.split(" ", 1)
        if said not in found.setdefault(step, []):
            found[step].append(said)
    return found


def kill_at(number: int) -> None:
    """From now on this process is killed before its call of a number: after a call, files are as before the next."""
    seen = 0

    def killing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            return REAL[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, killing(name))


def at_calls(folder: Path) -> int:
    """Kill a run at every call, one after the other, and let it end each time; how many kills there were."""
    number = 0
    while True:
        place, log = folder / f"run{number}", folder / "killed.log"

        def killed(place: Path = place, log: Path = log, number: int = number) -> None:
            kill_at(number)
            train(place, log, NUM_STEPS_OF_CALLS, compiles=False)

        code = ended(forked(killed))
        if code == 0:
            return number
        assert code == -signal.SIGKILL, code
        assert ended(forked(lambda place=place, log=log: train(place, log, NUM_STEPS_OF_CALLS, compiles=False))) == 0
        number += 1


def at_moments(folder: Path, num_kills: int) -> int:
    """Kill a run at random moments; returns its last step."""
    rng = random.Random(0)
    place, log = folder / "run", folder / "killed.log"
    for number in range(num_kills):
        reader, writer = os.pipe()
        child = forked(
            lambda writer=writer: train(place, log, 10**6, compiles=True, after=lambda: note(writer, "begun"))
        )
        os.close(writer)
        if number % 5:
            assert os.read(reader, 5) == b"begun", "it ended by itself"
            enough = num_lines(log) + rng.randrange(6)  # of steps: by time alone, a slow machine would hardly go on
            while num_lines(log) < enough:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.1))
        else:
            time.sleep(rng.uniform(0, 1.5))  # while it loads or compiles, maybe
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
    last = max([int(step) for step in outcome(log)], default=0) + 3
    assert ended(forked(lambda: train(place, log, last, compiles=True))) == 0
    return last


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("error", UserWarning)  # a killed run leaves nothing damaged
    if kind == "calls":
        num_kills, last = at_calls(folder), NUM_STEPS_OF_CALLS
    else:
        num_kills = int(sys.argv[3])
        last = at_moments(folder, num_kills)
    never = folder / "never.log"
    assert ended(forked(lambda: train(folder / "never", never, last, compiles=kind != "calls"))) == 0
    killed = outcome(folder / "killed.log")
    print(json.dumps({"num_kills": num_kills, "last": last, "killed": killed, "never": outcome(never)}))


if __name__ == "__main__":
    main()
