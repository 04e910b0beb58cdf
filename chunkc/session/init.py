"""`chunkc.init`: modules are built straight into home memory, one tensor at a time.

PatrickStar calls this `release_after_init`. PyTorch's own hooks say when a module gets a parameter or a submodule; a
function mode sees copies of whole layers, and which tensors are written.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from chunkc.ir.strides import is_dense
from chunkc.machines.devices import parse_device
from chunkc.options import parse_options
from chunkc.runtime.storage.forks import refuse_in_forks
from chunkc.runtime.storage.maps import drop_span, evict_pages
from chunkc.runtime.storage.unassigned import (
    SMALLEST_NBYTES,
    UnassignedMemory,
    note_unassigned_memory,
    unassigned_memory_at,
    unassigned_memory_of,
)
from chunkc.session.movable import can_move
from chunkc.session.place import place
from chunkc.session.session import owner


@contextmanager
def init(
    *, home: str = "cpu", device: torch.device | str = "cpu", disk_holds: str = "auto", chunk_size: int | str = "auto"
) -> Iterator[None]:
    """Move each parameter that a module gets inside the block into home memory at once, whatever builds the module.

        with chunkc.init(home="disk:/data"):
            model = GPT(config)
        model = torch.compile(model, backend="chunkc", options={"memory_budget": "6GiB"})

    Random numbers are those of ordinary construction on the CPU. What initialises parameters in place writes home. On
    a disk, pages that are not in use leave the RAM: one tensor is in memory at a time, with its place at home. Buffers
    and parameters smaller than a page stay ordinary. Tensors are at home on a CPU until the first call of the compiled
    model, which lays them into chunks in order of use, one after the other, or until `chunkc.place`; behind a GPU,
    they are placed when the block ends, in the order of `model.named_parameters()`.

    What was built is compiled with the same home: other values of `home` and `disk_holds` are refused then.

    Args:
        home, disk_holds, chunk_size: as in `chunkc.place`. A chunk size is for a GPU; on a CPU it is an option of
            `torch.compile`.
        device: where the model will compute.

    Raises:
        OptionsError: an argument has a wrong type or value.
        UnsupportedError: there is no such device.
        HomeError: the directory cannot be used; inside the block: the home has no room.
    """
    target = parse_device(device)
    options = parse_options({"home": home, "disk_holds": disk_holds, "chunk_size": chunk_size})
    holds_parameters = options.disk_holds_everything(target.type)
    builder = _Builder(unassigned_memory_at(home, disk_holds, disk_holds_parameters=holds_parameters))
    with builder.listening():
        yield
    if target.type != "cpu":
        for root in builder.roots():
            place(root, device=target, home=home, disk_holds=disk_holds, chunk_size=chunk_size)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""What a function mode sees of `p.data = ...`."""


class _Builder(TorchFunctionMode):
    """Moves the parameters of modules that one thread builds: the thread that made this object."""

    def __init__(self, unassigned_memory: UnassignedMemory) -> None:
        super().__init__()
        self._unassigned_memory = unassigned_memory
        self._thread = threading.get_ident()
        self._waiting: list[weakref.ref[nn.Parameter]] = []  # others had their memory when they were registered
        self._in_use: dict[int, int] = {}  # tensors with pages in memory: address -> bytes
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in (
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_module_registration_hook(self._on_module),
            ):
                stack.callback(hook.remove)
            stack.callback(self._use, ())
            with self:
                yield
            self._retry()

    def roots(self) -> list[nn.Module]:
        """Return the modules with parameters that were built and are inside no other module."""
        inner = {id(child) for module in self._modules for child in module.children()}
        return [
            module for module in self._modules if id(module) not in inner and any(True for _ in module.parameters())
        ]

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        if func is torch.Tensor.clone and _is_whole_copy(args, kwargs):  # how `deepcopy` copies a layer
            made = self._unassigned_memory.copy_of(args[0])
        else:
            is_conversion = func == _SET_DATA and _is_born(args[0])
            made = func(*args, **kwargs)
            if is_conversion:  # by `half()`, say; the former tensor has no other reference then
                self._retry()
                self._adopt(args[0])
        used = [value for value in _tensors(args, kwargs) if _is_born(value)]
        if used:
            self._use(used)
        return made

    def _use(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors in use now, and drop the pages of all others."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        in_use = {storage.data_ptr(): storage.nbytes() for storage in storages}
        for address, nbytes in self._in_use.items():
            if address not in in_use:
                drop_span(address, nbytes)
        self._in_use = in_use

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if threading.get_ident() == self._thread and parameter is not None:
            self._modules.add(module)
            self._retry()
            self._adopt(parameter)

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() == self._thread and child is not None:
            self._modules.update((module, child))
            for parameter in child.parameters():
                self._adopt(parameter)

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, []
        for reference in waiting:
            if (parameter := reference()) is not None:
                self._adopt(parameter)

    def _adopt(self, parameter: nn.Parameter) -> None:
        if parameter.device.type != "cpu" or parameter.nbytes < SMALLEST_NBYTES:
            return
        if unassigned_memory_of(parameter) is not None or owner(parameter) is not None:
            return
        if can_move(parameter):
            former = parameter.data
            parameter.data = self._unassigned_memory.copy_of(former)
            note_unassigned_memory(parameter, self._unassigned_memory)
            if self._unassigned_memory.parameter_home.is_shared_with_forks:
                refuse_in_forks(parameter)
            evict_pages(former)  # `from_pretrained` maps files, and keeps them to its end
        else:
            self._waiting.append(weakref.ref(parameter))


def _is_born(value: object) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter) and unassigned_memory_of(value) is not None  # type: ignore[arg-type]


def _is_whole_copy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a clone has the elements that a parameter has, in its order, and no history."""
    if len(args) != 1 or not _is_born(args[0]) or not is_dense(args[0]) or args[0].nbytes < SMALLEST_NBYTES:
        return False
    is_recorded = args[0].requires_grad and torch.is_grad_enabled()
    return kwargs.get("memory_format", torch.preserve_format) is torch.preserve_format and not is_recorded


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
