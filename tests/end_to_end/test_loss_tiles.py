"""Language models whose loss is computed in tiles: less memory, the same bits under every budget."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import HUGE, TINY, Result, assert_same_training, compile_case, refuse, train
from plain_modules import FeedForward
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Case

import chunkc
from chunkc.passes.rewrite import loss_tiles

ROWS = 32
BATCH, LENGTH, WIDTH, CLASSES = 4, 33, 32, 3000
SECOND = pytest.mark.second_tier
SLOW = pytest.mark.slow


class Words(nn.Module):
    """More classes than all else: logits of all rows are the peak."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(*(FeedForward(WIDTH, dropout=dropout) for _ in range(2)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(ids)))
        return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES).float(), ids[:, 1:].reshape(-1))


def words(seed: int, batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    return {"ids": torch.randint(CLASSES, (batch, length), generator=torch.Generator().manual_seed(seed))}


def _hugging_face() -> nn.Module:
    """Its caller gets the logits of all rows as well."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CLASSES, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=False,
        )
    )  # fmt: skip


def _labelled(seed: int) -> dict[str, Any]:
    ids = words(seed)["ids"]
    return {"input_ids": ids, "labels": ids}


CASES = {
    "plain": Case("plain", Words, words),
    "dropout": Case("dropout", lambda: Words(tied=True, dropout=0.1), words),
    "hugging_face": Case("hugging_face", _hugging_face, _labelled),
}

WAYS = [
    ("plain", "eager", 0.5),
    pytest.param("plain", "inductor", 0.6, marks=SLOW),
    pytest.param("dropout", "eager", 0.5, marks=SECOND),
    pytest.param("dropout", "inductor", 0.6, marks=SECOND),
    pytest.param("hugging_face", "eager", 0.8, marks=SECOND),
    pytest.param("hugging_face", "inductor", 0.97, marks=SLOW),
]
"""And the smallest budget with tiles, as a part of that without: the head's gradient is in both."""


@functools.cache
def unlimited(name: str, codegen: str, rows: int | str) -> Result:
    options: dict[str, Any] = {"codegen": codegen, "loss_tile_rows": rows, "whole_graph": "never"}
    return train(CASES[name], memory_budget=HUGE, limit=False, **options)


def least_nbytes(name: str, **options: Any) -> int:
    return refuse(CASES[name], memory_budget=TINY, **options).minimum_nbytes


@pytest.mark.parametrize(("name", "codegen", "share"), WAYS)
def test_the_same_bits_in_less_memory(name: str, codegen: str, share: float) -> None:
    least = least_nbytes(name, codegen=codegen, loss_tile_rows=ROWS)
    whole = least_nbytes(name, codegen=codegen)
    assert least <= share * whole, (least, whole)
    expected = unlimited(name, codegen, ROWS)
    for nbytes in (least, (least + whole) // 2) if name == "plain" else (least,):
        found = train(CASES[name], memory_budget=nbytes, codegen=codegen, loss_tile_rows=ROWS, debug=True)
        assert_same_training(found, expected)
        assert found.measured_peak_nbytes <= found.predicted_peak_nbytes <= nbytes
        if (name, codegen) == ("plain", "eager"):
            assert found.measured_peak_nbytes == found.predicted_peak_nbytes
    losses = unlimited(name, codegen, "never").losses
    assert [float(loss) for loss in expected.losses] == pytest.approx([float(loss) for loss in losses], rel=1e-3)


@SECOND
@pytest.mark.parametrize("activations", ["offload", "rerun", "auto"])
def test_values_that_leave_beside_tiles(activations: str) -> None:
    options = {"loss_tile_rows": ROWS, "activations": activations}
    least = least_nbytes("plain", **options)
    assert least < least_nbytes("plain", loss_tile_rows=ROWS)
    assert_same_training(
        train(CASES["plain"], memory_budget=least, debug=True, **options), unlimited("plain", "eager", ROWS)
    )


@SECOND
def test_other_sizes_and_evaluations_between() -> None:
    def losses(rows: int | str) -> list[float]:
        _, model = compile_case(CASES["plain"], memory_budget=HUGE, loss_tile_rows=rows)
        found = []
        for number, (batch, length) in enumerate([(4, 33), (3, 21), (4, 33)]):
            loss = model(**words(number, batch, length))
            loss.backward()
            found.append(loss.item())
            with torch.no_grad():
                found.append(model(**words(number, batch + 1, length)).item())
        return found

    assert losses(ROWS) == pytest.approx(losses("never"), rel=1e-5)


@SECOND
def test_where_everything_fits_the_graph_is_whole() -> None:
    found = train(CASES["plain"], memory_budget=HUGE, limit=False, loss_tile_rows=ROWS)
    assert found.measured_peak_nbytes <= found.predicted_peak_nbytes
    expected = unlimited("plain", "eager", "never")
    assert [float(loss) for loss in found.losses] == pytest.approx([float(loss) for loss in expected.losses], rel=1e-4)


@SECOND
def test_explain_knows_it() -> None:
    least = least_nbytes("plain", loss_tile_rows=ROWS)
    model, ids = CASES["plain"].build(0), words(0)["ids"]
    options = {"memory_budget": TINY, "codegen": "eager", "whole_graph": "never", "activations": "keep"}
    explained = chunkc.explain(model, ids, loss_tile_rows=ROWS, **options)
    assert explained.minimum_budget_nbytes == least
    _, compiled = compile_case(CASES["plain"], memory_budget=least, loss_tile_rows=ROWS, activations="rerun")
    compiled(ids).backward()
    of_compiled = chunkc.explain(compiled, ids)
    assert of_compiled.measured is not None
    assert of_compiled.predicted_peak_nbytes == chunkc.report(compiled).predicted_peak_nbytes


def test_a_loss_that_stays_whole_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Weighted(Words):
        def forward(self, ids: Tensor) -> Tensor:
            logits = self.head(self.embedding(ids))
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), weight=torch.ones(CLASSES))

    case = Case("weighted", Weighted, words)
    with caplog.at_level("WARNING", "chunkc"):
        train(case, memory_budget=HUGE, limit=False, loss_tile_rows=ROWS, steps=1)
    assert "its classes have weights" in caplog.text


def test_auto_goes_by_the_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_tiles, "MANY_LOGITS", BATCH * (LENGTH - 1) * CLASSES - 1)
    monkeypatch.setattr(loss_tiles, "TILE_LOGITS", ROWS * CLASSES)
    least = least_nbytes("plain")
    assert least == least_nbytes("plain", loss_tile_rows=ROWS)
    for nbytes in (least, HUGE):
        found = train(CASES["plain"], memory_budget=nbytes, limit=False, whole_graph="never")
        assert_same_training(found, unlimited("plain", "eager", ROWS))
    _, model = compile_case(CASES["plain"], memory_budget=HUGE)
    model(**words(0))
    assert chunkc.report(model).loss_tiles == (f"cross_entropy: 4 tiles of at most {ROWS} rows",)


@pytest.mark.parametrize(
    ("rows", "with_logits", "note"),
    [(2049, False, "5 tiles of at most 512 rows"), (2049, True, "another reader"), (2048, False, "")],
)
def test_explain_says_what_becomes_of_a_large_loss(rows: int, with_logits: bool, note: str) -> None:
    class Head(nn.Linear):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            logits = super().forward(x)
            loss = F.cross_entropy(logits, target)
            return (loss, logits) if with_logits else loss

    head = Head(8, 2**17, device="meta")
    batch = torch.empty(rows, 8, device="meta"), torch.empty(rows, dtype=torch.int64, device="meta")
    found, whole = (chunkc.explain(head, *batch, **options) for options in ({}, {"loss_tile_rows": "never"}))
    notes = [text for text in found.notes if text.startswith("loss_tile_rows")]
    assert len(notes) == bool(note)
    assert all(note in text for text in notes)
    assert not any(text.startswith("loss_tile_rows") for text in whole.notes)
    assert (found.minimum_budget_nbytes < 0.6 * whole.minimum_budget_nbytes) == ("tiles of" in note)
