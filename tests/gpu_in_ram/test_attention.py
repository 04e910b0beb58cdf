"""Which kernel attention takes, on each generation: what PyTorch itself says, call by call."""

from __future__ import annotations

import json

import pytest
from device_process import on_a_device


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90])
def test_plans_know_the_kernel(capability: int) -> None:
    script = "import json; from device_attention import others; print(json.dumps(others()))"
    num_calls, found = json.loads(on_a_device(f"capability={capability}", script))
    assert num_calls == 1440
    assert not found
