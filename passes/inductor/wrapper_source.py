"""The wrapper that Inductor would generate for a segment, without compiling its kernels.

Lowering, scheduling and code generation take a fraction of the C++ compiler's time. The steps, and the modes they run
in, are those of `_InProcessFxCompile.codegen_and_compile` in `torch/_inductor/compile_fx.py`, the same in PyTorch 2.11
to 2.13, less what only GPUs and the ahead-of-time compiler need. So the source is the same as `compile_fx_inner`'s.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    fake_tensor_prop,
    maybe_disable_comprehensive_padding,
)
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes

from chunkc.passes.graphs import is_compute
from chunkc.passes.segments import Segment

MIN_RECURSION_LIMIT = 2000
"""Depth of the Python stack that Inductor makes room for."""


@dataclass(frozen=True)
class WrapperSource:
    """A wrapper's text, and which of the segment's operations makes each buffer that it names, where that is known.

    Inductor replaces some operations; a buffer of such a one counts as made by the last of its operands' operations.
    """

    source: str
    made_by: Mapping[str, int]


def wrapper_of(segment: Segment) -> WrapperSource:
    """The Python wrapper that `compile_fx_inner` generates for a segment on the CPU.

    The segment is left as it is: Inductor's passes work on a copy of its graph. No kernel is compiled and nothing is
    written to Inductor's caches, but the first call of a process asks the C++ compiler for its vector instructions,
    unless Inductor knows them already.
    """
    module = fx.GraphModule(segment.module, copy.deepcopy(segment.module.graph))
    inputs = segment.example_inputs
    with _surroundings():
        shape_env = shape_env_from_inputs(inputs)
        view_to_reshape(module)
        with torch.no_grad():
            fake_mode = fake_tensor_prop(module, inputs)
        _recursive_record_original_output_strides(module)
        with V.set_fake_mode(fake_mode):
            _recursive_post_grad_passes(module, is_inference=False)
        with V.set_fake_mode(fake_mode), maybe_disable_comprehensive_padding(inputs):
            lowering = GraphLowering(
                module, example_inputs=inputs, shape_env=shape_env, inputs_to_check=[], **_decompositions()
            )
            lowering.freeze_runtime_asserts()
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
                lowering.run(*inputs)
                wrapper, _ = lowering.codegen()
    operations = [node.name for node in segment.module.graph.nodes if is_compute(node)]
    position = {name: index for index, name in enumerate(operations)}
    found = {
        buffer.get_name(): [position[node.name] for node in buffer.origins if node.name in position]
        for buffer in lowering.buffers
    }
    return WrapperSource(wrapper.value, {name: max(at) for name, at in found.items() if at})


def _decompositions() -> dict[str, Any]:
    """From PyTorch 2.12 on, a lowering is told where to find them."""
    known = "get_decomp_fn" in inspect.signature(GraphLowering.__init__).parameters
    return {"get_decomp_fn": select_decomp_table} if known else {}


@contextmanager
def _surroundings() -> Iterator[None]:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MIN_RECURSION_LIMIT))
    with _disable_current_modes(), DebugContext(), preserve_rng_state():
        yield
