"""The suite `budget`: what is compared, what counts as a failure, arithmetic of the bound."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from fake_subject import FakeSubject
from measuring.context import Context, Progress
from measuring.subject_process import DoesNotFit, OutOfMemory, SubjectFailed, TimedOut, Unavailable
from models import families
from models.families import ModelChoice
from peers import systems
from peers.specs import (
    CHUNKC,
    CHUNKC_RANKS,
    DDP,
    DEEPSPEED,
    FSDP2,
    FSDP2_RANKS,
    PLAIN,
    TORCHAO,
    SubjectSpec,
)
from peers.subject import Trainer
from suites import budget, least_step_time
from suites.budget import Case, Outcome

from chunkc.ir.hardware import CPU
from chunkc.ir.links import host_links

TINY = ModelChoice("tiny-1", 16, "float32")
CONTEXT = Context(is_small=True, device="cpu", show=lambda *_: None)


def _outcome(system: str, *losses: float) -> Outcome:
    return Outcome(system, losses=list(losses))


def test_parameters_of_matrix_products():
    gpt = families.sizes(ModelChoice("gpt-1b", 1024))
    assert (
        gpt.num_parameters - gpt.num_matmul_parameters == 1024 * 2048 + 20 * 13 * 2048 + 2 * 2048
    )  # vectors, positions
    llama = families.sizes(ModelChoice("llama3-8b", 64))
    assert llama.num_parameters == 8_030_261_248
    assert llama.num_parameters - llama.num_matmul_parameters == 128_256 * 4096 + 65 * 4096
    theirs = families.sizes(ModelChoice("hf-llama3-8b", 64))
    assert (theirs.num_parameters, theirs.num_matmul_parameters) == (llama.num_parameters, llama.num_matmul_parameters)
    tied = families.sizes(ModelChoice("hf-qwen3-4b", 64))
    assert tied.num_matmul_parameters > 0.999 * tied.num_parameters


@pytest.mark.parametrize("name", ["tiny-1", "hf-tiny"])
def test_models_of_one_name_are_equal_whatever_else(name: str):
    model = ModelChoice(name, 16, "float32")
    torch.manual_seed(1)
    first = families.build(model)
    torch.manual_seed(2)
    second = families.build(model, is_checkpointed=True)
    x = torch.randint(families.vocabulary(model), (2, 16))
    losses = [module(x, x) for module in (first, second)]
    assert torch.equal(*losses)
    assert 5 < losses[0].item() < 6  # log(256) is 5.5
    weights = [p for p in first.parameters() if p.dim() == 2]
    assert all(weight.unique(dim=0).shape == weight.shape for weight in weights)
    assert all(0.015 < weight.std().item() < 0.025 for weight in weights)


def test_bound_where_all_fits_is_arithmetic():
    sizes = families.sizes(TINY)
    bound = least_step_time.lower_bound(sizes, TINY, 2, 10**9, CPU, "cpu")
    assert bound.limiting == "compute"
    assert bound.step_s == pytest.approx(sizes.flops_per_step(2, 16) / CPU.fp32_flops_per_s)
    assert bound.to_device_nbytes == bound.to_home_nbytes == 0


def test_bound_of_the_links_on_a_cpu():
    sizes = replace(families.sizes(TINY), num_parameters=1000)
    bound = least_step_time.lower_bound(sizes, TINY, 1, 1600, CPU, "cpu")  # 100 stay; 400 stay between the passes
    assert bound.to_device_nbytes == 900 * 4 + 600 * 4 + 900 * 8
    assert bound.to_home_nbytes == 900 * (8 + 4)
    assert bound.cpu_update_s == 0


def test_updates_are_shared_where_that_is_quickest():
    sizes = replace(families.sizes(TINY), num_parameters=10**9)
    model = replace(TINY, dtype="bfloat16")
    machine = replace(
        CPU,
        kind="cuda",
        links=host_links(5e10, 5e10),
        both_links_bytes_per_s=None,
        cpu_update_bytes_per_s=1e11,
        bf16_flops_per_s=1e15,
    )
    bound = least_step_time.lower_bound(sizes, model, 1, 1, machine, "cuda")
    assert bound.link_s == pytest.approx(bound.cpu_update_s, rel=0.02)
    only_cpu = replace(machine, cpu_update_bytes_per_s=1e15)
    bound = least_step_time.lower_bound(sizes, model, 1, 1, only_cpu, "cuda")
    assert (bound.to_device_nbytes, bound.to_home_nbytes) == pytest.approx((4e9, 2e9), rel=1e-6)


@pytest.mark.parametrize("budget_nbytes", [1, 2**26, 31 * 2**26, 2**31 + 17, 10**11 + 1])
def test_a_limit_leaves_the_budget_that_it_was_made_for(budget_nbytes: int):
    assert budget.plan_budget("cpu", budget.limit_for("cpu", budget_nbytes)) == budget_nbytes
    planned_nbytes = budget.plan_budget("cuda", budget.limit_for("cuda", budget_nbytes))
    assert 0 <= planned_nbytes - budget_nbytes <= 1


@pytest.mark.parametrize(
    ("last_losses", "noted", "failed"),
    [
        ((2.0, 2.0001, None), [], []),
        ((2.0, 2.0, 2.5), [FSDP2], []),
        ((2.5, 2.0, 2.0), None, [CHUNKC]),
        ((float("nan"), 2.0, 2.0), None, [CHUNKC]),
    ],
)
def test_who_trains_otherwise_is_noted_and_chunkc_alone_fails(last_losses, noted, failed):
    systems = (CHUNKC, PLAIN, FSDP2)
    outcomes = [_outcome(s, *([] if last is None else [3.0, last])) for s, last in zip(systems, last_losses)]
    budget.compare_losses(outcomes, 1e-3)
    assert [outcome.system for outcome in outcomes if outcome.is_failure] == failed
    assert noted is None or [outcome.system for outcome in outcomes if "losses differ by 0.5" in outcome.note] == noted
    assert noted != [] or not any(outcome.note for outcome in outcomes)


def test_bytes_above_the_budget_are_a_failure():
    outcomes = {CHUNKC: Outcome(CHUNKC, report={"measured_peak_nbytes": 101})}
    budget.check_promise(outcomes, 101)
    assert not outcomes[CHUNKC].is_failure
    budget.check_promise(outcomes, 100)
    assert outcomes[CHUNKC].is_failure


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [(DoesNotFit(9), False), (OutOfMemory("full"), True), (SubjectFailed("a\nb"), True), (Unavailable("no"), False)],
)
def test_what_counts_as_a_failure(error: Exception, is_failure: bool):
    for system in (CHUNKC, PLAIN):
        outcome = Outcome(system)
        with budget.Guard(outcome, CONTEXT):
            raise error
        assert outcome.note
        assert outcome.is_failure == (is_failure and system == CHUNKC)
    with pytest.raises(KeyError), budget.Guard(Outcome(CHUNKC), CONTEXT):  # the harness's own mistake
        raise KeyError


class _FakeProcess(FakeSubject):
    """Some systems do not get far."""

    wrong: ClassVar[dict[str, Exception]] = {}
    late: ClassVar[int] = 1000
    """The call of `step` from which on there is no answer."""
    order: ClassVar[list[str]] = []

    def begin_step(self, num_steps: int) -> dict[str, float]:
        system = self.spec.system
        self.order.append(system)
        if system in self.wrong:
            raise self.wrong[system]
        if self.num_calls >= self.late:
            self.exit_note = "it is still there"
            raise TimedOut("no answer within 1 s:\nlog")
        counters = {"to_device_nbytes": 10.0, "to_home_nbytes": 5.0, "wait_s": 0.0, "host_s": 0.02}
        return counters | {"num_instructions": 4.0} if system == CHUNKC else {}


def test_a_case_goes_on_without_those_that_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budget, "SubjectProcess", _FakeProcess)
    monkeypatch.setattr(budget, "unavailable", lambda system: "not there" if system == DEEPSPEED else "")
    monkeypatch.setattr(_FakeProcess, "wrong", {PLAIN: OutOfMemory("full"), TORCHAO: SubjectFailed("x\nbroke")})
    monkeypatch.setattr(_FakeProcess, "order", [])
    case = Case(TINY, 2, 1000)
    size = budget.Size((case,), num_rounds=2, num_steps=2, codegen="eager")
    names = [CHUNKC, FSDP2, PLAIN, DEEPSPEED, TORCHAO]
    *_, outcomes = budget.states_of_case(CONTEXT, case, size, names, Path(), Progress(CONTEXT.show, 9))
    notes = {outcome.system: outcome.note for outcome in outcomes}
    assert notes == {
        CHUNKC: "",
        FSDP2: "",
        PLAIN: "out of memory: full",
        DEEPSPEED: "not there",
        TORCHAO: "failed: broke",
    }
    turn = budget.NUM_SETTLING_STEPS + size.num_steps
    turns = [name for name in (CHUNKC, FSDP2, FSDP2, CHUNKC) for _ in range(turn)]
    assert _FakeProcess.order == [CHUNKC, FSDP2, PLAIN, TORCHAO, *turns]
    section = budget._section(CONTEXT, case, size, outcomes, CPU).to_json()
    chunkc, fsdp2, *others = section["rows"]
    assert chunkc["metrics"]["measured to predicted"]["median"] == 0.9
    assert chunkc["metrics"]["of bound"]["median"] < 1
    assert fsdp2["metrics"]["time to chunkc's"]["median"] == 1
    assert all("step" not in row["metrics"] for row in others)


@pytest.mark.parametrize(("late", "num_timed"), [(2, 0), (4, 1), (5, 2), (7, 3)])
def test_a_turn_that_crosses_the_deadline_loses_nothing(monkeypatch: pytest.MonkeyPatch, late: int, num_timed: int):
    """Steps are one call to warm up, then turns of one that is not timed and two that are; the `late`-th call hangs."""
    monkeypatch.setattr(budget, "SubjectProcess", _FakeProcess)
    monkeypatch.setattr(_FakeProcess, "late", late)
    case = Case(TINY, 2, 1000)
    size = budget.Size((case,), num_rounds=2, num_steps=2, codegen="eager")
    context = replace(CONTEXT, deadline_s=0.0)
    states = list(budget.states_of_case(context, case, size, [CHUNKC], Path(), Progress(CONTEXT.show, 9)))
    row = budget._section(context, case, size, states[-1], CPU).to_json()["rows"][0]
    assert row["note"] == ("the time was up; it is still there" if late < 5 else "")
    assert not row.get("is_failure")
    samples = row["metrics"]["step"]["samples"] if num_timed else []
    assert len(samples) == min(num_timed, 2)  # past the deadline, no second turn begins
    assert {name: row["metrics"][name]["median"] for name in ("measured peak", "predicted peak", "RAM")} == {
        "measured peak": 90,
        "predicted peak": 100,
        "RAM": 7,
    }
    assert budget._section(context, case, size, states[0], CPU).to_json()["rows"][0]["metrics"]["measured peak"]


def test_a_run_that_would_exhaust_the_ram_is_not_begun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budget, "available_ram_nbytes", lambda: 10**5)
    case = Case(TINY, 2, 1000)
    size = budget.Size((case,), num_rounds=1, num_steps=2)
    *_, outcomes = budget.states_of_case(CONTEXT, case, size, [CHUNKC], Path(), Progress(CONTEXT.show, 9))
    assert "GiB of RAM" in outcomes[0].note
    assert not outcomes[0].turns
    monkeypatch.setattr(budget, "available_ram_nbytes", lambda: 160 * 2**30)
    assert budget.host_forecast(FSDP2, 95 * 10**8) == ""  # 152e9 bytes of 171.8e9
    assert budget.host_forecast(FSDP2, 11 * 10**9) == "needs about 164 GiB of RAM, 160 are available"


def test_a_checkpointed_peer_and_chunkc_train_alike():
    options = {"memory_budget": 2**40, "codegen": "eager"}
    trainers = [
        Trainer(SubjectSpec(TINY, 2, system, options if system == CHUNKC else None, codegen="eager"))
        for system in (PLAIN, CHUNKC)
    ]
    losses = [[trainer.step(*batch)["loss"] for _, batch in zip(range(3), trainer.batches())] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert set(systems._MAKERS) == {*budget.SYSTEMS, CHUNKC_RANKS, DDP, FSDP2_RANKS}
