"""Compares measured with predicted bytes of every ATen call that PyTorch's own operator tests make on the CPU.

PyTorch describes its operators in `op_db`, with sample inputs for each. Every sample runs here, forward and, where it
has gradients, backward, also with operands that are not contiguous; a dispatch mode sees each ATen call, measures what
it allocates inside with `chunkc.runtime.device.cpu_allocator`, and asks `chunkc.passes.memory.scratch.cpu` for the
same number.

    python bench/conformance_bytes.py runs/conformance_bytes.jsonl
    python bench/conformance_bytes.py runs/conformance_bytes.jsonl --operators tril triu --dtypes float32
    python bench/conformance_bytes.py runs/conformance_bytes.jsonl --report

Each line of the file is one operator of `op_db` in one dtype. Child processes do the work: one that dies or hangs
costs the operator that it was at, and a later run goes on with those that the file does not have. Needs the package
`expecttest`, which PyTorch's testing modules import.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chunkc.passes.memory.scratch import cpu
from chunkc.runtime.device import cpu_allocator

DTYPES = ("float32", "bfloat16", "int64", "complex64")
LOOSE_FACTOR, SLACK_NBYTES = 3, 4096
"""A prediction is loose above so many times the truth, and so many bytes."""
_TIMEOUT_S = 120
_CHILD = (sys.executable, __file__, "--child")
_MOST_KEPT = 3  # examples of each finding


@dataclass
class Finding:
    """Calls of one ATen operator, predicted wrongly in one way.

    Attributes:
        kind: "too low", "loose", "guessed" (no rule) or "raised" (the rule did).
        number: how many calls.
        examples: some of them, as text.
    """

    kind: str
    target: str
    number: int = 0
    examples: list[str] = field(default_factory=list)


class Comparison(TorchDispatchMode):
    """Measures every ATen call made under it, and compares with what is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.findings: dict[tuple[str, str], Finding] = {}

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        described = f"{describe(args)}{describe(kwargs)}"  # before the call: an operator may resize what it is given
        measured, outputs = _measure(func, args, kwargs)
        if any(type(leaf) is not Tensor for leaf in tree_leaves((args, kwargs, outputs)) if isinstance(leaf, Tensor)):
            return outputs  # of subclasses, the metadata is not the memory's
        self.num_calls += 1
        self._compare(func, args, kwargs, outputs, measured, described)
        return outputs

    def _compare(
        self,
        func: torch._ops.OpOverload,
        args: tuple,
        kwargs: dict[str, Any],
        outputs: object,
        measured: int,
        described: str,
    ) -> None:
        try:
            predicted = cpu.scratch_nbytes(func, args, kwargs, outputs, torch.get_num_threads())
        except Exception as error:
            self._find("raised", func, f"{described}: {type(error).__name__}: {error}")
            return
        if predicted < measured and not func._schema.is_mutable:
            # What an operator keeps from its first call on (a library's tables) is no scratch: the second call tells.
            measured = min(measured, _measure(func, args, kwargs)[0])
        numbers = f"{described}: measured {measured}, predicted {predicted}"
        if predicted < measured:
            self._find("too low", func, numbers)
        elif not cpu.is_known(func):
            self._find("guessed", func, numbers)
        elif predicted > LOOSE_FACTOR * measured + SLACK_NBYTES:
            self._find("loose", func, numbers)

    def _find(self, kind: str, func: torch._ops.OpOverload, example: str) -> None:
        finding = self.findings.setdefault((kind, str(func)), Finding(kind, str(func)))
        finding.number += 1
        if len(finding.examples) < _MOST_KEPT:
            finding.examples.append(example)


def _measure(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[int, object]:
    """Bytes at the peak of a call beyond its operands and results, and the results."""
    before = cpu_allocator.current_nbytes()
    cpu_allocator.reset_peak()
    outputs = func(*args, **kwargs)
    return cpu_allocator.peak_nbytes() - max(cpu_allocator.current_nbytes(), before), outputs


def describe(value: object) -> str:
    """Text of arguments: of tensors dtype, sizes, and strides where they are not contiguous."""
    if isinstance(value, Tensor):
        strides = "" if value.layout != torch.strided or value.is_contiguous() else list(value.stride())
        return f"{str(value.dtype)[6:]}{list(value.shape)}{strides}"
    if isinstance(value, dict):
        return "".join(f" {name}={describe(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe, value))})"
    return str(value)


def compare_samples(opinfo: Any, dtype: torch.dtype) -> tuple[int, list[Finding]]:
    """Run every sample of an operator of `op_db`; how many ATen calls they made, and what is wrong about them."""
    from torch.testing._internal.opinfo.core import SampleInput

    differentiable = dtype.is_floating_point and dtype in opinfo.supported_backward_dtypes("cpu")
    samples: list[SampleInput] = list(opinfo.sample_inputs("cpu", dtype, requires_grad=differentiable))
    comparison = Comparison()
    for sample in samples:
        for variant in (sample, _noncontiguous(sample)):
            if variant is not None:
                _run(opinfo.op, variant, comparison, differentiable=differentiable)
    return comparison.num_calls, list(comparison.findings.values())


def _noncontiguous(sample: Any) -> Any | None:
    try:
        return sample.noncontiguous()
    except (RuntimeError, ValueError, AssertionError):
        return None  # a tensor of it cannot be


def _run(op: Any, sample: Any, comparison: Comparison, *, differentiable: bool) -> None:
    try:
        with comparison:
            outputs = op(sample.input, *sample.args, **sample.kwargs)
            graded = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if differentiable and graded:
                torch.autograd.backward(graded, [torch.ones_like(leaf) for leaf in graded])
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return  # ATen refuses the sample, or a view of it; what came before is compared


def cases(operators: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """(operator of `op_db`, dtype) of those named, or all."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for opinfo in op_db:
        if operators and opinfo.name not in operators and full_name(opinfo) not in operators:
            continue
        for dtype in dtypes:
            if opinfo.supports_dtype(getattr(torch, dtype), "cpu"):
                found[full_name(opinfo), dtype] = None
    return list(found)


def full_name(opinfo: Any) -> str:
    """The name with the variant, by which no two are alike."""
    return f"{opinfo.name}.{opinfo.variant_test_name}" if opinfo.variant_test_name else opinfo.name


def _work(wanted: Iterable[tuple[str, str]]) -> None:
    """Run cases in a child: print one line of JSON per case, after a line that names the case."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    cpu_allocator.install()
    by_name = {full_name(opinfo): opinfo for opinfo in op_db}
    for name, dtype in wanted:
        print(json.dumps({"at": [name, dtype]}), flush=True)
        torch.manual_seed(0)
        num_calls, findings = compare_samples(by_name[name], getattr(torch, dtype))
        print(json.dumps(_line(name, dtype, num_calls, findings)), flush=True)


def _line(name: str, dtype: str, num_calls: int, findings: Sequence[Finding], failed: str = "") -> dict[str, Any]:
    return {
        "operator": name,
        "dtype": dtype,
        "calls": num_calls,
        "failed": failed,
        "findings": [asdict(finding) for finding in findings],
    }


def run(
    path: Path, wanted: Sequence[tuple[str, str]], *, command: Sequence[str] = _CHILD, timeout_s: float = _TIMEOUT_S
) -> None:
    """Compare what `path` does not have yet, in child processes, and append a line for each case.

    Args:
        command: of a child, which reads cases as JSON and writes as `_work` does.
        timeout_s: after so long without a line from it, a child hangs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    have = {(line["operator"], line["dtype"]) for line in read(path)}
    left = [case for case in wanted if case not in have]
    with path.open("a") as out:
        while left:
            left = left[_run_child(left, out, command, timeout_s) :]


def _run_child(left: Sequence[tuple[str, str]], out: IO[str], command: Sequence[str], timeout_s: float) -> int:
    """Let one child work at the cases until it is through, dies or hangs; how many have a line now."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(left))
    child.stdin.close()
    num_done, at = 0, left[0]
    try:
        for line in _lines(child, timeout_s):
            record = json.loads(line)
            if "at" in record:
                at = tuple(record["at"])
                continue
            out.write(line)
            out.flush()
            num_done += 1
    finally:
        child.kill()
        child.wait()
    if num_done < len(left):
        out.write(json.dumps(_line(*at, 0, [], f"the process ended with {child.returncode}")) + "\n")
        out.flush()
        num_done += 1
    return num_done


def _lines(child: subprocess.Popen[str], timeout_s: float) -> Iterator[str]:
    """Yield a child's lines until it ends or writes nothing for too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read_all() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read_all, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=timeout_s)
        except queue.Empty:
            return
        if line is None:
            return
        yield line


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Report errors by kind and ATen operator, with an example; first how much was compared."""
    merged: dict[tuple[str, str], Finding] = {}
    for line in lines:
        for found in line["findings"]:
            finding = merged.setdefault((found["kind"], found["target"]), Finding(found["kind"], found["target"]))
            finding.number += found["number"]
            finding.examples += [f"{line['operator']} {line['dtype']}: {text}" for text in found["examples"]]
    text = [f"{sum(line['calls'] for line in lines)} ATen calls of {len(lines)} operators and dtypes"]
    text += [f"not compared: {e['operator']} {e['dtype']}: {e['failed']}" for e in lines if e["failed"]]
    for kind in ("raised", "too low", "guessed", "loose"):
        found = sorted((f for f in merged.values() if f.kind == kind), key=lambda f: -f.number)
        text.append(f"{kind}: {len(found)} operators")
        text += [f"  {f.target} {f.number} calls, such as {f.examples[0]}" for f in found]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, nargs="?", help="the file of results, which is added to")
    parser.add_argument("--operators", nargs="*", default=[], help="of `op_db`; all by default")
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--report", action="store_true", help="only print what the file says")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _work(json.load(sys.stdin))
        return
    if arguments.path is None:
        parser.error("name a file for the results")
    if not arguments.report:
        run(arguments.path, cases(arguments.operators, arguments.dtypes))
    print(report(read(arguments.path)))


if __name__ == "__main__":
    main()
