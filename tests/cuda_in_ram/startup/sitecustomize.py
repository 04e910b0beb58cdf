"""On the path of every process on the GPU made of RAM: once torch is imported, it does without cuDNN, and with
`CUDA_IN_RAM_ARITHMETIC=1` its CUDA tensors are computed (see `device_arithmetic`)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and does something behind its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_install(module: ModuleType) -> None:
                execute(module)
                module.backends.cudnn.enabled = False
                if os.environ.get("CUDA_IN_RAM_ARITHMETIC") == "1":
                    import device_arithmetic

                    device_arithmetic.install()

            spec.loader.exec_module = then_install  # type: ignore[method-assign]
        return spec


if "CUDA_IN_RAM" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
