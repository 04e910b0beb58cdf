"""Cases of ranks in tests of several devices: each runs in a process per rank (see `device_ranks`).

    import device_rank_cases; device_rank_cases.main("stages")

Prints what the case came to, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from device_gpt import GPT
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import chunkc
from chunkc.explaining.cuda_offline import overhead_on
from chunkc.machines.devices import overhead_of
from chunkc.machines.presets import load_hardware
from chunkc.passes.graphs.collectives import Rendezvous
from chunkc.runtime.device.cuda import CudaExchangeLink, CudaMark
from chunkc.runtime.distributed import nccl
from chunkc.runtime.distributed.transport import GATHERS, SCATTERS, Transport
from chunkc.runtime.store import slots
from chunkc.session.session import sessions_of

SHAPE = {"width": 32, "layers": 2, "heads": 2, "vocab": 64, "sequence": 16}
HUGE = 1 << 30
Result = dict[str, Any]


def trained(
    mesh: DeviceMesh, budget: int, *, stage: Any = 3, steps: int = 3, accumulate: int = 1, clip: float | None = 0.5,
    dtype: torch.dtype = torch.float32, optimizer: Callable[..., Any] = chunkc.optim.AdamW, scaled: bool = False,
    debug: bool = True, codegen: str = "eager", layers: bool = False, home: str = "cpu", disk_holds: str = "auto",
    **optimizer_options: Any,
) -> Result:  # fmt: skip
    """Train a GPT on the ranks of a mesh, each with batches of its own.

    Args:
        layers: ranks along the mesh's last dimension compute layers together, and have the same batches.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank, device = dist.get_rank(), mesh.device_type
    model = GPT(**SHAPE).to(dtype)
    if layers:
        parallelize_module(model, mesh["tp"], styles())
        rank, mesh = mesh["dp"].get_local_rank(), mesh["dp"]
    model = chunkc.distribute(model, mesh, home=home, disk_holds=disk_holds, zero_stage=stage, timeout_s=60)
    options = {"memory_budget": budget, "codegen": codegen, "whole_graph": "never", "debug": debug}
    run = torch.compile(model, backend="chunkc", options=options)
    update = optimizer(model.parameters(), **{"lr": 1e-2, "eps": 1e-3, **optimizer_options})
    scaler = torch.amp.GradScaler(device, init_scale=2.0**17 if scaled else 1.0, enabled=scaled)
    losses = []
    for step in range(steps * accumulate):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(SHAPE["vocab"], (2, SHAPE["sequence"]), generator=generator).to(device)
        is_last = (step + 1) % accumulate == 0
        with nullcontext() if is_last else update.accumulating():
            loss = run(tokens)
            scaler.scale(loss).backward()
        losses.append(loss.item())
        if is_last:
            if clip is not None:
                scaler.unscale_(update)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(update)
            scaler.update()
            update.zero_grad()
    chunkc.synchronize(model)
    report = chunkc.report(model)
    parts = [p.to_local().detach().cpu().float() for p in model.parameters()]  # type: ignore[union-attr]
    found = {
        "losses": losses,
        "bits": hashlib.blake2b(b"".join(part.numpy().tobytes() for part in parts)).hexdigest(),
        "left": [predicted - measured for _, predicted, measured in report.moments if measured is not None],
        "least": report.minimum_budget_nbytes,
        "scale": scaler.get_scale(),
        "plan": report.plan_text,
    }
    return {**found, "weights": torch.cat([part.flatten() for part in parts]).tolist()}


def styles() -> dict[str, Any]:
    """Return tensor-parallel styles of a GPT's layers."""
    found: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for at in range(SHAPE["layers"]):
        found |= {f"blocks.{at}.up": ColwiseParallel(), f"blocks.{at}.down": RowwiseParallel()}
    return found


def mesh_on(device: str, shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(device, shape or (dist.get_world_size(),), mesh_dim_names=names)


def compared(shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None, **how: Any) -> Result:
    """Train on GPUs in a roomy budget and in the smallest, and on CPUs, each on a mesh of that shape."""
    roomy = trained(mesh_on("cuda", shape, names), HUGE, **how)
    tight = trained(mesh_on("cuda", shape, names), roomy["least"], **how)
    on_cpu = trained(mesh_on("cpu", shape, names), HUGE, **how)
    pairs = list(zip(roomy.pop("weights"), on_cpu.pop("weights"), strict=True))
    del tight["weights"]
    return {"runs": [roomy, tight], "cpu": on_cpu, "difference": max(abs(one - other) for one, other in pairs)}


def stages() -> Result:
    """Train in each ZeRO stage on GPUs, and in stage 3 on CPUs."""
    found = compared()
    for stage in (2, 1, None):
        for budget in (HUGE, None):
            run = trained(mesh_on("cuda"), budget or found["runs"][-1]["least"], stage=stage)
            del run["weights"]
            found["runs"].append(run)
    return found


def layers(**how: Any) -> Result:
    """Train with two ranks for each layer, which have the same batches."""
    return compared((dist.get_world_size() // 2, 2), ("dp", "tp"), layers=True, **how)


def layers_by_lamb() -> Result:
    return layers(optimizer=chunkc.optim.LAMB)


def ways() -> Result:
    """Train in other ways, each in two budgets."""
    return {
        "accumulated, stage 1": compared(stage=1, accumulate=2),
        "updated by the CPU": compared(update_on="cpu", overlap="backward", clip=None),
        "fp16, scaled": compared(dtype=torch.float16, scaled=True, clip=None),
        "LAMB": compared(optimizer=chunkc.optim.LAMB, stage=None),
    }


def one() -> Result:
    """Train on one rank alone."""
    return compared()


def rows() -> Result:
    """Train on two rows of two ranks: each shard has a copy."""
    return compared(shape=(2, 2), stage=None, steps=2)


def on_disk() -> Result:
    """Train with optimizer states in a file of each rank, in several stages and budgets; and in RAM.

    The files lie in a directory of their own.
    """
    found = compared()
    tight = found["runs"][1]["least"]
    with tempfile.TemporaryDirectory() as folder:
        for stage, budget in ((3, HUGE), (3, tight), (None, HUGE), (1, HUGE)):
            run = trained(mesh_on("cuda"), budget, stage=stage, home=f"disk:{folder}")
            del run["weights"]
            found["runs"].append(run)
        found["files"] = os.listdir(folder)
    return found


def all_on_disk() -> Result:
    """Train with everything in a file of each rank, in several stages and budgets; and in RAM."""
    found = compared()
    tight, holds = found["runs"][1]["least"], {"disk_holds": "everything"}
    with tempfile.TemporaryDirectory() as folder:
        with _exchanged_homes() as exchanged:
            for stage, budget in ((3, HUGE), (3, tight), (None, HUGE), (1, HUGE)):
                run = trained(mesh_on("cuda"), budget, stage=stage, home=f"disk:{folder}", **holds)
                del run["weights"]
                found["runs"].append(run)
        found["exchanged"] = {name: sorted(devices) for name, devices in exchanged.items()}
        found["files"] = os.listdir(folder)
        before = _mapped_nbytes(folder)
        model = chunkc.distribute(GPT(**SHAPE), mesh_on("cuda"), home=f"disk:{folder}", **holds)
        found["grown"] = _mapped_nbytes(folder) - before
        parts = [p.to_local() for p in model.parameters()]  # type: ignore[union-attr]
        found["parts"] = [sum(part.nbytes for part in parts), all(part.is_cuda for part in parts)]
        found["written"] = [_written(), _written(home=f"disk:{folder}", **holds)]
    return found


@contextmanager
def _exchanged_homes() -> Iterator[dict[str, set[str]]]:
    """Yield the types of devices of the home tensors that exchanges copy from and to, by exchange."""
    found: dict[str, set[str]] = {}
    with ExitStack() as patches:
        for do, at in ((slots.gather, 1), (slots.scatter_sums, 3)):

            def noted(*args: Any, do: Callable[..., None] = do, at: int = at) -> None:
                found.setdefault(do.__name__, set()).add(args[at].device.type)
                do(*args)

            patches.enter_context(patch.object(slots, do.__name__, noted))
        yield found


def _written(**how: Any) -> str:
    """Compute losses right after the user has enqueued changes of parameters, which the device makes late."""
    import cuda_in_ram  # is on the device alone

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = chunkc.distribute(GPT(**SHAPE), mesh_on("cuda"), zero_stage=3, **how)
    options = {"memory_budget": HUGE, "codegen": "eager", "whole_graph": "never"}
    run = torch.compile(model, backend="chunkc", options=options)
    tokens = torch.arange(2 * SHAPE["sequence"], device="cuda").view(2, -1) % SHAPE["vocab"]
    losses = [run(tokens).item()]
    for _ in range(3):
        cuda_in_ram.enqueue(torch.cuda.current_stream().cuda_stream, lambda: time.sleep(0.5))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1.25)
        losses.append(run(tokens).item())
    return repr(losses)


def not_in_reach() -> Result:
    """Distribute a model on a GPU that cannot read files in place."""
    model = GPT(**SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        try:
            chunkc.distribute(model, mesh_on("cuda"), home=f"disk:{folder}", disk_holds="everything")
        except chunkc.ChunkcError as error:
            message = f"{type(error).__name__}: {error}"
    return {"message": message, "kept": all(type(p) is nn.Parameter for p in model.parameters())}


def _mapped_nbytes(folder: str) -> int:
    """Return the bytes that this process maps of files in a folder, which have no names."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if folder in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def engine() -> Result:
    """Run DeepSpeed's loop, on GPUs in two budgets and with states on disks, and on CPUs.

    All begin with rank 0's values.
    """
    found, budget = [], HUGE
    folder = tempfile.mkdtemp()
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    for device, zero in (("cuda", {}), ("cuda", {}), ("cuda", offload), ("cpu", {})):
        torch._dynamo.reset()
        torch.manual_seed(dist.get_rank())
        config = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
            "zero_optimization": {"stage": 3, **zero},
            "chunkc": {"memory_budget": budget, "codegen": "eager", "whole_graph": "never"},
        }
        if device == "cpu":
            config["chunkc"]["device"] = "cpu"
        own, _ = chunkc.initialize_engine(GPT(**SHAPE), int(os.environ["LOCAL_RANK"]), config)
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            loss = own(torch.randint(SHAPE["vocab"], (2, SHAPE["sequence"]), generator=generator).to(device))
            own.backward(loss)
            own.step()
            losses.append(loss.item())
        budget = chunkc.report(own.module).minimum_budget_nbytes
        sums = [p.to_local().detach().cpu().double().sum().item() for p in own.module.parameters()]  # type: ignore[union-attr]
        found.append({"losses": losses, "norm": float(own.get_global_grad_norm()), "sums": sums})
        homes = {part.disk_holds for part in (s.store.layout for s in sessions_of(own.module.parameters()))}
        assert homes == {"states" if zero else "nothing"}
    os.rmdir(folder)  # files have no names
    return {"runs": found}


def fused() -> Result:
    """Train with Inductor's code, of which only the bytes count.

    Inductor folds constants by computing them on the device. This device does not compute, so ranks would get code with
    different constants.
    """
    with inductor_config.patch(joint_graph_constant_folding=False):
        roomy = trained(mesh_on("cuda"), HUGE, codegen="inductor", debug=False)
        tight = trained(mesh_on("cuda"), roomy["least"], codegen="inductor", debug=False)
    return {"left": [*roomy["left"], *tight["left"]]}


def explained() -> Result:
    """Compare `chunkc.explain` on a CPU with the plans of the ranks."""
    found = []
    budget, device = HUGE, torch.device("cuda", torch.cuda.current_device())
    more = overhead_on(load_hardware("2xh100")) - overhead_of(device)  # workspaces: here torch says what they are
    for stage in (3, None):
        for _ in range(2):
            tokens = torch.zeros(2, SHAPE["sequence"], dtype=torch.int64)
            options = {"memory_budget": budget + more, "zero_stage": stage, "whole_graph": "never"}
            said = chunkc.explain(GPT(**SHAPE), tokens, hardware="2xh100", **options)
            run = trained(mesh_on("cuda"), budget, stage=stage, steps=2, clip=None)
            plans = [text.partition("\nplan:")[0].strip() for text in (said.plan_text, run["plan"])]
            found.append({"explained": said.minimum_budget_nbytes - more, "least": run["least"], "plans": plans})
            budget = run["least"]
        budget = HUGE
    return {"runs": found}


# --- faults ---


@contextmanager
def fault_at(number: int, fault: Callable[[], None], owner: Any = Transport, name: str = "exchange") -> Iterator[None]:
    """Inside, let a fault happen to rank 1 right before its `number`-th exchange, or another call."""
    method, left = getattr(owner, name), [number]

    def faulty(self: Any, *args: Any) -> Any:
        if (owner is not Transport or args[0] in (GATHERS, SCATTERS)) and dist.get_rank() == 1:
            left[0] -= 1
            if left[0] == 0:
                fault()
        return method(self, *args)

    with patch.object(owner, name, faulty):
        yield


def killed() -> Result:
    """Kill a rank in a step: the other rank waits on its GPU, and then on its host."""
    model = chunkc.distribute(built(), mesh_on("cuda"), timeout_s=5)
    return ended_by(model, fault_at(12, kill))


def killed_beside_layers() -> Result:
    """Kill one rank of two rows of two with tensor parallelism, in an exchange."""
    return ended_by(of_layers(), fault_at(12, kill))


def killed_in_a_layer() -> Result:
    """Kill a rank right before it meets the other rank of a layer."""
    return ended_by(of_layers(), fault_at(30, kill, Rendezvous, "__call__"))


def hung_beside_layers() -> Result:
    return ended_by(of_layers(), fault_at(12, hang))


def hung_in_a_layer() -> Result:
    return ended_by(of_layers(), fault_at(30, hang, Rendezvous, "__call__"))


def failed_in_a_layer() -> Result:
    """Let a rank raise an error right before it meets the other rank of a layer, and stay."""
    return ended_by(of_layers(), fault_at(30, fail, Rendezvous, "__call__"))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(25)
    os._exit(9)


def fail() -> None:
    raise torch.OutOfMemoryError("on one rank")


def built() -> GPT:
    torch.manual_seed(0)
    return GPT(**SHAPE)


def of_layers() -> nn.Module:
    mesh = mesh_on("cuda", (dist.get_world_size() // 2, 2), ("dp", "tp"))
    model = built()
    parallelize_module(model, mesh["tp"], styles())
    return chunkc.distribute(model, mesh["dp"], timeout_s=5)


def ended_by(model: nn.Module, fault: AbstractContextManager[None]) -> Result:
    """Return how a rank learns of another one's fault, how long that took, and how long its GPU was busy then."""
    run = torch.compile(model, backend="chunkc", options={"codegen": "eager", "memory_budget": HUGE})
    update = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.zeros(2, SHAPE["sequence"], dtype=torch.int64).to("cuda")
    start_s = 0.0
    try:
        with fault:
            for _ in range(8):
                start_s = time.monotonic()
                run(tokens).backward()
                update.step()
                update.zero_grad()
                torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        time.sleep(20)  # others are told: they do not wait until this rank ends
        return {}
    except chunkc.DistributedError as error:
        waited_s = time.monotonic() - start_s
        torch.cuda.synchronize()
        busy_s = time.monotonic() - start_s - waited_s
        try:
            update.step()
        except chunkc.DistributedError as again:
            return {"message": str(error), "again": str(again), "waited_s": waited_s, "busy_s": busy_s}
    return {}


def unpinned() -> Result:
    """Distribute a model where one rank's host can pin less memory than the rank's shards take."""
    return refused("cpu")


def without_disk() -> Result:
    """Distribute a model to homes in a directory that one rank does not have."""
    with tempfile.TemporaryDirectory() as folder:
        return refused(f"disk:{folder}/none" if dist.get_rank() == 1 else f"disk:{folder}")


def refused(home: str) -> Result:
    torch.manual_seed(0)
    model = GPT(**SHAPE)
    before = dict(model.named_parameters())
    try:
        chunkc.distribute(model, mesh_on("cuda"), home=home, timeout_s=60)
    except chunkc.ChunkcError as error:
        is_as_before = all(model.get_parameter(name) is p for name, p in before.items())
        return {"message": f"{type(error).__name__}: {error}", "is_as_before": is_as_before}
    return {}


# --- waits ---


def held_by_no_stream(mark: CudaMark, stream: Any) -> None:
    if mark.launched is not None:
        mark.launched.wait()


@contextmanager
def without_waits_for_exchanges() -> Iterator[None]:
    """Let computation wait neither for gathers nor for scatters inside."""
    submit = CudaExchangeLink.submit

    def submitted(link: CudaExchangeLink, *args: Any, **more: Any) -> CudaMark:
        mark = submit(link, *args, **more)
        mark.hold = lambda stream: held_by_no_stream(mark, stream)  # type: ignore[method-assign]
        return mark

    with patch.object(CudaExchangeLink, "submit", submitted):
        yield


@contextmanager
def without_waits_for_messages() -> Iterator[None]:
    """Let a link's stream go on inside before its messages are there."""
    batched = dist.batch_isend_irecv

    class NoWork:
        def wait(self) -> None: ...

    def enqueued(operations: Any) -> list[NoWork]:
        batched(operations)
        return [NoWork()]

    with patch.object(nccl.dist, "batch_isend_irecv", enqueued):
        yield


def waits() -> Result:
    """Train, and train the same without some waits."""
    found = {}
    for name, sabotage in {
        "all": nullcontext,
        "none for exchanges": without_waits_for_exchanges,
        "none for messages": without_waits_for_messages,
    }.items():
        with sabotage():
            run = trained(mesh_on("cuda"), HUGE, steps=2, clip=None)
        found[name] = [repr(run["losses"]), run["bits"]]
    return found


def main(name: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        del os.environ["RANK"]
        chunkc.init_process_group()
    else:
        init_method = os.environ["INIT_METHOD"]
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=init_method, rank=rank, world_size=size)
    print(json.dumps(globals()[name]()), flush=True)
    os._exit(0)
