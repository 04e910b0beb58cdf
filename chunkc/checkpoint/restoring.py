"""Load a checkpoint into models, optimizers and other objects; check all of it before anything changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from chunkc.checkpoint.data import Json, decoded
from chunkc.checkpoint.manifest import Manifest, opened, read_manifest, verify
from chunkc.checkpoint.mapped import Mapped, mapped
from chunkc.checkpoint.placement import is_of_a_rank, of_rank
from chunkc.checkpoint.random_state import set_random_state
from chunkc.checkpoint.snapshot import (
    RANKS_OF_A_LAYER,
    STATE_FILE,
    STATE_JSON,
    OwnTensors,
    Parts,
    file_of,
    names_in_groups,
    own_tensors,
    parameter_names,
)
from chunkc.ir.errors import CheckpointError
from chunkc.optim.loading import checked_state_dict
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.runtime.storage.maps import drop_pages, evict_pages
from chunkc.runtime.store.shards import shard_like
from chunkc.torch_private.dtensor import DTensor, local_of, with_local

_SUFFIX = ".safetensors"
_MAX_SHOWN = 5

Files = Mapping[str, Mapping[str, Mapped]]
"""A file's name -> its tensors by name."""


@dataclass(frozen=True)
class Saved:
    """A verified checkpoint, as one rank loads it.

    Attributes:
        files: by the names that rank 0 has for them; a rank's own tensors are laid over those of rank 0.
        has_generators: whether the random generators in `document` are this rank's. A rank that did not exist when the
            checkpoint was saved takes all else from rank 0 and keeps its generators. With tensor parallelism, a new
            rank of a layer takes all from the layer's first rank, which has the same data.
    """

    step: int
    files: Files
    document: Json
    has_generators: bool


def read(folder_fd: int, step: int, rank: int, num_ranks: int, ranks_of_a_layer: int = 1) -> Saved:
    """Read a checkpoint; of its files, this rank compares every `num_ranks`-th with its checksum.

    Args:
        ranks_of_a_layer: of the ranks that load (see `Parts.ranks_of_a_layer`).

    Raises:
        CheckpointError: a file that this rank reads is missing or damaged.
    """
    manifest = read_manifest(folder_fd)
    if manifest.step != step:
        raise CheckpointError(f"it says that it is of step {manifest.step}")
    names = sorted(manifest.files, key=lambda name: -manifest.files[name].nbytes)  # ranks get about equal bytes
    verify(folder_fd, {name: manifest.files[name] for name in names[rank::num_ranks]})
    number = _saved_rank(rank, ranks_of_a_layer, _document(folder_fd, manifest, STATE_JSON).get(RANKS_OF_A_LAYER, 1))
    has_own = of_rank(number, STATE_JSON) in manifest.files
    prefix = of_rank(number, "") if has_own else ""
    plain = [name for name in manifest.files if name.endswith(_SUFFIX) and not is_of_a_rank(name)]
    files: dict[str, dict[str, Mapped]] = {}
    for name in plain:
        files[name] = _mapped(folder_fd, name)
        if prefix and prefix + name in manifest.files:
            files[name] |= _mapped(folder_fd, prefix + name)
    return Saved(step, files, _document(folder_fd, manifest, prefix + STATE_JSON), has_own)


def _saved_rank(rank: int, of_a_layer: int, saved_of_a_layer: int) -> int:
    """Find the rank of the saved run that had this rank's place in the data and, if it existed, in its layer."""
    data, place = divmod(rank, of_a_layer)
    return data * saved_of_a_layer + (place if place < saved_of_a_layer else 0)


def prepared(saved: Saved, parts: Parts) -> Callable[[], None]:
    """Check that a checkpoint fits, and return a function that loads it; nothing changes before its call.

    The function raises HomeError if there is no room at home for an optimizer's states. Models are loaded then, and
    that optimizer is not.

    Raises:
        CheckpointError: the checkpoint is of other models, optimizers or other objects.
        OptionsError: states do not fit an optimizer of chunkc.
    """
    document = saved.document
    for kind, here in (
        ("models", parts.models),
        ("optimizers", parts.optimizers),
        *((kind, named) for kind, named in parts.others.items()),
    ):
        there = document[kind] if kind in ("models", "optimizers") else document["others"].get(kind, {})
        _same(f"the {kind}", there, here)
    targets: dict[tuple[str, str], torch.Tensor] = {}
    owns = {name: own_tensors(name, model) for name, model in parts.models.items()}
    for name, own in owns.items():
        targets |= _targets(file_of("model", name), own, document["models"][name], saved.files)
    loose = _loose(saved.files)
    names = parameter_names(parts)
    states = {
        name: _state_dict(name, optimizer, document["optimizers"][name], names, saved.files)
        for name, optimizer in parts.optimizers.items()
    }
    for name, optimizer in parts.optimizers.items():
        if isinstance(optimizer, ChunkedOptimizer):
            checked_state_dict(optimizer, states[name])
    others = {
        kind: {name: decoded(document["others"][kind][name], loose) for name in named}
        for kind, named in parts.others.items()
    }
    random = decoded(document["random"], loose)
    extra = {name: decoded(document["models"][name]["extra"], loose) for name in parts.models}

    def load() -> None:
        for (file, key), tensor in targets.items():
            _fill(tensor, saved.files[file][key].tensor())
        for name, model in parts.models.items():
            _set_extra(model, owns[name], extra[name])
        for name, optimizer in parts.optimizers.items():
            optimizer.load_state_dict(states[name])
        for kind, named in parts.others.items():
            for name, part in named.items():
                part.load_state_dict(others[kind][name])
        if saved.has_generators:
            set_random_state(random)

    return load


def _mapped(folder_fd: int, name: str) -> dict[str, Mapped]:
    with opened(folder_fd, name) as fd:
        return mapped(fd, name)


def _document(folder_fd: int, manifest: Manifest, name: str) -> Json:
    if name not in manifest.files:
        raise CheckpointError(f"it has no {name}")
    with opened(folder_fd, name) as fd:
        text = os.pread(fd, manifest.files[name].nbytes, 0)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # another rank may verify this file
        raise CheckpointError(f"{name} is damaged ({type(error).__name__})") from error


def _loose(files: Files) -> Callable[[str], torch.Tensor]:
    """Return a look-up of the tensors in JSON values; it copies them, so that they do not keep the file mapped."""

    def loose(key: str) -> torch.Tensor:
        if key not in files[STATE_FILE]:
            raise CheckpointError(f"the checkpoint has no {key}")
        return files[STATE_FILE][key].tensor().clone()

    return loose


def _same(what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if set(there) != set(here):
        shown = [", ".join(map(repr, sorted(names))) or "none" for names in (there, here)]
        raise CheckpointError(f"{what} are {shown[0]} in the checkpoint and {shown[1]} here ('': one without a name)")


def _targets(file: str, own: OwnTensors, document: Json, files: Files) -> dict[tuple[str, str], torch.Tensor]:
    """Map the file and key of each saved tensor to the model's tensor.

    Raises:
        CheckpointError: keys, shapes, dtypes or ties of the model and the checkpoint differ.
    """
    entries, aliases = files.get(file, {}), document["aliases"]
    there = {**{key: key for key in entries}, **aliases}
    here = {**{key: key for key in own.tensors}, **own.aliases}
    _refuse(f"{file} lacks", [key for key in here if key not in there])
    _refuse(f"{file} has what the model does not have:", [key for key in there if key not in here])
    _refuse("the extra state differs:", sorted(set(own.extra) ^ set(document["extra"])))
    # Tied here, separate in the checkpoint: the values may differ, and only one of them could be loaded.
    _refuse(
        "tied in the model, but saved apart:", [key for key, first in own.aliases.items() if there[key] != there[first]]
    )
    found = {(file, there[key]): tensor for key, tensor in own.tensors.items()}
    for (_, key), tensor in found.items():
        entry = entries[key]
        if (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{key} is {entry.dtype} {list(entry.shape)} in the checkpoint, and {tensor.dtype} "
                f"{list(tensor.shape)} in the model"
            )
    if len(found) != len(own.tensors):
        untied = [key for key in own.tensors if there[key] != key]
        _refuse("tied in the checkpoint, but not in the model:", untied)
    return found


def _refuse(what: str, keys: Sequence[str]) -> None:
    if keys:
        more = f" and {len(keys) - _MAX_SHOWN} more" if len(keys) > _MAX_SHOWN else ""
        raise CheckpointError(f"the checkpoint is of another model: {what} {', '.join(keys[:_MAX_SHOWN])}{more}")


def _state_dict(
    name: str, optimizer: Optimizer, document: Json, names: Mapping[int, str], files: Files
) -> dict[str, Any]:
    """Build the argument of an optimizer's `load_state_dict`.

    For an optimizer of chunkc, tensors are mapped from the file: it copies each. Others get copies.

    Raises:
        CheckpointError: the optimizer has other parameters than in the checkpoint, or other parameter groups.
    """
    file, loose, label = file_of("optimizer", name), _loose(files), f"the optimizer{name and f' {name!r}'}"
    here, there = names_in_groups(optimizer, names), [group["params"] for group in document["groups"]]
    if [sorted(group) for group in here] != [sorted(group) for group in there]:
        differing = sorted({n for group in here for n in group} ^ {n for group in there for n in group})
        raise CheckpointError(
            f"{label} has other parameters, or in other parameter groups, than in the checkpoint"
            + (f": {', '.join(differing[:_MAX_SHOWN])}" if differing else "")
        )
    is_chunked = isinstance(optimizer, ChunkedOptimizer)
    of_title = {
        title: parameter
        for group, titles in zip(optimizer.param_groups, here, strict=True)
        for title, parameter in zip(titles, group["params"], strict=True)
    }

    def state_of(value: Json, parameter: torch.Tensor) -> Any:
        if isinstance(value, dict) and "$tensor" in value and value["$tensor"] in files.get(file, {}):
            tensor = files[file][value["$tensor"]].tensor()
            if "strides" in value and (tensor.dtype == torch.uint8 or not is_chunked):  # 8-bit: blocks in memory order
                laid_out = torch.empty_strided(tensor.shape, value["strides"], dtype=tensor.dtype, device="cpu")
                return laid_out.copy_(tensor)
            if isinstance(parameter, DTensor) and parameter.shape == tensor.shape:
                own = shard_like(tensor, parameter)
                return own if is_chunked else with_local(parameter, local_of(own).contiguous().clone())
            return tensor if is_chunked else tensor.clone()
        return decoded(value, loose)

    ids: dict[str, int] = {}
    for group in here:
        ids |= {title: len(ids) + at for at, title in enumerate(group)}
    groups = [
        decoded({key: value for key, value in group.items() if key != "params"}, loose)
        | {"params": [ids[title] for title in of_group]}
        for group, of_group in zip(document["groups"], here, strict=True)
    ]
    states = {
        ids[title]: {kind: state_of(value, of_title[title]) for kind, value in state.items()}
        for title, state in document["states"].items()
    }
    return {"state": states, "param_groups": groups}


def _fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        local_of(tensor).detach().copy_(local_of(shard_like(whole, tensor)))
    else:
        tensor.detach().copy_(whole)
    drop_pages(local_of(tensor) if isinstance(tensor, DTensor) else tensor)
    evict_pages(whole)


def _set_extra(model: torch.nn.Module, own: OwnTensors, extra: Mapping[str, Any]) -> None:
    modules = {  # of a compiled module and the one inside it, the inner one
        f"{name}.".replace("_orig_mod.", "").removesuffix("."): module
        for name, module in model.named_modules(remove_duplicate=False)
    }
    for key in own.extra:
        modules[key.rpartition(".")[0]].set_extra_state(extra[key])
