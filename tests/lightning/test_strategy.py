"""`chunkc.lightning`: Lightning's Trainer and Fabric under a small budget, beside their own strategies."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from harness import LOOP_NBYTES, differences, limited, weights
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from loops import assert_clipped_in_slots, assert_close, assert_moved, batches, gpt, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from zoo import floats

import chunkc
from chunkc.lightning import ChunkcFabricStrategy, ChunkcStrategy, ReportCallback
from chunkc.lightning.strategy import callable_parts
from chunkc.runtime.device import cpu_allocator

BUDGET = 700_000
"""Bytes: the model, its gradients and states take 1 MB."""

OPTIONS: dict[str, Any] = {"codegen": "eager", "whole_graph": "never", "activations": "keep"}
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


class AutoEncoder(lightning.LightningModule):
    """The example of Lightning's own documentation: parts are called one by one, and `forward` does not exist."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.encoder, self.decoders = mlp(), nn.ModuleList([mlp()])
        self.optimizer, self.losses = optimizer, list[float]()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.decoders[0](self.encoder(batch[0])), batch[0])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader() -> DataLoader:
    return DataLoader(TensorDataset(floats(3, (64, 64))), batch_size=8)


def fitted(
    folder: Path, strategy: Any, *, kind: Any = None, place: bool = True, resume: Any = None, **settings: Any
) -> lightning.Trainer:
    """A `Trainer` that has trained; with our strategy inside the hard limit, all of the model in the budget."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = strategy != "auto"
    model = (kind or AutoEncoder)(chunkc.optim.AdamW if ours else torch.optim.AdamW)
    if ours and place:
        chunkc.place(model)
    settings = QUIET | {"max_epochs": 2, "log_every_n_steps": 2, "logger": False} | settings
    trainer = lightning.Trainer(default_root_dir=folder, strategy=strategy, **settings)
    data = loader()
    with limited(BUDGET if ours and place else 1 << 30):
        trainer.fit(model, data, data, ckpt_path=resume)
    return trainer


def strategy(**options: Any) -> ChunkcStrategy:
    return ChunkcStrategy(memory_budget=BUDGET, **OPTIONS | options)


@pytest.mark.second_tier
def test_trains_validates_saves_and_resumes_exactly(tmp_path: Path) -> None:
    clipped = {"gradient_clip_val": 0.05}
    plain = fitted(tmp_path, "auto", **clipped)
    whole = fitted(tmp_path, strategy(), **clipped)
    assert_close(whole.lightning_module.losses, plain.lightning_module.losses)
    assert float(whole.callback_metrics["val_loss"]) == pytest.approx(
        float(plain.callback_metrics["val_loss"]), rel=1e-3
    )
    assert set(whole.progress_bar_metrics) == {"train_loss"}
    assert_moved(whole.lightning_module, BUDGET)
    assert_clipped_in_slots(whole.lightning_module)

    first = fitted(tmp_path / "parts", strategy(), max_epochs=1, **clipped)
    saved = first.checkpoint_callback.best_model_path
    assert list(torch.load(saved, weights_only=True)["state_dict"]) == list(AutoEncoder().state_dict())
    second = fitted(tmp_path / "parts", strategy(), resume=saved, **clipped)
    assert first.lightning_module.losses + second.lightning_module.losses == whole.lightning_module.losses
    assert not differences(weights(second.lightning_module), weights(whole.lightning_module))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_gradients_are_clipped_in_mixed_precision(tmp_path: Path, precision: Any) -> None:
    """With a loss scale, before they are divided by it; Lightning refuses both with optimizers that divide."""

    def settings() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if precision == "16-mixed" else None
        plugin = MixedPrecision(precision, "cpu", scaler)  # by name, Lightning has no fp16 on CPUs
        return {"plugins": [plugin], "gradient_clip_val": 0.05}

    plain = fitted(tmp_path, "auto", **settings())
    ours = fitted(tmp_path, strategy(), **settings())
    assert ours.lightning_module.losses == pytest.approx(plain.lightning_module.losses, rel=2e-2)
    assert_moved(ours.lightning_module, BUDGET)
    assert_clipped_in_slots(ours.lightning_module)
    unclipped = fitted(tmp_path, strategy(), plugins=settings()["plugins"])
    assert ours.lightning_module.losses != pytest.approx(unclipped.lightning_module.losses, rel=2e-2)


@pytest.mark.slow
def test_by_name_with_a_budget_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_MEMORY_BUDGET", str(BUDGET))
    trainer = fitted(tmp_path, "chunkc", place=False)
    assert isinstance(trainer.strategy, ChunkcStrategy)
    assert_moved(trainer.lightning_module, BUDGET)
    trainer.validate(trainer.lightning_module, loader(), verbose=False)


@pytest.mark.slow
def test_memory_traffic_and_stalls_go_to_all_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="board")
    gc.collect()
    others_nbytes = cpu_allocator.current_nbytes()
    trainer = fitted(tmp_path, strategy(), callbacks=[ReportCallback()], logger=logger)
    board = EventAccumulator(logger.log_dir).Reload()
    moved = [entry.value for entry in board.Scalars("chunkc/to_device_bytes")]
    assert len(moved) == 8
    assert 0 < sum(moved) <= chunkc.report(trainer.lightning_module).traffic_nbytes["to_device"]
    peaks = [entry.value - others_nbytes for entry in board.Scalars("chunkc/peak_bytes")]
    assert all(0 < peak <= BUDGET + LOOP_NBYTES for peak in peaks)
    assert min(entry.value for entry in board.Scalars("chunkc/wait_s")) >= 0
    assert set(trainer.progress_bar_metrics) == {"train_loss"}


class Manual(AutoEncoder):
    """Optimizes by hand, and calls itself."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        return self.decoders[0](self.encoder(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.losses.append(loss.item())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-2)


@pytest.mark.slow
def test_manual_optimization_and_a_module_that_calls_itself(tmp_path: Path) -> None:
    plain, ours = (fitted(tmp_path, chosen, kind=Manual).lightning_module for chosen in ("auto", strategy()))
    assert_close(ours.losses, plain.losses)
    assert_moved(ours, BUDGET)


class CallsMethods(AutoEncoder):
    """Its parts have parameters, and it calls none of them."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        weight = self.encoder[0].weight
        return nn.functional.linear(batch[0], weight, None).square().mean()


def test_a_training_step_that_calls_no_compiled_module_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for module, times in ((CallsMethods(), 1), (AutoEncoder(), 0)):
        caplog.clear()
        strategy = ChunkcStrategy(memory_budget=1 << 30, codegen="eager")
        settings = QUIET | {"max_steps": 2, "logger": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(default_root_dir=tmp_path, strategy=strategy, **settings)
        trainer.fit(module, loader())
        assert caplog.text.count("training_step has called no compiled module") == times


def test_the_parts_that_code_may_call() -> None:
    module = AutoEncoder()
    module.criterion = nn.CrossEntropyLoss()
    assert list(callable_parts(module)) == [module.encoder, module.decoders[0]]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"memory_budgets": 3}, "did you mean 'memory_budget'"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_mistakes_are_told_at_once(mistake: dict[str, Any], said: str) -> None:
    with pytest.raises(chunkc.OptionsError, match=said):
        ChunkcStrategy(**mistake)


# --- Fabric ---


def run_fabric(
    budget: int | None, folder: Path | None = None, steps: int = 6, **settings: Any
) -> tuple[nn.Module, list[float]]:
    """A loop of Fabric's; with a folder it saves after each step, and begins where it is saved.

    Args:
        budget: ours, in bytes, a hard limit too; None: Fabric's own strategy and PyTorch's optimizer.
    """
    torch._dynamo.reset()
    ours = budget is not None
    strategy = ChunkcFabricStrategy(memory_budget=budget, **OPTIONS) if ours else "auto"
    optimizer = chunkc.optim.AdamW if ours else torch.optim.AdamW
    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, **settings)
    plain = chunkc.place(gpt()) if ours else gpt()
    with limited(budget or 1 << 30):
        model, update = fabric.setup(plain, optimizer(plain.parameters(), lr=1e-3))
        return plain, fabric_losses(fabric, model, update, folder, steps)


def fabric_losses(fabric: Any, model: Any, update: Any, folder: Path | None, steps: int) -> list[float]:
    state, losses = {"model": model, "optimizer": update, "step": 0}, []
    if folder is not None and (folder / "saved").exists():
        fabric.load(folder / "saved", state)
    data = list(batches(tokens(12), 2))
    for step in range(state["step"], steps):
        loss = model(**data[step]).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, update, max_norm=0.5)
        update.step()
        update.zero_grad()
        losses.append(loss.item())
        state["step"] = step + 1
        if folder is not None:
            fabric.save(folder / "saved", state)
    return losses


@pytest.mark.slow
def test_fabric_trains_saves_and_resumes_exactly(tmp_path: Path) -> None:
    budget = 1_600_000
    _, plain = run_fabric(None)
    whole, losses = run_fabric(budget)
    assert_close(losses, plain)
    assert_moved(whole, budget)
    _, first = run_fabric(budget, tmp_path, 3)
    parts, second = run_fabric(budget, tmp_path)
    assert first + second == losses
    assert not differences(weights(parts), weights(whole))
    assert list(torch.load(tmp_path / "saved", weights_only=True)["model"]) == list(whole.state_dict())


@pytest.mark.slow
def test_fabric_clips_under_a_loss_scale() -> None:
    def run(budget: int | None) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        return run_fabric(budget, plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler)])[1]

    plain, losses = run(None), run(1_700_000)
    assert losses == pytest.approx(plain, rel=2e-2)
