"""Fill the `"auto"` values of a configuration, as the Trainer of transformers does for DeepSpeed.

The argument for each key is that of `HfTrainerDeepSpeedConfig.trainer_config_process` and `trainer_config_finalize`
(`transformers/integrations/deepspeed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chunkc.engine.keys import AUTO
from chunkc.ir.errors import OptionsError
from chunkc.ir.text import short

_FROM_ARGUMENTS: Mapping[str, Callable[[Any], object]] = {
    "train_micro_batch_size_per_gpu": lambda args: args.per_device_train_batch_size,
    "gradient_accumulation_steps": lambda args: args.gradient_accumulation_steps,
    "train_batch_size": lambda args: (
        args.per_device_train_batch_size * args.gradient_accumulation_steps * getattr(args, "world_size", 1)
    ),
    "gradient_clipping": lambda args: args.max_grad_norm,
    "optimizer.params.lr": lambda args: args.learning_rate,
    "optimizer.params.betas": lambda args: [args.adam_beta1, args.adam_beta2],
    "optimizer.params.eps": lambda args: args.adam_epsilon,
    "optimizer.params.weight_decay": lambda args: args.weight_decay,
    "scheduler.params.warmup_min_lr": lambda args: 0.0,
    "scheduler.params.warmup_max_lr": lambda args: args.learning_rate,
    "scheduler.params.total_num_steps": lambda args: args.max_steps if args.max_steps > 0 else AUTO,
    "scheduler.params.warmup_num_steps": lambda args: (
        max(1, args.get_warmup_steps(args.max_steps)) if args.max_steps > 0 or args.warmup_steps >= 1 else AUTO
    ),
    "fp16.enabled": lambda args: args.fp16 or args.fp16_full_eval,
    "bf16.enabled": lambda args: args.bf16 or args.bf16_full_eval,
}


def filled(config: Mapping[str, Any], source: object = None) -> dict[str, Any]:
    """Return a copy of the configuration with known values in place of `"auto"`.

    Without a value from the source, `scheduler.params.warmup_min_lr` becomes 0, one of fp16 and bf16 is disabled if the
    other is enabled, and batch sizes and `gradient_accumulation_steps` are removed, as if not given. Other `"auto"`
    values remain, and are refused where their section is checked.

    Args:
        source: `transformers.TrainingArguments`, or a mapping from dotted names to values.

    Raises:
        OptionsError: the source is neither.
    """
    values = _values_of(source)
    found = _replaced(config, values, "")
    for one, other in (("fp16", "bf16"), ("bf16", "fp16")):
        section, rest = found.get(one), found.get(other)
        if isinstance(section, Mapping) and section.get("enabled") == AUTO and _is_on(rest):
            found[one] = {**section, "enabled": False}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if found.get(key) == AUTO:
            del found[key]
    return found


def _is_on(section: object) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _values_of(source: object) -> Callable[[str], object]:
    if source is None or isinstance(source, Mapping):
        return {"scheduler.params.warmup_min_lr": 0.0, **(source or {})}.get
    if not hasattr(source, "per_device_train_batch_size"):
        raise OptionsError(
            f"auto is {short(source)}; allowed: TrainingArguments of transformers, or a dict of values by dotted names "
            'such as {"optimizer.params.lr": 3e-4}'
        )
    return lambda name: _FROM_ARGUMENTS[name](source) if name in _FROM_ARGUMENTS else None


def _replaced(section: Mapping[str, Any], value_of: Callable[[str], object], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            value = _replaced(value, value_of, f"{name}.")
        elif isinstance(value, str) and value == AUTO and (known := value_of(name)) is not None:
            value = known
        found[key] = value
    return found
