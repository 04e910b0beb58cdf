"""Train with Lightning: strategies for `Trainer` and `Fabric`, and a callback that logs the numbers of `chunkc.report`.

    import chunkc.lightning

    trainer = lightning.Trainer(strategy=chunkc.lightning.ChunkcStrategy(memory_budget="6GiB"))

Importing this module registers the name: `strategy="chunkc"` is the strategy with its defaults. chunkc never imports it
by itself; `pip install "chunkc[lightning]"` installs what it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.plugins.precision import Precision as PlainPrecision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from torch import nn
from torch.optim import Optimizer

from chunkc.engine.in_place import was_called
from chunkc.ir.errors import UnsupportedError
from chunkc.lightning.ranks import OverDevices, check_parameters, check_states, load_weights, replace_parameters
from chunkc.optim.gradient_scaling import GradScaler
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.scalars import Scalars
from chunkc.session.logs import logger

__all__ = ["ChunkcFabricStrategy", "ChunkcStrategy", "ReportCallback"]

NAME = "chunkc"


class ClippingPrecision(PlainPrecision):
    """Lightning's precision, but chunkc's optimizers multiply gradients by the clipping factor in their step.

    Optimizers that consume gradients in the backward are left to Lightning.
    """

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        optimizer = _own(optimizer)
        if isinstance(optimizer, ChunkedOptimizer) and not optimizer.overlap.is_final:
            optimizer.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)


class UnscalingMixedPrecision(ClippingPrecision, MixedPrecision):
    """Lightning's mixed precision, which also clips for optimizers that divide gradients by the loss scale themselves.

    Lightning refuses to clip for such optimizers, even in bf16 without a loss scale. With a scaler it is safe:
    gradients that `unscale_` has divided before clipping are not divided again in the step.
    """

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if not isinstance(optimizer, ChunkedOptimizer):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        if clip_val > 0 and isinstance(self.scaler, GradScaler) and gradient_clip_algorithm == "norm":
            self.scaler.clip_grad_norm_(_own(optimizer), clip_val)
            return
        if clip_val > 0 and self.scaler is not None:
            self.scaler.unscale_(optimizer)
        PlainPrecision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class FabricUnscalingMixedPrecision(FabricMixedPrecision):
    """Fabric's mixed precision, which also unscales before clipping for optimizers that divide gradients themselves."""

    def unscale_gradients(self, optimizer: Any) -> None:
        if not isinstance(optimizer, ChunkedOptimizer):
            super().unscale_gradients(optimizer)
        elif self.scaler is not None:
            self.scaler.unscale_(optimizer)


def _own(optimizer: Any) -> Any:
    """Return the user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


class ChunkcStrategy(OverDevices, SingleDeviceStrategy):
    """Trains a `LightningModule` in a memory budget: `ChunkcStrategy(memory_budget="6GiB", home="disk:/var/tmp")`.

    Takes the backend's options (see `chunkc.options.Options`), and Lightning's `accelerator`, `checkpoint_io` and
    `precision_plugin`. The module and each child module with parameters are compiled in place, unless the user has
    compiled them. So both `self(x)` and `self.encoder(x)` in `training_step` run in the budget.

    With several devices, each has a process of its own. The module is distributed over them with the values of rank 0,
    unless the user has distributed it; `zero_stage` and `timeout_s` are as for `chunkc.distribute`. A checkpoint is one
    file, which any number of processes can load.

    Raises:
        OptionsError: an option is unknown or invalid.
    """

    strategy_name = NAME
    _knows_calls = False
    _was_meta = False
    _layer_sync: Any = None

    @property
    def precision_plugin(self) -> PlainPrecision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: PlainPrecision | None) -> None:
        if type(plugin) is MixedPrecision:
            kind: Any = plugin.precision  # for a type checker, any of Lightning's
            scaler = GradScaler.like(plugin.scaler, plugin.device)
            plugin = UnscalingMixedPrecision(kind, plugin.device, scaler)
        elif type(plugin) is PlainPrecision:
            plugin = ClippingPrecision()
        self._precision_plugin = plugin

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            _BY_DDP._configure_launcher(self)

    def setup_environment(self) -> None:
        if self.is_distributed:
            reset_seed()  # as Lightning's own strategies do, so that the processes that it starts begin alike
        super().setup_environment()

    def setup(self, trainer: lightning.Trainer) -> None:
        """Set up as Lightning does.

        Raises:
            UnsupportedError: there are several processes, and the Trainer has sync_batchnorm, or a callback that
                averages weights and so needs the whole model in each process.
        """
        if self.is_distributed:
            self._check(trainer)
        self._was_meta = self._has_meta()
        super().setup(trainer)

    def _check(self, trainer: lightning.Trainer) -> None:
        if self._layer_sync is not None:
            raise UnsupportedError("sync_batchnorm is not supported: give sync_batchnorm=False, or take other norms")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _AVERAGING):
                raise UnsupportedError(
                    f"{type(callback).__name__} copies the model, and each of several processes has parts of it: train "
                    "without it, or with devices=1"
                )

    def setup_optimizers(self, trainer: lightning.Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        if self.is_distributed:
            check_parameters(self.optimizers, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step as Lightning does; warn after the first step if `training_step` has called no compiled module.

        The closure calls `training_step`.
        """
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._knows_calls:
            self._knows_calls = True
            if self.model is not None and not was_called(self.model):
                logger.warning(
                    "training_step has called no compiled module, so %s trains outside of the memory budget: call "
                    "self(batch), or a module that is an attribute of it, and not their methods",
                    type(self.model).__name__,
                )
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Announce to optimizers that more gradients will be added to those of the backwards inside."""
        with contextlib.ExitStack() as stack:
            for optimizer in map(_own, self.optimizers):
                if isinstance(optimizer, ChunkedOptimizer):
                    stack.enter_context(optimizer.accumulating())
            yield

    def model_to_device(self) -> None:
        assert self.model is not None
        self.place(self.model)
        self.compile(self.model, callable_parts(self.model))

    # --- checkpoints ---

    def _has_meta(self) -> bool:
        return self.model is not None and any(parameter.is_meta for parameter in self.model.parameters())

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded after setup: with several processes, if parameters are on the meta device."""
        return self.is_distributed and (self._was_meta or self._has_meta())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        self.save_parts(self.lightning_module.parameters(), checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_weights(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            check_states(optimizer)
            optimizer.load_state_dict(state)
            if not isinstance(optimizer, ChunkedOptimizer):  # chunkc's optimizers keep their states at home
                _optimizer_to_device(optimizer, self.root_device)

    def teardown(self) -> None:
        """Tear down as Lightning does, but leave parameters and states at home, which is not device memory."""
        if self.is_distributed:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


ParallelStrategy.register(ChunkcStrategy)  # Lightning asks only these for devices, samplers, `block_backward_sync`
_BY_DDP: Any = DDPStrategy
_BY_FABRICS_DDP: Any = FabricDDPStrategy
_AVERAGING = tuple(
    found
    for name in ("StochasticWeightAveraging", "WeightAveraging")  # the latter since Lightning 2.6
    if (found := getattr(callbacks, name, None)) is not None
)


class ChunkcFabricStrategy(OverDevices, FabricSingleDeviceStrategy):
    """Trains in a memory budget with `Fabric`: `Fabric(strategy=ChunkcFabricStrategy(memory_budget="6GiB"))`.

    `fabric.setup(model, optimizer)` compiles the model in place. With several devices, it distributes the model, and
    gives its distributed parameters to the optimizer.

    Raises:
        OptionsError: an option is unknown or invalid.
    """

    @property
    def precision(self) -> FabricPrecision:
        return super().precision

    @precision.setter
    def precision(self, precision: FabricPrecision | None) -> None:
        if type(precision) is FabricMixedPrecision:
            kind: Any = precision.precision
            scaler = GradScaler.like(precision.scaler, precision.device)
            precision = FabricUnscalingMixedPrecision(kind, precision.device, scaler)
        self._precision = precision

    _num_nodes = property(lambda self: self.num_nodes, lambda self, num_nodes: setattr(self, "num_nodes", num_nodes))
    """Fabric's name of `num_nodes`, which it sets."""

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            _BY_FABRICS_DDP._configure_launcher(self)

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        if not isinstance(optimizer, ChunkedOptimizer) or norm_type != 2.0 or optimizer.overlap.is_final:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        scaler = getattr(self.precision, "scaler", None)
        if isinstance(scaler, GradScaler):
            return scaler.clip_grad_norm_(optimizer, max_norm, error_if_nonfinite=error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, error_if_nonfinite=error_if_nonfinite)

    def module_to_device(self, module: nn.Module) -> None:
        if not self.is_distributed:  # else `setup_module` places it
            self.place(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.is_distributed:
            self.place(module)
        self.compile(module, callable_parts(module) if isinstance(module, lightning.LightningModule) else ())
        return super().setup_module(module)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        former = dict(module.named_parameters()) if self.is_distributed else {}
        module, optimizers, scheduler = super().setup_module_and_optimizers(module, optimizers, scheduler)
        if self.is_distributed:
            replace_parameters(optimizers, former, module)
            check_parameters(optimizers, module)
        return module, optimizers, scheduler

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        self.save_parts(_parameters_in(state), converted, path, storage_options)

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        load_weights(module, state_dict, strict)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        for found in state.values() if isinstance(state, dict) else (state,):
            if isinstance(found, Optimizer):
                check_states(found)
        return super().load_checkpoint(path, state, strict, weights_only)


def _parameters_in(state: dict[str, Any]) -> Iterator[nn.Parameter]:
    """Yield the parameters of the models and optimizers that Fabric saves."""
    for found in state.values():
        if isinstance(found, nn.Module):
            yield from found.parameters()
        elif isinstance(found, Optimizer):
            yield from (parameter for group in found.param_groups for parameter in group["params"])


def callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters that a module's code may call: children, and those in lists and dicts."""
    for part in module.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from callable_parts(part)
        elif next(part.parameters(), None) is not None:
            yield part


class ReportCallback(Callback):
    """Logs memory, traffic and stalls from `chunkc.report` to all loggers (see `chunkc.scalars.Scalars`).

    Logs every `log_every_n_steps` batches, as Lightning does with its own metrics. The progress bar shows none of it.
    """

    def __init__(self) -> None:
        self._scalars = Scalars()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_due = (batch_idx + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if is_due and (found := self._scalars.read(pl_module)):
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)


for _registry, _strategy in ((StrategyRegistry, ChunkcStrategy), (STRATEGY_REGISTRY, ChunkcFabricStrategy)):
    _registry.register(NAME, _strategy, description="chunkc: in a memory budget", override=True)
