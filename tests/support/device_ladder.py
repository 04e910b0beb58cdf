"""Train the models of the end-to-end ladder (`zoo.LADDER`) on the device."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from zoo import Case

import chunkc
from chunkc.runtime.device.cuda import memory_limit

MIB = 1 << 20
NOT_CAPTURED = "lstm"


@dataclass(frozen=True)
class LadderRun:
    losses: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    report: chunkc.Report


def on(device: str, batch: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Copy a batch to a device.

    Args:
        dtype: of its floating-point tensors; None: as they are.
    """

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return {name: moved(value) for name, value in batch.items()}


def train(
    case: Case, budget_nbytes: int, codegen: str = "eager", *, device: str = "cuda", home: str = "cpu",
    dtype: torch.dtype | None = None, autocast: torch.dtype | None = None, loss_scale: float | None = None,
    steps: int = 2, **optimizer_options: Any,
) -> LadderRun:  # fmt: skip
    """Train some steps under a limit of the budget and 64 MiB.

    The 64 MiB are for pages that are only partly used. The caller keeps batch and output, as plans assume.

    Args:
        dtype: of the model; None: as it is.
        autocast: the dtype of a region around forward and loss.
        loss_scale: what a `GradScaler` begins with; None: without one.
    """
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = chunkc.place(case.build().to(dtype), device=device, home=home)
    options = {"memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "never", "activations": "keep"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, **optimizer_options)
    scaler = torch.amp.GradScaler(device, init_scale=loss_scale or 1.0, enabled=loss_scale is not None)
    total_nbytes = torch.cuda.get_device_properties(0).total_memory
    limit_nbytes = torch.cuda.memory_reserved() + budget_nbytes + 64 * MIB
    losses = []
    with memory_limit(min(limit_nbytes, total_nbytes)):
        for seed in range(steps):
            batch = on(device, case.batch(seed), dtype)
            with torch.autocast(device, autocast, enabled=autocast is not None):
                output = compiled(**batch)
                loss = case.loss(output)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu().clone())
            del loss
        chunkc.synchronize(model)
    torch.cuda.synchronize()
    weights = tuple(p.detach().cpu().clone() for p in model.parameters())
    return LadderRun(tuple(losses), weights, chunkc.report(model))


def in_the_smallest_budget(case: Case, codegen: str = "eager", **options: Any) -> tuple[LadderRun, int]:
    """Train in the smallest budget, and return the run and that budget in bytes.

    It takes several attempts: graphs are planned one by one, and a later one may need more.
    """
    budget_nbytes = 4096
    for _ in range(6):
        try:
            return train(case, budget_nbytes, codegen, **options), budget_nbytes
        except chunkc.BudgetError as error:
            budget_nbytes = error.minimum_nbytes
    raise AssertionError(f"{case.name} does not train in what its BudgetErrors say")
