"""Small models, batches and budgets for the tests of other libraries' training loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from zoo import integers

import chunkc

VOCAB, LENGTH, WIDTH = 128, 32, 64


def gpt(seed: int = 0, num_layers: int = 2) -> nn.Module:
    """Make a GPT-2 with random weights, without dropout: about 115,000 parameters with two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=num_layers, n_embd=WIDTH, n_head=4, vocab_size=VOCAB, n_positions=LENGTH, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a warning about it breaks the graph
    return model


def tokens(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Make examples for a causal language model."""
    return [{"input_ids": row, "labels": row} for row in integers(seed, (count, LENGTH), VOCAB)]


def batches(examples: Sequence[dict[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Split examples into batches of `size`, in order."""
    for at in range(0, len(examples), size):
        part = examples[at : at + size]
        yield {key: torch.stack([example[key] for example in part]) for key in part[0]}


def losses_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Iterable[Any], max_norm: float | None = None
) -> list[float]:
    """Train on batches; return the losses."""
    losses = []
    for batch in given:
        found = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del found, loss
    return losses


def assert_moved(model: nn.Module, budget_nbytes: int) -> chunkc.Report:
    """Check that the model trained within the budget, and that chunks moved; return its report."""
    report = chunkc.report(model)
    assert report.predicted_peak_nbytes <= budget_nbytes == report.memory_budget_nbytes
    assert report.num_resident_chunks < report.num_chunks
    assert report.traffic_nbytes["to_home"] > 0
    return report


def assert_clipped_in_slots(model: nn.Module) -> None:
    """Check that only the first step's norm has read gradients at home."""
    read_nbytes, all_nbytes = chunkc.report(model).gradients_read_nbytes, sum(p.nbytes for p in model.parameters())
    assert 0 < read_nbytes <= all_nbytes


def assert_close(left: Sequence[Any], right: Sequence[Any]) -> None:
    """Check that losses agree up to rounding.

    AOTAutograd's decompositions and fused updates have another order of operations.
    """
    assert len(left) == len(right) > 0
    np.testing.assert_allclose(left, right, rtol=1e-3)
