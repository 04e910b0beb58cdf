"""Runs Python programs, each in a process forked from this one, which has imported everything they have in common.

Reads requests from its standard input, a line of JSON each, and answers with two lines: the process that runs the
program, in a session of its own; and the status that it ended with, with the processor seconds that it took. Ends with
its standard input. See `forked`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed.checkpoint
import torch.distributed.tensor.parallel
from torch._inductor import config as inductor_config

import chunkc
import chunkc.backend  # which Dynamo imports when a model is compiled

CLIENT = Path(__file__).with_name("fork_client.py")


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


def _run(
    arguments: list[str], folder: str, environment: dict[str, str], outputs: list[str], imports: list[str] | None
) -> NoReturn:
    """Do in a child what `python ARGUMENTS` does.

    Args:
        outputs: files for what it prints, and for its errors.
        imports: None, or modules to import first; `sys.executable` then forks, too.
    """
    with _to_the_end():
        os.setsid()
        for number, path in enumerate([os.devnull, *outputs]):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        if imports is None:
            _do(arguments, folder, environment)
        else:
            for name in imports:
                importlib.import_module(name)
            with _forking_python():
                _do(arguments, folder, environment)


@contextlib.contextmanager
def _to_the_end() -> Iterator[None]:
    """End this process after the block, with the status that Python would end with."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _do(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Do what `python ARGUMENTS` does."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0:0] = [folder]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0:0] = [str(Path(folder, arguments[0]).parent)]
        runpy.run_path(arguments[0], run_name="__main__")


@contextlib.contextmanager
def _forking_python() -> Iterator[None]:
    """Have `sys.executable` run programs in forks of this process as it is now."""
    with tempfile.TemporaryDirectory() as found, socket.socket(socket.AF_UNIX) as listener:
        path, python = f"{found}/socket", Path(found, "python")
        words = [sys.executable, "-I", "-S", str(CLIENT), path, sys.executable]
        python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        python.chmod(0o700)
        listener.bind(path)
        listener.listen(64)
        sys.executable = str(python)
        gc.freeze()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            _serve(listener, reader)
        os.close(reader)
        try:
            yield
        finally:
            os.close(writer)
            os.waitpid(child, 0)


def _serve(listener: socket.socket, parent: int) -> NoReturn:
    """Fork a child for each program that a client asks for, until `parent` is closed."""
    clients: dict[int, socket.socket] = {}
    woken, wakes = os.pipe()  # a child that ends writes to it
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    ready = selectors.DefaultSelector()
    for descriptor in (listener.fileno(), parent, woken):
        ready.register(descriptor, selectors.EVENT_READ)
    while True:
        for descriptor in [key.fd for key, _ in ready.select()]:
            if descriptor == parent:
                for child in clients:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                os._exit(0)
            elif descriptor == listener.fileno():
                client, _ = listener.accept()
                child = _forked_for(client)
                clients[child] = client
                ready.register(client, selectors.EVENT_READ, child)
            elif descriptor == woken:
                os.read(woken, 64)
            elif numbers := os.read(descriptor, 1):
                os.kill(ready.get_key(descriptor).data, numbers[0])
            else:  # the client was killed
                os.killpg(ready.unregister(descriptor).data, signal.SIGKILL)
        while clients and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = clients.pop(ended[0])
            with contextlib.suppress(KeyError):
                ready.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
            client.close()


def _forked_for(client: socket.socket) -> int:
    """Return the child that runs the program of a client's request."""
    _, descriptors, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile() as lines:
        request = json.loads(lines.readline())
    child = os.fork()
    if child == 0:
        with _to_the_end():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no longer than the process that serves
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            _do(**request)
    for descriptor in descriptors:
        os.close(descriptor)
    return child


if __name__ == "__main__":
    main()
