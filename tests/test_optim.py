"""Adam and AdamW as `torch.optim.Optimizer`s: over plain parameters, and over parameters in chunks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkc
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER
from chunkc.kernels import reference
from chunkc.kernels.hyper import AdamHyper
from chunkc.passes import planning
from chunkc.session import owner

WIDTH, LAYERS = 128, 4
BUDGET_NBYTES = 400 * 1024
"""The model data below is 1 MiB: no weight can stay on the compute tier."""

TWO_PER_CHUNK = {"chunk_size": 2 * 4 * WIDTH * WIDTH, "memory_budget": 600 * 1024}
"""Options with which two fp32 weights share a chunk."""

MODES = ("plain", "placed", "adopted")
"""Ordinary PyTorch; placed, then compiled; compiled only, so that parameters move at the first call."""

OPTIMIZERS = {
    "AdamW": (chunkc.optim.AdamW, torch.optim.AdamW),
    "Adam": (chunkc.optim.Adam, torch.optim.Adam),
}

Optimizer = torch.optim.Optimizer


class MLP(nn.Module):
    """Weights large enough to live in chunks, and biases that are too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.float() - 1).square().mean()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(mode: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> tuple[MLP, Callable]:
    """The model, and what to call."""
    torch.manual_seed(seed)
    model = MLP().to(dtype)
    if mode == "plain":
        return model, model
    if mode == "placed":
        chunkc.place(model, chunk_size=options.get("chunk_size", "auto"))
    options = {"memory_budget": BUDGET_NBYTES, "codegen": "eager", "whole_graph": "never"} | options
    return model, torch.compile(model, backend="chunkc", options=options)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(call: Callable, step: int, dtype: torch.dtype = torch.float32) -> None:
    call(batch(step, dtype)).backward()


def train(call: Callable, optimizer: Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        backward(call, step, dtype)
        optimizer.step()
        optimizer.zero_grad()


def is_managed(parameter: Tensor) -> bool:
    session, name = owner(parameter) or (None, "")
    return session is not None and session.store.is_managed(name)


def assert_managed(model: MLP, mode: str) -> None:
    """The test tests what it says: weights are in chunks, or they are not."""
    assert all(is_managed(layer.weight) == (mode != "plain") for layer in model.layers)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def states(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": value.detach().clone()
        for name, p in model.named_parameters()
        for kind, value in optimizer.state[p].items()
    }


def twin_of(model: MLP) -> MLP:
    """The same weights in plain PyTorch."""
    twin = MLP().to(next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict())
    return twin


def copy_gradients(model: nn.Module, twin: nn.Module) -> None:
    for p, q in zip(model.parameters(), twin.parameters()):
        q.grad = None if p.grad is None else p.grad.detach().clone()


def assert_close(model: nn.Module, twin: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def follow_torch(
    mode: str,
    make: Callable[[MLP, bool], Optimizer],
    *,
    num_steps: int = 3,
    after: Callable[[Optimizer], Any] | None = None,
) -> None:
    """Train with chunkc's and torch's optimizer on the same gradients and compare. `make(model, is_torch)`."""
    model, call = build(mode)
    twin = twin_of(model)
    pairs = [(model, make(model, False)), (twin, make(twin, True))]
    ticks = [after(optimizer) if after else None for _, optimizer in pairs]
    before = snapshot(model)
    for step in range(num_steps):
        backward(call, step)
        copy_gradients(model, twin)
        for (_, optimizer), tick in zip(pairs, ticks):
            optimizer.step()
            optimizer.zero_grad()
            if tick is not None:
                tick.step()
        assert_close(model, twin)
    assert_managed(model, mode)
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())


# ---------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"maximize": True}])
def test_one_group_follows_torch(mode: str, name: str, settings: dict[str, Any]) -> None:
    def make(model: MLP, is_torch: bool) -> Optimizer:
        return OPTIMIZERS[name][is_torch](model.parameters(), lr=1e-2, **settings)

    follow_torch(mode, make)


def test_l2_and_decoupled_weight_decay_differ() -> None:
    left, call_left = build("placed")
    right, call_right = build("placed")
    train(call_left, chunkc.optim.Adam(left.parameters(), lr=1e-2, weight_decay=0.1), range(2))
    train(call_right, chunkc.optim.AdamW(right.parameters(), lr=1e-2, weight_decay=0.1), range(2))
    assert not torch.equal(left.layers[0].weight, right.layers[0].weight)


def test_the_defaults_are_those_of_torch() -> None:
    for ours, theirs in OPTIMIZERS.values():
        mine, other = ours(MLP().parameters()).defaults, theirs(MLP().parameters()).defaults
        assert all(other[key] == value for key, value in mine.items())


def several_groups(model: MLP) -> list[dict[str, Any]]:
    """Weights and biases of neighbours in chunks with different settings."""
    first, second, third, fourth = model.layers
    return [
        {"params": [first.weight, third.bias], "lr": 1e-2, "weight_decay": 0.0},
        {"params": [second.weight, second.bias], "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"params": [third.weight, first.bias], "lr": 3e-3, "eps": 1e-6},
        {"params": fourth.parameters(), "lr": 5e-3, "maximize": True},
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_groups_follow_torch(mode: str, name: str) -> None:
    follow_torch(mode, lambda model, is_torch: OPTIMIZERS[name][is_torch](several_groups(model), lr=1e-3))


@pytest.mark.parametrize("mode", ["plain", "placed"])
@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR", "OneCycleLR"])
def test_schedulers(mode: str, kind: str) -> None:
    schedulers = torch.optim.lr_scheduler
    after = {
        "StepLR": lambda optimizer: schedulers.StepLR(optimizer, step_size=2, gamma=0.1),
        "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=1e-2, total_steps=5),  # betas too
    }[kind]
    follow_torch(
        mode,
        lambda model, is_torch: OPTIMIZERS["AdamW"][is_torch](several_groups(model)[:3], lr=1e-2),
        num_steps=4,
        after=after,
    )


@pytest.mark.parametrize("mode", ["plain", "placed"])
def test_a_learning_rate_may_be_a_tensor(mode: str) -> None:
    left, call_left = build(mode)
    right, call_right = build(mode)
    train(call_left, chunkc.optim.AdamW(left.parameters(), lr=torch.tensor(1e-2)), range(2))
    train(call_right, chunkc.optim.AdamW(right.parameters(), lr=float(torch.tensor(1e-2))), range(2))
    assert_equal(snapshot(left), snapshot(right))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_parameters_have_fp32_masters(mode: str, name: str) -> None:
    model, call = build(mode, dtype=torch.bfloat16)
    settings = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}  # eps: where L2 cancels a gradient, rounding is all
    optimizer = OPTIMIZERS[name][0](model.parameters(), **settings)
    flat = {n: p.detach().clone().flatten() for n, p in model.named_parameters()}
    wide = {n: (torch.zeros(p.numel()), torch.zeros(p.numel()), p.float()) for n, p in flat.items()}
    for step in range(3):
        backward(call, step, torch.bfloat16)
        hyper = AdamHyper(**settings, step=step + 1, decoupled=name == "AdamW")
        for n, p in model.named_parameters():
            reference.adam_update(flat[n], p.grad.detach().clone().flatten(), *wide[n], hyper)
        optimizer.step()
        optimizer.zero_grad()
        for n, p in model.named_parameters():
            state = optimizer.state[p]
            assert p.dtype is torch.bfloat16
            assert torch.equal(state[MASTER].to(torch.bfloat16), p)
            for kind, expected in zip((EXP_AVG, EXP_AVG_SQ, MASTER), wide[n]):
                assert state[kind].dtype is torch.float32
                torch.testing.assert_close(state[kind].flatten(), expected, rtol=1e-5, atol=1e-6)
    assert_managed(model, mode)
    assert any(not torch.equal(optimizer.state[p][MASTER], p.float()) for p in model.parameters())


# ---------------------------------------------------------------- which parameters


@pytest.mark.parametrize("mode", MODES)
def test_without_gradient_nothing_happens(mode: str) -> None:
    model, call = build(mode, **TWO_PER_CHUNK)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    left_out = ("layers.1.weight", "layers.2.bias")
    train(call, optimizer, range(2))
    before, states_before = snapshot(model), states(model, optimizer)
    backward(call, 2)
    for name in left_out:
        model.get_parameter(name).grad = None
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in left_out), name
        for kind, value in optimizer.state[p].items():
            assert torch.equal(value, states_before[f"{name}.{kind}"]) == (name in left_out), (name, kind)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_never_had_a_gradient_has_no_state(mode: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
    before = snapshot(model)
    backward(call, 0)
    model.layers[0].weight.grad = None
    optimizer.step()
    assert not optimizer.state[model.layers[0].weight]
    assert torch.equal(model.layers[0].weight, before["layers.0.weight"])
    optimizer.zero_grad()
    train(call, optimizer, range(1, 2))
    counts = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    assert counts.pop("layers.0.weight") == 1
    assert set(counts.values()) == {2}


def test_a_step_without_any_gradient() -> None:
    for mode in MODES:
        model, _ = build(mode)
        before = snapshot(model)
        chunkc.optim.AdamW(model.parameters()).step()
        assert_equal(snapshot(model), before)


@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_share_a_model(mode: str) -> None:
    """Weights of one chunk belong to different optimizers; a third weight to none."""
    left, call_left = build(mode, **TWO_PER_CHUNK)
    right, call_right = build(mode, **TWO_PER_CHUNK)
    frozen = left.layers[3].weight.detach().clone()
    groups = several_groups(left)[:3]
    both = [chunkc.optim.AdamW(groups[:1]), chunkc.optim.AdamW(groups[1:])]
    one = chunkc.optim.AdamW(several_groups(right)[:3])
    for step in range(2):
        backward(call_left, step)
        backward(call_right, step)
        for optimizer in (*both, one):
            optimizer.step()
        left.zero_grad()
        right.zero_grad()
    assert_equal(snapshot(left), snapshot(right))
    assert torch.equal(left.layers[3].weight, frozen)


@pytest.mark.parametrize("mode", MODES)
def test_add_param_group(mode: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.layers[0].parameters(), lr=1e-2)
    train(call, optimizer, range(1))
    model.zero_grad()
    before = snapshot(model)
    optimizer.add_param_group({"params": model.layers[1].parameters(), "lr": 2e-2})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    train(call, optimizer, range(1, 2))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}
    assert int(optimizer.state[model.layers[0].weight]["step"]) == 2
    assert int(optimizer.state[model.layers[1].weight]["step"]) == 1


# ---------------------------------------------------------------- state_dict


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_state_dict_round_trip(mode: str, dtype: torch.dtype) -> None:
    model, call = build(mode, dtype=dtype)
    optimizer = chunkc.optim.AdamW(several_groups(model))
    train(call, optimizer, range(2), dtype)
    model_state, state = saved_and_loaded(model.state_dict()), saved_and_loaded(optimizer.state_dict())
    train(call, optimizer, range(2, 4), dtype)
    fresh, fresh_call = build(mode, dtype=dtype, seed=1)
    fresh.load_state_dict(model_state)
    fresh_optimizer = chunkc.optim.AdamW(several_groups(fresh), lr=7.0)
    fresh_optimizer.load_state_dict(state)
    assert [g["lr"] for g in fresh_optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]
    train(fresh_call, fresh_optimizer, range(2, 4), dtype)
    assert_equal(snapshot(fresh), snapshot(model))
    assert_equal(states(fresh, fresh_optimizer), states(model, optimizer))
    moments = {kind: v.dtype for s in fresh_optimizer.state.values() for kind, v in s.items()}
    assert set(moments.values()) == {torch.float32}
    assert (MASTER in moments) == (dtype is torch.bfloat16)


def test_a_state_goes_between_plain_and_placed_models() -> None:
    for source, target in (("plain", "placed"), ("placed", "plain"), ("adopted", "placed")):
        model, call = build(source, dtype=torch.bfloat16)
        optimizer = chunkc.optim.AdamW(model.parameters())
        train(call, optimizer, range(2), torch.bfloat16)
        other, other_call = build(target, dtype=torch.bfloat16, seed=1)
        other.load_state_dict(model.state_dict())
        other_optimizer = chunkc.optim.AdamW(other.parameters())
        other_optimizer.load_state_dict(optimizer.state_dict())
        assert_equal(states(other, other_optimizer), states(model, optimizer))
        backward(other_call, 2, torch.bfloat16)
        backward(call, 2, torch.bfloat16)
        copy_gradients(model, other)
        optimizer.step()
        other_optimizer.step()
        assert_equal(snapshot(other), snapshot(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loads_from_and_into_torch(mode: str, name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    twin = MLP()
    optimizer = theirs(twin.parameters(), **settings)
    train(twin, optimizer, range(2))
    model, call = build(mode, seed=1)
    model.load_state_dict(twin.state_dict())
    mine = ours(model.parameters())
    mine.load_state_dict(optimizer.state_dict())
    for step in range(2, 4):
        backward(call, step)
        copy_gradients(model, twin)
        mine.step()
        optimizer.step()
        mine.zero_grad()
        assert_close(model, twin)
    back = twin_of(model)
    returned = theirs(back.parameters(), lr=3.0)
    returned.load_state_dict(copy.deepcopy(mine.state_dict()))  # torch keeps the tensors it is given
    for step in range(4, 6):
        backward(call, step)
        copy_gradients(model, back)
        mine.step()
        returned.step()
        mine.zero_grad()
        assert_close(model, back)
    assert int(returned.state[back.layers[0].weight]["step"]) == 6


def test_a_loaded_state_is_a_copy() -> None:
    for mode in ("plain", "placed"):
        model, call = build(mode)
        optimizer = chunkc.optim.AdamW(model.parameters())
        train(call, optimizer, range(1))
        state = copy.deepcopy(optimizer.state_dict())
        kept = copy.deepcopy(state)
        optimizer.load_state_dict(state)
        train(call, optimizer, range(1, 3))
        for index, entry in kept["state"].items():
            assert_equal(entry, state["state"][index])


@pytest.mark.parametrize("mode", ["plain", "placed"])
def test_a_missing_master_is_made_from_the_parameter(mode: str) -> None:
    model, call = build(mode, dtype=torch.bfloat16)
    twin = twin_of(model)
    optimizer = torch.optim.AdamW(twin.parameters())
    train(twin, optimizer, range(1), torch.bfloat16)
    model.load_state_dict(twin.state_dict())
    mine = chunkc.optim.AdamW(model.parameters())
    mine.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        assert torch.equal(mine.state[p][MASTER], p.float())
    train(call, mine, range(1, 2), torch.bfloat16)
    assert all(torch.equal(mine.state[p][MASTER].bfloat16(), p) for p in model.parameters())


def test_what_does_not_fit_is_not_loaded() -> None:
    model, _ = build("placed")
    optimizer = chunkc.optim.AdamW(model.parameters())
    other = chunkc.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("mode", ["placed", "adopted"])
def test_a_state_is_a_home_view_with_its_own_storage(mode: str) -> None:
    model, call = build(mode, dtype=torch.bfloat16)
    optimizer = chunkc.optim.AdamW(model.parameters())
    train(call, optimizer, range(2), torch.bfloat16)
    for layer in model.layers:
        session, name = owner(layer.weight)
        for kind in (EXP_AVG, EXP_AVG_SQ, MASTER):
            value = optimizer.state[layer.weight][kind]
            assert value.data_ptr() == session.store.home_view(kind, name).data_ptr()
            assert value.untyped_storage().nbytes() == value.nbytes == 4 * layer.weight.numel()
            assert value.shape == layer.weight.shape
            assert value.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_numel", [(1024, 4096), (1000, 1000), (1 << 14, 1 << 14)])
def test_results_do_not_depend_on_tiles(
    monkeypatch: pytest.MonkeyPatch, tile_numel: tuple[int, int], dtype: torch.dtype
) -> None:
    """Neighbours in one chunk with different settings, one of them without gradient, cut anywhere."""
    chunk_nbytes = 2 * dtype.itemsize * WIDTH * WIDTH

    def run() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        model, call = build("placed", dtype=dtype, **(TWO_PER_CHUNK | {"chunk_size": chunk_nbytes}))
        optimizer = chunkc.optim.AdamW(several_groups(model))
        for step in range(2):
            backward(call, step, dtype)
            if step:
                model.layers[1].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert_managed(model, "placed")
        moments = [label for label, _, _ in chunkc.report(model).moments if label.startswith("update")]
        return snapshot(model), states(model, optimizer), len(moments)

    weights, moments, num_tiles = run()
    monkeypatch.setattr(planning, "MIN_TILE_NUMEL", tile_numel[0])
    monkeypatch.setattr(planning, "MAX_TILE_NUMEL", tile_numel[1])
    other_weights, other_moments, other_num_tiles = run()
    assert other_num_tiles > num_tiles
    assert_equal(other_weights, weights)
    assert_equal(other_moments, moments)


def test_the_optimizer_step_obeys_the_budget() -> None:
    model, call = build("placed")
    train(call, chunkc.optim.AdamW(model.parameters()), range(2))
    report = chunkc.report(model)
    updates = [nbytes for label, nbytes, _ in report.moments if label.startswith("update")]
    assert len(updates) == LAYERS
    assert max(updates) <= report.predicted_peak_nbytes <= BUDGET_NBYTES


# ---------------------------------------------------------------- what surrounds a step


@pytest.mark.parametrize("mode", MODES)
def test_closure(mode: str) -> None:
    left, call_left = build(mode)
    right, call_right = build(mode)
    closed, plain = (chunkc.optim.AdamW(m.parameters(), lr=1e-2) for m in (left, right))
    losses = []

    def closure() -> Tensor:
        closed.zero_grad()
        loss = call_left(batch(0))
        loss.backward()
        losses.append(loss)
        return loss

    with torch.no_grad():
        assert closed.step(closure) is losses[0]
    train(call_right, plain, range(1))
    assert_equal(snapshot(left), snapshot(right))
    assert plain.step() is None


@pytest.mark.parametrize("mode", MODES)
def test_zero_grad_both_ways(mode: str) -> None:
    left, call_left = build(mode)
    right, call_right = build(mode)
    zeroed, dropped = (chunkc.optim.AdamW(m.parameters(), lr=1e-2) for m in (left, right))
    for step in range(3):
        backward(call_left, step)
        backward(call_right, step)
        zeroed.step()
        dropped.step()
        zeroed.zero_grad(set_to_none=False)
        dropped.zero_grad(set_to_none=True)
        assert all(p.grad is not None and not p.grad.any() for p in left.parameters())
        assert all(p.grad is None for p in right.parameters())
    assert_equal(snapshot(left), snapshot(right))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_changed_in_place_count(mode: str) -> None:
    """Loss scaling by a power of two, with `torch.amp.GradScaler`, changes no bit; an infinity skips the step."""
    left, call_left = build(mode)
    right, call_right = build(mode)
    scaled, plain = (chunkc.optim.AdamW(m.parameters(), lr=1e-2) for m in (left, right))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(2):
        scaler.scale(call_left(batch(step))).backward()
        scaler.unscale_(scaled)
        nn.utils.clip_grad_norm_(left.parameters(), 1e-3)
        scaler.step(scaled)
        scaler.update()
        backward(call_right, step)
        nn.utils.clip_grad_norm_(right.parameters(), 1e-3)
        plain.step()
        left.zero_grad()
        right.zero_grad()
    assert_equal(snapshot(left), snapshot(right))
    before = snapshot(left)
    scaler.scale(call_left(batch(2))).backward()
    left.layers[0].weight.grad[0, 0] = float("inf")
    scaler.step(scaled)
    scaler.update()
    assert_equal(snapshot(left), before)
    assert scaler.get_scale() == 2.0**9


def test_step_hooks_run() -> None:
    model, call = build("placed")
    optimizer = chunkc.optim.AdamW(model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(call, optimizer, range(1))
    assert seen == ["before", "after"]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("optimizer", [chunkc.optim.AdamW, chunkc.optim.Adam])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
    ],
)
def test_values_that_make_no_sense(optimizer: type, settings: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(chunkc.OptionsError, match=next(iter(settings)).removesuffix("s") + "|eps"):
        optimizer([weight], **settings)
    with pytest.raises(chunkc.OptionsError):
        optimizer([{"params": [weight], **settings}])


@pytest.mark.parametrize("flag", ["amsgrad", "differentiable", "capturable"])
def test_flags_that_are_not_supported(flag: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(chunkc.OptionsError, match=flag):
        chunkc.optim.AdamW([{"params": [weight], flag: True}])
    with pytest.raises((chunkc.OptionsError, TypeError), match=flag):
        chunkc.optim.AdamW([weight], **{flag: True})
    chunkc.optim.AdamW([{"params": [weight], flag: False}])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_an_amsgrad_state_is_not_loaded(num_steps: int) -> None:
    twin = MLP()
    optimizer = torch.optim.AdamW(twin.parameters(), amsgrad=True)
    train(twin, optimizer, range(num_steps))
    with pytest.raises(chunkc.OptionsError):
        chunkc.optim.AdamW(MLP().parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_that_are_not_supported(dtype: torch.dtype) -> None:
    with pytest.raises(chunkc.UnsupportedError, match=str(dtype)):
        chunkc.optim.AdamW([nn.Parameter(torch.ones(3, dtype=dtype))])


def test_a_refused_group_is_not_added() -> None:
    optimizer = chunkc.optim.AdamW([nn.Parameter(torch.ones(3))])
    for group in (
        {"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]},
        {"params": [nn.Parameter(torch.ones(3))], "amsgrad": True},
        {"params": [nn.Parameter(torch.ones(3))], "lr": -1.0},
    ):
        with pytest.raises(chunkc.ChunkcError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    first, table = nn.Linear(4, 4), nn.Embedding(8, 4, sparse=True)
    optimizer = chunkc.optim.AdamW([*first.parameters(), *table.parameters()])
    before = {**snapshot(first), "table": table.weight.detach().clone()}
    first(table(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(chunkc.UnsupportedError, match="sparse"):
        optimizer.step()
    assert_equal({**snapshot(first), "table": table.weight.detach().clone()}, before)


@pytest.mark.parametrize("mode", MODES)
def test_a_value_spoilt_later_is_refused_before_anything_changes(mode: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(several_groups(model))
    train(call, optimizer, range(1))
    before, states_before = snapshot(model), states(model, optimizer)
    backward(call, 1)
    optimizer.param_groups[2]["lr"] = -1.0
    with pytest.raises(chunkc.OptionsError, match="lr"):
        optimizer.step()
    assert_equal(snapshot(model), before)
    assert_equal(states(model, optimizer), states_before)
