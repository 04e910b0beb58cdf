"""Random inputs of shrunk models, in all the forms that models take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from architectures.shrinking import VOCAB, find

Batch = dict[str, Any]

MakeBatch = Callable[[int, int], Batch]
"""(batch size, length) -> keyword arguments of `forward`, random from torch's generator."""


def _words(size: int, length: int) -> Tensor:
    return torch.randint(5, VOCAB - 40, (size, length))


def transformers_batches(kind: Any, config: Any) -> list[MakeBatch]:
    """Ways to call the model, the fullest first."""
    takes = set(inspect.signature(kind.forward).parameters)
    main = getattr(kind, "main_input_name", "input_ids")
    channels = find(config, "num_channels", "in_channels", "num_input_channels", default=3)
    edge = find(config, "image_size", "img_size", "input_size", default=64)
    edges = tuple(edge)[-2:] if isinstance(edge, list | tuple) else (edge, edge)
    frames = find(config, "num_frames", "frames_per_clip", default=4)
    bins = find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    positions = find(config, "max_source_positions", default=64)
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
        return {"input_values": torch.randn(size, find(config, "max_length", default=128), bins)}

    def embedded(size: int, length: int) -> Batch:
        return {"inputs_embeds": torch.randn(size, length, find(config, "hidden_size", "d_model", default=64))}

    def patches(size: int, length: int) -> Batch:
        flat = 3 * find(config, "patch_size", default=16) ** 2
        return {"pixel_values": torch.randn(size, length, flat)}

    def series(size: int, length: int) -> Batch:
        steps, channels = find(config, "context_length", default=32), find(config, "num_input_channels", default=1)
        return {"past_values": torch.randn(size, steps, channels)}

    def both(*parts: MakeBatch) -> MakeBatch:
        return lambda size, length: {key: value for part in parts for key, value in part(size, length).items()}

    by_main: dict[str, list[MakeBatch]] = {
        "input_ids": [both(with_words, images), with_words, only_words, embedded],
        "pixel_values": [both(with_words, images), images, videos, both(with_words, videos), patches],
        "pixel_values_videos": [videos_by_their_name],
        "input_features": [both(with_words, spectra), both(with_words, spectra_in_time), spectra, spectra_in_time],
        "input_values": [both(with_words, waves), waves, waves_with_channel, spectrum_images],
        "past_values": [series],
        "inputs": [],
    }
    if kind.__name__.endswith("MultipleChoice"):
        return [choices]
    plain = [*by_main.get(main, []), masked, both(with_words, waves), with_words, images, embedded]
    if "input_ids" in takes and "pixel_values" not in takes:
        plain = [make for make in plain if make is not images][1 if main == "input_ids" else 0 :]
    return [*(with_labels for make in plain for with_labels in _labelled(kind, make, num_labels)), *plain]


def _labelled(kind: Any, make: MakeBatch, num_labels: int) -> Iterator[MakeBatch]:
    """Add labels to a call, in the two shapes that heads take: one a word, one a sample."""
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


def random_batch(names: Sequence[str], shape: Sequence[int]) -> MakeBatch:
    """Arguments of these names, each of a shape without the batch's dimension."""
    return lambda size, length: {name: torch.randn(size, *shape) for name in names}
