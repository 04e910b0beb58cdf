"""What Dynamo no longer compiles is refused, with the limit's name; what it has compiled goes on. A helper without
parameters runs uncompiled, with a warning."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import chunkc

OPTIONS = {"memory_budget": 1 << 30, "codegen": "eager"}


class Scaled(nn.Module):
    """Dynamo compiles its forward anew for each `kind`."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * len(self.kind)


KINDS = ("a", "bb", "ccc")
ANOTHER = "dddd"
X = torch.ones(2, 8)


@pytest.fixture(autouse=True)
def three_times() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3):
        yield
    torch._dynamo.reset()


def check(model: Scaled, compiled: Callable[[Tensor], Tensor], kinds: Iterable[str] = KINDS) -> None:
    for model.kind in kinds:
        torch.testing.assert_close(compiled(X), model.linear(X) * len(model.kind))


def refusal(compiled: Callable[[Tensor], Tensor]) -> str:
    with pytest.raises(chunkc.UnsupportedError) as refused:
        compiled(X)
    return str(refused.value)


def test_a_fourth_compilation_is_refused_and_the_others_go_on() -> None:
    model = Scaled()
    compiled = torch.compile(model, backend="chunkc", options=OPTIONS)
    check(model, compiled)
    model.kind = ANOTHER
    for _ in range(2):
        message = refusal(compiled)
        assert "Scaled.forward" in message
        assert "torch._dynamo.config.recompile_limit = 3" in message
        assert "kind" in message  # the guard that failed
    check(model, compiled)
    with torch._dynamo.config.patch(recompile_limit=8):
        check(model, compiled, [ANOTHER])


def test_later_models_of_a_class_are_refused_too() -> None:
    """A sweep over models, as over budgets: each is another compilation of the same forward."""
    for kind in KINDS:
        torch.compile(Scaled(kind), backend="chunkc", options=OPTIONS)(X).sum().backward()
        gc.collect()
    model = Scaled(ANOTHER)
    assert "recompile_limit" in refusal(torch.compile(model, backend="chunkc", options=OPTIONS))
    assert all(p.grad is None for p in model.parameters())


def test_a_whole_graph_names_the_limit_as_well() -> None:
    model = Scaled()
    compiled = torch.compile(model, backend="chunkc", options=OPTIONS, fullgraph=True)
    check(model, compiled)
    model.kind = ANOTHER
    assert "recompile_limit" in refusal(compiled)


def test_other_backends_keep_dynamos_way() -> None:
    model = Scaled()
    check(model, torch.compile(model, backend="aot_eager"), [*KINDS, ANOTHER])


class Numbered(nn.Module):
    """Dynamo makes an input of a number that has changed."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale if self.scale < 100 else x


def test_models_with_other_numbers_share_a_compilation() -> None:
    for scale in (0.5, 1.5, 2.5, 3.5, 4.5):
        model = Numbered(scale)
        y = torch.compile(model, backend="chunkc", options=OPTIONS)(X)
        y.sum().backward()
        torch.testing.assert_close(y, model.linear(X) * scale)
        torch.testing.assert_close(model.linear.bias.grad, torch.full((8,), 2 * scale))


# ---------------------------------------------------------------- helpers without parameters

SPARE = nn.Linear(8, 8)


def scaled(x: Tensor, kind: str) -> Tensor:
    return torch.tanh(x) * len(kind)


def applied(x: Tensor, kind: str) -> Tensor:
    return x * len(kind) if len(kind) < 4 else SPARE(x)


def of_holder(x: Tensor, kind: str) -> Tensor:
    return x * len(kind) if len(kind) < 4 else HOLDER["of"][0].spare(x)


def weighted(x: Tensor, kind: str) -> Tensor:
    return x * SCALE * len(kind)


def around(spare: nn.Module) -> Callable[[Tensor, str], Tensor]:
    def branching(x: Tensor, kind: str) -> Tensor:
        return x * len(kind) if len(kind) < 4 else spare(x)

    return branching


def breaking(x: Tensor, kind: str) -> Tensor:
    """Its callees are functions that Dynamo compiles by themselves, and would not once it runs uncompiled."""
    x = x * len(kind)
    torch._dynamo.graph_break()
    return x + 1


class Holder:
    """What a helper may reach a module by."""

    def __init__(self) -> None:
        self.spare = SPARE


HOLDER = {"of": [Holder()]}
SCALE = nn.Parameter(torch.ones(8))


class WithHelper(nn.Module):
    """Calls a helper in graphs of its own, with each kind."""

    def __init__(self, helper: Callable[[Tensor, str], Tensor]) -> None:
        super().__init__()
        self.linear, self.helper = nn.Linear(8, 8), helper

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for kind in (*KINDS, ANOTHER, "eeeee"):
            torch._dynamo.graph_break()
            x = self.helper(x, kind)
        return x


def test_a_helper_without_parameters_runs_uncompiled_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = WithHelper(scaled)
    call = torch.compile(model, backend="chunkc", options=OPTIONS)
    for _ in range(2):
        model.zero_grad()
        loss = call(X).square().sum()
        loss.backward()
    said = [r.getMessage() for r in caplog.records if r.name == "chunkc.recompile_limit"]
    assert len(said) == 1, said
    for part in ("scaled (", "recompile_limit = 3", "runs uncompiled", "memory_budget does not count", "kind == "):
        assert part in said[0]
    assert "\n" not in said[0]
    gradient = model.linear.weight.grad.clone()
    model.zero_grad()
    plain = model(X).square().sum()
    plain.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, model.linear.weight.grad)


@pytest.mark.parametrize("helper", [applied, of_holder, weighted, around(SPARE), breaking])
def test_one_that_reaches_parameters_or_breaks_its_graph_is_refused(helper: Callable[[Tensor, str], Tensor]) -> None:
    call = torch.compile(WithHelper(helper), backend="chunkc", options=OPTIONS)
    assert f"{helper.__name__} (" in refusal(call)


def test_so_is_one_of_which_a_whole_graph_is_asked() -> None:
    call = torch.compile(scaled, backend="chunkc", options=OPTIONS, fullgraph=True)
    for kind in KINDS:
        call(X, kind)
    with pytest.raises(chunkc.UnsupportedError, match="recompile_limit"):
        call(X, ANOTHER)


def test_a_module_of_torch_nn_compiled_in_place_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.compile(backend="chunkc", options=OPTIONS, dynamic=False)
    for length in (2, 3, 4):
        model(torch.ones(length, 8))
    assert refusal(lambda x: model(x.expand(5, 2, 8))).startswith("Sequential.forward (")
