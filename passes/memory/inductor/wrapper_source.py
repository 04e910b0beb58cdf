"""Generate the wrapper that Inductor would generate for a segment, without compiling its kernels.

Lowering, scheduling and code generation take a fraction of the C++ compiler's time. The source is the same as
`compile_fx_inner`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from chunkc.passes.graphs.graphs import is_compute
from chunkc.passes.segments.segments import Segment
from chunkc.torch_private.inductor import generate_wrapper
from chunkc.torch_private.versions import newer_than_checked


@dataclass(frozen=True)
class WrapperSource:
    """The source of a segment's wrapper.

    Inductor replaces some operations; a buffer of such a one counts as made by the last of its operands' operations.

    Attributes:
        source: "" where it cannot be had.
        made_by: buffer -> index of the segment's operation that makes it, where that is known.
    """

    source: str
    made_by: Mapping[str, int]


def wrapper_of(segment: Segment) -> WrapperSource:
    """Generate the Python wrapper that `compile_fx_inner` would generate for a segment.

    The segment is left as it is: Inductor's passes work on a copy of its graph. No kernel is compiled and nothing is
    written to Inductor's caches, but the first call of a process asks the C++ compiler for its vector instructions,
    unless Inductor knows them already.
    """
    module = fx.GraphModule(segment.module, copy.deepcopy(segment.module.graph))
    try:
        source, nodes_of = generate_wrapper(module, segment.example_inputs)
    except (AttributeError, TypeError):  # Inductor's steps have other names in an unchecked version
        if newer_than_checked() is None:
            raise
        return WrapperSource("", {})
    operations = [node.name for node in segment.module.graph.nodes if is_compute(node)]
    position = {name: index for index, name in enumerate(operations)}
    found = {buffer: [position[name] for name in names if name in position] for buffer, names in nodes_of.items()}
    return WrapperSource(source, {buffer: max(at) for buffer, at in found.items() if at})
