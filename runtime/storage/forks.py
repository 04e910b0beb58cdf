"""Protect a disk home in a child of `os.fork`: its tensors raise at any use, and no write reaches the parent.

A home in RAM is a snapshot there, as all memory is. A file that both processes map is not: the child would read and
change the parent's training state. A copy of the file at every fork would cost a model's size for each worker of a data
loader. So tensors over it, in the child, raise at any use; and its pages become private, for code that has addresses.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.storage.maps import make_private_in_child


def _refuse(
    cls: type, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
) -> NoReturn:
    raise UnsupportedError(
        "this tensor lives in a disk home of the parent process, and a child of os.fork cannot read it: pass a copy "
        '(`p.detach().clone()`) that is made before the fork, start processes by "spawn", or choose home="cpu"'
    )


class _ParentsTensor(torch.Tensor):
    __torch_function__: Any = classmethod(_refuse)


class _ParentsParameter(nn.Parameter):
    __torch_function__: Any = classmethod(_refuse)


_tensors: dict[int, weakref.ref[torch.Tensor]] = {}


def refuse_in_forks(tensor: torch.Tensor) -> None:
    """Make any use of this tensor object raise UnsupportedError in children of `os.fork`."""
    key = id(tensor)
    _tensors[key] = weakref.ref(tensor, lambda _: _tensors.pop(key, None))


def _after_fork_in_child() -> None:
    for reference in list(_tensors.values()):
        tensor = reference()
        if tensor is not None:
            tensor.__class__ = _ParentsParameter if isinstance(tensor, nn.Parameter) else _ParentsTensor
    make_private_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
