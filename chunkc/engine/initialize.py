"""Make an engine and its optimizer from a configuration: `chunkc.initialize_engine`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from chunkc.distributed.process_group import init_process_group
from chunkc.engine import cpu_embedding
from chunkc.engine.config import Config, EngineConfig, read_config
from chunkc.engine.engine import Engine, check_optimizer
from chunkc.engine.in_place import distribute_over_all, place_on
from chunkc.engine.optimizers import make_optimizer
from chunkc.engine.schedules import ScheduledLR, make_schedule
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.text import short
from chunkc.machines.devices import parse_device
from chunkc.options import parse_options
from chunkc.runtime.storage.unassigned import unassigned_memory_of
from chunkc.session.init import init
from chunkc.session.logs import logger
from chunkc.torch_private import dynamo

_reported: set[tuple[str, ...]] = set()
"""Sets of keys that were logged as without effect."""


def initialize_engine(
    model_func: Callable[[], nn.Module] | nn.Module,
    local_rank: int = 0,
    config: Config | None = None,
    *,
    model_parameters: Iterable[Any] | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    auto: object = None,
) -> tuple[Engine, Optimizer]:
    """Build a model, compile it in place, and make its optimizer.

    If a launcher has started several processes, the model is distributed over them (see `chunkc.distribute`), with the
    values of rank 0.

    Args:
        model_func: function that builds the model on the CPU; or the model.
        local_rank: index of this process on its machine, and of the GPU that it computes on, if any; -1 means 0.
        config: configuration of DeepSpeed or PatrickStar, as a dictionary or the path of a JSON file; with the options
            of the backend in a section `chunkc`.
        model_parameters: parameters to train, or groups of them, as for an optimizer. By default all.
        optimizer: replaces the configuration's: an optimizer of the model's parameters, or a function that makes one
            from `model_parameters`.
        lr_scheduler: replaces the configuration's: a scheduler of the optimizer, or a function that makes one from it.
        auto: source of `"auto"` values: `transformers.TrainingArguments`, or a dictionary by dotted names.

    Raises:
        OptionsError: the configuration has an unknown key or an invalid value, which the message names; or an argument
            is invalid.
        UnsupportedError: the configuration asks for a feature that chunkc does not have, or not with several processes;
            with use_cpu_embedding, an embedding is not on the CPU, is placed already, or has sparse gradients.
        HomeError: home has no room for the model.
    """
    if config is None:
        raise OptionsError("initialize_engine needs a configuration: a dict, or the path of a JSON file")
    world_size = _num_processes()
    settings = read_config(config, auto, world_size)
    if optimizer is None and settings.optimizer is None:
        raise OptionsError('the configuration has no "optimizer"; write one, or pass initialize_engine(optimizer=...)')
    device = parse_device(settings.device or (f"cuda:{max(local_rank, 0)}" if torch.cuda.is_available() else "cpu"))
    _check_several(settings, device, optimizer)
    looks_up = settings.top.use_cpu_embedding and device.type != "cpu"
    embeddings: list[nn.Embedding] = []
    with ExitStack() as stack, _at_home(settings, model_func, device):
        model = model_func if isinstance(model_func, nn.Module) else model_func()
        if not isinstance(model, nn.Module):
            raise OptionsError(f"model_func returned {short(model)}; it must return a torch.nn.Module")
        if isinstance(model, dynamo.OptimizedModule):
            raise OptionsError(
                "the model is what torch.compile returned; give initialize_engine the model itself, which it compiles "
                'with the options of the section "chunkc"'
            )
        if settings.dtype is not None:
            _cast(model, settings.dtype)
        embeddings = cpu_embedding.chosen(model) if looks_up else []
        # `_at_home` exits before `stack`: when it places the model that it built, these weights are still removed
        stack.enter_context(cpu_embedding.set_apart(embeddings))
    model.train()
    options = settings.compile_options(settings.dtype or _common_dtype(model))

    parameters = None if model_parameters is None else list(model_parameters)
    if world_size > 1:
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        if not dist.is_initialized():
            init_process_group()
        distribute_over_all(model, device, options, settings.zero_stage)
        if parameters is not None:
            parameters = _found_again(parameters, before, dict(model.named_parameters()))
    found = _optimizer_of(settings, optimizer, list(model.parameters()) if parameters is None else parameters)
    check_optimizer(found, settings)
    scheduler = _scheduler_of(settings, lr_scheduler, found)

    with cpu_embedding.set_apart(embeddings):
        place_on(model, device, options)
    cpu_embedding.look_up_on_cpu(embeddings, device)
    model.compile(backend="chunkc", options=options)
    _report({**settings.without_effect, **_cpu_embedding_without_effect(settings, device, embeddings)})
    _tell_of_others(model, found)
    engine = Engine(model, found, settings, lr_scheduler=scheduler, local_rank=local_rank, device=device)
    return engine, found


def _at_home(
    settings: EngineConfig, model_func: Callable[[], nn.Module] | nn.Module, device: torch.device
) -> AbstractContextManager[None]:
    """Return a context in which the model is built in home memory, if the configuration says so.

    Raises:
        OptionsError: it says so, and the model is built already.
    """
    if not settings.top.release_after_init:
        return nullcontext()
    if isinstance(model_func, nn.Module):
        raise OptionsError(
            "release_after_init builds the model at home, and model_func is a model already: pass the function that "
            "builds it, or set release_after_init to false"
        )
    options = parse_options(dict(settings.options), os.environ)
    return init(home=options.home, disk_holds=options.disk_holds, chunk_size=options.chunk_size, device=device)


def _cpu_embedding_without_effect(
    settings: EngineConfig, device: torch.device, embeddings: Sequence[nn.Embedding]
) -> dict[str, list[str]]:
    """Return `use_cpu_embedding` by the reason that it has no effect; empty if it has one or is not set."""
    if not settings.top.use_cpu_embedding or embeddings:
        return {}
    on_device = "the model has no nn.Embedding that the CPU can look up"
    return {"the CPU computes anyway" if device.type == "cpu" else on_device: ["use_cpu_embedding"]}


def _tell_of_others(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn about parameters with gradients that the optimizer does not use."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if others:
        logger.warning(
            "%d parameters that the optimizer does not have get gradients, which take memory and time (%s): freeze "
            "them, requires_grad_(False)",
            len(others),
            ", ".join(others[:3]) + (", ..." if len(others) > 3 else ""),
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model by `model.to(dtype)`; tensors that `chunkc.init` built stay at home, and are cast one at a time."""
    for parameter in model.parameters():
        unassigned_memory = unassigned_memory_of(parameter)
        if unassigned_memory is not None and parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = unassigned_memory.copy_of(parameter.detach().to(dtype))
    model.to(dtype)


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)


def _check_several(
    settings: EngineConfig, device: torch.device, optimizer: Optimizer | Callable[[Any], Optimizer] | None
) -> None:
    """Refuse features that several processes do not have.

    Raises:
        UnsupportedError: there are several, and the configuration or an argument turns one of these features on.
    """
    if settings.world_size == 1:
        return
    refused = {
        "look up embeddings on the CPU: set use_cpu_embedding to false": (
            settings.top.use_cpu_embedding and device.type != "cpu"
        ),
        "build a model at home: set release_after_init to false": settings.top.release_after_init,
        "take an optimizer that has the parameters of one: pass a function that makes it": (
            isinstance(optimizer, Optimizer)
        ),
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise UnsupportedError(f"{settings.world_size} processes cannot {what}")


def _found_again(given: list[Any], before: Mapping[int, str], named: Mapping[str, nn.Parameter]) -> list[Any]:
    """Replace parameters to train, or groups of them, by the model's distributed ones.

    Args:
        before: names by the id of the parameter before the model was distributed.
        named: distributed parameters by name.
    """

    def again(parameter: Any) -> Any:
        return named.get(before.get(id(parameter), ""), parameter)

    if not any(isinstance(group, dict) for group in given):
        return [again(parameter) for parameter in given]
    groups = ((group, group["params"]) for group in given)
    return [
        {**group, "params": again(held) if isinstance(held, torch.Tensor) else [again(p) for p in held]}
        for group, held in groups
    ]


def _optimizer_of(
    settings: EngineConfig, given: Optimizer | Callable[[Any], Optimizer] | None, parameters: list[Any]
) -> Optimizer:
    if given is None:
        section = settings.optimizer
        assert section is not None
        return make_optimizer(
            section.type,
            section.params,
            parameters,
            update_on=settings.update_on,
            is_patrickstars=settings.is_patrickstars,
        )
    made = given if isinstance(given, Optimizer) else given(parameters)
    if not isinstance(made, Optimizer):
        raise OptionsError(f"optimizer made {short(made)}; it must make a torch.optim.Optimizer")
    return made


def _scheduler_of(
    settings: EngineConfig,
    given: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
    optimizer: Optimizer,
) -> LRScheduler | None:
    if given is not None:
        return given if not callable(given) else given(optimizer)
    if (section := settings.scheduler) is None:
        return None
    return ScheduledLR(optimizer, make_schedule(section.type, section.params, len(optimizer.param_groups)))


def _common_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of most parameter elements; float32 if there are none."""
    numels: dict[torch.dtype, int] = {}
    for parameter in filter(torch.is_floating_point, model.parameters()):
        numels[parameter.dtype] = numels.get(parameter.dtype, 0) + parameter.numel()
    return max(numels, key=numels.__getitem__, default=torch.float32)


def _report(without_effect: Mapping[str, list[str]]) -> None:
    """Log which keys of a configuration have no effect, once for each set of keys."""
    names = tuple(sorted(name for names in without_effect.values() for name in names))
    if names and names not in _reported:
        _reported.add(names)
        lines = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in without_effect.items())
        logger.warning("keys of the configuration without effect: %s", lines)
