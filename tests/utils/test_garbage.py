"""The garbage collector does not start by itself while a graph is compiled or explained; then it is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from chunkc import compile as compilation
from chunkc.explaining import offline
from chunkc.explaining.explain import explain
from chunkc.tracing import build
from chunkc.utils.garbage import count_all_as_old, no_automatic_collection


@pytest.fixture(params=[True, False], ids=["on", "off"])
def was_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    gc.enable() if request.param else gc.disable()
    yield request.param
    gc.enable()


def test_it_is_as_it_was_afterwards(was_on: bool) -> None:
    with no_automatic_collection():
        assert not gc.isenabled()
        with no_automatic_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is was_on


def test_it_is_as_it_was_after_an_error(was_on: bool) -> None:
    with pytest.raises(KeyboardInterrupt), no_automatic_collection():
        raise KeyboardInterrupt
    assert gc.isenabled() is was_on


def test_it_waits_while_a_graph_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Builder(build.Builder):
        def described(self, *args: object, **kwargs: object) -> object:
            seen.append(gc.isenabled())
            return super().described(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(compilation, "Builder", Builder)
    model = nn.Linear(8, 8)
    torch.compile(model, backend="chunkc", options={"memory_budget": "1GiB", "codegen": "eager"})(torch.ones(2, 8))
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_it_waits_while_a_model_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    capture = offline.capture_graph
    monkeypatch.setattr(offline, "capture_graph", lambda *a, **k: seen.append(gc.isenabled()) or capture(*a, **k))
    explain(nn.Linear(8, 8), torch.ones(2, 8), memory_budget="1GiB")
    assert seen == [False]
    assert gc.isenabled()


def test_all_objects_count_as_old_but_for_those_that_are_frozen() -> None:
    with no_automatic_collection():
        gc.freeze()
        kept = [object()]
        try:
            count_all_as_old()
            assert any(each is kept for each in gc.get_objects(generation=0))
            assert gc.get_freeze_count() > 0
        finally:
            gc.unfreeze()
        count_all_as_old()
        assert gc.get_freeze_count() == 0
        assert any(each is kept for each in gc.get_objects(generation=2))
