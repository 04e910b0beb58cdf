"""Train a sample for two steps, and keep every value that comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from judging.budgets import Compile
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from databases.modules import Sample
from databases.table import Column

Values = dict[str, Tensor]
"""Outputs, gradients, weights and buffers by step and name, in memory that the allocator does not meter."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Subject:
    """A sample with the optimizers that train it: plain PyTorch's, and that of the compiled model.

    Attributes:
        name: of the sample among its case's.
        is_exact: both make the same bits of the same gradients.
    """

    name: str
    sample: Sample
    plain_optimizer: MakeOptimizer
    optimizer: MakeOptimizer
    is_exact: bool = True


class NothingToTrain(Exception):
    """Raised where no output has a gradient."""


def train(
    sample: Sample, column: Column, compile_it: Compile | None, optimizer_of: MakeOptimizer
) -> tuple[Values, Any]:
    """Forward, backward and update, once with each batch. Returns all values, and what was called."""
    model = copy.deepcopy(sample.module)
    called = model if compile_it is None else compile_it(model)
    optimizer = optimizer_of(model.parameters())
    values: Values = {}
    for step, batch in enumerate(sample.batches):

        def closure(step: int = step, batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            torch.manual_seed(step)
            # An operator may write into what it is given. `copy.deepcopy` would leave the allocator that meters out.
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
            with column.precision():
                outputs = [leaf for leaf in tree_leaves(called(*args, **kwargs)) if isinstance(leaf, Tensor)]
            loss = _backward(outputs)
            values.update((f"output {at} of step {step}", kept(output)) for at, output in enumerate(outputs))
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    values[f"gradient of {name} in step {step}"] = kept(parameter.grad)
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        values.update((f"{name} after step {step}", kept(value)) for name, value in model.state_dict().items())
    return values, called


def _backward(outputs: Sequence[Tensor]) -> Tensor:
    """Go backward from the sum of all outputs, with a weight for each element, and return that loss.

    Autograd is given the weights, which are the loss's gradients: a loss of its own would hold bytes that no plan has.
    """
    graded = [output for output in outputs if output.requires_grad]
    if not graded:
        raise NothingToTrain("no output has a gradient")
    weights = [_weights_of(output) for output in graded]
    torch.autograd.backward(graded, weights)
    with torch.no_grad():
        sums = [(output * weight.conj()).sum() for output, weight in zip(graded, weights, strict=True)]
        return torch.stack([torch.real(one).float() for one in sums]).sum()


def _weights_of(output: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    return torch.empty_like(output, requires_grad=False).copy_(weights)  # the strides are the output's


def kept(value: Tensor) -> Tensor:
    """Copy a tensor into NumPy's memory."""
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    if dense._is_zerotensor():
        dense = torch.zeros_like(dense)
    plain = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)  # also of stride 0
    return torch.from_numpy(plain.reshape(-1).view(torch.uint8).numpy().copy()).view(value.dtype).reshape(value.shape)


def difference(values: Values, reference: Values, tolerates: Callable[[Tensor, Tensor], bool]) -> str | None:
    """Say which value is not the reference's, or None where all are."""
    if values.keys() != reference.keys():
        return f"only one of both has {', '.join(sorted(values.keys() ^ reference.keys()))}"
    for name, value in values.items():
        other = reference[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return f"{name} is {value.dtype} {list(value.shape)}, not {other.dtype} {list(other.shape)}"
        if not tolerates(value, other):
            far = float((value.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(torch.inf).max())
            return f"{name} differs by up to {far:.3g}"
    return None


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal but for roundings, by PyTorch's own tolerances for their dtype."""
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError:
        return False
    return True
