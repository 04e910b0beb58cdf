"""Train one subject of a benchmark in a process of its own, by commands.

    python subject.py '{"model": {...}, ...}'        # the fields of SubjectSpec

Every command, a line on standard input, is answered by one line of JSON on standard output:

    step N      trains N steps: seconds and loss of each, and chunkc's counters since the start
    report      the model's memory, measured and predicted
    lift        from now on the allocator takes what it wants

The first line comes unasked, when the model is ready. Everything printed by others goes to standard error.
Where the limit is hit the answer is {"out_of_memory": ...}, where a budget is too small {"minimum_nbytes": ...}, where
the system cannot run here {"unavailable": ...}. The process ends with its input.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu import process_memory as gpu_process_memory
from measuring.subject_process import Reply, Unavailable, only_replies
from models import families

import chunkc
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.device.cuda import memory_limit
from peers import systems, tcp_traffic
from peers.specs import CHUNKC, CHUNKC_RANKS, SubjectSpec


class Trainer:
    """A system with its model and its random data: equal specs see equal batches in equal order."""

    def __init__(self, spec: SubjectSpec) -> None:
        self.spec = spec
        torch.manual_seed(spec.seed)
        self.trainee = systems.make(spec)
        self._num_steps = 0
        self._folder = tempfile.TemporaryDirectory(prefix="chunkc-bench-checkpoints-")
        self._checkpoint = chunkc.Checkpoint(
            self._folder.name, model=self.trainee.model, optimizer=self.trainee.optimizer, keep=1
        )

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless pairs (x, y), int64 [batch, length]. Nothing of them is kept: it would be measured."""
        generator = torch.Generator().manual_seed(self.spec.seed + self.spec.rank)
        while True:
            yield self._batch(generator)

    def _batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.spec.model
        shape = (2, self.spec.batch_size, model.length)
        x, y = torch.randint(families.vocabulary(model), shape, generator=generator).unbind()
        return x.clone().to(self.spec.device), y.clone().to(self.spec.device)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        """Timing of one training step: seconds of forward with backward, of the optimizer, of all; and the loss.

        A checkpoint that is due is saved in the midst of so many steps, so that none of a turn's goes on in the next.
        """
        self._wait()
        start_s = time.perf_counter()
        loss = self.trainee.forward(x, y)
        self.trainee.backward(loss)
        middle_s = time.perf_counter()
        self.trainee.update()
        updated_s = time.perf_counter()
        self._num_steps += 1
        period = self.spec.save_every
        if period and self._num_steps % period == period // 2:
            self._checkpoint.save(self._num_steps)
        self._wait()
        end_s = time.perf_counter()
        return {
            "forward_backward_s": middle_s - start_s,
            "optimizer_s": updated_s - middle_s if period else end_s - middle_s,
            "step_s": end_s - start_s,
            "loss": loss.item(),
        }

    def counters(self) -> dict[str, float]:
        """Sums since the start: bytes copied either way, seconds waited for copies. Peers: none."""
        if self.spec.system != CHUNKC:
            return {}
        report = chunkc.report(self.trainee.model)
        return {
            "to_device_nbytes": report.traffic_nbytes["to_device"],
            "to_home_nbytes": report.traffic_nbytes["to_home"],
            "wait_s": report.time_s["wait"],
            "host_s": report.time_s["host"],
            "num_instructions": report.num_instructions,
        }

    def report(self) -> dict[str, Any]:
        """Peaks in bytes; of chunkc also what its plan looks like.

        `host_nbytes` is the process's largest resident set; on a CPU it holds the compute tier too.
        """
        numbers: dict[str, Any] = {
            "measured_peak_nbytes": _device_peak_nbytes(self.spec.device),
            "host_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self.spec.device == "cuda":
            numbers["reserved_peak_nbytes"] = torch.cuda.max_memory_reserved()
            numbers["num_allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            numbers["driver_nbytes"] = gpu_process_memory.process_nbytes(os.getpid())
        elif self.spec.num_ranks > 1:
            numbers["acknowledged_nbytes"] = tcp_traffic.acknowledged_nbytes()
        if self.spec.system not in (CHUNKC, CHUNKC_RANKS):
            return numbers
        report = chunkc.report(self.trainee.model)
        return numbers | {
            "phases": phase_peaks(report.moments),
            "buffers_nbytes": sum(-(-buffer.nbytes // 512) * 512 for buffer in self.trainee.model.buffers()),
            "predicted_peak_nbytes": report.predicted_peak_nbytes,
            "minimum_budget_nbytes": report.minimum_budget_nbytes,
            "home_nbytes": report.home_nbytes,
            "with_home_nbytes": report.measured_with_home_nbytes,
            "num_moments": len(report.moments),
            "num_chunks": report.num_chunks,
            "num_resident_chunks": report.num_resident_chunks,
            "chunk_size_nbytes": report.chunk_size_nbytes,
        }

    def _wait(self) -> None:
        if self.spec.device == "cuda":
            torch.cuda.synchronize()


def phase_peaks(moments: Iterable[tuple[str, int, int | None]]) -> dict[str, tuple[int, int | None]]:
    """Phase -> (largest predicted, largest measured bytes) of (label, predicted, measured) per moment."""
    found: dict[str, tuple[int, int | None]] = {}
    for label, predicted, measured in moments:
        phase = label.partition(".")[0]
        most, seen = found.get(phase, (0, None))
        found[phase] = max(most, predicted), measured if seen is None else max(seen, measured or 0)
    return found


def serve(spec: SubjectSpec, commands: Iterable[str], reply: Reply) -> None:
    """Build what `spec` says and obey `commands`, a line each, until there are none left.

    Raises:
        ValueError: an unknown command.
    """
    if spec.is_metered and spec.device == "cpu":
        cpu_allocator.install()
    try:
        with _device_limit(spec):
            trainer = Trainer(spec)
            _reset_peak(spec.device)
            with _cpu_limit(spec):
                reply({"num_parameters": _num_parameters(trainer), "num_threads": torch.get_num_threads()})
                batches = trainer.batches()
                for line in commands:
                    reply(_obey(trainer, batches, line.split()))
    except Unavailable as error:
        reply({"unavailable": str(error)})
    except torch.OutOfMemoryError as error:
        reply({"out_of_memory": str(error).splitlines()[0]})


def _obey(trainer: Trainer, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], words: list[str]) -> dict[str, Any]:
    match words:
        case ["step", count]:
            try:
                steps = [trainer.step(*next(batches)) for _ in range(int(count))]
            except chunkc.BudgetError as error:
                return {"minimum_nbytes": error.minimum_nbytes}
            return {"steps": steps, "counters": trainer.counters()}
        case ["report"]:
            return trainer.report()
        case ["lift"]:
            _lift_limit(trainer.spec.device)
            return {}
    raise ValueError(f"unknown command {' '.join(words)!r}")


def _device_limit(spec: SubjectSpec) -> AbstractContextManager[Any]:
    """Limit a GPU's memory from the start: a model that does not fit fails while it is moved there."""
    if spec.device == "cuda":
        torch.set_float32_matmul_precision("high")
        if spec.limit_nbytes is not None:
            return memory_limit(min(spec.limit_nbytes, torch.cuda.get_device_properties(0).total_memory))
    return nullcontext()


def _cpu_limit(spec: SubjectSpec) -> AbstractContextManager[Any]:
    """Limit a CPU's memory once the model is built: until then home and compute tier are the same memory."""
    if spec.device != "cpu" or spec.limit_nbytes is None:
        return nullcontext()
    return cpu_allocator.hard_limit(spec.limit_nbytes)


def _lift_limit(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        cpu_allocator.set_limit(None)


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif cpu_allocator.is_installed():
        cpu_allocator.reset_peak()


def _device_peak_nbytes(device: str) -> int | None:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return cpu_allocator.peak_nbytes() if cpu_allocator.is_installed() else None


def _num_parameters(trainer: Trainer) -> int:
    """DeepSpeed's partitioned parameters say how large they are; others are as they look."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainer.trainee.model.parameters())


def _main() -> None:
    serve(SubjectSpec.from_json(sys.argv[1]), sys.stdin, only_replies())


if __name__ == "__main__":
    _main()
