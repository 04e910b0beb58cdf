"""Capture a model of any size on fake tensors, through the same Dynamo and AOTAutograd as in training.

Nothing is allocated. If a model has graph breaks, the code between its graphs runs on fake tensors too.
"""

from __future__ import annotations

import builtins
import gc
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from chunkc.distributed.whole_parameters import compiled_whole
from chunkc.explaining.error_attribution import MODEL_CALL, module_that_raises
from chunkc.explaining.fake_copies import FakeCopy, fake, fake_copy, may_move, mode_of, values_by_fake
from chunkc.explaining.offline_calls import CallLog, PhaseCall
from chunkc.explaining.untraceable import NeedsValuesError, explained_error, why_no_graph
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import ParamSpec
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.states import DEFAULT_STATES, StateFormat
from chunkc.options import LossTileRows
from chunkc.passes.codegen import find_vector_isa
from chunkc.passes.graphs.graphs import placeholders
from chunkc.policy.graph_fraction import graph_fraction
from chunkc.session.declared_states import state_format_of
from chunkc.session.movable import is_chunkable
from chunkc.session.session import spec_of
from chunkc.torch_private.causal_masks import explained_with
from chunkc.torch_private.dynamo import is_all_of, patched, remove_from_cache, source_name, unwrapped
from chunkc.tracing.capture import TracedGraphs, capture_graph, unique_name
from chunkc.tracing.names import GraphNames, UserNames, without_wrapper
from chunkc.utils.garbage import no_automatic_collection
from chunkc.variants import Variants

NUM_RECOMPILES = 1_000_000
"""Limit of recompilations. A graph break inside a loop makes one per iteration, and none generates code here."""

MAX_STEPS = 4
"""Steps on fake tensors after which one must compile nothing."""


@dataclass(frozen=True)
class OfflineGraph:
    """A captured graph and the parameters that it uses.

    Attributes:
        movable: parameters that may live in chunks, in order of use; `fixed`: all others.
        checkpointed: the model recomputes some of it in the backward (`torch.utils.checkpoint`).
        sizes: symbol in its inputs' sizes -> its dimension, and the length that was traced.
        graph_fraction: its fraction of the model (see `policy.graph_fraction`).
    """

    capture: TracedGraphs
    movable: tuple[ParamSpec, ...]
    fixed: tuple[ParamSpec, ...]
    checkpointed: bool
    sizes: Mapping[str, str] = field(default_factory=dict)
    graph_fraction: float = 1.0

    def phase(self, name: str) -> fx.GraphModule:
        """Return the traced forward or backward."""
        traced = self.capture.forward if name == FORWARD else self.capture.backward
        assert traced is not None
        return traced


@dataclass(frozen=True)
class OfflineStep:
    """A captured training step: its graphs and their calls.

    Attributes:
        graphs: in the order in which they are compiled.
        calls: in order: the forwards, then the backwards if there are several graphs.
        storage_nbytes: bytes of each numbered storage of the calls.
        alive: storages that are alive when the optimizer steps.
        elsewhere_numel: elements of its parameters that only other ranks of a layer have.
    """

    graphs: tuple[OfflineGraph, ...]
    calls: tuple[PhaseCall, ...]
    storage_nbytes: tuple[int, ...]
    alive: frozenset[int]
    elsewhere_numel: int = 0


class PartlyCapturedError(UnsupportedError):
    """A model needs the values of tensors after some of its graphs. `before`: the step up to there."""

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
    loss_tile_rows: LossTileRows = "never",
    repeatable: bool = False,
    dynamic: bool = False,
    state_format_of: Callable[[nn.Parameter], StateFormat] = state_format_of,
    trains: bool | None = None,
) -> OfflineStep:
    """Capture the graphs of one call of `model`, and the order in which a training step calls them.

    Args:
        model, args, kwargs: real, on the meta device, or fake tensors already.
        dynamic: trace as symbols the dimensions of arguments that `torch._dynamo.mark_dynamic` (or
            `maybe_mark_dynamic`) marked; not for a model with layers that are cut over ranks.
        codegen: as in `torch.compile`'s options. For Inductor, the C++ compiler is asked for its vector instructions:
            the generated code depends on them.
        loss_tile_rows: as in `torch.compile`'s options.
        repeatable: as in `capture_graph`.
        state_format_of: the form in which an optimizer keeps states for a parameter of `model`.
        trains: in training mode, or in evaluation mode; None: in the mode that `model` is in.

    Raises:
        UnsupportedError: the model cannot be copied or captured, or needs real values between two graphs
            (`PartlyCapturedError` if it does so after some graphs).
    """
    if codegen == "inductor":
        find_vector_isa()
    model = unwrapped(model)
    mode = mode_of(model, pytree.tree_leaves((tuple(args), dict(kwargs))))
    copied = fake_copy(model, mode)
    if dynamic and copied.is_tensor_parallel:
        raise UnsupportedError(
            "PyTorch traces no DTensors with symbols for sizes: explain a model that parallelize_module has cut for "
            "one size at a time, without torch._dynamo.mark_dynamic"
        )
    fake_model = copied.model if trains is None else copied.model.train(trains)
    named = {without_wrapper(name): parameter for name, parameter in model.named_parameters()}
    unmovable = {name for name, parameter in named.items() if not may_move(parameter)}
    given = (tuple(args), dict(kwargs))
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, lambda t: fake(t, mode), given)
    values = values_by_fake(pytree.tree_leaves(given), pytree.tree_leaves((fake_args, fake_kwargs)))
    answers = explained_with({**copied.values, **values})
    states = {name: state_format_of(parameter) for name, parameter in named.items()}
    call_model = _with_own_code(fake_model)
    recorder = _Recorder(codegen, loss_tile_rows, repeatable, copied, unmovable, states)
    if not dynamic:  # by its guards Dynamo refuses some symbols
        recorder.ends_with = call_model.__code__
    settings = patched(
        recompile_limit=NUM_RECOMPILES,
        accumulated_recompile_limit=NUM_RECOMPILES,
        fake_tensor_cache_enabled=True,
        automatic_dynamic_shapes=False,
        run_gc_after_compile=False,  # it would visit every node
    )
    compiled = torch.compile(call_model, backend=recorder.backend, dynamic=None if dynamic else False)

    def module() -> str:
        with _default_device(), mode, torch.random.fork_rng():
            return module_that_raises(fake_model, lambda: fake_model(*fake_args, **fake_kwargs))

    try:
        with _default_device(), mode, settings, torch.random.fork_rng(), answers:
            with suppress(_OneGraph):
                compiled(*fake_args, **fake_kwargs)
            step = recorder.step()
            if len(step.calls) > 1:  # storages between graphs are those of a step in which nothing is traced
                step = _step_without_captures(recorder, lambda: compiled(*fake_args, **fake_kwargs))
    except Exception as error:
        explained = explained_error(error, module)
        if isinstance(explained, NeedsValuesError) and recorder.log.calls:
            before = replace(recorder.step(), alive=frozenset())  # its optimizer's step is not known
            raise PartlyCapturedError(str(explained), before) from error
        if explained is error:
            raise
        raise explained from (error if isinstance(explained, UnsupportedError) else None)
    finally:
        # Dynamo remembers every backend for good, and compiled code as long as the code object, to which that refers.
        recorder.graphs.clear()
        remove_from_cache(call_model)
    if not step.graphs:
        raise UnsupportedError(f"torch.compile captured no graph: {why_no_graph(model)}")
    return step


class _OneGraph(BaseException):
    """Ends a call of a model that is one graph, which is captured. No `Exception`: Dynamo would wrap it."""


class _Recorder:
    """Backend for Dynamo that captures graphs and logs their calls.

    Attributes:
        ends_with: the code of a function that is left once one graph of all of it is captured, before Dynamo makes
            guards for it and runs it; None: none is.
    """

    def __init__(
        self,
        codegen: str,
        loss_tile_rows: LossTileRows,
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
        self.ends_with: CodeType | None = None
        self._own_names: dict[int, str] = {}
        self._used: set[str] = set()

    def step(self) -> OfflineStep:
        """Return the step that was recorded since the log was begun."""
        log = self.log
        elsewhere_numel = sum(self._copied.elsewhere_numel.get(name, 0) for name in self._used)
        return OfflineStep(tuple(self.graphs), tuple(log.calls), tuple(log.nbytes), log.alive(), elsewhere_numel)

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture a graph as the backend of training does."""
        call = compiled_whole(gm, inputs, self._served)
        if len(self.graphs) == 1 and self.ends_with is not None and is_all_of(gm, self.ends_with):
            self.log.add_unrun(0, FORWARD, self.graphs[0].phase(FORWARD))
            raise _OneGraph
        return call

    def _served(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
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

    def _name(self, inputs: Sequence[Any], names: Sequence[str]) -> list[str | None]:
        """Return a unique name per input that is a parameter, as a new session names it; None for other inputs."""
        unique: list[str | None] = []
        for value, name in zip(inputs, names, strict=True):
            if isinstance(value, nn.Parameter):
                if id(value) not in self._own_names:
                    self._own_names[id(value)] = unique_name(name, lambda new: new not in self._own_names.values())
                unique.append(self._own_names[id(value)])
            else:
                unique.append(None)
        return unique


def _step_without_captures(recorder: _Recorder, call: Callable[[], Any]) -> OfflineStep:
    """Run training steps until one compiles nothing, and return it.

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
    """Run the backward of the first single number that the model returns, or else of all its outputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    losses = [next((leaf for leaf in leaves if leaf.numel() == 1), None)]
    if losses[0] is None:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    else:
        losses[0].backward()


def _sizes(gm: fx.GraphModule) -> dict[str, str]:
    """Return symbol -> a description of the dimension that it stands for."""
    sizes: dict[str, str] = {}
    for node in placeholders(gm.graph):
        value = node.meta.get("example_value")
        for dim, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(length, torch.SymInt):
                name = re.sub(r"^L\['(?:kwargs'\]\['(\w+)|(args))'\]", r"\1\2", source_name(node))
                sizes.setdefault(str(length), f"dimension {dim} of {name}, {length.node.hint:,} here")
    return sizes


def _default_device() -> AbstractContextManager[object]:
    """Put new tensors of the model's code on the CPU, as the fakes are, whatever the caller's default device is."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _with_own_code(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the model from a code object of its own, with globals of its own.

    Dynamo keeps compiled code, and counts recompilations, by code object, and adds to its globals; here all of this
    goes with the copy of the model. On the code of the user's class it would make the next compilations fall back to
    eager execution.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    own_globals = {"__builtins__": builtins, "__name__": __name__}
    code = call.__code__.replace(co_filename=MODEL_CALL)
    return FunctionType(code, own_globals, call.__name__, None, call.__closure__)
