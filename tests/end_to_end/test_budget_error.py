"""A budget that is too small: the error names what would do, and the model is as it was. Of what it says would need
less, each number is near the smallest budget with that change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY, compile_case, everything_fits, minimum_nbytes, refuse
from plain_modules import FeedForward
from torch import nn
from torch.nn import functional as F
from zoo import CASES

import chunkc


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "home"),
    [
        *((name, "cpu") for name in ("byte_gpt", "convnet", "frozen_mlp", "big_embedding", "encoder")),
        ("gpt2", "disk"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("gpt2", "cpu"), ("t5", "cpu"), ("t5", "disk"))),
    ],
)
def test_the_minimum_is_small_and_one_byte_less_does_not_work(name: str, home: str) -> None:
    """The minimum itself works: `tests/properties/test_ladder.py`."""
    minimum = minimum_nbytes(name, home)
    if (name, home) in {(of, "cpu") for of in ("byte_gpt", "big_embedding", "gpt2")}:
        assert minimum < 0.7 * everything_fits(name).predicted_peak_nbytes
    assert refuse(CASES[name], memory_budget=minimum - 1, home=home).minimum_nbytes == minimum


def test_the_error_says_where_and_what() -> None:
    error = refuse(CASES["byte_gpt"], memory_budget=TINY)
    assert error.budget_nbytes == TINY
    assert error.moment
    sizes = [nbytes for _, nbytes in error.contents]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sum(sizes) <= error.minimum_nbytes
    assert all(label.strip() for label, _ in error.contents)
    for part in (error.moment, error.module, f"{error.minimum_nbytes:,}", f"{TINY:,}", error.contents[0][0]):
        assert part in str(error)


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    """Refused before anything is moved: not even the home's file exists."""
    case = CASES["byte_gpt"]
    _, compiled = compile_case(case, memory_budget=TINY, home=f"disk:{tmp_path}", place=False)
    with pytest.raises(chunkc.BudgetError):
        compiled(**case.batch(0))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- what would need less

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(vocabulary, 128), nn.Linear(128, vocabulary)
        self.blocks = nn.ModuleList(FeedForward(128) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def refused(vocabulary: int, tokens: torch.Tensor, **options: Any) -> chunkc.BudgetError:
    torch._dynamo.reset()
    options = {"memory_budget": 1, "codegen": "eager", "loss_tile_rows": "never", **options}
    with pytest.raises(chunkc.BudgetError) as error:
        torch.compile(LanguageModel(vocabulary), backend="chunkc", options=options)(tokens)
    return error.value


def changed(remedy: str, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the batch and the options with a remedy, as a user reads it."""
    if remedy.startswith("half the batch"):
        return tokens[: len(tokens) // 2].clone(), {}
    name, _, value = remedy.removesuffix(", the default").partition("=")
    return tokens, {name: int(value) if value.isdigit() else value.strip('"')}


@pytest.mark.parametrize(
    ("vocabulary", "batch_size", "activations", "chunk_size", "names"),
    [
        (64, 4, "keep", "1MiB", {"half the batch or sequence length", "activations", "chunk_size"}),
        pytest.param(
            *(2048, 16, "auto", "auto", {"half the batch or sequence length", "loss_tile_rows"}),
            marks=pytest.mark.second_tier,
        ),
    ],
)
def test_each_remedy_needs_what_it_says(
    vocabulary: int, batch_size: int, activations: str, chunk_size: str, names: set[str]
) -> None:
    tokens, options = (
        torch.randint(vocabulary, (batch_size, 128)),
        {"activations": activations, "chunk_size": chunk_size},
    )
    error = refused(vocabulary, tokens, **options)
    assert {remedy.partition("=")[0] for remedy, _ in error.remedies} == names
    assert [nbytes for _, nbytes in error.remedies] == sorted(nbytes for _, nbytes in error.remedies)
    for remedy, nbytes in error.remedies:
        batch, change = changed(remedy, tokens)
        assert refused(vocabulary, batch, **{**options, **change}).minimum_nbytes == pytest.approx(nbytes, rel=0.1), (
            remedy
        )


def test_values_at_the_peak_are_named_by_module() -> None:
    error = refused(2048, torch.randint(2048, (16, 128)))
    (module, nbytes), *_ = error.values
    assert module == "head"
    assert nbytes >= 2 * 16 * 128 * 2048 * 4  # logits, and their gradient
    assert nbytes < sum(n for _, n in error.values) <= error.values_nbytes
    assert f"{chunkc.ir.errors.VALUES}: " in str(error)


def of_evaluations(model: nn.Module, tokens: torch.Tensor) -> chunkc.BudgetError:
    with torch.no_grad(), pytest.raises(chunkc.BudgetError) as error:
        model.eval()(tokens)
    return error.value


def with_a_graph_break(model: nn.Module, tokens: torch.Tensor) -> chunkc.BudgetError:
    model.blocks[1].register_forward_pre_hook(torch._dynamo.disable(lambda *_: None))
    with pytest.raises(chunkc.BudgetError) as error:
        model(tokens)
    return error.value


@pytest.mark.parametrize("call", [of_evaluations, with_a_graph_break])
def test_no_remedy_is_of_less_than_the_minimum_is_for(
    call: Callable[[nn.Module, torch.Tensor], chunkc.BudgetError],
) -> None:
    """Numbers for a part of the step would promise too much."""
    model = LanguageModel(64)
    options = {"memory_budget": 1, "codegen": "eager", "activations": "keep"}
    error = call(torch.compile(model, backend="chunkc", options=options), torch.randint(64, (4, 32)))
    assert error.training_nbytes is not None
    assert error.evaluates or not error.remedies


def test_a_loss_before_the_peak_is_tiled_as_well() -> None:
    """The peak is at the product that makes the logits' gradients into the embedding's, or at another operation."""
    tokens = torch.randint(2048, (16, 128))
    error = refused(2048, tokens, activations="keep")
    assert error.has_loss
    assert any(remedy == "loss_tile_rows=1024" for remedy, _ in error.remedies)
    assert not any("loss_tile_rows" in remedy for remedy, _ in refused(2048, tokens, loss_tile_rows=512).remedies)
