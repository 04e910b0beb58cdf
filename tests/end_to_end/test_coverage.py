"""A dozen architectures, chosen to differ, as `bench/coverage.py` trains them: under 1.3 x the smallest budget, with an
evaluation of another size between the steps, `generate`, and the `state_dict` saved and loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from architectures.judge import Judge
from architectures.models import DOZEN, build
from architectures.table import COLUMNS, PLAIN_FAILS, TRAINED

from chunkc.runtime.device import cpu_allocator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", DOZEN)
def test_it_trains(name: str) -> None:
    cpu_allocator.install()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        judge = Judge(build(name))
        cells = {column: judge.cell(COLUMNS[column]) for column in ("eager/fp32", "eager/autocast-bf16")}
    finally:
        torch.set_num_threads(num_threads)
        torch._dynamo.reset()
    assert cells["eager/fp32"].outcome == TRAINED, cells
    assert cells["eager/autocast-bf16"].outcome in (TRAINED, PLAIN_FAILS), cells
