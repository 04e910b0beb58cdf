"""Graphs traced on the CPU as a CUDA device would run them: fake tensors of a device that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ladder import rungs
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from zoo import LADDER

from chunkc.explaining.offline import OfflineGraph, capture_offline
from chunkc.models import MODELS
from chunkc.passes.graphs.graphs import placeholders, returned, storage_key, tensors_of
from chunkc.passes.memory.segment_memory import eager_memory
from chunkc.passes.rewrite import retarget_cuda
from chunkc.passes.rewrite.repeats import value_text
from chunkc.passes.rewrite.retarget_cuda import on_cuda

aten = torch.ops.aten
HALF = torch.bfloat16
FAMILIES = ("gpt2-small", "bert-base", "vit-base-32", "palm-8b", "llama3-1b", "mixtral-8x7b")


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, mask: Tensor | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64, dtype=dtype)
        self.qkv = nn.Linear(64, 192, dtype=dtype)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).view(2, 16, 3, 2, 32).permute(2, 0, 3, 1, 4)
        is_causal = self.mask is None
        return nn.functional.scaled_dot_product_attention(*parts, self.mask, is_causal=is_causal).float().sum()


class Heads(nn.Module):
    """Attention of two heads over any number of rows, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, dtype=HALF)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> OfflineGraph:
    (graph,) = capture_offline(model, args, kwargs, codegen="eager").graphs
    return graph


def moved(graph: OfflineGraph, capability: tuple[int, int] | None = None) -> tuple[fx.GraphModule, fx.GraphModule]:
    capture = graph.capture
    assert capture.forward is not None
    forward, backward = on_cuda(capture.forward, capture.backward, capability)
    assert backward is not None
    return forward, backward


def node_of(module: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


def attention_of(name: str) -> tuple[Any, Any]:
    forward = f"_scaled_dot_product_{name}_attention"
    return getattr(aten, forward), getattr(aten, f"{forward}_backward")


def devices(module: fx.GraphModule) -> set[str]:
    return {tensor.device.type for node in module.graph.nodes for tensor in tensors_of(node)}


@pytest.mark.parametrize(
    ("dtype", "capability", "name"),
    [
        (HALF, None, "flash"),
        (HALF, (8, 0), "flash"),
        (HALF, (9, 0), "cudnn"),
        (torch.float16, (10, 0), "cudnn"),
        (torch.float32, None, "efficient"),
        (torch.float32, (9, 0), "efficient"),
    ],
)
def test_attention_is_the_device_s_and_saves_its_generator_s_state(
    dtype: torch.dtype, capability: tuple[int, int] | None, name: str
) -> None:
    forward_op, backward_op = attention_of(name)
    graph = captured(Attention(dtype), torch.randn(2, 16, 64, dtype=dtype))
    capture = graph.capture
    assert capture.forward is not None
    before = [node.format_node() for node in capture.forward.graph.nodes]
    forward, backward = moved(graph, capability)
    assert [node.format_node() for node in capture.forward.graph.nodes] == before  # the given graph is as it was
    assert devices(capture.forward) == {"cpu"}
    assert devices(forward) == devices(backward) == {"cuda"}
    node_of(forward, forward_op.default)
    attention = node_of(backward, backward_op.default)
    taken = {node.name for node in placeholders(backward.graph)}
    before_names = {node.name for node in returned(capture.forward.graph) if node is not None}
    saved = {node.name for node in returned(forward.graph) if node is not None} - before_names
    assert len(saved) == 2, "seed and offset"
    assert saved <= taken
    assert saved <= {node.name for node in attention.all_input_nodes}


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_backward_takes_what_is_saved_in_its_order(is_dynamic: bool) -> None:
    """Programs go by position; numbers are saved last and taken first."""
    x = torch.randn(3, 16, 64, dtype=HALF)
    if is_dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    model = nn.Sequential(Heads(), Heads())
    (graph,) = capture_offline(model, (x,), {}, codegen="eager", dynamic=is_dynamic).graphs
    for capability in (None, (9, 0)):
        forward, backward = moved(graph, capability)
        saved = [node for node in returned(forward.graph)[graph.capture.num_user_outputs :] if node is not None]
        tensors = [node.name for node in saved if tensors_of(node)]
        numbers = [node.name for node in saved if not tensors_of(node)]
        taken = [node.name for node in placeholders(backward.graph)]
        assert bool(numbers) == is_dynamic
        assert taken[: len(saved)] == [*numbers, *tensors]
        assert [node.name for node in saved] == [*tensors, *numbers]


@pytest.mark.parametrize("dtype", [torch.bool, HALF])
@pytest.mark.parametrize(("capability", "name"), [((8, 0), "efficient"), ((9, 0), "cudnn"), (None, "efficient")])
def test_a_mask_goes_both_ways(dtype: torch.dtype, capability: tuple[int, int] | None, name: str) -> None:
    mask = torch.ones(16, 16, dtype=torch.bool).tril().to(dtype)
    forward, backward = moved(captured(Attention(HALF, mask), torch.randn(2, 16, 64, dtype=HALF)), capability)
    for module, op in zip((forward, backward), attention_of(name), strict=True):
        arguments = [argument.name for argument in op.default._schema.arguments]
        bias = dict(zip(arguments, node_of(module, op.default).args, strict=False))
        found = bias["attn_bias"]
        assert isinstance(found, fx.Node)
        assert tuple(found.meta["val"].shape) == (16, 16)


def test_values_of_cudnn_s_attention_are_what_torch_says_they_are() -> None:
    """Shapes, strides and dtypes as `torch/_meta_registrations.py` has them, of the meta device."""
    mask = torch.zeros(2, 1, 16, 16, dtype=HALF)
    for given in (None, mask):
        graphs = moved(captured(Attention(HALF, given), torch.randn(2, 16, 64, dtype=HALF)), (9, 0))
        for module, op in zip(graphs, attention_of("cudnn"), strict=True):
            node = node_of(module, op.default)
            arguments = pytree.tree_map_only(fx.Node, lambda node: on_meta(node.meta["val"]), (node.args, node.kwargs))
            expected = op.default(*arguments[0], **arguments[1])
            assert described(node.meta["val"]) == described(expected)
        out, logsumexp, *_ = node_of(graphs[0], attention_of("cudnn")[0].default).meta["val"]
        assert (tuple(logsumexp.shape), logsumexp.dtype) == ((2, 2, 16, 1), torch.float32)
        assert (tuple(out.shape), out.dtype) == ((2, 2, 16, 32), HALF)


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def described(values: Any) -> list[Any]:
    return [
        (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value for value in values
    ]


def test_recomputed_attention_and_its_backward_are_of_one_kernel() -> None:
    block = Attention(HALF)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    graph = captured(Checkpointed(), torch.randn(2, 16, 64, dtype=HALF))
    forward_op, backward_op = attention_of("cudnn")
    _, backward = moved(graph, (9, 0))
    (recomputed,) = [node for node in backward.graph.nodes if forward_op.default in (node.target, *node.args)]
    seed = node_of(backward, backward_op.default).args[6]
    assert isinstance(seed, fx.Node)
    assert seed.args == (recomputed, 6)
    assert eager_memory(backward.graph, 1).steps


def test_torch_may_have_been_told_to_leave_cudnn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(Attention(HALF), torch.randn(2, 16, 64, dtype=HALF))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    for module, op in zip(moved(graph, (9, 0)), attention_of("flash"), strict=True):
        node_of(module, op.default)


def test_a_norm_s_statistics_are_fp32_there_and_half_on_the_cpu() -> None:
    graph = captured(Attention(HALF), torch.randn(2, 16, 64, dtype=HALF))
    assert graph.capture.forward is not None
    on_cpu = tensors_of(node_of(graph.capture.forward, aten.native_layer_norm.default))
    there = tensors_of(node_of(moved(graph)[0], aten.native_layer_norm.default))
    assert [t.dtype for t in on_cpu] == [HALF, HALF, HALF]
    assert [t.dtype for t in there] == [HALF, torch.float32, torch.float32]


def test_bytes_are_rounded() -> None:
    forward, _ = moved(captured(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(3, 6)))
    assert {step.nbytes % 512 for step in eager_memory(forward.graph, 1).steps} == {0}


def describe(graph: OfflineGraph) -> None:
    """Every operator of both phases has a size on a CUDA device."""
    capture = graph.capture
    assert capture.forward is not None
    for module in on_cuda(capture.forward, capture.backward):
        if module is not None:
            assert devices(module) <= {"cuda", "cpu"}
            assert eager_memory(module.graph, 1).steps


QUICK = ("convnet", "encoder", "called_twice", "dropout", "odd_layouts")


@pytest.mark.parametrize("name", rungs((name for name in LADDER if name != "lstm"), QUICK))  # lstm: no graph
def test_models_of_the_ladder(name: str) -> None:
    case = LADDER[name]
    for graph in capture_offline(case.build(), (), case.batch(0), codegen="eager").graphs:
        describe(graph)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("gpt2-small", True),
        *(
            pytest.param(name, checkpointing, marks=() if name in FAMILIES and not checkpointing else pytest.mark.slow)
            for name in MODELS
            for checkpointing in (False, True)
            if (name, checkpointing) != ("gpt2-small", True)
        ),
    ],
)
def test_built_in_models_of_two_layers(name: str, checkpointing: bool) -> None:
    spec = replace(MODELS[name], config=replace(MODELS[name].config, num_layers=2))  # type: ignore[call-arg]
    with torch.device("meta"):
        model = spec.build(activation_checkpointing=checkpointing)
        args, kwargs = spec.example(1, None if spec.seq_len is None else 32)
    describe(captured(model, *args, **kwargs))


def forms(modules: tuple[fx.GraphModule, ...]) -> list[object]:
    """Every value's form, and which storages values share."""
    values = [tensor for module in modules for node in module.graph.nodes for tensor in tensors_of(node)]
    number: dict[int, int] = {}
    return [
        (value_text(value), value.untyped_storage().nbytes(), number.setdefault(storage_key(value), len(number)))
        for value in values
    ]


@pytest.mark.parametrize("name", rungs(FAMILIES, ("gpt2-small",), ("mixtral-8x7b",)))
def test_operators_of_equal_layers_are_asked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(MODELS[name], config=replace(MODELS[name].config, num_layers=3))  # type: ignore[call-arg]
    with torch.device("meta"):
        model = spec.build()
        args, kwargs = spec.example(1, None if spec.seq_len is None else 32)
    graph = captured(model, *args, **kwargs)
    asked: list[fx.Node] = []

    def noted(node: fx.Node, *others: Any) -> Any:
        if isinstance(node.target, torch._ops.OpOverload):
            asked.append(node)
        return run(node, *others)

    run = retarget_cuda._run
    monkeypatch.setattr(retarget_cuda, "_run", noted)
    repeated, num_asked = forms(moved(graph)), len(asked)
    monkeypatch.setattr(retarget_cuda._Results, "of", lambda results, *given: noted(*given))
    assert repeated == forms(moved(graph))
    assert num_asked < (len(asked) - num_asked) / 2
