"""Run a command on the GPU made of RAM: `run.py [--arithmetic] [--set late=7,capability=80] python -m pytest ...`

Without `--arithmetic` kernels do nothing, and memory is exact. With it, operators are computed by the CPU's kernels and
Triton's by its interpreter.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import build


def environment(*, arithmetic: bool = False, choices: str = "") -> dict[str, str]:
    """What a process needs to run on the device, over the environment of this one."""
    built = build.build()
    startup = str(Path(__file__).parent / "startup")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found: Mapping[str, str] = {
        "LD_PRELOAD": str(built / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(built),
        "TRITON_LIBCUDA_PATH": str(built),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # there is no cuDNN
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join([startup, *(part for part in path if part and part != startup)]),
        "CUDA_IN_RAM": choices,
    }
    computing = {"CUDA_IN_RAM_ARITHMETIC": "1", "TRITON_INTERPRET": "1"}
    rest = {name: value for name, value in os.environ.items() if name not in computing}
    return {**rest, **found, **(computing if arithmetic else {})}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arithmetic", action="store_true")
    parser.add_argument("--set", default="", metavar="NAME=VALUE,...", help="see `struct settings`, device/device.h")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    if not options.command:
        build_parser().error("which command?")
    os.execvpe(options.command[0], options.command, environment(arithmetic=options.arithmetic, choices=options.set))


if __name__ == "__main__":
    main()
