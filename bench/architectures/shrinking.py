"""Configurations of transformers shrunk by rules: every size by what its name says it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOCAB = 256
"""Words of a shrunk model."""


@dataclass(frozen=True)
class Sizes:
    """Parameters of the rules: widths are divided by `factor`; so many layers have one of each kind."""

    factor: int
    num_layers: int


Rule = Callable[[str, Any, Sizes], Any]
"""(name, value, sizes) -> the value in the shrunk configuration."""

_LAYERS = re.compile(
    r"^(n_layers?|depth|num_blocks|num_layers_.*|.*_layers|.*_depth|num_stages_.*)$|^num_(hidden_)?layers$"
)

_HEADS = re.compile(r"^(n_heads?|nhead|.*_heads|.*_n_head|.*attention_head)$")

_KV_HEADS = re.compile(r"(key_value|kv).*heads|num_kv_heads")

_HEAD_SIZES = re.compile(r"(head_dim|head_size|^d_kv$|attention_head_size|key_size|value_size)$")

_WIDTHS = re.compile(
    r"^(hidden_size|d_model|n_embd|(\w+_)?embed_dim|embedding_size|dim|(\w+_)?hidden_dim|(\w+_)?projection_dim|width|"
    r"(\w+_)?emb_dim|model_dim|(\w+_)?hidden_size|d_embed|embedding_dim|hidden_channels|num_feature_channels|"
    r"projection_size|encoder_dim|decoder_dim|out_features|feature_size|fpn_feature_size|attention_hidden_size|"
    r"conv_dim_out|bottleneck_size|fusion_hidden_size|lstm_hidden_size|adapter_dim|initializer_dim|hidden_channel)$"
)

_INNER = re.compile(r"(intermediate_size|ffn_dim|d_ff|n_inner|inner_dim|mlp_dim|dim_feedforward|ffn_hidden_size)$")

_RANKS = re.compile(r"(lora_rank|_rank)$")

_VOCABS = re.compile(r"vocab_size(_or_config_json_file)?$|^num_(codes|embeddings|tokens)$|^codebook_size$")

_POSITIONS = re.compile(r"^(max_position_embeddings|n_positions|max_(source|target)_positions|n_ctx|max_seq_len\w*)$")

_IMAGES = re.compile(r"^(image_size|img_size|input_size|resolution)$")

_PATCHES = re.compile(r"^(patch_size|patch_stride)$")

_EXPERTS = re.compile(r"^(num|n)_(\w+_)?experts$|^moe_num_experts$")

_TOP_EXPERTS = re.compile(r"experts_per_tok|moe_k$|top_?k$|num_selected_experts|moe_topk$")

_GROUPS = re.compile(r"^(n_group|topk_group)$")

_FRAMES = re.compile(r"^(num_frames|frames_per_clip|temporal_size)$")

_TOKENS = re.compile(r"(_token_id|_token_index|_token_ids?)$")

_LISTS = re.compile(r"(hidden_sizes|embed_dims?|dims|channels|neck_hidden_\w+)$")

_DEPTHS = re.compile(r"^(depths|num_blocks|layers|encoder_depths|layer_depths|num_encoder_blocks_list)$")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def absolute(name: str, value: Any, sizes: Sizes) -> Any:
    """Give every size the same small value, wherever it stands."""
    if _is_number(value):
        for pattern, most in (
            (_TOP_EXPERTS, 2), (_EXPERTS, 4), (_GROUPS, 1), (_KV_HEADS, 2 if value < 16 else 4), (_HEADS, 4),
            (_LAYERS, sizes.num_layers), (_HEAD_SIZES, 16),
            (_INNER, 128), (_WIDTHS, 64), (_RANKS, 16), (_FRAMES, 4),
        ):  # fmt: skip
            if pattern.search(name):
                return min(value, most)
    if isinstance(value, list | tuple) and value and all(map(_is_number, value)):
        if _DEPTHS.search(name):
            return [1 for _ in value]
        if _LISTS.search(name):
            return [min(size, 16 * 2 ** min(index, 2)) for index, size in enumerate(value)]
        if _HEADS.search(name):
            return [min(size, 2) for size in value]
    return _common(name, value)


def by_factor(name: str, value: Any, sizes: Sizes) -> Any:
    """Divide every width by the same factor, so that what divided before divides after."""
    if _is_number(value):
        if _WIDTHS.search(name) or _INNER.search(name) or _HEAD_SIZES.search(name) or _RANKS.search(name):
            return value // sizes.factor if value % sizes.factor == 0 else value
        for pattern, most in ((_TOP_EXPERTS, 2), (_EXPERTS, 4), (_GROUPS, 1), (_LAYERS, sizes.num_layers)):
            if pattern.search(name):
                return min(value, most)
    if isinstance(value, list | tuple) and value and all(map(_is_number, value)):
        if _DEPTHS.search(name):
            return [1 for _ in value]
        if _LISTS.search(name) and all(size % sizes.factor == 0 for size in value):
            return [size // sizes.factor for size in value]
    return _common(name, value)


def layers_only(name: str, value: Any, sizes: Sizes) -> Any:
    """Fewer layers and words; all else as it is by default."""
    if _is_number(value) and _LAYERS.search(name):
        return min(value, sizes.num_layers)
    return _common(name, value)


def _common(name: str, value: Any) -> Any:
    if _is_number(value):
        if _VOCABS.search(name):
            return min(value, VOCAB)
        if _TOKENS.search(name) and value >= VOCAB:
            return VOCAB - 1 - value % 32
        if _POSITIONS.search(name):
            return min(value, 128)
        if _IMAGES.search(name):
            return min(value, 64)
        if _PATCHES.search(name):
            return min(value, 16)
    if _IMAGES.search(name) and isinstance(value, list | tuple) and all(map(_is_number, value)):
        return [min(size, 64) for size in value]
    return value


def _factor(config: Any) -> int:
    """The power of two that brings the widest hidden size down to 64 or so."""
    widths = [v for k, v in config.to_dict().items() if _is_number(v) and _WIDTHS.search(k)]
    factor = 1
    while widths and max(widths) // (2 * factor) >= 48:
        factor *= 2
    return factor


def _num_layers(config: Any) -> int:
    """Two, or as many as it takes to have one of each kind."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    seen = [len(set(kinds[: count + 1])) for count in range(len(kinds))]
    return min(8, max(2, seen.index(max(seen)) + 1)) if seen else 2


def shrunk_config(kind: Any, rule: Rule) -> Any:
    """A configuration of that class with the rule applied to what it is by default, and to those inside it."""
    whole = kind()
    inner = {key: type(value) for key, value in vars(whole).items() if _is_config(value)}
    sizes = Sizes(_factor(whole), _num_layers(whole))
    changes: dict[str, Any] = {key: shrunk_config(type_, rule) for key, type_ in inner.items()}
    own = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__dataclass_fields__", ()))
    for key, value in whole.to_dict().items():
        if key in inner or key not in own:
            continue
        shrunk = 0 if key == "pad_token_id" and value is None else rule(key, value, sizes)
        if shrunk != value:
            changes[key] = shrunk
    return kind(**changes)


def _is_config(value: Any) -> bool:
    import transformers

    return isinstance(value, transformers.PretrainedConfig)


def find(config: Any, *names: str, default: Any = None) -> Any:
    """A setting of the configuration or of one inside it."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for value in vars(config).values():
        if _is_config(value) and (found := find(value, *names)) is not None:
            return found
    return default
