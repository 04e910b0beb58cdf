"""Train a model with its optimizer, loss scale and schedule through the interface of PatrickStar and DeepSpeed."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from chunkc.engine.config import EngineConfig
from chunkc.engine.in_place import was_called
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.session.logs import logger

_CLIP_EPS = 1e-6
"""Added to the gradients' norm before clipping divides by it, as in PyTorch and DeepSpeed."""

_INSTEAD = {
    "save_checkpoint": "use chunkc.Checkpoint(DIR, model=engine.module, optimizer=optimizer, "
    "scheduler=engine.lr_scheduler, scaler=engine.loss_scaler)",
    "load_checkpoint": "use load_latest() of the chunkc.Checkpoint that saved it",
    "train_batch": "write the loop: backward() and step() for each micro-batch",
    "eval_batch": "call the engine under torch.no_grad()",
    "no_sync": "set gradient_accumulation_steps; with zero_optimization.stage 1, only the last micro-batch of a step "
    "exchanges gradients",
}
"""Methods of DeepSpeed's engine that this one lacks -> advice for the error message."""


class Engine(nn.Module):
    """Wraps a compiled model. Both loops below do the same; the second also accumulates gradients over micro-batches.

        optimizer.zero_grad(); loss = engine(batch); engine.backward(loss); optimizer.step()     # PatrickStar's
        loss = engine(batch); engine.backward(loss); engine.step()                               # DeepSpeed's

    A step with overflowing gradients changes only the loss scale: not the parameters, states and schedule.

    Attributes:
        module: the model, compiled in place.
        optimizer: its `step` unscales, clips, skips on overflow and advances the schedule, also when called directly.
        lr_scheduler: advanced by every update that is not skipped; None: no schedule.
        loss_scaler: has `state_dict` and `load_state_dict`.
        config: the engine's settings.
        local_rank, device: of this process.
        micro_steps, global_steps, skipped_steps: calls of `step`, updates (with skipped ones), skipped updates.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        config: EngineConfig,
        *,
        lr_scheduler: LRScheduler | None = None,
        local_rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.config = config
        self.lr_scheduler = lr_scheduler
        self.local_rank = local_rank
        self.device = device or torch.device("cpu")
        self.loss_scaler = config.loss_scaler()
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self._num_backwards = 0  # since the last update
        self._is_stepping = False
        self._lr_kwargs: dict[str, Any] = {}
        self._forced_boundary: bool | None = None
        self._norm: float | None = None
        self._overflow = False
        self._knows_calls = False
        self._seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    # --- the loop ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with inputs cast and under autocast as configured."""
        if self.config.casts_inputs:
            assert self.config.dtype is not None
            args, kwargs = _cast(args, self.config.dtype), _cast(kwargs, self.config.dtype)
        with self._timed("forward"), self._autocast():
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of a loss times the loss scale.

        Args:
            scale_wrt_gas: divide the loss by `gradient_accumulation_steps`.

        Returns:
            The loss without the loss scale, divided if `scale_wrt_gas`.

        Raises:
            UnsupportedError: the loss has several elements, or depends on no parameter.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UnsupportedError(
                "engine.backward needs a loss of one element that depends on parameters; reduce it first, with mean() "
                "or sum(), outside of torch.no_grad()"
            )
        if scale_wrt_gas and self.config.accumulation_steps > 1:
            loss = loss / self.config.accumulation_steps
        scaled = loss.float() * self.loss_scaler.loss_scale if self.config.scaling is not None else loss
        with self._timed("backward"), self._more_to_come():
            scaled.backward(retain_graph=retain_graph)
        self._num_backwards += 1
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update parameters and clear gradients at every `gradient_accumulation_steps`-th call.

        Call it after each backward.

        Args:
            lr_kwargs: for the schedule's own step, such as the metric of `ReduceLROnPlateau`.

        Raises:
            ChunkcError: gradients overflow although the loss scale is at its minimum.
            UnsupportedError: the schedule's step needs an argument that `lr_kwargs` lacks; nothing has changed.
        """
        if self.is_gradient_accumulation_boundary():
            self._is_stepping, self._lr_kwargs = True, dict(lr_kwargs or {})
            try:
                with self._timed("step"):
                    self.optimizer.step()
            finally:
                self._is_stepping, self._lr_kwargs = False, {}
            self.zero_grad()
        self.micro_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of parameters that the optimizer does not have."""
        self.optimizer.zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next call of `step` updates parameters."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return (self.micro_steps + 1) % self.config.accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the following calls of `step` update; None: count calls again."""
        self._forced_boundary = is_boundary

    # --- hooks of the optimizer's step, which also run when user code calls it ---

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check gradients for overflow and set the divisor of the update; without `config.dtype`, only clip.

        Raises:
            UnsupportedError: a closure is given, gradients of some micro-batches are missing, or the schedule's step
                would lack arguments.
        """
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise UnsupportedError("an engine's optimizer takes no closure; call backward() and then step()")
        if not self._is_stepping and self._num_backwards % self.config.accumulation_steps:
            raise UnsupportedError(
                f"gradient_accumulation_steps is {self.config.accumulation_steps}, and the optimizer steps after "
                f"{self._num_backwards} backward(): call engine.step() after each backward(), in place of zero_grad() "
                "and optimizer.step(), or set it to 1"
            )
        self._check_schedule()
        self._tell_where_nothing_was_called()
        scale, limit = self.loss_scaler.loss_scale, self.config.top.gradient_clipping
        self._overflow, self._norm = False, None
        if self.config.dtype is None:
            if limit > 0 and isinstance(optimizer, ChunkedOptimizer):
                self._norm = float(optimizer.clip_grad_norm_(limit))
            elif limit > 0:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                total_norm: Any = nn.utils.clip_grad_norm_(parameters, limit)
                self._norm = float(total_norm.full_tensor() if self.config.world_size > 1 else total_norm)
            return
        if not self.config.checks_overflow and limit == 0:
            return
        assert isinstance(optimizer, ChunkedOptimizer)  # see `check_optimizer`
        norm = float(optimizer.grad_norm())
        self._overflow = self.config.checks_overflow and not math.isfinite(norm)
        self._norm = norm / scale
        clip = (self._norm + _CLIP_EPS) / limit if limit > 0 else 1.0
        divisor = scale * max(clip, 1.0)
        self._tell(
            torch.tensor(divisor, dtype=torch.float64, device=self.device) if divisor != 1 else None,
            torch.ones((), device="cpu") if self._overflow else None,
        )

    def _check_schedule(self) -> None:
        """Refuse an update if the schedule's step afterwards would lack arguments."""
        if self.lr_scheduler is None:
            return
        parameters = inspect.signature(self.lr_scheduler.step).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if lacking := [name for name in needed if name not in self._lr_kwargs]:
            values = ", ".join(f"{name!r}: ..." for name in lacking)
            raise UnsupportedError(
                f"{type(self.lr_scheduler).__name__}.step needs {', '.join(lacking)}: call "
                f"engine.step(lr_kwargs={{{values}}}); or give initialize_engine no such lr_scheduler, and step it "
                "yourself"
            )

    def _tell_where_nothing_was_called(self) -> None:
        if not self._knows_calls:
            self._knows_calls = True
            if not was_called(self.module):
                logger.warning(
                    "the engine was not called before its optimizer's first step, so the model was not compiled and "
                    "trains outside of the memory budget: call engine(batch), and not the model's parts or methods"
                )

    def _tell(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Set `grad_scale` and `found_inf` on the optimizer as `torch.amp.GradScaler` does, or both to None.

        The update divides gradients by the first, and is skipped if the second is not 0.
        """
        told: Any = self.optimizer
        told.grad_scale, told.found_inf = grad_scale, found_inf

    def _after_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the step, advance the schedule unless it was skipped, and update the loss scale."""
        if self.config.dtype is not None:
            self._tell(None, None)
        self.global_steps += 1
        self._num_backwards = 0
        if self._overflow:
            self.skipped_steps += 1
            logger.info(
                "step %d: gradients overflow at a loss scale of %g; skipped", self.global_steps, self.loss_scale
            )
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**self._lr_kwargs)
        if self.global_steps % self.config.top.steps_per_print == 0:
            self._log_progress()
        self.loss_scaler.update(self._overflow)

    # --- accessors of DeepSpeed's engine ---

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss."""
        return self.loss_scaler.loss_scale

    @property
    def cur_scale(self) -> float:
        """The loss scale, under DeepSpeed's second name for it."""
        return self.loss_scaler.loss_scale

    @property
    def global_samples(self) -> int:
        """Samples of all updates so far, over all processes; 0 if the configuration has no micro-batch size."""
        return self.global_steps * (self.train_batch_size() or 0)

    def train_batch_size(self) -> int | None:
        """Return the samples per update over all processes; None if the configuration has no micro-batch size."""
        micro = self.config.micro_batch_size
        return None if micro is None else micro * self.config.accumulation_steps * self.config.world_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Return the samples per call of this process; None if the configuration has no micro-batch size."""
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the number of calls of `step` per update."""
        return self.config.accumulation_steps

    def gradient_clipping(self) -> float:
        """Return the largest global norm of the gradients; 0: no clipping."""
        return self.config.top.gradient_clipping

    def get_lr(self) -> list[float]:
        """Return the learning rates of the parameter groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the latest step's gradients before clipping; None: it was not computed."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Whether the latest update was not skipped."""
        return self.global_steps > 0 and not self._overflow

    def fp16_enabled(self) -> bool:
        """Whether parameters are in fp16."""
        return self.config.dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are in bf16."""
        return self.config.dtype == torch.bfloat16

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's `state_dict`, without a prefix of the engine."""
        return self.module.state_dict(*args, **kwargs)

    def module_state_dict(self) -> dict[str, Any]:
        """Return the module's `state_dict`, under DeepSpeed's name."""
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a `state_dict` of the model."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute in the model if the engine lacks it.

        Raises:
            AttributeError: both lack it; with advice for methods of DeepSpeed's engine.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module") if "_modules" in self.__dict__ else None
            if module is not None and hasattr(module, name):
                return getattr(module, name)
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"chunkc's engine has no {name!r}{instead}")

    # --- helpers ---

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.config.autocast)

    def _more_to_come(self) -> contextlib.AbstractContextManager[Any]:
        """Announce that more backwards come before the update, unless the next step is at a boundary."""
        if isinstance(self.optimizer, ChunkedOptimizer) and not self.is_gradient_accumulation_boundary():
            return self.optimizer.accumulating()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            if self.config.top.wall_clock_breakdown and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # kernels may still run after their launch has returned
            self._seconds[what] += time.perf_counter() - begun

    def _log_progress(self) -> None:
        logger.info(
            "step %d, %d skipped, lr %s, loss scale %g",
            self.global_steps,
            self.skipped_steps,
            self.get_lr(),
            self.loss_scale,
        )
        if self.config.top.wall_clock_breakdown:
            logger.info("seconds since: %s", ", ".join(f"{what} {s:.3f}" for what, s in self._seconds.items()))
        self._seconds = dict.fromkeys(self._seconds, 0.0)


def check_optimizer(optimizer: Optimizer, config: EngineConfig) -> None:
    """Refuse an optimizer that cannot follow the configuration.

    Raises:
        OptionsError: parameters are in low precision and the optimizer is not chunkc's; or overflow checks or clipping
            need all gradients, and the optimizer updates for good in the backward.
    """
    if config.dtype is not None and not isinstance(optimizer, ChunkedOptimizer):
        raise OptionsError(
            f"parameters in {str(config.dtype).removeprefix('torch.')} need fp32 masters, which "
            f"{type(optimizer).__module__}.{type(optimizer).__name__} does not keep; use chunkc.optim's Adam, AdamW, "
            "LAMB, Lion or SGD, or train in fp32"
        )
    needs_all = config.checks_overflow or config.top.gradient_clipping > 0
    if needs_all and isinstance(optimizer, ChunkedOptimizer) and optimizer.overlap.is_final:
        raise OptionsError(
            f'overlap="{optimizer.overlap.mode}" updates parameters in the backward, before the norm of all gradients '
            'and an overflow are known: add "undoable": true to optimizer.params, or leave out gradient_clipping and '
            'fp16, and with bf16 set "check_grad_overflow": false'
        )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors cast, also inside dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
