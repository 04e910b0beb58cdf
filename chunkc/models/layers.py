"""Tensor parallelism of the built-in models, as in Megatron-LM (Shoeybi et al., 2019).

Each device has some heads of each attention and some inner features of each feed-forward network: columns of the
matrices before them, and rows of the matrix after them. The devices' products are summed. Embeddings, norms and output
heads are whole on every device. Where queries, keys and values are one matrix, a device's columns are taken as the
three of its own heads.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chunkc.ir.errors import OptionsError
from chunkc.models.registry import ModelSpec

_COLUMNS, _ROWS = ("q", "k", "v", "qkv", "gate", "up"), ("out", "down")
_HEADS = ("num_heads", "num_kv_heads")


def cut_layers(spec: ModelSpec, model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the blocks of a built-in model, in place, over the ranks of a one-dimensional mesh.

    Raises:
        OptionsError: the number of heads is no multiple of the number of ranks, or the model's blocks cannot be cut.
    """
    if not spec.config.has_heads_apart:
        raise OptionsError(
            f"chunkc does not know how to cut the layers of {spec.name} over devices, only those of GPTs, BERTs, ViTs "
            "and Llamas: write a factory that calls parallelize_module, and explain FILE.py:FACTORY"
        )
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key in _HEADS:
            if (num_heads := getattr(module, key, None)) is not None:
                setattr(module, key, _heads_per_device(spec, key, num_heads, mesh.size()))
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in (*_COLUMNS, *_ROWS):
            plan[name] = ColwiseParallel() if last in _COLUMNS else RowwiseParallel()
    parallelize_module(model, mesh, plan)


def _heads_per_device(spec: ModelSpec, key: str, num_heads: int, num_ranks: int) -> int:
    if num_heads % num_ranks:
        raise OptionsError(
            f"the layers of {spec.name} cannot be cut over {num_ranks} devices: every device computes the same number "
            f"of whole heads, and {key} is {num_heads}; end mesh with a number that divides {num_heads}"
        )
    return num_heads // num_ranks
