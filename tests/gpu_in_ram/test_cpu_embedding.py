"""Engines with `use_cpu_embedding`: the same losses and weights, and the embeddings' bytes are not on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda_in_ram
import pytest
import torch
from device_gpt import GPT
from torch import Tensor, nn

import chunkc
from chunkc.engine import Engine
from chunkc.engine.cpu_embedding import CpuEmbedding, chosen, look_up_on_cpu, set_apart
from chunkc.session.session import OPEN

pytestmark = pytest.mark.arithmetic

SHAPE = {"width": 64, "layers": 3, "heads": 2, "vocab": 2048, "sequence": 32}
HUGE = 1 << 34
EMBEDDINGS = ("tokens.weight", "positions.weight")
FP16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}


@dataclass(frozen=True)
class Trained:
    losses: tuple[Tensor, ...]
    weights: dict[str, Tensor]
    engine: Engine
    optimizer: torch.optim.Optimizer
    peak_nbytes: int
    """What torch's allocator had at most on the device, in the steps after the first, beyond what was there before."""


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(**SHAPE)


def config(budget_nbytes: int = HUGE, *, on_cpu: bool = True, home: str = "cpu", **keys: Any) -> dict[str, Any]:
    options = {"memory_budget": budget_nbytes, "codegen": "eager", "whole_graph": "never", "device": "cuda:0"}
    found = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "use_cpu_embedding": on_cpu}
    return found | {"chunkc": options | {"home": home}} | keys


def tokens(step: int) -> Tensor:
    return torch.randint(SHAPE["vocab"], (2, SHAPE["sequence"]), generator=torch.Generator().manual_seed(step))


def train_with(
    engine: Engine, optimizer: torch.optim.Optimizer, *, steps: int = 3, first: int = 0, before_nbytes: int = 0
) -> Trained:
    losses, peak_nbytes = [], 0
    accumulate = engine.gradient_accumulation_steps()
    for step in range(first * accumulate, (first + steps) * accumulate):
        torch.cuda.reset_peak_memory_stats()
        loss = engine(tokens(step).to("cuda"))
        engine.backward(loss)
        losses.append(loss.detach().cpu().clone())
        del loss
        engine.step()
        if step > first:
            peak_nbytes = max(peak_nbytes, torch.cuda.max_memory_allocated())
    chunkc.synchronize(engine.module)
    torch.cuda.synchronize()
    weights = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    return Trained(tuple(losses), weights, engine, optimizer, peak_nbytes - before_nbytes)


def train(
    budget_nbytes: int = HUGE, *, steps: int = 3, model: Callable[[], GPT] = build, made_by: Any = None, **options: Any
) -> Trained:
    """Train an engine of a model, by the optimizer of its configuration or the one that is `made_by` a function."""
    torch._dynamo.reset()
    gc.collect()
    before_nbytes = torch.cuda.memory_allocated()
    made = chunkc.initialize_engine(model, 0, config(budget_nbytes, **options), optimizer=made_by)
    return train_with(*made, steps=steps, before_nbytes=before_nbytes)


def smallest_budget() -> int:
    """What `BudgetError` says that works, for one graph after the other; bytes."""
    budget_nbytes = 4096
    for _ in range(4):
        try:
            train(budget_nbytes, steps=1)
            return budget_nbytes
        except chunkc.BudgetError as error:
            budget_nbytes = error.minimum_nbytes
    raise AssertionError(f"does not train in {budget_nbytes} bytes")


def assert_same(found: Trained, expected: Trained) -> None:
    assert list(found.weights) == list(expected.weights)
    assert expected.losses[0] != expected.losses[-1]
    assert all(torch.equal(*pair) for pair in zip(found.losses, expected.losses, strict=True))
    assert not [name for name, weight in found.weights.items() if not torch.equal(weight, expected.weights[name])]


def assert_at_home(found: Trained) -> None:
    """Weights, states and rows' modules: what stays on the CPU."""
    named = dict(found.engine.module.named_parameters())
    for name, parameter in named.items():
        is_kept = name in EMBEDDINGS
        assert parameter.device.type == ("cpu" if is_kept else "cuda")
        states = [value for kind, value in found.optimizer.state[parameter].items() if kind != "step"]
        assert states
        assert not is_kept or all(state.device.type == "cpu" for state in states)
    assert type(found.engine.module.tokens) is CpuEmbedding


TRAININGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16, where a step overflows": {"fp16": FP16},
    "accumulated": {"gradient_accumulation_steps": 2},
    "built at home": {"release_after_init": True},
    "updated by the CPU": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "updates beside both phases": {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "update_on": "cpu", "overlap": "both"}}
    },
    "autocast": {"torch_autocast": {"enabled": True}},
}


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_and_weights_are_those_of_the_plan(name: str) -> None:
    """With the same arithmetic on both sides, as here; a GPU adds rows' gradients in another order than a CPU."""
    expected = train(on_cpu=False, **TRAININGS[name])
    with cuda_in_ram.choose(late=1):
        found = train(**TRAININGS[name])
    assert_same(found, expected)
    assert_at_home(found)
    assert name != "fp16, where a step overflows" or found.engine.skipped_steps > 0
    assert found.engine.get_global_grad_norm() == expected.engine.get_global_grad_norm()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradients_on_two_devices_are_clipped_by_one_norm(dtype: str) -> None:
    """Its last bits depend on the order in which norms are added, which is by device."""
    options: dict[str, Any] = {"gradient_clipping": 0.1}
    options |= {} if dtype == "fp32" else {dtype: {"enabled": True}}
    expected, found = train(on_cpu=False, steps=1, **options), train(steps=1, **options)
    norm = found.engine.get_global_grad_norm()
    assert norm is not None
    assert norm > 0.1
    assert norm == pytest.approx(expected.engine.get_global_grad_norm(), rel=1e-5)
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, expected.weights[name])


def test_the_smallest_budget_is_kept_to() -> None:
    others = set(OPEN)
    expected = train()
    budget_nbytes = smallest_budget()
    for seed in (1, 2):
        with cuda_in_ram.choose(late=seed):
            found = train(budget_nbytes)
        assert_same(found, expected)
        assert_at_home(found)
        assert {session.device.type for session in set(OPEN) - others} == {"cuda"}
        report = chunkc.report(found.engine.module)
        assert report.num_resident_chunks < report.num_chunks
        assert max(report.measured_peak_nbytes, found.peak_nbytes) <= budget_nbytes


def test_the_device_has_neither_the_weights_nor_their_states() -> None:
    """With all else on the device for good. The peak is in the backward, where the last gradients are not there yet."""
    train(on_cpu=False)  # cuBLAS's workspaces come with the first steps, and stay
    kept, planned = train(), train(on_cpu=False)
    of_embeddings = sum(kept.weights[name].nbytes for name in EMBEDDINGS)
    rows_nbytes = 2 * 2 * SHAPE["sequence"] * SHAPE["width"] * 4  # of both embeddings
    assert rows_nbytes < of_embeddings / 10
    assert kept.peak_nbytes <= planned.peak_nbytes - 3 * of_embeddings + rows_nbytes
    reports = [chunkc.report(trained.engine.module) for trained in (kept, planned)]
    assert reports[0].num_chunks < reports[1].num_chunks
    assert reports[0].predicted_peak_nbytes < reports[1].predicted_peak_nbytes - 2 * of_embeddings


def test_a_disk_home_leaves_it_in_ram(tmp_path: Path) -> None:
    expected = train(on_cpu=False)
    found = train(home=f"disk:{tmp_path}", release_after_init=True)
    assert_same(found, expected)
    assert_at_home(found)


def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    expected = train()
    engine, optimizer = chunkc.initialize_engine(build, 0, config())
    train_with(engine, optimizer, steps=2)
    with chunkc.Checkpoint(tmp_path, model=engine.module, optimizer=optimizer) as checkpoint:
        checkpoint.save(2)
    torch._dynamo.reset()
    again, other = chunkc.initialize_engine(lambda: GPT(**SHAPE), 0, config())
    assert chunkc.Checkpoint(tmp_path, model=again.module, optimizer=other).load_latest() == 2
    found = train_with(again, other, steps=1, first=2)
    assert torch.equal(found.losses[0], expected.losses[2])
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in found.weights.items())
    assert_at_home(found)
    plain = build()
    plain.load_state_dict(again.state_dict())
    assert all(torch.equal(p.detach(), found.weights[name]) for name, p in plain.named_parameters())


@pytest.mark.parametrize("on_cpu", [True, False], ids=["with the key", "without"])
def test_files_are_those_of_the_model(on_cpu: bool, tmp_path: Path) -> None:
    saved = train(on_cpu=not on_cpu, steps=1)
    chunkc.save(saved.engine.module, tmp_path)
    torch._dynamo.reset()
    engine, _ = chunkc.initialize_engine(lambda: GPT(**SHAPE), 0, config(on_cpu=on_cpu))
    assert chunkc.load(engine, tmp_path) == ([], [])
    assert all(torch.equal(p.detach().cpu(), saved.weights[name]) for name, p in engine.module.named_parameters())


def test_indices_may_be_on_the_cpu_and_nothing_is_recorded_for_evaluation() -> None:
    engine, _ = chunkc.initialize_engine(build, 0, config())
    with torch.no_grad():
        engine.eval()
        assert torch.equal(engine.module.tokens(tokens(0)), engine.module.tokens(tokens(0).to("cuda")))
        assert engine.module.tokens(tokens(0)).device.type == "cuda"
        first = engine(tokens(0).to("cuda"))
    engine.train()
    assert torch.equal(first, engine(tokens(0).to("cuda")).detach())


def test_an_optimizer_of_torch_updates_both() -> None:
    how: dict[str, Any] = {"made_by": lambda p: torch.optim.SGD(p, lr=0.1), "gradient_clipping": 0.1}
    assert_same(train(**how), train(on_cpu=False, **how))


def test_a_scaler_whose_answer_is_on_the_device_skips_both() -> None:
    """What an engine does not use: `torch.amp.GradScaler`, which leaves there whether gradients overflow."""

    def trained(on_cpu: bool) -> tuple[list[Tensor], list[float]]:
        torch._dynamo.reset()
        model = build()
        embeddings = chosen(model) if on_cpu else []
        with set_apart(embeddings):
            chunkc.place(model, device="cuda")
        look_up_on_cpu(embeddings, torch.device("cuda"))
        options = {"memory_budget": HUGE, "codegen": "eager", "whole_graph": "never"}
        compiled = torch.compile(model, backend="chunkc", options=options)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for step in range(4):
            loss = scaler.scale(compiled(tokens(step).to("cuda")))
            (loss * float("inf") if step == 1 else loss).backward()
            del loss
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        chunkc.synchronize(model)
        states = optimizer.state_dict()["state"].values()
        return [p.detach().cpu().clone() for p in model.parameters()], [float(state["step"]) for state in states]

    (expected, steps), (found, found_steps) = trained(False), trained(True)
    assert set(steps) == set(found_steps) == {3.0}
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_tied_embedding_is_told_once_and_planned(caplog: pytest.LogCaptureFixture) -> None:
    def build_tied() -> GPT:
        model = build()
        model.head.weight = model.tokens.weight
        return model

    found = train(model=build_tied)
    assert_same(found, train(model=build_tied, on_cpu=False))
    assert caplog.text.count("tokens.weight is head.weight too") == 1
    assert found.engine.module.tokens.weight.device.type == "cuda"
    assert found.engine.module.positions.weight.device.type == "cpu"


def test_a_model_without_embeddings_is_told(caplog: pytest.LogCaptureFixture) -> None:
    chunkc.initialize_engine(lambda: nn.Linear(64, 64), 0, config())
    assert "use_cpu_embedding (the model has no nn.Embedding that the CPU can look up)" in caplog.text


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    model = nn.Sequential(nn.Embedding(512, 64, sparse=True), nn.Linear(64, 64))
    with pytest.raises(chunkc.UnsupportedError, match=r"sparse=True"):
        chunkc.initialize_engine(model, 0, config())
    assert model[1].weight.device.type == "cpu"
    assert type(model[0]) is nn.Embedding


class ReadsItsWeight(nn.Module):
    """Reads the weight of an embedding beside looking it up."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(512, 64), nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.up(self.tokens(ids)), self.tokens.weight).float().mean()


def test_a_model_that_reads_the_weight_itself_gets_pytorchs_error() -> None:
    """It names the line. PyTorch 2.11 lists the devices, 2.13 joins them."""
    engine, _ = chunkc.initialize_engine(ReadsItsWeight, 0, config())
    with pytest.raises(RuntimeError, match=r"cuda:0(?:,| and) cpu[\s\S]*self\.tokens\.weight"):
        engine(tokens(0).clamp(max=511).to("cuda"))
