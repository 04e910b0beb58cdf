"""The conformance suite: what it judges and counts, that it goes on, and a fixed tenth of PyTorch's databases."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import conformance
import pytest
import torch
from databases import calls, judge, modules, table, training
from databases.table import (
    COLUMNS,
    CRASH,
    INTERNAL,
    NOT_COMPILED,
    NOTHING_TO_TRAIN,
    TOO_LONG,
    TOO_LOW,
    TRAINED,
    WRONG,
    Cell,
)
from forked import run as run_forked
from judging.table import REFUSED
from measuring import forked
from torch import Tensor, nn

import chunkc
from chunkc.passes.memory.scratch import declared
from chunkc.runtime.device import cpu_allocator

HAS_DATABASES = importlib.util.find_spec("expecttest") is not None  # which PyTorch's testing modules import


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
    with calls.Comparison() as comparison:
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


def judged(module: nn.Module, *batches: Any, column: str = "eager/float32", own: Any = chunkc.optim.SGD) -> Cell:
    sample = modules.Sample(module, tuple(((batch,), {}) for batch in batches))
    subject = training.Subject("sample 0", sample, *(partial(kind, lr=0.1) for kind in (chunkc.optim.SGD, own)))
    return judge._judged(subject, COLUMNS[column], smallest_only=False)


X = torch.linspace(-1, 1, 20).reshape(5, 4)


class Skipped(nn.Module):
    """Is left to eager PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.usefixtures("_metered")
def test_a_model_that_trains_as_plain() -> None:
    assert judged(nn.Linear(4, 3), X, X) == Cell(TRAINED)
    assert judged(nn.Linear(4, 3), X, torch.cat([X, X[:1]]), column="eager/float32-changing") == Cell(TRAINED)


@pytest.mark.usefixtures("_metered")
def test_each_failure_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = judged(nn.Linear(4, 3), X, X, own=lambda parameters, lr: chunkc.optim.SGD(parameters, lr=lr / 2))
    assert wrong.outcome == WRONG
    assert "after step 0 differs by up to" in wrong.message
    assert judged(Skipped(), X).outcome == NOT_COMPILED
    assert judged(nn.Identity(), X).outcome == NOTHING_TO_TRAIN

    def refuse(*args: object, **options: object) -> None:
        raise chunkc.UnsupportedError("for a reason")

    monkeypatch.setattr("chunkc.backend.compile_graph", refuse)
    assert judged(nn.Linear(4, 3), X) == Cell(REFUSED, "UnsupportedError: for a reason")

    def fail(*args: object, **options: object) -> None:
        raise ValueError("as if")

    monkeypatch.setattr("chunkc.backend.compile_graph", fail)
    internal = judged(nn.Linear(4, 3), X)
    assert internal.outcome == INTERNAL
    assert "ValueError: as if" in internal.message


@torch.library.custom_op("chunkc_tests::wasteful", mutates_args=())
def wasteful(x: Tensor) -> Tensor:
    torch.empty(1 << 14)
    return x * 2


wasteful.register_fake(torch.empty_like)
wasteful.register_autograd(lambda ctx, gradient: gradient * 2)


class Wasteful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return wasteful(x * self.weight)


@pytest.mark.usefixtures("_metered", "_declarations")
def test_bytes_beyond_the_prediction_are_found() -> None:
    chunkc.declare_scratch("chunkc_tests::wasteful", lambda *_: 1 << 16)
    assert judged(Wasteful(), X, X) == Cell(TRAINED)
    chunkc.declare_scratch("chunkc_tests::wasteful", lambda *_: 0)
    found = judged(Wasteful(), X, X)
    assert found.outcome == TOO_LOW
    assert re.fullmatch(r"peak: measured [\d,]+ bytes, predicted [\d,]+", found.message)


def work(pieces: Sequence[str]) -> Iterator[dict[str, Any]]:
    for piece in pieces:
        if piece == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while piece == "hangs":
            pass
        yield {"piece": piece}


def test_a_crash_and_a_hang_cost_one_piece() -> None:
    groups = [["first", "dies", "second", "hangs", "last"], ["another"]]
    assert list(forked.results(groups, work, 1.5)) == [
        ("first", {"piece": "first"}),
        ("dies", "the process was ended by SIGKILL"),
        ("second", {"piece": "second"}),
        ("hangs", forked.TOOK_TOO_LONG),
        ("last", {"piece": "last"}),
        ("another", {"piece": "another"}),
    ]
    side_by_side = list(forked.results([["hangs", "last"], ["first", "second"]], work, 1.5, num_jobs=2))
    assert [piece for piece, _ in side_by_side] == ["first", "second", "hangs", "last"]


def test_a_later_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    cases = ["op/dies", "op/hangs", "op/mul", "optim/SGD"]
    asked: list[tuple[str, str]] = []
    outcomes = {"op/dies": "it ended with code 3", "op/hangs": forked.TOOK_TOO_LONG}

    def results(groups: Iterable[Sequence[Any]], *_: object, **options: object) -> Iterator[tuple[Any, Any]]:
        for piece in (piece for group in groups for piece in group):
            asked.append(piece)
            yield piece, outcomes.get(piece[0], {**Cell(TRAINED, num_samples=2).__dict__, "seconds": 0.1})

    monkeypatch.setattr(conformance, "cases_of", lambda column: cases)
    monkeypatch.setattr(forked, "results", results)
    run = ["--columns", "eager/float32", "--out", str(tmp_path / "out.jsonl")]
    assert conformance.main([*run, "--only", "op/m*,optim/*"]) == 0
    assert asked == [("op/mul", "eager/float32"), ("optim/SGD", "eager/float32")]
    asked.clear()
    result = tmp_path / "result.json"
    assert conformance.main([*run, "--result", str(result)]) == 1
    assert asked == [("op/dies", "eager/float32"), ("op/hangs", "eager/float32")]
    assert conformance.main([*run, "--report"]) == 1
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == [TRAINED, TRAINED, CRASH, TOO_LONG]
    assert "| eager/float32 | op/dies | **FAILED** it ended with code 3 |" in capsys.readouterr().out
    counts, others = json.loads(result.read_text())["sections"]
    assert [row["metrics"]["percent"]["median"] for row in counts["rows"]] == [33.3, 100]
    assert [row["labels"]["cases"] for row in others["rows"]] == ["op/dies", "op/hangs"]


def test_shards_are_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [f"op/{number}" for number in range(100)]
    monkeypatch.setattr(conformance, "cases_of", lambda column: cases)

    def of(*arguments: str) -> list[str]:
        args = conformance.parse_args(["--columns", "calls/int64", *arguments])
        return [case for case, _ in conformance.chosen(args, {})]

    shards = [of("--shard", f"{index}/3") for index in range(3)]
    assert all(shards)
    assert sorted(case for shard in shards for case in shard) == sorted(cases)
    assert 0 < len(of("--tenth")) < 30
    with pytest.raises(SystemExit):
        conformance.parse_args(["--shard", "3/3"])


def test_values_are_compared_to_the_bit() -> None:
    zeros = torch.zeros(2)
    values, other = {"x": torch.tensor([0.0, float("nan")])}, {"x": torch.tensor([-0.0, float("nan")])}
    assert training.difference(values, values, training.same_bits) is None
    assert training.difference(values, other, training.same_bits) is not None
    assert training.difference(values, other, training.close) is None
    assert training.difference({"x": zeros}, {"y": zeros}, training.close) == "only one of both has x, y"
    for value in (torch._efficientzerotensor(2), torch.zeros(()).expand(1), torch.zeros(())):
        assert training.same_bits(training.kept(value), torch.zeros(value.shape))


@pytest.mark.second_tier
@pytest.mark.skipif(not HAS_DATABASES, reason="needs expecttest")
@pytest.mark.parametrize("shard", ["0/3", *(pytest.param(f"{k}/3", marks=pytest.mark.slow) for k in (1, 2))])
def test_a_tenth_of_the_databases(shard: str, tmp_path: Path) -> None:
    """Take the cases with hashes that are divisible by ten, a third of them in CI: in eager code and the smallest
    budget, and call by call."""
    asked = ["--tenth", "--columns", "eager/float32,calls/float32", "--shard", shard]
    done = run_forked(Path(conformance.__file__), *asked, "--out", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    cells = [(line["case"], line["column"]) for line in lines]
    assert cells == conformance.chosen(conformance.parse_args(asked), {}), done.stderr
    failures = {(line["column"], line["case"]): line["message"] for line in lines if line["outcome"] in table.FAULTS}
    assert not failures
    assert sum(line["outcome"] == TRAINED for line in lines) > 30
