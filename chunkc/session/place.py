"""`chunkc.place`: pack a model into its home before anything is compiled, or make it there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.layout import PARAM, ChunkLayout
from chunkc.machines.devices import parse_device
from chunkc.options import Options, parse_options
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.storage.unassigned import unassigned_memory_of_parameter
from chunkc.session.lookup import join
from chunkc.session.movable import can_move, will_move
from chunkc.session.pending_readers import await_readers
from chunkc.session.session import Session, owner

RESET_PARAMETERS = "reset_parameters"

Initialise = Callable[[nn.Module], object]
"""Gives values to the parameters and buffers that a module itself has."""


def place(
    model: nn.Module,
    *,
    device: torch.device | str = "cpu",
    home: str | None = None,
    disk_holds: str | None = None,
    chunk_size: int | str = "auto",
    debug: bool = False,
    init: str | Initialise | None = None,
) -> nn.Module:
    """Move a model's parameters into home chunks, in place, and return the model.

    For models larger than the device: `torch.compile` alone moves parameters home only when it compiles, so until
    then they take room on the compute tier. Chunks are laid out in the order of `model.named_parameters()`.

    A model that was built on the meta device is made at home with `init`, module by module: children first, as they
    are built. Only the module's own tensors are in memory besides the chunks. What was on the meta device is a new
    `nn.Parameter` afterwards, and a weight that modules share stays one: make optimizers later.

    Args:
        device: where the model will compute: `"cpu"` or a CUDA device such as `"cuda"`. Parameters go from CPU memory
            straight to their homes, behind a GPU in pinned memory; `p.data` is then a tensor of the GPU's over it. Only
            what does not live in chunks moves to the device: small parameters, buffers.
        home: `"cpu"` (RAM outside the budget), `"disk"` or `"disk:DIR"`. None: where `chunkc.init` built the model, or
            the environment variable `CHUNKC_HOME`, or else `"cpu"`.
        disk_holds: what a disk holds: optimizer `"states"`, the rest being in RAM; `"everything"`; or `"auto"`:
            everything on a CPU, states behind a GPU. None: as in `chunkc.init`, or else `"auto"`.
        chunk_size: bytes or a size such as `"4MiB"`; `"auto"`: one repeated block of the model per chunk.
        debug: fill slots with NaN when they are taken and given back.
        init: gives values to a module from the meta device: a function that is called with it, such as
            `model._init_weights` of a `transformers` model, or `"reset_parameters"` for the module's own method. The
            module's parameters and buffers are on the CPU then, and hold nothing yet, but for a weight that a module
            before has too. It writes to them in place, or assigns others that are alike.

    Raises:
        OptionsError: an argument has a wrong type or value, or the model has no parameters.
        UnsupportedError: there is no such device, or it cannot read files in place and a disk is to hold everything;
            the model is not on the CPU, or already placed; it is on the meta device, and `init` is not given or cannot
            be used.
        HomeError: the home has no room; no parameter was moved.
    """
    target = parse_device(device)
    named = dict(model.named_parameters())
    if not named:
        raise OptionsError("the model has no parameters to place: compile it as it is")
    await_readers(named.values())
    for name, parameter in named.items():
        _check(name, parameter, init)
    present = {name: parameter for name, parameter in named.items() if not parameter.is_meta}
    initialise = _initialiser(model, init) if len(present) < len(named) else None
    born = next(filter(None, map(unassigned_memory_of_parameter, present.values())), None)
    home = home or (born.home if born else None)
    disk_holds = disk_holds or (born.disk_holds if born else "auto")
    given = {"disk_holds": disk_holds, "chunk_size": chunk_size, "debug": debug}
    options = parse_options(given if home is None else {"home": home, **given}, os.environ)
    session = Session(options, device=target)
    layout = _laid_out(session, named)
    session.store.place(layout, present, frozenset())
    if initialise is not None:
        try:
            _make(model, session, initialise)
        except BaseException:
            session.end()
            raise
        named = dict(model.named_parameters())
    move_residents(model, [named[spec.name] for spec in layout.small], session.store.tier.device)
    session.own(named)
    session.modules.add(model)
    return model


def place_parts(model: nn.Module, parts: Mapping[str, nn.Parameter], transport: Transport, options: Options) -> None:
    """Move this rank's parts of a model's parameters into home chunks behind its GPU; all else stays where it is.

    Raises:
        HomeError: home has no room, or cannot be pinned; nothing was moved.
        UnsupportedError: a disk is to hold everything, and the GPU cannot read files in place.
    """
    session = Session(options, device=transport.device)
    join(session, transport, options)
    session.store.place(_laid_out(session, parts), parts, frozenset())
    session.own(parts)
    session.modules.add(model)


def _laid_out(session: Session, named: Mapping[str, nn.Parameter]) -> ChunkLayout:
    movable = {name for name, p in named.items() if can_move(p) or will_move(p)}
    return session.extend_layout(
        [session.spec_of(name, p) for name, p in named.items() if name in movable],
        [session.spec_of(name, p) for name, p in named.items() if name not in movable],
    )


def _check(name: str, parameter: nn.Parameter, init: object) -> None:
    if parameter.is_meta and init is None:
        raise UnsupportedError(
            f'{name} is on the meta device and has no values: give `init`, "{RESET_PARAMETERS}" or a function that '
            "initialises one module; or build the model inside `with chunkc.init():`"
        )
    if parameter.is_meta and type(parameter) is not nn.Parameter:
        raise UnsupportedError(f"{name} is a {type(parameter).__name__} on the meta device: build it on the CPU")
    if parameter.device.type not in ("cpu", "meta"):
        raise UnsupportedError(f"{name} is on {parameter.device}: place a model while it is on the CPU")
    if owner(parameter) is not None:
        raise UnsupportedError(
            f"{name} is placed or compiled already: there is nothing to place (for another home, make the model anew)"
        )


def _initialiser(model: nn.Module, init: str | Initialise | None) -> Initialise:
    """Return the function that initialises each module of a model on the meta device."""
    if callable(init):
        return init
    if init != RESET_PARAMETERS:
        raise OptionsError(f'init is "{RESET_PARAMETERS}" or a function that takes a module, not {init!r}')
    for prefix, module in model.named_modules():
        for key, tensor in _own_tensors(module):
            if tensor.is_meta and _resets(module) is None:
                raise UnsupportedError(
                    f"{f'{prefix}.{key}' if prefix else key} is on the meta device, and {type(module).__name__} has no "
                    "reset_parameters(): give `init` a function that initialises such a module"
                )

    def reset(module: nn.Module) -> None:
        method = _resets(module)
        assert method is not None
        method()

    return reset


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module itself has, under each of their names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _resets(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that initialises a module; PyTorch's attention has it under a name with an underscore."""
    found = getattr(module, RESET_PARAMETERS, None) or getattr(module, f"_{RESET_PARAMETERS}", None)
    return found if callable(found) else None


@torch.no_grad()
def _make(model: nn.Module, session: Session, initialise: Initialise) -> None:
    """Give what is on the meta device memory and values, each module's as soon as it has them at home."""
    store = session.store
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what stood for it, which keeps its id, and what it is
    for module in _children_first(model, set()):
        of_meta = [(key, tensor) for key, tensor in _own_tensors(module) if tensor.is_meta]
        new = {id(tensor) for _, tensor in of_meta} - made.keys()
        made |= {id(tensor): (tensor, _on_cpu(tensor)) for _, tensor in of_meta if id(tensor) in new}
        for key, tensor in of_meta:
            setattr(module, key, made[id(tensor)][1])
        if new:
            initialise(module)
        for key, tensor in of_meta:
            found = getattr(module, key, None)
            if found is made[id(tensor)][1]:
                continue
            is_tied = id(tensor) not in new or sum(other is tensor for _, other in of_meta) > 1
            _check_assigned(names.get(id(tensor), key), tensor, found, is_tied=is_tied)
            assert found is not None
            made[id(tensor)] = tensor, found
        for name, parameter in [(names[at], made[at][1]) for at in new if at in names]:
            assert isinstance(parameter, nn.Parameter)
            if store.views.is_managed(name):
                store.write(PARAM, name, parameter)
            store.bind(name, parameter)


def _check_assigned(name: str, meta: torch.Tensor, found: object, *, is_tied: bool) -> None:
    """Refuse a tensor that `init` assigned to a parameter or buffer, if it cannot take the meta tensor's place.

    Raises:
        UnsupportedError: it cannot; the message names it.
    """
    if is_tied:
        raise UnsupportedError(
            f"`init` assigned something new to {name}, which is a tied weight: write to it in place (nn.init, copy_)"
        )
    if type(found) is not type(meta) or (found.shape, found.dtype, found.stride(), found.device.type) != (
        meta.shape,
        meta.dtype,
        meta.stride(),
        "cpu",
    ):
        raise UnsupportedError(
            f"`init` made {name} a {_shown(found)}, and it was a {_shown(meta)}: write to it in place (nn.init, "
            "copy_), or assign one that is alike and on the CPU"
        )


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{type(value).__name__} of {value.dtype} {list(value.shape)} on {value.device}"


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor like one on the meta device, without values."""
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield each module once, after those inside it: the order in which constructors draw random numbers."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def move_residents(model: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
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
