"""Save a training run's state on disk while the run goes on, and resume it bit by bit: `chunkc.Checkpoint`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chunkc.checkpoint.folder import Complete, Folder
from chunkc.checkpoint.placement import FileTensors, FileToWrite, files_of, files_of_other_rank, of_rank
from chunkc.checkpoint.restoring import Saved, prepared, read
from chunkc.checkpoint.snapshot import STATE_JSON, Parts, named, ranks_that_save, snapshot
from chunkc.checkpoint.sources import Source
from chunkc.checkpoint.writing import Writing
from chunkc.distributed.agreement import together
from chunkc.ir.errors import CheckpointError, OptionsError
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.runtime.device.updates import finish_all
from chunkc.runtime.distributed.transport import Transport
from chunkc.session.pending_readers import await_readers
from chunkc.session.session import sessions_of


class Checkpoint:
    """The checkpoints of one training run in a directory.

    A checkpoint has the model's parameters and buffers, the optimizer's states and parameter groups, the `state_dict()`
    of the other objects, and the states of the random generators of torch, Python and NumPy. It has no gradients: save
    after `optimizer.step()`.

    Saving is asynchronous. Parameters and optimizer states, which only an optimizer's step changes, are written during
    the next forward and backward, and the next step waits for that. All else is written before `save` returns. Nothing
    is copied first, since memory is scarce. (CheckFreq, Mohan et al., FAST 2021, pipelines a copy and its persistence
    in the same way.) A checkpoint gets its name when all of it is on the medium, so the latest is always complete.

    If ranks train the model (`chunkc.distribute`), all of them call `save` and `load_latest`, with one directory on a
    shared file system. Each writes its own shards. An error of one rank is raised on all, and all load the same
    checkpoint. The number of ranks may change between saving and loading.

    Args:
        directory: of this run alone; made by the first `save`.
        model: an `nn.Module`, compiled or not, or a dict of names to several.
        optimizer: of chunkc or `torch.optim`, or a dict of names to several.
        scheduler, scaler, dataloader: an object with `state_dict` and `load_state_dict`, or a dict of names to several.
            Wrap a `torch.utils.data.DataLoader` in `chunkc.checkpoint.Batches`.
        keep: number of checkpoints to keep.

    Raises:
        OptionsError: an argument has another type or value.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        keep: int = 3,
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise OptionsError(f"keep is {keep!r}; allowed: a whole number of at least 1")
        others = {"scheduler": scheduler, "scaler": scaler, "dataloader": dataloader}
        self._parts = Parts(
            named("model", model, nn.Module),
            named("optimizer", optimizer, Optimizer),
            {kind: named(kind, given) for kind, given in others.items()},
        )
        if not self._parts.models:
            raise OptionsError("model is None; a checkpoint is of a model")
        self._folder = Folder(directory)
        self._keep = keep
        self._writing: Writing | None = None
        self._damaged: set[Complete] = set()
        for of_torch in self._parts.optimizers.values():
            if not isinstance(of_torch, ChunkedOptimizer):
                of_torch.register_step_pre_hook(_wait_before_step)

    @property
    def directory(self) -> Path:
        """Absolute path of the directory of the checkpoints."""
        return self._folder.path

    def save(self, step: int) -> None:
        """Begin to save a checkpoint, once the previous one is complete.

        Args:
            step: number of steps done; `load_latest` will return it.

        Raises:
            CheckpointError: the previous checkpoint could not be saved; another process saves to the directory; it
                cannot be written, or has no room; or it has checkpoints of later steps that `load_latest` has not found
                damaged.
            DistributedError: a rank is gone, or calls something else.
            OptionsError: `step` is not a whole number from 0 to 10**12 - 1.
            UnsupportedError: something cannot be saved; the message names it.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
            raise OptionsError(f"step is {step!r}; allowed: a whole number from 0 to 10**12 - 1")
        transport, phase = ranks_that_save(self._parts), f"Checkpoint.save({step})"
        rank = 0 if transport is None else transport.rank
        sources: list[Source] = []
        files: list[FileToWrite] = []

        def gather() -> int:
            self.wait()
            if rank == 0:
                self._check_later(step)
            self._await_changes()
            found, document = snapshot(self._parts)
            sources.extend(found)
            files.append(FileToWrite(of_rank(rank, STATE_JSON), json.dumps(document, separators=(",", ":")).encode()))
            return files[0].nbytes + sum(source.nbytes for source in sources)

        def begin() -> FileTensors:
            if rank != 0:
                return {}
            ordered, tensors = files_of(sources)
            files.extend(ordered)
            self._folder.begin(step, sum(nbytes))
            return tensors

        def join() -> None:
            if rank != 0:
                self._folder.join(step)
                files.extend(files_of_other_rank(rank, sources, tensors))

        # In this order: rank 0 needs the bytes of all ranks, and the others its directory and places of tensors.
        nbytes = together(transport, phase, gather, CheckpointError)
        tensors = together(transport, phase, begin, CheckpointError)[0]
        together(transport, phase, join, CheckpointError)
        writing = Writing(
            self._folder.writing(step), step, files, lambda written: self._complete(written, step), transport
        )
        sources.clear()  # so that only `writing` holds the tensors
        self._writing = writing
        writing.start(self._parts.parameters())

    def wait(self) -> None:
        """Block until the checkpoint that `save` began is complete.

        Raises:
            CheckpointError: it could not be saved: nothing is left of it, and earlier checkpoints are unchanged. Or it
                is complete, but older ones could not be removed. The message has the reason.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.finish()
            except KeyboardInterrupt:
                self._writing = writing
                raise

    def load_latest(self) -> int | None:
        """Load the latest intact checkpoint, and return its step; None if there is no checkpoint.

        All of a checkpoint is read and compared with its checksums before anything changes. Damaged checkpoints are
        skipped with a warning. If the model does not fit the device, call `chunkc.place` first: then parameters and
        states are loaded home one by one.

        Raises:
            CheckpointError: all checkpoints are damaged, or the latest intact one is of another model or optimizer;
                nothing has changed.
            DistributedError: a rank is gone, or calls something else.
            HomeError: an optimizer's states have no room at home; models have been loaded.
            OptionsError: states do not fit the optimizer; nothing has changed.
        """
        transport, phase = self._parts.transport(), "Checkpoint.load_latest()"

        def complete() -> list[Complete]:
            self.wait()
            return self._folder.complete()

        problems: list[str] = []
        for found in reversed(together(transport, phase, complete, CheckpointError)[0]):
            saved, problem = self._read(found, transport, phase)
            if saved is None:
                if found not in together(transport, phase, self._folder.complete, CheckpointError)[0]:
                    continue  # a process that saves to the directory has removed it meanwhile
                problems.append(f"{found.name} is damaged and left out: {problem}")
                self._damaged.add(found)
                warnings.warn(f"the checkpoint {self.directory / problems[-1]}", stacklevel=2)
                continue
            self._load(saved, found, transport, phase)
            return found.step
        if problems:
            raise CheckpointError(f"no checkpoint in {self.directory} is whole:\n  " + "\n  ".join(problems))
        return None

    def _read(self, found: Complete, transport: Transport | None, phase: str) -> tuple[Saved | None, str]:
        """Read a checkpoint on all ranks; return it, or None and the first rank's problem if any rank found damage."""
        saved: list[Saved] = []
        rank, num_ranks = (0, 1) if transport is None else (transport.rank, transport.num_ranks)

        def attempt() -> str | None:
            try:
                folder_fd = self._folder.open(found)
                try:
                    saved.append(read(folder_fd, found.step, rank, num_ranks, self._parts.ranks_of_a_layer()))
                finally:
                    os.close(folder_fd)
            except CheckpointError as error:
                return str(error)
            return None

        problems = [problem for problem in together(transport, phase, attempt, CheckpointError) if problem is not None]
        return (None, problems[0]) if problems else (saved[0], "")

    def _load(self, saved: Saved, found: Complete, transport: Transport | None, phase: str) -> None:
        """Load a checkpoint after every rank has checked that it fits.

        Raises:
            CheckpointError: it does not fit on some rank.
        """
        checked: list[Callable[[], None]] = []

        def check() -> None:
            self._await_changes()
            await_readers(self._parts.parameters())  # another Checkpoint may still be saving them
            checked.append(prepared(saved, self._parts))

        try:
            together(transport, phase, check, CheckpointError)
            together(transport, phase, lambda: checked.pop()(), CheckpointError)
        except CheckpointError as error:
            raise CheckpointError(f"{self.directory / found.name} cannot be loaded: {error}") from error

    def close(self) -> None:
        """Wait as `wait` does, and unlock the directory, which the object's end does too.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._folder.unlock()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _await_changes(self) -> None:
        """Wait for updates and GPU work under way, and make masters follow parameters that were written to."""
        parameters = self._parts.parameters()
        finish_all(session.store.updates for session in sessions_of(parameters))
        for optimizer in self._parts.optimizers.values():
            if isinstance(optimizer, ChunkedOptimizer):
                optimizer.synchronize()
                optimizer.pending_steps.resolve(wait=True)
                optimizer.follow_written()
        for device in {parameter.device for parameter in parameters if parameter.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _check_later(self, step: int) -> None:
        """Lock the directory, and refuse to save a step if there are checkpoints of later steps, known damage aside.

        Raises:
            CheckpointError: there are, or another object or process saves to the directory.
        """
        self._folder.lock()
        later = [found for found in self._folder.complete() if found.step > step and found not in self._damaged]
        if later:
            raise CheckpointError(
                f"{self.directory} has checkpoints of later steps than {step}, up to {later[-1].name}; load_latest() "
                "first, or use another directory"
            )

    def _complete(self, written: Path, step: int) -> str | None:
        """Commit a checkpoint, and remove old ones, on rank 0's writing thread; return why these cannot be removed.

        Raises:
            OSError: the checkpoint cannot be committed.
        """
        done = self._folder.commit(written, step)
        try:
            self._folder.prune(self._keep, self._damaged - {done})
        except OSError as error:
            return (
                f"{done.name} is complete, but older checkpoints cannot be removed from {self.directory}: "
                f"{error.strerror}"
            )
        return None


def _wait_before_step(optimizer: Optimizer, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Wait until no checkpoint reads the optimizer's parameters and states: a pre-hook of `torch.optim` steps."""
    await_readers(parameter for group in optimizer.param_groups for parameter in group["params"])
