"""Replace sharded parameters by whole tensors in Dynamo's graph.

A module of a distributed model reads its parameter through `whole`. Dynamo puts that call into its graph unchanged:

    weight: "DTensor(f32[7, 5], S(0))"
    whole: "f32[7, 5]" = chunkc.distributed.whole_parameters.whole(weight)

Before AOTAutograd sees the graph, the call is removed and the placeholder becomes the whole tensor. So all later
stages, from the layout to the plan, are as for one device, and graphs have no gathers: the runtime gathers chunks.
`torch.utils.checkpoint` has a graph of its own for what is recomputed; the call is removed there, too.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from chunkc.ir.errors import UnsupportedError
from chunkc.passes.graphs.graphs import copy_of, placeholders, returned
from chunkc.runtime.device.gpu import DLPACK_CUDA, relabelled
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.torch_private.aot import LazyGraphModule
from chunkc.torch_private.fake import detect_fake_mode

tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has it from 3.13 on; the number is Linux's


@torch.compiler.allow_in_graph
def whole(parameter: DTensor) -> torch.Tensor:
    """Gather a distributed parameter, under autograd: the call that Dynamo's graphs have for a module's parameter."""
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


@torch.compiler.allow_in_graph
def whole_here(parameter: DTensor, shape: Sequence[int]) -> torch.Tensor:
    """Stand in for the gather of this rank's local tensor, which has `shape`, with tensor parallelism.

    Only its shape, dtype and use of the parameter count; it is removed before a graph runs.
    """
    local = parameter.to_local()
    return local.new_zeros(shape) + local.sum(dtype=local.dtype)


def let_read(module: nn.Module, readers: Mapping[str, Callable[[Any], torch.Tensor]]) -> None:
    """Give a module a subclass of its own, in which each named parameter is read through its function."""
    properties: dict[str, Any] = {name: _reader(name, read) for name, read in readers.items()}
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {**properties, "__module__": kind.__module__})


def _reader(name: str, read: Callable[[Any], torch.Tensor]) -> property:
    def get(module: nn.Module) -> torch.Tensor:
        parameter = module._parameters[name]
        assert parameter is not None
        return read(parameter)

    getter: Callable[[Any], Any] = get
    return property(getter)


def with_whole_parameters(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Copy a graph with whole tensors in place of sharded parameters; return the same graph if there are none.

    Raises:
        UnsupportedError: a sharded parameter is read otherwise than through its module, or an input is another
            `DTensor`.
    """
    cut = [isinstance(local_shard_of(value), LocalShard) for value in inputs]
    if not any(cut):
        _refuse_others(inputs)
        return gm
    _refuse_others([value for value, is_cut in zip(inputs, cut, strict=True) if not is_cut])
    return _with_whole_inputs(gm, cut)


def _with_whole_inputs(gm: fx.GraphModule, cut: Sequence[bool]) -> fx.GraphModule:
    """Copy a graph with whole inputs in place of sharded ones, also in activation checkpoints inside it.

    Args:
        cut: whether each input is sharded.
    """
    graph = copy_of(gm.graph)
    made = LazyGraphModule(gm, graph)
    found = [node for node, is_cut in zip(placeholders(graph), cut, strict=True) if is_cut]
    for region in graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        body, *arguments = region.args
        cut_here = [argument in found for argument in arguments]
        if any(cut_here):
            inner = _with_whole_inputs(getattr(gm, body.target), cut_here)
            setattr(made, body.target, inner)
            for argument, input_ in zip(arguments, placeholders(inner.graph), strict=True):
                if argument in found:
                    argument.meta["example_value"] = input_.meta["example_value"]
    for placeholder in found:
        for reader in list(placeholder.users):
            if reader.target is tag_activation_checkpoint:
                continue
            if reader.target not in (whole, whole_here):
                raise UnsupportedError(
                    f"{reader.format_node()} reads a distributed parameter otherwise than as the parameter of its "
                    "module; use `module.weight` in the module's own forward"
                )
            placeholder.meta["example_value"] = reader.meta["example_value"]
            reader.replace_all_uses_with(placeholder)
            graph.erase_node(reader)
    return made


def compiled_whole(
    gm: fx.GraphModule, inputs: Sequence[Any], compiled: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return what `compiled` makes of a graph with whole parameters, and with meshes as attributes, and of its inputs.

    Raises:
        UnsupportedError: as `with_whole_parameters`; or the model returns a `DTensor`.
    """
    left = [at for at, value in enumerate(inputs) if not isinstance(value, DeviceMesh)]
    if len(left) == len(inputs):
        return compiled(with_whole_parameters(gm, inputs), inputs)
    graph = copy_of(gm.graph)
    made = LazyGraphModule(gm, graph)
    for at, node in enumerate(placeholders(graph)):
        if at not in left:
            setattr(made, node.name, inputs[at])
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.create_node("get_attr", node.name))
            graph.erase_node(node)
    for result in returned(graph):
        if result is not None and isinstance(result.meta.get("example_value"), DTensor):
            raise UnsupportedError(
                "the model returns a DTensor: return its to_local() or full_tensor(), or let the plan of "
                "parallelize_module do that (output_layouts=Replicate())"
            )
    call = compiled_whole(made, [inputs[at] for at in left], compiled)
    return lambda *args: call(*(args[at] for at in left))


def has_own_meshes(gm: fx.GraphModule) -> bool:
    """Whether `compiled_whole` has made meshes attributes of the graph."""
    return any(isinstance(value, DeviceMesh) for value in vars(gm).values())


def as_traced(inputs: Sequence[Any]) -> list[Any]:
    """Return a graph's inputs for tracing: for each sharded parameter a whole one, of memory that is never touched."""
    mode = detect_fake_mode()  # Dynamo's: sizes of tensors that are new to it would be symbols, if not static

    def traced(part: LocalShard) -> torch.Tensor:
        whole = _untouched(part)
        return whole if mode is None else mode.from_tensor(whole, static_shapes=True)

    return [traced(part) if isinstance(part := local_shard_of(value), LocalShard) else value for value in inputs]


def _untouched(part: LocalShard) -> nn.Parameter:
    """Make a parameter of the whole shape on the shard's device; its pages take no RAM, as none is ever touched."""
    pages = mmap.mmap(
        -1, max(1, part.shards.numel * part.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    )
    flat = torch.frombuffer(pages, dtype=part.dtype, count=part.shards.numel)
    if part.is_cuda:
        flat = relabelled(flat.untyped_storage(), DLPACK_CUDA, part.device.index).view(part.dtype)[: part.shards.numel]
    whole = flat.view(part.shards.shape)
    return nn.Parameter(whole, requires_grad=part.requires_grad)


def _refuse_others(inputs: Sequence[Any]) -> None:
    for value in inputs:
        if isinstance(value, DTensor):
            raise UnsupportedError(
                "the model takes a DTensor that chunkc.distribute has not made: distribute a model itself, and no copy "
                "of it, before torch.compile. With tensor parallelism, too, over a dimension of one rank if there is "
                'no other: init_device_mesh("cpu", (1, tp), mesh_dim_names=("dp", "tp"))'
            )
