"""A small model for each optimizer of `optim_db`, trained with PyTorch's and with chunkc's of the same name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import chunkc
from databases.modules import Sample
from databases.training import Subject


@cache
def optimizer_infos() -> Mapping[str, Any]:
    """`optim_db` by name: `optim/NAME`."""
    from torch.testing._internal.common_optimizers import optim_db

    return {f"optim/{info.optim_cls.__name__}": info for info in optim_db}


def subjects_of(case: str) -> Iterator[Subject]:
    """Yield a training for each of an optimizer's inputs that brings no parameters of its own.

    The compiled model is trained by the same optimizer, then by chunkc's of that name.
    """
    info = optimizer_infos()[case]
    sample = _sample(case)
    for given in info.optim_inputs_func(device="cpu", dtype=torch.float32):
        if given.params is not None:
            continue
        plain = partial(_made, info.optim_cls, given.kwargs)
        yield Subject(f"torch.optim, {given.desc}", sample, plain, plain)
        if (own := getattr(chunkc.optim, info.optim_cls.__name__, None)) is not None:
            yield Subject(f"chunkc.optim, {given.desc}", sample, plain, partial(_made, own, given.kwargs), False)


def _made(kind: Any, arguments: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return kind(parameters, **copy.deepcopy(dict(arguments)))


def _sample(case: str) -> Sample:
    torch.manual_seed(0)
    if case == "optim/SparseAdam":
        return _steps(nn.Embedding(9, 6, sparse=True), torch.randint(0, 9, (4,)))
    has_bias = case != "optim/Muon"  # which takes matrices alone
    model = nn.Sequential(nn.Linear(6, 8, bias=has_bias), nn.Tanh(), nn.Linear(8, 4, bias=has_bias))
    return _steps(model, torch.randn(5, 6))


def _steps(model: nn.Module, x: torch.Tensor) -> Sample:
    return Sample(model, (((x,), {}), ((x,), {})))
