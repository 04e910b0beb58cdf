"""Keep masters consistent with their parameters, and convert split masters to fp32 ones for saving.

A master is valid only with the parameter contents that the same update wrote. So an optimizer notes to which contents
of a parameter its master belongs. Code that writes to a parameter (`load_state_dict`, `torch.nn.init`, `clamp_`) writes
its master: the next update ignores stale lower bits of a split one, and in an fp32 master replaces the elements that do
not round to the parameter's. Writes through `p.data` are the exception: PyTorch's version counters do not see them.
Lower bits stay then; they are less than half a unit in the last place of what was written, and the rounded master is
what was written. An fp32 master stays as well, and the next update writes the parameter anew from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from chunkc.ir.states import MASTER, MASTER_LOW
from chunkc.ir.strides import dense_strides
from chunkc.kernels.host_memory import host_empty
from chunkc.kernels.split import join_master, split_master
from chunkc.optim.states import flat, flat_like, put_back, tensor_of
from chunkc.runtime.store.shards import local_shards_in

_PIECE_NUM_ELEMENTS = 1 << 16
"""Elements that are converted at a time: temporary tensors take memory of the compute tier."""


@dataclass(frozen=True)
class _Contents:
    """Contents of a parameter: by version counter, and, if the same values may be written once more, by checksum.

    `version` is None from the beginning of an update to its end.
    """

    version: int | None
    checksum: int | None = None


class NotedContents:
    """The contents of each parameter to which its master belongs.

    The master of a parameter without a note is valid. A copy has no notes: an optimizer that is copied lets masters
    follow their parameters first, and notes in the copy what parameters contain.
    """

    def __init__(self) -> None:
        self._contents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[NotedContents], tuple[()]]:
        return NotedContents, ()

    def belong(self, parameter: torch.Tensor) -> bool:
        """Whether the master belongs to what the parameter contains now."""
        noted = self._contents.get(parameter)
        if noted is None or noted.version == parameter._version:
            return True
        return noted.checksum is not None and noted.checksum == checksum(parameter)

    def follow(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Make the parameter's master, if its states have one, that of what was written to the parameter."""
        if not has_master(state) or self.belong(parameter):
            return
        with torch.no_grad():
            if MASTER_LOW in state:
                state[MASTER_LOW].zero_()
            else:
                replace_written(parameter.detach(), state[MASTER])
        self._contents[parameter] = _Contents(parameter._version)

    def begin(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Note that an update of the parameter begins; its master follows first."""
        self.follow(parameter, state)
        if has_master(state):
            self._contents[parameter] = _Contents(None)

    def end(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that the updates of these parameters that began have ended: masters and contents belong together."""
        for parameter in parameters:
            if parameter in self._contents:
                self._contents[parameter] = _Contents(parameter._version)

    def loaded(self, parameter: torch.Tensor, *, changed: bool) -> None:
        """Note that a master was loaded; if that `changed` the parameter, its own values may still be loaded later."""
        self._contents[parameter] = _Contents(parameter._version, checksum(parameter) if changed else None)


def has_master(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's states hold a master, split or not."""
    return MASTER in state or MASTER_LOW in state


def replace_written(param: torch.Tensor, master: torch.Tensor) -> None:
    """Replace elements of an fp32 master that do not round to those of a 16-bit parameter by these.

    On the CPU, this takes no memory of the compute tier, unless the parameter is not dense.

    Args:
        param: of any strides.
        master: of its shape, dense in its order.
    """
    flat_param, flat_master = flat_like(param, param), flat(master)
    for piece in _pieces(param.numel()):
        narrow, wide = flat_param[piece].cpu(), flat_master[piece].cpu()
        rounded = host_empty(narrow.shape, narrow.dtype).copy_(wide)
        is_written = rounded.view(torch.int16).numpy() != narrow.view(torch.int16).numpy()
        widened = host_empty(narrow.shape, torch.float32).copy_(narrow)
        np.copyto(wide.numpy(), widened.numpy(), where=is_written)
        if flat_master.device.type != "cpu":
            flat_master[piece] = wide


def checksum(parameter: torch.Tensor) -> int:
    """Compute the CRC-32 of a bf16 parameter's bytes."""
    elements = flat_like(parameter.detach(), parameter).view(torch.int16)
    return zlib.crc32(elements.cpu().numpy().data)


def load(noted: NotedContents, master: object, parameter: torch.Tensor, lower: torch.Tensor) -> None:
    """Take over a saved fp32 master, and note the contents that it belongs to.

    Args:
        master: None: there is none, and the parameter is its own.
    """
    changed = False
    if master is None:
        lower.zero_()
    else:
        changed = encode(tensor_of(master), parameter.detach(), lower)
    noted.loaded(parameter, changed=changed)


def put_masters_together(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace lower bits, which have followed their parameters, by fp32 masters: a hook of `Optimizer.state_dict`."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, parameter in zip(ids, local_shards_in(optimizer.param_groups), strict=True):
        state = state_dict["state"].get(index, {})
        if MASTER_LOW in state:
            rest = {kind: value for kind, value in state.items() if kind != MASTER_LOW}
            state_dict["state"][index] = {**rest, MASTER: decode(parameter, state[MASTER_LOW])}


def encode(master: torch.Tensor, param: torch.Tensor, lower: torch.Tensor) -> bool:
    """Split an fp32 master, in pieces, into a bf16 tensor and int16 lower bits. Return whether `param` has changed.

    Args:
        master: of any strides and dtype.
        param: of any strides.
        lower: of its shape, dense in its order.
    """
    if master.stride() != lower.stride() or master.dtype != torch.float32 or master.shape != param.shape:
        dense = host_empty((param.numel(),), torch.float32).as_strided(param.shape, lower.stride())
        master = dense.copy_(master)
    changed = False
    flat_master, flat_param, flat_lower = flat(master), flat_like(param, param), flat(lower)
    for piece in _pieces(param.numel()):
        upper, kept = split_master(flat_master[piece].cpu())
        changed = changed or not torch.equal(upper.view(torch.int16), flat_param[piece].cpu().view(torch.int16))
        flat_param[piece], flat_lower[piece] = upper, kept
    put_back(flat_param, param)
    return changed


def decode(param: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Join the fp32 master, dense in the parameter's order, on the CPU in memory that is not the compute tier's."""
    flat_master = host_empty((param.numel(),), torch.float32)
    master = flat_master.as_strided(param.shape, dense_strides(param))
    flat_param, flat_lower = flat_like(param.detach(), param), flat(lower)
    for piece in _pieces(param.numel()):
        flat_master[piece] = join_master(flat_param[piece].cpu(), flat_lower[piece].cpu())
    return master


def _pieces(num_elements: int) -> Iterator[slice]:
    for begin in range(0, num_elements, _PIECE_NUM_ELEMENTS):
        yield slice(begin, min(begin + _PIECE_NUM_ELEMENTS, num_elements))
