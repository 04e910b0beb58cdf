"""Names in the wrappers that Inductor generates.

Sources: `torch/_inductor/codegen/wrapper.py` and `torch/_inductor/codegen/cuda/device_op_overrides.py`. If another
version generates other names, the wrapper is not read, and its memory is bounded from the graph.
"""

from __future__ import annotations

CHECKS = frozenset(
    {
        "assert_size_stride",
        "assert_size_stride_grouped",  # from 2.14 on
        "assert_alignment",
        "assert_tensor_metadata",  # from 2.14 on, where a fallback's result is checked with its dtype
    }
)
"""Functions that check tensors; they return and allocate nothing."""

SAME_TENSOR = frozenset({"copy_if_misaligned"})  # from 2.13 on, before a kernel first reads an input
"""Functions that return their argument itself, since tensors in chunks and from allocators are aligned."""
