"""Triton kernels on the GPU made of RAM: by Triton's interpreter, in stream order.

`TRITON_INTERPRET=1` makes `triton.jit` an interpreted function, which would copy whole storages to the host and back.
Here its arguments are the device's bytes themselves, and it runs where a launch would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import device_libdevice
from torch import Tensor

_one_at_a_time = threading.Lock()  # the interpreter patches Triton's language while it runs


def install(launch: Callable[[Callable[[], None]], None], alias: Callable[[Tensor], Tensor]) -> None:
    """Run interpreted kernels by `launch`, on tensors by `alias`."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    device_libdevice.install(interpreter)
    _index_by_arrays_of_one(interpreter)
    executor = interpreter.GridExecutor
    run_at_once = executor.__call__

    def on_host(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(on_host, value))
        return alias(value) if isinstance(value, Tensor) and value.is_cuda else value

    def initialised(self: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        host_args, host_kwargs = on_host(args), {name: on_host(value) for name, value in kwargs.items()}

        def work() -> None:
            with _one_at_a_time:
                run_at_once(self, *host_args, **host_kwargs)

        launch(work)

    executor._init_args_hst = initialised
    executor._restore_args_dev = lambda self, *_: None
    executor.__call__ = call


def _index_by_arrays_of_one(interpreter: Any) -> None:
    """Let a scalar, which is an array of one element there, bound a loop: numpy 2.4 takes none for a number, as Triton
    3.6 still does."""
    patch = interpreter._patch_lang_tensor

    def then_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = then_index
