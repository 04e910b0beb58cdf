"""Compare measured with predicted bytes of every ATen call of a sample on the CPU.

A sample runs forward and, where it has gradients, backward, also with operands that are not contiguous; a dispatch mode
sees each ATen call, measures what it allocates inside with `chunkc.runtime.device.cpu_allocator`, and asks
`chunkc.passes.memory.scratch.cpu` for the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chunkc.passes.memory.scratch import cpu
from chunkc.runtime.device import cpu_allocator
from databases import modules

LOOSE_FACTOR, SLACK_NBYTES = 3, 4096
"""A prediction is loose above so many times the truth, and so many bytes."""
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


def calls_of(case: str, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Make the calls of all samples of an operator of `op_db`, or of a module of `module_db`."""
    if case in (infos := modules.module_infos()):
        given = modules.inputs_of(infos[case], dtype, requires_grad=True)
        built = [(modules.constructed(infos[case], sample, dtype), sample.forward_input) for sample in given]
        return [partial(module, *arguments.args, **arguments.kwargs) for module, arguments in built]
    info = modules.operators()[case]
    requires_grad = dtype.is_floating_point and dtype in modules.differentiable(info)
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    variants = [variant for sample in samples for variant in (sample, _noncontiguous(sample)) if variant is not None]
    return [partial(info.op, variant.input, *variant.args, **variant.kwargs) for variant in variants]


def _noncontiguous(sample: Any) -> Any | None:
    try:
        return sample.noncontiguous()
    except (RuntimeError, ValueError, AssertionError):
        return None  # a tensor of it cannot be


def compare(calls: Iterable[Callable[[], object]]) -> Comparison:
    """Run each call forward, and backward where its results have gradients."""
    comparison = Comparison()
    for call in calls:
        try:
            with comparison:
                outputs = call()
                graded = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
                if graded:
                    torch.autograd.backward(graded, [torch.ones_like(leaf) for leaf in graded])
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, AssertionError):
            continue  # ATen refuses the sample, or a view of it; what came before is compared
    return comparison
