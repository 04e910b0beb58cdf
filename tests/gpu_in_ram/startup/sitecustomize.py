"""On the path of every process on the GPU made of RAM: torch does without cuDNN. With `CUDA_IN_RAM_ARITHMETIC=1` its
CUDA tensors are computed (see `device_arithmetic`), and chunkc's Triton kernels take large blocks."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

COMPUTES = os.environ.get("CUDA_IN_RAM_ARITHMETIC") == "1"


def _prepare_torch(torch: ModuleType) -> None:
    torch.backends.cudnn.enabled = False
    if COMPUTES:
        import device_arithmetic

        device_arithmetic.install()


def _enlarge_blocks(kernels: ModuleType) -> None:
    """Triton's interpreter takes its time per block."""
    if COMPUTES:
        kernels.BLOCK = 1 << 16  # type: ignore[attr-defined]


AFTER_IMPORTS: dict[str, Callable[[ModuleType], None]] = {
    "torch": _prepare_torch,
    "chunkc.kernels.elementwise_triton": _enlarge_blocks,
}


class _After(importlib.abc.MetaPathFinder):
    """Finds a module as everybody does, and does something behind its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        prepare = AFTER_IMPORTS.pop(name, None)
        if prepare is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_prepare(module: ModuleType) -> None:
                execute(module)
                prepare(module)

            spec.loader.exec_module = then_prepare  # type: ignore[method-assign]
        return spec


if "CUDA_IN_RAM" in os.environ:
    sys.meta_path.insert(0, _After())
