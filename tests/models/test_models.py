"""Each family in small: one graph, gradients everywhere, and what its architecture promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounter

import chunkc
from chunkc.models import MODELS
from chunkc.models.common import ModelConfig, merge_heads, rotary_angles, rotate, split_heads
from chunkc.models.mixtral import Experts, MixtralConfig
from chunkc.torch_private.dynamo import TRACES_REGIONS_ONCE

SMALL = {"num_layers": 2, "width": 32, "num_heads": 4}
WORDS = {"vocabulary": 50}
CHANGES = {
    "gpt2-small": SMALL | WORDS | {"max_length": 16},
    "bert-base": SMALL | WORDS | {"max_length": 16},
    "vit-base-32": SMALL | {"image": 16, "patch": 8, "num_classes": 10},
    "palm-8b": SMALL | WORDS,
    "llama3-1b": SMALL | WORDS | {"num_kv_heads": 2, "inner_width": 48},
    "llama3-8b": SMALL | WORDS | {"num_kv_heads": 2, "inner_width": 48},
    "mixtral-8x7b": SMALL | WORDS | {"num_kv_heads": 2, "inner_width": 48, "num_experts": 4},
}
TEXT = [name for name in CHANGES if MODELS[name].seq_len is not None]


def small(name: str, **changes: object) -> ModelConfig:
    """The named model's code with small sizes."""
    return replace(MODELS[name].config, **(CHANGES[name] | changes))


def made(config: ModelConfig, batch_size: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    model = config.module()
    return model, config.example(batch_size, 8 if "vocabulary" in config.__dict__ else None)


def loud(name: str) -> nn.Module:
    """The small model in fp32 with large weights, so that every token tells on every other that sees it."""
    torch.manual_seed(0)
    model = small(name, dtype=torch.float32).module()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.quick(9, second=0)
@pytest.mark.parametrize(
    ("checkpointed", "dtype"),
    [(False, torch.float32), (True, torch.bfloat16)],
    ids=["kept-float32", "checkpointed-bfloat16"],
)
@pytest.mark.parametrize("name", CHANGES)
def test_one_graph_and_finite_gradients(name: str, checkpointed: bool, dtype: torch.dtype) -> None:
    if small(name).only_dtype not in (None, dtype):
        pytest.skip("cannot be traced in this dtype")
    torch._dynamo.reset()
    model, batch = made(small(name, dtype=dtype, activation_checkpointing=checkpointed))
    counter = CompileCounter()
    loss = torch.compile(model, backend=counter, fullgraph=True)(*batch)
    loss.backward()
    assert counter.frame_count == 1
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    for parameter, grad in gradients(model).items():
        assert grad is not None, parameter
        assert grad.dtype == dtype
        assert grad.isfinite().all(), parameter
        assert grad.abs().max() > 0 or name == "mixtral-8x7b", parameter


@pytest.mark.parametrize("name", CHANGES)
def test_checkpointing_changes_no_number(name: str) -> None:
    config = small(name, dtype=torch.float32)
    losses, grads = [], []
    for checkpointed in (False, True):
        model, batch = made(replace(config, activation_checkpointing=checkpointed))
        loss = model(*batch)
        loss.backward()
        losses.append(loss)
        grads.append(gradients(model))
    assert torch.equal(*losses)
    assert all(torch.equal(grads[0][key], grads[1][key]) for key in grads[0])


@pytest.mark.parametrize("name", CHANGES)
def test_checkpointing_keeps_less(name: str) -> None:
    def kept_nbytes(checkpointed: bool) -> int:
        model, batch = made(small(name, num_layers=6, activation_checkpointing=checkpointed), batch_size=4)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
            return tensor

        alive: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(*batch)
        return sum(kept.values())

    assert kept_nbytes(True) < 0.5 * kept_nbytes(False)


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_learns(name: str) -> None:
    model, batch = made(small(name, dtype=torch.float32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", TEXT)
def test_only_bert_looks_ahead(name: str) -> None:
    """The loss at the first position must not depend on later tokens, except in BERT."""
    model, (ids, labels) = loud(name), small(name).example(2, 8)
    later = ids.clone()
    later[:, 1:] = (later[:, 1:] + 1) % 50
    first_only = labels.clone()
    first_only[:, 1:] = -100
    before, after = model(ids, first_only), model(later, first_only)
    assert torch.allclose(before, after, atol=1e-6) == (name != "bert-base")


@pytest.mark.parametrize("name", TEXT)
def test_order_matters(name: str) -> None:
    """Without positions, the last token's loss would not notice that earlier tokens changed places."""
    model = loud(name)
    ids, labels = small(name).example(1, 8)
    labels[:, :-1] = -100
    swapped = ids[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert not torch.allclose(model(ids, labels), model(swapped, labels), rtol=1e-4)


def test_heads_are_split_and_merged() -> None:
    x = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    heads = split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 2)
    assert torch.equal(heads[1, 2, 0], x[1, 0, 4:6])
    assert torch.equal(merge_heads(heads), x)


def test_rotary_products_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    cosines, sines = rotary_angles(10, 8, 100.0, torch.empty(0))
    q, k = (torch.randn(8).expand(1, 1, 10, 8) for _ in range(2))
    scores = (rotate(q, cosines, sines) @ rotate(k, cosines, sines).transpose(-1, -2))[0, 0]
    assert torch.allclose(scores[3, 1], scores[8, 6], atol=1e-5)
    assert not torch.allclose(scores[3, 1], scores[3, 2], atol=1e-3)
    assert torch.allclose(rotate(q, cosines, sines).norm(dim=-1), q.norm(dim=-1), atol=1e-5)


def mixture_by_loop(experts: Experts, x: Tensor) -> Tensor:
    """Top-2 routing as one would write it down: token by token, expert by expert."""
    outputs = []
    for token in x.flatten(0, 1):
        shares, chosen = experts.router(token).float().softmax(-1).topk(experts.num_chosen)
        total = torch.zeros_like(token)
        for share, e in zip(shares / shares.sum(), chosen.tolist()):
            inner = nn.functional.silu(token @ experts.gate[e]) * (token @ experts.up[e])
            total = total + share * (inner @ experts.down[e])
        outputs.append(total)
    return torch.stack(outputs).view(x.shape)


@pytest.mark.parametrize("favourite", [None, 1], ids=["spread", "all to one"])
def test_the_mixture_is_top_2_routing(favourite: int | None) -> None:
    config = small("mixtral-8x7b", dtype=torch.float32)
    assert isinstance(config, MixtralConfig)
    torch.manual_seed(0)
    experts = Experts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    x = torch.randn(2, 5, 32)
    if favourite is not None:  # leaves experts without a single row
        with torch.no_grad():
            x[..., 0] = 50.0
            experts.router.weight[:, 0] = torch.tensor([0.0, 2.0, -2.0, -3.0])
    x.requires_grad_()
    weight = torch.randn(2, 5, 32)
    found, wanted = experts(x), mixture_by_loop(experts, x)
    assert torch.allclose(found, wanted, atol=1e-4)
    leaves = (x, *experts.parameters())
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((wanted * weight).sum(), leaves, allow_unused=True, materialize_grads=True),
    ):
        assert torch.allclose(a, b, atol=1e-3)


def test_rows_of_the_mixture_are_tokens_times_choices() -> None:
    """Memory stays that of top-2: no product has rows for all experts."""
    shapes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if "grouped_mm" in func.__name__:
                shapes.append(tuple(out.shape))
            return out

    config = small("mixtral-8x7b", dtype=torch.float32)
    with Watch():
        config.network()(torch.randn(2, 5, 32))  # type: ignore[attr-defined]
    assert shapes == [(20, 48), (20, 48), (20, 32)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(not TRACES_REGIONS_ONCE, reason="this Dynamo traces every call of a region")
@pytest.mark.parametrize("name", CHANGES)
def test_blocks_that_are_regions_are_traced_once(name: str) -> None:
    model, batch = made(small(name, blocks_are_regions=True, num_layers=4))
    seen: list[tuple[int, int]] = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
        seen.append((len(calls), len({call.args[0].target for call in calls})))
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*batch)
    assert seen == [(4, 1)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "name",  # a block of each kind: Llama's 8b is its 1b with other sizes, and BERT's and ViT's are of the same layer
    [
        *(pytest.param(name, marks=pytest.mark.second_tier) for name in ("gpt2-small", "mixtral-8x7b")),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("bert-base", "llama3-1b", "vit-base-32", "palm-8b", "llama3-8b")
        ),
    ],
)
def test_blocks_that_are_regions_are_explained_alike(name: str) -> None:
    found = []
    for are_regions in (False, True):
        model, batch = made(small(name, blocks_are_regions=are_regions, num_layers=7))
        found.append(chunkc.explain(model, *batch, hardware="rtx3090", memory_budget="1GiB"))
    assert found[0] == found[1]
