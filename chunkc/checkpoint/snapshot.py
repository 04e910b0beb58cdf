"""Collect a checkpoint's contents: tensors by file and key, and all else as JSON. Tensors are not copied here.

A model's keys are those of its `state_dict`, without the `_orig_mod.` of compiled modules. A tensor with several keys
is saved under the first. An optimizer's states have keys such as `h.3.up.weight.exp_avg`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chunkc.checkpoint.data import Json, Tensors, encoded
from chunkc.checkpoint.random_state import random_state
from chunkc.checkpoint.sources import Source, master_of, source_of
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.states import MASTER, MASTER_LOW
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.torch_private.dtensor import DTensor, with_local

STATE_JSON = "state.json"
STATE_FILE = "state.safetensors"

RANKS_OF_A_LAYER = "ranks of a layer"
"""Key of `Parts.ranks_of_a_layer` in the JSON; 1 if it is missing."""

_COMPILED = "_orig_mod."
"""What `torch.compile` inserts into the names of a compiled module's parameters and buffers."""


@dataclass(frozen=True)
class Parts:
    """Objects that are saved and loaded, by the user's names; a single object has the name "".

    Attributes:
        others: objects with `state_dict` and `load_state_dict`, by kind ("scheduler", "scaler", "dataloader") and name.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parameters(self) -> list[torch.Tensor]:
        """List the parameters of models and optimizers, each once, and this rank's local shards of sharded ones."""
        of_models = [p for model in self.models.values() for p in model.parameters()]
        of_optimizers = [p for o in self.optimizers.values() for group in o.param_groups for p in group["params"]]
        found = {id(p): p for whole in (*of_models, *of_optimizers) for p in (whole, local_shard_of(whole))}
        return list(found.values())

    def transport(self) -> Transport | None:
        """Find the transport of all ranks that train these models; None: the models are not sharded.

        Raises:
            UnsupportedError: some parameters are sharded and others are not, or over other ranks.
        """
        found = {
            f"{name}/{key}" if name else key: local_shard_of(parameter)
            for name, model in self.models.items()
            for key, parameter in model.named_parameters()
        }
        first, transport = next(
            ((key, part.world) for key, part in found.items() if isinstance(part, LocalShard)), ("", None)
        )
        for key, part in found.items():
            if transport is not None and (not isinstance(part, LocalShard) or part.world.ranks != transport.ranks):
                raise UnsupportedError(
                    f"{key} is not distributed as {first} is: ranks save what is cut over all of them, as "
                    "chunkc.distribute does it"
                )
        return transport

    def ranks_of_a_layer(self) -> int:
        """Count the ranks of tensor parallelism, which compute a layer on the same data; 1 without it."""
        part = next((part for part in self.parameters() if isinstance(part, LocalShard)), None)
        return 1 if part is None else part.world.num_ranks // part.transport.num_ranks


@dataclass(frozen=True)
class OwnTensors:
    """A model's parameters and buffers, and the extra state of its modules.

    Attributes:
        tensors: each once, under the first of its keys.
        aliases: every other key -> the first one.
        extra: results of modules' `get_extra_state`, by key.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]


def file_of(kind: str, name: str) -> str:
    """Return the name of the file of a model's or an optimizer's tensors."""
    return f"{kind}.{name}.safetensors" if name else f"{kind}.safetensors"


def own_tensors(name: str, model: nn.Module) -> OwnTensors:
    """Collect a model's parameters and buffers by the keys of its `state_dict`.

    Raises:
        UnsupportedError: the `state_dict` has a value that is neither: loading into it would not change the model.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    first: dict[int, str] = {}
    for full_key, value in model.state_dict(keep_vars=True).items():
        key = full_key.replace(_COMPILED, "")
        if key.rpartition(".")[2] == "_extra_state":
            extra[key] = value
        elif id(value) not in known:
            raise UnsupportedError(
                f"{key} of the model{name and f' {name!r}'} is made by its state_dict, and is no parameter or buffer "
                "of it; a checkpoint saves and loads parameters and buffers themselves"
            )
        elif id(value) in first:
            aliases[key] = first[id(value)]
        else:
            first[id(value)] = key
            tensors[key] = value
    return OwnTensors(tensors, aliases, extra)


def parameter_names(parts: Parts) -> dict[int, str]:
    """Name the models' parameters and buffers, by the `id` of the tensor."""
    found: dict[int, str] = {}
    for name, model in parts.models.items():
        for key, tensor in own_tensors(name, model).tensors.items():
            found.setdefault(id(tensor), f"{name}/{key}" if name else key)
    return found


def names_in_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """List the names of an optimizer's parameters, by parameter group; of those of no model, "#group.position"."""
    return [
        [names.get(id(p), f"#{number}.{position}") for position, p in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def ranks_that_save(parts: Parts) -> Transport | None:
    """Find the transport of the ranks that save these objects; None: this process saves alone.

    Raises:
        UnsupportedError: there are several processes, but the models are not distributed over them.
    """
    transport, distributed = parts.transport(), torch.distributed
    has_other_ranks = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if transport is None and has_other_ranks:
        raise UnsupportedError(
            "there are several processes, and the model is not distributed over them: save after chunkc.distribute, or "
            "before the process group is initialised"
        )
    return transport


def snapshot(parts: Parts) -> tuple[list[Source], Json]:
    """Collect all tensors, and all else as JSON.

    Raises:
        UnsupportedError: something cannot be saved; the message names it.
    """
    sources: list[Source] = []
    loose: Tensors = {}
    models = {name: _model(name, model, sources, loose) for name, model in parts.models.items()}
    names = parameter_names(parts)
    optimizers = {
        name: _optimizer(name, optimizer, names, sources, loose) for name, optimizer in parts.optimizers.items()
    }
    others = {
        kind: {
            name: encoded(part.state_dict(), f"{kind}.{name}" if name else kind, loose) for name, part in named.items()
        }
        for kind, named in parts.others.items()
    }
    document = {
        "models": models,
        "optimizers": optimizers,
        "others": others,
        "random": encoded(random_state(), "random", loose),
        RANKS_OF_A_LAYER: parts.ranks_of_a_layer(),
    }
    sources += [source_of(STATE_FILE, key, tensor, is_guarded=False) for key, tensor in loose.items()]
    return sources, document


def _model(name: str, model: nn.Module, sources: list[Source], loose: Tensors) -> Json:
    own, file = own_tensors(name, model), file_of("model", name)
    for key, tensor in own.tensors.items():
        sources.append(source_of(file, key, tensor, is_guarded=isinstance(tensor, nn.Parameter)))
    extra = {key: encoded(value, f"model.{name}.{key}", loose) for key, value in own.extra.items()}
    return {"aliases": dict(own.aliases), "extra": extra}


def _optimizer(
    name: str, optimizer: Optimizer, names: Mapping[int, str], sources: list[Source], loose: Tensors
) -> Json:
    label, file = f"optimizer.{name}" if name else "optimizer", file_of("optimizer", name)
    grouped = names_in_groups(optimizer, names)
    groups = [
        encoded({key: value for key, value in group.items() if key != "params"}, f"{label}.groups.{number}", loose)
        | {"params": grouped[number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    titles = {
        id(parameter): title
        for group, of_group in zip(optimizer.param_groups, grouped, strict=True)
        for parameter, title in zip(group["params"], of_group, strict=True)
    }
    if len(set(titles.values())) != len(titles):
        raise UnsupportedError(
            f"{label} has a parameter with a name that begins with #, which cannot be told from others"
        )

    def saved(kind: str, parameter: torch.Tensor, value: Any, key: str) -> Json:
        if not isinstance(value, torch.Tensor):
            return encoded(value, f"{file}.{key}", loose)
        if isinstance(optimizer, ChunkedOptimizer) and kind == MASTER_LOW:
            # Lower bits of other values of the parameter, which was written to since, are left out: see `master_of`.
            lower = value if optimizer.contents.belong(local_shard_of(parameter)) else None
            sources.append(master_of(file, key, parameter, lower))
        else:
            if isinstance(optimizer, ChunkedOptimizer) and isinstance(parameter, DTensor) and kind != "step":
                value = with_local(parameter, value)
            sources.append(source_of(file, key, value, is_guarded=True))
        if value.dtype == torch.uint8 and not value.is_contiguous():  # 8-bit scales are of blocks in memory order
            return {"$tensor": key, "strides": list(value.stride())}
        return {"$tensor": key}

    states: dict[str, Json] = {}
    for parameter, state in list(optimizer.state.items()):
        title = titles.get(id(parameter))
        if title is None:
            raise UnsupportedError(f"{label} has a state of something that is none of its parameters")
        states[title] = {}
        for kind, value in state.items():
            name_in_file = MASTER if kind == MASTER_LOW else kind  # joined with the parameter: the whole fp32 master
            states[title][name_in_file] = saved(kind, parameter, value, f"{title}.{name_in_file}")
    return {"groups": groups, "states": states}


def named(kind: str, given: Any, check: type | tuple[type, ...] | None = None) -> dict[str, Any]:
    """Turn an argument (None, an object, or a mapping of names to objects) into objects by name.

    Args:
        kind: the argument's name in errors.
        check: class of the objects; None: any that has `state_dict` and `load_state_dict`.

    Raises:
        OptionsError: an object is of another class, or a name cannot be part of a file's name.
    """
    if given is None:
        return {}
    found = dict(given) if isinstance(given, Mapping) else {"": given}
    for name, part in found.items():
        if isinstance(given, Mapping) and not _is_plain(name):
            raise OptionsError(
                f"{kind} has the name {name!r}; allowed: a Python identifier of at most 100 ASCII characters"
            )
        if check is not None and not isinstance(part, check):
            raise OptionsError(f"{kind} is a {type(part).__name__}; allowed: {_shown(check)}, or a dict of names to it")
        if check is None and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise OptionsError(
                f"{kind} is a {type(part).__name__}, which has no state_dict() and load_state_dict()"
                + ("; wrap it in chunkc.checkpoint.Batches" if kind == "dataloader" else "")
            )
    return found


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= 100


def _shown(check: type | tuple[type, ...]) -> str:
    kinds: Iterable[type] = check if isinstance(check, tuple) else (check,)
    return " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
