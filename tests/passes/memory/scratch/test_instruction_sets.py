"""Predicted bytes under other instruction sets than this machine's: oneDNN and ATen can be held to older ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkc.torch_private import onednn

TESTS = Path(__file__).parent
CLASSES = "test_convolution_bounds.py::test_classes_are_within_half_as_much_again"


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "environment",
    [{"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}],
    ids=["AVX2", "AVX512 without bfloat16"],
)
def test_convolutions_are_never_predicted_too_low(environment: dict[str, str]) -> None:
    """Classes of convolutions, each on 1, 2 and 4 threads, in a process that is held to older instructions."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / CLASSES)]
    environment = os.environ | environment | {"CHUNKC_VARIANTS": "9"}
    finished = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stdout
    assert "9 passed" in finished.stdout, "nothing is skipped"


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
