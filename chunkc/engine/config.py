"""Read and check a configuration of DeepSpeed or PatrickStar: one frozen `EngineConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, StrictBool

from chunkc.engine.auto import filled
from chunkc.engine.keys import AUTO, PATRICKSTAR, check_refused, flattened, without_effect
from chunkc.engine.keys import BY_NAME as KEYS
from chunkc.engine.loss_scaler import DynamicLossScaler, LossScaler
from chunkc.engine.sections import Section, checked, left_open
from chunkc.ir.documents import parse_json, read_text
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.shards import ZeroStage
from chunkc.ir.text import short
from chunkc.options import MIN_CHUNK_NBYTES, parse_options

Config = Mapping[str, Any] | str | os.PathLike[str]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}


class Top(Section):
    """The keys that are in no section."""

    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    gradient_clipping: float = Field(0.0, ge=0)
    steps_per_print: PositiveInt = 10
    wall_clock_breakdown: StrictBool = False
    default_chunk_size: PositiveInt | None = None
    use_cpu_embedding: StrictBool = False
    release_after_init: StrictBool = False


class _Fp16(Section):
    enabled: StrictBool = False
    auto_cast: StrictBool | None = None
    loss_scale: float = Field(0.0, ge=0)
    initial_scale_power: int = Field(16, ge=0, le=126)
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: StrictBool = False
    min_loss_scale: PositiveFloat = 1.0


class _Bf16(Section):
    enabled: StrictBool = False
    check_grad_overflow: StrictBool = True


class _Autocast(Section):
    enabled: StrictBool = False
    dtype: Literal["bfloat16", "bf16", "torch.bfloat16", "float16", "fp16", "half", "torch.float16"] = "bfloat16"


class _Offload(Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None


class _Typed(Section):
    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class _Zero(Section):
    stage: Literal[0, 1, 2, 3] = 0
    cpu_offload: StrictBool = False


class _DataTypes(Section):
    grad_accum_dtype: Literal["fp32", "fp16", "bf16", "float32", "float16", "bfloat16"] | None = None


@dataclass(frozen=True)
class EngineConfig:
    """An engine's settings.

    Attributes:
        micro_batch_size: samples per call of one process; None: not given.
        accumulation_steps: calls of `Engine.step` per update.
        world_size: number of processes that train the model together.
        zero_stage: stage of ZeRO (see `chunkc.distribute`); None: the plan chooses.
        top: keys that are in no section, such as `gradient_clipping`, as they are given (see `chunkc.engine.keys`).
        dtype: of parameters and gradients; None: as the model is built.
        autocast: dtype of `torch.autocast` around the model; None: no autocast.
        casts_inputs: whether floating-point arguments of the model are cast to `dtype`.
        checks_overflow: whether a step with non-finite gradients is skipped.
        scaling: settings of the loss scale; None: the loss is not scaled.
        optimizer, scheduler: types and parameters; None: not given.
        update_on: device of updates, "cpu" or "device", if the optimizer's parameters do not set it.
        is_patrickstars: whether the configuration has keys of PatrickStar.
        device: device that the model computes on; None: the GPU of the local rank, else the CPU.
        options: options of the backend, for `torch.compile`.
        without_effect: keys that have no effect, by the reason.
    """

    micro_batch_size: int | None
    accumulation_steps: int
    world_size: int
    zero_stage: ZeroStage | None
    top: Top
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    casts_inputs: bool
    checks_overflow: bool
    scaling: _Fp16 | None
    optimizer: _Typed | None
    scheduler: _Typed | None
    update_on: str
    is_patrickstars: bool
    device: str | None
    options: Mapping[str, Any]
    without_effect: Mapping[str, list[str]]

    def loss_scaler(self) -> LossScaler:
        """Make a loss scaler: static, dynamic, or with a scale of 1 without `scaling`."""
        if self.scaling is None:
            return LossScaler(1.0)
        if self.scaling.loss_scale > 0:
            return LossScaler(self.scaling.loss_scale)
        return DynamicLossScaler(
            2.0**self.scaling.initial_scale_power,
            window=self.scaling.loss_scale_window,
            min_scale=self.scaling.min_loss_scale,
            hysteresis=self.scaling.hysteresis,
            consecutive=self.scaling.consecutive_hysteresis,
        )

    def compile_options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return a new options dictionary for `torch.compile`.

        Args:
            dtype: of most parameters; converts PatrickStar's chunk size from elements to bytes.
        """
        options = dict(self.options)
        if self.top.default_chunk_size is not None:
            options["chunk_size"] = max(self.top.default_chunk_size * dtype.itemsize, MIN_CHUNK_NBYTES)
        return options


def read_config(config: Config, auto: object = None, world_size: int = 1) -> EngineConfig:
    """Read and check a configuration.

    Args:
        config: a dictionary, or the path of a JSON file.
        auto: source of `"auto"` values, see `chunkc.engine.auto.filled`.
        world_size: number of processes that train the model together.

    Raises:
        OptionsError: a file cannot be read; a key is unknown, missing, `"auto"` without a value to fill in, has an
            invalid value, or conflicts with another key.
        UnsupportedError: a key asks for a feature that chunkc does not have.
    """
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        config = parse_json(read_text(path, what="configuration"), str(path))
    if not isinstance(config, Mapping):
        raise OptionsError(f"config is {short(config)}; allowed: a dict, or the path of a JSON file")
    found = filled(_renamed(config), auto)
    flat = dict(flattened(found))
    for name, value in flat.items():
        check_refused(name, value)
    asked = [name for name, value in flat.items() if value not in (None, False, 0, "", {}, [])]

    top = checked(Top, _section(flat, ""))
    fp16 = checked(_Fp16, _section(flat, "fp16"), "fp16")
    bf16 = checked(_Bf16, _section(flat, "bf16"), "bf16")
    if fp16.enabled and bf16.enabled:
        raise OptionsError("fp16.enabled and bf16.enabled are both true; choose one")
    dtype = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else None
    is_patrickstars = any(key in found for key in PATRICKSTAR)
    auto_cast = is_patrickstars if fp16.auto_cast is None else fp16.auto_cast
    device, options, update_on = _memory(flat, top.default_chunk_size)
    zero = checked(_Zero, _section(flat, "zero_optimization"), "zero_optimization")
    micro_batch_size, accumulation_steps = _batch(top, world_size)
    return EngineConfig(
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        world_size=world_size,
        zero_stage=zero.stage or None,
        top=top,
        dtype=dtype,
        autocast=_autocast(flat, dtype),
        casts_inputs=fp16.enabled and auto_cast,
        checks_overflow=fp16.enabled or (bf16.enabled and bf16.check_grad_overflow),
        scaling=fp16 if fp16.enabled else None,
        optimizer=_typed(flat, "optimizer"),
        scheduler=_typed(flat, "scheduler"),
        update_on=update_on,
        is_patrickstars=is_patrickstars,
        device=device,
        options=options,
        without_effect=without_effect(asked),
    )


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace older names of keys by newer ones."""
    found = dict(config)
    if "bfloat16" in found:
        found.setdefault("bf16", found.pop("bfloat16"))
    zero = found.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("cpu_offload") is True and not zero.get("offload_optimizer"):
        found["zero_optimization"] = {**zero, "offload_optimizer": {"device": "cpu"}}
    return found


def _section(flat: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the values of one section's used keys, by the last part of their names."""
    parts = {name: name.rpartition(".") for name in flat if KEYS[name].fate == "used"}
    return {last: flat[name] for name, (section, _, last) in parts.items() if section == path}


def _typed(flat: Mapping[str, Any], path: str) -> _Typed | None:
    values = _section(flat, path)
    if all(value is None for value in values.values()):
        return None
    return checked(_Typed, values, path)


def _batch(top: Top, world_size: int) -> tuple[int | None, int]:
    """Return the size of a micro-batch, if known, and the accumulation steps.

    Raises:
        OptionsError: the batch size is not their product with the number of processes.
    """
    whole, micro, steps = top.train_batch_size, top.train_micro_batch_size_per_gpu, top.gradient_accumulation_steps
    if whole is not None and micro is not None:
        steps = whole // (micro * world_size) if steps is None else steps
    steps = 1 if steps is None else steps
    if whole is not None and micro is None:
        micro = whole // (steps * world_size)
    if whole is not None and (micro is None or whole != micro * steps * world_size):
        raise OptionsError(
            f"train_batch_size is {whole}, which is not train_micro_batch_size_per_gpu ({micro}) times "
            f"gradient_accumulation_steps ({steps}) times the number of processes ({world_size})"
        )
    return micro, steps


def _autocast(flat: Mapping[str, Any], dtype: torch.dtype | None) -> torch.dtype | None:
    found = checked(_Autocast, _section(flat, "torch_autocast"), "torch_autocast")
    types = checked(_DataTypes, _section(flat, "data_types"), "data_types")
    if types.grad_accum_dtype is not None and _DTYPES[types.grad_accum_dtype] != (dtype or torch.float32):
        raise UnsupportedError(
            f"data_types.grad_accum_dtype is {types.grad_accum_dtype!r}, but gradients add up in the parameters' "
            "dtype; remove it, or train in that dtype"
        )
    if not found.enabled:
        return None
    if dtype is not None:
        raise OptionsError("torch_autocast is for fp32 parameters; choose one of torch_autocast, fp16 and bf16")
    if found.dtype not in ("bfloat16", "bf16", "torch.bfloat16"):
        raise UnsupportedError(
            f"torch_autocast.dtype is {found.dtype!r}, which needs a loss scale: use fp16, or bfloat16"
        )
    return torch.bfloat16


def _memory(flat: Mapping[str, Any], default_chunk_size: int | None) -> tuple[str | None, dict[str, Any], str]:
    """Return the device, the options for `torch.compile`, and the device of updates: "cpu" or "device"."""
    options = _section(flat, "chunkc")
    for name, value in options.items():
        if value == AUTO and name == "device":
            raise OptionsError(left_open("chunkc.device"))
    device = options.pop("device", None)
    if device is not None and not isinstance(device, str):
        raise OptionsError(f'chunkc.device is {short(device)}; allowed: "cpu", or a device such as "cuda"')
    if default_chunk_size is not None and "chunk_size" in options:
        raise OptionsError("default_chunk_size (elements) and chunkc.chunk_size (bytes) say the same; give one of them")
    offload = {
        what: checked(_Offload, _section(flat, f"zero_optimization.{what}"), f"zero_optimization.{what}")
        for what in ("offload_optimizer", "offload_param")
    }
    for what, holds in (("offload_optimizer", "states"), ("offload_param", "everything")):
        if offload[what].device == "nvme":
            if not offload[what].nvme_path:
                raise OptionsError(
                    f'zero_optimization.{what}.device is "nvme" without a directory: set nvme_path in the same section'
                )
            home = f"disk:{offload[what].nvme_path}"
            if options.get("home", home) != home:
                raise OptionsError(f"{options['home']!r} and {home!r} are two homes; there is one: see chunkc.home")
            options |= {"home": home, "disk_holds": holds}
    checked_options = parse_options(options)
    on_cpu = offload["offload_optimizer"].device == "cpu" and checked_options.home_kind == "cpu"
    return device, options, "cpu" if on_cpu else "device"
