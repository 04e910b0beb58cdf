"""Names in the wrappers that Inductor generates: `torch/_inductor/codegen/wrapper.py` and
`torch/_inductor/codegen/cuda/device_op_overrides.py`. Other versions may call others: then a wrapper is not read, and
its memory is bounded from the graph."""

from __future__ import annotations

CHECKS = frozenset(
    {
        "assert_size_stride",
        "assert_size_stride_grouped",  # from 2.14 on
        "assert_alignment",
        "assert_tensor_metadata",  # from 2.14 on, where a fallback's result is checked with its dtype
    }
)
"""Functions that look at tensors, return nothing and allocate nothing."""

SAME_TENSOR = frozenset({"copy_if_misaligned"})  # from 2.13 on, before a kernel first reads an input
"""Functions that return the tensor they are given: all that chunks and allocators give is aligned."""
