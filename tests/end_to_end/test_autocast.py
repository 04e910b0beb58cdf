"""Autocast with dropout: regions wherever users put them, sizes that change, every budget the same bits.
Parameters of which only the cast is used travel and lie in slots in 16 bits: half of it, same bits.

On a CPU, what bf16 matrix products take inside is a bound, so that peaks are below what is predicted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    HUGE,
    TINY,
    array,
    assert_same_training,
    compile_case,
    differences,
    in_a_small_budget,
    kept,
    limited,
    refuse,
    train,
    weights,
)
from plain_modules import FeedForward
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from zoo import Case, floats

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, VOCAB = 32, 64
LOW = torch.bfloat16


class Block(nn.Module):
    """Attention and a feed-forward network, with dropout wherever GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.projection, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.feed = FeedForward(WIDTH, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.attention(self.norm(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True, dropout_p=dropout)
        return self.feed(x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(x.shape))))


class GPT(nn.Module):
    """Tied embedding and head. `recomputed`: `use_reentrant` of the checkpoint around each block; None for none."""

    def __init__(self, recomputed: bool | None = None) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.recomputed is None else checkpoint(block, x, use_reentrant=self.recomputed)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


class Decorated(GPT):
    """The region is the user's method."""

    @torch.autocast("cpu", LOW)
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Nested(GPT):
    """A block inside a region that is switched off, inside one that is on."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", LOW):
            x = self.blocks[0](self.embedding(tokens))
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[1](x.float())
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def tokens(batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def steps(
    model: nn.Module, call: Any, *, region: torch.dtype | None = LOW, evaluated: bool = False, scaled: bool = False
) -> list[Tensor]:
    """Losses, gradients, losses of evaluations of other sizes between the steps, and the weights after three steps."""
    kind = torch.optim.AdamW if call is model else chunkc.optim.AdamW
    optimizer, scaler = kind(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", enabled=scaled)
    torch.manual_seed(1)
    found: list[Tensor] = []
    for step in range(3):
        with torch.autocast("cpu", region, enabled=region is not None):
            loss = call(tokens(2, 8, step))
        scaler.scale(loss).backward()
        found += [kept(loss), *(kept(p.grad) for p in model.parameters() if p.grad is not None)]
        del loss
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if evaluated:
            model.eval()
            with torch.no_grad(), torch.autocast("cpu", region, enabled=region is not None):
                found.append(kept(call(tokens(3 + step, 12 + 4 * step, 9))))
            model.train()
    return [*found, *(kept(p) for p in model.parameters())]


def built(kind: type[nn.Module] = GPT, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**arguments).train()


def compiled(budget: int, codegen: str, kind: type[nn.Module] = GPT, **arguments: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    gc.collect()
    options = {"memory_budget": budget, "codegen": codegen, "whole_graph": "never", "chunk_size": 4096}
    options |= arguments.pop("options", {})
    model = chunkc.place(built(kind, **arguments), chunk_size=4096)
    return model, torch.compile(model, backend="chunkc", options=options)


def in_both_budgets(codegen: str, kind: type[nn.Module], how: dict[str, Any], **arguments: Any) -> list[Tensor]:
    """What is trained where everything fits, which a small budget must reproduce to the bit."""

    def trained(budget: int) -> list[Tensor]:
        made = compiled(budget, codegen, kind, **arguments)
        with limited(budget):
            return steps(*made, **how)

    found = trained(HUGE)
    assert_equal(in_a_small_budget(trained), found)
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def assert_close_losses(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if a.dim() == 0:
            torch.testing.assert_close(a, b, rtol=3e-3, atol=1e-4)


WAYS: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any]]] = {
    "decorated": (Decorated, {}, {"region": None}),
    "nested": (Nested, {}, {"region": None}),
    "float16, scaled": (GPT, {}, {"region": torch.float16, "scaled": True}),
    "recomputed, evaluated": (GPT, {"recomputed": True}, {"evaluated": True}),
}


TIERS = dict.fromkeys(WAYS, pytest.mark.second_tier) | {"decorated": (), "nested": pytest.mark.slow}


@pytest.mark.parametrize("way", [pytest.param(way, marks=marks) for way, marks in TIERS.items()])
def test_eager_segments_train_what_pytorch_does(way: str) -> None:
    """Eager segments draw as eager PyTorch does, so the losses are its, but for the order of sums."""
    kind, arguments, how = WAYS[way]
    free = in_both_budgets("eager", kind, how, **arguments)
    model = built(kind, **arguments)
    assert_close_losses(free, steps(model, model, **how))


def test_a_region_around_the_backward_changes_nothing() -> None:
    """The backward is a graph already: what autocast would cast in eager PyTorch stays as it was captured."""
    found = []
    for inside in (False, True):
        model, call = compiled(HUGE, "eager")
        torch.manual_seed(1)
        loss = call(tokens(2, 8, 0))
        with torch.autocast("cpu", LOW, enabled=inside):
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert_equal(*found)


# ---------------------------------------------------------------- parameters of which only the cast is used

BATCH, SIZE, NUM_LAYERS = 4, 64, 3
MATRIX_NBYTES = 4 * 2 * SIZE * SIZE
"""Of each layer's two matrices; each is a chunk."""


class Model(nn.Module):
    """`frozen`: layers from the first one on that are not trained. `raw`: the last matrix is used as it is, too."""

    def __init__(self, dtype: torch.dtype, frozen: int = 0, raw: bool = False) -> None:
        super().__init__()
        self.dtype, self.raw = dtype, raw
        self.layers = nn.ModuleList(FeedForward(SIZE, times=2) for _ in range(NUM_LAYERS))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            for layer in self.layers:
                x = layer(x)
            loss = x.float().square().mean()
        return loss + self.layers[-1].up.weight.square().mean() if self.raw else loss


def case(dtype: torch.dtype = torch.bfloat16, **how: Any) -> Case:
    return Case("casts", lambda: Model(dtype, **how), lambda seed: {"x": floats(seed, (BATCH, SIZE))})


def options(**others: Any) -> dict[str, Any]:
    return {"whole_graph": "never", "chunk_size": MATRIX_NBYTES} | others


def minimum(of: Case, **others: Any) -> int:
    return refuse(of, memory_budget=TINY, **options(**others)).minimum_nbytes


def adamw(parameters: Any) -> Optimizer:
    return chunkc.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


def as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no parameter is read as a cast."""
    monkeypatch.setenv("CHUNKC_DISABLE_PASS", "casts")


KINDS: dict[str, dict[str, Any]] = {"bf16": {}, "fp16": {"dtype": torch.float16}, "frozen": {"frozen": 2}}
"""On disks, by Inductor, with values and updates in every way: autocast models of `tests/properties/test_ladder.py`."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", KINDS)
def test_every_budget_trains_the_same_bits_inside_the_hard_limit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(**KINDS[way])
    smallest = minimum(of)
    free = train(of, memory_budget=HUGE, limit=False, optimizer=adamw, **options())
    for budget in (smallest, (smallest + free.predicted_peak_nbytes) // 2):  # the second: some of them stay
        found = train(of, memory_budget=budget, optimizer=adamw, **options())
        assert_same_training(found, free)
        assert found.measured_peak_nbytes <= found.predicted_peak_nbytes <= budget
    as_they_are(monkeypatch)
    assert_same_training(train(of, memory_budget=HUGE, limit=False, optimizer=adamw, **options()), free)


def moved(of: Case, budget: int) -> tuple[int, int]:
    """Bytes to the device in a forward and a backward, and home."""
    _, compiled = compile_case(of, memory_budget=budget, **options())
    compiled(**of.batch(0)).backward()
    traffic = chunkc.report(compiled).traffic_nbytes
    return traffic["to_device"], traffic["to_home"]


def test_half_as_much_travels_and_less_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = minimum(case())
    to_device, to_home = moved(case(), smallest)
    as_they_are(monkeypatch)
    smallest_before = minimum(case())
    to_device_before, to_home_before = moved(case(), smallest_before)
    assert (2 * to_device, to_home) == (to_device_before, to_home_before)
    assert smallest_before - smallest == MATRIX_NBYTES // 2


def test_a_chunk_of_which_one_parameter_is_used_as_it_is_travels_as_it_is() -> None:
    of = case(raw=True)
    _, compiled = compile_case(of, memory_budget=minimum(of), **options())
    compiled(**of.batch(0)).backward()
    text = chunkc.report(compiled).plan_text
    assert "param_bf16:0" in text
    first_of_last_layer = 2 * (NUM_LAYERS - 1)
    assert f"param:{first_of_last_layer}" in text
    assert f"param_bf16:{first_of_last_layer}" not in text
    assert f"param_bf16:{first_of_last_layer + 1}" in text


@pytest.mark.quick(1, second=2)
@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("share", [0, 0.5, 100], ids=["smallest", "some stay", "all stay"])
def test_what_the_user_writes_into_a_parameter_is_cast(home: str, share: float) -> None:
    """Whoever writes it, and however: no cast outlives the step."""
    of = case()
    smallest = minimum(of, home=home)
    peak = train(of, memory_budget=HUGE, limit=False, steps=1, **options()).predicted_peak_nbytes
    budget = HUGE if share > 1 else int(smallest + share * (peak - smallest))

    def trained(model: nn.Module, call: Callable[..., Tensor], optimizer: Optimizer) -> list[Any]:
        found = []
        for step in range(4):
            for micro in range(2):  # of an accumulation
                loss = call(**of.batch(2 * step + micro))
                loss.backward()
                found.append(array(loss))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                match step:
                    case 0:
                        for p in model.parameters():
                            p.data.mul_(0.9)
                    case 1:
                        for p in model.parameters():
                            p.add_(0.01)
                    case 2:
                        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
                found.append(array(call(**of.batch(9))))
        return [*found, weights(model)]

    model, compiled = compile_case(of, memory_budget=budget, home=home, **options())
    plain = of.build()
    ours = trained(model, compiled, adamw(model.parameters()))
    theirs = trained(plain, plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-3, atol=0)
    torch._dynamo.reset()
    model, compiled = compile_case(of, memory_budget=HUGE, **options())
    assert not differences(ours, trained(model, compiled, adamw(model.parameters())))
