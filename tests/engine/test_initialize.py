"""`chunkc.initialize_engine`: what it takes, what it makes of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import EPS, LR, assert_close, assert_same, config, engine, plain, small_model, take_steps, weights
from optim_models import batch, is_managed
from torch import nn

import chunkc
from chunkc.engine import DynamicLossScaler
from chunkc.runtime.storage.unassigned import unassigned_memory_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
second_tier = pytest.mark.second_tier


@second_tier
def test_groups_and_optimizers_of_ones_own() -> None:
    model = small_model()
    groups = [
        {"params": [layer.weight for layer in model.layers]},
        {"params": [layer.bias for layer in model.layers], "weight_decay": 0.5},
    ]
    made, optimizer = chunkc.initialize_engine(lambda: model, config=config(), model_parameters=groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]
    assert made.module is model

    torch._dynamo.reset()
    changed = config()
    del changed["optimizer"]
    made, optimizer = chunkc.initialize_engine(
        small_model, config=changed, optimizer=lambda params: torch.optim.AdamW(params, LR, eps=EPS, weight_decay=0.0)
    )
    take_steps(made, range(2))
    assert_close(weights(made), plain(2))


def test_keys_without_effect_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, Any] = {"zero_optimization": {"overlap_comm": True}, "prescale_gradients": True}
    for _ in range(2):
        engine(**changes)
    (record,) = [r for r in caplog.records if "without effect" in r.getMessage()]
    assert "zero_optimization.overlap_comm" in record.getMessage()
    assert "prescale_gradients (the plan decides what processes exchange" in record.getMessage()


def test_what_several_processes_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(chunkc.UnsupportedError, match="2 processes cannot build a model at home: set release_after"):
        engine(release_after_init=True)


@second_tier
def test_what_cannot_be_is_refused() -> None:
    no_optimizer = config()
    del no_optimizer["optimizer"]
    with pytest.raises(chunkc.OptionsError, match='has no "optimizer"'):
        chunkc.initialize_engine(small_model, 0, no_optimizer)
    with pytest.raises(chunkc.OptionsError, match="needs a configuration"):
        chunkc.initialize_engine(small_model)
    with pytest.raises(chunkc.OptionsError, match=r"must return a torch\.nn\.Module"):
        chunkc.initialize_engine(lambda: 3, 0, config())  # type: ignore[arg-type,return-value]
    with pytest.raises(chunkc.OptionsError, match="fp32 masters"):
        chunkc.initialize_engine(
            small_model, 0, no_optimizer | {"bf16": {"enabled": True}}, optimizer=torch.optim.AdamW
        )
    model, optimizer = engine()
    with pytest.raises(chunkc.UnsupportedError, match="a loss of one element"):
        model.backward(torch.zeros(3, requires_grad=True))
    with pytest.raises(chunkc.UnsupportedError, match="closure"):
        optimizer.step(lambda: 0.0)


@second_tier
def test_the_scaler_of_an_engine_is_deepspeeds() -> None:
    model, _ = engine(fp16={"enabled": True})
    assert model.loss_scaler == DynamicLossScaler(65536.0, window=1000, min_scale=1.0, hysteresis=2)


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(chunkc.OptionsError, match="give initialize_engine the model itself"):
        chunkc.initialize_engine(torch.compile(small_model(), backend="chunkc"), 0, config())


# ---------------------------------------------------------------- loops around an engine


@second_tier
def test_files_of_an_engine_are_those_of_its_model(tmp_path: Path) -> None:
    model, optimizer = engine()
    take_steps(model, range(1))
    with chunkc.Checkpoint(tmp_path / "checkpoints", model=model, optimizer=optimizer) as ck:
        ck.save(1)
    chunkc.save(model, tmp_path / "saved")
    again, other = engine()
    assert chunkc.Checkpoint(tmp_path / "checkpoints", model=again.module, optimizer=other).load_latest() == 1
    assert_same(weights(again), weights(model))
    for loaded in (small_model(), engine()[0]):
        assert chunkc.load(loaded, tmp_path / "saved") == ([], [])
        assert_same(weights(loaded), weights(model))


@second_tier
def test_gradients_that_no_optimizer_has_are_told_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    trained = list(model.layers[-1].parameters())
    made, _ = chunkc.initialize_engine(model, 0, config(), model_parameters=trained)
    assert "6 parameters" in caplog.text
    assert "layers.0.weight" in caplog.text
    assert "requires_grad_(False)" in caplog.text
    for forget in (made.step, made.zero_grad):
        made.backward(made(batch()))
        assert all(p.grad is not None for p in model.parameters())
        forget()
        assert all(p.grad is None for p in model.parameters())


def test_a_schedule_that_needs_a_metric_says_so_before_anything_changes() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    model, optimizer = chunkc.initialize_engine(small_model, 0, config(), lr_scheduler=plateau)
    before = weights(model)
    for step in (model.step, optimizer.step):
        model.backward(model(batch()))
        with pytest.raises(chunkc.UnsupportedError, match=r"engine\.step\(lr_kwargs=\{'metrics': "):
            step()
        assert_same(weights(model), before)
    assert model.global_steps == model.micro_steps == 0
    rates = []
    for metrics in (1.0, 2.0, 0.5, 3.0):
        model.step(lr_kwargs={"metrics": metrics})
        rates.append(model.get_lr()[0])
        model.backward(model(batch()))
    assert (model.global_steps, rates) == (4, [LR, LR / 2, LR / 2, LR / 4])


def test_a_loop_that_calls_no_compiled_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = engine()
    take_steps(model, range(1))
    assert "was not called" not in caplog.text
    torch._dynamo.reset()
    model, _ = engine()
    for step in range(2):
        loss = (model.layers[0](batch(step)) - 1).square().mean()  # a part of the model, by itself
        model.backward(loss)
        model.step()
    assert caplog.text.count("was not called") == 1
    assert "outside of the memory budget" in caplog.text


@pytest.mark.parametrize("by_the_engine", [False, True])
def test_a_model_that_is_built_at_home_is_cast_there(by_the_engine: bool, tmp_path: Path) -> None:
    """Built so by the user, or as `release_after_init` says."""

    def build() -> nn.Module:
        with chunkc.init(home=f"disk:{tmp_path}"):
            return small_model()

    given = config(release_after_init=by_the_engine, bf16={"enabled": True})
    given["chunkc"] = given["chunkc"] | {"home": f"disk:{tmp_path}"}
    model, _ = chunkc.initialize_engine(small_model if by_the_engine else build, 0, given)
    large = [p for p in model.parameters() if p.nbytes >= 4096]
    assert large
    for p in large:
        unassigned_memory = unassigned_memory_of(p)
        assert unassigned_memory.home == f"disk:{tmp_path}"
    assert_same(weights(model), weights(small_model().bfloat16()))
    take_steps(model, range(1), torch.bfloat16)
    assert is_managed(large[0])


def test_release_after_init_needs_what_builds_the_model() -> None:
    with pytest.raises(chunkc.OptionsError, match=r"release_after_init.*function"):
        chunkc.initialize_engine(small_model(), 0, config(release_after_init=True))


def test_a_cpu_embedding_means_nothing_where_the_cpu_computes(caplog: pytest.LogCaptureFixture) -> None:
    engine(use_cpu_embedding=True)
    assert "use_cpu_embedding (the CPU computes anyway)" in caplog.text
