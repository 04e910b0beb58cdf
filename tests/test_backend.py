"""The backend as a user meets it: found by name, errors as themselves, one session per options object."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differences, gradients, home_of, session_of, weights
from optim_models import LAYERS, MLP, WIDTH, batch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime

import chunkc
from chunkc.session.session import owner

SMALL, LARGE = 400 * 1024, 64 * 2**20
"""Bytes: a budget in which no weight stays on the compute tier, and one in which all do."""


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def build(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP()


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    options = {"memory_budget": SMALL, "codegen": "eager", "whole_graph": "never"} | options
    return torch.compile(model, backend="chunkc", options=options)


def forward_calls(model: nn.Module) -> list[str]:
    return [label for label, _, _ in chunkc.report(model).moments if label.startswith("forward")]


# ---------------------------------------------------------------- the name


told: list[str] = []


class Traced(nn.Linear):
    """Tells `told` when Dynamo traces it."""

    def forward(self, x: Tensor) -> Tensor:
        comptime(lambda _: told.append("tracing"))
        return super().forward(x)


@pytest.mark.parametrize(("codegen", "starts"), [("inductor", ["the compiler"]), ("eager", [])])
def test_the_compiler_starts_before_dynamo_traces(
    codegen: str, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told.clear()
    monkeypatch.setattr("chunkc.backend.prepare_compiler", lambda: told.append("the compiler"))
    with pytest.raises(chunkc.BudgetError):
        compiled(Traced(8, 8), codegen=codegen, memory_budget=1)(torch.ones(2, 8))
    assert told == [*starts, "tracing"]


@pytest.mark.second_tier
def test_the_name_is_enough(tmp_path: Path) -> None:
    script = """
import sys, torch
model = torch.nn.Linear(8, 8)
call = torch.compile(model, backend="chunkc", options={"memory_budget": "1GiB", "codegen": "eager"})
call(torch.ones(2, 8)).sum().backward()
assert torch.equal(model.bias.grad, torch.full((8,), 2.0))
import chunkc
print(chunkc.report(model).memory_budget_nbytes)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(2**30)), done.stderr


# ---------------------------------------------------------------- errors arrive as themselves


@pytest.mark.parametrize("options", [{"memory_budgte": 1}, {"memory_budget": -1}], ids=str)
def test_options_errors(options: dict[str, Any]) -> None:
    model = build()
    before = weights(model)
    with pytest.raises(chunkc.OptionsError, match="memory_budget") as error:
        torch.compile(model, backend="chunkc", options=options)(batch())
    assert type(error.value) is chunkc.OptionsError
    assert "\n" not in str(error.value)
    assert not differences(weights(model), before)
    assert all(owner(p) is None for p in model.parameters())


def test_mode_is_refused() -> None:
    with pytest.raises(chunkc.OptionsError, match="max-autotune"):
        torch.compile(build(), backend="chunkc", mode="max-autotune")(batch())


def test_a_plan_that_the_verifier_refuses_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise chunkc.VerificationError(["slot: one too many"])

    model = build()
    before, where = weights(model), [p.data_ptr() for p in model.parameters()]
    call = compiled(model, memory_budget=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr("chunkc.policy.plans.verify", refuse)
        with pytest.raises(chunkc.VerificationError):
            call(batch())
    assert [p.data_ptr() for p in model.parameters()] == where
    assert all(owner(p) is None for p in model.parameters())
    call(batch()).backward()
    assert len(gradients(model)) == 2 * LAYERS
    assert not differences(weights(model), before)


# ---------------------------------------------------------------- graphs and variants


def test_one_segment_where_all_fits() -> None:
    model = build()
    compiled(model, memory_budget=LARGE, whole_graph="auto")(batch()).backward()
    assert len(forward_calls(model)) == 1
    assert sum(label.startswith("backward") for label, _, _ in chunkc.report(model).moments) == 1


@pytest.mark.parametrize("options", [{"memory_budget": LARGE}, {"whole_graph": "auto"}])
def test_several_segments_otherwise(options: dict[str, Any]) -> None:
    model = build()
    compiled(model, **options)(batch()).backward()
    assert len(forward_calls(model)) >= LAYERS


# ---------------------------------------------------------------- sessions


def test_one_options_object_is_one_session() -> None:
    options = {"memory_budget": SMALL, "codegen": "eager", "whole_graph": "never"}
    first, second = build(0), build(1)
    for model in (first, second):
        torch.compile(model, backend="chunkc", options=options)(batch()).backward()
    assert session_of(first) is session_of(second)
    assert chunkc.report(first).num_chunks == 2 * LAYERS
    assert len({home_of(p)[1] for m in (first, second) for p in m.parameters()}) == 4 * LAYERS
    plain = build(1)
    plain(batch()).backward()
    for p, q in zip(second.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize(("second_budget_nbytes", "is_shared"), [(SMALL + 4096, False), (SMALL, True)])
def test_two_options_objects_are_two_sessions(second_budget_nbytes: int, is_shared: bool) -> None:
    """Unless the models look alike and the options are equal: Dynamo then keeps one graph for both."""
    first, second = build(0), build(1)
    compiled(first)(batch()).backward()
    compiled(second, memory_budget=second_budget_nbytes)(batch()).backward()
    assert (session_of(first) is session_of(second)) == is_shared
    num_chunks = 2 * LAYERS if is_shared else LAYERS
    assert chunkc.report(first).num_chunks == chunkc.report(second).num_chunks == num_chunks


def test_unlike_models_with_equal_options_are_two_sessions() -> None:
    first, second = build(0), nn.Linear(WIDTH, WIDTH)
    compiled(first)(batch()).backward()
    compiled(second)(batch()).sum().backward()
    assert session_of(first) is not session_of(second)


def test_all_models_without_options_are_one_session() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(3, 3)
    for model in (first, second):
        torch.compile(model, backend="chunkc")(torch.ones(2, model.in_features)).sum().backward()
        assert torch.equal(model.bias.grad, torch.full((model.out_features,), 2.0))
    assert session_of(first) is session_of(second)


def test_parts_compiled_apart_cannot_be_one_graph() -> None:
    first, second = build(0), build(1)
    compiled(first)(batch())
    compiled(second, memory_budget=SMALL + 4096)(batch())

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([first, second])

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[0](x) + self.parts[1](x)

    both = Both()
    with pytest.raises(chunkc.UnsupportedError, match="as one model"):
        compiled(both)(batch())


def test_a_later_compilation_may_change_the_budget() -> None:
    model = build()
    compiled(model)(batch()).backward()
    before = gradients(model)
    torch._dynamo.reset()
    model.zero_grad()
    compiled(model, memory_budget=LARGE)(batch()).backward()
    assert chunkc.report(model).memory_budget_nbytes == LARGE
    assert not differences(gradients(model), before)
