"""Compile a function of tensors into one fused CPU pass, vectorised and multi-threaded, by Inductor.

Not by `torch.compile`: it would recompile for a length of 1, a `Parameter`, inference mode or another number of
threads, obey the user's settings for models, and drop its code at `torch._dynamo.reset()`. Instead the function is
traced once, with one symbolic length, and given to Inductor's inner compiler. The result has no guards and depends only
on its arguments; a call costs 10 microseconds.

Every element goes through the same operations in the same order, vectorised or not, without contraction to fused
multiply-adds: the bits of elementwise results do not depend on how a run of elements was cut.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from chunkc.ir.errors import UnsupportedError
from chunkc.torch_private.fake import (
    FakeTensorMode,
    TracingContext,
    disable_current_modes,
    enable_python_dispatcher,
    tracing,
)
from chunkc.torch_private.inductor import (
    CppCompileError,
    InductorError,
    InvalidCxxCompiler,
    compile_fx_inner,
    patched,
    select_decomp_table,
    source_of,
)

SERIAL_NUM_ELEMENTS = 1 << 15
"""Shorter tensors are not worth waking threads for; torch's own grain size."""

_HINT_NUM_ELEMENTS = 1 << 20  # a typical length; only a hint to Inductor's heuristics

# Fixed, so that the code does not depend on the user's settings for models.
_INDUCTOR_OPTIONS: dict[str, Any] = {
    "cpu_backend": "cpp",
    "cpp_wrapper": False,
    "size_asserts": False,  # the callers have checked sizes
    "assert_indirect_indexing": False,  # tables are looked up with clamped indices
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
_SERIAL_OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": False, "cpp.threads": 1}
_PARALLEL_OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True}  # torch.get_num_threads() of each call

Pass = Callable[[list[Tensor]], Any]
"""Compiled pass: takes a list of tensors and empties it."""


@dataclass(frozen=True)
class FusedPass:
    """Pass that Inductor compiled. `source_code`: its wrapper, with the kernel."""

    compiled: Callable[[list[Any]], Any]
    source_code: str

    def __call__(self, tensors: list[Tensor]) -> Any:
        arguments = [tensors[0].shape[0], *tensors]
        tensors.clear()
        return self.compiled(arguments)


def compile_pass(
    function: Callable[..., Any],
    runs: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    tables: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    *,
    parallel: bool,
) -> FusedPass:
    """Compile `function(*runs, *tables)`, which mutates its arguments. Takes seconds.

    Args:
        runs: dtype and row shape of tensors of shape `[n, *row]`, contiguous, one `n` for all, 1 or more.
        tables: dtype and shape of the other tensors.
        parallel: for as many threads as torch has at each call; otherwise for one.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    shape_env = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shape_env)
    with disable_current_modes(), torch.no_grad(), tracing(TracingContext(fake_mode)):
        num_rows = _HINT_NUM_ELEMENTS // max(math.prod(row) for _, row in runs)
        inputs = []
        for dtype, row in runs:
            dims = [DimDynamic.DUCK, *[DimDynamic.STATIC for _ in row]]  # one symbol for all lengths
            one_length: Any = StatelessSymbolicContext(dynamic_sizes=dims)
            tensor = host_empty((num_rows, *row), dtype)
            inputs.append(fake_mode.from_tensor(tensor, symbolic_context=one_length))
        inputs += [fake_mode.from_tensor(host_empty(shape, dtype), static_shapes=True) for dtype, shape in tables]
        # The length is an input of the graph, as AOTAutograd makes it: PyTorch 2.14 reads it off no tensor where sizes
        # are not asserted.
        length = inputs[0].shape[0]
        with fake_mode, enable_python_dispatcher():
            graph = make_fx(lambda _, *tensors: function(*tensors), decomposition_table=select_decomp_table())(
                length, *inputs
            )
        options = _INDUCTOR_OPTIONS | (_PARALLEL_OPTIONS if parallel else _SERIAL_OPTIONS)
        with patched(options), compiler_required():
            compiled = compile_fx_inner(graph, [length, *inputs])
    assert not shape_env.guards, f"the pass holds for some lengths only: {shape_env.guards}"
    return FusedPass(compiled, source_of(compiled))


@contextlib.contextmanager
def compiler_required() -> Iterator[None]:
    """Turn a missing or broken C++ compiler inside into an error that says what to do.

    Raises:
        UnsupportedError: there is no working C++ compiler.
    """
    try:
        yield
    except (InductorError, InvalidCxxCompiler, CppCompileError) as error:
        cause = error.inner_exception if isinstance(error, InductorError) else error
        if not isinstance(cause, InvalidCxxCompiler | CppCompileError):
            raise
        raise UnsupportedError(
            "updates on the CPU cannot be compiled: install a C++ compiler such as g++, or set CXX to one"
        ) from error


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make an uninitialised tensor in numpy's memory: not charged to a limited CPU allocator, no page touched."""
    with disable_current_modes():
        num_elements = math.prod(shape)
        flat = torch.from_numpy(np.empty(max(num_elements, 1) * dtype.itemsize, dtype=np.uint8)).view(dtype)
        return flat[:num_elements].view(tuple(shape))


def host_tensor(values: Any, dtype: Any) -> Tensor:
    """Make a tensor of `values` in numpy's memory. `dtype` is numpy's."""
    with disable_current_modes():
        return torch.from_numpy(np.array(values, dtype=dtype))
