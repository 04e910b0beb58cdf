"""CUDA's mathematical functions (libdevice) for Triton's interpreter, which has none: torch's for the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

_SAME_NAMES = """acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod
hypot isinf isnan lgamma log log10 log1p log2 nextafter pow rsqrt signbit sin sinh sqrt tan tanh trunc"""
_OTHER_NAMES = {"fabs": torch.abs, "nearbyint": torch.round, "rint": torch.round, "llrint": torch.round}
_FUNCTIONS = {name: getattr(torch, name) for name in _SAME_NAMES.split()} | _OTHER_NAMES


def _function(symbol: str) -> Any:
    """Of `__nv_erff` or `__nv_erf`, `torch.erf`.

    Raises:
        NotImplementedError: it has no counterpart here.
    """
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    for found in (name, name.removesuffix("f")):
        if found in _FUNCTIONS:
            return _FUNCTIONS[found]
    raise NotImplementedError(f"cuda_in_ram: libdevice's {symbol} is not there: see {__file__}")


def install(interpreter: Any) -> None:
    """Let the interpreter's kernels call them."""
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice

    def call(self: Any, library: str, path: str, symbol: str, arguments: list[Any], result: Any, pure: bool) -> Any:
        values = [torch.from_numpy(np.ascontiguousarray(argument.data)) for argument in arguments]
        found = _function(symbol)(*values).reshape(arguments[0].data.shape).numpy()
        scalar = result.scalar
        return interpreter.TensorHandle(found.astype(interpreter._get_np_dtype(scalar)), scalar)

    interpreter.InterpreterBuilder.create_extern_elementwise = call
    for name, function in vars(cuda_libdevice).items():
        if callable(function) and hasattr(libdevice, name):  # there it does nothing, until a compiler replaces it
            setattr(libdevice, name, functools.partial(function, _semantic=interpreter.interpreter_semantic))
