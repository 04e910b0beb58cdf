"""Script of `tests/lightning/test_ranks.py`: Lightning's Trainer and Fabric with two processes.

    python lightning_ranks.py FOLDER CASE ...

Lightning starts the second process, unless `torchrun` has. Rank 0 writes what came of the cases into FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import chunkc
from chunkc.lightning import ChunkcFabricStrategy, ChunkcStrategy
from chunkc.session.session import sessions_of

WIDTH, NUM_SAMPLES, BATCH = 24, 32, 8
QUIET: dict[str, Any] = {
    "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False
}  # fmt: skip
SETTINGS: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
OPTIONS: dict[str, Any] = {"codegen": "eager", "whole_graph": "never", "memory_budget": "1MiB"}
Result = dict[str, Any]


class Net(nn.Module):
    """Module with a row that one rank has, a weight with two names, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 57), nn.Linear(57, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.again = nn.Linear(WIDTH, 57)
        self.again.weight = self.up.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(x)) + self.again(x)
        return self.scale * self.gate(x).sigmoid() * self.down(hidden) + self.shift


class Module(lightning.LightningModule):
    def __init__(self, kind: Callable[..., Any], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net()
        self.kind, self.losses, self.validated = kind, list[float](), list[float]()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].flip(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class OnMeta(Module):
    """A module without memory until the strategy has placed it; its values then come from a checkpoint."""

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta"):
                self.net = Net()

    def setup(self, stage: str) -> None:
        self.net = nn.Identity()


class Early(Module):
    """A module that makes its optimizer before it is distributed."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__(kind)
        self.made = kind(self.parameters(), lr=1e-2)

    def configure_optimizers(self) -> Any:
        return self.made


def data() -> TensorDataset:
    return TensorDataset(torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)))


def fitted(module: Module, folder: Path, strategy: Any, num: int, resume: Path | None = None, **settings: Any) -> Any:
    """Return a Trainer that has trained a module, on batches of all processes together."""
    saving = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    settings = QUIET | SETTINGS | {"callbacks": [saving]} | settings
    trainer = lightning.Trainer(default_root_dir=folder, strategy=strategy, devices=num, **settings)
    torch._dynamo.reset()
    shuffled = DistributedSampler(data(), 1, 0)  # as Lightning does it where there are several processes
    loader = DataLoader(data(), BATCH // num, sampler=shuffled if num == 1 else None)
    trainer.fit(module, loader, DataLoader(data(), BATCH // num), ckpt_path=resume)
    return trainer


def trained(folder: Path, **changes: Any) -> Module:
    """Train a module on two processes, which begin with rank 0's values."""
    kind, resume = changes.pop("module", Module), changes.pop("resume", None)
    settings = {key: changes.pop(key) for key in list(changes) if key in (*SETTINGS, "callbacks", "sync_batchnorm")}
    strategy = ChunkcStrategy(**OPTIONS | changes)
    module = kind(chunkc.optim.AdamW, **({"seed": rank()} if kind is Module else {}))
    trainer = fitted(module, folder, strategy, 2, resume, **settings)
    assert trainer.strategy.world_size == dist.get_world_size() == 2
    assert trainer.strategy.model is module, "nothing wraps it"
    return module


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def bits(module: nn.Module) -> list[Any]:
    return [p.full_tensor().detach().double().sum().item() for p in module.parameters()]


def train(folder: Path) -> Result:
    whole = trained(folder / "whole")
    found: Result = {"losses": whole.losses, "validated": whole.validated, "bits": bits(whole)}
    transport = next(iter(sessions_of(whole.parameters()))).transport
    first = trained(folder / "stage 1", zero_stage=1)
    in_stage_1 = next(iter(sessions_of(first.parameters()))).transport
    found |= {"stage 1": first.losses}
    found["scattered"] = [one.sent_nbytes["scatters"] for one in (in_stage_1, transport)]
    return found | {"resumed on meta": resumed(folder, OnMeta)}


def resume(folder: Path) -> Result:
    """Resume a module with memory, from checkpoints of these two processes and of one process."""
    again = trained(folder / "of one", resume=folder / "plain" / "epoch=0.ckpt")
    return {"resumed": resumed(folder, Module), "of one": again.losses}


def resumed(folder: Path, kind: type[Module]) -> Result:
    again = trained(folder / f"resumed {kind.__name__}", module=kind, resume=folder / "whole" / "epoch=0.ckpt")
    return {"losses": again.losses, "bits": bits(again)}


def mistakes(folder: Path) -> Result:
    def message(**changes: Any) -> str:
        try:
            trained(folder / "never", **changes)
        except chunkc.ChunkcError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    return {
        "averaging": message(callbacks=[StochasticWeightAveraging(1e-2)]),
        "sync_batchnorm": message(sync_batchnorm=True),
        "early optimizer": message(module=Early),
        "unwritable": message(callbacks=[ModelCheckpoint("/proc/nowhere", save_top_k=-1)]),
    }


def fabric_losses(fabric: Any, folder: Path, num: int, kind: Any, steps: range, zero_stage: Any = None) -> Any:
    """Run a loop of Fabric's that saves after the second step, and resumes there if the steps begin there."""
    torch._dynamo.reset()
    torch.manual_seed(rank())
    model = Net()
    model, optimizer = fabric.setup(model, kind(model.parameters(), lr=1e-2, eps=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(data(), BATCH // num))
    state, losses = {"model": model, "optimizer": optimizer, "step": 0}, []
    if steps.start:
        fabric.load(folder / "fabric.ckpt", state)
        assert state["step"] == steps.start
    for step, (batch,) in enumerate(loader):
        if step not in steps:
            continue
        loss = nn.functional.mse_loss(model(batch), batch.flip(1))
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach().clone())))
        if step == 1:
            fabric.save(folder / "fabric.ckpt", state | {"step": 2})
    return losses, model


def with_fabric(folder: Path) -> Result:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=ChunkcFabricStrategy(**OPTIONS))
    early = ""
    try:
        fabric.setup(Net())
    except chunkc.OptionsError as error:
        early = str(error)
    fabric.launch()
    losses, model = fabric_losses(fabric, folder, 2, chunkc.optim.AdamW, range(4))
    again, resumed = fabric_losses(fabric, folder, 2, chunkc.optim.AdamW, range(2, 4))
    gathered = fabric.all_gather(torch.tensor([float(rank())])).flatten().tolist()
    return {
        "losses": losses, "again": again, "bits": bits(model), "resumed bits": bits(resumed), "early": early,
        "gathered": gathered, "broadcast": fabric.broadcast(rank()),
    }  # fmt: skip


CASES = {"train": train, "resume": resume, "mistakes": mistakes, "fabric": with_fabric}


def main(folder: Path, *cases: str) -> None:
    found = {case: CASES[case](folder) for case in cases}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
