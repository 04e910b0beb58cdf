"""The architectures of transformers, timm and torchvision, with ways to make and to call them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from architectures.batches import MakeBatch, random_batch, transformers_batches
from architectures.shrinking import absolute, by_factor, layers_only, shrunk_config


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


def transformers_names() -> Iterator[str]:
    for title, model_type in _transformers_classes().items():
        yield f"transformers/{model_type}/{title}"


def transformers_models(family: str, title: str) -> Iterator[tuple[Callable[[], nn.Module], list[MakeBatch]]]:
    import transformers

    kind = getattr(transformers, title)
    config_kind = kind.config_class
    for rule in (absolute, by_factor, layers_only):
        try:
            config = shrunk_config(config_kind, rule)
        except Exception:
            continue
        yield partial(_of_copy, kind, config), transformers_batches(kind, config)


def _of_copy(kind: Any, config: Any) -> nn.Module:
    """Models change their configurations."""
    return kind(copy.deepcopy(config))


_SMALL_FIRST = re.compile(r"atto|femto|pico|nano|xxs|_xx|xs|tiny|micro|mini|small|_s\d?_|_0\d\d|_t\b|_b0|_18|_10")


def timm_names() -> Iterator[str]:
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


def timm_models(family: str, title: str) -> Iterator[tuple[Callable[[], nn.Module], list[MakeBatch]]]:
    import timm

    for sizes in _TIMM_SIZES:
        make = partial(timm.create_model, title, pretrained=False, num_classes=10, **sizes)
        try:
            with torch.device("meta"):
                needed = make().default_cfg.get("input_size", (3, 224, 224))[-1]
        except Exception:
            continue
        yield make, [random_batch(("x",), (3, edge, edge)) for edge in dict.fromkeys((64, 96, needed))]


def without_compiled_operators() -> None:
    """Make torchvision importable where its compiled operators are for another version of torch.

    Models that do not call these operators train all the same.
    """
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


def torchvision_names() -> Iterator[str]:
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


def torchvision_models(family: str, title: str) -> Iterator[tuple[Callable[[], nn.Module], list[MakeBatch]]]:
    from torchvision import models

    for sizes in ({"num_classes": 10}, {}):
        weights = {"weights_backbone": None} if "weights_backbone" in _parameters(models, title) else {}
        make = partial(models.get_model, title, weights=None, **weights, **sizes)
        try:
            with torch.device("meta"):
                first = next(iter(inspect.signature(make().forward).parameters))
        except Exception:
            continue
        images = [random_batch((first,), (3, edge, edge)) for edge in (64, 128, 224)]
        pairs = random_batch(("image1", "image2"), (3, 128, 128))
        yield make, [*images, random_batch((first,), (3, 16, 64, 64)), pairs]


def _parameters(models: Any, title: str) -> Mapping[str, Any]:
    return inspect.signature(models.get_model_builder(title)).parameters
