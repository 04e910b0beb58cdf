"""List where predicted bytes on the CPU are not exact: each kind of exception, the reason, and the bound used instead.

`scratch.operators` assigns these to operators. All other rules there are exact to the byte. Tests check both: exact
rules equal the measured bytes, and bounds are never below them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inexact:
    """An operator with scratch that is only bounded.

    Attributes:
        when: the calls that are not exact.
        reason: why they are not.
        bound: what is predicted instead.
        only_low_precision: whether only bfloat16 and float16 are inexact.
        loose: whether the bound may be more than twice the measured bytes; read by tests only.
        measurable: whether calls with the same metadata take the same bytes, whatever the values.
    """

    when: str
    reason: str
    bound: str
    only_low_precision: bool = False
    loose: bool = False
    measurable: bool = False


PRODUCT = Inexact(
    "bfloat16 and float16 (and float32 below full matmul precision)",
    "oneDNN packs operands in blocks that it picks by instruction set, cache and thread count",
    "per thread, the padded matrices, or what fits a 2 MiB cache",
    only_low_precision=True,
    loose=True,
    measurable=True,
)
CONVOLUTION = Inexact(
    "but for one small image in float32",
    "oneDNN picks kernels, blocks, its scratchpad and how threads share when it runs",
    "image, filters and result in blocks, and sums of threads: of dense, depthwise, grouped and strided ones in "
    "float32 mostly within twice what they take; for unusual shapes, also an unfolded image per thread",
    loose=True,
    measurable=True,
)
STATISTICS = Inexact(
    "low precision, neither contiguous nor channels last",
    "sums over such an input go through float32 copies of it",
    "one float32 copy and the channels' sums",
    only_low_precision=True,
    measurable=True,
)
LAPACK = Inexact(
    "always",
    "LAPACK says only when it runs how much workspace it wants, and of small matrices it wants little",
    "copies of the matrices, pivots, and for each row or column of one matrix the most that MKL was seen to want",
    loose=True,
    measurable=True,
)
RARE = Inexact(
    "always",
    "hardly any model trains with these",
    "copies of operands and results, made or not: on 95 % of PyTorch's own samples at most three times what they take "
    "and 4 KiB more",
    loose=True,
    measurable=True,
)
POWERS = Inexact(
    "always", "the norm of each matrix says how many of its powers are made", "the most: twelve matrices", loose=True
)
STEPS = Inexact(
    "always", "computed in several steps that ATen may fuse", "temporaries in the widest dtype", measurable=True
)
ATTENTION = Inexact(
    "more than one thread, and low precision",
    "each thread makes a sum per row while it works, and threads need not work at the same time; "
    "low precision is packed by oneDNN",
    "all threads at the same time",
    loose=True,
)
MASK = Inexact("always", "composed of several operators", "values, masks and indices at the same time", measurable=True)
SELECTED = Inexact(
    "always", "the mask's values say how many elements it selects", "all of them, with their positions", loose=True
)
REPEATED = Inexact("always", "the values say how many of them repeat", "none of them", loose=True)

BEYOND_OPERATORS: tuple[Inexact, ...] = (
    Inexact(
        "gradients of outputs other than the loss, and new values of buffers, in the backward",
        "whether the caller still holds what a graph returned or was given is not known when planning",
        "held to the end of the backward",
    ),
    Inexact(
        "several graphs: values that one graph gives to the next",
        "Python between the graphs decides when they are dropped",
        "held as long as the graph that returned them runs backwards",
    ),
)
"""Exceptions that belong to no operator: values alive outside of a graph."""
