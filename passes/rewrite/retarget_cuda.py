"""Retarget a graph that was traced on the CPU to a CUDA device: same operators, fake tensors of the device.

Nothing runs and no GPU is needed: tracing itself does need one (autograd asks for the device), but what an operator
returns there can be asked of a fake tensor on any machine. So sizes, dtypes (the statistics of a norm) and storages
come out as on the device, and so do scratch and rounding, which go by the device of a node's value.

What is written here is what differs beyond that: attention. The CPU has one kernel of its own; a CUDA device takes
cuDNN's, FlashAttention's or the memory-efficient one (`attention_cuda`). Where it has none, attention has to be taken
apart before this, when the model is captured. All save the random generator's seed and
offset for the backward. Where the CPU took attention apart, as it does under dropout, it stays so: the device would
save less.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from chunkc.ir.errors import UnsupportedError
from chunkc.passes.graphs.attention_cuda import Capability, Kernel, attention_kernel, may_take_cudnn
from chunkc.passes.graphs.graphs import copy_of, output_node, placeholders, storage_key, value_of
from chunkc.passes.rewrite.repeats import collected, value_text
from chunkc.torch_private.aot import LazyGraphModule
from chunkc.torch_private.fake import FakeTensor, FakeTensorMode, detect_fake_mode, disable_current_modes, like

aten = torch.ops.aten

_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_ON_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH = aten._scaled_dot_product_flash_attention.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_GENERATOR_AT = {_FLASH: (6, 7), _EFFICIENT: (2, 3), _CUDNN: (6, 7)}
"""Where among the results of an attention operator the random generator's seed and offset are."""

_SAVES, _RESTORES = torch.ops.higher_order.run_and_save_rng_state, torch.ops.higher_order.run_with_rng_state
_WRAPPED_AT: dict[object, int] = {_SAVES: 0, _RESTORES: 1}
"""Where among their arguments those that keep or restore the random generator's state have the operator they run."""

_NO_DROPOUT: list[Any] = [0.0, False]
"""What dropout and causality are where they are not given."""

_RNG_STATE_NBYTES = 16
"""Of a CUDA device's generator, in a tensor on the CPU (`torch.cuda.get_rng_state`)."""

_NO_CUDA = "not linked with support for cuda"

_DEVICE = torch.device("cuda", 0)


def on_cuda(
    forward: fx.GraphModule, backward: fx.GraphModule | None, capability: Capability | None = None
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Copy both graphs, with the values that they would have on a CUDA device; the given ones stay as they are.

    The forward may save more values for the backward (an attention's seed and offset), each behind the value that the
    CPU's attention saved.

    Args:
        capability: of the device; None where it is not known (see `attention_kernel`).

    Raises:
        UnsupportedError: the device has no kernel for some attention that the model asks one for.
    """
    cudnn = may_take_cudnn()
    forward, backward = _copied(forward), None if backward is None else _copied(backward)
    graphs = [forward.graph, *([backward.graph] if backward is not None else [])]
    for graph in graphs:
        for node in graph.nodes:
            if _operator(node) is _ON_CPU:
                _replace_attention(node, capability, cudnn)
    if backward is not None:
        saved = _SavedValues(forward.graph, backward.graph)
        for node in backward.graph.find_nodes(op="call_function", target=_ON_CPU_BACKWARD):
            _replace_attention_backward(node, saved)
        saved.write()
    given = [value_of(node) for graph in graphs for node in placeholders(graph)]
    with detect_fake_mode(pytree.tree_leaves(given)) or FakeTensorMode(), torch.no_grad():
        values = _propagate(forward.graph, {})
        if backward is not None:
            _propagate(backward.graph, values)
    for module in (forward, backward):
        if module is not None:
            module.recompile()
    return forward, backward


def has_attention_without_kernel(module: fx.GraphModule, capability: Capability | None) -> bool:
    """Whether a CUDA device would take some attention of the graph apart, which the CPU has a kernel for."""
    cudnn = may_take_cudnn()
    return any(
        _kernel_of(node, capability, cudnn) == "math" for node in module.graph.nodes if _operator(node) is _ON_CPU
    )


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    return LazyGraphModule(module, copy_of(module.graph))


def _operator(node: fx.Node) -> Any:
    """Return the operator that a node runs, itself or wrapped (see `_WRAPPED_AT`); None if it calls something else."""
    if node.op != "call_function":
        return None
    position = _WRAPPED_AT.get(node.target)
    return node.target if position is None else node.args[position]


def _given(node: fx.Node) -> tuple[list[Any], fx.Node | None]:
    """Return the inputs of an attention: query, key, value, dropout and causality; and its mask."""
    position = _WRAPPED_AT.get(node.target)
    operands = list[Any](node.args)[0 if position is None else position + 1 :]
    mask = node.kwargs.get("attn_mask")
    assert mask is None or isinstance(mask, fx.Node)
    return [*operands, *_NO_DROPOUT[len(operands) - 3 :]], mask


def _kernel_of(node: fx.Node, capability: Capability | None, cudnn: bool) -> Kernel:
    (query, key, value, _, causal), mask = _given(node)
    bias = None if mask is None else _value(mask)
    operands = (_value(query), _value(key), _value(value))
    return attention_kernel(*operands, bias, capability, causal=causal, cudnn=cudnn)


def _replace_attention(node: fx.Node, capability: Capability | None, cudnn: bool) -> None:
    (query, key, value, dropout, causal), mask = _given(node)
    position, given, scale = _WRAPPED_AT.get(node.target), list[Any](node.args), node.kwargs.get("scale")
    kernel = _kernel_of(node, capability, cudnn)
    if kernel == "math":
        raise UnsupportedError(
            f"{node.name}: the device has no kernel for this attention, and the model does not let PyTorch take it "
            "apart: allow SDPBackend.MATH where it calls torch.nn.attention.sdpa_kernel"
        )
    target, args = {
        "cudnn": (_CUDNN, (query, key, value, mask, True, dropout, causal, False)),
        "flash": (_FLASH, (query, key, value, dropout, causal, False)),
        "efficient": (_EFFICIENT, (query, key, value, mask, True, dropout, causal)),
    }[kernel]
    if position is None:
        node.target, node.args = target, args
    else:
        node.args = (*given[:position], target, *args)
    node.kwargs = {"scale": scale}


class _SavedValues:
    """Values that a forward saves for a backward, to which more may be added."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph) -> None:
        self.made = {node.name: node for node in forward.nodes}
        self._returned = output_node(forward)
        (self._results,) = self._returned.args
        self._saved = set(self._returned.all_input_nodes)
        self._new: dict[str, list[fx.Node]] = {}
        self._placeholders = {node.name: node for node in placeholders(backward)}

    def saved(self, item: fx.Node, before: fx.Node) -> fx.Node:
        """Make the forward save a value, if it does not yet, and return the backward's placeholder for it.

        A new one comes directly after `before` among the backward's placeholders, and after its value among the
        forward's outputs: programs match the two by position.
        """
        if item not in self._saved:
            self._saved.add(item)
            self._new.setdefault(before.name, []).insert(0, item)
        if item.name not in self._placeholders:
            with before.graph.inserting_after(before):
                self._placeholders[item.name] = before.graph.placeholder(item.name)
        return self._placeholders[item.name]

    def write(self) -> None:
        """Let the forward return the values that were added."""
        if not self._new:
            return
        assert isinstance(self._results, tuple | list)
        pending, results = list(reversed(self._results)), []
        while pending:
            results.append(result := pending.pop())
            if isinstance(result, fx.Node):
                pending += reversed(self._new.pop(result.name, []))
        assert not self._new, list(self._new)
        self._returned.args = (tuple(results),)


def _replace_attention_backward(node: fx.Node, values: _SavedValues) -> None:
    gradient, query, key, value, out, logsumexp, dropout, causal = node.args
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    assert isinstance(logsumexp, fx.Node)
    source = _made_by(logsumexp)
    attention = source if source.op != "placeholder" else _made_by(values.made[source.name])
    seed, offset = _items(attention)
    if attention is not source:
        seed = values.saved(seed, source)
        offset = values.saved(offset, seed)
    lengths = [_value(tensor).shape[2] for tensor in (query, key)]
    operands = (gradient, query, key, value)
    target, args = {
        _CUDNN: (
            aten._scaled_dot_product_cudnn_attention_backward.default,
            (*operands, out, logsumexp, seed, offset, mask, None, None, *lengths, dropout, causal),
        ),
        _FLASH: (
            aten._scaled_dot_product_flash_attention_backward.default,
            (*operands, out, logsumexp, None, None, *lengths, dropout, causal, seed, offset),
        ),
        _EFFICIENT: (
            aten._scaled_dot_product_efficient_attention_backward.default,
            (*operands, mask, out, logsumexp, seed, offset, dropout, [True, True, True, False], causal),
        ),
    }[_operator(attention)]
    node.target, node.args, node.kwargs = target, args, {"scale": scale}


def _value(argument: object) -> Any:
    assert isinstance(argument, fx.Node), argument
    return value_of(argument)


def _made_by(result: fx.Node) -> fx.Node:
    """Follow aliases from a result to the attention that made it, or to a placeholder; return that node."""
    while result.op != "placeholder" and _operator(result) not in _GENERATOR_AT:
        assert isinstance(result.args[0], fx.Node), result.format_node()
        result = result.args[0]
    return result


def _items(attention: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the nodes of an attention's seed and offset, made if there are none yet."""
    graph, results = attention.graph, attention
    if attention.target is _SAVES:
        (results,) = [user for user in attention.users if user.args[1] == 1]
    found = []
    for position, what in zip(_GENERATOR_AT[_operator(attention)], ("seed", "offset"), strict=True):
        item = next((user for user in results.users if user.args[1:] == (position,)), None)
        if item is None:
            name = f"{attention.name}_{what}"  # the same in both graphs, unlike numbers
            with graph.inserting_after(results):
                item = graph.create_node("call_function", operator.getitem, (results, position), name=name)
            item.meta.update({key: value for key, value in attention.meta.items() if key != "val"})
        found.append(item)
    seed, offset = found
    return seed, offset


def _propagate(graph: fx.Graph, given: Mapping[str, Any]) -> dict[str, Any]:
    """Give every node its value on the device, and return the values by node name.

    Args:
        given: values of placeholders that another graph made; the others are as they were on the CPU.
    """
    values: dict[fx.Node, Any] = {}
    storages: dict[int, Tensor] = {}
    results = _Results()
    for node in graph.nodes:
        if node.op == "placeholder" and _is_rng_state(node):  # which has another name in the graph that saved it
            value = _generator_bytes()
        elif node.op == "placeholder":
            value = given[node.name] if node.name in given else _moved(value_of(node), storages)
        elif node.op == "get_attr":
            value = _moved(value_of(node), storages)
        elif node.op == "output":
            continue
        else:
            if any(isinstance(leaf, torch.device) for leaf in (*node.args, *node.kwargs.values())):
                node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _device)
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            value = results.of(node, args, kwargs, values)
        values[node] = value
        node.meta["val"] = value
    return {node.name: value for node, value in values.items()}


def _is_rng_state(node: fx.Node) -> bool:
    return any(user.target is _RESTORES and user.args[0] is node for user in node.users)


@dataclass(frozen=True)
class _Result:
    """A result of an operator.

    Attributes:
        leaves, spec: the result, flattened.
        owners: of each leaf: the place of the first argument that shares its storage; or of the first leaf in a storage
            that the operator made, as -1 - place.
    """

    leaves: Sequence[FakeTensor]
    spec: pytree.TreeSpec
    owners: Sequence[int]

    def repeated(self, given: Sequence[Tensor]) -> Any:
        """Make the result that the operator has for other arguments of the same form."""
        made: list[Tensor] = []
        with disable_current_modes():
            for leaf, owner in zip(self.leaves, self.owners, strict=True):
                place = -1 - owner
                base = given[owner] if owner >= 0 else made[place] if place < len(made) else None
                made.append(like(leaf, base))
        return pytree.tree_unflatten(made, self.spec)


class _Results:
    """Finds operators' results. Those of equal layers are asked for once: a fake tensor takes its time for each."""

    def __init__(self) -> None:
        self._known: dict[object, _Result] = {}

    def of(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], values: dict[fx.Node, Any]) -> Any:
        """Return the value of a node; see `_run`."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            return _run(node, args, kwargs, values)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        keys = [storage_key(tensor) for tensor in given]
        shared = tuple(map(keys.index, keys))
        form = (node.target, repr(collected(node)[0]), value_text((args, kwargs)), shared)
        if (known := self._known.get(form)) is not None:
            return known.repeated(given)
        former = node.args
        value = _run(node, args, kwargs, values)
        leaves, spec = pytree.tree_flatten(value)
        if node.args is former and all(type(leaf) is FakeTensor for leaf in leaves):  # else it reads a copy now
            own = [storage_key(leaf) for leaf in leaves]
            owners = [keys.index(key) if key in keys else -1 - own.index(key) for key in own]
            self._known[form] = _Result(leaves, spec, owners)
        return value


def _run(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], values: dict[fx.Node, Any]) -> Any:
    if node.target in _WRAPPED_AT:
        position = _WRAPPED_AT[node.target]
        result = args[position](*args[position + 1 :], **kwargs)
        return result if node.target is _RESTORES else (_generator_bytes(), result)
    target: Any = node.target
    try:
        return target(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        if target is aten.view.default:  # the CPU's strides allowed it: what was no copy there is one here
            return _made_contiguous(node, args, values)
        if _NO_CUDA not in str(error):
            raise
    # Some fake implementations copy strided operands by torch's own code for CUDA, which a CPU's build does not have.
    on_cpu = pytree.tree_map_only(Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), args)
    return _moved(target(*on_cpu, **kwargs), {})


def _generator_bytes() -> Tensor:
    return torch.empty(_RNG_STATE_NBYTES, dtype=torch.uint8)


def _made_contiguous(view: fx.Node, args: Sequence[Any], values: dict[fx.Node, Any]) -> Any:
    with view.graph.inserting_before(view):
        copy = view.graph.call_function(aten.clone.default, (view.args[0],), {"memory_format": torch.contiguous_format})
    copy.meta.update({key: value for key, value in view.meta.items() if key != "val"})
    copy.meta["val"] = values[copy] = args[0].clone(memory_format=torch.contiguous_format)
    view.args = (copy, *view.args[1:])
    return aten.view.default(values[copy], *args[1:])


def _device(argument: Any) -> Any:
    return _DEVICE if isinstance(argument, torch.device) and argument.type == "cpu" else argument


def _moved(value: Any, storages: dict[int, Tensor]) -> Any:
    """Return a value on the device; tensors that shared a storage share one again."""

    def move(tensor: Tensor) -> Tensor:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in storages:
            if tensor.storage_offset() == 0 and storage.nbytes() == tensor.numel() * tensor.itemsize:
                storages[key] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_DEVICE)
                return storages[key]
            numel = storage.nbytes() // tensor.itemsize
            storages[key] = torch.empty_strided((numel,), (1,), dtype=tensor.dtype, device=_DEVICE)
        base = storages[key]
        if base.dtype != tensor.dtype:
            base = base.view(tensor.dtype)
        return aten.as_strided.default(base, tensor.shape, tensor.stride(), tensor.storage_offset())

    return pytree.tree_map_only(Tensor, move, value)
