"""Configurations of DeepSpeed's and PatrickStar's, as users have them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import PATRICKSTARS

import chunkc
from chunkc.engine.config import read_config
from chunkc.engine.keys import KEYS, flattened

FILE = Path(__file__).parents[1] / "golden" / "ds_config_zero3.json"
HUGGING_FACE = json.loads(FILE.read_text())
"""The ZeRO-3 file of transformers' documentation."""


def arguments(**changes: Any) -> SimpleNamespace:
    """What is read of `TrainingArguments`."""
    values = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "max_steps": 100,
        "learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "weight_decay": 0.1,
        "warmup_steps": 0, "get_warmup_steps": lambda num_steps: 7,
        "fp16": False, "fp16_full_eval": False, "bf16": True, "bf16_full_eval": False,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def test_the_file_of_transformers_documentation() -> None:
    for config in (FILE, str(FILE), HUGGING_FACE):
        found = read_config(config, arguments())
        assert found.dtype == torch.bfloat16
        assert found.scaling is None
        assert (found.micro_batch_size, found.accumulation_steps, found.top.gradient_clipping) == (4, 2, 1.0)
        assert found.optimizer.params == {"lr": 5e-5, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}
        assert found.scheduler.params["total_num_steps"] == 100
        assert found.scheduler.params["warmup_num_steps"] == 7
        assert found.update_on == "cpu"
        told = {name for names in found.without_effect.values() for name in names}
        assert found.zero_stage == 3
        assert {"zero_optimization.overlap_comm", "zero_optimization.offload_optimizer.pin_memory"} <= told
        assert "zero_optimization.offload_optimizer.device" not in told


@pytest.mark.second_tier
def test_real_training_arguments_fill_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    given = transformers.TrainingArguments(
        str(tmp_path), max_steps=50, learning_rate=2e-4, warmup_steps=5, bf16=True, use_cpu=True, report_to=[]
    )
    found = read_config(HUGGING_FACE, given)
    assert found.dtype == torch.bfloat16
    assert found.optimizer.params["lr"] == 2e-4
    assert found.scheduler.params["warmup_num_steps"] == 5


def test_patrickstars_readme() -> None:
    found = read_config(PATRICKSTARS)
    assert found.dtype == torch.float16
    assert found.casts_inputs
    assert found.loss_scaler().loss_scale == 256
    assert found.compile_options(torch.float16) == {"chunk_size": 128 << 20}
    assert found.compile_options(torch.float32) == {"chunk_size": 256 << 20}


def test_auto_that_nobody_fills_is_refused_with_what_to_say() -> None:
    with pytest.raises(chunkc.OptionsError, match=r'gradient_clipping is "auto".*auto=.*TrainingArguments'):
        read_config(HUGGING_FACE)
    with pytest.raises(chunkc.OptionsError, match=r'fp16.enabled is "auto"'):
        read_config(HUGGING_FACE, {"gradient_clipping": 1.0})


def test_auto_from_a_dictionary() -> None:
    values = {"gradient_clipping": 0.5, "bf16.enabled": True, "optimizer.params.lr": 1e-3}
    found = read_config(HUGGING_FACE, values)
    assert found.dtype == torch.bfloat16, "fp16 is off where bf16 is on"
    assert found.top.gradient_clipping == 0.5
    assert found.accumulation_steps == 1
    with pytest.raises(chunkc.OptionsError, match=r"auto is 3; allowed"):
        read_config(HUGGING_FACE, 3)


@pytest.mark.parametrize(
    ("given", "micro", "steps"),
    [
        ({}, None, 1),
        ({"train_batch_size": 12}, 12, 1),
        ({"train_micro_batch_size_per_gpu": 3}, 3, 1),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, 3, 4),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 4, 3),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3}, 4, 3),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, 3, 2),
    ],
)
def test_two_batch_keys_give_the_third(given: dict[str, Any], micro: int | None, steps: int) -> None:
    found = read_config(given)
    assert (found.micro_batch_size, found.accumulation_steps) == (micro, steps)


def test_processes_share_a_batch() -> None:
    for given, micro, steps in (
        ({"train_batch_size": 12}, 6, 1),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, 3, 2),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 2, 3),
    ):
        found = read_config(given, world_size=2)
        assert (found.micro_batch_size, found.accumulation_steps, found.world_size) == (micro, steps, 2)
    with pytest.raises(chunkc.OptionsError, match=r"\(3\) times gradient_accumulation_steps \(1\) times .* \(2\)"):
        read_config({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 3}, world_size=2)
    stages = [read_config({"zero_optimization": {"stage": stage}}).zero_stage for stage in (0, 1, 2, 3)]
    assert stages == [None, 1, 2, 3]
    with pytest.raises(chunkc.OptionsError, match=r"zero_optimization\.stage is 4"):
        read_config({"zero_optimization": {"stage": 4}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gradient_cliping": 1},
            "unknown key 'gradient_cliping' in the configuration; did you mean 'gradient_clipping'?",
        ),
        ({"fp16": {"enable": True}}, "did you mean 'fp16.enabled'?"),
        ({"zero_optimization": {"stge": 3}}, "did you mean 'zero_optimization.stage'?"),
        ({"initial_scale_power": 8}, "did you mean 'fp16.initial_scale_power'?"),
        ({"client": {"mem_traser": {}}}, "did you mean 'client.mem_tracer'?"),
        ({"chunkc": {"memory": "6GiB"}}, "did you mean 'chunkc.memory_budget'?"),
        ({"chunkc": {"memory_budget": "much"}}, "option 'memory_budget' is 'much'"),
        ({"fp16": True}, "fp16 is True; allowed: a section of keys"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled is 'yes'"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale is -1"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "choose one"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "train_batch_size is 10",
        ),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "train_batch_size is 10"),
        ({"optimizer": {"params": {}}}, "optimizer.type: Field required"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme_path"),
        ({"default_chunk_size": 1000, "chunkc": {"chunk_size": "1MiB"}}, "give one of them"),
        ([], "config is []; allowed: a dict"),
    ],
)
def test_mistakes_are_one_line(config: Any, message: str) -> None:
    with pytest.raises(chunkc.OptionsError) as caught:
        read_config(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [key.name for key in KEYS if key.fate == "refused"])
def test_what_chunkc_does_not_do_is_refused_with_what_to_do(name: str) -> None:
    def config(value: object) -> dict[str, Any]:
        for part in reversed(name.split(".")):
            value = {part: value}
        assert isinstance(value, dict)
        return value

    key = next(key for key in KEYS if key.name == name)
    asks = {"enabled": True} if not key.harmless else 7
    with pytest.raises(chunkc.UnsupportedError) as caught:
        read_config(config(asks))
    assert name in str(caught.value)
    assert key.note in str(caught.value)
    for harmless in (None, *(key.harmless or (False, {}, {"enabled": False}))):
        read_config(config(harmless))


@pytest.mark.parametrize("key", [key for key in KEYS if key.fate == "no effect"], ids=lambda key: key.name)
def test_what_has_no_effect_is_accepted_and_told(key: Any) -> None:
    value: Any = "auto"
    for part in reversed(key.name.split(".")):
        value = {part: value}
    assert read_config(value).without_effect == {key.note: [key.name]}


def test_where_data_lives_follows_offload(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    states = read_config({"zero_optimization": {"offload_optimizer": nvme}})
    assert (states.options["home"], states.options["disk_holds"]) == (f"disk:{tmp_path}", "states")
    everything = read_config({"zero_optimization": {"offload_optimizer": nvme, "offload_param": nvme}})
    assert everything.options["disk_holds"] == "everything"
    assert everything.update_on == "device"
    old = read_config({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert old.update_on == "cpu"


def test_an_older_name_of_bf16() -> None:
    assert read_config({"bfloat16": {"enabled": True}}).dtype == torch.bfloat16


def test_autocast() -> None:
    assert read_config({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}).autocast == torch.bfloat16
    assert read_config({"torch_autocast": {"enabled": False}}).autocast is None
    with pytest.raises(chunkc.UnsupportedError, match="fp16"):
        read_config({"torch_autocast": {"enabled": True, "dtype": "float16"}})
    with pytest.raises(chunkc.OptionsError, match="choose one"):
        read_config({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}})


def test_gradients_add_up_in_the_parameters_dtype() -> None:
    read_config({"data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": True}})
    with pytest.raises(chunkc.UnsupportedError, match="grad_accum_dtype"):
        read_config({"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}})


def test_a_configuration_is_not_changed() -> None:
    before = json.dumps(HUGGING_FACE)
    read_config(HUGGING_FACE, arguments())
    assert json.dumps(HUGGING_FACE) == before


def test_keys_have_one_fate() -> None:
    names = [key.name for key in KEYS]
    assert len(names) == len(set(names))
    assert dict(flattened({"fp16": None})) == {}
