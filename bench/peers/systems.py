"""The systems that benchmarks compare, each set up as its own documentation recommends; chunkc is one of them.

Every system trains the same model on the same batches with AdamW at the same rates, in the same precision: for a
model in "bfloat16", arithmetic in bf16 and fp32 master weights and moments; in "float32", all of it fp32. How masters
come about differs: chunkc and DeepSpeed keep bf16 parameters in addition; the others have fp32 parameters and cast
them (`torch.autocast`, FSDP2's mixed-precision policy), which is PyTorch's documented way.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from measuring.subject_process import Unavailable
from models import families
from torch import Tensor, nn

import chunkc
from peers.specs import (
    CHECKPOINTING,
    CHUNKC,
    CHUNKC_RANKS,
    DDP,
    DEEPSPEED,
    FSDP2,
    FSDP2_RANKS,
    PLAIN,
    TORCHAO,
    SubjectSpec,
)

ADAM: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Trainee:
    """A model with all that a training step takes.

    Attributes:
        model: owns the parameters. chunkc's is asked for reports.
        optimizer: None where a system keeps its states in other ways.
    """

    model: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], None]
    update: Callable[[], None]
    optimizer: torch.optim.Optimizer | None = None


def make(spec: SubjectSpec) -> Trainee:
    """Set up the system that `spec` names.

    Raises:
        Unavailable: the system is not installed, or does not work on this device.
        torch.OutOfMemoryError: it did not even fit before the first step.
    """
    return _MAKERS[spec.system](spec)


def _plain(spec: SubjectSpec, *, is_checkpointed: bool = False) -> Trainee:
    """Keep everything on the device: `torch.compile` and the fused AdamW."""
    model = families.build(spec.model, is_checkpointed=is_checkpointed, dtype=torch.float32).to(spec.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return _trainee(model, _compiled(model, spec), optimizer, _autocast(spec))


def _checkpointing(spec: SubjectSpec) -> Trainee:
    """Keep everything on the device, and each block's input only."""
    return _plain(spec, is_checkpointed=True)


def _chunkc(spec: SubjectSpec) -> Trainee:
    """`place`, `torch.compile`, `chunkc.optim.AdamW`: the README's three lines."""
    assert spec.options is not None
    model = families.build(spec.model, is_checkpointed=spec.is_checkpointed)
    if spec.is_placed:
        where = {name: spec.options[name] for name in ("home", "disk_holds") if name in spec.options}
        chunkc.place(model, device=spec.device, **where)
    else:
        model = model.to(spec.device)
    compiled = torch.compile(model, backend="chunkc", options=spec.options)
    return _trainee(model, compiled, chunkc.optim.AdamW(model.parameters(), **ADAM), nullcontext)


def _fsdp2(spec: SubjectSpec) -> Trainee:
    """FSDP2 over one rank: each block and the root sharded, parameters, gradients and states offloaded.

    As in PyTorch's tutorial "Getting started with Fully Sharded Data Parallel (FSDP2)" and the docs of
    `CPUOffloadPolicy`: fp32 parameters, bf16 arithmetic, gradients reduced in fp32, a CPU backend for the
    optimizer's collectives; blocks compiled one by one before they are sharded, as torchtitan does.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    is_cuda = spec.device == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(spec.device, (1,))
    dtype = getattr(torch, _dtype_name(spec))
    shared: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=is_cuda),
    }
    model = families.build(spec.model, is_checkpointed=spec.is_checkpointed, dtype=torch.float32)
    for block in families.blocks_of(model):
        if spec.codegen == "inductor":
            block.compile()
        fully_shard(block, **shared)
    fully_shard(model, **shared)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)  # of CPU tensors, on the CPU
    return _trainee(model, model, optimizer, nullcontext)


def _join(spec: SubjectSpec) -> Any:
    """The mesh of all ranks of a system, which share the machine's cores; of GPUs each has one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // spec.num_ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    is_cuda = spec.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(spec.rank)
    backend, rendezvous = "cpu:gloo,cuda:nccl" if is_cuda else "gloo", f"file://{spec.store}"
    dist.init_process_group(backend, init_method=rendezvous, rank=spec.rank, world_size=spec.num_ranks)
    return init_device_mesh(spec.device, (spec.num_ranks,))


def _ddp(spec: SubjectSpec) -> Trainee:
    """`DistributedDataParallel`, compiled, as its documentation has it; gradients are views of its buckets."""
    _join(spec)
    model = families.build(spec.model, is_checkpointed=spec.is_checkpointed, dtype=torch.float32).to(spec.device)
    whole = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return _trainee(model, _compiled(whole, spec), optimizer, _autocast(spec))


def _fsdp2_ranks(spec: SubjectSpec) -> Trainee:
    """FSDP2 as in its tutorial: each block and the root; blocks are compiled one by one before, as torchtitan does."""
    from torch.distributed.fsdp import fully_shard

    mesh = _join(spec)
    model = families.build(spec.model, is_checkpointed=spec.is_checkpointed, dtype=torch.float32)
    for block in families.blocks_of(model):
        block.compile(backend="inductor" if spec.codegen == "inductor" else "aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    return _trainee(model, model, optimizer, nullcontext)


def _chunkc_ranks(spec: SubjectSpec) -> Trainee:
    """Set up chunkc on several ranks: `distribute`, `torch.compile`, `chunkc.optim.AdamW`.

    On CPUs updates are made at home, which is in RAM, too.
    """
    assert spec.options is not None
    mesh = _join(spec)
    model = chunkc.distribute(families.build(spec.model, is_checkpointed=spec.is_checkpointed), mesh)
    compiled = torch.compile(model, backend="chunkc", options=spec.options)
    update_on = "cpu" if spec.device == "cpu" else "device"
    optimizer = chunkc.optim.AdamW(model.parameters(), update_on=update_on, overlap=spec.overlap, **ADAM)
    return _trainee(model, compiled, optimizer, nullcontext)


def _torchao(spec: SubjectSpec) -> Trainee:
    """torchao's README, "Optimizer CPU offload": gradients and states offloaded, parameters on the device."""
    _need("torchao")
    if spec.device != "cuda":
        raise Unavailable("torchao's CPUOffloadOptimizer needs a GPU")
    from torchao.optim import CPUOffloadOptimizer

    model = families.build(spec.model, is_checkpointed=spec.is_checkpointed, dtype=torch.float32).to(spec.device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **ADAM)
    return _trainee(model, _compiled(model, spec), optimizer, _autocast(spec))


def _deepspeed(spec: SubjectSpec) -> Trainee:
    """DeepSpeed ZeRO-3, parameters and optimizer offloaded to pinned RAM, built under `zero.Init`.

    The documented defaults of stage 3 but for the offloading; `DeepSpeedCPUAdam` is what it chooses then.
    """
    _need("deepspeed")
    # One rank in this process; `deepspeed.initialize` reads these.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    import deepspeed

    is_cuda = spec.device == "cuda"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.batch_size,
        "bf16": {"enabled": _dtype_name(spec) == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": is_cuda},
            "offload_param": {"device": "cpu", "pin_memory": is_cuda},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    deepspeed.init_distributed(dist_backend="nccl" if is_cuda else "gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = families.construct(spec.model, is_checkpointed=spec.is_checkpointed)
    block = families.random_block()
    for index, parameter in enumerate(model.parameters()):
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            families.fill(parameter, index, block)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return Trainee(model, engine, engine.backward, engine.step)


_MAKERS: Mapping[str, Callable[[SubjectSpec], Trainee]] = {
    PLAIN: _plain,
    CHUNKC: _chunkc,
    CHECKPOINTING: _checkpointing,
    FSDP2: _fsdp2,
    TORCHAO: _torchao,
    DEEPSPEED: _deepspeed,
    DDP: _ddp,
    FSDP2_RANKS: _fsdp2_ranks,
    CHUNKC_RANKS: _chunkc_ranks,
}


def _trainee(
    model: nn.Module, forward: Any, optimizer: Any, context: Callable[[], AbstractContextManager[Any]]
) -> Trainee:
    def run(x: Tensor, y: Tensor) -> Tensor:
        with context():
            return forward(x, y)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainee(model, run, torch.Tensor.backward, update, optimizer)


def _compiled(model: nn.Module, spec: SubjectSpec) -> Any:
    """Compile with Inductor; in a small run, captured and differentiated the same but run operator by operator."""
    return torch.compile(model, backend="inductor" if spec.codegen == "inductor" else "aot_eager")


def _dtype_name(spec: SubjectSpec) -> str:
    return spec.model.dtype if isinstance(spec.model, families.ModelChoice) else "float32"


def _autocast(spec: SubjectSpec) -> Callable[[], AbstractContextManager[Any]]:
    if _dtype_name(spec) == "float32":
        return nullcontext
    return lambda: torch.autocast(spec.device, getattr(torch, _dtype_name(spec)))


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
