"""The comparison of measured with predicted bytes of ATen calls: what it finds, and that it can go on."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chunkc.passes.memory.scratch import declared
from chunkc.runtime.device import cpu_allocator

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import conformance_bytes

HAS_OP_DB = importlib.util.find_spec("expecttest") is not None  # which PyTorch's testing modules import
CHILD = """
import json, os, sys
for name, dtype in json.load(sys.stdin):
    print(json.dumps({"at": [name, dtype]}), flush=True)
    if name == "dies":
        os._exit(3)
    line = {"operator": name, "dtype": dtype, "calls": 2, "failed": "", "findings": []}
    print(json.dumps(line), flush=True)
"""


@pytest.fixture
def _metered() -> None:
    cpu_allocator.install()


@pytest.fixture
def _declarations() -> Iterator[None]:
    former = dict(declared._declared)
    yield
    declared._declared.clear()
    declared._declared.update(former)


@pytest.mark.usefixtures("_metered", "_declarations")
def test_every_call_is_compared() -> None:
    x = torch.rand(4, 60, 50)
    said = {"gather": 0, "tril": 1 << 20, "_log_softmax": "nothing"}
    for name, nbytes in said.items():
        declared.declare_scratch(f"aten::{name}", lambda *_, nbytes=nbytes: nbytes)  # type: ignore[misc]
    with conformance_bytes.Comparison() as comparison:
        torch.gather(x, 0, torch.zeros(1, 60, 50, dtype=torch.int32))
        x.tril()
        torch.log_softmax(x, 0)
        x.sort()
    assert comparison.num_calls == 5, "with the making of zeros"
    found = {(finding.kind, finding.target): finding.examples for finding in comparison.findings.values()}
    assert set(found) == {
        ("too low", "aten.gather.default"),
        ("loose", "aten.tril.default"),
        ("raised", "aten._log_softmax.default"),
    }
    (example,) = found["too low", "aten.gather.default"]
    assert example == "(float32[4, 60, 50], 0, int32[1, 60, 50]): measured 24000, predicted 0"


def test_a_child_that_dies_costs_one_case_and_a_later_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    wanted = [(name, "float32") for name in ("first", "dies", "last")]
    conformance_bytes.run(path, wanted[:1], command=[sys.executable, "-c", CHILD])
    path.write_text(path.read_text().replace('"calls": 2', '"calls": 7'))
    conformance_bytes.run(path, wanted, command=[sys.executable, "-c", CHILD])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["operator"], line["calls"]) for line in lines] == [("first", 7), ("dies", 0), ("last", 2)]
    assert [line["failed"] for line in lines] == ["", "the process ended with 3", ""]
    assert "not compared: dies float32" in conformance_bytes.report(lines)


@pytest.mark.second_tier
@pytest.mark.skipif(not HAS_OP_DB, reason="needs expecttest")
@pytest.mark.usefixtures("_metered")
def test_samples_of_op_db() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    (opinfo,) = (opinfo for opinfo in op_db if opinfo.name == "tril")
    num_calls, findings = conformance_bytes.compare_samples(opinfo, torch.float32)
    assert num_calls > 50
    assert not findings
