"""What Dynamo no longer compiles is refused, with the limit's name; what it has compiled goes on."""

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


@pytest.mark.quick(1)
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_models_with_other_numbers_share_a_compilation(codegen: str) -> None:
    for scale in (0.5, 1.5, 2.5, 3.5, 4.5):
        model = Numbered(scale)
        y = torch.compile(model, backend="chunkc", options=OPTIONS | {"codegen": codegen})(X)
        y.sum().backward()
        torch.testing.assert_close(y, model.linear(X) * scale)
        torch.testing.assert_close(model.linear.bias.grad, torch.full((8,), 2 * scale))
