"""Every architecture of transformers, timm and torchvision, shrunk by rule, with random weights and random batches.

An architecture is named `library/family/class`: `transformers/llama/LlamaForCausalLM`, `timm/resnet/test_resnet`,
`torchvision/densenet/densenet121`. `build` tries rules, from the one that shrinks most to the one that shrinks least,
and ways to call the model, until plain PyTorch runs it forwards and backwards.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MAX_PARAMETERS = 30_000_000
"""Of a shrunk model; a rule that leaves more is not tried."""

VOCAB, LENGTH, BATCH = 256, 16, 4

DOZEN = (
    "transformers/llama/LlamaForCausalLM",  # a decoder with rotary positions
    "transformers/mixtral/MixtralForCausalLM",  # experts
    "transformers/qwen3_next/Qwen3NextForCausalLM",  # linear attention between ordinary ones
    "transformers/mamba/MambaForCausalLM",  # a state space
    "transformers/rwkv/RwkvForCausalLM",  # a recurrence
    "transformers/t5/T5ForConditionalGeneration",  # an encoder and a decoder that share words
    "transformers/deberta-v2/DebertaV2ForTokenClassification",  # disentangled attention
    "transformers/clip/CLIPModel",  # images and words
    "transformers/mobilevit/MobileViTForImageClassification",  # convolutions and attention
    "transformers/convnextv2/ConvNextV2ForImageClassification",  # depthwise convolutions
    "transformers/wav2vec2/Wav2Vec2ForCTC",  # waves
    "transformers/segformer/SegformerForSemanticSegmentation",  # a pyramid
)
"""A fixed sample, chosen to differ."""

Batch = dict[str, Any]
MakeBatch = Callable[[int, int], Batch]
"""(batch size, length) -> keyword arguments of `forward`, random from torch's generator."""


class NotBuilt(Exception):
    """No rule made a model that plain PyTorch can train; the message says what went wrong last."""


@dataclass(frozen=True)
class Subject:
    """An architecture that can be trained.

    Attributes:
        make: builds the model from torch's random state.
        batch: what it is called with; models that take no length ignore it.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: MakeBatch
    num_parameters: int

    @property
    def supports_checkpointing(self) -> bool:
        with torch.device("meta"):
            model = self.make()
        is_marked = getattr(model, "supports_gradient_checkpointing", False)
        return bool(is_marked) or hasattr(model, "set_grad_checkpointing")


def loss_of(output: Any) -> Tensor:
    """The model's own loss where it computes one, else the mean square of the floating tensors that it returns."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad and leaf.numel()
    ]
    if not tensors:  # under no_grad
        leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]
    assert tensors, "the model returns no floating tensor"
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).mean()


def architectures() -> list[str]:
    """All names, sorted; of the libraries that are installed."""
    _without_compiled_operators()
    return sorted([*_transformers_names(), *_timm_names(), *_torchvision_names()])


def build(name: str) -> Subject:
    """The architecture at its smallest.

    Raises:
        NotBuilt: plain PyTorch runs none of what the rules make.
    """
    _without_compiled_operators()
    library, family, title = name.split("/")
    makers = {"transformers": _transformers_models, "timm": _timm_models, "torchvision": _torchvision_models}
    reasons = []
    try:
        candidates = list(makers[library](family, title))
    except Exception as error:
        raise NotBuilt(_line(error)) from error
    for make, batches in candidates:
        try:
            with torch.device("meta"):
                num_parameters = sum(p.numel() for p in make().parameters())
        except Exception as error:
            reasons.append(_line(error))
            continue
        if num_parameters > MAX_PARAMETERS:
            reasons.append(f"{num_parameters:,} parameters are left after shrinking")
            continue
        for batch in batches:
            try:
                _try(make, batch)
            except Exception as error:
                reasons.append(_line(error))
                continue
            return Subject(name, make, batch, num_parameters)
    raise NotBuilt(next(iter(reasons), "no rule applies"))


def _try(make: Callable[[], nn.Module], batch: MakeBatch) -> None:
    torch.manual_seed(0)
    model = make().train()
    loss = loss_of(model(**batch(BATCH, LENGTH)))
    loss.backward()
    assert bool(torch.isfinite(loss)), "the loss is not finite"
    assert any(p.grad is not None for p in model.parameters()), "no parameter has a gradient"


def _line(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:200]


# ---------------------------------------------------------------- transformers


@cache
def _transformers_classes() -> Mapping[str, str]:
    """Model class -> model type, of all auto classes."""
    try:
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return {}
    found: dict[str, str] = {}
    for key, mapping in vars(auto).items():
        if key.endswith("MAPPING_NAMES"):
            for model_type, classes in mapping.items():
                for title in (classes,) if isinstance(classes, str) else classes:
                    if title is None or re.search(r"(Config|Tokenizer|Processor|Extractor)$", title):
                        continue
                    own = title.lower().startswith(re.sub("[-_]", "", model_type))
                    if own or title not in found:  # other types may borrow a class
                        found[title] = model_type
    return found


def _transformers_names() -> Iterator[str]:
    for title, model_type in _transformers_classes().items():
        yield f"transformers/{model_type}/{title}"


def _transformers_models(family: str, title: str) -> Iterator[tuple[Callable[[], nn.Module], list[MakeBatch]]]:
    import transformers

    kind = getattr(transformers, title)
    config_kind = kind.config_class
    for rule in (_absolute, _by_factor, _layers_only):
        try:
            config = _shrunk_config(config_kind, rule)
        except Exception:
            continue
        yield partial(_of_copy, kind, config), _transformers_batches(kind, config)


def _of_copy(kind: Any, config: Any) -> nn.Module:
    """Models change their configurations."""
    return kind(copy.deepcopy(config))


@dataclass(frozen=True)
class Sizes:
    """What the rules go by: widths are divided by `factor`; so many layers have one of each kind."""

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


def _absolute(name: str, value: Any, sizes: Sizes) -> Any:
    """Every size has the same small value, wherever it stands."""
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


def _by_factor(name: str, value: Any, sizes: Sizes) -> Any:
    """Every width is divided by the same factor, so that what divided before divides after."""
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


def _layers_only(name: str, value: Any, sizes: Sizes) -> Any:
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


def _shrunk_config(kind: Any, rule: Rule) -> Any:
    """A configuration of that class with the rule applied to what it is by default, and to those inside it."""
    whole = kind()
    inner = {key: type(value) for key, value in vars(whole).items() if _is_config(value)}
    sizes = Sizes(_factor(whole), _num_layers(whole))
    changes: dict[str, Any] = {key: _shrunk_config(type_, rule) for key, type_ in inner.items()}
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


def _find(config: Any, *names: str, default: Any = None) -> Any:
    """A setting of the configuration or of one inside it."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for value in vars(config).values():
        if _is_config(value) and (found := _find(value, *names)) is not None:
            return found
    return default


def _words(size: int, length: int) -> Tensor:
    return torch.randint(5, VOCAB - 40, (size, length))


def _transformers_batches(kind: Any, config: Any) -> list[MakeBatch]:
    """Ways to call the model, the fullest first."""
    takes = set(inspect.signature(kind.forward).parameters)
    main = getattr(kind, "main_input_name", "input_ids")
    channels = _find(config, "num_channels", "in_channels", "num_input_channels", default=3)
    edge = _find(config, "image_size", "img_size", "input_size", default=64)
    edges = tuple(edge)[-2:] if isinstance(edge, list | tuple) else (edge, edge)
    frames = _find(config, "num_frames", "frames_per_clip", default=4)
    bins = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    positions = _find(config, "max_source_positions", default=64)
    num_labels = getattr(config, "num_labels", 2) or 2

    def with_words(size: int, length: int) -> Batch:
        batch: Batch = {}
        if "input_ids" in takes:
            batch["input_ids"] = _words(size, length)
        if "decoder_input_ids" in takes and (getattr(config, "is_encoder_decoder", False) or "input_ids" not in takes):
            batch["decoder_input_ids"] = _words(size, length)
        return batch

    def only_words(size: int, length: int) -> Batch:
        return {"input_ids": _words(size, length)}

    def choices(size: int, length: int) -> Batch:
        words = _words(2 * size, length).view(size, 2, length)
        return {"input_ids": words, "labels": torch.randint(0, 2, (size,))}

    def masked(size: int, length: int) -> Batch:
        return {"input_ids": _words(size, length), "attention_mask": torch.ones(size, length, dtype=torch.int64)}

    def images(size: int, length: int) -> Batch:
        return {"pixel_values": torch.randn(size, channels, *edges)}

    def videos(size: int, length: int) -> Batch:
        return {"pixel_values": torch.randn(size, frames, channels, *edges)}

    def videos_by_their_name(size: int, length: int) -> Batch:
        return {"pixel_values_videos": torch.randn(size, frames, channels, *edges)}

    def spectra(size: int, length: int) -> Batch:
        return {"input_features": torch.randn(size, bins, 2 * positions)}

    def spectra_in_time(size: int, length: int) -> Batch:
        return {"input_features": torch.randn(size, 8 * length, bins)}

    def waves(size: int, length: int) -> Batch:
        return {"input_values": torch.randn(size, 800 * length)}

    def waves_with_channel(size: int, length: int) -> Batch:
        return {"input_values": torch.randn(size, 1, 640 * length)}

    def spectrum_images(size: int, length: int) -> Batch:
        return {"input_values": torch.randn(size, _find(config, "max_length", default=128), bins)}

    def embedded(size: int, length: int) -> Batch:
        return {"inputs_embeds": torch.randn(size, length, _find(config, "hidden_size", "d_model", default=64))}

    def patches(size: int, length: int) -> Batch:
        flat = 3 * _find(config, "patch_size", default=16) ** 2
        return {"pixel_values": torch.randn(size, length, flat)}

    def both(*parts: MakeBatch) -> MakeBatch:
        return lambda size, length: {key: value for part in parts for key, value in part(size, length).items()}

    by_main: dict[str, list[MakeBatch]] = {
        "input_ids": [both(with_words, images), with_words, only_words, embedded],
        "pixel_values": [both(with_words, images), images, videos, both(with_words, videos), patches],
        "pixel_values_videos": [videos_by_their_name],
        "input_features": [both(with_words, spectra), both(with_words, spectra_in_time), spectra, spectra_in_time],
        "input_values": [both(with_words, waves), waves, waves_with_channel, spectrum_images],
        "inputs": [],
    }
    if kind.__name__.endswith("MultipleChoice"):
        return [choices]
    plain = [*by_main.get(main, []), masked, both(with_words, waves), with_words, images, embedded]
    if "input_ids" in takes and "pixel_values" not in takes:
        plain = [make for make in plain if make is not images][1 if main == "input_ids" else 0 :]
    return [*(with_labels for make in plain for with_labels in _labelled(kind, make, num_labels)), *plain]


def _labelled(kind: Any, make: MakeBatch, num_labels: int) -> Iterator[MakeBatch]:
    """The same call with labels, of the two shapes that heads take: one a word, one a sample."""
    takes = inspect.signature(kind.forward).parameters
    if "labels" not in takes or not re.search(r"For|LMHead|PreTraining|WithLM", kind.__name__):
        return
    if re.search(r"CausalLM|MaskedLM|LMHead|ConditionalGeneration|SpeechSeq2Seq|PreTraining", kind.__name__):

        def words(size: int, length: int) -> Batch:
            batch = make(size, length)
            like = batch.get("decoder_input_ids", batch.get("input_ids"))
            assert like is not None, "no words to predict"
            return {**batch, "labels": like.clone()}

        yield words
    elif re.search(r"Classification", kind.__name__):

        def classes(size: int, length: int) -> Batch:
            shape = (size, length) if "Token" in kind.__name__ else (size,)
            return {**make(size, length), "labels": torch.randint(0, num_labels, shape)}

        yield classes


# ---------------------------------------------------------------- timm


_SMALL_FIRST = re.compile(r"atto|femto|pico|nano|xxs|_xx|xs|tiny|micro|mini|small|_s\d?_|_0\d\d|_t\b|_b0|_18|_10")


def _timm_names() -> Iterator[str]:
    try:
        import timm
    except ImportError:
        return
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if not name.startswith("test_")]
        tests = [name for name in timm.list_models(module=module) if name.startswith("test_")]
        small = sorted(names, key=lambda name: (_SMALL_FIRST.search(name) is None, len(name), name))
        for name in [*tests, *small[:1]]:
            yield f"timm/{module}/{name}"


_TIMM_SIZES: tuple[dict[str, Any], ...] = (
    {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64},
    {"embed_dim": 32, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4), "img_size": 64},
    {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
    {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "img_size": 64},
    {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)},
    {"layers": (1, 1, 1, 1)},
    {"img_size": 64},
    {},
)
"""Arguments that some constructors take, those that shrink most first."""


def _timm_models(family: str, title: str) -> Iterator[tuple[Callable[[], nn.Module], list[MakeBatch]]]:
    import timm

    for sizes in _TIMM_SIZES:
        make = partial(timm.create_model, title, pretrained=False, num_classes=10, **sizes)
        try:
            with torch.device("meta"):
                needed = make().default_cfg.get("input_size", (3, 224, 224))[-1]
        except Exception:
            continue
        yield make, [_random_batch(("x",), (3, edge, edge)) for edge in dict.fromkeys((64, 96, needed))]


def _random_batch(names: Sequence[str], shape: Sequence[int]) -> MakeBatch:
    """Arguments of these names, each of a shape without the batch's dimension."""
    return lambda size, length: {name: torch.randn(size, *shape) for name in names}


# ---------------------------------------------------------------- torchvision


def _without_compiled_operators() -> None:
    """Let torchvision be imported where its compiled operators are for another torch: the models that do not call them
    train all the same."""
    if importlib.util.find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "nms"):
        return
    if "torchvision" in sys.modules:
        return
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    for name in ("nms", "qnms"):
        _TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")


def _torchvision_names() -> Iterator[str]:
    try:
        from torchvision import models
    except ImportError:
        return
    seen: dict[str, str] = {}
    for name in models.list_models():
        family = models.get_model_builder(name).__module__.removeprefix("torchvision.models.").replace(".", "-")
        if not family.startswith("quantization"):
            seen.setdefault(family, name)
    for family, name in seen.items():
        yield f"torchvision/{family}/{name}"


def _torchvision_models(family: str, title: str) -> Iterator[tuple[Callable[[], nn.Module], list[MakeBatch]]]:
    from torchvision import models

    for sizes in ({"num_classes": 10}, {}):
        weights = {"weights_backbone": None} if "weights_backbone" in _parameters(models, title) else {}
        make = partial(models.get_model, title, weights=None, **weights, **sizes)
        try:
            with torch.device("meta"):
                first = next(iter(inspect.signature(make().forward).parameters))
        except Exception:
            continue
        images = [_random_batch((first,), (3, edge, edge)) for edge in (64, 128, 224)]
        pairs = _random_batch(("image1", "image2"), (3, 128, 128))
        yield make, [*images, _random_batch((first,), (3, 16, 64, 64)), pairs]


def _parameters(models: Any, title: str) -> Mapping[str, Any]:
    return inspect.signature(models.get_model_builder(title)).parameters
