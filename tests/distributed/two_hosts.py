"""Two hosts: network namespaces of this machine, with a slow link between them, and two ranks in each.

    unshare --user --map-root-user --net --mount python two_hosts.py FOLDER

needs `ip`, `tc` and a kernel that lets a user make namespaces. Each rank writes `RANK.json`: by the shape of the mesh
what its host has sent in a step over either link, in parts of the parameters, and whether weights were those of one
process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SLOW, FAST = "eth0", "lo"
HOSTS = {"near": "10.0.0.1", "far": "10.0.0.2"}
RATE = "400mbit"


def make_hosts() -> None:
    """Namespaces, joined by a pair of virtual network cards that let so much through."""
    commands = ["mount -t tmpfs tmpfs /run", *(f"ip netns add {host}" for host in HOSTS)]
    commands += [f"ip link add {SLOW} netns near type veth peer name {SLOW} netns far"]
    for host, address in HOSTS.items():
        commands += [
            f"ip -n {host} address add {address}/24 dev {SLOW}",
            f"ip -n {host} link set {SLOW} up",
            f"ip -n {host} link set {FAST} up",
            f"tc -n {host} qdisc add dev {SLOW} root tbf rate {RATE} burst 128kb latency 200ms",
        ]
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


def start(rank: int, folder: Path) -> subprocess.Popen[bytes]:
    host = list(HOSTS)[rank // 2]
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "MASTER_ADDR": HOSTS["near"],
        "MASTER_PORT": "29400",
        "GLOO_SOCKET_IFNAME": SLOW,
    }
    program = f"hostname {host} && exec {sys.executable} -P {__file__} {folder}"
    command = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", program]
    return subprocess.Popen(command, env=os.environ | environment)


def sent_nbytes(link: str) -> int:
    """What this host has sent over a link since it is there."""
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def train(folder: Path) -> None:
    """As one of four ranks: a step to compile, and three that count."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import chunkc

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return chunkc.optim.SGD(model.parameters(), lr=0.1)

    torch.set_num_threads(1)
    chunkc.init_process_group()
    rank = dist.get_rank()
    batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    reference = made()
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(4):
        reference(batch).square().mean().backward()
        expected.step()
        expected.zero_grad()
    found = {}
    for shape in ((2, 2), (4,)):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape)
        model = chunkc.distribute(made(), mesh, zero_stage=3)
        options = {"memory_budget": "1536KiB", "codegen": "eager"}
        run, optimizer = torch.compile(model, backend="chunkc", options=options), sgd(model)
        before = {}
        for step in range(4):
            if step == 1:
                dist.barrier()
                before = {link: sent_nbytes(link) for link in (SLOW, FAST)}
                dist.barrier()
            run(batch[2 * rank :][:2].clone()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        total_nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
        after = {link: sent_nbytes(link) for link in (SLOW, FAST)}
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        found[str(shape)] = {
            **{link: (after[link] - before[link]) / 3 / total_nbytes for link in (SLOW, FAST)},
            "difference": max(float((p.full_tensor() - q).detach().abs().max()) for p, q in pairs),  # type: ignore[union-attr]
        }
    found["host"] = socket.gethostname()  # type: ignore[assignment]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(folder: Path) -> int:
    if "RANK" in os.environ:
        train(folder)
        return 0
    make_hosts()
    ranks = [start(rank, folder) for rank in range(4)]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
