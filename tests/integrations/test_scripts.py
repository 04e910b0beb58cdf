"""A script of the kind that public examples have: padded texts, metrics, a command line; in plain form and changed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import limited

import chunkc

pytestmark = pytest.mark.slow

FINE_TUNING = """
import sys
from dataclasses import dataclass, field

import torch
from transformers import (
    BertConfig, BertForSequenceClassification, DataCollatorWithPadding, HfArgumentParser, PreTrainedTokenizerFast,
    set_seed,
)
from transformers import Trainer, TrainingArguments
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


@dataclass
class DataArguments:
    num_examples: int = field(default=24)


texts = [f"the film was {'good' if i % 2 else 'bad'} and {i} hours long" for i in range(24)]
data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(training_args.seed)
words = Tokenizer(models.WordLevel(unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")
rows = [{**tokenizer(text), "labels": i % 2} for i, text in enumerate(texts[: data_args.num_examples])]
config = BertConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, problem_type="single_label_classification",
)
model = BertForSequenceClassification(config)
trainer = Trainer(
    model=model, args=training_args, train_dataset=rows, eval_dataset=rows[:8], processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda p: {"accuracy": (p[0].argmax(-1) == p[1]).mean()},
)
result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", result.metrics)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(trainer.evaluate())
"""


def run(script: str, arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    path = folder / "script.py"
    path.write_text(script)
    module = types.ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", module)  # dataclasses look there
    exec(compile(script, str(path), "exec"), module.__dict__)
    return module.__dict__


def test_one_changed_line_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "--output_dir", "out", "--max_steps", "6", "--logging_steps", "1", "--per_device_train_batch_size", "4",
        "--use_cpu", "true", "--report_to", "none", "--learning_rate", "1e-3", "--disable_tqdm", "true",
    ]  # fmt: skip
    before = "from transformers import Trainer, TrainingArguments"
    assert FINE_TUNING.count(before) == 1
    changed = FINE_TUNING.replace(before, "from chunkc.transformers import Trainer, TrainingArguments")
    plain = run(FINE_TUNING, arguments, tmp_path / "plain", monkeypatch)
    with limited(1500 << 10):
        ours = run(changed, [*arguments, "--memory_budget", "1500KiB"], tmp_path / "ours", monkeypatch)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    report = chunkc.report(ours["model"])
    assert report.predicted_peak_nbytes <= report.memory_budget_nbytes == 1500 << 10
    assert report.num_resident_chunks < report.num_chunks
