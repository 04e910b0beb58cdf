"""Lightning's Trainer on several GPUs made of RAM, one for each process, and plain in one process on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def plain(folder: Path) -> dict[str, list[float]]:
    """Train with Lightning alone on the batches of both ranks."""
    from lightning_ranks import Module, fitted

    module = Module(torch.optim.AdamW)
    fitted(module, folder, "auto", 1)
    return {"losses": module.losses, "validated": module.validated}


def main(folder: str) -> None:
    """Train in a roomy budget, in the smallest one, and from its first checkpoint on; prints losses and weights."""
    from lightning_ranks import Module, fitted

    import chunkc
    from chunkc.lightning import ChunkcStrategy

    runs: list[dict[str, Any]] = []
    budget = 1 << 30
    for name in ("roomy", "tight", "resumed"):
        strategy = ChunkcStrategy(codegen="eager", whole_graph="never", debug=True, memory_budget=budget, zero_stage=3)
        resume = Path(folder) / "roomy" / "epoch=0.ckpt" if name == "resumed" else None
        module = Module(chunkc.optim.AdamW, seed=int(os.environ["RANK"]))  # the values of rank 0 count
        fitted(module, Path(folder) / name, strategy, int(os.environ["WORLD_SIZE"]), resume, accelerator="gpu")
        assert "nccl" in dist.get_backend_config()
        assert all(parameter.device.type == "cuda" for parameter in module.parameters())
        budget = chunkc.report(module).minimum_budget_nbytes
        sums = [p.full_tensor().detach().double().sum().item() for p in module.parameters()]  # type: ignore[union-attr]
        runs.append({"losses": module.losses, "validated": module.validated, "sums": sums})
    print(json.dumps({"runs": runs}), flush=True)
    os._exit(0)
