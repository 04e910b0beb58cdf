"""Passes run from a list: each can be left out by its name, and one that breaks a graph is named."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import chunkc
from chunkc.ir.errors import InternalError, OptionsError
from chunkc.passes.rewrite.runner import DISABLE, VERIFY, Graphs, Pass, run_passes
from chunkc.tracing.passes import PASSES

OPTIONAL = [each.name for each in PASSES if not each.required]
WIDTH, VOCABULARY = 16, 64
CONTEXT = SimpleNamespace(num_user_outputs=None)


class Blocks(nn.Module):
    """Equal blocks with dropout, a frozen scale, views of parameters, autocast, and a loss over many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.scale = nn.Parameter(torch.rand(WIDTH, 1), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = x + F.dropout(torch.tanh(block(x)) * self.scale.sin().t(), 0.25, self.training)
            logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


SMALL = {"memory_budget": "256KiB", "activations": "rerun"}


def losses_and_parameters(codegen: str, **options: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    compiled = torch.compile(
        model,
        backend="chunkc",
        options={"codegen": codegen, "loss_tile_rows": 8, "whole_graph": "never", "chunk_size": 4096, **options},
    )
    optimizer = chunkc.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(2):
        loss = compiled((torch.arange(32).view(2, 16) + step) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


@cache
def with_all_passes() -> list[torch.Tensor]:
    return losses_and_parameters("eager", **SMALL)


@pytest.mark.quick(4)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", OPTIONAL)
def test_a_model_trains_the_same_without_a_pass(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = with_all_passes()
    monkeypatch.setenv(DISABLE, name)
    with caplog.at_level(logging.INFO, "chunkc"):
        found = losses_and_parameters("eager", **SMALL)
    assert f"pass {name}: left out" in caplog.messages or name == "unroll"
    if name == "loss_tiles":  # tiles are added up in another order
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    else:
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("text", ["unrol", "casts, tiles", "casts,,hoist ,Casts"])
def test_an_unknown_name_is_refused_with_those_that_there_are(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, text)
    with pytest.raises(OptionsError, match="there is no such pass") as caught:
        losses_and_parameters("eager")
    assert all(each.name in str(caught.value) for each in PASSES)


@pytest.mark.parametrize("one", [each for each in PASSES if each.required], ids=lambda one: one.name)
def test_a_required_pass_is_not_left_out(one: Pass[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, f"casts,{one.name}")
    with pytest.raises(OptionsError) as caught:
        losses_and_parameters("eager")
    assert one.required in str(caught.value)


def test_names_are_distinct() -> None:
    assert len({each.name for each in PASSES}) == len(PASSES)


def graph_of(function: Callable[..., Any], *arguments: torch.Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*arguments)


def forget_a_user(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.all_input_nodes[0].users.pop(node)


def keep_a_user(graph: fx.Graph) -> None:
    first = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(first):
        other = graph.call_function(operator.neg, (first.args[0],))
    graph.erase_node(other)
    first.args[0].users[other] = None


def read_before_it_is_made(graph: fx.Graph) -> None:
    first, second = (node for node in graph.nodes if node.op == "call_function")
    first.prepend(second)


def transpose(graph: fx.Graph) -> None:
    last = [node for node in graph.nodes if node.op == "call_function"][-1]
    last.meta["val"] = last.meta["val"].t()


def halve(graph: fx.Graph) -> None:
    last = [node for node in graph.nodes if node.op == "call_function"][-1]
    last.meta["val"] = last.meta["val"].half()


def drop_a_result(graph: fx.Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    output.args = ((),)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (forget_a_user, "that is none of its users"),
        (keep_a_user, "that does not read it"),
        (read_before_it_is_made, "not well formed"),
        (transpose, r"\['4', '2'\] \['2', '1'\] to torch.float32 \['2', '4'\]"),
        (halve, "torch.float16"),
        (drop_a_result, "made 0 results of 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_pass_that_breaks_a_graph_is_named(
    damage: Callable[[fx.Graph], None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(graphs: Graphs, context: object) -> Graphs:
        damage(graphs[0].graph)
        return graphs

    passes = [Pass("fine", lambda graphs, context: graphs), Pass("bad", run)]
    with pytest.raises(InternalError, match=f"pass bad .*{text}"):
        run_passes(passes, (graph_of(lambda x: (torch.tanh(x).neg(),), torch.ones(4, 2)),), CONTEXT)
    monkeypatch.delenv(VERIFY)
    run_passes(passes, (graph_of(lambda x: (torch.tanh(x).neg(),), torch.ones(4, 2)),), CONTEXT)


def test_a_graph_that_was_broken_before_is_no_pass_s_fault() -> None:
    module = graph_of(lambda x: (torch.tanh(x).neg(),), torch.ones(4, 2))
    read_before_it_is_made(module.graph)
    with pytest.raises(InternalError, match="the passes before"):
        run_passes([Pass("fine", lambda graphs, context: graphs)], (module,), CONTEXT)
