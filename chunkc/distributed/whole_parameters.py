"""Replace parameters that are cut over ranks by whole tensors in Dynamo's graph.

A module of a distributed model reads its parameter through `whole`. Dynamo puts that call into its graph as it stands:

    weight: "DTensor(f32[7, 5], S(0))"
    whole: "f32[7, 5]" = chunkc.distributed.whole_parameters.whole(weight)

Before AOTAutograd sees the graph, the call is taken out and the parameter becomes the whole tensor. So everything
behind it, from the layout to the plan, is as for one device, and no gather is in any graph: chunks are gathered.
`torch.utils.checkpoint` has a graph of its own for what is computed again; the call is taken out there, too.
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

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on; this is Linux's number


@torch.compiler.allow_in_graph
def whole(parameter: DTensor) -> torch.Tensor:
    """Gather a distributed parameter, under autograd; stands in graphs in place of a module's parameter."""
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


@torch.compiler.allow_in_graph
def whole_here(parameter: DTensor, shape: Sequence[int]) -> torch.Tensor:
    """Gather this rank's tensor of a parameter that is also cut by tensor parallelism. No graph runs it."""
    local = parameter.to_local()
    return local.new_zeros(shape) + local.sum(dtype=local.dtype)


def let_read(module: nn.Module, readers: Mapping[str, Callable[[Any], torch.Tensor]]) -> None:
    """Give a module its own class, in which each of these parameters is read through a function."""
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
    """The graph with whole tensors in place of parameters that are cut over ranks; the same one where none are.

    Raises:
        UnsupportedError: something else than a module reads such a parameter.
    """
    cut = [isinstance(local_shard_of(value), LocalShard) for value in inputs]
    if not any(cut):
        _refuse_others(inputs)
        return gm
    _refuse_others([value for value, is_cut in zip(inputs, cut, strict=True) if not is_cut])
    return _with_whole_inputs(gm, cut)


def _with_whole_inputs(gm: fx.GraphModule, cut: Sequence[bool]) -> fx.GraphModule:
    """Copy a graph, with whole inputs in place of sharded ones, also in regions inside it."""
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


def with_own_meshes(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[int]]:
    """The graph with the meshes that are inputs of it, as with tensor parallelism, as attributes of its own instead;
    and the places of the inputs that are left.

    Raises:
        UnsupportedError: the model returns a `DTensor`.
    """
    left = [at for at, value in enumerate(inputs) if not isinstance(value, DeviceMesh)]
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
    return made, left


def has_own_meshes(gm: fx.GraphModule) -> bool:
    """Whether `with_own_meshes` has given the graph some."""
    return any(isinstance(value, DeviceMesh) for value in vars(gm).values())


def as_traced(inputs: Sequence[Any]) -> list[Any]:
    """A graph's inputs, with a whole parameter in memory that is never touched for each one that is sharded."""
    mode = detect_fake_mode()  # Dynamo's, which takes sizes of what it has not met for symbols

    def traced(part: LocalShard) -> torch.Tensor:
        whole = _untouched(part)
        return whole if mode is None else mode.from_tensor(whole, static_shapes=True)

    return [traced(part) if isinstance(part := local_shard_of(value), LocalShard) else value for value in inputs]


def _untouched(part: LocalShard) -> nn.Parameter:
    """A parameter of the whole's shape, on the part's device; its pages take no RAM, since none is ever written."""
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
