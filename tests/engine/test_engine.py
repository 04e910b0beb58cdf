"""An engine: both loops beside plain PyTorch, mixed precision, skipped steps, and what it goes on from."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import EPS, LR, Masters, assert_close, assert_same, config, engine, plain, small_model, weights
from harness import TRACING_NBYTES, limited
from optim_models import BUDGET_NBYTES, batch, is_managed, states

import chunkc
from chunkc.runtime.device import cpu_allocator

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
second_tier = pytest.mark.second_tier


def test_patrickstars_loop() -> None:
    model, optimizer = engine()
    with limited(BUDGET_NBYTES):
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(step))
            model.backward(loss)
            optimizer.step()
    assert is_managed(model.module.layers[0].weight)
    assert_close(weights(model), plain(3))


def test_deepspeeds_loop() -> None:
    """It accumulates by itself, clips, advances the schedule and forgets gradients."""
    model, optimizer = chunkc.initialize_engine(
        small_model(),
        config=config(gradient_accumulation_steps=3, gradient_clipping=0.05, train_micro_batch_size_per_gpu=2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    boundaries = []
    with limited(BUDGET_NBYTES):
        for step in range(6):
            loss = model(batch(step))
            model.backward(loss)
            boundaries.append(model.is_gradient_accumulation_boundary())
            model.step()
    assert boundaries == [False, False, True] * 2
    assert_close(weights(model), plain(2, accumulate=3, clip=0.05, scheduled=True))
    assert all(p.grad is None for p in model.parameters())
    assert (model.global_steps, model.micro_steps, model.skipped_steps) == (2, 6, 0)
    assert (model.train_batch_size(), model.train_micro_batch_size_per_gpu(), model.global_samples) == (6, 2, 12)
    assert model.get_lr() == [LR / 4]
    assert model.get_global_grad_norm() > 0
    assert optimizer is model.optimizer


@second_tier
def test_a_boundary_can_be_forced() -> None:
    model, _ = engine(gradient_accumulation_steps=3)
    before = weights(model)
    for step, is_boundary in enumerate((False, True)):
        model.set_gradient_accumulation_boundary(is_boundary)
        model.backward(model(batch(step)))
        model.step()
        assert (model.global_steps == 1) == is_boundary
    assert not torch.equal(weights(model)[0], before[0])


@second_tier
def test_patrickstars_loop_with_accumulation_is_refused_where_it_would_be_wrong() -> None:
    model, optimizer = engine(gradient_accumulation_steps=2)
    before = weights(model)
    model.backward(model(batch()))
    with pytest.raises(chunkc.UnsupportedError, match=r"gradient_accumulation_steps is 2.*engine.step\(\)"):
        optimizer.step()
    assert_same(weights(model), before)
    model.backward(model(batch(1)))
    optimizer.step()
    assert_close(weights(model), plain(1, accumulate=2))


def test_fp16_with_a_static_scale() -> None:
    model, _ = engine(fp16={"enabled": True, "loss_scale": 256})
    norms = []
    with limited(BUDGET_NBYTES):
        for step in range(3):
            model.backward(model(batch(step, torch.float16)))
            model.step()
            norms.append(model.get_global_grad_norm())
    reference, expected = Masters(torch.float16), []
    for step in range(3):
        (reference.model(batch(step, torch.float16)) * 256).backward()
        expected.append(reference.step(256))
    assert model.module.layers[0].weight.dtype == torch.float16
    assert_close(weights(model), weights(reference.model), rtol=1e-3)
    assert norms == pytest.approx(expected, rel=1e-3)


@second_tier
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_clipping_happens_in_fp32_inside_the_update(dtype: str) -> None:
    model, _ = engine(gradient_clipping=0.02, **{dtype: {"enabled": True}}, optimizer=config()["optimizer"])
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    reference = Masters(torch_dtype)
    if dtype == "fp16":
        model.loss_scaler.loss_scale = 64.0
    for step in range(3):
        x, scale = batch(step, torch_dtype), model.loss_scale
        model.backward(model(x))
        model.step()
        (reference.model(x) * scale).backward()
        assert model.get_global_grad_norm() == pytest.approx(reference.step(scale, 0.02), rel=1e-2)
    assert model.skipped_steps == 0
    read_nbytes = chunkc.report(model.module).gradients_read_nbytes
    assert 0 < read_nbytes <= sum(p.nbytes for p in model.parameters()), "of the first step alone"
    assert_close(weights(model), weights(reference.model), rtol=1e-2 if dtype == "bf16" else 1e-3, atol=1e-4)


@second_tier
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lamb"])
def test_a_skipped_step_leaves_everything_as_it_was(kind: str) -> None:
    """But for the scale: parameters, states, steps and the schedule stay."""
    model, optimizer = engine(
        optimizer={"type": kind, "params": {"lr": LR}},
        fp16={"enabled": True, "initial_scale_power": 30, "hysteresis": 1, "loss_scale_window": 2},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 4}},
    )
    scales, rates, applied = [], [], []
    for step in range(30):
        before, states_before = weights(model), states(model.module, optimizer)
        model.backward(model(batch(step, torch.float16)))
        model.step()
        applied.append(model.was_step_applied())
        if not applied[-1]:
            assert_same(weights(model), before)
            after = states(model.module, optimizer)
            assert all(torch.equal(after[name], value) for name, value in states_before.items())
        scales.append(model.loss_scale)
        rates.append(model.get_lr()[0])
    assert not applied[0]
    assert any(applied)
    num_skipped = applied.count(False)
    assert (model.global_steps, model.skipped_steps) == (30, num_skipped)
    assert model.lr_scheduler.last_epoch == 30 - num_skipped
    first = applied.index(True)
    assert scales[:first] == [2.0 ** (29 - k) for k in range(first)]
    assert rates[:first] == [0.0] * first


@second_tier
@pytest.mark.parametrize("checks", [True, False])
def test_bf16_skips_what_is_not_finite(checks: bool) -> None:
    model, _ = engine(bf16={"enabled": True, "check_grad_overflow": checks})
    before = weights(model)
    model.backward(model(batch(0, torch.bfloat16)) * float("inf"))
    model.step()
    assert model.was_step_applied() != checks
    assert all(bool(p.isfinite().all()) for p in model.parameters()) == checks
    if checks:
        assert_same(weights(model), before)


@second_tier
def test_a_norm_that_overflows_is_no_overflow() -> None:
    """In bf16 squares of finite gradients may be too large for fp32."""
    model, _ = engine(bf16={"enabled": True})
    model.backward(model(batch(0, torch.bfloat16)) * 1e25)
    model.step()
    assert model.was_step_applied()


@second_tier
def test_fp16_casts_inputs_as_patrickstar_does() -> None:
    kept: Any = {"fp16": {"enabled": True, "loss_scale": 8}}
    model, _ = engine(**kept, use_cpu_embedding=False)
    assert torch.isfinite(model(batch()))  # fp32
    model, _ = engine(**kept)
    with pytest.raises(RuntimeError, match="dtype"):
        model(batch())
    kept["fp16"]["auto_cast"] = True
    model, _ = engine(**kept)
    assert torch.isfinite(model(batch()))


@second_tier
def test_autocast() -> None:
    room = config()["chunkc"] | {"memory_budget": 700_000}  # a bf16 product's scratch depends on the threads
    model, _ = engine(torch_autocast={"enabled": True, "dtype": "bfloat16"}, chunkc=room)
    reference = small_model()
    for step in range(2):
        loss = model(batch(step))
        with torch.autocast("cpu", torch.bfloat16):
            expected = reference(batch(step))
        assert_close([loss], [expected]) if step == 0 else None
        model.backward(loss)
        model.step()
    assert model.module.layers[0].weight.dtype == torch.float32


@second_tier
def test_state_goes_on_in_a_new_engine(tmp_path: Path) -> None:
    """Weights under the model's own names, the optimizer's states, schedule and scale."""
    changes: dict[str, Any] = {
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 9}},
    }

    def train(model: Any, steps: range) -> None:
        for step in steps:
            model.backward(model(batch(step, torch.float16)))
            model.step()

    def parts(model: Any) -> list[Any]:
        return [model, model.optimizer, model.lr_scheduler, model.loss_scaler]

    model, _ = engine(**changes)
    train(model, range(4))
    torch.save([part.state_dict() for part in parts(model)], tmp_path / "checkpoint.pt")
    train(model, range(4, 8))
    again, _ = engine(**changes)
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert list(saved[0]) == list(small_model().state_dict())
    for part, state in zip(parts(again), saved):
        part.load_state_dict(state)
    train(again, range(4, 8))
    assert_same(weights(again), weights(model))
    assert again.loss_scale == model.loss_scale
    assert again.get_lr() == model.get_lr()


@second_tier
def test_a_schedule_that_takes_a_metric() -> None:
    model, _ = chunkc.initialize_engine(
        small_model,
        -1,
        config(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    )
    rates = []
    for metrics in (1.0, 2.0, 0.5, 3.0):
        model.backward(model(batch()))
        model.step(lr_kwargs={"metrics": metrics})
        rates.append(model.get_lr()[0])
    assert rates == [LR, LR / 2, LR / 2, LR / 4]


@second_tier
def test_updates_in_the_backward_wait_for_the_last_micro_batch() -> None:
    params = {"lr": LR, "eps": EPS, "update_on": "cpu", "overlap": "backward"}
    model, _ = engine(optimizer={"type": "AdamW", "params": params}, gradient_accumulation_steps=2)
    for step in range(6):
        model.backward(model(batch(step)))
        model.step()
    assert_close(weights(model), plain(3, accumulate=2))
    with pytest.raises(chunkc.OptionsError, match='overlap="backward"'):
        engine(optimizer={"type": "AdamW", "params": params}, gradient_clipping=1.0)


@second_tier
def test_the_model_shows_through() -> None:
    model, _ = engine()
    assert model.layers is model.module.layers
    with pytest.raises(AttributeError, match=r"no 'save_checkpoint': use chunkc\.Checkpoint"):
        _ = model.save_checkpoint
    with pytest.raises(AttributeError, match="no 'colour'"):
        _ = model.colour
    model.eval()
    with torch.no_grad():
        value = model(batch())
    assert_close([value], [small_model()(batch())])
    assert not model.module.training


@second_tier
def test_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, _ = engine(steps_per_print=2, wall_clock_breakdown=True)
    for step in range(4):
        model.backward(model(batch(step)))
        model.step()
    lines = [r.getMessage() for r in caplog.records]
    assert [line for line in lines if line.startswith("step 2, 0 skipped")]
    assert len([line for line in lines if line.startswith("seconds since: forward")]) == 2


# ---------------------------------------------------------------- what users of offloading systems complain about


@second_tier
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_out_of_memory_in_a_warm_up_though_training_would_fit(precision: str) -> None:
    """There is no warm-up: the first step is inside the budget, with the norm that a loss scale and clipping need."""
    cpu_allocator.install()
    gc.collect()
    foreign = cpu_allocator.current_nbytes()
    changes: dict[str, Any] = {"gradient_clipping": 0.5}
    if precision != "fp32":
        changes[precision] = {"enabled": True}
    model, _ = engine(**changes)
    dtype = model.config.dtype or torch.float32
    for step in range(3):
        limit = foreign + BUDGET_NBYTES + (TRACING_NBYTES if step == 0 else 0)
        with cpu_allocator.hard_limit(None if step == 0 else limit):
            model.backward(model(batch(step, dtype)))
            model.step()
        report = chunkc.report(model.module)
        assert report.measured_peak_nbytes - foreign <= report.predicted_peak_nbytes <= BUDGET_NBYTES


@second_tier
def test_wrong_gradients_are_found_only_as_nan() -> None:
    """Nothing is updated with gradients that are not finite, and at the smallest loss scale that is an error."""
    model, _ = engine(fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1})
    before = weights(model)
    for _ in range(2):
        model.backward(model(batch(0, torch.float16)) * float("nan"))
        if model.loss_scale > 1:
            model.step()
            assert not model.was_step_applied()
    with pytest.raises(chunkc.ChunkcError, match="gradients overflow"):
        model.step()
    assert_same(weights(model), before)
