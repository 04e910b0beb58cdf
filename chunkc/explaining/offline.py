"""Capture a model without running it: on fake tensors, whatever its size, through the very Dynamo and AOTAutograd.

Nothing is allocated. Where a model has graph breaks, the code between its graphs runs on fake tensors too.
"""

from __future__ import annotations

import builtins
import gc
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from chunkc.distributed.whole_parameters import with_own_meshes, with_whole_parameters
from chunkc.explaining.error_attribution import MODEL_CALL, module_that_raises
from chunkc.explaining.fake_copies import FakeCopy, fake, fake_copy, may_move, mode_of
from chunkc.explaining.offline_calls import CallLog, PhaseCall
from chunkc.explaining.untraceable import NeedsValuesError, told, why_none
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import ParamSpec
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.states import DEFAULT_STATES, StateFormat
from chunkc.passes.codegen import find_vector_isa
from chunkc.passes.graphs.graphs import placeholders
from chunkc.policy.graph_fraction import graph_fraction
from chunkc.session.declared_states import state_format_of
from chunkc.session.movable import is_chunkable
from chunkc.session.session import spec_of
from chunkc.torch_private.dynamo import patched, remove_from_cache, source_name, unwrapped
from chunkc.tracing.capture import TracedGraphs, capture_graph, unique_name
from chunkc.tracing.names import GraphNames, UserNames, without_wrapper
from chunkc.utils.garbage import no_automatic_collection
from chunkc.variants import Variants

NUM_RECOMPILES = 1_000_000
"""A model whose graph breaks inside a loop is compiled once per iteration here, where nothing is compiled for real."""

MAX_STEPS = 4
"""Steps on fake tensors until one compiles nothing."""


@dataclass(frozen=True)
class OfflineGraph:
    """One captured graph and the parameters it uses: those that may live in chunks, in order of use, and the others.

    `checkpointed`: the model recomputes a part of it in the backward (`torch.utils.checkpoint`).
    `sizes`: the symbols in its inputs' sizes -> which dimension each is, and how long that was.
    `graph_fraction`: its fraction of the model (see `policy.graph_fraction`).
    """

    capture: TracedGraphs
    movable: tuple[ParamSpec, ...]
    fixed: tuple[ParamSpec, ...]
    checkpointed: bool
    sizes: Mapping[str, str] = field(default_factory=dict)
    graph_fraction: float = 1.0

    def phase(self, name: str) -> fx.GraphModule:
        """The traced forward or backward."""
        found = self.capture.forward if name == FORWARD else self.capture.backward
        assert found is not None
        return found


@dataclass(frozen=True)
class OfflineStep:
    """What one training step runs.

    Attributes:
        graphs: in the order in which they are compiled.
        calls: the forwards, and after them the backwards where there are several, in order.
        storage_nbytes: bytes of each storage that the calls number.
        alive: storages that are alive when the optimizer steps.
        elsewhere_numel: elements of its parameters that other ranks of a layer have, and this one has not.
    """

    graphs: tuple[OfflineGraph, ...]
    calls: tuple[PhaseCall, ...]
    storage_nbytes: tuple[int, ...]
    alive: frozenset[int]
    elsewhere_numel: int = 0


class PartlyCapturedError(UnsupportedError):
    """The model needs the values of tensors after some of its graphs. `before`: their forwards."""

    def __init__(self, message: str, before: OfflineStep) -> None:
        super().__init__(message)
        self.before = before


@no_automatic_collection()
def capture_offline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    codegen: str,
    loss_tile_rows: int | None = None,
    repeatable: bool = False,
    dynamic: bool = False,
    state_format_of: Callable[[nn.Parameter], StateFormat] = state_format_of,
    trains: bool | None = None,
) -> OfflineStep:
    """The graphs that one call of `model` compiles to, and how a training step runs them.

    Args:
        model, args, kwargs: real, on the meta device, or fake tensors already.
        dynamic: trace in symbols the dimensions of arguments that `torch._dynamo.mark_dynamic` (or
            `maybe_mark_dynamic`) marked; not of a model whose layers are cut over ranks.
        codegen: who would compile the segments. For Inductor, the C++ compiler is asked for its vector instructions
            meanwhile: its code depends on them.
        loss_tile_rows: as in `torch.compile`'s options.
        repeatable: as in `capture_graph`.
        state_format_of: in what form an optimizer keeps states for a parameter of `model`.
        trains: in training mode, or in evaluation mode; None: in the mode that `model` is in.

    Raises:
        UnsupportedError: the model cannot be copied or captured, or needs real values between two graphs
            (`PartlyCapturedError`, where some come before that).
    """
    if codegen == "inductor":
        find_vector_isa()
    model = unwrapped(model)
    mode = mode_of(model, pytree.tree_leaves((tuple(args), dict(kwargs))))
    copied = fake_copy(model, mode)
    if dynamic and copied.is_tensor_parallel:
        raise UnsupportedError(
            "PyTorch traces no DTensors whose sizes are symbols: explain a model that parallelize_module has cut for "
            "one size at a time, without torch._dynamo.mark_dynamic"
        )
    fake_model = copied.model if trains is None else copied.model.train(trains)
    named = {without_wrapper(name): parameter for name, parameter in model.named_parameters()}
    unmovable = {name for name, parameter in named.items() if not may_move(parameter)}
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, lambda t: fake(t, mode), (tuple(args), dict(kwargs)))
    states = {name: state_format_of(parameter) for name, parameter in named.items()}
    recorder = _Recorder(codegen, loss_tile_rows, repeatable, copied, unmovable, states)
    many_recompiles = patched(
        recompile_limit=NUM_RECOMPILES,
        accumulated_recompile_limit=NUM_RECOMPILES,
        fake_tensor_cache_enabled=True,
        automatic_dynamic_shapes=False,
    )
    call_model = _with_own_code(fake_model)
    compiled = torch.compile(call_model, backend=recorder.backend, dynamic=None if dynamic else False)

    def module() -> str:
        with _default_device(), mode, torch.random.fork_rng():
            return module_that_raises(fake_model, lambda: fake_model(*fake_args, **fake_kwargs))

    try:
        with _default_device(), mode, many_recompiles, torch.random.fork_rng():
            compiled(*fake_args, **fake_kwargs)
            found = recorder.step()
            if len(found.calls) > 1:  # what happens between graphs is that of a step in which nothing is traced
                found = _step_without_captures(recorder, lambda: compiled(*fake_args, **fake_kwargs))
    except Exception as error:
        what = told(error, module)
        if isinstance(what, NeedsValuesError) and recorder.log.calls:
            before = replace(recorder.step(), alive=frozenset())  # its optimizer's step is not known
            raise PartlyCapturedError(str(what), before) from error
        if what is error:
            raise
        raise what from (error if isinstance(what, UnsupportedError) else None)
    finally:
        # Dynamo remembers every backend for good, and what it compiled as long as the code, which that refers to.
        recorder.graphs.clear()
        remove_from_cache(call_model)
    if not found.graphs:
        raise UnsupportedError(f"torch.compile captured no graph: {why_none(model)}")
    return found


class _Recorder:
    """The backend that Dynamo calls: captures graphs, and logs their calls."""

    def __init__(
        self,
        codegen: str,
        loss_tile_rows: int | None,
        repeatable: bool,
        copied: FakeCopy,
        unmovable: Collection[str],
        states: Mapping[str, StateFormat],
    ) -> None:
        """`unmovable`: parameters that cannot live in chunks."""
        self.graphs: list[OfflineGraph] = []
        self.log = CallLog()
        self._how: dict[str, Any] = {
            "codegen": codegen,
            "loss_tile_rows": loss_tile_rows,
            "repeatable": repeatable,
        }
        self._copied, self._unmovable, self._states = copied, unmovable, states
        self._own_names: dict[int, str] = {}
        self._used: set[str] = set()

    def step(self) -> OfflineStep:
        """What was recorded since the log was begun."""
        log = self.log
        elsewhere_numel = sum(self._copied.elsewhere_numel.get(name, 0) for name in self._used)
        return OfflineStep(tuple(self.graphs), tuple(log.calls), tuple(log.nbytes), log.alive(), elsewhere_numel)

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """As the backend of training does it."""
        if not any(isinstance(value, DeviceMesh) for value in inputs):
            return self._served(gm, inputs)
        own, left = with_own_meshes(gm, inputs)
        call = self._served(own, [inputs[at] for at in left])
        return lambda *args: call(*(args[at] for at in left))

    def _served(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = with_whole_parameters(gm, inputs)
        names = GraphNames(gm)
        variants = Variants(lambda values: self._capture(gm, values, names))
        variants.compile(inputs, any_shapes=True)  # Dynamo guards shapes, and no comparison may fix symbols
        return variants

    def _capture(self, gm: fx.GraphModule, inputs: Sequence[Any], names: GraphNames) -> Callable[..., Any]:
        number = len(self.graphs)
        parameters = self._name(inputs, names.take(inputs, UserNames.seen_from(self._copied.model)))
        holder: list[TracedGraphs] = []

        def forward(arguments: list[Any]) -> list[Any]:
            assert holder[0].forward is not None
            return self.log.run(number, FORWARD, holder[0].forward, arguments)

        def backward(arguments: list[Any]) -> list[Any]:
            assert holder[0].backward is not None
            return self.log.run(number, BACKWARD, holder[0].backward, arguments, skipped=holder[0].gradients)

        call, capture = capture_graph(gm, inputs, parameters, **self._how, run_forward=forward, run_backward=backward)
        holder.append(capture)
        by_name = {name: value for name, value in zip(parameters, inputs, strict=True) if name is not None}
        in_order = [(name, by_name[name]) for name in capture.order_of_use()]
        movable: list[ParamSpec] = []
        fixed: list[ParamSpec] = []
        for name, parameter in in_order:
            known = self._copied.names.get(id(parameter), name)
            self._used.add(known)
            spec = replace(spec_of(name, parameter), states=self._states.get(known, DEFAULT_STATES))
            (movable if is_chunkable(parameter) and known not in self._unmovable else fixed).append(spec)
        checkpointed = any(node.target is torch.ops.higher_order.tag_activation_checkpoint for node in gm.graph.nodes)
        fraction = graph_fraction([self._copied.model], inputs)
        self.graphs.append(OfflineGraph(capture, tuple(movable), tuple(fixed), checkpointed, _sizes(gm), fraction))
        return call

    def _is_free(self, name: str) -> bool:
        return name not in self._own_names.values()

    def _name(self, inputs: Sequence[Any], names: Sequence[str]) -> list[str | None]:
        """A name per input that is a parameter, made unique: as a session that knows none of them names them."""
        found: list[str | None] = []
        for value, name in zip(inputs, names, strict=True):
            if isinstance(value, nn.Parameter):
                if id(value) not in self._own_names:
                    self._own_names[id(value)] = unique_name(name, self._is_free)
                found.append(self._own_names[id(value)])
            else:
                found.append(None)
        return found


def _step_without_captures(recorder: _Recorder, call: Callable[[], Any]) -> OfflineStep:
    """A whole training step in which nothing is compiled.

    Raises:
        UnsupportedError: every step compiles something.
    """
    for _ in range(MAX_STEPS):
        gc.collect()
        recorder.log = CallLog()
        num_graphs = len(recorder.graphs)
        output = call()
        _backward(output)
        if len(recorder.graphs) == num_graphs:
            return recorder.step()
    raise UnsupportedError("torch.compile captures other graphs at every call of this model, so none can be planned")


def _backward(output: Any) -> None:
    """The backward of a loss: of the first number that the model returns, or else of all that it returns."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    losses = [next((leaf for leaf in leaves if leaf.numel() == 1), None)]
    if losses[0] is None:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    else:
        losses[0].backward()


def _sizes(gm: fx.GraphModule) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in placeholders(gm.graph):
        value = node.meta.get("example_value")
        for dim, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(length, torch.SymInt):
                name = re.sub(r"^L\['(?:kwargs'\]\['(\w+)|(args))'\]", r"\1\2", source_name(node))
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
    code = call.__code__.replace(co_filename=MODEL_CALL)
    return FunctionType(code, own_globals, call.__name__, None, call.__closure__)
