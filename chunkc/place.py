"""`chunkc.place`: pack a model into its home before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.machines.devices import parse_device
from chunkc.movable import can_move
from chunkc.options import parse_options
from chunkc.session import Session, owner


def place(
    model: nn.Module,
    *,
    device: torch.device | str = "cpu",
    home: str = "cpu",
    disk_holds: str = "auto",
    chunk_size: int | str = "auto",
    debug: bool = False,
) -> nn.Module:
    """Move a model's parameters into home chunks, in place, and return the model.

    For models larger than the device: `torch.compile` alone moves parameters home only when it compiles, so until
    then they take room on the compute tier. Chunks are laid out in the order of `model.named_parameters()`.

    Args:
        device: where the model will compute: `"cpu"` or a CUDA device such as `"cuda"`. Parameters go from CPU memory
            straight to their homes, behind a GPU in pinned memory; `p.data` is then a tensor of the GPU's over it. Only
            what does not live in chunks moves to the device: small parameters, buffers.
        home: `"cpu"` (RAM outside the budget), `"disk"` or `"disk:DIR"`.
        disk_holds: what a disk holds: optimizer `"states"`, the rest being in RAM; `"everything"`; or `"auto"`:
            everything on a CPU, states behind a GPU.
        chunk_size: bytes or a size such as `"4MiB"`; `"auto"`: one repeated block of the model per chunk.
        debug: fill slots with NaN when they are taken and given back.

    Raises:
        OptionsError: an argument makes no sense.
        UnsupportedError: there is no such device, or it cannot read files in place and a disk is to hold everything;
            the model is not on the CPU, or already placed.
        HomeError: the home has no room; no parameter was moved.
    """
    target = parse_device(device)
    named = dict(model.named_parameters())
    if not named:
        raise OptionsError("the model has no parameters to place: compile it as it is")
    for name, parameter in named.items():
        if parameter.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is on {parameter.device}; give it memory and values on the CPU first "
                '(`model.to_empty(device="cpu")`, then initialise or load)'
            )
        if owner(parameter) is not None:
            raise UnsupportedError(
                f"{name} is placed or compiled already: there is nothing to place (for another home, make the model "
                "anew)"
            )
    options = parse_options({"home": home, "disk_holds": disk_holds, "chunk_size": chunk_size, "debug": debug})
    session = Session(options, device=target)
    layout = session.extend_layout(
        [session.spec_of(name, p) for name, p in named.items() if can_move(p)],
        [session.spec_of(name, p) for name, p in named.items() if not can_move(p)],
    )
    session.store.place(layout, named, frozenset())
    _move_staying(model, [named[spec.name] for spec in layout.small], session.store.tier.device)
    session.own(named)
    return model


def _move_staying(model: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Move what does not live in chunks to the device: parameters in place, as `nn.Module.to` does, and buffers.

    Raises:
        torch.OutOfMemoryError: not even these fit.
    """
    with torch.no_grad():
        for parameter in parameters:
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data.to(device)
        moved: dict[int, torch.Tensor] = {}  # buffers that several modules share stay one
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
