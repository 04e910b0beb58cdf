"""Shows what a GPU machine has, and exits with 1 and a line for each package that is missing or too old there.

`gpu_calls.py` asks first. A GPU's kernels are compiled by Triton, which needs a C compiler and Python's headers: one
kernel is compiled and launched, so that this fails at once and not in every test.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COMMANDS = (["nvidia-smi"], ["g++", "--version"], ["df", "-h", os.environ.get("TMPDIR", "/tmp")])
SHOWN = (
    *("torch", "triton", "numpy", "pydantic", "sympy", "nvidia-ml-py", "ninja", "transformers", "pytest"),
    *("pytest-timeout", "pytest-xdist", "hypothesis", "matplotlib", "rich", "torchao", "bitsandbytes", "deepspeed"),
)


def main() -> int:
    for command in COMMANDS:
        if shutil.which(command[0]) is not None:
            subprocess.run(command, timeout=20)
    print("python", sys.version, platform.platform(), os.cpu_count(), "cores")
    for name in SHOWN:
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            print(name, "MISSING")
    if problems := _lacking():
        print(f"needed here: {'; '.join(problems)}. Put wheels of what is missing into .whl: bench/on_gpu.sh wheels")
        return 1
    import torch

    import chunkc

    print("cuda", torch.version.cuda, "threads", torch.get_num_threads(), "chunkc from", chunkc.__file__)
    torch._dynamo.lookup_backend("chunkc")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_properties(0))
        from gpu import one_kernel

        one_kernel.main()
    return 0


def _lacking() -> list[str]:
    """Of all that the steps import, what is not met here."""
    try:
        from gpu import wheels as gpu_wheels
    except ImportError as error:
        return [str(error)]
    return gpu_wheels.lacking(gpu_wheels.needed(gpu_wheels.sources()), gpu_wheels.Machine.here())


if __name__ == "__main__":
    raise SystemExit(main())
