"""List every key of a configuration, and its treatment.

Keys and meanings are those of DeepSpeed 0.19 (https://www.deepspeed.ai/docs/config-json/) and of PatrickStar 0.4.6. A
dotted name is a key inside of sections. A section that is listed as a whole (`aio`) may hold any keys; in others, keys
that are not listed are errors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.text import one_line, short
from chunkc.options import Options

AUTO = "auto"
"""Value of a key that `chunkc.engine.auto` fills in."""

PARAMS = ("optimizer.params", "scheduler.params")
"""Sections with keys that depend on `type`; `optimizers` and `schedules` check them."""


@dataclass(frozen=True)
class Key:
    """The treatment of a key.

    Attributes:
        name: dotted name.
        fate: `"used"`; `"no effect"`: accepted, and logged once; `"refused"`: an error, except with a harmless value.
        note: effect of the key, reason that it has none, or advice.
        harmless: values of a refused key that are accepted, besides null. If empty: false values, and a section with
            `"enabled": false`.
    """

    name: str
    fate: Literal["used", "no effect", "refused"]
    note: str
    harmless: tuple[object, ...] = ()


def _used(name: str, note: str) -> Key:
    return Key(name, "used", note)


def _no_effect(note: str, *names: str) -> list[Key]:
    return [Key(name, "no effect", note) for name in names]


def _refused(name: str, note: str, *harmless: object) -> Key:
    return Key(name, "refused", note, harmless)


def _inside(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


_PLANNED = "the plan decides it"
_EXCHANGES = "the plan decides what processes exchange"
_OWN_IO = "chunkc does its own I/O"

KEYS: tuple[Key, ...] = (
    _used("train_batch_size", "micro-batch times accumulation steps times processes; two of the three give the third"),
    _used(
        "train_micro_batch_size_per_gpu",
        "as above; the actual size is that of the batches that the model is called with",
    ),
    _used(
        "gradient_accumulation_steps", "losses are divided by it, and `engine.step()` updates at every so many calls"
    ),
    _used("gradient_clipping", "the largest global norm of the gradients; 0: no clipping"),
    _used("optimizer.type", "`Adam`, `AdamW`, `Lamb`, `Lion`, `SGD`, or a class of `torch.optim`"),
    _used("optimizer.params", "see [optimizers](#optimizers)"),
    _used("scheduler.type", "`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle`, `LRRangeTest`"),
    _used("scheduler.params", "see [schedulers](#schedulers)"),
    _used("fp16.enabled", "parameters and gradients in fp16, fp32 masters, a loss scale"),
    _used(
        "fp16.auto_cast", "cast what the model is called with to fp16. Default: false; with a key of PatrickStar: true"
    ),
    _used("fp16.loss_scale", "the loss scale; 0: a dynamic one"),
    _used("fp16.initial_scale_power", "a dynamic loss scale begins with 2 to this power"),
    _used("fp16.loss_scale_window", "a dynamic loss scale doubles after as many steps without overflow"),
    _used("fp16.hysteresis", "a dynamic loss scale halves at this many overflows, and at each one after them"),
    _used("fp16.consecutive_hysteresis", "whether a step without overflow resets the count of overflows"),
    _used("fp16.min_loss_scale", "the smallest dynamic loss scale; an overflow there is an error"),
    _refused("fp16.fp16_master_weights_and_grads", "fp16 without fp32 masters loses small updates; remove it"),
    _used("bf16.enabled", "parameters and gradients in bf16, fp32 masters"),
    _used("bf16.check_grad_overflow", "skip a step with gradients that are not finite. Default: true"),
    _refused("bf16.bf16_master_weights_and_grads", 'use optimizer.params: "stochastic_rounding": true'),
    _refused("bf16.bf16_optimizer_states", 'use optimizer.params: "moments_dtype": "bfloat16"'),
    *_no_effect("gradients are accumulated in every backward", "bf16.immediate_grad_update"),
    _used("bfloat16", "an older name of `bf16`"),
    _used("torch_autocast.enabled", "the model runs under `torch.autocast`"),
    _used("torch_autocast.dtype", "`bfloat16`; `float16` is refused: use `fp16`"),
    *_no_effect(_EXCHANGES, "torch_autocast.lower_precision_safe_modules"),
    _used("data_types.grad_accum_dtype", "gradients accumulate in the parameters' dtype; another one is refused"),
    _refused("data_types.param_dtype", "use fp16 or bf16", "fp32", "float32"),
    _refused("data_types.buffer_dtype", "cast the buffers in model_func", "fp32", "float32"),
    _refused("data_types.keep_in_fp32_modules", "parameters have one dtype; use torch_autocast", AUTO, []),
    _used(
        "zero_optimization.stage",
        "with several processes: 1, 2 or 3 [forces a stage](distributed.md#stages); 0: the plan chooses",
    ),
    _used("zero_optimization.offload_optimizer.device", "`cpu`: updates by the CPU; `nvme`: states on disk"),
    _used("zero_optimization.offload_optimizer.nvme_path", "the directory of `nvme`"),
    _used("zero_optimization.offload_param.device", "`nvme`: everything on disk; `cpu` is what chunkc does anyway"),
    _used("zero_optimization.offload_param.nvme_path", "the directory of `nvme`"),
    _used("zero_optimization.cpu_offload", "an older name of `offload_optimizer` with `cpu`"),
    *_no_effect(
        _PLANNED,
        *_inside(
            "zero_optimization.offload_optimizer",
            *("buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "pipeline", "fast_init", "ratio"),
            *("super_offload", "cpuadam_cores_perc"),
        ),
        *_inside("zero_optimization.offload_param", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
        *_inside(
            "zero_optimization",
            *("cpu_offload_param", "cpu_offload_use_pin_memory", "contiguous_gradients", "sub_group_size"),
            *("overlap_comm", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "prefetch_bucket_size"),
            *("stage3_model_persistence_threshold", "stage3_module_granularity_threshold", "max_live_parameters"),
            *("max_reuse_distance", "param_persistence_threshold", "model_persistence_threshold"),
            *("module_granularity_threshold", "leaf_module", "memory_efficient_linear", "override_module_apply"),
            *("ignore_unused_parameters", "parameter_alignment", "compute_grad_norm", "log_trace_cache_warnings"),
            *("enable_sanity_checks", "round_robin_gradients"),
        ),
    ),
    *_no_effect(
        _EXCHANGES,
        *_inside(
            "zero_optimization",
            *("reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_partitions"),
            *("allgather_bucket_size", "legacy_stage1", "zero_hpz_partition_size", "zero_quantized_weights"),
            *("zero_quantized_gradients", "zeropp_loco_param", "mics_shard_size", "mics_hierarchical_params_gather"),
            *("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"),
            *("stage3_allgather_sequential", "allgather_sequential"),
        ),
    ),
    *_no_effect(
        "`state_dict` always has whole weights",
        *_inside(
            "zero_optimization",
            *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
            *("stage3_gather_fp16_weights_on_model_save", "elastic_checkpoint", "load_from_fp32_weights"),
            *("pipeline_loading_checkpoint",),
        ),
    ),
    _refused("zero_optimization.zero_quantized_nontrainable_weights", "quantize the frozen part in model_func"),
    _refused("zero_optimization.zenflow", 'use optimizer.params: "update_on": "cpu", "overlap": "both"'),
    _refused("zero_optimization.save_muon_momentum_buffer_in_memory", "there is no Muon"),
    *_no_effect(
        _EXCHANGES,
        *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients"),
        *("gradient_predivide_factor", "gradient_allreduce_op", "fp32_allreduce", "disable_allgather"),
        *("use_data_before_expert_parallelism", "comms_logger"),
    ),
    _used("steps_per_print", "every so many steps, progress is logged at level INFO. Default: 10"),
    _used("wall_clock_breakdown", "log how long forward, backward and step took, too"),
    *_no_effect("`chunkc.report` has it", "memory_breakdown", "dump_state", "flops_profiler", "timers"),
    *_no_effect("log from your loop", "tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "log_level"),
    *_no_effect(
        "call `torch.utils.checkpoint` in the model, which chunkc respects; the plan decides the rest",
        *_inside(
            "activation_checkpointing",
            *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints"),
            *("synchronize_checkpoint_boundary", "profile"),
        ),
    ),
    *_no_effect(_OWN_IO, "aio", "checkpoint", "nebula", "datastates"),
    *_no_effect("chunkc always compiles the model", "compile", "graph_harvesting"),
    *_no_effect("any optimizer works", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *_no_effect("chunkc has no fused variants to choose from", "optimizer.legacy_fusion"),
    *_no_effect("the loop is yours", "dataloader_drop_last", "vocabulary_size", "disable_python_gc"),
    _refused(
        "managed_gradient_accumulation", "set gradient_accumulation_steps to 1 and call step() when you like", True
    ),
    _refused("amp", "use bf16, fp16 or torch_autocast"),
    _refused("sparse_gradients", "chunkc has no sparse gradients"),
    _refused("sparse_attention", "write the attention in the model"),
    _refused("compression_training", "prune or quantize in the model"),
    _refused("quantize_training", "quantize in the model"),
    _refused("weight_quantization", "quantize in the model"),
    _refused("eigenvalue", "it belongs to quantize_training"),
    _refused("progressive_layer_drop", "drop layers in the model"),
    _refused("curriculum_learning", "choose the data in your loop"),
    _refused("data_efficiency", "choose the data in your loop"),
    _refused("elasticity", "set the batch size"),
    _refused("autotuning", "`chunkc explain` finds batch and budget"),
    _refused("hybrid_engine", "call the model under torch.no_grad() to generate"),
    _refused("pipeline", "processes share a model's parameters, not its work"),
    _refused("tensor_parallel", "processes share a model's parameters, not its work"),
    _refused("expert_parallel", "processes share a model's parameters, not its work"),
    _refused("sequence_parallel_size", "processes share a model's parameters, not its work", 1),
    _used("default_chunk_size", "PatrickStar: elements in a chunk of parameters"),
    _used(
        "use_cpu_embedding",
        "PatrickStar: on a GPU, [the CPU looks up embeddings](#embeddings-on-the-cpu); no effect on a CPU",
    ),
    _used(
        "release_after_init",
        "PatrickStar: `model_func` runs inside [`chunkc.init`](large_models.md#build), with the home of the options",
    ),
    *_no_effect("PatrickStar: " + _EXCHANGES, "use_fake_dist"),
    *_no_effect(
        "PatrickStar: nothing is traced, the plan is made before the first step",
        *_inside(
            "client.mem_tracer",
            *("use_async_mem_monitor", "warmup_gpu_chunk_mem_ratio", "overall_gpu_mem_ratio", "overall_cpu_mem_ratio"),
            *("margin_use_ratio", "use_fake_dist", "with_static_partition"),
        ),
    ),
    *_no_effect(
        "PatrickStar: " + _PLANNED,
        *_inside("client.opts", "with_mem_saving_comm", "with_mem_cache", "with_async_move"),
    ),
    _used(
        "chunkc.device", "where the model computes: `cpu`, `cuda`, ... Default: the GPU of `local_rank`, else the CPU"
    ),
    *(_used(f"chunkc.{name}", "as in [options](options.md#options)") for name in Options.model_fields),
)
"""All keys, in the order of the table in docs/engine.md, which has these notes, too."""

BY_NAME: Mapping[str, Key] = {key.name: key for key in KEYS}
_SECTIONS = {name.rpartition(".")[0] for name in BY_NAME} - {""}
_SECTIONS |= {section.rpartition(".")[0] for section in _SECTIONS} - {""}
PATRICKSTAR = ("default_chunk_size", "use_cpu_embedding", "release_after_init", "client")
"""Top-level keys that only PatrickStar has."""


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of each key; a section that `KEYS` lists as a whole is one value.

    Raises:
        OptionsError: a key is unknown (the message suggests a known one), or a section is no mapping.
    """
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name in _SECTIONS and name not in BY_NAME:
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise OptionsError(f"{name} is {short(value)}; allowed: a section of keys")
            yield from flattened(value, f"{name}.")
        elif name in BY_NAME:
            yield name, value
        else:
            raise OptionsError(unknown_key(name, [*BY_NAME, *_SECTIONS]))


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown key, with a suggestion.

    The suggestion is the same key in another section, else a similarly spelt key of this section, else of any.
    """
    section, _, last = name.rpartition(".")
    parts = [(other, *other.rpartition(".")[::2]) for other in known]
    nearest = [other for other, _, part in parts if part == last]
    for among in (
        {part: other for other, around, part in parts if around == section},
        {part: other for other, _, part in parts},
    ):
        nearest = nearest or [among[part] for part in difflib.get_close_matches(last, among, n=1, cutoff=0.6)]
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown key '{one_line(name)}' in the configuration{hint}"


def check_refused(name: str, value: object) -> None:
    """Refuse a key that chunkc does not support, unless its value is harmless.

    Raises:
        UnsupportedError: the key is refused; with advice.
    """
    key = BY_NAME[name]
    if key.fate == "refused" and (value not in key.harmless if key.harmless else _asks(value)) and value is not None:
        raise UnsupportedError(f"{name} is {short(value)}, which chunkc does not do: {key.note}")


def _asks(value: object) -> bool:
    if isinstance(value, Mapping) and "enabled" in value:
        return bool(value["enabled"])
    return bool(value)


def without_effect(names: Iterable[str]) -> dict[str, list[str]]:
    """Return those of the keys that have no effect, by the reason."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        if BY_NAME[name].fate == "no effect":
            reasons.setdefault(BY_NAME[name].note, []).append(name)
    return reasons
