"""Small models of many architectures with random weights and random batches, for end-to-end tests.

Every model returns its scalar loss from `forward` (transformers: as `output.loss`), so that all of a step's
memory is in the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from plain_modules import (
    HEADS,
    LAYERS,
    LSTM,
    SEQUENCE,
    VOCAB,
    WIDTH,
    AutocastConvNet,
    AutocastGPT,
    BigEmbedding,
    BreaksInLoop,
    ByteGPT,
    CalledTwice,
    CheckpointedGPT,
    ConvNet,
    ConvNeXt,
    DropoutMLP,
    Encoder,
    FrozenMLP,
    GraphBreaks,
    LSTMCells,
    ResNet,
    SharedBlocks,
    SometimesUnused,
    UNet,
)
from torch import Tensor, nn

BATCH = 2

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        name: unique, used as the test's id.
        make: builds the module from the global random state; use `build`.
        batch: keyword arguments of `forward` for a seed; same seed, same tensors; all of one shape.
        num_graphs: graphs that Dynamo captures over the batches of seeds 0 and 1.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    num_graphs: int = 1

    def build(self, seed: int = 0) -> nn.Module:
        """The model in training mode: same seed, same bits. The global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().train()

    @staticmethod
    def loss(output: Any) -> Tensor:
        """Return the scalar loss inside what the model returned."""
        return output if isinstance(output, Tensor) else output.loss


def integers(seed: int, shape: tuple[int, ...], high: int) -> Tensor:
    """Draw an int64 tensor of `shape` in [0, high)."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def floats(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Draw a float32 tensor of `shape` from a standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- transformers: small random configurations


def gpt2(num_layers: int = LAYERS, **dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=WIDTH, n_layer=num_layers, n_head=HEADS, use_cache=False,
        bos_token_id=0, eos_token_id=0, **dropout,
    ))  # fmt: skip
    model.loss_type = "ForCausalLM"  # else a warning about it breaks the graph
    return model


def _bert(**dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, max_position_embeddings=64, use_cache=False, **dropout,
    ))  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        image_size=32, patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",  # else the first step sets it, and the second recompiles
    ))  # fmt: skip


def llama(tied: bool, num_layers: int = LAYERS) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=num_layers, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=3 * WIDTH, max_position_embeddings=64, use_cache=False,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=2,
        num_decoder_layers=2, num_heads=HEADS, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    ))  # fmt: skip


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=WIDTH, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, use_cache=False, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=16, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH, max_source_positions=50, max_target_positions=64, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ))  # fmt: skip


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH}
    text = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


NO_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _causal_batch(seed: int) -> Batch:
    tokens = integers(seed, (BATCH, SEQUENCE), VOCAB)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked_batch(seed: int) -> Batch:
    tokens = integers(seed, (BATCH, SEQUENCE), VOCAB)
    masked = integers(seed + 1000, (BATCH, SEQUENCE), 100) < 15
    return {"input_ids": tokens.masked_fill(masked, 4), "labels": tokens.masked_fill(~masked, -100)}


def _image_batch(seed: int) -> Batch:
    return {"pixel_values": floats(seed, (BATCH, 3, 32, 32)), "labels": integers(seed, (BATCH,), 10)}


def _translation_batch(seed: int) -> Batch:
    return {
        "input_ids": integers(seed, (BATCH, SEQUENCE), VOCAB),
        "labels": integers(seed + 1000, (BATCH, SEQUENCE), VOCAB),
    }


# ---------------------------------------------------------------- batches of the plain modules


def byte_batch(seed: int, length: int = SEQUENCE, batch: int = BATCH) -> Batch:
    """Random bytes and the same bytes one position on: int64 [batch, length] each."""
    tokens = integers(seed, (batch, length + 1), 256)
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def _vector_batch(width: int) -> Callable[[int], Batch]:
    return lambda seed: {
        "x": floats(seed, (BATCH, SEQUENCE, width)),
        "y": floats(seed + 1000, (BATCH, SEQUENCE, width)),
    }


def _token_batch(high: int, num_labels: int) -> Callable[[int], Batch]:
    return lambda seed: {
        "x": integers(seed, (BATCH, SEQUENCE), high),
        "y": integers(seed + 1000, (BATCH, SEQUENCE), num_labels),
    }


def _convnet_batch(seed: int) -> Batch:
    return {"images": floats(seed, (BATCH, 3, 32, 32)), "labels": integers(seed, (BATCH,), 10)}


def _speech_batch(seed: int) -> Batch:
    return {"input_features": floats(seed, (BATCH, 16, 100)), "labels": integers(seed, (BATCH, 20), VOCAB)}


def _caption_batch(seed: int) -> Batch:
    return {
        "input_ids": integers(seed, (BATCH, SEQUENCE), VOCAB),
        "pixel_values": floats(seed, (BATCH, 3, 32, 32)),
        "return_loss": True,
    }


def _noise_batch(seed: int) -> Batch:
    return {"images": floats(seed, (BATCH, 3, 32, 32)), "noise": floats(seed + 1000, (BATCH, 3, 32, 32))}


def _branch_batch(seed: int) -> Batch:
    return {**_vector_batch(WIDTH)(seed), "branch": seed % 2 == 0}


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("gpt2", lambda: gpt2(**NO_GPT2_DROPOUT), _causal_batch),
        Case("gpt2_dropout", gpt2, _causal_batch),
        Case("bert", lambda: _bert(**NO_BERT_DROPOUT), _masked_batch),
        Case("bert_dropout", _bert, _masked_batch),
        Case("vit", _vit, _image_batch),
        Case("llama", lambda: llama(tied=False), _causal_batch),
        Case("llama_tied", lambda: llama(tied=True), _causal_batch),
        Case("t5", _t5, _translation_batch),
        Case("mixtral", _mixtral, _causal_batch),
        Case("convnet", ConvNet, _convnet_batch),
        Case("byte_gpt", ByteGPT, byte_batch),
        Case("short_gpt", lambda: ByteGPT(num_layers=2), byte_batch),
        Case("frozen_mlp", FrozenMLP, _vector_batch(2 * WIDTH)),
        Case("called_twice", CalledTwice, _token_batch(VOCAB, VOCAB)),
        Case("encoder", Encoder, _vector_batch(WIDTH)),
        Case("sometimes_unused", SometimesUnused, _branch_batch, num_graphs=2),
        Case("graph_breaks", GraphBreaks, byte_batch, num_graphs=3),
        Case("breaks_in_loop", BreaksInLoop, byte_batch, num_graphs=3),
        Case("big_embedding", BigEmbedding, _token_batch(8192, 32)),
    )
}

MORE_CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("resnet", ResNet, _convnet_batch),
        Case("convnext", ConvNeXt, _convnet_batch),
        Case("lstm_cells", LSTMCells, _token_batch(VOCAB, VOCAB)),
        Case("lstm", LSTM, _token_batch(VOCAB, VOCAB), num_graphs=0),
        Case("unet", UNet, _noise_batch),
        Case("whisper", _whisper, _speech_batch),
        Case("clip", _clip, _caption_batch),
        Case("dropout", DropoutMLP, _vector_batch(WIDTH)),
        Case("checkpointed_gpt", CheckpointedGPT, byte_batch),
        Case("autocast_gpt", AutocastGPT, byte_batch),
        Case("autocast_convnet", AutocastConvNet, _convnet_batch),
        Case("odd_layouts", SharedBlocks, _vector_batch(WIDTH)),
    )
}
"""Cases for the comparison of predicted with measured bytes, in addition to `CASES`."""

LADDER: dict[str, Case] = CASES | MORE_CASES


class BreaksTwice(ByteGPT):
    """Three graphs of different blocks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks[:4]:
            hidden = block(hidden)
        torch._dynamo.graph_break()
        for block in self.blocks[4:8]:
            hidden = block(hidden)
        torch._dynamo.graph_break()
        for block in self.blocks[8:]:
            hidden = block(hidden)
        return self.score(hidden, y)


def _long_batch(seed: int) -> Batch:
    tokens = integers(seed, (BATCH, LENGTH), VOCAB)
    return {"input_ids": tokens, "labels": tokens.clone()}


DEPTH, LENGTH = 12, 64

DEEP: dict[str, Case] = {
    case.name: case
    for case in (
        Case("deep_gpt", lambda: ByteGPT(num_layers=DEPTH), lambda seed: byte_batch(seed, LENGTH)),
        Case("deep_autocast_gpt", lambda: AutocastGPT(num_layers=DEPTH), lambda seed: byte_batch(seed, LENGTH)),
        # Of checkpointed blocks only the inputs are left to save.
        Case("deep_checkpointed_gpt", lambda: CheckpointedGPT(num_layers=64), lambda seed: byte_batch(seed, LENGTH, 8)),
        Case("deep_breaks", lambda: BreaksTwice(num_layers=DEPTH), lambda seed: byte_batch(seed, LENGTH), num_graphs=3),
        Case(
            "deep_breaks_in_loop",
            lambda: BreaksInLoop(num_layers=DEPTH),
            lambda seed: byte_batch(seed, LENGTH),
            num_graphs=3,
        ),
        Case("deep_gpt2", lambda: gpt2(DEPTH), _long_batch),
        Case("deep_llama", lambda: llama(tied=True, num_layers=DEPTH), _long_batch),
    )
}
"""Models that save much more than they are: half of what they need with every value kept is enough."""
