"""Runs Python programs, each in a process forked from this one, which has imported everything they have in common.

Reads requests from its standard input, a line of JSON each, and answers with two lines: the process that runs the
program, in a session of its own; and the status that it ended with, with the processor seconds that it took. Ends with
its standard input. See `forked`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed.checkpoint
import torch.distributed.tensor.parallel
from torch._inductor import config as inductor_config

import chunkc
import chunkc.backend  # which Dynamo imports when a model is compiled


def main() -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with inductor_config.patch(compile_threads=1):
        _warm_up()
    torch.set_num_threads(num_threads)
    assert {thread.name for thread in threading.enumerate()} <= {"MainThread", "tqdm_monitor"}, "children would lack it"
    gc.collect()
    gc.freeze()  # children's collections look at nothing that has been imported
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(**json.loads(line))
        print(child, flush=True)
        _, status, usage = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, flush=True)


def _warm_up() -> None:
    """Have PyTorch import, and chunkc compile, what the first plan and the first update of any model need."""
    model = torch.nn.Linear(4, 4)
    chunkc.explain(model, torch.ones(2, 4), hardware="cpu", memory_budget="1MiB")
    torch._dynamo.reset()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chunkc.optim.AdamW(model.parameters()).step()


def _run(program: str, arguments: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> NoReturn:
    """Do in a child what `python PROGRAM ARGUMENTS` does. `outputs`: files for what it prints, and for its errors."""
    status = 1
    try:
        os.setsid()
        for number, path in enumerate([os.devnull, *outputs]):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [program, *arguments]
        sys.path[0:0] = [str(Path(program).parent)]
        runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
