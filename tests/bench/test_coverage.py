"""The coverage suite: which architectures and columns are chosen, what counts, and what is taken over."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import models as coverage_models
from architectures.judge import Judge, nudged
from architectures.models import NotBuilt, build
from architectures.table import COLUMNS, COUNTED, FAILED, NOT_BUILT, TRAINED
from architectures.training import Losses, Trained
from judging.budgets import Differs
from judging.table import DEFAULT_FAILS, Cell, percentage
from measuring import forked
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
    assert coverage.chosen(NAMES, args, {}) == [(name, column) for name in NAMES[1:] for column in args.columns]
    assert names_of("--family", "llama") == NAMES[2:]
    assert names_of("--family", "*/test_*") == NAMES[:1]
    assert names_of("--family", "llama,*/test_*") == [NAMES[0], NAMES[2]]
    one, other = (names_of("--sample", "2", "--seed", "5") for _ in range(2))
    assert one == other
    assert len(one) == 2
    with pytest.raises(SystemExit):
        coverage.parse_args(["--columns", "fp8"])


def names_of(*arguments: str) -> list[str]:
    return list(dict.fromkeys(name for name, _ in coverage.chosen(NAMES, coverage.parse_args(arguments), {})))


def test_a_result_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def results(groups: Iterable[Sequence[Any]], *_: object, **options: object) -> Iterator[tuple[Any, Any]]:
        for work in (work for group in groups for work in group):
            asked.append(work)
            yield work, {**Cell(TRAINED).__dict__, "num_parameters": 7, "seconds": 0.1}

    monkeypatch.setattr(forked, "results", results)
    monkeypatch.setattr(coverage, "architectures", lambda: ["a/b/c", "a/b/d"])
    cells = {"eager/fp32": {"commit": "old", **Cell(FAILED, "why").__dict__, "seconds": 1.0}}
    answer = {"architecture": "a/b/x", "num_parameters": 5, "cells": cells}
    (tmp_path / "earlier.json").write_text(json.dumps({"answers": [answer]}))
    result = tmp_path / "result.json"
    run = ["--columns", "eager/fp32", "--out", str(tmp_path / "out.jsonl"), "--result", str(result)]
    assert coverage.main([*run, "--sample", "1", "--from", str(tmp_path / "earlier.json")]) == 1
    assert coverage.main(run) == 1
    assert sorted(asked) == [("a/b/c", "eager/fp32"), ("a/b/d", "eager/fp32")]
    written = json.loads(result.read_text())["answers"]
    assert [answer["num_parameters"] for answer in written] == [7, 7, 5]
    assert written[2] == answer


def test_the_committed_result_is_read() -> None:
    path = Path(coverage.__file__).parent / "results/coverage-2026-11-26-1440.json"
    answers = json.loads(path.read_text())["answers"]
    assert coverage.answers_of(coverage.lines_of({"answers": answers})) == answers


def test_what_the_default_backend_does_not_train_does_not_count() -> None:
    outcomes = (TRAINED, TRAINED, TRAINED, FAILED, DEFAULT_FAILS, NOT_BUILT)
    assert percentage(outcomes, COUNTED) == 75
    assert percentage([NOT_BUILT], COUNTED) is None


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


def test_losses_may_be_as_far_as_roundings_move_plain_pytorch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = coverage_models.Subject("a/b/c", lambda: nn.Linear(3, 3), lambda size, length: {}, 12)
    judge, column = Judge(subject), COLUMNS["eager/fp32"]
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
    cell = Judge(subject).cell(COLUMNS["eager/fp32"])
    assert cell.outcome == FAILED
    assert "losses" in cell.message
