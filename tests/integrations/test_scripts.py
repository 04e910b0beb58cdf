"""Scripts of the kind that public examples have, run with at most three changed lines each, and as they stand."""

from __future__ import annotations

import difflib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

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

AUTO_ENCODER = """
import torch
from torch import nn
import lightning as L


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return optimizer


L.seed_everything(1)
dataset = torch.utils.data.TensorDataset(torch.rand(32, 1, 28, 28), torch.zeros(32))
encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))
model = LitAutoEncoder(encoder, decoder)
trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_progress_bar=False)
trainer.fit(model=model, train_dataloaders=torch.utils.data.DataLoader(dataset, batch_size=8))
losses = model.losses
"""

FINE_TUNING_CHANGES = {
    "from transformers import Trainer, TrainingArguments": "from chunkc.transformers import Trainer, TrainingArguments",
}
AUTO_ENCODER_CHANGES = {
    "import lightning as L": "import lightning as L, chunkc.lightning",
    "torch.optim.Adam(": "chunkc.optim.Adam(",
    'accelerator="cpu", ': 'accelerator="cpu", strategy=chunkc.lightning.ChunkcStrategy(memory_budget="900KiB"), ',
}


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


def changed(script: str, changes: dict[str, str]) -> str:
    for before, after in changes.items():
        assert script.count(before) == 1
        script = script.replace(before, after)
    return script


@pytest.mark.parametrize(
    ("script", "changes", "arguments", "more"),
    [
        (
            FINE_TUNING, FINE_TUNING_CHANGES,
            ["--output_dir", "out", "--max_steps", "6", "--logging_steps", "1", "--per_device_train_batch_size", "4",
             "--use_cpu", "true", "--report_to", "none", "--learning_rate", "1e-3", "--disable_tqdm", "true"],
            ["--memory_budget", "1500KiB"],
        ),
        (AUTO_ENCODER, AUTO_ENCODER_CHANGES, [], []),
    ],
    ids=["transformers", "lightning"],
)  # fmt: skip
def test_three_changed_lines_at_most(
    script: str, changes: dict[str, str], arguments: list[str], more: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    new = changed(script, changes)
    diff = list(difflib.unified_diff(script.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    assert 1 <= sum(line.startswith("+") for line in diff) <= 3
    plain = run(script, arguments, tmp_path / "plain", monkeypatch)
    ours = run(new, arguments + more, tmp_path / "ours", monkeypatch)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    report = chunkc.report(ours["model"])
    assert report.predicted_peak_nbytes <= report.memory_budget_nbytes
    assert report.num_resident_chunks < report.num_chunks
