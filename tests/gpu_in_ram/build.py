"""Build the GPU made of RAM for the torch of this environment: `python tests/gpu_in_ram/build.py` prints where it is.

It is a library that defines what torch's CUDA build takes from the driver, the runtime, cuBLAS and NCCL, found with
`nm`.
`device/*.c` say what matters. Of the rest, what may do nothing (`NOTHING_TO_DO`) says that it succeeded, and everything
else says on stderr that it is not there, and fails.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "device"

_TORCH_LIBRARIES = ("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
_WANTED = re.compile(r"(cuda|__cuda|cublas|cu|nccl)[A-Z]\w*")
_DEFINED = re.compile(r"^EXPORT [^;{]*?\b(\w+)\(", re.MULTILINE)
_CALLED_BY_TRITON = re.compile(r"\b(cu[A-Z]\w+)\b(?=\(|\)|,)")
_NOT_FUNCTIONS = re.compile(r"cu(da)?[A-Z]\w*_t")

NOTHING_TO_DO = re.compile(
    r"""cublas(Lt)?(Set\w+|\w*SetAttribute|Matmul)
    |cublas([SDCZI]|Dot|Gemm)\w+
    |__cuda(RegisterFatBinaryEnd|RegisterFunction|RegisterVar|UnregisterFatBinary|InitModule|GetKernel)
    |__cuda(Push|Pop)CallConfiguration
    |cudaFuncSetAttribute|cudaKernelSetAttributeForDevice|cudaProfiler\w+|cudaMemcpyToSymbol
    |cuCtxSetCurrent|cuDevicePrimaryCtxRelease|cuFuncSetAttribute|cuFuncSetCacheConfig
    |cuTensorMapEncodeTiled""",
    re.VERBOSE,
)

_STUB = """
int {name}(void) {{
    fprintf(stderr, "cuda_in_ram: {name} is not there\\n");
    return {not_supported};
}}"""
_NOT_SUPPORTED = {"cublas": 15, "nccl": 3, "cu": 801, "__cuda": 801}
"""CUBLAS_STATUS_NOT_SUPPORTED, ncclInternalError, cudaErrorNotSupported."""


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed for {sys.executable}")
    return Path(spec.origin).parent


def _undefined(library: Path) -> set[str]:
    """Names that a library takes from others."""
    lines = subprocess.run(["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True)
    names = {line.split()[-1].split("@")[0] for line in lines.stdout.splitlines()}
    return {name for name in names if _WANTED.fullmatch(name)}


def _asked_for_by_name(library: Path) -> set[str]:
    """Names that a library looks up in the driver as it runs: those among its texts."""
    return {name.decode() for name in re.findall(rb"(?<=\0)cu[A-Z]\w+(?=\0)", library.read_bytes())}


def _stubs(names: Iterable[str]) -> str:
    lines = ["#include <stdio.h>"]
    for name in sorted(names):
        if NOTHING_TO_DO.fullmatch(name):
            lines.append(f"int {name}(void) {{ return 0; }}")
        else:
            code = next(code for prefix, code in _NOT_SUPPORTED.items() if name.startswith(prefix))
            lines.append(_STUB.format(name=name, not_supported=code))
    return "\n".join(lines) + "\n"


def _compile(sources: Iterable[Path], out: Path, *flags: str) -> None:
    command = ["gcc", "-O2", "-shared", "-fPIC", "-pthread", *flags, f"-Wl,-soname,{out.name}", *map(str, sources)]
    subprocess.run([*command, "-o", str(out), "-ldl"], check=True)


def build() -> Path:
    """The folder with `libcuda.so.1` and `libnvidia-ml.so.1`, made unless it is there; inside the environment."""
    torch = _package("torch")
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        sys.exit(f'the torch in {torch} is no CUDA build: pip install "torch===2.13.0"')
    triton = _package("triton")
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256(
        b"".join([(torch / "version.py").read_bytes(), Path(__file__).read_bytes(), *(s.read_bytes() for s in sources)])
    )
    out = Path(sys.prefix) / "cuda_in_ram" / key.hexdigest()[:16]
    if (out / "built").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    device = [source for source in sources if source.suffix == ".c" and source.name != "nvml.c"]
    defined = {name for source in device for name in _DEFINED.findall(source.read_text())}
    wanted = {name for library in _TORCH_LIBRARIES for name in _undefined(torch / "lib" / f"lib{library}.so")}
    driver = (triton / "backends" / "nvidia" / "driver.c").read_text()
    wanted |= {name for name in _CALLED_BY_TRITON.findall(driver) if not _NOT_FUNCTIONS.fullmatch(name)}
    wanted |= _asked_for_by_name(torch / "lib" / "libc10_cuda.so")
    rest = out / "rest.c"
    rest.write_text(_stubs(wanted - defined))
    nvidia = torch.parent / "nvidia"
    (cuda,) = nvidia.glob("cu[0-9]*/include")
    # Types are those of the CUDA that torch is built with. What its package leaves out (crt/) is the same in Triton's.
    headers = [cuda, nvidia / "nccl" / "include", triton / "backends" / "nvidia" / "include"]
    include = [f"-I{folder}" for folder in headers]
    _compile([*device, rest], out / "libcuda.so.1", *include, "-Wall", "-Wextra", "-Wno-unused-parameter")
    _compile([SOURCES / "nvml.c"], out / "libnvidia-ml.so.1", "-Wall")
    (out / "libcuda.so").unlink(missing_ok=True)
    (out / "libcuda.so").symlink_to("libcuda.so.1")
    (out / "built").touch()
    return out


if __name__ == "__main__":
    print(build())
