"""Lightning with chunkc: strategies for `Trainer` and `Fabric`, and a callback that logs what `chunkc.report` says.

    import chunkc.lightning

    trainer = lightning.Trainer(strategy=chunkc.lightning.ChunkcStrategy(memory_budget="6GiB"))

Importing this module registers the name: `strategy="chunkc"` is the strategy with its defaults. Nothing here runs
unless it is imported; `pip install "chunkc[lightning]"` installs what it needs.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.plugins.precision import Precision as PlainPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import nn

from chunkc.in_place import compile_in_place, place_on, was_called
from chunkc.ir.errors import UnsupportedError
from chunkc.logs import logger
from chunkc.optim.chunked_optimizer import ChunkedOptimizer
from chunkc.optim.grad_scaler import GradScaler
from chunkc.options import parse_options
from chunkc.scalars import Scalars

__all__ = ["ChunkcFabricStrategy", "ChunkcStrategy", "ReportCallback"]

NAME = "chunkc"


class MappedCheckpointIO(TorchCheckpointIO):
    """Lightning's own files, written and read without a copy of them in memory: both strategies' default.

    A file on a local disk is written beside and renamed, and read as a memory map. Others go Lightning's way.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        beside = f"{path}.{os.getpid()}.part"
        try:
            torch.save(checkpoint, beside)
            os.replace(beside, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if map_location is None:
            map_location = "cpu"
        if not _is_local(path) or not zipfile.is_zipfile(path):  # `torch.save` once wrote files that no map can show
            return super().load_checkpoint(path, map_location, weights_only)
        return torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only)


class ClippingPrecision(PlainPrecision):
    """Lightning's own, which lets chunkc's optimizers clip in their step: no gradient is read or written for it."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        optimizer = _own(optimizer)
        if isinstance(optimizer, ChunkedOptimizer) and not optimizer.overlap.beside_backward:
            optimizer.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)


class UnscalingMixedPrecision(ClippingPrecision, MixedPrecision):
    """Lightning's own, which also clips for optimizers that divide gradients by the loss's scale themselves.

    Lightning refuses to, even in bf16, where there is no scale. `GradScaler` lets such an optimizer be: what
    `unscale_` has divided before clipping, its step does not divide again.
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
    """The same for `fabric.clip_gradients`."""

    def unscale_gradients(self, optimizer: Any) -> None:
        if not isinstance(optimizer, ChunkedOptimizer):
            super().unscale_gradients(optimizer)
        elif self.scaler is not None:
            self.scaler.unscale_(optimizer)


def _own(optimizer: Any) -> Any:
    """The user's optimizer, also where Lightning hands out one of its own around it."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _is_local(path: Any) -> bool:
    return "://" not in str(path)


class _OnOneDevice:
    """What both strategies share: the backend's options, the device that Lightning chose, and checkpoints."""

    _root_device: torch.device
    _checkpoint_io: Any

    def __init__(self, *, accelerator: Any = None, checkpoint_io: Any = None, **rest: Any) -> None:
        precision = {key: rest.pop(key) for key in ("precision", "precision_plugin") if key in rest}
        parse_options(rest)  # raises now, not at the first step
        self.options: dict[str, Any] = rest
        own = {"accelerator": accelerator, "checkpoint_io": checkpoint_io}
        super().__init__(**own, **precision)

    @property
    def checkpoint_io(self) -> Any:
        if self._checkpoint_io is None:
            self._checkpoint_io = MappedCheckpointIO()
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Lightning gives its devices to strategies that have this; there is none before."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise UnsupportedError(f"chunkc trains on one device, and Lightning chose {len(devices)}; give devices=1")
        self._root_device = torch.device(devices[0])


class ChunkcStrategy(_OnOneDevice, SingleDeviceStrategy):
    """Trains a `LightningModule` in a memory budget: `ChunkcStrategy(memory_budget="6GiB", home="disk:/var/tmp")`.

    Takes the backend's options (see `chunkc.options.Options`), and Lightning's `accelerator`, `checkpoint_io` and
    `precision_plugin`. The module and each of its parts that has parameters are compiled in place, unless the user has
    compiled them, so what `training_step` calls is in the budget, whether that is `self(x)` or `self.encoder(x)`.

    Raises:
        OptionsError: an option is unknown or makes no sense.
        UnsupportedError: there are several devices.
    """

    strategy_name = NAME
    _knows_calls = False

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

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """As Lightning's, whose closure calls `training_step`."""
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

    def model_to_device(self) -> None:
        assert self.model is not None
        place_on(self.model, self.root_device, self.options)
        super().model_to_device()
        for part in (self.model, *callable_parts(self.model)):
            compile_in_place(part, self.options)

    def teardown(self) -> None:
        """As Lightning's, but parameters and states stay where they are: at home, which is no device's memory."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class ChunkcFabricStrategy(_OnOneDevice, FabricSingleDeviceStrategy):
    """The same for `Fabric`: `Fabric(strategy=ChunkcFabricStrategy(memory_budget="6GiB"))`.

    `fabric.setup(model, optimizer)` compiles the model in place.

    Raises:
        OptionsError: an option is unknown or makes no sense.
        UnsupportedError: there are several devices.
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

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        if not isinstance(optimizer, ChunkedOptimizer) or norm_type != 2.0 or optimizer.overlap.beside_backward:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        scaler = getattr(self.precision, "scaler", None)
        if isinstance(scaler, GradScaler):
            return scaler.clip_grad_norm_(optimizer, max_norm, error_if_nonfinite=error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, error_if_nonfinite=error_if_nonfinite)

    def module_to_device(self, module: nn.Module) -> None:
        place_on(module, self.root_device, self.options)
        super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        parts = callable_parts(module) if isinstance(module, lightning.LightningModule) else ()
        for part in (module, *parts):
            compile_in_place(part, self.options)
        return super().setup_module(module)


def callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules with parameters that a module's own code may call: its parts, and those in its lists."""
    for part in module.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from callable_parts(part)
        elif next(part.parameters(), None) is not None:
            yield part


class ReportCallback(Callback):
    """Logs what `chunkc.report` says, memory, traffic and stalls, to all loggers (see `chunkc.scalars.Scalars`).

    Each `log_every_n_steps` batches, as Lightning's own metrics. The progress bar shows none of it.
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
    _registry.register(NAME, _strategy, description="chunkc: one device, in a memory budget", override=True)
