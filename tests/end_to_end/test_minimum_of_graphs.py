"""The smallest budget of a model of several graphs: what errors name on the way, what `explain` says at once."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HUGE, TINY, adamw, array, differences, gradients, home_of, take_step, weights
from plain_modules import FeedForward
from torch import Tensor, nn
from zoo import LADDER

import chunkc
from chunkc.cli.command import DOES_NOT_FIT, main
from chunkc.explaining import whole_step
from chunkc.explaining.explain import minimum_budget
from chunkc.ir.errors import BudgetError
from chunkc.ir.units import format_nbytes

WIDTH, ROWS = 32, 24


class Blocks(nn.Module):
    """Blocks, and a head that makes the loss; subclasses say where Dynamo breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(FeedForward(WIDTH) for _ in range(4)), nn.Linear(WIDTH, 2 * WIDTH)

    def loss(self, x: Tensor) -> Tensor:
        return self.head(x).exp().sum(-1).log().mean()


class Loop(Blocks):
    """One graph for all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.loss(x)


class Unrolled(Blocks):
    """Each graph has code of its own, and the last one the loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[2](self.blocks[1](x))
        torch._dynamo.graph_break()
        return self.loss(self.blocks[3](x))


class IdleExperts(Blocks):
    """Of four experts two take part."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in (0, 2):
            x = self.blocks[expert](x)
            torch._dynamo.graph_break()
        return self.loss(x)


class Recurrent(Blocks):
    """An `nn.LSTM` between what is captured: Dynamo leaves it alone unless it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x, _ = self.lstm(x.view(2, -1, WIDTH))
        return self.loss(self.blocks[3](self.blocks[2](x)))


class Pair(nn.Module):
    """An encoder and a decoder, each compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(FeedForward(WIDTH), FeedForward(WIDTH))
        self.decoder = nn.Sequential(FeedForward(WIDTH), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x)).exp().sum(-1).log().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "loop": Loop,
    "unrolled": Unrolled,
    "idle experts": IdleExperts,
    "recurrent": Recurrent,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def options(budget_nbytes: int, codegen: str = "eager") -> dict[str, Any]:
    return {"memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "never"}


def train(
    name: str, budget_nbytes: int, *, codegen: str = "eager", accumulated: int = 1, evaluated: bool = False
) -> chunkc.Report:
    """Three steps of an ordinary loop, which keeps batch and loss until there are others."""
    torch._dynamo.reset()
    model = build(name)
    compiled = torch.compile(model, backend="chunkc", options=options(budget_nbytes, codegen))
    optimizer = adamw(model.parameters())
    for step in range(3):
        for part in range(accumulated):
            x = batch(10 * step + part)
            loss = compiled(x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluated:
            model.eval()
            with torch.no_grad():
                compiled(batch(step))
            model.train()
    return chunkc.report(model)


@cache
def explained(name: str, codegen: str = "eager", allow_rnn: bool = False) -> int:
    with torch._dynamo.config.patch(allow_rnn=allow_rnn):
        return minimum_budget(build(name), batch(0), memory_budget=1, codegen=codegen)


def refusals(train: Callable[[int], Any]) -> list[BudgetError]:
    """The errors of training at what the error before named, until it works."""
    found: list[BudgetError] = []
    for _ in range(10):
        try:
            train(found[-1].minimum_nbytes if found else TINY)
            return found
        except BudgetError as error:
            found.append(error.with_traceback(None))
    raise AssertionError("no error has named a budget that works")


NUM_GRAPHS = {"loop": 5, "unrolled": 3, "idle experts": 3, "recurrent": 5}


def _untraced(*args: Any, **kwargs: Any) -> int:
    raise RuntimeError("the model's code does not run on fake tensors")


SECOND, SLOW = pytest.mark.second_tier, pytest.mark.slow
CASES = [
    ("unrolled", "eager", False),
    *(pytest.param(name, "eager", False, marks=SECOND) for name in ("recurrent", "loop")),
    pytest.param("idle experts", "eager", False, marks=SLOW),
    pytest.param("recurrent", "eager", True, marks=SLOW),
    *(pytest.param(name, "inductor", False, marks=SLOW) for name in MODELS),
]


@pytest.mark.parametrize(("name", "codegen", "allow_rnn"), CASES)
def test_what_explain_says_works_at_the_first_try_and_one_byte_less_does_not(
    name: str, codegen: str, allow_rnn: bool
) -> None:
    """With a smaller budget in between, what is known is still known."""
    minimum = explained(name, codegen, allow_rnn)
    with torch._dynamo.config.patch(allow_rnn=allow_rnn):
        report = train(name, minimum, codegen=codegen, accumulated=2, evaluated=True)
        assert report.predicted_peak_nbytes <= minimum
        torch._dynamo.reset()
        model = build(name)
        for budget in (minimum - 1, TINY, minimum - 1):
            with pytest.raises(BudgetError) as refused:
                torch.compile(model, backend="chunkc", options=options(budget, codegen))(batch(0)).backward()
            assert refused.value.minimum_nbytes == minimum
            assert not (allow_rnn and refused.value.covers)  # it is one graph
            del refused
        assert home_of(next(model.parameters()))[0].minimum_nbytes == minimum


def test_the_command_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    returned = f"sys.modules[{__name__!r}].Unrolled(), (sys.modules[{__name__!r}].batch(0),)"
    (tmp_path / "model.py").write_text(f"import sys\n\ndef build():\n    return {returned}\n")
    command = ["explain", f"{tmp_path}/model.py:build", "--memory-budget", "1KiB", "--hardware", "cpu"]
    assert main([*command, "--format", "json"]) == DOES_NOT_FIT
    assert json.loads(capsys.readouterr().out)["minimum_budget_nbytes"] == explained("unrolled")


def test_what_no_graph_takes_is_named_at_once() -> None:
    """By the first error and by the report, with its bytes."""
    model = build("recurrent")
    nbytes = sum(p.nbytes for p in model.lstm.parameters())
    with pytest.raises(BudgetError) as refused:
        torch.compile(model, backend="chunkc", options=options(TINY))(batch(0))
    assert refused.value.outside == f"lstm.weight_ih_l0 and 3 more ({format_nbytes(nbytes)})"
    assert f"No graph takes {refused.value.outside}: outside of memory_budget" in str(refused.value)
    report = train("recurrent", refused.value.minimum_nbytes)
    assert report.outside == tuple(f"lstm.{name}" for name, _ in model.lstm.named_parameters())
    assert report.outside_nbytes == nbytes
    assert f"in no graph        lstm.weight_ih_l0 and 3 more, {format_nbytes(nbytes)}" in str(report).splitlines()


def test_parts_compiled_apart() -> None:
    """They share a budget by their options."""

    def train_pair(budget_nbytes: int) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, shared = Pair(), options(budget_nbytes)
        model.encoder.compile(backend="chunkc", options=shared)
        model.decoder.compile(backend="chunkc", options=shared)
        optimizer = adamw(model.parameters())
        for step in range(2):
            take_step(model(batch(step)), optimizer)

    named = [error.minimum_nbytes for error in refusals(train_pair)]
    assert len(named) == 2  # one for each of the two: a step of it is traced
    assert named == sorted(named)
    torch.manual_seed(0)
    whole = Pair()
    whole.encoder, whole.decoder = torch.compile(whole.encoder), torch.compile(whole.decoder)
    minimum = minimum_budget(whole, batch(0), memory_budget=1)  # the loss is in a graph, too
    assert named[-1] <= minimum
    train_pair(minimum)


# --- an evaluation that comes first ---


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["one graph", "unrolled"])
def test_a_first_evaluation_s_error_names_its_own_minimum_and_training_s(name: str) -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return build(name) if name in MODELS else nn.Sequential(FeedForward(WIDTH), nn.Dropout(0.1), FeedForward(WIDTH))

    def evaluate(budget_nbytes: int) -> tuple[nn.Module, Callable[..., Tensor]]:
        torch._dynamo.reset()
        model = built().eval()
        call = torch.compile(model, backend="chunkc", options=options(budget_nbytes))
        with torch.no_grad():
            call(batch(0))
        return model, call

    (error,) = refusals(evaluate)
    assert (error.evaluates, error.covers) == (True, "")
    training_nbytes = minimum_budget(built(), batch(0), memory_budget=1)
    assert error.training_nbytes == training_nbytes > error.minimum_nbytes
    assert "for an evaluation, which makes no gradients; a training step with this batch needs" in str(error)
    assert f"{training_nbytes:,} bytes" in str(error)
    with pytest.raises(BudgetError) as refused:
        evaluate(error.minimum_nbytes - 1)
    assert refused.value.minimum_nbytes == error.minimum_nbytes
    model, call = evaluate(training_nbytes)
    take_step(call(batch(1)).square().mean(), adamw(model.train().parameters()))


def test_what_can_only_be_evaluated_has_one_minimum() -> None:
    torch._dynamo.reset()
    model = build("unrolled").requires_grad_(False)
    with pytest.raises(BudgetError) as refused:
        torch.compile(model, backend="chunkc", options=options(TINY))(batch(0))
    assert not refused.value.evaluates
    assert "evaluation" not in str(refused.value)


def test_a_block_that_is_compiled_in_place_names_the_minimum_of_itself_alone() -> None:
    """Each of several blocks is a module of its own: what is traced is not the model's step."""
    torch._dynamo.reset()
    model = nn.Sequential(FeedForward(WIDTH), FeedForward(WIDTH), FeedForward(WIDTH))
    for block in model:
        block.compile(backend="chunkc", options=options(TINY))
    with pytest.raises(BudgetError) as refused:
        model(batch(0))
    assert refused.value.num_others == 2
    assert "for a training step of this compiled module and of those before it; 2 other modules" in str(refused.value)


def test_a_compiled_function_is_not_traced() -> None:
    """Whose arguments nobody knows; its error says what it covers."""
    torch._dynamo.reset()
    model = build("unrolled")
    with pytest.raises(BudgetError) as refused:
        torch.compile(lambda x: model(x), backend="chunkc", options=options(TINY))(batch(0))
    assert refused.value.training_nbytes is None
    assert "what comes later may need more" in str(refused.value)


def test_a_call_that_has_grown_says_how_to_leave_room() -> None:
    """As in longer episodes: made first, the largest call names what all need."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = FeedForward(WIDTH)
    (first,) = refusals(lambda budget: _episodes(model, budget, ROWS))
    assert not first.grown
    with pytest.raises(BudgetError, match="make the largest one first: its minimum is enough for all") as refused:
        _episodes(model, first.minimum_nbytes, ROWS, 2 * ROWS)
    assert refused.value.grown
    torch._dynamo.reset()
    (largest,) = refusals(lambda budget: _episodes(FeedForward(WIDTH), budget, 4 * ROWS))
    _episodes(FeedForward(WIDTH), largest.minimum_nbytes, 4 * ROWS, ROWS, 2 * ROWS, 3 * ROWS)


def _episodes(model: nn.Module, budget_nbytes: int, *rows: int) -> None:
    call = torch.compile(model, backend="chunkc", options=options(budget_nbytes), dynamic=False)
    for num_rows in rows:
        call(torch.ones(num_rows, WIDTH)).square().mean().backward()


# --- a loop that catches the error goes on ---


@cache
def uninterrupted(name: str) -> list[Any]:
    return went_on(name, HUGE, lambda model, error: pytest.fail(str(error)))[0]


def went_on(
    name: str, budget_nbytes: int, mend: Callable[[nn.Module, BudgetError], int]
) -> tuple[list[Any], chunkc.Report]:
    """Losses, gradients and weights of three steps; where a budget is refused, `mend` says the next."""
    torch._dynamo.reset()
    model = build(name)
    compiled = torch.compile(model, backend="chunkc", options=options(budget_nbytes))
    optimizer = adamw(model.parameters())
    losses, grads = [], []
    while len(losses) < 3:
        try:
            loss = compiled(batch(len(losses)))
            loss.backward()
        except BudgetError as error:
            optimizer.zero_grad()
            compiled = torch.compile(model, backend="chunkc", options=options(mend(model, error.with_traceback(None))))
            continue
        losses.append(array(loss))
        grads.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [losses, grads, weights(model)], chunkc.report(model)


@pytest.mark.parametrize(
    ("name", "traced"),
    [
        ("unrolled", True),
        pytest.param("unrolled", False, marks=SECOND),
        pytest.param("recurrent", True, marks=SECOND),
        *(pytest.param(name, True, marks=SLOW) for name in ("loop", "idle experts")),
    ],
)
def test_refused_the_model_is_as_it_was_and_goes_on_with_what_errors_name(
    name: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error names what the whole step needs. Untraced, later graphs refuse, too: there are no more errors
    than graphs, since each names all that was known."""
    if not traced:
        monkeypatch.setattr(whole_step, "minimum_of_call", _untraced)
    named: list[int] = []
    modules = {module for module, _ in build(name).named_modules()}

    def mend(model: nn.Module, error: BudgetError) -> int:
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not differences(weights(model), weights(build(name)))
        assert error.module in modules
        if traced:
            assert (error.training_nbytes, error.covers) == (error.minimum_nbytes, "the graph compiled so far")
            assert "for a whole training step of the compiled module, which was traced" in str(error)
        else:
            assert "compiled so far: what comes later may need more" in str(error)
        named.append(error.minimum_nbytes)
        return error.minimum_nbytes

    found, report = went_on(name, TINY, mend)
    assert named == sorted(set(named))
    assert len(named) == (1 if traced else NUM_GRAPHS[name])
    assert named[-1] == explained(name) == report.minimum_budget_nbytes
    assert not differences(found, uninterrupted(name))


@pytest.mark.quick(1, second=2)
@pytest.mark.parametrize("share", [1.0, 0.9, 0.8, 0.7], ids=str)
def test_a_refused_step_holds_nothing_once_its_error_is_gone(share: float) -> None:
    """Whichever graph refuses, when it is compiled or when it runs."""
    torch._dynamo.reset()
    model = build("unrolled")
    least = minimum_budget(build("unrolled"), batch(0), memory_budget=1, activations="keep")
    kept = options(int(least * share) - 1) | {"activations": "keep"}
    compiled = torch.compile(model, backend="chunkc", options=kept)
    for _ in range(2):
        with pytest.raises(BudgetError):
            compiled(batch(0)).backward()
        gc.collect()
        session = home_of(model.blocks[0].up.weight)[0]
        assert session.live.nbytes() == 0


def test_memory_that_is_freed_lets_the_same_model_go_on() -> None:
    torch._dynamo.reset()
    model = build("unrolled")
    compiled = torch.compile(model, backend="chunkc", options=options(explained("unrolled")))
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(3):
        if step == 1:
            kept = compiled(batch(7))  # a forward that waits for its backward holds all that it saved
            before = weights(model)
            with pytest.raises(BudgetError, match="values of earlier calls that are still held"):
                compiled(batch(1))
            assert all(parameter.grad is None for parameter in model.parameters())
            assert not differences(weights(model), before)
            del kept
        loss = compiled(batch(step))
        loss.backward()
        losses.append(array(loss))
        optimizer.step()
        optimizer.zero_grad()
    expected_losses, _, expected_weights = uninterrupted("unrolled")
    assert not differences([losses, weights(model)], [expected_losses, expected_weights])


@pytest.mark.quick(1)
@pytest.mark.parametrize("activations", ["offload", "keep"])
def test_of_a_model_called_twice_the_reported_minimum_works_at_the_first_try(activations: str) -> None:
    """The first call's output is held until the second has run; it is gone, but planned for, in the backward."""

    def reported(budget: int) -> int:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        options = {"memory_budget": budget, "codegen": "eager", "activations": activations}
        compiled = torch.compile(model, backend="chunkc", options=options)
        x = torch.ones(512, 64)
        (compiled(x) - compiled(x + 1)).square().mean().backward()
        return chunkc.report(model).minimum_budget_nbytes

    minimum = reported(HUGE)
    assert reported(minimum) == minimum
    with pytest.raises(BudgetError):
        reported(minimum - 1)


def test_recurrent_models_that_are_left_alone_say_so() -> None:
    """Dynamo leaves them alone unless it is told to trace them."""
    case = LADDER["lstm"]
    with pytest.raises(chunkc.UnsupportedError, match=r"captured no graph: .*allow_rnn = True"):
        minimum_budget(case.build(), **case.batch(0))
