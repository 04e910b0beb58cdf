"""Equal layers are traced once: the graphs are those that tracing all layers gives, to the names and storages."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import segmented
from torch import Tensor, fx, nn
from torch.nn import functional as F
from traced_graphs import NUM_LAYERS, TOKENS, WIDTH, Deep, captured, text

from chunkc.passes.graphs.graphs import copy_of, output_node
from chunkc.passes.rewrite.repeats import LAYER
from chunkc.passes.rewrite.unrolling import NotAlike, unroll, unroll_phases
from chunkc.tracing import passes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def without_names(text: str) -> str:
    """Leave out the names of inputs, which passes that count have given."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("['"))


def both_ways(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: Any) -> tuple[str, str, int]:
    """The graphs' text with the layers traced once, with all of them traced, and the number of layers alike."""
    graphs, num_alike = captured(model, TOKENS, **options)
    with monkeypatch.context() as patch:
        patch.setenv("CHUNKC_DISABLE_PASS", "unroll")
        whole, _ = captured(model, TOKENS, **options)
    return text(graphs), text(whole), num_alike


@pytest.fixture
def num_prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations the graphs had that Inductor's passes went through, before they did."""
    found: list[int] = []
    for name in ("prepare_joint_graph", "prepare_all_but_random"):
        prepare = getattr(passes, name)

        def counted(gm: fx.GraphModule, inputs: Any, prepare: Callable[..., None] = prepare) -> None:
            found.append(len(gm.graph.nodes))
            prepare(gm, inputs)

        monkeypatch.setattr(passes, name, counted)
    return found


@pytest.fixture
def num_partitioned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations the joint graphs had that were partitioned."""
    found: list[int] = []
    partition = passes.partition

    def counted(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        found.append(len(joint.graph.nodes))
        return partition(joint, *args, **kwargs)

    monkeypatch.setattr(passes, "partition", counted)
    return found


@pytest.mark.quick(2, second=3)
@pytest.mark.parametrize(
    ("variant", "codegen"),
    [
        *((variant, "eager") for variant in ("", "frozen", "dropout", "one for all")),
        *((variant, "inductor") for variant in ("dropout", "tied", "checkpoints")),
    ],
)
def test_graphs_are_those_of_all_layers_traced(
    monkeypatch: pytest.MonkeyPatch, variant: str, codegen: str, num_prepared: list[int], num_partitioned: list[int]
) -> None:
    once, whole, num_alike = both_ways(monkeypatch, Deep(variant), codegen=codegen)
    assert num_alike >= NUM_LAYERS - 1
    assert once == whole
    assert str(LAYER) not in once
    assert len(num_prepared) == (2 if codegen == "inductor" else 0)
    assert num_prepared == sorted(set(num_prepared))
    few, all_layers = num_partitioned
    assert all_layers > 1.3 * few or ((variant, codegen) == ("dropout", "inductor") and few == all_layers)


def test_layers_that_were_partitioned_once_train_as_all(
    monkeypatch: pytest.MonkeyPatch, num_partitioned: list[int]
) -> None:
    model = Deep()
    found = []
    for left_out in ("", "unroll"):
        monkeypatch.setenv("CHUNKC_DISABLE_PASS", left_out)
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        loss = segmented(copied, 10**6)(TOKENS)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in copied.parameters())])
    assert all(map(torch.equal, *found))
    few, all_layers = num_partitioned
    assert few < all_layers


class Attention(nn.Module):
    """Written by hand: Inductor's passes know it, and make another operator of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*t.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = F.dropout((q @ k.transpose(-2, -1) / 2.0).softmax(-1), 0.1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.second_tier
def test_what_passes_make_of_few_layers_is_what_they_make_of_all(
    monkeypatch: pytest.MonkeyPatch, num_prepared: list[int]
) -> None:
    """Attention becomes one operator or two of its dropout's, and random numbers are numbered over all layers."""
    model = nn.Sequential(nn.Embedding(8, WIDTH), *(Attention() for _ in range(NUM_LAYERS)))
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        num_prepared.clear()
        with context:
            once, whole, num_alike = both_ways(monkeypatch, model, codegen="inductor")
        assert num_alike
        assert without_names(once) == without_names(whole)
        assert once.count("inductor_lookup_seed.") == NUM_LAYERS
        few, all_layers = num_prepared
        assert few < all_layers


def in_second_layer(graph: fx.Graph) -> fx.Node | None:
    """A product in the second of the few layers of a graph; None if it has all layers."""
    nodes = (n for n in graph.nodes if (n.meta.get("custom") or {}).get(LAYER) == 2 and n.name.startswith("mul"))
    return next(nodes, None)


def change_second_layer(graph: fx.Graph) -> None:
    if (node := in_second_layer(graph)) is not None:
        node.args = (node.args[0], node.args[0])


@pytest.mark.second_tier
def test_where_passes_make_layers_differ_all_are_prepared(
    monkeypatch: pytest.MonkeyPatch, num_prepared: list[int]
) -> None:
    for name in ("prepare_joint_graph", "prepare_all_but_random"):
        prepare = getattr(passes, name)

        def changed(gm: fx.GraphModule, inputs: Any, prepare: Callable[..., None] = prepare) -> None:
            prepare(gm, inputs)
            change_second_layer(gm.graph)

        monkeypatch.setattr(passes, name, changed)
    once, whole, _ = both_ways(monkeypatch, Deep(), codegen="inductor")
    assert once == whole
    few, again, *others = num_prepared
    assert few == again
    assert few < others[0] == others[1]


def test_where_the_partitioner_makes_layers_differ_it_sees_all(
    monkeypatch: pytest.MonkeyPatch, num_partitioned: list[int]
) -> None:
    partition = passes.partition

    def changed(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs = partition(joint, *args, **kwargs)
        change_second_layer(graphs[1].graph)
        return graphs

    monkeypatch.setattr(passes, "partition", changed)
    once, whole, _ = both_ways(monkeypatch, Deep())
    assert once == whole
    few, *others = num_partitioned
    assert few < others[0] == others[1]


@pytest.mark.second_tier
def test_passes_of_the_user_see_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    with torch._inductor.config.patch(joint_custom_post_pass=lambda graph: found.append(len(graph.nodes))):
        both_ways(monkeypatch, Deep(), codegen="inductor")
    once, whole = found
    assert once == whole


@pytest.mark.second_tier
def test_other_sizes_casts_and_two_kinds_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    once, whole, num_alike = both_ways(monkeypatch, Deep(), dynamic=True)
    assert num_alike
    assert once == whole
    assert re.search(r"s\d+", once)
    with torch.autocast("cpu", torch.bfloat16):
        once, whole, num_alike = both_ways(monkeypatch, Deep("dropout"))
    assert num_alike
    assert once == whole
    once, whole, num_alike = both_ways(monkeypatch, Deep(hidden=(32, 16) * NUM_LAYERS))
    assert num_alike >= 6, "two kinds of layers in turn are one block"
    assert once == whole


@pytest.mark.quick(2, second=1)
@pytest.mark.parametrize(
    ("variant", "hidden"),
    [
        ("", (32, 16) * 4),
        ("", (32,) * 5),
        *((variant, (32,) * NUM_LAYERS) for variant in ("batch norms", "states", "counts")),
    ],
)
def test_what_is_not_alike_is_traced_whole(
    monkeypatch: pytest.MonkeyPatch, variant: str, hidden: tuple[int, ...]
) -> None:
    once, whole, num_alike = both_ways(monkeypatch, Deep(variant, hidden))
    assert num_alike == 0
    assert once == whole


def test_a_block_that_was_traced_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one block's operation, or what it reads, is another one, all layers are traced."""
    refused = []

    def found(unrolled: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            for graph in args:
                if isinstance(graph, fx.Graph):
                    change_second_layer(graph)
            try:
                return unrolled(*args)
            except NotAlike as error:
                refused.append(str(error))
                raise

        return changed

    monkeypatch.setattr(passes, "unroll", found(unroll))
    monkeypatch.setattr(passes, "unroll_phases", found(unroll_phases))
    once, whole, _ = both_ways(monkeypatch, Deep())
    assert once == whole
    of_phases, of_joint = refused
    assert "read other values" in of_phases
    assert "read other values" in of_joint


@pytest.fixture(scope="module")
def phases() -> list[Any]:
    """The arguments of `unroll_phases` for a model: forward and backward of few layers, names, repeats, two numbers."""
    found: list[Any] = []

    def noted(*args: Any) -> Any:
        found.extend(args)
        raise NotAlike("noted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "unroll_phases", noted)
        captured(Deep(), TOKENS)
    return found


def rename(forward: fx.Graph, backward: fx.Graph) -> None:
    next(node for node in backward.nodes if node.op == "call_function").name = "renamed"


def mix(forward: fx.Graph, backward: fx.Graph) -> None:
    nodes = [node for node in forward.nodes if (node.meta.get("custom") or {}).get(LAYER) in (1, 3)]
    nodes[0].append(nodes[-1])


def mix_in_backward(forward: fx.Graph, backward: fx.Graph) -> None:
    nodes = [node for node in backward.nodes if (node.meta.get("custom") or {}).get(LAYER) in (1, 3)]
    nodes[0].append(nodes[-1])


def save_less(forward: fx.Graph, backward: fx.Graph) -> None:
    output = output_node(forward)
    output.args = (output.args[0][:-1],)


def return_more(forward: fx.Graph, backward: fx.Graph) -> None:
    output = output_node(backward)
    output.args = ((*output.args[0], None),)


def save_otherwise(forward: fx.Graph, backward: fx.Graph) -> None:
    output_node(forward).args[0][-1].meta["saved_tensor_with_no_vc_check"] = True


def save_no_tensor(forward: fx.Graph, backward: fx.Graph) -> None:
    output_node(forward).args[0][-1].meta["val"] = None


def describe_otherwise(forward: fx.Graph, backward: fx.Graph) -> None:
    meta = output_node(forward).meta
    meta["desc"] = [*meta["desc"][:-1], object()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, "made by the partitioner"),
        (mix, "mixed"),
        (mix_in_backward, "mixed"),
        (save_less, "other values than the forward saves"),
        (return_more, "other values than gradients"),
        (save_otherwise, "saved after the others"),
        (save_no_tensor, "neither a tensor nor a size"),
        (describe_otherwise, "in several ways"),
    ],
)
def test_phases_of_another_form_are_not_unrolled(
    phases: list[Any], change: Callable[[fx.Graph, fx.Graph], None], message: str
) -> None:
    forward, backward, *others = (copy_of(value) if isinstance(value, fx.Graph) else value for value in phases)
    change(forward, backward)
    with pytest.raises(NotAlike, match=message):
        unroll_phases(forward, backward, *others)
