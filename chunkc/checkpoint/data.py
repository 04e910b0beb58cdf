"""Encode Python values as JSON and tensors, and decode them exactly: the `state_dict` of a scheduler, for example.

A value that JSON lacks becomes an object with one key that begins with "$". Decoding makes data; it executes nothing.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from chunkc.ir.errors import CheckpointError, UnsupportedError

Json = Any
Tensors = dict[str, torch.Tensor]

_PLAIN = (type(None), bool, int, str)
_SEQUENCES: Mapping[type, str] = {
    tuple: "$tuple",
    torch.Size: "$tuple",
    set: "$set",
    frozenset: "$set",
    deque: "$deque",
}


def encoded(value: Any, path: str, tensors: Tensors) -> Json:
    """Encode a value as JSON.

    Args:
        path: of the value, such as "scheduler.last_lr"; names its tensors, and what errors are about.
        tensors: gets the value's tensors, by path.

    Raises:
        UnsupportedError: something in the value is not data; the message has its path.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return _each(value, path, tensors)
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: _each(value, path, tensors)}
    if isinstance(value, torch.Tensor):
        while path in tensors:  # in {"a": {"b": ...}, "a.b": ...} two tensors have the path "a.b"
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if kind is np.ndarray:
        return {"$array": encoded(_array_as_tensor(value, path), path, tensors)}
    if isinstance(value, np.generic):
        return {"$number": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, path, tensors)
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [encoded(part, path, tensors) for part in (value.real, value.imag)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"$dtype" if isinstance(value, torch.dtype) else "$device": str(value).removeprefix("torch.")}
    raise UnsupportedError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds data only: numbers, text, tensors, "
        "arrays, and lists, tuples, sets and dicts of them"
    )


def decoded(value: Json, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """Decode what `encoded` has made.

    Args:
        tensor_of: returns the tensor with a path.

    Raises:
        CheckpointError: the form of a value, its dtype or its number type is unknown.
    """
    if isinstance(value, list):
        return [decoded(entry, tensor_of) for entry in value]
    if not isinstance(value, dict):
        return value
    word = next(iter(value), "")
    if not word.startswith("$"):
        return {key: decoded(entry, tensor_of) for key, entry in value.items()}
    if len(value) != 1 or word not in _READERS:
        raise CheckpointError(f"the checkpoint has a value of the form {word!r}, which this version does not know")
    content = value[word]
    if word == "$tensor":
        return tensor_of(content)
    return _READERS[word](decoded(content, tensor_of))


def _each(values: Any, path: str, tensors: Tensors) -> list[Json]:
    return [encoded(value, f"{path}.{index}", tensors) for index, value in enumerate(values)]


def _encoded_mapping(value: Mapping[Any, Any], path: str, tensors: Tensors) -> Json:
    if type(value) is Counter:
        return {"$counter": [[encoded(key, path, tensors), number] for key, number in value.items()]}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encoded(entry, f"{path}.{key}", tensors) for key, entry in value.items()}
    pairs = [
        [encoded(key, f"{path}.keys.{index}", tensors), encoded(entry, f"{path}.{index}", tensors)]
        for index, (key, entry) in enumerate(value.items())
    ]
    return {"$dict": pairs}


def _array_as_tensor(array: np.ndarray, path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{path} is a NumPy array of {array.dtype}, which a checkpoint cannot hold") from error


def _number(content: list[str]) -> np.generic:
    dtype = np.dtype(content[0])
    if dtype.hasobject:
        raise CheckpointError(f"the checkpoint has a number of the type {content[0]!r}, which is no number's")
    return np.frombuffer(base64.b64decode(content[1]), dtype=dtype)[0]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint names the dtype {name!r}, which torch {torch.__version__} does not have")
    return dtype


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "$tensor": lambda content: content,
    "$float": float,
    "$tuple": tuple,
    "$set": set,
    "$deque": deque,
    "$array": lambda tensor: tensor.numpy().copy(),
    "$number": _number,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$dict": dict,
    "$bytes": base64.b64decode,
    "$complex": lambda parts: complex(*parts),
    "$dtype": _dtype,
    "$device": torch.device,
}
