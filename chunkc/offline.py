"""Capture a model without running it: on fake tensors, whatever its size, through the very Dynamo and AOTAutograd.

Nothing is allocated. Where a model has graph breaks, the code between its graphs runs on fake tensors too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from chunkc.capture import Capture, capture_graph, input_names
from chunkc.ir.chunks import ParamSpec
from chunkc.ir.errors import UnsupportedError
from chunkc.passes.codegen import find_vector_isa
from chunkc.passes.graphs import returned
from chunkc.session import is_chunkable, spec_of

NUM_RECOMPILES = 1_000_000
"""Explaining the same class again and again is no sign of a model that keeps recompiling."""


@dataclass(frozen=True)
class OfflineGraph:
    """One captured graph and the parameters it uses: those that may live in chunks, in order of use, and the others."""

    capture: Capture
    movable: tuple[ParamSpec, ...]
    fixed: tuple[ParamSpec, ...]


def capture_offline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    codegen: str,
) -> tuple[OfflineGraph, ...]:
    """The graphs that one call of `model` compiles to, in order.

    Args:
        model, args, kwargs: real, on the meta device, or fake tensors already.
        codegen: who would compile the segments. For Inductor, the C++ compiler is asked for its vector instructions
            meanwhile: its code depends on them.

    Raises:
        UnsupportedError: the model cannot be copied, or needs real values between two graphs.
    """
    if codegen == "inductor":
        find_vector_isa()
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((tuple(args), dict(kwargs)))]
    fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    fake_model, names = _fake_copy(model, mode)
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, lambda t: _fake(t, mode), (tuple(args), dict(kwargs)))
    graphs: list[OfflineGraph] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        parameters = [names.get(id(value)) for value in inputs]
        holder: list[Capture] = []
        call, capture = capture_graph(
            gm,
            inputs,
            [name or (found if isinstance(value, nn.Parameter) else None)
             for value, name, found in zip(inputs, parameters, input_names(gm), strict=True)],
            codegen=codegen,
            run_forward=lambda arguments: _outputs(holder[0], arguments),
            run_backward=_no_backward,
        )  # fmt: skip
        holder.append(capture)
        by_name = dict(zip(capture.by_placeholder.values(), (v for v in inputs if isinstance(v, nn.Parameter))))
        in_order = [(name, by_name[name]) for name in capture.order_of_use()]
        graphs.append(
            OfflineGraph(
                capture,
                tuple(spec_of(name, p) for name, p in in_order if is_chunkable(p)),
                tuple(spec_of(name, p) for name, p in in_order if not is_chunkable(p)),
            )
        )
        return call

    patched = torch._dynamo.config.patch(
        recompile_limit=NUM_RECOMPILES, accumulated_recompile_limit=NUM_RECOMPILES, fake_tensor_cache_enabled=True
    )
    try:
        with mode, patched, torch.random.fork_rng():
            torch.compile(fake_model, backend=backend, dynamic=False)(*fake_args, **fake_kwargs)
    except DataDependentOutputException as error:
        raise UnsupportedError(
            f"the model needs the values of tensors outside its graphs ({error.func}); only what torch.compile "
            "captures can be explained"
        ) from error
    if not graphs:
        raise UnsupportedError(
            "torch.compile captured no graph: the call of this model computes nothing it can compile"
        )
    return tuple(graphs)


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU like the given one."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a {tensor.layout} tensor cannot be explained; make it dense")
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
        )


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> tuple[nn.Module, dict[int, str]]:
    """A copy of the model on fake tensors, and its parameters' names by identity. Ties stay ties.

    Raises:
        UnsupportedError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = _fake(tensor, mode)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
        memo.setdefault(id(tensor), fake)
    try:
        copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be copied to be explained: {error}") from error
    return copied, {id(parameter): name for name, parameter in copied.named_parameters()}


def _outputs(capture: Capture, arguments: list[Any]) -> list[Any]:
    """Fake results of a forward, from what was traced."""
    arguments.clear()
    assert capture.forward is not None
    found = []
    for node in returned(capture.forward.graph):
        value = None if node is None else node.meta["val"]
        if isinstance(value, Tensor):
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        found.append(value)
    return found


def _no_backward(arguments: list[Any]) -> list[Any]:
    raise AssertionError("a backward ran while nothing should run")
