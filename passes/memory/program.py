"""Pieces of a cut graph into a `PhaseProgram`: values, their storages, and what each call reads and makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ParamSpec
from chunkc.ir.program import BACKWARD, FORWARD, PhaseProgram, SegmentCall, SegmentMemory
from chunkc.passes.graphs.cost import cost_s
from chunkc.passes.graphs.graphs import module_path, placeholders, returned, storage_key, tensors_of
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes
from chunkc.passes.memory.scratch.copies import copy_block_nbytes
from chunkc.passes.segments.segments import Piece
from chunkc.torch_private.engine import KEEPS_TANGENTS

WHOLE_SHARE = 0.9
"""A call with so much of a phase is of no module of the model, but of the model."""


def forward_program(
    graph: fx.Graph,
    pieces: Sequence[Piece],
    memories: Mapping[str, SegmentMemory],
    *,
    parameters: Mapping[str, str],
    num_user_outputs: int,
    hardware: Hardware,
    new_buffers: Sequence[int] = (),
    read_as: Mapping[str, str] = MappingProxyType({}),
    again: Mapping[int, Piece] = MappingProxyType({}),
    shapes: Shapes = AS_TRACED,
) -> PhaseProgram:
    """Describe the forward's pieces as a program.

    The graph's first outputs are new values of buffers: of the inputs at the places `new_buffers`.

    Args:
        parameters: placeholder -> parameter name, for parameters in the layout.
        read_as: as of `PhaseProgram`.
        again: index of a piece -> the smaller piece that a backward repeats.
    """
    inputs, storages = _input_storages(graph, parameters, shapes)
    held = frozenset(inputs.values())
    calls = _calls(FORWARD, pieces, memories, inputs, storages, parameters, {}, hardware, shapes, again)
    outputs = tuple(node.name if node is not None else None for node in returned(graph))
    return PhaseProgram(
        FORWARD,
        inputs,
        storages,
        held,
        dict(parameters),
        calls,
        outputs,
        num_user_outputs,
        num_new_buffers=len(new_buffers),
        plain=frozenset(node.name for node in returned(graph) if node is not None and _is_plain(node)),
        changing=frozenset(list(inputs)[place] for place in new_buffers),
        read_as=read_as,
    )


def _is_plain(node: fx.Node) -> bool:
    """Whether a value is a strided tensor without a conjugate or negative bit."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_quantized or value.is_complex() or value.is_neg())


def backward_program(
    graph: fx.Graph,
    pieces: Sequence[Piece],
    memories: Mapping[str, SegmentMemory],
    forward: PhaseProgram,
    *,
    parameters: Mapping[str, str],
    gradients: Mapping[int, str],
    specs: Mapping[str, ParamSpec],
    hardware: Hardware,
    shapes: Shapes = AS_TRACED,
) -> PhaseProgram:
    """Describe the backward's pieces as a program.

    Of the outputs' gradients only a loss's is held by the caller of `backward()`; autograd lets go of the others.

    Args:
        parameters: placeholder -> parameter name, for parameters in the layout.
        gradients: position among the graph's outputs -> parameter name.
        specs: of these parameters, by name.
    """
    inputs, storages = _input_storages(graph, parameters, shapes)
    forward_storages = forward.value_storages
    saved = _as_taken(forward.outputs[forward.num_user_outputs :], graph)
    saved_as = {node.name: value for node, value in zip(placeholders(graph), saved) if value is not None}
    for node, value in zip(placeholders(graph), saved):
        if node.name not in parameters and value is not None:
            storage = forward_storages[value]
            storages.pop(inputs[node.name], None)
            inputs[node.name] = storage
            storages[storage] = forward.storages[storage]
    held = set(forward.held) | {forward_storages[value] for value in forward.results}
    tangents = [node for node in placeholders(graph)[len(saved) :] if node.name not in parameters]
    for node in tangents:  # traced as views of what the outputs lie in, which gradients do not share
        for tensor in tensors_of(node):
            inputs[node.name] = f"in:{node.name}"
            storages[inputs[node.name]] = shapes.known(shapes.own_nbytes(tensor))
    held |= {
        inputs[node.name]
        for node in tangents
        if KEEPS_TANGENTS or all(t.numel() == 1 for t in shapes.of(tensors_of(node)))
    }
    for storage in held - set(storages):
        storages[storage] = forward.storages[storage]
    nodes = returned(graph)
    wanted: dict[str, list[str]] = {}
    sunk, fitting, copy_blocks = [], set(), {}
    for position, parameter in gradients.items():
        made = nodes[position]
        if made is not None:
            wanted.setdefault(made.name, []).append(parameter)
            sunk.append((position, made.name, parameter))
            if _fits(made.meta["val"], specs[parameter], shapes):
                fitting.add(made.name)
            if block_nbytes := _copy_block_nbytes(made.meta["val"], specs[parameter], shapes):
                copy_blocks[made.name] = block_nbytes
    calls = _calls(BACKWARD, pieces, memories, inputs, storages, parameters, wanted, hardware, shapes)
    outputs = tuple(
        node.name if node is not None and index not in gradients else None for index, node in enumerate(nodes)
    )
    return PhaseProgram(
        BACKWARD,
        inputs,
        storages,
        frozenset(held),
        dict(parameters),
        calls,
        outputs,
        len(outputs),
        tuple(sunk),
        frozenset(fitting),
        saved_as=saved_as,
        read_as=forward.read_as,
        copy_blocks=copy_blocks,
    )


def _as_taken(saved: Sequence[str | None], backward: fx.Graph) -> Sequence[str | None]:
    """Order the values that a forward saves as the backward takes them: numbers, which come last, come first."""
    count = 0
    for node in placeholders(backward)[: len(saved)]:
        if not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat):
            break
        count += 1
    return (*saved[len(saved) - count :], *saved[: len(saved) - count])


def _fits(gradient: torch.Tensor, spec: ParamSpec, shapes: Shapes) -> bool:
    """Whether a gradient may become `.grad` as it is (see `runtime.store`)."""
    return (
        tuple(shapes.of(gradient).stride()) == spec.stride
        and gradient.dtype == spec.dtype
        and shapes.nbytes(gradient) == spec.nbytes
    )


def _copy_block_nbytes(gradient: torch.Tensor, spec: ParamSpec, shapes: Shapes) -> int:
    """Return the bytes of the block through which a transposed gradient is copied into a slot or a `.grad`."""
    laid_out = shapes.of(gradient)
    if gradient.device.type != "cpu" or gradient.dtype != spec.dtype or tuple(laid_out.stride()) == spec.stride:
        return 0
    return shapes.known(copy_block_nbytes(laid_out))


def _input_storages(
    graph: fx.Graph, parameters: Mapping[str, str], shapes: Shapes
) -> tuple[dict[str, str], dict[str, int]]:
    """Input value -> storage, storage -> bytes. Parameters' own storages are not the program's: zero bytes."""
    inputs: dict[str, str] = {}
    storages: dict[str, int] = {}
    names: dict[int, str] = {}
    for node in placeholders(graph):
        tensors = tensors_of(node)
        if not tensors:
            inputs[node.name] = f"in:{node.name}"
            storages[inputs[node.name]] = 0
            continue
        name = names.setdefault(storage_key(tensors[0]), f"in:{node.name}")
        inputs[node.name] = name
        storages[name] = 0 if node.name in parameters else shapes.known(shapes.nbytes(tensors[0]))
    return inputs, storages


def _calls(
    phase: str,
    pieces: Sequence[Piece],
    memories: Mapping[str, SegmentMemory],
    inputs: Mapping[str, str],
    storages: dict[str, int],
    parameters: Mapping[str, str],
    gradients: Mapping[str, Sequence[str]],
    hardware: Hardware,
    shapes: Shapes,
    again: Mapping[int, Piece] = MappingProxyType({}),
) -> tuple[SegmentCall, ...]:
    value_storage = dict(inputs)
    calls = []
    costs_s: dict[str, float] = {}  # of equal segments, once

    def of(piece: Piece) -> dict[str, Any]:
        """Return the fields of a call that depend on the piece alone."""
        segment, names = piece.segment.name, tuple(node.name for node in piece.inputs)
        if segment not in costs_s:
            costs_s[segment] = cost_s(piece.nodes, hardware, shapes)
        return {
            "segment": segment,
            "inputs": names,
            "outputs": tuple(node.name for node in piece.outputs),
            "output_storages": tuple(value_storage[node.name] for node in piece.outputs),
            "parameters": tuple((i, parameters[n]) for i, n in enumerate(names) if n in parameters),
            "cost_s": costs_s[segment],
            "origins": piece.origins,
        }

    num_nodes = sum(len(piece.nodes) for piece in pieces)
    for index, piece in enumerate(pieces):
        name, memory = f"{phase}.{index}", memories[piece.segment.name]
        in_names = [node.name for node in piece.inputs]
        for node, number in zip(piece.outputs, memory.outputs):
            if number >= 0:
                storage = f"{name}:{number}"
                storages[storage] = memory.storage_nbytes[number]
            else:
                source = in_names[-1 - number]
                if source in parameters and not piece.reads_home:
                    raise UnsupportedError(
                        f"{node.name} in {module_path(node) or 'the model'} is a view of parameter "
                        f"{parameters[source]} that outlives its chunk; return a copy (`.clone()`) instead"
                    )
                storage = value_storage[source]
            value_storage[node.name] = storage
        call = SegmentCall(
            name=name,
            gradients=tuple((n.name, p) for n in piece.outputs for p in gradients.get(n.name, ())),
            module=_main_module(piece.nodes) if len(piece.nodes) < WHOLE_SHARE * num_nodes else "",
            **of(piece),
        )
        if piece.reads_home:
            call = replace(call, parameters=())
        if index in again:
            call = replace(call, recompute_call=replace(call, **of(again[index])))
        calls.append(call)
    return tuple(calls)


def _main_module(nodes: Sequence[fx.Node]) -> str:
    """Return the path of the user's module that most of the nodes stem from; "" if none has one."""
    paths = Counter(path for node in nodes if (path := module_path(node)))
    return paths.most_common(1)[0][0] if paths else ""
