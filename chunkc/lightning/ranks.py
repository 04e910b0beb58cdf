"""Run the strategies for Lightning's Trainer and Fabric on one or several processes.

Lightning starts the processes, unless a launcher has. They connect through gloo, and with GPUs through NCCL, too.
`chunkc.distribute` shards the model over them; it is not wrapped as in DDP.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from chunkc.distributed.process_group import TIMEOUT_S, check_timeout, meet
from chunkc.engine.in_place import compile_in_place, distribute_over_all, is_distributed, place_on
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.shards import ZeroStage, check_zero_stage
from chunkc.lightning.files import MappedCheckpointIO, own_weights, save_over_ranks
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.options import parse_options
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.session.session import all_entered, sessions_of


class OverDevices:
    """Mix-in for both strategies: the backend's options, Lightning's choice of devices and processes, checkpoint files.

    Put it before one of Lightning's strategies for a single device; with one process, it acts as that strategy.

    Attributes:
        cluster_environment, num_nodes: set by Lightning, as `parallel_devices` is.
    """

    _root_device: torch.device
    _checkpoint_io: Any
    _start_method = "popen"  # Lightning's launcher runs the same command again for each other process on this host

    def __init__(
        self,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        zero_stage: ZeroStage | None = None,
        timeout_s: float = TIMEOUT_S,
        **rest: Any,
    ) -> None:
        precision = {key: rest.pop(key) for key in ("precision", "precision_plugin") if key in rest}
        parse_options(rest)  # raises now, not at the first step
        check_zero_stage(zero_stage)
        check_timeout(timeout_s)
        self.options: dict[str, Any] = rest
        self.zero_stage, self.timeout_s = zero_stage, timeout_s
        self.cluster_environment: Any = None
        self.num_nodes = 1
        self._devices: list[torch.device] = []
        own = {"accelerator": accelerator, "checkpoint_io": checkpoint_io}
        super().__init__(**own, **precision)

    # --- devices and processes ---

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of this host; empty until Lightning sets them."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = [torch.device(device) for device in devices]
        self._root_device = self._devices[0]

    @property
    def num_processes(self) -> int:
        """The number of processes on this host."""
        return len(self._devices) or 1

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes * self.num_nodes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        return {"num_replicas": self.world_size, "rank": self.global_rank} if self.is_distributed else None

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def set_world_ranks(self) -> None:
        """Set this process's ranks and device; Lightning also calls this before it starts the other processes."""
        if not self.is_distributed:
            return
        environment = self.cluster_environment
        self.local_rank = environment.local_rank()
        environment.set_global_rank(environment.node_rank() * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        self.global_rank, self.world_size = environment.global_rank(), environment.world_size()
        self._root_device = self._devices[self.local_rank]
        _rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Set up as Lightning does, then set ranks and initialise the process group."""
        super().setup_environment()  # type: ignore[misc]
        if not self.is_distributed:
            return
        self.set_world_ranks()
        if not dist.is_initialized():
            environment = self.cluster_environment
            os.environ["MASTER_ADDR"] = str(environment.main_address)
            os.environ["MASTER_PORT"] = str(environment.main_port)
            meet(self.global_rank, self.world_size, self.timeout_s)

    # --- the model ---

    def place(self, module: nn.Module) -> None:
        """Move a model's parameters to their homes, and its buffers to the device.

        Raises:
            OptionsError: there are several processes, and the process group is not initialised.
        """
        if not self.is_distributed:
            place_on(module, self._root_device, self.options)
            module.to(self._root_device)
        elif dist.is_initialized():
            distribute_over_all(module, self._root_device, self.options, self.zero_stage, self.timeout_s)
        else:
            raise OptionsError(
                "the process group does not exist yet, and this model is trained by several processes: call "
                "fabric.launch() before fabric.setup()"
            )

    def compile(self, module: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Compile a model and its parts in place. With several processes, each model has a budget of its own."""
        options = dict(self.options) if self.is_distributed else self.options
        for part in (module, *parts):
            compile_in_place(part, options)

    # --- collectives ---

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.is_distributed and dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self.is_distributed or not dist.is_initialized():
            return obj
        found = [obj]
        dist.broadcast_object_list(found, src)
        return found[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor in place, as Lightning does; return any other value as it is."""
        if not self.is_distributed or not dist.is_initialized() or not isinstance(tensor, Tensor):
            return tensor
        op = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        is_mean = op in ("mean", "avg", dist.ReduceOp.AVG)  # gloo cannot average: sum, then divide
        if is_mean or op is None:
            op = dist.ReduceOp.SUM
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op, group=group)
        if is_mean:
            mean = tensor / dist.get_world_size(group)
            tensor.copy_(mean)
        return tensor

    all_reduce = reduce

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return _PARALLEL.all_gather(self, tensor, group, sync_grads) if self.is_distributed else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return _PARALLEL.reduce_boolean_decision(self, decision, all) if self.is_distributed else decision

    # --- checkpoints ---

    @property
    def checkpoint_io(self) -> Any:
        if self._checkpoint_io is None:
            self._checkpoint_io = MappedCheckpointIO()
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io

    def save_parts(
        self, parameters: Iterable[nn.Parameter], checkpoint: dict[str, Any], path: Any, storage_options: Any
    ) -> None:
        """Write a checkpoint with these parameters and their states; all ranks call this."""
        known = list(parameters)
        world = next((part.world for p in known if isinstance(part := local_shard_of(p), LocalShard)), None)

        def write(whole: dict[str, Any]) -> None:
            self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)

        if world is not None:
            sessions = sessions_of(known)
            with all_entered(sessions):
                for session in sessions:
                    session.store.updates.finish()
                save_over_ranks(checkpoint, path, world, write)
        elif self.is_global_zero:
            write(checkpoint)


_rank_zero_only: Any = rank_zero_only
_PARALLEL: Any = FabricParallelStrategy
"""Lightning's strategy for several processes; two of its methods are called, which need only `root_device`,
`world_size` and `all_reduce`."""


def load_weights(module: nn.Module, state_dict: Any, strict: bool) -> None:
    """Load whole tensors by `load_state_dict`; each rank takes its shards of them."""
    cut = own_weights(module, state_dict) if is_distributed(module) else state_dict
    module.load_state_dict(cut, strict=strict)


def check_states(optimizer: Any) -> None:
    """Refuse to load states of whole tensors into an optimizer that cannot shard them.

    Raises:
        UnsupportedError: the optimizer is not chunkc's, and its parameters are sharded.
    """
    if not isinstance(optimizer, ChunkedOptimizer) and any(
        isinstance(local_shard_of(p), LocalShard) for p in _all_of(optimizer)
    ):
        raise UnsupportedError(
            f"states of {type(optimizer).__name__} are not loaded with several processes: take an optimizer of "
            "chunkc.optim"
        )


def check_parameters(optimizers: Iterable[Any], module: nn.Module) -> None:
    """Refuse optimizers with parameters that the model does not have, such as those from before it was distributed.

    Raises:
        OptionsError: an optimizer has such parameters.
    """
    known = set(module.parameters())
    for optimizer in optimizers:
        if any(parameter not in known for parameter in _all_of(optimizer)):
            raise OptionsError(
                f"{type(optimizer).__name__} has parameters that the model does not have any more, since it is "
                "distributed: make the optimizer of the module's parameters in configure_optimizers, or after "
                "fabric.setup_module"
            )


def replace_parameters(optimizers: Iterable[Any], former: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """Replace a model's former parameters by its distributed ones, in optimizers that were made before.

    Args:
        former: the model's parameters before it was distributed, by name.

    Raises:
        OptionsError: an optimizer with former parameters has states already.
    """
    now = dict(module.named_parameters())
    made = {parameter: now[name] for name, parameter in former.items()}
    for optimizer in optimizers:
        if all(made.get(parameter, parameter) is parameter for parameter in _all_of(optimizer)):
            continue
        if optimizer.state:
            raise OptionsError(
                f"{type(optimizer).__name__} has states already, of parameters that are not distributed yet: load them "
                "after fabric.setup"
            )
        for group in optimizer.param_groups:
            group["params"] = [made.get(parameter, parameter) for parameter in group["params"]]
        if isinstance(optimizer, ChunkedOptimizer):
            optimizer.lay_out([local_shard_of(parameter) for parameter in _all_of(optimizer)])


def _all_of(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
