"""An engine: both loops beside plain PyTorch, mixed precision, skipped steps, and what it goes on from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    EPS,
    LR,
    PATRICKSTARS,
    Masters,
    assert_close,
    assert_same,
    config,
    engine,
    plain,
    small_model,
    take_steps,
    weights,
)
from harness import limited
from optim_models import BUDGET_NBYTES, batch, is_managed, states

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
second_tier = pytest.mark.second_tier


@pytest.mark.parametrize("in_half", [False, True])
def test_patrickstars_loop(in_half: bool) -> None:
    """In half precision with all keys of its README, and beside fp32 masters."""
    found, dtype = config(), torch.float32
    if in_half:
        dtype, params = torch.float16, found["optimizer"]["params"] | {"use_hybrid_adam": True}
        found |= PATRICKSTARS | {"optimizer": {"type": "Adam", "params": params}, "default_chunk_size": 128 * 128}
    model, optimizer = chunkc.initialize_engine(model_func=small_model, local_rank=0, config=found)
    with limited(BUDGET_NBYTES):
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(step, dtype))
            model.backward(loss)
            optimizer.step()
    assert is_managed(model.module.layers[0].weight)
    reference = Masters(dtype)
    for step in range(3):
        (reference.model(batch(step, dtype)) * model.loss_scale).backward()
        reference.step(model.loss_scale)
    assert_close(weights(model), weights(reference.model), rtol=1e-3 if in_half else 1e-4)


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


@pytest.mark.parametrize(
    ("precision", "keys", "clip", "rtol", "atol", "rel"),
    [
        ("fp16", {"loss_scale": 256}, 0.0, 1e-3, 2e-6, 1e-3),
        pytest.param("fp16", {"initial_scale_power": 6}, 0.02, 1e-3, 1e-4, 1e-2, marks=second_tier),
        pytest.param("bf16", {}, 0.02, 1e-2, 1e-4, 1e-2, marks=second_tier),
    ],
    ids=["static scale", "fp16", "bf16"],
)
def test_mixed_precision_is_that_of_a_plain_loop(
    precision: str, keys: dict[str, Any], clip: float, rtol: float, atol: float, rel: float
) -> None:
    """Scaled and clipped in fp32 inside the update; the first step, which nothing warms up, is in the budget, too."""
    model, _ = engine(gradient_clipping=clip, **{precision: {"enabled": True, **keys}})
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    norms, scales = [], []
    with limited(BUDGET_NBYTES):
        for step in range(3):
            scales.append(model.loss_scale)
            model.backward(model(batch(step, dtype)))
            model.step()
            norms.append(model.get_global_grad_norm())
    reference, expected = Masters(dtype), []
    for step, scale in enumerate(scales):
        (reference.model(batch(step, dtype)) * scale).backward()
        expected.append(reference.step(scale, clip))
    assert model.module.layers[0].weight.dtype == dtype
    assert model.skipped_steps == 0
    assert norms == pytest.approx(expected, rel=rel)
    assert_close(weights(model), weights(reference.model), rtol=rtol, atol=atol)
    report = chunkc.report(model.module)
    assert report.predicted_peak_nbytes <= BUDGET_NBYTES
    if clip:
        assert 0 < report.gradients_read_nbytes <= sum(p.nbytes for p in model.parameters()), "of the first step alone"


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

    def parts(model: Any) -> list[Any]:
        return [model, model.optimizer, model.lr_scheduler, model.loss_scaler]

    model, _ = engine(**changes)
    take_steps(model, range(4), torch.float16)
    torch.save([part.state_dict() for part in parts(model)], tmp_path / "checkpoint.pt")
    take_steps(model, range(4, 8), torch.float16)
    again, _ = engine(**changes)
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert list(saved[0]) == list(small_model().state_dict())
    for part, state in zip(parts(again), saved):
        part.load_state_dict(state)
    take_steps(again, range(4, 8), torch.float16)
    assert_same(weights(again), weights(model))
    assert again.loss_scale == model.loss_scale
    assert again.get_lr() == model.get_lr()


@second_tier
def test_updates_in_the_backward_wait_for_the_last_micro_batch() -> None:
    params = {"lr": LR, "eps": EPS, "update_on": "cpu", "overlap": "backward"}
    model, _ = engine(optimizer={"type": "AdamW", "params": params}, gradient_accumulation_steps=2)
    take_steps(model, range(6))
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
    take_steps(model, range(4))
    lines = [r.getMessage() for r in caplog.records]
    assert [line for line in lines if line.startswith("step 2, 0 skipped")]
    assert len([line for line in lines if line.startswith("seconds since: forward")]) == 2


# ---------------------------------------------------------------- what users of offloading systems complain about


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
