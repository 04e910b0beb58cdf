"""Calls of attention, and those of them for which PyTorch takes another kernel than plans say."""

from __future__ import annotations

from itertools import product

import torch
from torch.nn.attention import SDPBackend

from chunkc.passes.graphs.attention_cuda import attention_kernel

BATCH, HEADS, ROWS = 2, 4, 16
KERNELS = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
}


def others() -> tuple[int, list[str]]:
    """Count the calls, and list those for which PyTorch takes another kernel than plans say.

    The device has no cuDNN.
    """
    capability, found, num_calls = torch.cuda.get_device_capability(), [], 0
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    widths, of_values = (8, 20, 60, 64, 96, 128, 200, 256, 264, 516), (None, 64)
    for dtype, width, value_width, shared, rows in product(dtypes, widths, of_values, (HEADS, 2, 1), (ROWS, 48)):
        sizes = (HEADS, ROWS, width), (shared, rows, width), (shared, rows, value_width or width)
        query, key, value = (
            torch.empty(BATCH, *size, dtype=dtype, device="cuda", requires_grad=True) for size in sizes
        )
        full = torch.empty(BATCH, 1, ROWS, rows, dtype=torch.bool, device="cuda")
        for mask, causal in ((None, False), (None, True), (full, False), (full.to(dtype), False)):
            number = torch._fused_sdp_choice(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shared != HEADS
            )
            taken = KERNELS[SDPBackend(number)]
            said = attention_kernel(query, key, value, mask, capability, causal=causal, cudnn=False)
            num_calls += 1
            if taken != said:
                found.append(f"{dtype} {sizes} {mask is not None} {causal}: {taken}, not {said}")
    return num_calls, found
