"""Run the command `chunkc`: `explain`, `diff` and `calibrate`.

Exit codes: 0: it fits, or the command did its work; 3: it does not fit; 2: bad input, with one line that says why; 1: a
fault in chunkc itself, with one line that says where; 130: interrupted; 141: the reader of the output left. Names may
have any characters: all output passes `chunkc.ir.text`, which keeps control characters from the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch.distributed.device_mesh import DeviceMesh

from chunkc.cli.arguments import BAD_INPUT, MASTER_WEIGHTS, WHOLE, build_parser
from chunkc.cli.hardware_table import LIST, hardware_table
from chunkc.cli.terminal import answering, open_streams, progress, say
from chunkc.explaining.error_attribution import raised_in
from chunkc.explaining.explain import Show, budget_of, explain, minimum_budget
from chunkc.explaining.formats import diff, read_explanation, write
from chunkc.explaining.largest import largest
from chunkc.explaining.layers import fake_mesh
from chunkc.explaining.optimizer_choice import OptimizerChoice
from chunkc.explaining.over_ranks import with_ranks
from chunkc.explaining.scaling import Scaling
from chunkc.explaining.targets import DTYPES, ModelOptions, Subject, Target, built_in, errors_of, from_file, from_module
from chunkc.ir.errors import BudgetError, ChunkcError, OptionsError, UnsupportedError
from chunkc.ir.explanation import Explanation
from chunkc.ir.hardware import Hardware
from chunkc.ir.shards import ZeroStage
from chunkc.ir.text import message_of, one_line, printable
from chunkc.ir.units import format_nbytes
from chunkc.machines.calibrate import calibrate
from chunkc.machines.operators import measure_operators, operators_path, save_operators
from chunkc.machines.presets import default_hardware_path, load_hardware, save_hardware
from chunkc.options import parse_options, parse_size
from chunkc.passes.memory.scratch.measured import record_calls
from chunkc.passes.memory.scratch.operators import table_of_exceptions

FITS, OWN_FAULT, DOES_NOT_FIT, INTERRUPTED = 0, 1, 3, 130
_LOGS = "TORCH_LOGS"
_TRACEBACK = f'; {_LOGS}="+chunkc" shows the traceback'

READER_LEFT = 128 + 13
"""Exit code that shells give a program that SIGPIPE ended."""


def _size(text: str) -> int | str:
    """Convert digits to bytes; leave any other text to `parse_options`."""
    return int(text) if WHOLE.fullmatch(text.strip()) else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    open_streams()
    options = build_parser().parse_args(arguments)
    try:
        return _run(options)
    except ChunkcError as error:
        say(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # in `chunkc explain MODEL | head`, when head exits
        return READER_LEFT
    except Exception as error:
        message = message_of(error)
        what = f"{type(error).__name__}{f': {message}' if message else ''}{raised_in(error)}"
        say(f"a fault in chunkc itself, not in what it was given: {what}{_TRACEBACK}")
        if _LOGS in os.environ:
            traceback.print_exception(error)
        return OWN_FAULT


def _run(options: argparse.Namespace) -> int:
    if options.command == "explain":
        if options.exceptions:
            with answering():
                print(table_of_exceptions())
            return FITS
        if (options.hardware or "").strip().lower() == LIST:
            with answering():
                print(hardware_table())
            return FITS
        with _quiet():
            return _explain(options)
    if options.command == "diff":
        compared = diff(read_explanation(options.before), read_explanation(options.after))
        with answering():
            print(printable(compared), end="")
        return FITS
    return _calibrate(options)


def _target(options: argparse.Namespace, mesh: DeviceMesh | None) -> Target:
    wanted = ModelOptions(DTYPES.get(options.dtype), options.activation_checkpointing, mesh)
    if options.module is not None:
        if options.target is not None:
            raise OptionsError("give a MODEL or --module, not both")
        return from_module(options.module, options.config, wanted)
    if options.config is not None:
        raise OptionsError("--config goes with --module")
    if options.target is None:
        raise OptionsError("give a MODEL, FILE.py:FACTORY or --module; see chunkc explain --help")
    if ":" in options.target or options.target.endswith(".py"):
        if ":" not in options.target:
            raise OptionsError(f"which function of {options.target}? Write {options.target}:FACTORY")
        return from_file(options.target, wanted)
    return built_in(options.target, wanted)


def _hardware(options: argparse.Namespace) -> Hardware:
    name = options.hardware
    if name is None:
        saved = default_hardware_path()
        name = str(saved) if os.path.exists(saved) else "cpu"
    hardware = load_hardware(name)
    if options.host_memory is not None:
        nbytes = parse_size(options.host_memory, "--host-memory")
        hardware = replace(hardware, host_memory_nbytes=nbytes)
        if hardware.kind == "cpu":  # a CPU computes in the host's memory
            hardware = replace(hardware, device_memory_nbytes=nbytes)
    return with_ranks(hardware, options.world_size, options.mesh)


def _explain(options: argparse.Namespace) -> int:
    hardware = _hardware(options)
    with fake_mesh(hardware) as mesh:
        return _explain_on(hardware, mesh, options)


def _explain_on(hardware: Hardware, mesh: DeviceMesh | None, options: argparse.Namespace) -> int:
    # The user's code may print; that must not mix with the answer, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        target = _target(options, mesh)
    settings = {
        "memory_budget": _size(options.memory_budget),
        "home": options.home,
        "disk_holds": options.disk_holds,
        "chunk_size": _size(options.chunk_size),
        "codegen": options.codegen,
        "activations": options.activations,
        "loss_tile_rows": options.loss_tile_rows,
        "strict": options.strict,
    }
    choice = OptimizerChoice(
        options.update_on,
        options.overlap,
        options.optimizer,
        options.moments_dtype,
        MASTER_WEIGHTS.get(options.master_weights),
        options.stochastic_rounding,
        options.momentum,
        options.undoable,
    )
    budget = budget_of(parse_options(settings), hardware)
    _check_output(options.output)
    notes: list[str] = []
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    with contextlib.redirect_stdout(sys.stderr), progress() as show:
        if options.largest is not None:
            sizes[options.largest], notes = _largest(
                options.largest, target, hardware, settings, choice, sizes, budget, show, options.zero_stage
            )
        show(f"building {target.name}")
        subject = target.build(sizes["batch_size"], sizes["seq_len"])
        with errors_of(target.name, explained=True):
            explanation = explain(
                subject.model,
                *subject.args,
                hardware=hardware,
                name=", ".join([target.name, *_given(options, sizes)]),
                why=options.why,
                show=show,
                zero_stage=options.zero_stage,
                **vars(choice),
                **settings,
                **subject.kwargs,
            )
    with answering():
        write(replace(explanation, notes=(*notes, *explanation.notes)), options.format, options.output)
    return _verdict(explanation)


def _check_output(path: Path | None) -> None:
    """Refuse an output that cannot be written, before a long explanation is made for it."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise OptionsError(f"cannot write {path}: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise OptionsError(f"cannot write {path}: it is a folder")
    try:
        path.stat()
        checked = path
    except FileNotFoundError:
        checked = path.parent
    except (OSError, ValueError) as error:  # a name that no file can have
        raise OptionsError(f"cannot write {path}: {getattr(error, 'strerror', error)}") from None
    if not os.access(checked, os.W_OK):
        raise OptionsError(f"cannot write {path}: permission denied")


def _given(options: argparse.Namespace, sizes: dict[str, int | None]) -> Iterator[str]:
    """Yield the user's choices for the model, in words."""
    for name, size in sizes.items():
        if size is not None:
            yield f"{name.replace('_', ' ')} {size}"
    if options.dtype is not None:
        yield options.dtype
    if options.activation_checkpointing:
        yield "activation checkpointing"


def _verdict(explanation: Explanation) -> int:
    return FITS if explanation.fits and explanation.host_fits else DOES_NOT_FIT


def _largest(
    what: str,
    target: Target,
    hardware: Hardware,
    settings: dict[str, Any],
    choice: OptimizerChoice,
    sizes: dict[str, int | None],
    budget_nbytes: int,
    show: Show,
    zero_stage: ZeroStage | None,
) -> tuple[int, list[str]]:
    """Return the largest size that fits, and sentences about it; size 1 if not even that fits.

    The search uses captures in which the size is a symbol. The result and the next size are then checked by captures of
    their own. If the model cannot be captured with a symbol, or the check fails, the search captures each size that it
    tries.
    """
    words = what.replace("_", " ")

    def build(size: int) -> Subject:
        all_sizes = {**sizes, what: size}
        return target.build(all_sizes["batch_size"], all_sizes["seq_len"])

    @cache
    def needs(size: int) -> int:
        show(f"trying {words} {size:,}")
        subject = build(size)
        with errors_of(f"{target.name} with {words} {size:,}", explained=True):
            return minimum_budget(
                subject.model,
                *subject.args,
                hardware=hardware,
                choice=choice,
                zero_stage=zero_stage,
                **settings,
                **subject.kwargs,
            )

    notes = []
    try:
        show(f"tracing with {words} in symbols")
        try:
            with errors_of(target.name, explained=True):
                scaling = Scaling(build, parse_options(settings), hardware, choice, zero_stage)

            def needs_at(size: int) -> int:
                show(f"trying {words} {size:,}")
                return scaling.minimum_nbytes(size) or needs(size)

            size = largest(needs_at, budget_nbytes)
            if not needs(size) <= budget_nbytes < needs(size + 1):
                raise UnsupportedError(f"captured with {words} {size:,} alone, the model takes other bytes")
        except UnsupportedError as error:
            notes.append(f"every size was traced for itself: {error}")
            size = largest(needs, budget_nbytes)
    except BudgetError as error:
        return 1, [f"not even {words} 1 fits: it needs {format_nbytes(error.minimum_nbytes)}", *notes]
    next_needs = format_nbytes(needs(size + 1))
    answer = f"{words} {size:,} is the largest that fits: {size + 1:,} needs {next_needs}"
    return size, [answer, *notes]


def _calibrate_operators(options: argparse.Namespace) -> int:
    """Measure the operators of a model's training step that have no exact rule on the CPU, and save their bytes."""
    path = operators_path()
    _check_output(path if path.parent.exists() else None)
    with contextlib.redirect_stdout(sys.stderr), progress() as show:
        target = _target(options, None)
        show(f"building {target.name}")
        subject = target.build(options.batch_size, options.seq_len)
        with errors_of(target.name, explained=True), record_calls() as calls:
            explain(subject.model, *subject.args, hardware="cpu", show=show, **subject.kwargs)
        measured, failed = measure_operators(calls, show)
    save_operators(measured, path)
    with answering():
        for name, reason in failed.items():
            print(one_line(f"not measured: {name}: {reason}"))
        print(one_line(f"measured: {len(measured)} calls of {len({call.target for call, _ in measured})} operators"))
        print(one_line(f"saved: {path}"))
    return FITS


def _calibrate(options: argparse.Namespace) -> int:
    if options.target is not None or options.module is not None:
        if options.output is not None:
            raise OptionsError("--output is for the machine's rates; measured operators are saved where training reads")
        with _quiet():
            return _calibrate_operators(options)
    _check_output(options.output)
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        hardware = calibrate(show=show)
    path = options.output or default_hardware_path()
    save_hardware(hardware, path)
    with answering():
        print(one_line(f"saved: {path}"))
    return FITS


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch's own warnings about tracing away from the answer, unless TORCH_LOGS asks for logs."""
    if _LOGS in os.environ:
        yield
        return
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
