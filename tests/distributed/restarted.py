"""What `torchrun` starts in `test_restarts`: training that one rank ends in the middle of a step, once.

    torchrun ... restarted.py FOLDER HOW

HOW says what happens then: "killed" is rank 1; "gone" is this rank with its launcher, as on a host that loses its
power; "no" is nothing. Rank 0 writes what came of it into FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import chunkc

STEPS = 5

folder, how = Path(sys.argv[1]), sys.argv[2]
chunkc.init_process_group(timeout_s=120)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = chunkc.distribute(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)), mesh, timeout_s=90)
run = torch.compile(model, backend="chunkc", options={"memory_budget": "1MiB", "codegen": "eager"})
optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
losses = {}
with chunkc.Checkpoint(folder / "steps", model=run, optimizer=optimizer) as ck:
    begin = ck.load_latest() or 0
    for step in range(begin, STEPS):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = run(batch.chunk(dist.get_world_size())[dist.get_rank()].clone()).square().mean()
        if begin == 0 and step == 3 and (how == "gone" or (how == "killed" and dist.get_rank() == 1)):
            ck.wait()
            if how == "gone":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses[step] = float(total / dist.get_world_size())
        ck.save(step + 1)
weights = [parameter.full_tensor().tolist() for parameter in model.parameters()]
if dist.get_rank() == 0:
    found = {"begin": begin, "ranks": dist.get_world_size(), "losses": losses, "weights": weights}
    (folder / "found.json").write_text(json.dumps(found))
dist.destroy_process_group()
