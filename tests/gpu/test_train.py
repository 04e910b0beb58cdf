"""Training on a real GPU under a budget. Run this first where there is one: `pytest tests/gpu -m gpu -x -s`.

Each test prints what it measured, so that a failure says by how much.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import session_of
from torch import Tensor, nn

import chunkc
from chunkc.runtime.device.cuda import memory_limit
from chunkc.runtime.device.gpu import TorchGpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(900),
]

MIB = 1 << 20
HUGE = 1 << 40
WIDTH, ROWS, WORDS = (256, 8, (1, 128)) if "CUDA_IN_RAM_ARITHMETIC" in os.environ else (1024, 64, (4, 256))
"""Of layers, and of a batch: a GPU made of RAM multiplies on a CPU, and interprets Triton's kernels."""

COMPUTES = "CUDA_IN_RAM" not in os.environ or "CUDA_IN_RAM_ARITHMETIC" in os.environ
"""False on the GPU made of RAM without arithmetic: kernels do nothing, and tensors hold what lay in their memory."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Stack(nn.Module):
    """Equal layers; on a GPU of 4 MiB in bf16, of 8 in fp32."""

    def __init__(self, dtype: torch.dtype, num_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(self.norm(x)))[..., :WIDTH] * self.scale
        return x.float().square().mean()


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    loss: Callable[[Any], Tensor]


def stack(dtype: torch.dtype) -> Case:
    def batch(seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)}

    return Case(lambda: Stack(dtype), batch, lambda out: out)


def language_model(kind: str) -> Case:
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {"vocab_size": 4096, "use_cache": False}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=WIDTH // 2, n_layer=6, n_head=8, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            **common,
        )  # fmt: skip
        build = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            hidden_size=WIDTH // 2, intermediate_size=WIDTH * 11 // 8, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=256, **common,
        )  # fmt: skip
        build = transformers.LlamaForCausalLM

    def batch(seed: int) -> dict[str, Tensor]:
        tokens = torch.randint(4096, WORDS, generator=torch.Generator().manual_seed(seed)).to("cuda")
        return {"input_ids": tokens, "labels": tokens}

    return Case(lambda: build(config).to(torch.bfloat16), batch, lambda out: out.loss)


CASES = {
    "stack-fp32": lambda: stack(torch.float32),
    "stack-bf16": lambda: stack(torch.bfloat16),
    "gpt2": lambda: language_model("gpt2"),
    "llama": lambda: language_model("llama"),
}


@dataclass(frozen=True)
class Trained:
    losses: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    report: chunkc.Report
    measured_nbytes: int  # at most, without what others hold on the device
    minimum_nbytes: int
    num_moving: int


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def train(
    case: Case, budget_nbytes: int, *, codegen: str = "inductor", steps: int = 3, home: str = "cpu",
    disk_holds: str = "auto", update_on: str = "device", optimizer: Callable[[Any], Any] | None = None,
    limit: bool = False,
) -> Trained:  # fmt: skip
    """Train a placed model. `limit`: torch's allocator gets the budget and a little more, and no byte beyond it."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()  # of earlier tests: this one is to make its own
    others_nbytes = torch.cuda.memory_allocated()
    model = chunkc.place(build(case), device="cuda", home=home, disk_holds=disk_holds)
    options = {"memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "never"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    make = optimizer or (lambda p: chunkc.optim.AdamW(p, lr=1e-3, weight_decay=0.1, update_on=update_on))
    update = make(model.parameters())
    losses = []
    foreign_nbytes = torch.cuda.memory_reserved()
    reserve_nbytes = budget_nbytes + foreign_nbytes + 64 * MIB  # segments that are only partly used
    total_nbytes = torch.cuda.get_device_properties(0).total_memory
    with memory_limit(min(reserve_nbytes, total_nbytes) if limit else total_nbytes):
        for step in range(steps):
            loss = case.loss(compiled(**case.batch(step)))
            loss.backward()
            update.step()
            update.zero_grad()
            losses.append(loss.detach().float().cpu().clone())
            del loss  # a loss that is held on counts in the next step
    torch.cuda.synchronize()
    weights = tuple(p.detach().cpu() for p in model.parameters())
    session = session_of(model)
    moving = len(session.store.layout.groups) - len(session.store.resident)
    report = chunkc.report(model)
    measured_nbytes = (report.measured_peak_nbytes or 0) - others_nbytes
    return Trained(tuple(losses), weights, report, measured_nbytes, session.minimum_nbytes, moving)


def smallest(case: Case, codegen: str = "inductor") -> int:
    torch._dynamo.reset()
    model = chunkc.place(build(case), device="cuda")
    options = {"memory_budget": 4096, "whole_graph": "never", "codegen": codegen}
    compiled = torch.compile(model, backend="chunkc", options=options)
    with pytest.raises(chunkc.BudgetError) as caught:
        case.loss(compiled(**case.batch(0)))
    return caught.value.minimum_nbytes


def assert_same_bits(found: Trained, expected: Trained) -> None:
    """Of losses and weights, where kernels compute."""
    if not COMPUTES:
        return
    assert all(torch.isfinite(loss) for loss in expected.losses)
    for what in ("losses", "weights"):
        pairs = list(zip(getattr(found, what), getattr(expected, what), strict=True))
        different = [
            (i, float((a.float() - b.float()).abs().max())) for i, (a, b) in enumerate(pairs) if not a.equal(b)
        ]
        assert not different, f"{what} that differ, and by how much at most: {different[:10]}"


@pytest.mark.arithmetic
def test_placing_takes_only_what_is_small() -> None:
    """No chunked parameter passes through device memory; `p.data` is a CUDA tensor with the values all the same."""
    reference, before = build(stack(torch.float32)), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = build(stack(torch.float32))
    identities = [id(p) for p in model.parameters()]
    assert chunkc.place(model, device="cuda") is model
    assert [id(p) for p in model.parameters()] == identities
    assert torch.cuda.max_memory_allocated() - before < MIB
    assert all(t.device.type == "cuda" for t in (*model.parameters(), *model.buffers()))
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), expected)
    with torch.no_grad():  # eager code reads and writes home through the link, from either side
        weight = model.layers[0].weight
        weight.copy_(torch.ones(weight.shape))
        weight.add_(1.0)
        assert (weight == 2.0).all().item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("codegen", [pytest.param("eager", marks=pytest.mark.memory_and_values), "inductor"])
def test_the_budget_changes_no_bit_and_is_kept(name: str, codegen: str) -> None:
    case = CASES[name]()
    expected = train(case, HUGE, codegen=codegen)
    minimum = smallest(case, codegen)
    for budget_nbytes in (minimum, minimum + (expected.report.predicted_peak_nbytes - minimum) // 2):
        found = train(case, budget_nbytes, codegen=codegen, limit=True)
        report = found.report
        print(
            f"\n{name} {codegen}: budget {budget_nbytes / MIB:.1f} MiB, predicted "
            f"{report.predicted_peak_nbytes / MIB:.1f}, measured {found.measured_nbytes / MIB:.1f}, "
            f"{found.num_moving} groups move, losses {[round(float(x), 5) for x in found.losses]}"
        )
        worst = sorted(((m or 0) - p, label) for label, p, m in report.moments)[-3:]
        assert report.measured_peak_nbytes is not None
        assert report.predicted_peak_nbytes <= budget_nbytes
        assert found.measured_nbytes <= report.predicted_peak_nbytes, f"beyond the prediction at {worst}"
        assert_same_bits(found, expected)
    assert found.num_moving >= 1


@pytest.mark.arithmetic
def test_as_torch_trains() -> None:
    """fp32 against `torch.optim.AdamW` on an uncompiled model on the device."""
    case = stack(torch.float32)
    model = build(case).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(3):
        model(**case.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = tuple(p.detach().cpu() for p in model.parameters())
    found = train(case, smallest(case, "eager"), codegen="eager")
    torch.testing.assert_close(found.weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.arithmetic
@pytest.mark.parametrize("update_on", ["cpu", "auto"])
def test_updates_on_the_cpu(update_on: str) -> None:
    case = stack(torch.bfloat16)
    budget_nbytes = smallest(case, "eager")
    expected = train(case, budget_nbytes, codegen="eager")
    found = train(case, budget_nbytes, codegen="eager", update_on=update_on)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-2, atol=1e-3)
    if update_on == "cpu":
        moved = [t.report.traffic_nbytes["to_device"] for t in (found, expected)]
        assert moved[0] < moved[1] / 2, f"moved {moved[0]} bytes to the device, {moved[1]} with updates there"


@pytest.mark.arithmetic
def test_torch_s_own_optimizer_through_home_views() -> None:
    case = stack(torch.float32)

    def make(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False)

    budget_nbytes = smallest(case, "eager") + 256 * MIB  # its states are on the device, outside the plan
    found = train(case, budget_nbytes, codegen="eager", optimizer=make)
    expected = train(case, budget_nbytes, codegen="eager")
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.memory_and_values
@pytest.mark.parametrize("disk_holds", ["states", pytest.param("everything", marks=pytest.mark.files_in_place)])
def test_a_disk(tmp_path: Any, disk_holds: str) -> None:
    if disk_holds == "everything" and (problem := TorchGpu().cannot_view_pageable()) is not None:
        pytest.skip(problem)
    case = stack(torch.float32)
    budget_nbytes = smallest(case, "eager")
    found = train(case, budget_nbytes, codegen="eager", home=f"disk:{tmp_path}", disk_holds=disk_holds)
    assert_same_bits(found, train(case, budget_nbytes, codegen="eager"))


def test_a_model_that_is_on_the_device_already() -> None:
    case = stack(torch.float32)
    model = build(case).to("cuda")
    options = {"memory_budget": smallest(case, "eager"), "whole_graph": "never", "codegen": "eager"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    before = torch.cuda.memory_allocated()
    case.loss(compiled(**case.batch(0))).backward()
    torch.cuda.synchronize()
    print(f"\n{before / MIB:.1f} MiB before, {torch.cuda.memory_allocated() / MIB:.1f} MiB after a step")
    assert torch.cuda.memory_allocated() < before  # parameters went home
    assert chunkc.report(model).num_resident_chunks < chunkc.report(model).num_chunks
