"""Operators that chunkc has never seen, and code of Inductor's that it cannot read, as of a PyTorch that nobody has
checked yet, train inside the budget, and everybody who asks hears that it was a guess.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import torch
from harness import HUGE, assert_same_training, compile_case, refuse, session_of, train
from torch import Tensor, nn
from zoo import CASES, Case, floats

import chunkc
from chunkc.ir.estimates import EstimatedOperator
from chunkc.passes.memory.inductor import memory, wrapper_source
from chunkc.passes.memory.scratch import declared
from chunkc.torch_private import compile_cache, versions

NAME = "chunkc_unknown_tests::mix"
WIDTH, ROWS = 64, 48
MATRIX_NBYTES = ROWS * WIDTH * 4


def _mix(x: Tensor, weight: Tensor) -> Tensor:
    """Takes one more matrix of x's size inside."""
    return (x * 2).add_(x @ weight).mul_(0.25)


def _count(seen: Tensor, x: Tensor, last: Tensor) -> Tensor:
    seen.add_(1)
    last.copy_(x * 2)
    return x.sum()


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    """`mix` and its gradient."""
    with torch.library._scoped_library("chunkc_unknown_tests", "DEF") as library:
        for name, function in (("mix", _mix), ("mix_of_gradient", lambda g, weight: (g * 2).add_(g @ weight.t()) / 4)):
            library.define(f"{name}(Tensor x, Tensor weight) -> Tensor")
            library.impl(name, function, "CPU")
            library.impl(name, lambda x, weight: torch.empty_like(x), "Meta")
        operators = torch.ops.chunkc_unknown_tests

        def setup(ctx, inputs, output) -> None:
            ctx.save_for_backward(*inputs)

        def gradient(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return operators.mix_of_gradient(g, weight), x.t() @ g * 0.25

        library.define("count(Tensor(a!) seen, Tensor x, Tensor(b!) last) -> Tensor")
        library.impl("count", _count, "CPU")
        library.impl("count", lambda seen, x, last: x.new_empty(()), "Meta")
        torch.library.register_autograd(operators.mix.default, gradient, setup_context=setup, lib=library)
        yield
    for name in ("mix", "mix_of_gradient", "count"):
        declared._declared.pop(f"chunkc_unknown_tests::{name}", None)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.chunkc_unknown_tests.mix(x, self.weight)


class Mixer(nn.Module):
    """Three layers with an operator of its own between products, and an assertion on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Mix()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(x.isfinite().all(), "x is finite")
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


CASE = Case("mixer", Mixer, lambda seed: {"x": floats(seed, (ROWS, WIDTH))})


def test_the_report_and_the_explanation_list_it(capsys: pytest.CaptureFixture[str]) -> None:
    model, compiled = compile_case(CASE, memory_budget=HUGE, whole_graph="never")
    before = chunkc.explain(model, **CASE.batch(0))
    compiled(**CASE.batch(0)).backward()
    # mix: x, weight and the result; its gradient likewise
    nbytes = 2 * MATRIX_NBYTES + WIDTH * WIDTH * 4
    expected = (
        EstimatedOperator(NAME, "layers.0.2", nbytes),
        EstimatedOperator(f"{NAME}_of_gradient", "layers.2.2", nbytes),
    )
    report = chunkc.report(compiled)
    assert report.estimates == before.estimates == expected
    assert f"{NAME}, " in str(report)
    values = json.loads(json.dumps(before.to_dict()))
    assert values["estimates"][0] == {"operator": NAME, "module": "layers.0.2", "nbytes": nbytes}
    assert type(before).from_dict(values) == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_strict_refuses_before_anything_moves(codegen: str) -> None:
    model, compiled = compile_case(
        CASE, memory_budget=HUGE, codegen=codegen, strict=True, whole_graph="never", place=False
    )
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(
        chunkc.UnsupportedError, match=rf'{NAME} \(in layers\.0\.\d\) takes inside.*declare_scratch\("{NAME}"'
    ):
        compiled(**CASE.batch(0))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    with pytest.raises(chunkc.UnsupportedError, match=rf"{NAME} \(in layers\.0\.2\) takes inside, which strict"):
        chunkc.explain(model, **CASE.batch(0), strict=True, codegen=codegen)


def test_what_is_declared_is_no_guess(caplog: pytest.LogCaptureFixture) -> None:
    for name in (NAME, f"{NAME}_of_gradient"):
        chunkc.declare_scratch(name, lambda args, kwargs, outputs, num_threads: args[0].nbytes)
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        model, compiled = compile_case(CASE, memory_budget=HUGE, strict=True)
        compiled(**CASE.batch(0)).backward()
    assert not caplog.records
    assert session_of(model).estimates == ()
    assert chunkc.explain(model, **CASE.batch(0), strict=True).estimates == ()


def test_a_failing_assertion_still_fails() -> None:
    _, compiled = compile_case(CASE, memory_budget=HUGE)
    with pytest.raises(RuntimeError, match="x is finite"):
        compiled(torch.full((ROWS, WIDTH), float("nan")))


class Counting(nn.Module):
    """An operator that changes two buffers, of which one is a part of a larger one."""

    seen: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mix(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2 * ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        total = torch.ops.chunkc_unknown_tests.count(self.seen, x.detach(), self.last[:ROWS])
        return (self.layers[2](self.layers[1](x)) * self.last[:ROWS]).square().mean() * self.seen + total * 0


COUNTING = Case("counting", Counting, lambda seed: {"x": floats(seed, (ROWS, WIDTH))})


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_an_operator_may_change_what_it_is_given(codegen: str) -> None:
    seen: list[tuple[torch.Size, ...]] = []

    def takes(args, kwargs, outputs, num_threads) -> int:
        seen.append((args[0].shape, args[1].shape, outputs.shape))
        return 2 * args[1].nbytes

    chunkc.declare_scratch("chunkc_unknown_tests::count", takes)
    plain, (model, compiled) = COUNTING.build(0), compile_case(COUNTING, memory_budget=HUGE, codegen=codegen)
    for seed in range(2):
        torch.testing.assert_close(compiled(**COUNTING.batch(seed)), plain(**COUNTING.batch(seed)))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)
    assert set(seen) == {(torch.Size(()), torch.Size((ROWS, WIDTH)), torch.Size(()))}


@pytest.mark.parametrize(
    ("name", "codegen"),
    [("mixer", "eager"), ("counting", "eager"), pytest.param("mixer", "inductor", marks=pytest.mark.slow)],
)
def test_it_trains_inside_its_smallest_budget(name: str, codegen: str, caplog: pytest.LogCaptureFixture) -> None:
    case = {case.name: case for case in (CASE, COUNTING)}[name]
    budget_nbytes = refuse(case, memory_budget=1, codegen=codegen).minimum_nbytes
    wide = train(case, memory_budget=HUGE, codegen=codegen, limit=False, whole_graph="never")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        tight = train(case, memory_budget=budget_nbytes, codegen=codegen, whole_graph="never")  # a hard limit
    assert_same_training(tight, wide)
    assert tight.measured_peak_nbytes <= budget_nbytes
    if case is CASE:
        assert budget_nbytes < wide.predicted_peak_nbytes
        messages = [r.getMessage() for r in caplog.records if r.name.startswith("chunkc")]
        guessed = [m.split()[7] for m in messages if m.startswith("chunkc does not know how much memory")]
        assert guessed == [NAME, f"{NAME}_of_gradient"], messages
        assert "declare_scratch" in messages[0]
        assert '"strict": True' in messages[0]
        loss = CASE.build(0)(**CASE.batch(0)).detach()
        assert abs(float(loss) - float(wide.losses[0])) < 1e-5


# ---------------------------------------------------------------- code of Inductor's that is not read

FROZEN = CASES["frozen_mlp"]
UNREAD = "Inductor's code, which uses assert_size_stride"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are read off wrappers by this process: those that are kept depend on names, which the tests change."""
    monkeypatch.setattr(compile_cache, "is_on", lambda: False)


@pytest.fixture
def unknown_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said anything of the functions that look at tensors."""
    monkeypatch.setattr(memory, "CHECKS", frozenset())


@pytest.mark.second_tier
def test_it_trains_inside_its_smallest_budget_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = train(FROZEN, memory_budget=HUGE, codegen="inductor", limit=False, whole_graph="never")
    monkeypatch.setattr(memory, "CHECKS", frozenset())
    budget_nbytes = refuse(FROZEN, memory_budget=1, codegen="inductor").minimum_nbytes
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        tight = train(FROZEN, memory_budget=budget_nbytes, codegen="inductor", whole_graph="never")  # a hard limit
    assert_same_training(tight, read)
    assert tight.measured_peak_nbytes <= budget_nbytes
    warnings = {record.getMessage() for record in caplog.records if UNREAD in record.getMessage()}
    assert warnings
    assert all("all values of its graph at once" in text and '"codegen": "eager"' in text for text in warnings)


@pytest.mark.second_tier
@pytest.mark.usefixtures("unknown_checks")
def test_strict_refuses_and_the_report_and_the_explanation_list_it() -> None:
    model, compiled = compile_case(FROZEN, memory_budget=HUGE, codegen="inductor")
    compiled(**FROZEN.batch(0)).backward()
    explained = chunkc.explain(model, **FROZEN.batch(0), codegen="inductor")
    for estimates in (chunkc.report(compiled).estimates, explained.estimates):
        assert estimates
        assert all(estimate.operator.startswith(UNREAD) for estimate in estimates)
    _, strict = compile_case(FROZEN, memory_budget=HUGE, codegen="inductor", strict=True)
    with pytest.raises(chunkc.UnsupportedError, match=r'assert_size_stride.*strict=True refuses.*"codegen": "eager"'):
        strict(**FROZEN.batch(0))


def test_steps_of_inductor_that_changed_are_no_error_on_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*args: object) -> None:
        raise TypeError("lower() got an unexpected keyword argument")

    monkeypatch.setattr(wrapper_source, "generate_wrapper", changed)
    monkeypatch.setattr(wrapper_source, "newer_than_checked", lambda: None)
    model = FROZEN.build(0)
    with pytest.raises(chunkc.UnsupportedError, match=r"TypeError: lower\(\)"):
        chunkc.explain(model, **FROZEN.batch(0), codegen="inductor")
    monkeypatch.setattr(wrapper_source, "newer_than_checked", lambda: versions.newer_than_checked("2.99.0"))
    explained = chunkc.explain(model, **FROZEN.batch(0), codegen="inductor")
    assert {e.operator for e in explained.estimates} == {"Inductor's code, which has no function `call`"}


def test_a_newer_version_gets_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(versions, "newer_than_checked", lambda: "newer")
    versions.warn_if_newer.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="chunkc"):
            for _ in range(2):
                _, compiled = compile_case(FROZEN, memory_budget=HUGE, codegen="eager")
                assert torch.isfinite(compiled(**FROZEN.batch(0)))
    finally:
        versions.warn_if_newer.cache_clear()
    assert [record.getMessage() for record in caplog.records] == ["newer"]
