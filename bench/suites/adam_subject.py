"""Run one candidate of the suite `adam` in a process of its own, by commands.

    python adam_subject.py '{"candidate": ...}'        # the fields of AdamSpec

    time N      times N passes over a working set that is made for them and given up after: seconds of each
    check       the largest difference of parameters from the reference after a few updates of a few elements

The working set exists only while it is timed, so that many candidates can wait at once; its pages are
other ones in every turn, which spreads what their place costs over the samples.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.subject_process import Reply, Unavailable, only_replies

from suites import adam_updates
from suites.adam_spec import BF16, AdamSpec

NUM_WARM_PASSES = 2
NUM_CHECK_STEPS = 3
NUM_CHECK_ELEMENTS = 1 << 16


def serve(spec: AdamSpec, commands: Iterable[str], reply: Reply) -> None:
    """Obey `commands`, a line each, until there are none left.

    Raises:
        ValueError: an unknown command.
    """
    reply({"num_threads": torch.get_num_threads()})
    for line in commands:
        try:
            match line.split():
                case ["time", count]:
                    reply(_time(spec, int(count)))
                case ["check"]:
                    reply({"difference": _difference(spec)})
                case _:
                    raise ValueError(f"unknown command {line!r}")
        except (Unavailable, ImportError) as error:
            reply({"unavailable": str(error)})
        except torch.OutOfMemoryError as error:
            reply({"out_of_memory": str(error).splitlines()[0]})


def _time(spec: AdamSpec, num_passes: int) -> dict[str, Any]:
    update = adam_updates.make(spec)
    for _ in range(NUM_WARM_PASSES):
        update.run()
    clock = _cuda_s if spec.device == "cuda" else _cpu_s
    return {"times_s": [clock(update.run) for _ in range(num_passes)], "nbytes": update.nbytes}


def _cpu_s(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _cuda_s(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _difference(spec: AdamSpec) -> float | None:
    """Largest difference in fp32 parameters or masters; None for what updates nothing."""
    small = replace(spec, num_elements=NUM_CHECK_ELEMENTS)
    update = adam_updates.make(small)
    if update.result is None:
        return None
    for _ in range(NUM_CHECK_STEPS):
        update.run()
    reference = adam_updates.reference_bf16 if spec.precision == BF16 else adam_updates.reference
    expected = reference(NUM_CHECK_ELEMENTS, NUM_CHECK_STEPS)
    return (update.result().float().cpu() - expected).abs().max().item()


def _main() -> None:
    serve(AdamSpec(**json.loads(sys.argv[1])), sys.stdin, only_replies())


if __name__ == "__main__":
    _main()
