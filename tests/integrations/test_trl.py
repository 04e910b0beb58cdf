"""trl's `SFTTrainer` under a small budget, with a tokenizer made on the spot, beside the trainer as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import limited
from loops import LENGTH, VOCAB, WIDTH, assert_close
from torch import nn

import chunkc
from chunkc.session.session import owner

pytestmark = pytest.mark.slow

LOSS_NBYTES = 64 * 1024
"""For what is in no budget: trl's loss over its logits in eager PyTorch."""

TEXTS = [f"the step {i} moves {7 * i % 11} chunks before the {i % 5} th wait" for i in range(24)]


def tokenizer() -> Any:
    """Of words of `TEXTS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        TEXTS, trainers.WordLevelTrainer(vocab_size=VOCAB, special_tokens=["<unk>", "<pad>", "</s>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=3 * WIDTH, max_position_embeddings=2 * LENGTH, bos_token_id=0, eos_token_id=2,
    ))  # fmt: skip


def tuned(folder: Path, trainer: Any, config: Any, lora: bool, **settings: Any) -> Any:
    from datasets import Dataset
    from peft import LoraConfig

    torch._dynamo.reset()
    arguments = config(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to="none",
        disable_tqdm=True, use_cpu=True, bf16=False, learning_rate=1e-3, max_length=LENGTH, save_steps=4, **settings,
    )  # fmt: skip
    ours = "memory_budget" in settings
    made = trainer(
        model=chunkc.place(llama()) if ours else llama(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    with limited(settings["memory_budget"] + LOSS_NBYTES if ours else 1 << 30):
        made.train()
    return made


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora", [False, True])
def test_supervised_fine_tuning(tmp_path: Path, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths vary from batch to batch, so the graph becomes symbolic at the second."""
    import trl  # with the others, takes seconds: not in every collection

    import chunkc.trl

    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", VOCAB)  # its loss takes tiles as wide
    plain = tuned(tmp_path / "plain", trl.SFTTrainer, trl.SFTConfig, lora)
    options = {"memory_budget": 1_500_000, "backend_options": {"codegen": "eager", "whole_graph": "never"}}
    ours = tuned(tmp_path / "ours", chunkc.trl.SFTTrainer, chunkc.trl.SFTConfig, lora, **options)
    assert_close(losses(ours), losses(plain))
    report = chunkc.report(ours.model)
    assert report.predicted_peak_nbytes <= report.memory_budget_nbytes == 1_500_000
    outside = [name for name, parameter in ours.model.named_parameters() if owner(parameter) is None]
    assert not outside, "the head too, which trl's loss reads at home, in eager PyTorch"
    saved = tmp_path / "ours" / "checkpoint-4"
    assert (saved / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()
    assert not any(b"_orig_mod" in path.read_bytes() for path in saved.rglob("*") if path.is_file())
