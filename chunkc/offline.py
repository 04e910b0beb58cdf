"""Capture a model without running it: on fake tensors, whatever its size, through the very Dynamo and AOTAutograd.

Nothing is allocated. Where a model has graph breaks, the code between its graphs runs on fake tensors too.
"""

from __future__ import annotations

import builtins
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import OptimizedModule, remove_from_cache
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils import _pytree as pytree

from chunkc.capture import Capture, capture_graph, input_names
from chunkc.ir.chunks import ParamSpec
from chunkc.ir.errors import ChunkcError, UnsupportedError
from chunkc.ir.states import DEFAULT_STATES, StateFormat
from chunkc.passes.codegen import find_vector_isa
from chunkc.passes.graphs import placeholders, returned
from chunkc.session import is_chunkable, owner, spec_of, states_of

NUM_RECOMPILES = 1_000_000
"""A model whose graph breaks inside a loop is compiled once per iteration here, where nothing is compiled for real."""

NO_FILE = "<chunkc>"
"""The file of the code that calls the model: none that would be named as a line of the user's."""


@dataclass(frozen=True)
class OfflineGraph:
    """One captured graph and the parameters it uses: those that may live in chunks, in order of use, and the others.

    `checkpointed`: the model recomputes a part of it in the backward (`torch.utils.checkpoint`).
    `sizes`: the symbols in its inputs' sizes -> which dimension each is, and how long that was.
    """

    capture: Capture
    movable: tuple[ParamSpec, ...]
    fixed: tuple[ParamSpec, ...]
    checkpointed: bool
    sizes: Mapping[str, str] = field(default_factory=dict)


def capture_offline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    codegen: str,
    dynamic: bool = False,
    states_of: Callable[[nn.Parameter], StateFormat] = states_of,
) -> tuple[OfflineGraph, ...]:
    """The graphs that one call of `model` compiles to, in order.

    Args:
        model, args, kwargs: real, on the meta device, or fake tensors already.
        dynamic: trace in symbols the dimensions of arguments that `torch._dynamo.mark_dynamic` (or
            `maybe_mark_dynamic`) marked.
        codegen: who would compile the segments. For Inductor, the C++ compiler is asked for its vector instructions
            meanwhile: its code depends on them.
        states_of: in what form an optimizer keeps states for a parameter of `model`.

    Raises:
        UnsupportedError: the model cannot be copied or captured, or needs real values between two graphs.
    """
    if codegen == "inductor":
        find_vector_isa()
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    mode = _mode_of([*_tensors(model), *pytree.tree_leaves((tuple(args), dict(kwargs)))])
    fake_model, names = _fake_copy(model, mode)
    staying = {name for name, parameter in model.named_parameters() if not _may_move(parameter)}
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, lambda t: _fake(t, mode), (tuple(args), dict(kwargs)))
    states = {name: states_of(parameter) for name, parameter in model.named_parameters()}
    graphs: list[OfflineGraph] = []

    def spec(name: str, parameter: nn.Parameter) -> ParamSpec:
        return replace(spec_of(name, parameter), states=states.get(name, DEFAULT_STATES))

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
                tuple(spec(name, p) for name, p in in_order if is_chunkable(p) and name not in staying),
                tuple(spec(name, p) for name, p in in_order if not is_chunkable(p) or name in staying),
                any(node.target is torch.ops.higher_order.tag_activation_checkpoint for node in gm.graph.nodes),
                _sizes(gm),
            )
        )
        return call

    patched = torch._dynamo.config.patch(
        recompile_limit=NUM_RECOMPILES,
        accumulated_recompile_limit=NUM_RECOMPILES,
        fake_tensor_cache_enabled=True,
        automatic_dynamic_shapes=False,
    )
    call_model = _with_own_code(fake_model)
    try:
        with _default_device(), mode, patched, torch.random.fork_rng():
            torch.compile(call_model, backend=backend, dynamic=None if dynamic else False)(*fake_args, **fake_kwargs)
        found = tuple(graphs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"the model needs the values of tensors outside its graphs ({_first_line(error)}); only what torch.compile "
            "captures can be explained"
        ) from error
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, ChunkcError):
            raise error.inner_exception from None
        raise UnsupportedError(f"the model cannot be traced: {_first_line(error.inner_exception)}") from error
    except ConstraintViolationError as error:
        raise UnsupportedError(f"the model cannot be traced with symbols: {_first_line(error)}") from error
    except TorchDynamoException as error:
        raise UnsupportedError(f"the model cannot be traced: {_first_line(error.__cause__ or error)}") from error
    finally:
        # Dynamo remembers every backend for good, and what it compiled as long as the code, which that refers to.
        graphs.clear()
        remove_from_cache(call_model)
    if not found:
        raise UnsupportedError(
            "torch.compile captured no graph: the call of this model computes nothing it can compile"
        )
    return found


def has_dynamic_dimensions(arguments: Any) -> bool:
    """Whether a dimension of any tensor among the arguments is marked as dynamic."""
    marks = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return any(getattr(tensor, mark, None) for tensor in tensors for mark in marks)


def _owns_its_storage(tensor: Tensor) -> bool:
    """Whether the tensor is as large as its storage. A view of another is traced with a storage of fixed size, so where
    it makes no difference it is traced as what it is a view of."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def _sizes(gm: fx.GraphModule) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in placeholders(gm.graph):
        value, source = node.meta.get("example_value"), getattr(node.meta.get("grapharg"), "source", None)
        for dim, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(length, torch.SymInt):
                name = source.name() if callable(source.name) else source.name
                name = re.sub(r"^L\['(?:kwargs'\]\['(\w+)|(args))'\]", r"\1\2", name)
                found.setdefault(str(length), f"dimension {dim} of {name}, {length.node.hint:,} here")
    return found


def _default_device() -> AbstractContextManager[object]:
    """New tensors of the model's code are on the CPU as the fakes are, whatever the caller's default device is."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _with_own_code(model: nn.Module) -> Callable[..., Any]:
    """Calls the model from a code object, and with globals, of its own.

    Dynamo keeps what it compiled, and counts recompilations, by code object, and adds to its globals; here all that
    goes with the copy of the model. On the code of the user's class it would make the next compilations fall back to
    running it eagerly.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    own_globals = {"__builtins__": builtins, "__name__": __name__}
    code = call.__code__.replace(co_filename=NO_FILE)
    return FunctionType(code, own_globals, call.__name__, None, call.__closure__)


def _first_line(error: BaseException) -> str:
    """The first line of an error's text; of Dynamo's errors the one that explains."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.partition(": ")[2] for line in lines if line.startswith("  Explanation: ")), lines[0])


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that modules keep as plain attributes or in lists and dictionaries of these."""
    plain = [
        value
        for module in model.modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    ]
    kept = [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, Tensor)]
    return [*model.parameters(), *model.buffers(), *kept]


def _mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The mode of the fake tensors among the values; a new one where there are none.

    Raises:
        UnsupportedError: they are of several.
    """
    modes = {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}
    if len(modes) > 1:
        raise UnsupportedError("the fake tensors of the model and of its arguments must come from one FakeTensorMode")
    return next(iter(modes.values()), None) or FakeTensorMode(allow_non_fake_inputs=True)


def _may_move(parameter: nn.Parameter) -> bool:
    """Whether the parameter can live in a chunk, as far as its own storage decides it (see `session.can_move`)."""
    if owner(parameter) is not None or isinstance(parameter, FakeTensor):
        return True
    return type(parameter) is nn.Parameter and parameter.untyped_storage().nbytes() == parameter.nbytes


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU like the given one."""
    if isinstance(tensor, FakeTensor) and not (has_dynamic_dimensions(tensor) and _owns_its_storage(tensor)):
        return tensor
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a {tensor.layout} tensor cannot be explained; make it dense")
    with mode:
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
        )
    for dim in getattr(tensor, "_dynamo_dynamic_indices", ()):
        torch._dynamo.mark_dynamic(fake, dim)
    for dim in getattr(tensor, "_dynamo_weak_dynamic_indices", ()):
        torch._dynamo.maybe_mark_dynamic(fake, dim)
    return fake


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> tuple[nn.Module, dict[int, str]]:
    """A copy of the model on fake tensors, and its parameters' names by identity. Ties stay ties.

    Raises:
        UnsupportedError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
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
            shape, stride = (list(map(_hint, numbers)) for numbers in (value.shape, value.stride()))
            value = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        found.append(_hint(value))
    return found


def _hint(value: Any) -> Any:
    """The number that a symbolic one stands for in tracing."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value


def _no_backward(arguments: list[Any]) -> list[Any]:
    raise AssertionError("a backward ran while nothing should run")
