"""Train with Hugging Face's `Trainer`: one changed import, and arguments for the command line.

    from chunkc.transformers import Trainer, TrainingArguments

The model is compiled in place, so names in checkpoints are the same as without chunkc. With several processes it is
distributed first, and accelerate does not wrap it. `import chunkc` does not import this module;
`pip install "chunkc[transformers]"` installs what it needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers.integrations import TensorBoardCallback as _TensorBoardCallback

from chunkc import optim
from chunkc.checkpoint.training import Checkpoint
from chunkc.distributed.process_group import init_process_group
from chunkc.engine.in_place import compile_in_place, distribute_over_all, is_distributed, place_on
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.shards import check_zero_stage
from chunkc.optim.gradient_scaling import GradScaler
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.options import parse_options
from chunkc.scalars import PEAK, Scalars
from chunkc.weights.load import load
from chunkc.weights.save import save

__all__ = ["ChunkcArguments", "ChunkcTrainer", "TensorBoardCallback", "Trainer", "TrainingArguments"]

BACKEND = "chunkc"

STATES = "chunkc"
"""Name of the folder of the `chunkc.Checkpoint` in a checkpoint of the Trainer."""

OPTIMIZERS = {
    "chunkc_adamw": optim.AdamW,
    "chunkc_adam": optim.Adam,
    "chunkc_lamb": optim.LAMB,
    "chunkc_sgd": optim.SGD,
}
"""Values of `optim`, in addition to those of `transformers` -> optimizers."""

_WITHOUT_BETAS = ("chunkc_sgd",)


@dataclass
class ChunkcArguments:
    """Arguments to put before `TrainingArguments` or a subclass: `class Mine(ChunkcArguments, SFTConfig)`, a dataclass.

    Raises:
        OptionsError: an option is unknown or invalid.
    """

    torch_compile_backend: str | None = field(
        default=BACKEND, metadata={"help": 'Backend of torch.compile: "chunkc", or one of accelerate\'s.'}
    )
    optim: str = field(
        default="chunkc_adamw",
        metadata={"help": f"Optimizer: one of {', '.join(OPTIMIZERS)}, or one of transformers'."},
    )
    memory_budget: str | None = field(
        default=None, metadata={"help": 'Memory for the compute device: bytes, "6GiB", "80%" or "auto".'}
    )
    home: str | None = field(
        default=None, metadata={"help": 'Where model data lives otherwise: "cpu", "disk" or "disk:DIR".'}
    )
    zero_stage: int | None = field(
        default=None, metadata={"help": "With several processes: 1, 2 or 3 forces a stage, as in chunkc.distribute."}
    )
    backend_options: dict | str | None = field(
        default=None, metadata={"help": 'Other options of the backend, such as {"chunk_size": "4MiB"}.'}
    )

    def __post_init__(self) -> None:
        asked = (self.torch_compile_backend, self.optim)
        if self.torch_compile_backend == BACKEND:
            self.chunkc_options()  # raises now, not at the first step
            check_zero_stage(self.zero_stage)
            _init_cpu_process_group(self)
            self.torch_compile_backend = None  # transformers and accelerate accept only names that they know
        if self.optim in OPTIMIZERS:
            self.optim = "adamw_torch"
        super().__post_init__()  # type: ignore[misc]
        if asked[0] == BACKEND:
            self.torch_compile_backend = BACKEND
        if asked[1] in OPTIMIZERS:
            self.optim = asked[1]

    def chunkc_options(self) -> dict[str, Any]:
        """Return the options of the backend, as `torch.compile` takes them.

        Raises:
            OptionsError: `backend_options` is no JSON object, or an option is unknown or invalid.
        """
        given = self.backend_options
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise OptionsError(f"backend_options is no JSON: {error}") from error
        if given is not None and not isinstance(given, dict):
            raise OptionsError(f"backend_options is {given!r}; allowed: an object of JSON, or a dict")
        own = {"memory_budget": _number(self.memory_budget), "home": self.home}
        options = {**(given or {}), **{key: value for key, value in own.items() if value is not None}}
        parse_options(options)
        return options


def _init_cpu_process_group(args: Any) -> None:
    """Initialise the process group of processes that compute on CPUs, before accelerate does.

    Unlike accelerate's way, it works after `torchrun --max-restarts` has started the processes again.
    """
    is_alone = int(os.environ.get("WORLD_SIZE") or 1) == 1 or dist.is_initialized()
    if not is_alone and (args.use_cpu or not torch.cuda.is_available()):
        init_process_group(args.ddp_timeout)


def _number(text: str | None) -> int | str | None:
    """Convert digits, as a command line gives them, to a number; return anything else as it is."""
    return int(text) if isinstance(text, str) and text.isdigit() else text


class ChunkcTrainer:
    """Mix-in to put before `transformers.Trainer` or a subclass: `class Mine(ChunkcTrainer, SFTTrainer)`.

    The model is compiled in place, unless the user has done so, with the options of `ChunkcArguments`; arguments of
    another class mean no options. Logs of training have the peak of the compute tier, `chunkc/peak_bytes`.

    With several processes it is distributed first (see `chunkc.distribute`), unless the user has done so, and all of
    them save and load: weights are Hugging Face's files, streamed to rank 0, which writes them. Parameters, optimizer
    states and the schedule are in a `chunkc.Checkpoint` in the same directory, to which each rank writes its shards.

    Raises:
        OptionsError: the model is what `torch.compile` returned.
        UnsupportedError: the process has several GPUs.
    """

    model: Any
    args: transformers.TrainingArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._scalars = Scalars()
        self._options: dict[str, Any] | None = None
        super().__init__(*args, **kwargs)
        self._compile(self.model)

    def _compile(self, model: nn.Module | None) -> None:
        if model is None or not self._uses_chunkc():
            return
        if self.args.world_size > 1:
            trainer: Any = self
            distribute_over_all(
                model,
                self.args.device,
                self._chunkc_options(),
                getattr(self.args, "zero_stage", None),
                self.args.ddp_timeout,
            )
            # adds autocast only; afterwards accelerate neither moves nor wraps the model
            trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        compile_in_place(model, self._chunkc_options())

    def _uses_chunkc(self) -> bool:
        return getattr(self.args, "torch_compile_backend", None) in (BACKEND, None)

    def _chunkc_options(self) -> dict[str, Any]:
        """Return the options, always as the same dict: graphs compiled with one dict object share a budget."""
        if self._options is None:
            self._options = self.args.chunkc_options() if isinstance(self.args, ChunkcArguments) else {}
        return self._options

    def create_accelerator_and_postprocess(self) -> None:
        if self._uses_chunkc():
            if self.args.n_gpu > 1:
                raise UnsupportedError(
                    f"a process trains on one GPU, and this one has {self.args.n_gpu}: start a process for each "
                    f"(`torchrun --nproc-per-node {self.args.n_gpu}`), or set CUDA_VISIBLE_DEVICES to one of them"
                )
            with _without_backend(self.args):
                super().create_accelerator_and_postprocess()  # type: ignore[misc]
            accelerator: Any = self.accelerator  # type: ignore[attr-defined]
            accelerator.scaler = GradScaler.like(accelerator.scaler, accelerator.device.type)
        else:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)  # type: ignore[misc]
        self._compile(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._uses_chunkc():
            if self.args.world_size > 1:
                return
            place_on(model, device, self._chunkc_options())
        super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip as `transformers` does, but chunkc's optimizers multiply gradients by the factor in their step."""
        optimizer = self._clipping_optimizer(model)
        if optimizer is None:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return self._clipped_by(optimizer, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and (optimizer := self._clipping_optimizer(model)) is not None:
            grad_norm = self._clipped_by(optimizer, float("inf"))
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    def _clipped_by(self, optimizer: optim.AdamW, max_norm: float) -> Any:
        scaler = self.accelerator.scaler  # type: ignore[attr-defined]
        if scaler is None:
            return optimizer.clip_grad_norm_(max_norm)
        return scaler.clip_grad_norm_(optimizer, max_norm)

    def _clipping_optimizer(self, model: nn.Module) -> Any:
        """Return the optimizer, if it is one of chunkc's that can clip all gradients of the model; else None."""
        found: Any = self.optimizer  # type: ignore[attr-defined]
        while isinstance(found, AcceleratedOptimizer):
            found = found.optimizer
        scaler = self.accelerator.scaler  # type: ignore[attr-defined]
        can = isinstance(found, ChunkedOptimizer) and not found.overlap.is_final
        can = can and (scaler is None or isinstance(scaler, GradScaler))
        return found if can and found.has_all_gradients_of(model.parameters()) else None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer as the Trainer does, and set `model.no_sync` to its `accumulating`.

        accelerate enters `model.no_sync`, as DDP's, for backwards after which gradients are added to.
        """
        found = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_distributed(self.model) and isinstance(found, ChunkedOptimizer):
            self.model.no_sync = found.accumulating
        return found

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        if args.optim not in OPTIMIZERS:
            return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        if args.optim_args:
            raise OptionsError(
                f"optim_args are not for optim={args.optim!r}; give "
                "optimizer_cls_and_kwargs=(chunkc.optim.AdamW, {...}) to the Trainer instead"
            )
        betas = (
            {}
            if args.optim in _WITHOUT_BETAS
            else {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        )
        return OPTIMIZERS[args.optim], {"lr": args.learning_rate, **betas}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model is not None and ("loss" in logs or "train_loss" in logs):
            peak = self._scalars.read(self.model)
            logs |= {PEAK: peak[PEAK]} if peak else {}
        super().log(logs, start_time)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not is_distributed(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        self._refuse_adapters()
        trainer: Any = self
        folder = Path(output_dir or self.args.output_dir or ".")
        save(self.model, folder)
        if self.args.should_save:
            processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_distributed(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        trainer: Any = self
        with self._states(output_dir) as states:
            states.save(trainer.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not is_distributed(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif checkpoint is not None and os.path.isdir(os.path.join(checkpoint, STATES)):
            self._states(checkpoint).load_latest()

    def _states(self, folder: str) -> Checkpoint:
        """Return the checkpoint of parameters, optimizer states and schedule in a checkpoint of the Trainer."""
        trainer: Any = self
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate has wrapped both
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        return Checkpoint(
            os.path.join(folder, STATES), model=self.model, optimizer=optimizer, scheduler=scheduler, keep=1
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_distributed(self.model):
            self._refuse_adapters()
            load(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if is_distributed(self.model):
            trainer: Any = self
            load(self.model, trainer.state.best_model_checkpoint)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _refuse_adapters(self) -> None:
        if hasattr(self.model, "peft_config"):
            raise UnsupportedError(
                "adapters of peft are not saved or loaded with several processes so far: merge them "
                "(`model.merge_and_unload()`) and use chunkc.save, or train in one process"
            )


@contextmanager
def _without_backend(args: transformers.TrainingArguments) -> Iterator[None]:
    """Set the backend of arguments to None inside: accelerate accepts only those on its own list."""
    backend, args.torch_compile_backend = args.torch_compile_backend, None
    try:
        yield
    finally:
        args.torch_compile_backend = backend


@dataclass
class TrainingArguments(ChunkcArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments` with `memory_budget`, `home`, `zero_stage` and `backend_options`.

    `torch_compile_backend` is "chunkc" and `optim` "chunkc_adamw" unless given.
    """


class Trainer(ChunkcTrainer, transformers.Trainer):
    """`transformers.Trainer` with the model compiled in place by chunkc."""


class TensorBoardCallback(_TensorBoardCallback):
    """`transformers`' callback, which also writes memory, traffic and stalls from `chunkc.report` (see `Scalars`).

    Give it instead of `report_to="tensorboard"`.
    """

    def __init__(self, tb_writer: Any = None) -> None:
        super().__init__(tb_writer)
        self._scalars = Scalars()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        model = kwargs.get("model")
        scalars = self._scalars.read(model) if model is not None else {}
        super().on_log(args, state, control, logs={**(logs or {}), **scalars}, **kwargs)
