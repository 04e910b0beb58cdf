"""`chunkc.place`: pack a model into its home before anything is compiled."""

from __future__ import annotations

import torch
from torch import nn

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.options import parse_options
from chunkc.session import Session, can_move, owner, spec_of


def place(
    model: nn.Module,
    *,
    device: torch.device | str = "cpu",
    home: str = "cpu",
    chunk_size: int | str = "auto",
    debug: bool = False,
) -> nn.Module:
    """Move a model's parameters into home chunks, in place, and return the model.

    For models larger than the device: `torch.compile` alone moves parameters home only when it compiles, so until
    then they take room on the compute tier. Chunks are laid out in the order of `model.named_parameters()`.

    Args:
        device: where the model will compute. This version knows "cpu".
        home: `"cpu"` (RAM outside the budget), `"disk"` or `"disk:DIR"`.
        chunk_size: bytes or a size such as `"4MiB"`; `"auto"`: one repeated block of the model per chunk.
        debug: fill slots with NaN when they are taken and given back.

    Raises:
        OptionsError: an argument makes no sense.
        UnsupportedError: the model is on another device, on "meta", or already placed.
        HomeError: the home has no room; no parameter was moved.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise OptionsError(f"device is {device!r}, which torch does not know") from error
    if kind != "cpu":
        raise UnsupportedError(f"device is {device!r}; this version computes on the CPU only")
    named = dict(model.named_parameters())
    if not named:
        raise OptionsError("the model has no parameters to place")
    for name, parameter in named.items():
        if parameter.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is on {parameter.device}; give it memory and values on the CPU first "
                '(`model.to_empty(device="cpu")`, then initialise or load)'
            )
        if owner(parameter) is not None:
            raise UnsupportedError(f"{name} is placed or compiled already")
    options = parse_options({"home": home, "chunk_size": chunk_size, "debug": debug})
    session = Session(options)
    layout = session.extend_layout(
        [spec_of(name, p) for name, p in named.items() if can_move(p)],
        [spec_of(name, p) for name, p in named.items() if not can_move(p)],
    )
    session.store.place(layout, named, frozenset())
    session.own(named)
    return model
