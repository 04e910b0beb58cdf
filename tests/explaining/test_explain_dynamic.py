"""Explanations of steps with dynamic shapes: every moment also as an expression."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import sympy
import torch
from zoo import LADDER

import chunkc
from chunkc.explaining.formats import read_explanation, write
from chunkc.ir.explanation import Explanation

BUDGET = 4_000_000


@cache
def explained(num_rows: int, *, dynamic: bool) -> Explanation:
    case = LADDER["encoder"]
    batch = {name: torch.zeros(num_rows, *value.shape[1:]) for name, value in case.batch(0).items()}
    for tensor in batch.values() if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    return chunkc.explain(case.build(), memory_budget=BUDGET, hardware="cpu", activations="keep", **batch)


def non_model(explanation: Explanation) -> list[tuple[str, int]]:
    return [(m.op, m.contents["activations"] + m.contents["temporaries"]) for m in explanation.moments]


@pytest.mark.second_tier
def test_expressions_are_the_bytes_of_other_sizes() -> None:
    symbolic = explained(7, dynamic=True)
    (note,) = [note for note in symbolic.notes if note.endswith("dimension 0 of x, 7 here")]
    symbol = note.partition(":")[0]
    for num_rows in (7, 4, 12):
        at = [
            (m.op, int(sympy.sympify(m.expression).subs(symbol, num_rows)))
            for m in symbolic.moments
            if m.phase != "update"
        ]
        assert at == non_model(explained(num_rows, dynamic=False))[: len(at)]
    assert all(m.expression is None for m in symbolic.moments if m.phase == "update")


def test_all_else_is_as_without_symbols_and_is_saved(tmp_path: Path) -> None:
    symbolic, static = explained(7, dynamic=True), explained(7, dynamic=False)
    assert non_model(symbolic) == non_model(static)
    assert symbolic.predicted_peak_nbytes == static.predicted_peak_nbytes
    assert symbolic.minimum_budget_nbytes == static.minimum_budget_nbytes
    assert symbolic.step_time_s == static.step_time_s
    assert all(m.expression is None for m in static.moments)
    write(symbolic, "json", tmp_path / "saved.json")
    assert read_explanation(tmp_path / "saved.json") == symbolic


def test_a_size_the_model_insists_on() -> None:
    class Insists(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum() if len(x) == 7 else x

    x = torch.zeros(7, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(chunkc.UnsupportedError, match="cannot be traced with symbols"):
        chunkc.explain(Insists(4, 4), x, hardware="cpu")


def with_inductor(num_rows: int, *, dynamic: bool) -> Explanation:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))
    x = torch.zeros(num_rows, 64)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return chunkc.explain(model, x, memory_budget=BUDGET, hardware="cpu", codegen="inductor", whole_graph="never")


@pytest.mark.second_tier
def test_expressions_of_what_inductor_fuses() -> None:
    """To the byte what explaining at those sizes says, of the same fused kernels."""
    symbolic = with_inductor(32, dynamic=True)
    assert symbolic.codegen == "inductor"
    (symbol,) = {note.partition(":")[0] for note in symbolic.notes if note.endswith("dimension 0 of args[0], 32 here")}
    in_symbols = [m for m in symbolic.moments if m.phase != "update"]
    assert any(symbol in (m.expression or "") for m in in_symbols)
    for moment, (_, nbytes) in zip(symbolic.moments, non_model(symbolic), strict=True):
        assert moment.phase == "update" or int(sympy.sympify(moment.expression).subs(symbol, 32)) == nbytes
    for num_rows in (48, 24):
        static = [m for m in with_inductor(num_rows, dynamic=False).moments if m.phase != "update"]
        for phase in ("forward", "backward"):
            expected = max(m.contents["activations"] + m.contents["temporaries"] for m in static if m.phase == phase)
            found = [int(sympy.sympify(m.expression).subs(symbol, num_rows)) for m in in_symbols if m.phase == phase]
            assert max(found) == expected, (phase, num_rows)
