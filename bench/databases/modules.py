"""Modules to train, made of what PyTorch's databases hold: operators' samples, modules with their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Arguments = tuple[tuple, dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """A module to train, which is copied for each training, with the arguments of its steps."""

    module: nn.Module
    batches: tuple[Arguments, ...]


@cache
def operators() -> Mapping[str, Any]:
    """`op_db` by name: `op/NAME`, with the variant, by which no two are alike."""
    from torch.testing._internal import common_methods_invocations as invocations

    # It would seed random numbers before each call, which Dynamo cannot trace; `training.train` seeds each step.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {f"op/{'.'.join(filter(None, (info.name, info.variant_test_name)))}": info for info in invocations.op_db}


@cache
def module_infos() -> Mapping[str, Any]:
    """`module_db` by name: `module/NAME`."""
    from torch.testing._internal.common_modules import module_db

    return {f"module/{info.name}": info for info in module_db}


def samples_of(case: str, *, changes: bool) -> Iterator[Sample]:
    """Yield what there is to train of a case of `op_db` or `module_db`, in fp32; of some there is nothing.

    Args:
        changes: the second step's batch has a row more than the first's.
    """
    if case in (infos := module_infos()):
        for sample in inputs_of(infos[case], torch.float32, requires_grad=False):
            module = constructed(infos[case], sample, torch.float32)
            if not any(p.requires_grad for p in module.parameters()):
                module = _Scaling(module)
            given = (sample.forward_input.args, sample.forward_input.kwargs)
            yield Sample(module, (given, _with_a_row_more(given) if changes else given))
        return
    info = operators()[case]
    for sample in info.sample_inputs("cpu", torch.float32, requires_grad=torch.float32 in differentiable(info)):
        given = (sample.input, *sample.args), sample.kwargs
        make = _changing if changes else _static
        if (found := make(info.op, given)) is not None:
            yield found


def differentiable(info: Any) -> set[torch.dtype]:
    """The dtypes in which an operator of `op_db` has gradients on a CPU."""
    return info.supported_backward_dtypes("cpu") if info.supports_autograd else set()


def _static(op: Callable[..., Any], given: Arguments) -> Sample | None:
    """A module with a parameter for each tensor that has a gradient; its inputs are the other tensors."""
    weights, inputs = [], []

    def placed(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.requires_grad:
            weights.append(nn.Parameter(leaf.detach().clone()))
            return _Weight(len(weights) - 1)
        inputs.append(leaf)
        return _Input(len(inputs) - 1)

    arguments = tree_map(placed, given)
    if not weights:
        return None
    step = (tuple(inputs), {})
    return Sample(_Operator(op, arguments, weights), (step, step))


def _changing(op: Callable[..., Any], given: Arguments) -> Sample | None:
    """A module with one parameter that scales its inputs: all tensors that have a gradient."""
    inputs: list[Tensor] = []

    def placed(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        inputs.append(leaf.detach())
        return (_Scaled if leaf.requires_grad else _Input)(len(inputs) - 1)

    arguments = tree_map(placed, given)
    step: Arguments = (tuple(inputs), {})
    if not any(isinstance(leaf, _Scaled) for leaf in tree_leaves(arguments)):
        return None
    return Sample(_Operator(op, arguments, [nn.Parameter(torch.ones(()))]), (step, _with_a_row_more(step)))


def _with_a_row_more(given: Arguments) -> Arguments:
    """Repeat the first row of the batch: of each tensor with as many rows as the first tensor."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        return given
    num_rows = tensors[0].shape[0]

    def enlarged(leaf: object) -> object:
        is_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows
        return torch.cat([leaf, leaf[:1]]) if is_batch else leaf  # type: ignore[index, list-item]

    return tree_map(enlarged, given)


@dataclass(frozen=True)
class _Weight:
    index: int


@dataclass(frozen=True)
class _Input:
    index: int


@dataclass(frozen=True)
class _Scaled:
    index: int


class _Operator(nn.Module):
    """Calls an operator with parameters and inputs in the places that `arguments` has for them."""

    def __init__(self, op: Callable[..., Any], arguments: Arguments, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.op, self.arguments = op, arguments
        self.weights = nn.ParameterList(weights)

    def forward(self, *inputs: Tensor) -> Any:
        args, kwargs = self._filled(self.arguments, inputs)
        return self.op(*args, **kwargs)

    def _filled(self, value: Any, inputs: Sequence[Tensor]) -> Any:
        if isinstance(value, _Weight):
            return self.weights[value.index]
        if isinstance(value, _Input):
            return inputs[value.index]
        if isinstance(value, _Scaled):
            return inputs[value.index] * self.weights[0]
        if type(value) in (tuple, list):
            return type(value)([self._filled(one, inputs) for one in value])
        if type(value) is dict:
            return {name: self._filled(one, inputs) for name, one in value.items()}
        return value


class _Scaling(nn.Module):
    """Gives a module without parameters one: its floating inputs are scaled by it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.scale = module, nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        scaled = [a * self.scale if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return self.module(*scaled, **kwargs)


def inputs_of(info: Any, dtype: torch.dtype, *, requires_grad: bool) -> Sequence[Any]:
    """Inputs of a module of `module_db` that is trained: for its constructor and its forward."""
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=requires_grad, training=True)
    return [sample for sample in samples if sample.forward_input is not None]


def constructed(info: Any, sample: Any, dtype: torch.dtype) -> nn.Module:
    """Make the module of a sample, the same at each call."""
    torch.manual_seed(0)
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
    return module.to(dtype).train()
