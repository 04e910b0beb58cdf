"""Scripts of the kind that public examples have, run with at most three changed lines each, and as they stand."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import limited
from torch import nn

import chunkc
from chunkc.ir.units import parse_nbytes

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

DEEPSPEED = """
import argparse
import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser(description="fine-tuning")
parser.add_argument("--local_rank", type=int, default=-1, help="passed by the launcher")
parser.add_argument("--epochs", type=int, default=2)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=128, n_positions=32, resid_pdrop=0.0,
                                   embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
dataset = torch.randint(128, (16, 32))
train_loader = torch.utils.data.DataLoader(dataset, batch_size=2)
parameters = filter(lambda p: p.requires_grad, model.parameters())
model_engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=parameters)
losses = []
for epoch in range(args.epochs):
    for step, batch in enumerate(train_loader):
        batch = batch.to(model_engine.device)
        outputs = model_engine(input_ids=batch, labels=batch)
        loss = outputs.loss
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
"""

DEEPSPEED_CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "gradient_clipping": 1.0,
    "fp16": {"enabled": False},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e6,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

PATRICKSTAR = """
import torch
from torch import nn
from patrickstar.runtime import initialize_engine

config = {
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
    },
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 2**3, "loss_scale_window": 1000, "hysteresis": 2,
             "min_loss_scale": 1},
    "default_chunk_size": 128 * 128,
    "release_after_init": True,
    "use_cpu_embedding": False,
    "client": {"mem_tracer": {"use_async_mem_monitor": True}},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.head = nn.Linear(128, 128)

    def forward(self, ids):
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids[:, 1:].flatten())


def model_func():
    torch.manual_seed(0)
    return Model()


model, optimizer = initialize_engine(model_func=model_func, local_rank=0, config=config)
dataloader = [torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(i % 2)) for i in range(8)]
losses = []
for data in dataloader:
    optimizer.zero_grad()
    loss = model(data)
    model.backward(loss)
    optimizer.step()
    losses.append(loss.item())
"""

FINE_TUNING_CHANGES = {
    "from transformers import Trainer, TrainingArguments": "from chunkc.transformers import Trainer, TrainingArguments",
}
AUTO_ENCODER_CHANGES = {
    "import lightning as L": "import lightning as L, chunkc.lightning",
    "torch.optim.Adam(": "chunkc.optim.Adam(",
    'accelerator="cpu", ': 'accelerator="cpu", strategy=chunkc.lightning.ChunkcStrategy(memory_budget="900KiB"), ',
}
DEEPSPEED_CHANGES = {
    "import deepspeed\n": "import chunkc\n",
    "parser = deepspeed.add_config_arguments(parser)": 'parser.add_argument("--deepspeed_config")',
    "model_engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=parameters)": (
        "model_engine, optimizer = chunkc.initialize_engine(model, config=args.deepspeed_config)"
    ),
}
PATRICKSTAR_CHANGES = {"from patrickstar.runtime import": "from chunkc import"}


class PlainEngine:
    """What the engines of DeepSpeed and PatrickStar compute, in plain PyTorch: gradients that add up, are unscaled and
    clipped in fp32, and update fp32 masters."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        params = config["optimizer"]["params"]
        arguments = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay")}
        self.in_half = config["fp16"]["enabled"]
        self.scale = 2.0 ** config["fp16"].get("initial_scale_power", 0)
        self.max_norm = config.get("gradient_clipping", float("inf"))
        self.accumulate = config.get("train_batch_size", 1) // config.get("train_micro_batch_size_per_gpu", 1)
        self.model = model.half() if self.in_half else model
        self.masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, **arguments)
        self.device, self.num_calls = torch.device("cpu"), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.scale / self.accumulate).backward()

    def step(self) -> None:
        self.num_calls += 1
        if self.num_calls % self.accumulate:
            return
        parameters = list(self.model.parameters())
        for master, parameter in zip(self.masters, parameters):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / self.scale
        nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        self.optimizer.step()
        for master, parameter in zip(self.masters, parameters):
            parameter.data.copy_(master.detach())
        self.zero_grad()

    def zero_grad(self) -> None:
        self.model.zero_grad()


def plain_deepspeed() -> types.ModuleType:
    def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--deepspeed_config")
        return parser

    def initialize(args: argparse.Namespace, model: nn.Module, model_parameters: object) -> tuple[Any, ...]:
        engine = PlainEngine(model, json.loads(Path(args.deepspeed_config).read_text()))
        return engine, engine.optimizer, None, None

    module = types.ModuleType("deepspeed")
    module.__spec__ = ModuleSpec("deepspeed", None)  # transformers looks for it
    vars(module).update(add_config_arguments=add_config_arguments, initialize=initialize)
    return module


def plain_patrickstar() -> types.ModuleType:
    def initialize_engine(model_func: Callable[[], nn.Module], local_rank: int, config: dict[str, Any]) -> Any:
        engine = PlainEngine(model_func(), config)
        return engine, engine

    module = types.ModuleType("patrickstar.runtime")
    vars(module).update(initialize_engine=initialize_engine)
    return module


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
    ("script", "changes", "arguments", "more", "budget"),
    [
        (
            FINE_TUNING, FINE_TUNING_CHANGES,
            ["--output_dir", "out", "--max_steps", "6", "--logging_steps", "1", "--per_device_train_batch_size", "4",
             "--use_cpu", "true", "--report_to", "none", "--learning_rate", "1e-3", "--disable_tqdm", "true"],
            ["--memory_budget", "1500KiB"], "1500KiB",
        ),
        (AUTO_ENCODER, AUTO_ENCODER_CHANGES, [], [], "900KiB"),
    ],
    ids=["transformers", "lightning"],
)  # fmt: skip
def test_three_changed_lines_at_most(
    script: str, changes: dict[str, str], arguments: list[str], more: list[str], budget: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    new = changed(script, changes)
    diff = list(difflib.unified_diff(script.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    assert 1 <= sum(line.startswith("+") for line in diff) <= 3
    plain = run(script, arguments, tmp_path / "plain", monkeypatch)
    with limited(parse_nbytes(budget)):
        ours = run(new, arguments + more, tmp_path / "ours", monkeypatch)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    report = chunkc.report(ours["model"])
    assert report.predicted_peak_nbytes <= report.memory_budget_nbytes
    assert report.num_resident_chunks < report.num_chunks


@pytest.mark.parametrize(
    ("script", "changes", "arguments", "budget"),
    [
        (DEEPSPEED, DEEPSPEED_CHANGES, ["--deepspeed_config", "../ds_config.json"], "2200KiB"),
        (PATRICKSTAR, PATRICKSTAR_CHANGES, [], "540KiB"),
    ],
    ids=["deepspeed", "patrickstar"],
)
def test_scripts_of_other_systems(
    script: str, changes: dict[str, str], arguments: list[str], budget: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Beside what these compute, in plain PyTorch. The budget is the environment's: a launcher has no other place."""
    (tmp_path / "ds_config.json").write_text(json.dumps(DEEPSPEED_CONFIG))
    monkeypatch.setenv("CHUNKC_MEMORY_BUDGET", budget)
    for module in (plain_deepspeed(), plain_patrickstar()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert len(changes) <= 3
    plain = run(script, arguments, tmp_path / "plain", monkeypatch)
    with limited(parse_nbytes(budget)):
        ours = run(changed(script, changes), arguments, tmp_path / "ours", monkeypatch)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert ours["losses"][-1] < ours["losses"][0]
    model = ours.get("model_engine") or ours["model"]
    report = chunkc.report(model)
    assert report.predicted_peak_nbytes <= report.memory_budget_nbytes
    assert report.num_resident_chunks < report.num_chunks
