"""Compiles a model in place, as the trainers of other libraries need it: its class and its files stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chunkc.ir.errors import OptionsError
from chunkc.place import place
from chunkc.session import sessions_of
from chunkc.torch_private import dynamo


def compile_in_place(model: nn.Module, options: dict[str, Any]) -> None:
    """`model.compile(backend="chunkc", options=options)`, unless the user has compiled it in place.

    Raises:
        OptionsError: it is what `torch.compile` returned.
    """
    if isinstance(model, dynamo.OptimizedModule):
        raise OptionsError(
            "the model is what torch.compile(model) returned, and files saved from it would have _orig_mod. before "
            'every name; give the model itself, or compile it in place: model.compile(backend="chunkc", options=...)'
        )
    if not dynamo.is_compiled_in_place(model):
        dynamo.compile_in_place(model, backend="chunkc", options=options)


def was_called(model: nn.Module) -> bool:
    """Whether a call has compiled code for one of the model's parameters, so that it computes in the budget."""
    return any(session.num_graphs for session in sessions_of(model.parameters()))


def place_on(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
    """Instead of `model.to(device)`: parameters go straight from the CPU's memory to their homes.

    Nothing happens where the CPU computes, or where chunkc has placed the model before.
    """
    if device.type != "cpu" and not sessions_of(model.parameters()):
        places = {key: options[key] for key in ("home", "disk_holds", "chunk_size", "debug") if key in options}
        place(model, device=device, **places)
