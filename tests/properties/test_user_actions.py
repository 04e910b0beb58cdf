"""Random sequences of what users do to a model, under a small budget and beside plain PyTorch: no difference.

A model is used for many sequences, since compiling takes most of the time; one that was torn apart (tied, copied) is
used no more, so only one sequence in eight may do that (in long runs one in 32), and few parameters are ever frozen.
`CHUNKC_USER_ACTIONS=10000` runs so many sequences; with pytest's `-s` it says how many have ended.
"""

from __future__ import annotations

import collections
import copy
import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

import chunkc

WIDTH = 64
SMALL, LARGE = 220_000, 1 << 30
WHICH = st.sampled_from([0, 1, 2, 6, 6, 10, 14, 14])
"""Parameters: a norm's and a bias, small; a weight that stays, and three that move under the small budget."""
NUM_EXAMPLES = int(os.environ.get("CHUNKC_USER_ACTIONS", "25"))
TEARING = 8 if NUM_EXAMPLES < 1000 else 32
"""One sequence in so many may tear its models apart."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks)


def adamw(parameters: Iterable[nn.Parameter], kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)  # type: ignore[call-arg]  # a large eps: none is amplified


class Pair:
    """A model that chunkc compiles, its plain twin, and an optimizer of each."""

    def __init__(self, home: str, budget: int) -> None:
        self.plain, self.model = build(), chunkc.place(build(), home=home)
        options = {"memory_budget": budget, "home": home, "codegen": "eager", "whole_graph": "never", "debug": True}
        self.call = torch.compile(self.model, backend="chunkc", options=options)
        self.initial = {name: value.clone() for name, value in self.plain.state_dict().items()}

    def restart(self, optimizer: str) -> None:
        for model in (self.plain, self.model):
            model.load_state_dict(self.initial)
            model.requires_grad_(True)
            model.zero_grad()
        self.optimizer = optimizer
        self.make_optimizers()

    def make_optimizers(self) -> None:
        if self.optimizer == "torch.optim.SGD":
            self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in self.both]
        else:
            kinds = torch.optim.AdamW, chunkc.optim.AdamW
            self.optimizers = [adamw(m.parameters(), kind) for m, kind in zip(self.both, kinds, strict=True)]

    @property
    def both(self) -> tuple[nn.Sequential, nn.Sequential]:
        return self.plain, self.model

    def parameters(self, which: int) -> tuple[nn.Parameter, nn.Parameter]:
        left, right = (list(model.parameters()) for model in self.both)
        return left[which % len(left)], right[which % len(right)]

    def assert_equal(self) -> None:
        for (name, left), (_, right) in zip(self.plain.named_parameters(), self.model.named_parameters(), strict=True):
            torch.testing.assert_close(right.detach(), left.detach(), rtol=2e-4, atol=2e-5, msg=name)
            assert (left.grad is None) == (right.grad is None), name
            if left.grad is not None:
                torch.testing.assert_close(right.grad, left.grad, rtol=2e-4, atol=2e-5, msg=name)


_pool: dict[tuple[str, int], Pair] = {}
_ended = itertools.count(1)


class UserActions(RuleBasedStateMachine):
    """Every rule does the same to both models; after each, parameters and gradients agree."""

    @initialize(
        home=st.sampled_from(["cpu", "disk"]),
        budget=st.sampled_from([SMALL, SMALL, LARGE]),
        optimizer=st.sampled_from(["torch.optim.SGD", "chunkc.optim.AdamW"]),
        may_tear=st.sampled_from([False] * (TEARING - 1) + [True]),
    )
    def begin(self, home: str, budget: int, optimizer: str, may_tear: bool) -> None:
        self.key = home, budget
        self.pair = _pool.pop(self.key, None) or Pair(home, budget)
        self.pair.restart(optimizer)
        self.may_tear, self.is_whole = may_tear, True
        self.kept: collections.deque[tuple[Tensor, Tensor]] = collections.deque(maxlen=2)  # more need a larger budget
        self.losses: tuple[Tensor, Tensor] | None = None
        self.snapshot: dict[str, Tensor] | None = None

    def _calls(self) -> tuple[Any, Any]:
        return self.pair.plain, self.pair.call

    @invariant()
    def agree(self) -> None:
        self.pair.assert_equal()
        for left, right in self.kept:
            torch.testing.assert_close(right, left, rtol=2e-4, atol=2e-5)

    @rule(rows=st.sampled_from([4, 4, 4, 6]))
    def forward(self, rows: int) -> None:
        torch.manual_seed(rows)
        x = torch.randn(rows, WIDTH)
        self.losses = tuple(call(x).square().mean() for call in self._calls())  # type: ignore[assignment]
        torch.testing.assert_close(self.losses[1], self.losses[0], rtol=2e-4, atol=2e-5)

    @precondition(lambda self: self.losses is not None and self.losses[0].requires_grad)
    @rule(retained=st.booleans())
    def backward(self, retained: bool) -> None:
        assert self.losses is not None
        outcomes = []
        for loss in self.losses:
            try:
                loss.backward(retain_graph=retained)
                outcomes.append(None)
            except RuntimeError as error:
                outcomes.append("in" if "inplace" in str(error) else "again" if "second time" in str(error) else error)
        assert outcomes[0] == outcomes[1], outcomes
        if not retained or outcomes[0] is not None:
            self.losses = None
        if outcomes[0] is not None:  # how far either got is nobody's promise
            self.kept.clear()
            for model in self.pair.both:
                model.zero_grad()

    @rule(rows=st.sampled_from([4, 5]))
    def evaluate(self, rows: int) -> None:
        x = torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)
        with torch.no_grad():
            left, right = (call(x) for call in self._calls())
        torch.testing.assert_close(right, left, rtol=2e-4, atol=2e-5)

    @rule()
    def step(self) -> None:
        for optimizer in self.pair.optimizers:
            optimizer.step()

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        for model in self.pair.both:
            model.zero_grad(set_to_none=to_none)

    @rule(which=WHICH)
    def replace_data(self, which: int) -> None:
        for parameter in self.pair.parameters(which):
            parameter.data = parameter.data * 0.75
        self.losses = None

    @rule(which=WHICH)
    def write_in_place(self, which: int) -> None:
        with torch.no_grad():
            for parameter in self.pair.parameters(which):
                parameter.mul_(0.75)

    @rule(which=WHICH, kept=st.booleans())
    def replace_gradient(self, which: int, kept: bool) -> None:
        parameters = self.pair.parameters(which)
        if all(parameter.requires_grad for parameter in parameters):
            left, right = gradients = tuple(torch.full_like(parameter, 0.125) for parameter in parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            if kept:
                self.kept.append((left, right))

    @rule(which=WHICH, let_go=st.booleans())
    def keep_a_gradient(self, which: int, let_go: bool) -> None:
        """A view of it; its owner may let go of it."""
        left, right = (parameter.grad for parameter in self.pair.parameters(which))
        if left is not None and right is not None:
            self.kept.append((left.detach(), right.detach()))
        for model in self.pair.both if let_go else ():
            model.zero_grad()

    @rule(which=st.sampled_from([1, 2, 6]), trained=st.booleans())
    def freeze(self, which: int, trained: bool) -> None:
        for parameter in self.pair.parameters(which):
            parameter.requires_grad_(trained)

    @rule()
    def save(self) -> None:
        self.snapshot = {name: value.clone() for name, value in self.pair.model.state_dict().items()}

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def load(self) -> None:
        assert self.snapshot is not None
        for model in self.pair.both:
            model.load_state_dict(self.snapshot)
        self.losses = None

    @rule()
    def interrupt(self) -> None:
        """A backward that raises half-way, in a hook on a parameter."""
        parameter = self.pair.parameters(1)
        for call, of_model in zip(self._calls(), parameter, strict=True):
            if not of_model.requires_grad:
                continue

            def interrupted(gradient: Tensor) -> Tensor:
                raise KeyboardInterrupt

            handle = of_model.register_hook(interrupted)
            try:
                with pytest.raises(KeyboardInterrupt):
                    call(torch.ones(4, WIDTH)).sum().backward()
            finally:
                handle.remove()
        self.kept.clear()
        for model in self.pair.both:
            model.zero_grad()
        self.losses = None

    @precondition(lambda self: self.may_tear)
    @rule(first=st.integers(0, 3), second=st.integers(0, 3))
    def tie(self, first: int, second: int) -> None:
        for model in self.pair.both:
            model[first][1].weight = model[second][1].weight
        self.is_whole = False
        self.losses = None
        self.pair.make_optimizers()

    @precondition(lambda self: self.may_tear)
    @rule()
    def go_on_with_a_copy(self) -> None:
        pair = self.pair
        pair.plain, pair.model = (copy.deepcopy(model) for model in pair.both)
        options = {"memory_budget": self.key[1], "home": self.key[0], "codegen": "eager", "whole_graph": "never"}
        pair.call = torch.compile(pair.model, backend="chunkc", options=options)
        pair.make_optimizers()
        self.is_whole = False
        self.losses = None

    def teardown(self) -> None:
        if hasattr(self, "pair") and self.is_whole:
            _pool[self.key] = self.pair
        if (ended := next(_ended)) % 500 == 0:  # guards of what was compiled add up
            print(f"{ended} sequences", flush=True)
            _pool.clear()
            torch._dynamo.reset()


@pytest.mark.second_tier
@pytest.mark.timeout(7200)
def test_no_sequence_of_user_actions_makes_a_difference() -> None:
    torch._dynamo.reset()
    limits = {"recompile_limit": 100_000, "accumulated_recompile_limit": 1_000_000}
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    try:
        with torch._dynamo.config.patch(**limits):
            run_state_machine_as_test(
                UserActions,
                settings=settings(
                    max_examples=NUM_EXAMPLES, stateful_step_count=16, deadline=None, suppress_health_check=checks
                ),
            )
    finally:
        _pool.clear()
