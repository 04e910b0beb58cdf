"""`bench/plans/planning_share.py` in small."""

from __future__ import annotations

import re

import pytest
from plans import planning_share


@pytest.mark.slow  # its compilation is cold
def test_a_first_step_plans_and_does_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning_share.main(["--small"]) == 0
    found = re.fullmatch(r"2 layers: first step ([\d.]+) s, of it planning ([\d.]+) s .*\n", capsys.readouterr().out)
    assert found is not None
    assert 0 < float(found[2]) < float(found[1])
