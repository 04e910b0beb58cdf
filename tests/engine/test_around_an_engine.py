"""Loops around an engine: its files and checkpoints, what is told once, what is refused before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import assert_same, config, engine, small_model, weights
from optim_models import batch, is_managed
from torch import nn

import chunkc
from chunkc.runtime.storage.unassigned import unassigned_memory_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
second_tier = pytest.mark.second_tier


@second_tier
def test_files_of_an_engine_are_those_of_its_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        settings = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
        return transformers.GPT2LMHeadModel(settings)

    model, _ = chunkc.initialize_engine(build, 0, config())
    chunkc.save(model, tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found) is type(model.module)
    assert_same(weights(found), weights(model.module))
    again, _ = chunkc.initialize_engine(build, 0, config())
    assert chunkc.load(again, tmp_path) == ([], [])
    assert_same(weights(again), weights(model))


@second_tier
def test_a_checkpoint_of_an_engine_is_one_of_its_model(tmp_path: Path) -> None:
    model, optimizer = engine()
    model.backward(model(batch()))
    model.step()
    with chunkc.Checkpoint(tmp_path, model=model, optimizer=optimizer) as ck:
        ck.save(1)
    again, other = engine()
    assert chunkc.Checkpoint(tmp_path, model=again.module, optimizer=other).load_latest() == 1
    assert_same(weights(again), weights(model))


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
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    model, optimizer = chunkc.initialize_engine(small_model, 0, config(), lr_scheduler=plateau)
    before = weights(model)
    for step in (model.step, optimizer.step):
        model.backward(model(batch()))
        with pytest.raises(chunkc.UnsupportedError, match=r"engine\.step\(lr_kwargs=\{'metrics': "):
            step()
        assert_same(weights(model), before)
    assert model.global_steps == model.micro_steps == 0
    model.step(lr_kwargs={"metrics": 1.0})
    assert model.global_steps == 1


def test_a_loop_that_calls_no_compiled_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = engine()
    for step in range(2):
        loss = (model.layers[0](batch(step)) - 1).square().mean()  # a part of the model, by itself
        model.backward(loss)
        model.step()
    assert caplog.text.count("was not called") == 1
    assert "outside of the memory budget" in caplog.text


@second_tier
def test_a_loop_that_calls_the_model_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = engine()
    model.backward(model(batch()))
    model.step()
    assert "was not called" not in caplog.text


def test_release_after_init_builds_the_model_at_home(tmp_path: Path) -> None:
    given = config(release_after_init=True, bf16={"enabled": True})
    given["chunkc"] = given["chunkc"] | {"home": f"disk:{tmp_path}"}
    model, _ = chunkc.initialize_engine(small_model, 0, given)
    large = [p for p in model.parameters() if p.nbytes >= 4096]
    assert large
    for p in large:
        unassigned_memory = unassigned_memory_of(p)
        assert unassigned_memory is not None
        assert unassigned_memory.home == f"disk:{tmp_path}"
    plain_model = small_model().bfloat16()
    assert_same(weights(model), weights(plain_model))
    model.backward(model(batch(0, torch.bfloat16)))
    model.step()
    assert is_managed(large[0])


def test_release_after_init_needs_what_builds_the_model() -> None:
    with pytest.raises(chunkc.OptionsError, match=r"release_after_init.*function"):
        chunkc.initialize_engine(small_model(), 0, config(release_after_init=True))


def test_a_cpu_embedding_means_nothing_where_the_cpu_computes(caplog: pytest.LogCaptureFixture) -> None:
    engine(use_cpu_embedding=True)
    assert "use_cpu_embedding (the CPU computes anyway)" in caplog.text
