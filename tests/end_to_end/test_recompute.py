"""Values that forwards save are dropped, and made again by the backward: the same bits, in less memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import (
    HUGE,
    TINY,
    assert_same_training,
    everything_fits,
    minimum_nbytes,
    refuse,
    train,
)
from saved_cases import compiled_gpt, least_nbytes, repeated
from torch import nn
from zoo import LADDER, Case, floats

import chunkc
from chunkc.policy.captured_step import Captured
from chunkc.torch_private import onednn

SECOND = pytest.mark.second_tier


class Norms(nn.Module):
    """Convolutions whose batch norms update their statistics: most of its memory is what they save."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            for i in range(6)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3))).square().mean()


@SECOND
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_batch_norms_are_repeated_with_the_statistics_that_they_read(codegen: str) -> None:
    """Their buffers have other contents by then; what the repeated ones make of these is nobody's."""
    case = Case("norms", Norms, lambda seed: {"images": floats(seed, (4, 3, 16, 16))})
    how: dict[str, Any] = {"codegen": codegen, "whole_graph": "never"}
    kept = refuse(case, memory_budget=TINY, **how).minimum_nbytes
    nbytes = refuse(case, memory_budget=TINY, activations="rerun", **how).minimum_nbytes
    is_known = onednn.uses_avx512()  # else the scratch of convolutions is bounded
    assert nbytes < (0.7 if is_known else 0.82) * kept
    result = train(case, memory_budget=nbytes, activations="rerun", debug=True, **how)
    assert_same_training(result, train(case, memory_budget=HUGE, limit=False, **how))
    assert any(name.endswith("running_var") for name in result.weights)
    assert result.measured_peak_nbytes <= result.predicted_peak_nbytes <= nbytes


@SECOND
def test_an_abandoned_forward_gives_everything_back() -> None:
    from chunkc.runtime.device import cpu_allocator

    cpu_allocator.install()
    _, compiled = compiled_gpt("rerun")
    compiled(**LADDER["short_gpt"].batch(0)).backward()
    batch = LADDER["short_gpt"].batch(0)
    gc.collect()
    gc.disable()
    try:
        left = set()
        for _ in range(3):
            loss = compiled(**batch)
            held = cpu_allocator.current_nbytes()
            del loss
            left.add(cpu_allocator.current_nbytes())  # chunks in slots, for a backward that does not come
            assert max(left) < held
        assert len(left) == 1
    finally:
        gc.enable()
    loss = compiled(**batch)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


class Biased(nn.Module):
    """Its backward needs neither the bias nor what goes in, but to run the first half again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.zeros(64))
        self.first, self.second = nn.Linear(64, 256, bias=False).requires_grad_(False), nn.Linear(256, 64)
        self.gain = nn.Parameter(torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(x + self.bias)) * self.gain)


def _biased() -> tuple[Biased, Callable[[torch.Tensor], torch.Tensor]]:
    torch._dynamo.reset()
    options = {"memory_budget": 1 << 24, "codegen": "eager", "chunk_size": 65536, "activations": "rerun"}
    model = Biased()
    return model, torch.compile(model, backend="chunkc", options=options)


@SECOND
@pytest.mark.parametrize("what", ["input", "bias"])
def test_what_was_changed_in_place_is_refused_where_it_is_read_again(what: str) -> None:
    model, compiled = _biased()
    x = torch.randn(32, 64)
    compiled(x).sum().backward()
    assert repeated(compiled)
    out = compiled(x).sum()
    with torch.no_grad():
        (x if what == "input" else model.bias).add_(1.0)
    with pytest.raises(chunkc.UnsupportedError, match="was changed in place between its forward and its backward"):
        out.backward()
    compiled(x).sum().backward()


@SECOND
def test_a_retained_graph_of_an_output_that_is_kept_leaks_nothing() -> None:
    """What the backward reads again may be the user's output, whose graph keeps what the backward reads."""
    torch._dynamo.reset()

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.a(x)
            return hidden, self.b(torch.sin(hidden).relu()).square()

    options = {"memory_budget": 1 << 24, "codegen": "eager", "chunk_size": 65536, "activations": "rerun"}
    compiled = torch.compile(Returning(), backend="chunkc", options=options)
    x = torch.randn(32, 64)
    for out in compiled(x):
        out.sum().backward(retain_graph=True)
    del out
    gc.collect()
    gc.disable()
    try:
        from weakref import ref

        hidden, out = compiled(x)
        gone = ref(hidden.untyped_storage())
        (hidden.sum() + out.sum()).backward()
        del hidden, out
        assert gone() is None
    finally:
        gc.enable()


def explained(activations: str, budget_nbytes: int, name: str = "byte_gpt") -> chunkc.Explanation:
    case = LADDER[name]
    settings = {"memory_budget": budget_nbytes, "activations": activations, "whole_graph": "never"}
    return chunkc.explain(case.build(0), **case.batch(0), hardware="cpu", **settings)


@SECOND
@pytest.mark.parametrize("part", [0.05, pytest.param(0.9, marks=pytest.mark.slow)])
def test_auto_takes_the_quickest_way_and_trains_to_the_same_bits(part: float) -> None:
    case, most = LADDER["byte_gpt"], minimum_nbytes("byte_gpt")
    least = refuse(case, memory_budget=TINY, codegen="eager", activations="auto").minimum_nbytes
    assert least <= least_nbytes("byte_gpt", "rerun")
    nbytes = int(least + part * (most - least))
    auto = explained("auto", nbytes)
    others = [explained(way, nbytes) for way in ("offload", "rerun")]
    assert auto.fits
    assert auto.step_time_s.total <= min(one.step_time_s.total for one in others if one.fits)
    result = train(case, memory_budget=nbytes, activations="auto", whole_graph="never")
    assert_same_training(result, everything_fits("byte_gpt"))
    assert result.measured_peak_nbytes == result.predicted_peak_nbytes == auto.predicted_peak_nbytes


def only_mixes(monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """Let plans seem quicker that both copy and drop values; collects all that were timed."""
    timed: list[Captured] = []

    def step_s(seen: Captured, *_: object, **__: object) -> float:
        timed.append(seen)
        return 1.0 - (bool(seen.forward.copied) and bool(seen.forward.remade))

    monkeypatch.setattr("chunkc.policy.decide.step_s", step_s)
    return timed


@SECOND
@pytest.mark.parametrize(("name", "share"), [("byte_gpt", 0.1)])
def test_copies_and_reruns_in_one_step_train_to_the_same_bits(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, most = least_nbytes(name, "rerun"), minimum_nbytes(name)
    timed = only_mixes(monkeypatch)
    nbytes = int(least + share * (most - least))
    result = train(LADDER[name], memory_budget=nbytes, activations="auto", whole_graph="never", debug=True)
    assert any(seen.forward.copied and seen.forward.remade for seen in timed)
    assert_same_training(result, everything_fits(name))
    assert result.measured_peak_nbytes == result.predicted_peak_nbytes <= nbytes
    explanation = explained("auto", nbytes, name)
    assert explanation.saved_at_home
    assert explanation.saved_again
    assert explanation.predicted_peak_nbytes == result.predicted_peak_nbytes
