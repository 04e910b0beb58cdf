"""Formats of Adam's states: the same bits wherever the update happens, fewer bytes, states that resume and convert."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from harness import HUGE, TINY, assert_same_training, compile_case, differences, home_of, refuse, session_of
from harness import train as train_limited
from optim_models import MLP, results
from torch import nn
from zoo import Case, floats

import chunkc
from chunkc.kernels import reference
from chunkc.kernels.formats import AdamSlots, Span, num_quant_blocks, rounding_key
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.passes.planning import updates as update_planning

WIDTH, STEPS = 150, 3
"""22,500 elements a weight: no multiple of a block of 8-bit moments, nor of a row of sums."""

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32, bf16 moments": (FP32, {"moments_dtype": BF16}),
    "fp32, bf16 moments, stochastic": (FP32, {"moments_dtype": BF16, "stochastic_rounding": True}),
    "fp32, 8-bit moments": (FP32, {"moments_dtype": "int8"}),
    "bf16, master, bf16 moments": (BF16, {"moments_dtype": BF16, "master_weights": "float32"}),
    "bf16 only": (BF16, {"moments_dtype": BF16, "stochastic_rounding": True}),
    "bf16 only, fp32 moments": (BF16, {"master_weights": False, "stochastic_rounding": True}),
    "bf16 only, 8-bit moments": (BF16, {"moments_dtype": "int8", "stochastic_rounding": True}),
    "fp16, master, 8-bit moments": (FP16, {"moments_dtype": "int8"}),
}
QUICK = ("fp32, 8-bit moments", "bf16 only")
SGD: dict[str, Any] = {"optimizer": chunkc.optim.SGD}
MOMENTUM = SGD | {"momentum": 0.9}
ALL = FORMATS | {
    "fp32": (FP32, {}),
    "fp64, amsgrad": (FP64, {"amsgrad": True}),
    "split": (BF16, {}),
    "lion": (FP32, {"optimizer": chunkc.optim.Lion, "moments_dtype": BF16}),
    "lamb": (FP32, {"optimizer": chunkc.optim.LAMB}),
    "lamb, bf16": (BF16, {"optimizer": chunkc.optim.LAMB}),
    "sgd": (FP32, SGD),
    "sgd, momentum": (FP32, MOMENTUM),
    "sgd, bf16 buffer": (FP32, MOMENTUM | {"moments_dtype": BF16}),
    "sgd, 8-bit buffer": (FP32, MOMENTUM | {"moments_dtype": "int8"}),
    "sgd, split": (BF16, MOMENTUM),
    "sgd, split, no momentum": (BF16, SGD),
    "sgd, whole masters": (BF16, MOMENTUM | {"master_weights": "float32"}),
    "sgd, bf16 only": (BF16, MOMENTUM | {"moments_dtype": BF16, "stochastic_rounding": True}),
    "sgd, bf16 only, no momentum": (BF16, SGD | {"stochastic_rounding": True}),
}
OF_SECOND_TIER = (*QUICK, "fp64, amsgrad", "split", "lion", "lamb", "sgd, split", "sgd, whole masters")


def case(dtype: torch.dtype) -> Case:
    return Case("formats", lambda: MLP(3, WIDTH).to(dtype), lambda seed: {"x": floats(seed, (4, WIDTH)).to(dtype)})


def options(dtype: torch.dtype) -> dict[str, Any]:
    """Two weights, with a gap between them, in a chunk."""
    return {"whole_graph": "never", "chunk_size": 2 * (WIDTH * WIDTH + 256) * dtype.itemsize}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [layer.bias for layer in model.layers]  # type: ignore[union-attr]
    weights = [layer.weight for layer in model.layers]  # type: ignore[union-attr]
    return [{"params": biases, "weight_decay": 0.0}, {"params": weights[:2]}, {"params": weights[2:], "lr": 3e-3}]


def made(model: nn.Module, **arguments: Any) -> Any:
    """An optimizer of the model, AdamW where `arguments` name no other."""
    kind = arguments.pop("optimizer", chunkc.optim.AdamW)
    biases, first, last = groups(model)
    if kind is chunkc.optim.LAMB:
        last |= {"weight_decay": 0.0, "always_adapt": True}
    return kind([biases, first, last], lr=1e-2, weight_decay=0.1, **arguments)


@functools.cache
def minimum_with(name: str, home: str = "cpu") -> int:
    """The smallest budget where the optimizer exists when the model is first called."""
    dtype, chosen = ALL[name]
    model, compiled = compile_case(case(dtype), memory_budget=TINY, home=home, place=False, **options(dtype))
    optimizer = made(model, **chosen)
    with pytest.raises(chunkc.BudgetError) as caught:
        compiled(**case(dtype).batch(0))
    assert optimizer.state_dict()["state"] == {}
    return caught.value.minimum_nbytes


@functools.cache
def minimum(dtype: torch.dtype, home: str = "cpu") -> int:
    return refuse(case(dtype), memory_budget=TINY, home=home, **options(dtype)).minimum_nbytes


def build(tight: bool, name: str, home: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """Not placed: parameters move when the model is first called, after the optimizer was made.

    Slots are full of NaN, so that what lies between tensors shows where it is taken for theirs.
    """
    dtype = ALL[name][0]
    nbytes = minimum_with(name, home) if tight else HUGE
    return compile_case(case(dtype), memory_budget=nbytes, home=home, place=False, debug=tight, **options(dtype))


def train(
    model: nn.Module, compiled: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: range
) -> None:
    for step in steps:
        compiled(**case(dtype).batch(step)).backward()
        if step == 1:  # steps of neighbours differ from now on, and with them their random bits
            model.layers[1].weight.grad = None
            model.layers[0].weight.grad = model.layers[0].weight.grad * 2
        optimizer.step()
        optimizer.zero_grad()


def run(name: str, tight: bool, home: str = "cpu", **kwargs: Any) -> list[Any]:
    dtype, chosen = ALL[name]
    model, compiled = build(tight, name, home)
    optimizer = made(model, **chosen, **kwargs)
    train(model, compiled, optimizer, dtype, range(STEPS))
    session, weight = home_of(model.get_parameter("layers.0.weight"))
    assert session.store.views.is_managed(weight) == tight
    compiled(**case(dtype).batch(STEPS)).backward()
    traffic = session.store.slots.traffic
    before = traffic.to_device_nbytes, traffic.to_home_nbytes
    optimizer.step()
    moved = (traffic.to_device_nbytes, traffic.to_home_nbytes) != before
    assert moved == (tight and kwargs.get("update_on") != "cpu")
    return results(model, optimizer)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OF_SECOND_TIER else pytest.mark.slow) for n in ALL])
def test_the_same_bits_wherever_the_update_happens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(name, False)
    assert not differences(run(name, True), expected)
    assert not differences(run(name, True, update_on="cpu"), expected)
    assert not differences(run(name, True, home="disk"), expected)
    for bound in ("MIN_TILE_NUMEL", "MAX_TILE_NUMEL"):
        monkeypatch.setattr(update_planning, bound, 1 << 14)  # tensors span tiles, which cut no row of sums
    assert not differences(run(name, True, update_on="auto"), expected)


def test_the_seed_of_rounding_matters() -> None:
    assert differences(run("bf16 only", True, rounding_seed=1), run("bf16 only", True))


@pytest.mark.parametrize("name", [*FORMATS, "split"])
def test_it_computes_what_the_reference_does(name: str) -> None:
    """One parameter, not compiled: three steps against the plain PyTorch kernel."""
    dtype, chosen = ALL[name]
    parameter = nn.Parameter(torch.randn(1000).to(dtype))
    optimizer = chunkc.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, rounding_seed=7, **chosen)
    fmt = optimizer.rule.format(dtype, dtype, optimizer.states.dtypes(dtype))
    blocks = [torch.zeros(num_quant_blocks(1000)) if fmt.quantised else None for _ in range(2)]
    moments = [torch.zeros(1000, dtype=fmt.moment_dtype) for _ in range(2)]
    master = parameter.detach().float() if fmt.master else None
    if fmt.split:  # the parameter is its own master at first
        master = torch.zeros(1000, dtype=torch.int16)
    slots = AdamSlots(parameter.detach().clone(), torch.zeros(1000, dtype=dtype), *moments, master, *blocks)
    for step in range(1, 4):
        slots.grad.copy_(torch.randn(1000))
        parameter.grad = slots.grad.clone()
        optimizer.step()
        table = scalar_table([AdamHyper(lr=1e-2, weight_decay=0.1, step=step)])
        key = rounding_key(7, step, -1) if fmt.stochastic else None
        reference.chunk_update(fmt, slots, [Span(0, 1000, 0)], table, key=key)
    assert torch.equal(parameter, slots.param)
    state = optimizer.state[parameter]
    for kind in ("exp_avg", "exp_avg_sq", "master", "exp_avg_scale", "exp_avg_sq_scale"):
        expected = getattr(slots, kind)
        kind = "master_low" if kind == "master" and fmt.split else kind
        assert (kind in state) == (expected is not None)
        assert expected is None or torch.equal(state[kind], expected)


# ---------------------------------------------------------------- bytes


def home_nbytes(name: str | None, dtype: torch.dtype, *, placed: bool = False) -> tuple[int, int]:
    """(bytes at home after a step, elements there)."""
    torch._dynamo.reset()
    model = case(dtype).build()
    if placed:
        chunkc.place(model, chunk_size=options(dtype)["chunk_size"])
    chosen = ALL[name][1] if name else {}
    budget = minimum(dtype) if placed or name is None else minimum_with(name)
    compiled = torch.compile(
        model, backend="chunkc", options={"memory_budget": budget, "codegen": "eager", **options(dtype)}
    )
    optimizer = made(model, **chosen)
    train(model, compiled, optimizer, dtype, range(1))
    session = session_of(model)
    assert not session.store.resident
    return chunkc.report(compiled).home_nbytes, sum(group.numel for group in session.store.layout.groups)


@pytest.mark.quick(2, second=6)
@pytest.mark.parametrize(
    ("name", "dtype", "per_element"),
    [
        (None, FP32, 16),
        ("fp32, bf16 moments", FP32, 8 + 4),
        ("fp32, 8-bit moments", FP32, 8 + 2 + 8 / 256),
        (None, FP16, 4 + 12),
        ("bf16 only, 8-bit moments", BF16, 4 + 2 + 8 / 256),
        ("bf16, master, bf16 moments", BF16, 4 + 8),
        ("split", BF16, 4 + 10),
        ("lion", FP32, 8 + 2),
        ("sgd", FP32, 8),
        ("sgd, 8-bit buffer", FP32, 8 + 1 + 4 / 256),
        ("sgd, split, no momentum", BF16, 4 + 2),
    ],
)
def test_home_has_room_for_what_is_kept(name: str | None, dtype: torch.dtype, per_element: float) -> None:
    for placed in (False, True) if name == "fp32, bf16 moments" else (False,):
        nbytes, numel = home_nbytes(name, dtype, placed=placed)
        assert nbytes == pytest.approx(per_element * numel, abs=2 * 4 * 2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [*QUICK, "bf16 only, 8-bit moments"])
def test_inside_the_hard_limit(name: str) -> None:
    dtype, chosen = FORMATS[name]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return chunkc.optim.AdamW(parameters, lr=1e-2, **chosen)

    unlimited = train_limited(
        case(dtype), memory_budget=HUGE, limit=False, optimizer=make, place=False, **options(dtype)
    )
    nbytes = minimum_with(name)
    limited = train_limited(case(dtype), memory_budget=nbytes, optimizer=make, place=False, **options(dtype))
    assert_same_training(limited, unlimited)
    assert limited.measured_peak_nbytes <= nbytes < minimum(dtype)


# ---------------------------------------------------------------- layouts that were made before


def test_blocks_need_a_layout_that_knows_of_them() -> None:
    width = 72  # two weights fill their chunk, and leave no room for whole blocks
    model = chunkc.place(MLP(3, width), chunk_size=2 * 4 * (width * width + 64))
    with pytest.raises(chunkc.OptionsError, match=r"make the optimizers before chunkc\.place"):
        made(model, moments_dtype="int8")


def test_one_chunk_has_one_format() -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *others = (layer.weight for layer in model.layers)  # type: ignore[union-attr]
        return [chunkc.optim.AdamW([first]), chunkc.optim.AdamW(others, moments_dtype=BF16)]

    model = chunkc.place(case(FP32).build(), chunk_size=options(FP32)["chunk_size"])
    with pytest.raises(chunkc.OptionsError, match="share a chunk"):
        make(model)
    early = case(FP32).build()
    optimizers = make(early)
    chunkc.place(early, chunk_size=options(FP32)["chunk_size"])
    layout = session_of(early).store.layout
    assert sorted(str(group.states) for group in layout.groups) == ["bfloat16 moments", "float32 moments"]
    assert optimizers


@pytest.mark.parametrize("managed", [False, True])
def test_any_format_loads_any_other(managed: bool) -> None:
    model, compiled = build(managed, "fp32")
    optimizer = made(model)
    train(model, compiled, optimizer, FP32, range(2))
    wide = copy.deepcopy(optimizer.state_dict())
    for chosen, rtol in (({"moments_dtype": BF16}, 2**-8), ({"moments_dtype": "int8"}, 0.6)):
        narrow = made(case(FP32).build(), **chosen)
        narrow.load_state_dict(wide)
        back = made(case(FP32).build())
        back.load_state_dict(narrow.state_dict())
        for index, state in wide["state"].items():
            found = back.state_dict()["state"][index]
            assert found["step"] == state["step"]
            largest = state["exp_avg"].abs().max()
            torch.testing.assert_close(found["exp_avg"], state["exp_avg"], rtol=rtol, atol=0.01 * float(largest))
            assert not torch.equal(found["exp_avg"], state["exp_avg"])
