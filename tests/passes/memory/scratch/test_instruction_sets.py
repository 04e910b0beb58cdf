"""Predicted bytes under other instruction sets than this machine's: oneDNN and ATen can be held to older ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkc.torch_private import onednn

CONVOLUTIONS = Path(__file__).parent / "test_convolution.py"


@pytest.mark.second_tier
@pytest.mark.parametrize("limit", ["SSE41", "AVX2", "AVX512_CORE"])
def test_convolutions_are_never_predicted_too_low(limit: str) -> None:
    """Those of models in float32, each on 1, 2 and 4 threads, in a process that is held to older instructions."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CONVOLUTIONS)]
    command += ["-k", "models or small_image or masks or unusual or once", "-m", "not second_tier"]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": limit, "CHUNKC_VARIANTS": "9"}
    if limit != "AVX512_CORE":
        environment["ATEN_CPU_CAPABILITY"] = "avx2"
    finished = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stdout
    assert " passed" in finished.stdout


@pytest.mark.second_tier
@pytest.mark.skipif(not onednn.uses_avx512(), reason="the machine has no AVX-512 to forbid")
@pytest.mark.parametrize(
    ("environment", "answers"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "avx2", "DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "True False False False"),
        ({"DNNL_MAX_CPU_ISA": "SSE41"}, "False False False False"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "default"}, "True True False False"),
    ],
    ids=str,
)
def test_what_the_environment_forbids_is_not_used(environment: dict[str, str], answers: str) -> None:
    code = (
        "from chunkc.torch_private import onednn as o; "
        "print(o.uses_avx2(), o.uses_avx512(), o.multiplies_bfloat16(), o.multiplies_tiles())"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, text=True, capture_output=True, check=True
    )
    assert finished.stdout.strip() == answers
