"""Under autocast, parameters of which only the cast is used travel and lie in slots in 16 bits: half of it, same bits.

On a CPU, what bf16 matrix products take inside is a bound, so that peaks are below what is predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import HUGE, TINY, array, assert_same_training, compile_case, differences, refuse, train, weights
from plain_modules import FeedForward
from torch import Tensor, nn
from torch.optim import Optimizer
from zoo import Case, floats

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, WIDTH, NUM_LAYERS = 4, 64, 3
MATRIX_NBYTES = 4 * 2 * WIDTH * WIDTH
"""Of each layer's two matrices; each is a chunk."""


class Model(nn.Module):
    """`frozen`: layers from the first one on that are not trained. `raw`: the last matrix is used as it is, too."""

    def __init__(self, dtype: torch.dtype, frozen: int = 0, raw: bool = False) -> None:
        super().__init__()
        self.dtype, self.raw = dtype, raw
        self.layers = nn.ModuleList(FeedForward(WIDTH, times=2) for _ in range(NUM_LAYERS))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            for layer in self.layers:
                x = layer(x)
            loss = x.float().square().mean()
        return loss + self.layers[-1].up.weight.square().mean() if self.raw else loss


def case(dtype: torch.dtype = torch.bfloat16, **how: Any) -> Case:
    return Case("casts", lambda: Model(dtype, **how), lambda seed: {"x": floats(seed, (BATCH, WIDTH))})


def options(**others: Any) -> dict[str, Any]:
    return {"whole_graph": "never", "chunk_size": MATRIX_NBYTES} | others


def minimum(of: Case, **others: Any) -> int:
    return refuse(of, memory_budget=TINY, **options(**others)).minimum_nbytes


def adamw(parameters: Any) -> Optimizer:
    return chunkc.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


def as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no parameter is read as a cast."""
    monkeypatch.setenv("CHUNKC_DISABLE_PASS", "casts")


WAYS: dict[str, dict[str, Any]] = {"bf16": {}, "fp16": {"dtype": torch.float16}, "frozen": {"frozen": 2}}
"""On disks, by Inductor, with values and updates in every way: autocast models of `tests/properties/test_ladder.py`."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
def test_every_budget_trains_the_same_bits_inside_the_hard_limit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(**WAYS[way])
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
