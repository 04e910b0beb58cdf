"""Slow links and other systems' policies on chunkc's own runtime."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from plans import clock

from chunkc.ir.hardware import CPU, LinkSpec
from chunkc.ir.links import TO_DEVICE, TO_HOME
from chunkc.runtime.storage.homes import MemoryHome


def test_no_copy_is_faster_than_its_link() -> None:
    links = LinkSpec(TO_DEVICE, 1e6, 0.01), LinkSpec(TO_HOME, 2e6, 0.0)
    home, values = MemoryHome(), torch.arange(10_000, dtype=torch.uint8)
    region = home.allocate(values.nbytes)
    with clock.slow(replace(CPU, links=links)):
        begun_s = time.perf_counter()
        home.write(region, 0, values)
        written_s = time.perf_counter()
        home.read(region, 0, found := torch.empty_like(values))
        read_s = time.perf_counter()
    assert written_s - begun_s >= 0.005
    assert read_s - written_s >= 0.02
    assert torch.equal(found, values)


@pytest.mark.slow
def test_all_train_the_same_bits(tmp_path: Path) -> None:
    num_threads, out = torch.get_num_threads(), tmp_path / "clock.json"
    try:
        assert clock.main(["--small", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(num_threads)
    (case,) = json.loads(out.read_text())["cases"]
    ways = product(clock.SMALL.policies, clock.SMALL.treatments)
    assert set(case["others"]) == {f"{policy.name}{treatment}" for policy, treatment in ways}
    for treatment in clock.SMALL.treatments[1:]:
        fitting = [case["others"][f"{policy.name}{treatment}"] for policy in clock.SMALL.policies]
        assert None not in fitting, f"nothing has run{treatment}"
        assert min(fitting) > 0
    assert case["predicted_s"] > 0
    assert math.isfinite(case["measured_s"])


@pytest.mark.second_tier
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_the_largest_values_go_home(home: str, fresh_dynamo: None) -> None:
    """As few of them as leave the others room; they come back by the links of their home."""
    size, budget_nbytes = clock.SMALL, 900_000
    options = {"memory_budget": budget_nbytes, "codegen": "eager", "home": home}
    expected = clock.trained(size, options | {"memory_budget": 1 << 30, "activations": "keep"}, "none")[1]
    offloaded = next(one for one in clock.TREATMENTS if one.offloads)
    for policy in (clock.POLICIES[0], clock.POLICIES[2]):
        with clock.planned_by(policy, offloaded, budget_nbytes):
            assert clock.trained(size, options | {"activations": "offload"}, "none")[1] == expected


@pytest.mark.second_tier
def test_a_policy_moves_the_chunks(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """ZeRO-3 fetches for each call; chunkc keeps what it has room for."""
    size, nbytes = clock.SMALL, []
    options = {"memory_budget": 1_200_000, "codegen": "eager", "activations": "keep"}
    paced = clock.MemoryHome.read

    def counted(home: MemoryHome, region: object, offset_nbytes: int, values: torch.Tensor) -> None:
        nbytes[-1] += values.nbytes
        paced(home, region, offset_nbytes, values)

    monkeypatch.setattr(MemoryHome, "read", counted)
    found = []
    for policy in (None, clock.POLICIES[0]):
        nbytes.append(0)
        if policy is None:
            found.append(clock.trained(size, options, "none")[1])
        else:
            with clock.planned_by(policy, clock.TREATMENTS[0], options["memory_budget"]):
                found.append(clock.trained(size, options, "none")[1])
    assert found[0] == found[1]
    assert nbytes[1] > nbytes[0]
