"""The coverage suite: which architectures and columns are chosen, what counts, and processes that die or hang."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from architectures import models as coverage_models
from architectures import table as coverage_table
from architectures.judge import Judge, nudged
from architectures.models import NotBuilt, build
from architectures.table import DEFAULT_FAILS, FAILED, NOT_BUILT, TRAINED, Cell, Column
from architectures.training import Differs, Losses, Trained
from torch import nn

import chunkc
from chunkc.runtime.device import cpu_allocator

# Not `import coverage`: there is a package of that name.
import importlib.util  # isort: skip

_spec = importlib.util.spec_from_file_location("bench_coverage", Path(__file__).parents[2] / "bench" / "coverage.py")
assert _spec is not None
assert _spec.loader is not None
coverage = importlib.util.module_from_spec(_spec)
sys.modules["bench_coverage"] = coverage
_spec.loader.exec_module(coverage)

NAMES = ["timm/resnet/test_resnet", "transformers/gpt2/GPT2LMHeadModel", "transformers/llama/LlamaForCausalLM"]


def test_the_command_line_picks_columns_and_architectures() -> None:
    args = coverage.parse_args(["--columns", "eager/fp32, inductor/*", "--family", "transformers"])
    assert args.columns[0] == "eager/fp32"
    assert len(args.columns) == 8
    assert coverage.chosen(NAMES, args, {}) == dict.fromkeys(NAMES[1:], args.columns)
    assert [*coverage.chosen(NAMES, coverage.parse_args(["--family", "llama"]), {})] == NAMES[2:]
    assert [*coverage.chosen(NAMES, coverage.parse_args(["--family", "*/test_*"]), {})] == NAMES[:1]
    assert [*coverage.chosen(NAMES, coverage.parse_args(["--family", "llama,*/test_*"]), {})] == [NAMES[0], NAMES[2]]
    one, other = (coverage.chosen(NAMES, coverage.parse_args(["--sample", "2", "--seed", "5"]), {}) for _ in range(2))
    assert one == other
    assert len(one) == 2
    with pytest.raises(SystemExit):
        coverage.parse_args(["--columns", "fp8"])


def answer_of(name: str, **outcomes: str) -> dict[str, Any]:
    cells = {f"eager/{setting}": Cell(outcome, "", "").__dict__ for setting, outcome in outcomes.items()}
    return {"architecture": name, "num_parameters": 7, "cells": cells}


def test_a_result_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of results up to 2026-11-24 is read, too."""

    class Worker:
        ready: ClassVar[dict[str, Any]] = {"architectures": ["a/b/c", "a/b/d"]}

        def __init__(self, *args: object, **options: object) -> None: ...

        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *error: object) -> None: ...

        def ask(self, line: str) -> dict[str, Any]:
            asked.append(json.loads(line)["architecture"])
            return answer_of(asked[-1], fp32=TRAINED)

    asked: list[str] = []
    monkeypatch.setattr(coverage, "Process", Worker)
    earlier = {"answers": [answer_of("a/b/x", fp32=FAILED)], "versions": {"commit": "old"}, "sample": {"seed": 3}}
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    out = tmp_path / "out.json"
    run = ["--columns", "eager/fp32", "--out", str(out)]
    assert coverage.main([*run, "--sample", "1", "--from", str(tmp_path / "earlier.json")]) == 1
    assert coverage.main(run) == 1
    assert sorted(asked) == ["a/b/c", "a/b/d"]
    written = json.loads(out.read_text())
    assert [answer["architecture"] for answer in written["answers"]] == ["a/b/c", "a/b/d", "a/b/x"]
    assert written["answers"][2]["cells"]["eager/fp32"]["commit"] == "old"
    assert [sample["seed"] for sample in written["samples"]] == [3, 0, 0]


def test_what_the_default_backend_does_not_train_does_not_count() -> None:
    cells = [{"outcome": outcome} for outcome in (TRAINED, TRAINED, TRAINED, FAILED, DEFAULT_FAILS, NOT_BUILT)]
    assert coverage_table.percentage(cells) == 75
    assert coverage_table.percentage([{"outcome": NOT_BUILT}]) is None


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("transformers/gpt2/GPT2LMHeadModel", {"input_ids", "labels"}),
        ("transformers/vit/ViTForImageClassification", {"pixel_values", "labels"}),
        ("transformers/t5/T5ForConditionalGeneration", {"input_ids", "decoder_input_ids", "labels"}),
    ],
)
def test_architectures_are_shrunk_until_plain_pytorch_trains_them(name: str, keys: set[str]) -> None:
    subject = build(name)
    assert subject.num_parameters < 500_000
    batch = subject.batch(3, 8)
    assert batch.keys() == keys
    assert {value.shape[0] for value in batch.values()} == {3}


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(NotBuilt, match="NoSuchClass"):
        build("transformers/gpt2/NoSuchClass")
    assert "transformers/llama/LlamaForCausalLM" in coverage_models.architectures()


@pytest.mark.slow
def test_a_cell_for_real() -> None:
    subject = build("transformers/gpt2/GPT2LMHeadModel")
    cpu_allocator.install()
    judge = Judge(subject)
    assert judge.cell(Column.named("eager/fp32")).outcome == TRAINED
    assert judge.cell(Column.named("eager/autocast-bf16")).outcome == TRAINED


def test_losses_may_be_as_far_as_roundings_move_plain_pytorch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = coverage_models.Subject("a/b/c", lambda: nn.Linear(3, 3), lambda size, length: {}, 12)
    judge, column = Judge(subject), Column.named("eager/fp32")
    plain = Trained(Losses((1.0, 2.0), None), None)
    for own, far, is_taken in ((0.0, 5e-4, True), (2e-3, 1.5e-3, True), (2e-3, 3e-3, False), (1.0, 2e-2, False)):
        monkeypatch.setattr(Judge, "_own_distance", lambda *_, own=own: own)
        trained = Trained(Losses((1.0, 2.0 * (1 + far)), None), None)
        if is_taken:
            assert bool(judge._check_losses(column, trained, plain)) == (far > 1e-3)
        else:
            with pytest.raises(Differs, match="from plain PyTorch's"):
                judge._check_losses(column, trained, plain)
    torch.manual_seed(0)
    weight = subject.make().weight
    torch.manual_seed(0)
    moved = nudged(subject, 0).make().weight
    assert 0 < relative_distance(moved, weight) < 1e-6


def relative_distance(one: Any, other: Any) -> float:
    return float(((one - other) / other).abs().max())


@pytest.mark.slow
def test_wrong_losses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if chunkc's optimizer had another learning rate than PyTorch's, under chunkc alone."""
    subject = build("transformers/gpt2/GPT2LMHeadModel")
    cpu_allocator.install()
    real = chunkc.optim.AdamW
    monkeypatch.setattr(chunkc.optim, "AdamW", lambda p, lr, **more: real(p, lr=30 * lr, **more))
    monkeypatch.setattr(Judge, "_by_default", Judge._by_plain)
    cell = Judge(subject).cell(Column.named("eager/fp32"))
    assert isinstance(cell, Cell)
    assert cell.outcome == FAILED
    assert "losses" in cell.message
