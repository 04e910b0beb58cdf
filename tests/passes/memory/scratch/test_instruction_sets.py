"""Predicted bytes under other instruction sets than this machine's: oneDNN and ATen can be held to older ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkc.torch_private import onednn

FILES = [str(Path(__file__).parent / name) for name in ("test_convolution.py", "test_products.py")]

PROGRAM = """
import sys
import pytest
from chunkc.torch_private import onednn
print("uses", onednn.uses_avx2(), onednn.uses_avx512(), onednn.multiplies_bfloat16(), onednn.multiplies_tiles())
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("environment", "uses"),
    [
        pytest.param(
            {"DNNL_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "avx2"},
            "False False False False",
            id="SSE41",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"ONEDNN_MAX_CPU_ISA": "avx2", "DNNL_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx2"},
            "True False False False",
            id="AVX2",
            marks=pytest.mark.second_tier,
        ),
        pytest.param(
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "default"},
            "True True False False",
            id="AVX512_CORE",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_the_environment_forbids_is_not_used_and_nothing_predicted_too_low(
    environment: dict[str, str], uses: str
) -> None:
    """Convolutions of models in float32, and products, on several numbers of threads, held to older instructions."""
    command = [sys.executable, "-c", PROGRAM, "-q", "-p", "no:cacheprovider", *FILES]
    command += ["-k", "models or small_image or masks or unusual or once or wide", "-m", "not second_tier"]
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_MAX_CPU_ISA")}
    environment = inherited | {"CHUNKC_VARIANTS": "9"} | environment
    finished = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stdout
    assert " passed" in finished.stdout
    if onednn.uses_avx512():  # otherwise the machine has none to forbid
        assert f"uses {uses}\n" in finished.stdout
