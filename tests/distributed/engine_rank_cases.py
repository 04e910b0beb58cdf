"""What ranks do with DeepSpeed's engine; run as `rank_cases` is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parent))

import rank_cases
from rank_cases import Result, arrays, batches, bits, made, mean, own, told

import chunkc
from chunkc.session.session import sessions_of

STEPS, MICRO_STEPS, CLIPPING, EPS = 3, 2, 0.1, 1e-3


def config(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": EPS, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2}},
        "zero_optimization": {"stage": stage},
        "chunkc": {"memory_budget": "1MiB", "codegen": "eager"},
    } | changes


def trained(engine: Any, num_steps: int) -> dict[str, Any]:
    """Losses and norms of DeepSpeed's loop."""
    losses, norms = [], []
    for step in range(num_steps):
        for batch in batches(step):
            loss = engine(own(batch))
            engine.backward(loss)
            engine.step()
            losses.append(mean(loss))
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "lr": engine.get_lr()}


def stages() -> Result:
    """In fp32, with ranks that build different models; in fp16 with an overflow; beside one process."""
    found: Result = {}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}
    for name, (stage, changes) in {"stage 1": (1, {}), "stage 3": (3, {}), "fp16": (2, fp16)}.items():
        torch._dynamo.reset()
        seed = dist.get_rank()  # the values of rank 0 count
        engine, _ = chunkc.initialize_engine(lambda: made(seed, num_blocks=1), 0, config(stage, **changes))  # noqa: B023
        of_stage = trained(engine, 6 if name == "fp16" else STEPS)
        of_stage["samples"] = [
            engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.global_samples
        ]  # fmt: skip
        of_stage["skipped"] = [engine.skipped_steps, engine.loss_scale]
        of_stage["sums"] = [float(value.sum()) for value in arrays(engine.module)]
        found[name] = of_stage
    return found


def groups() -> None:
    """Parameter groups that were made before the model was distributed."""
    model = made(num_blocks=1)
    given = [{"params": list(model.blocks.parameters()), "lr": 0.5}, {"params": model.embed.weight}]
    engine, optimizer = chunkc.initialize_engine(model, 0, config(3, scheduler=None), model_parameters=given)
    mine = {id(parameter) for parameter in engine.module.parameters()}
    assert all(id(p) in mine for group in optimizer.param_groups for p in group["params"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01]
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    refused = told(lambda: chunkc.initialize_engine(made(num_blocks=1), 0, config(3), optimizer=plain))
    assert "2 processes cannot take an optimizer that has the parameters of one" in refused
    assert refused.startswith("UnsupportedError: ")


def on_disks(folder: Path) -> None:
    """Offloaded to nvme: states alone, then parameters, too; each rank in a directory of its own. As in RAM."""
    own_folder = folder / str(dist.get_rank())
    own_folder.mkdir(exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(own_folder)}
    states = ["exp_avg", "exp_avg_sq"]
    ways: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"offload_optimizer": nvme}, states),
        ({"offload_optimizer": nvme, "offload_param": nvme}, [*states, "grad", "param"]),
    ]
    found = []
    for offload, kinds in ways:
        torch._dynamo.reset()
        zero = {"stage": 3, **offload}
        engine, _ = chunkc.initialize_engine(made(num_blocks=1), 0, config(3, zero_optimization=zero))
        found.append((trained(engine, STEPS), bits(engine.module)))
        (session,) = sessions_of(engine.module.parameters())
        layout = session.store.layout
        assert sorted({k for g in layout.groups for k in g.update_kinds if layout.is_on_disk(k)}) == kinds
        assert (str(own_folder) in Path("/proc/self/maps").read_text()) == bool(kinds)
    assert found[0] == found[1] == found[2]
    assert not list(own_folder.iterdir()), "files have no names"


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
