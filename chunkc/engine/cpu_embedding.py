"""Look up embeddings on the CPU, with weights that stay in its memory: PatrickStar's `use_cpu_embedding`.

A forward copies indices to the CPU and rows to the device. A backward copies the rows' gradient to the CPU, which
computes the weight's gradient and updates the weight. The lookup is a graph break of Dynamo, so it is in no graph. All
copies use pageable memory and block, so no data is read before it has arrived.
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
    """Embedding with its weight and its lookup on the CPU.

    Attributes:
        rows_on: device that the rows are copied to.
    """

    rows_on: torch.device

    @torch.compiler.disable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of integer indices, which have any shape and are on any device."""
        return super().forward(input.to("cpu")).to(self.rows_on)


def chosen(model: nn.Module) -> list[nn.Embedding]:
    """Return a model's embeddings that the CPU can look up, and log the weights of the others.

    Others are embeddings with a weight that is no plain parameter, or that a module of another type has, too.

    Raises:
        UnsupportedError: a weight is not on the CPU, is placed already, or is trained with sparse gradients.
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
    """Remove the embeddings' weights from the model inside the context, so that they are not placed or moved."""
    weights = [embedding._parameters[_WEIGHT] for embedding in embeddings]
    try:
        for embedding in embeddings:
            embedding._parameters[_WEIGHT] = None
        yield
    finally:
        for embedding, weight in zip(embeddings, weights, strict=True):
            embedding._parameters[_WEIGHT] = weight


def look_up_on_cpu(embeddings: Sequence[nn.Embedding], device: torch.device) -> None:
    """Make the CPU look up embeddings, by a new class of the same objects; rows are copied to the device."""
    for embedding in embeddings:
        embedding.__class__ = _kept(type(embedding))
        embedding.rows_on = device  # type: ignore[assignment]


def _kept(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """Return a class of embeddings in which the given class's `super().forward` is that of `CpuEmbedding`."""
    if kind is nn.Embedding or issubclass(kind, CpuEmbedding):
        return CpuEmbedding if kind is nn.Embedding else kind
    return type(kind.__name__, (kind, CpuEmbedding), {"__module__": kind.__module__, "__doc__": kind.__doc__})
