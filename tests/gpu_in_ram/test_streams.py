"""Training on several streams, which its caller orders as PyTorch asks for and no more.

A gate that is shut on a stream stands for work that takes long: what does not wait for that stream comes before.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from functools import cache

import cuda_in_ram
import pytest
import torch
from device_gate import Gate
from torch import Tensor, nn

import chunkc

pytestmark = pytest.mark.arithmetic

WIDTH = 128
HUGE = 1 << 30
HIDDEN_S = 0.3


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    torch.cuda.init()
    with cuda_in_ram.choose(late=1, late_us=0):
        yield


def compiled_model(budget_nbytes: int) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = chunkc.place(nn.Sequential(*layers), device="cuda")
    options = {"memory_budget": budget_nbytes, "codegen": "eager", "whole_graph": "never", "activations": "keep"}
    return torch.compile(model, backend="chunkc", options=options)  # type: ignore[return-value]


@cache
def small_budget() -> int:
    """In which chunks move, with room for what a second forward holds."""
    model = compiled_model(4096)
    with pytest.raises(chunkc.BudgetError) as refused:
        model(batch(0))
    return refused.value.minimum_nbytes + (48 << 10)


def batch(number: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to("cuda")


def values(model: nn.Module) -> list[Tensor]:
    torch.cuda.synchronize()
    return [p.detach().cpu().clone() for p in model.parameters()]


def test_two_backwards_on_two_streams_add_up() -> None:
    """Nothing orders the streams but autograd, which adds to each gradient in one order."""

    def gradients(budget_nbytes: int, streams: list[torch.cuda.Stream]) -> list[Tensor]:
        model, main, losses = compiled_model(budget_nbytes), torch.cuda.current_stream(), []
        inputs = [batch(number) for number in range(2)]
        for stream, x in zip(streams, inputs, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                losses.append(model(x).square().mean())
        gate = Gate(streams[0])
        for stream, loss in zip(streams, losses, strict=True):
            with torch.cuda.stream(stream):
                loss.backward()
        gate.open_after(streams[1], HIDDEN_S)
        torch.cuda.synchronize()
        report = chunkc.report(model)
        assert budget_nbytes == HUGE or report.num_resident_chunks < report.num_chunks
        return [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]

    main = torch.cuda.current_stream()
    expected = gradients(HUGE, [main, main])
    found = gradients(small_budget(), [torch.cuda.Stream(), torch.cuda.Stream()])
    assert len(found) == len(expected) == 8
    assert all(map(torch.equal, found, expected))


def test_the_cpu_s_updates_find_gradients_of_another_stream() -> None:
    """The caller of `step()` orders nothing, which is right for parameters alone that the CPU updates: what it reads at
    home is in no stream's order. Biases stay on the device."""

    def weights(stream: torch.cuda.Stream) -> list[Tensor]:
        model, main = compiled_model(small_budget()), torch.cuda.current_stream()
        optimizer, x = chunkc.optim.AdamW(model.parameters(), lr=1e-2, update_on="cpu"), batch(0)
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            loss = model(x).square().mean()
            gate = Gate(stream)
            loss.backward()
        gate.open_soon()
        optimizer.step()
        return [value for value in values(model) if value.dim() == 2]

    expected = weights(torch.cuda.current_stream())
    assert all(map(torch.equal, weights(torch.cuda.Stream()), expected))


def test_a_copy_by_the_host_waits_for_all_streams() -> None:
    model = chunkc.place(nn.Linear(WIDTH, WIDTH), device="cuda")
    side, written = torch.cuda.Stream(), torch.ones(WIDTH, WIDTH, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        gate = Gate(side)
        model.weight.copy_(written)
    gate.open_soon()
    copied = copy.deepcopy(model)
    assert copied.weight.detach().cpu().equal(written.cpu())


class Pair:
    """Two parameters of one optimizer, with gradients, `gap` elements apart: what one launch updates."""

    def __init__(self, gap: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.room = torch.randn(2 * WIDTH + gap).to("cuda")
        self.parameters = [nn.Parameter(self.room[begin : begin + WIDTH]) for begin in (0, WIDTH + gap)]
        self.gradients = list(torch.randn(2, WIDTH).to("cuda"))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {"AdamW": chunkc.optim.AdamW, "LAMB": chunkc.optim.LAMB}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_two_streams_share_tables(name: str) -> None:
    """They update different parameters, so their caller orders nothing."""

    def weights(streams: list[torch.cuda.Stream]) -> list[Tensor]:
        pairs, main = [Pair(64, 0), Pair(256, 1)], torch.cuda.current_stream()
        optimizer = OPTIMIZERS[name]([p for pair in pairs for p in pair.parameters], lr=1e-2)
        for stream in streams:
            stream.wait_stream(main)
        gate = Gate(streams[0])
        for stream, pair in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                pair.update(optimizer)
        gate.open_after(streams[1], HIDDEN_S)
        torch.cuda.synchronize()
        return [pair.room.cpu() for pair in pairs]

    main = torch.cuda.current_stream()
    found = weights([torch.cuda.Stream(), torch.cuda.Stream()])
    assert all(map(torch.equal, found, weights([main, main])))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_s_memory_is_another_s_once_all_streams_have_read_it(name: str) -> None:
    """It was made on one stream, which runs on while another one still has to read it."""

    def weights(first: torch.cuda.Stream, second: torch.cuda.Stream) -> Tensor:
        pair = Pair(64, 0)
        optimizer = OPTIMIZERS[name](pair.parameters, lr=1e-2)
        first.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            pair.update(optimizer)
        second.wait_stream(first)
        gate = Gate(second)
        with torch.cuda.stream(second):
            pair.update(optimizer)
        states = optimizer.state  # the caller's own concern
        del optimizer
        gc.collect()
        with torch.cuda.stream(first):
            taken = [torch.empty(512, dtype=torch.uint8, device="cuda").fill_(0) for _ in range(64)]
        gate.open_after(first, HIDDEN_S)
        torch.cuda.synchronize()
        del taken, states
        return pair.room.cpu()

    main = torch.cuda.current_stream()
    assert weights(torch.cuda.Stream(), torch.cuda.Stream()).equal(weights(main, main))
