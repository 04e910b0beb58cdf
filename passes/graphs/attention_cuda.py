"""Predict the attention kernel that PyTorch takes on a CUDA device.

`scaled_dot_product_attention` goes through its kernels in order and takes the first that supports the arguments. Hopper
and the Blackwell of data centres have cuDNN's first (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`:
`check_prefer_cudnn_attention`, `can_use_cudnn_attention`); other devices FlashAttention's (`can_use_flash_attention`),
then the memory-efficient one (`can_use_mem_efficient_attention`). If no kernel does, attention is taken apart into
products and a softmax ("math"), which keep a number for each pair of rows. The rules for cuDNN's here are common to
PyTorch 2.11, 2.12 and 2.13 unless a version is named, with the cuDNN that their packages for CUDA 13 bring (9.19, 9.20,
9.20).
"""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.torch_version import TorchVersion

Kernel = Literal["cudnn", "flash", "efficient", "math"]
Capability = tuple[int, int]
"""Compute capability of a device: major, minor."""

_DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
_CUDNN_AFTER = 91500
"""Newest cuDNN version that does not come first: older kernels are wrong at some lengths."""

_HALF = (torch.float16, torch.bfloat16)
_AMPERE, _HOPPER = (8, 0), (9, 0)
_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
_MAX_HEADS_OR_BATCH = 65535


def attention_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    capability: Capability | None,
    *,
    causal: bool = False,
    cudnn: bool = True,
    version: str = torch.__version__,
) -> Kernel:
    """Return the kernel for tensors of shape (batch, heads, length, head size), without dropout.

    Args:
        query, key, value, mask: only sizes, strides and dtypes are read; symbolic sizes are taken for ordinary ones and
            nothing is guarded.
        capability: of the device; None if it is not known: then of one that has FlashAttention, and not cuDNN first.
        causal: the mask is the lower triangle, without a tensor for it.
        cudnn: whether cuDNN's kernel is allowed (`may_take_cudnn`).
        version: PyTorch's.
    """
    if (
        cudnn
        and capability is not None
        and prefers_cudnn(capability, version)
        and _cudnn_can(query, key, value, mask, capability, version)
    ):
        return "cudnn"
    if mask is None and _flash_can(query, key, value, capability, causal):
        return "flash"
    return "efficient" if _efficient_can(query, key, value, capability) else "math"


def prefers_cudnn(capability: Capability, version: str = torch.__version__) -> bool:
    """Whether cuDNN's kernel comes first on such a device."""
    major, minor = capability
    return major in (9, 10) and (minor in (0, 3) or TorchVersion(version) >= "2.13")


def may_take_cudnn() -> bool:
    """Whether environment, switches and cuDNN's version allow torch to take cuDNN's kernel.

    A torch without cuDNN plans for one that has it.
    """
    cudnn_version = torch.backends.cudnn.version()
    deterministic = torch.are_deterministic_algorithms_enabled() and not (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return (
        os.environ.get(_DEPRIORITIZED) != "1"
        and not deterministic
        and torch.backends.cuda.cudnn_sdp_enabled()
        and (cudnn_version is None or cudnn_version > _CUDNN_AFTER)
    )


def _flash_can(query: Tensor, key: Tensor, value: Tensor, capability: Capability | None, causal: bool) -> bool:
    """Whether FlashAttention's kernel supports the arguments: `can_use_flash_attention`, with gradients."""
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    square = not statically_known_true(query.shape[2] != key.shape[2])
    return (
        query.dtype in _HALF
        and (capability is None or capability >= _AMPERE)
        and len(widths) == 1
        and max(widths) <= 256
        and not (capability in _LITTLE_SHARED_MEMORY and 192 < max(widths) <= 224)
        and (square or not causal)
    )


def _efficient_can(query: Tensor, key: Tensor, value: Tensor, capability: Capability | None) -> bool:
    """Whether the memory-efficient kernel supports the arguments: `can_use_mem_efficient_attention`.

    Checks that the CPU's kernel shares are left out: the tensors have passed those. Heads must not share keys.
    """
    is_ampere = capability is None or capability >= _AMPERE
    is_half = query.dtype in _HALF
    aligned = 8 if is_half else 4 if is_ampere else 1
    return (
        (is_ampere or query.dtype != torch.bfloat16)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[-1] % aligned == 0
        and value.shape[-1] % aligned == 0
    )


def _cudnn_can(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, capability: Capability, version: str
) -> bool:
    """Whether cuDNN's kernel supports the arguments: `can_use_cudnn_attention`.

    Checks that the CPU's kernel shares are left out: the tensors have passed those.
    """
    operands = (query, key, value)
    widths = (query.shape[-1], value.shape[-1])
    most = 256 if capability == _HOPPER else 192 if widths == (192, 128) else 128
    too_many = TorchVersion(version) >= "2.13" and any(
        statically_known_true(size > _MAX_HEADS_OR_BATCH) for size in query.shape[:2]
    )
    strided = [*operands, *(() if mask is None else (mask,))]
    return (
        all(tensor.dtype in _HALF for tensor in operands)
        and all(width % 8 == 0 and width <= most for width in widths)
        and all(statically_known_true(tensor.stride(-1) == 1) for tensor in strided)
        and not statically_known_true(key.shape[2] == 1)
        and not too_many
    )
