"""Look up embeddings on the CPU, with weights that stay in its memory: PatrickStar's `use_cpu_embedding`.

Indices go to the CPU, rows come to the device. Backward, the rows' gradient goes to the CPU, where that of the weight
is made; so it is the CPU that updates it. A lookup is no part of the graph: Dynamo breaks it there. Both copies are
pageable, and wait: nothing reads what has not arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from chunkc.ir.errors import UnsupportedError
from chunkc.session.logs import logger
from chunkc.session.session import owner

_WEIGHT = "weight"
_LEFT = "and is left to the plan, like all other parameters"


class CpuEmbedding(nn.Embedding):
    """Looks up on the CPU.

    Attributes:
        rows_on: where its rows go.
    """

    rows_on: torch.device

    @torch.compiler.disable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of integer indices of any shape, on any device."""
        return super().forward(input.to("cpu")).to(self.rows_on)


def chosen(model: nn.Module) -> list[nn.Embedding]:
    """The embeddings of a model that the CPU can look up. Weights of others are told, each once.

    Raises:
        UnsupportedError: one is not on the CPU, or placed already; or it is trained and has sparse gradients.
    """
    users: dict[int, dict[str, nn.Module]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), {})[f"{prefix}.{name}" if prefix else name] = module
    found, left = [], set()
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        name, weight = f"{prefix}.{_WEIGHT}" if prefix else _WEIGHT, module._parameters.get(_WEIGHT)
        if type(weight) is not nn.Parameter:
            logger.warning("use_cpu_embedding: %s is no ordinary parameter, %s", name, _LEFT)
        elif others := [other for other, user in users[id(weight)].items() if not isinstance(user, nn.Embedding)]:
            if id(weight) not in left:
                logger.warning("use_cpu_embedding: %s is %s too, %s", name, " and ".join(others), _LEFT)
            left.add(id(weight))
        else:
            _check(name, module, weight)
            found.append(module)
    return found


def _check(name: str, module: nn.Embedding, weight: nn.Parameter) -> None:
    if weight.device.type != "cpu":
        raise UnsupportedError(f"{name} is on {weight.device}; use_cpu_embedding keeps it on the CPU: build it there")
    if owner(weight) is not None:
        raise UnsupportedError(
            f"{name} is placed or compiled already, and use_cpu_embedding keeps it out of chunks: give "
            "initialize_engine the model before"
        )
    if module.sparse and weight.requires_grad:
        raise UnsupportedError(
            f"{name} is that of an nn.Embedding with sparse=True, and chunkc has no sparse gradients; make it with "
            "sparse=False"
        )


@contextmanager
def set_apart(embeddings: Sequence[nn.Embedding]) -> Iterator[None]:
    """Inside, their weights are no parameters of the model, so that nothing places or moves them."""
    weights = [embedding._parameters[_WEIGHT] for embedding in embeddings]
    try:
        for embedding in embeddings:
            embedding._parameters[_WEIGHT] = None
        yield
    finally:
        for embedding, weight in zip(embeddings, weights, strict=True):
            embedding._parameters[_WEIGHT] = weight


def look_up_on_cpu(embeddings: Sequence[nn.Embedding], device: torch.device) -> None:
    """From now on the CPU looks these up, for a model that computes on the device. They stay the objects they are."""
    for embedding in embeddings:
        embedding.__class__ = _kept(type(embedding))
        embedding.rows_on = device  # type: ignore[assignment]


def _kept(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """A class of embeddings with `CpuEmbedding`'s forward as its `super().forward`."""
    if kind is nn.Embedding or issubclass(kind, CpuEmbedding):
        return CpuEmbedding if kind is nn.Embedding else kind
    return type(kind.__name__, (kind, CpuEmbedding), {"__module__": kind.__module__, "__doc__": kind.__doc__})
