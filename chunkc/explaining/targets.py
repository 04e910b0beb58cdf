"""Find the model for `chunkc explain`: a built-in one, a factory in a file, or a class of an installed package.

Each becomes a function of batch size and sequence length that builds the model and its inputs without memory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from chunkc.explaining.error_attribution import is_own_fault
from chunkc.explaining.layers import LAYERS
from chunkc.ir.documents import parse_json, read_text
from chunkc.ir.errors import ChunkcError, OptionsError
from chunkc.ir.text import message_of
from chunkc.models import find_model
from chunkc.models.layers import cut_layers
from chunkc.torch_private.fake import FakeTensorMode

DEFAULT_IMAGE_SIZE = 224
"""Pixels of an image's edge if a configuration names none; the size of ImageNet's models."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Subject(NamedTuple):
    """A model and one call of it, all on fake tensors."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A model to explain. `build(batch_size, seq_len)`: None means the model's own."""

    name: str
    build: Callable[[int | None, int | None], Subject]


@dataclass(frozen=True)
class ModelOptions:
    """Options for building a model.

    Attributes:
        dtype: None means the model's own.
        mesh: of the ranks, if layers are cut over some of them; None: each rank computes whole layers.
    """

    dtype: torch.dtype | None = None
    activation_checkpointing: bool = False
    mesh: DeviceMesh | None = None


@contextlib.contextmanager
def errors_of(what: str, *, explained: bool = False) -> Iterator[None]:
    """Turn any error of user code, `sys.exit` included, into one line that names the code.

    With `explained`, the code runs inside chunkc's: errors that are chunkc's own stay as they are.
    """
    try:
        yield
    except ChunkcError:
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if explained and is_own_fault(error):
            raise
        message = message_of(error)
        detail = f": {message}" if message else ""
        module = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise OptionsError(f"{what} raised {type(error).__name__}{module}{detail}{_where(what, error)}") from error


def _where(what: str, error: BaseException) -> str:
    """Return the innermost line of the user's file that an error passed through, as ` (train.py:12)`; "" if none."""
    path = Path(what.rpartition(":")[0]).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    return f" ({path.name}:{lines[-1]})" if lines else ""


class _OneMode(FakeTensorMode):
    """A fake tensor mode that all copies of its tensors share.

    Without it `copy.deepcopy` of a module, by which `nn.TransformerEncoder` makes its layers, would copy the mode with
    each parameter.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _OneMode:
        return self


def _new_mode() -> FakeTensorMode:
    """Make the mode of a target's fake tensors; tensors of two modes do not mix."""
    return _OneMode(allow_non_fake_inputs=True)


def built_in(name: str, options: ModelOptions) -> Target:
    """Return a model of `chunkc.models`.

    Raises:
        OptionsError: there is none of that name; the error lists similar names.
    """
    spec, mode = find_model(name), _new_mode()

    def build(batch_size: int | None, seq_len: int | None) -> Subject:
        with errors_of(spec.name), mode if options.mesh is None else torch.device("meta"):
            model = spec.build(
                activation_checkpointing=options.activation_checkpointing,
                blocks_are_regions=options.mesh is None,
                dtype=options.dtype,
                seq_len=seq_len,
            )
            if options.mesh is not None:
                cut_layers(spec, model, options.mesh[LAYERS])
            args, kwargs = spec.example(batch_size, seq_len, dtype=options.dtype)
        return Subject(model, args, kwargs)

    return Target(spec.name, build)


def from_file(text: str, options: ModelOptions) -> Target:
    """Load `FILE.py:FACTORY`, a function that returns `(model, args)` or `(model, args, kwargs)`.

    The factory gets `batch_size`, `seq_len`, `dtype` and `activation_checkpointing` if it has parameters of these names
    and the user gave them. Likewise it gets the `mesh` over which it is to cut layers; then it builds on the meta
    device, on which `parallelize_module` exchanges nothing.

    Raises:
        OptionsError: there is no such file or factory.
    """
    path_text, _, factory_name = text.rpartition(":")
    path = Path(path_text)
    if not os.path.isfile(path):
        is_package = path_text.replace(".", "").isidentifier() and path.suffix != ".py"
        hint = f"; for a model class of a package write --module {text}" if is_package else ""
        raise OptionsError(f"there is no file {path_text}{hint}")
    mode = _new_mode()
    with errors_of(str(path)), mode:
        module = _load(path)
        factory = getattr(module, factory_name, None)
    if not callable(factory):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise OptionsError(
            f"{path} has no function {factory_name!r}; it has {', '.join(functions) or 'none'}. It must return "
            "(model, args) or (model, args, kwargs)"
        )
    with errors_of(text):
        known = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

    def build(batch_size: int | None, seq_len: int | None) -> Subject:
        wanted = {
            "batch_size": batch_size,
            "seq_len": seq_len,
            "dtype": options.dtype,
            "activation_checkpointing": options.activation_checkpointing or None,
        }
        given: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        missing = [name for name in given if name not in known and not takes_any]
        if missing:
            raise OptionsError(f"{text} has no parameter {missing[0]!r}, so it cannot be given")
        if options.mesh is not None and ("mesh" in known or takes_any):
            given["mesh"] = options.mesh
        with errors_of(text):
            result = _call(factory, given, mode if options.mesh is None else None)
        is_call = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)
        if not is_call or not all(_are_keywords(kwargs) for kwargs in result[2:]):
            raise OptionsError(f"{text} must return (model, args) or (model, args, kwargs), not {_shape(result)}")
        model, args, *rest = result
        args = args if isinstance(args, tuple) else (args,)
        return Subject(model, args, rest[0] if rest else {})

    return Target(text, build)


def from_module(text: str, config: Path | None, options: ModelOptions) -> Target:
    """Return the Hugging Face model class `PACKAGE:CLASS`, with a configuration file (None: the class's default).

    Raises:
        OptionsError: there is no such class, or it is no `transformers` model; or its layers are to be cut over ranks.
    """
    if options.mesh is not None:
        raise OptionsError(
            "--module builds a model with whole layers, and the third number of --mesh says that devices compute "
            "each of them together: write a factory that calls parallelize_module, and explain FILE.py:FACTORY"
        )
    package, _, class_name = text.partition(":")
    if not all(part.isidentifier() for part in package.split(".")):
        raise OptionsError(f"--module {text}: {package!r} is not the name of a package")
    with errors_of(f"--module {text}"):
        try:
            cls = getattr(importlib.import_module(package), class_name, None)
        except ImportError as error:
            raise OptionsError(f"--module {text}: {message_of(error)}") from error
    config_class = getattr(cls, "config_class", None)
    if cls is None or config_class is None:
        raise OptionsError(
            f"--module takes a model class of transformers such as transformers:LlamaForCausalLM, not {text}; for "
            "another model write a factory: chunkc explain FILE.py:FACTORY"
        )
    values = _read_json(config) if config is not None else {}

    def build(batch_size: int | None, seq_len: int | None) -> Subject:
        # On the meta device, as transformers does: some models read small tensors' values while they are built.
        with errors_of(text), torch.device("meta"):
            settings = config_class(**values)
            if getattr(settings, "use_cache", False):
                settings.use_cache = False  # only generation needs it; with checkpointing, it warns mid-graph
            model = cls(settings)
            if options.activation_checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if options.dtype is not None:
                model = model.to(options.dtype)
            if getattr(model, "loss_type", "") is None:  # the meaning of None, without its warning mid-graph
                model.loss_type = "ForCausalLM"
            model.train()
            kwargs = _transformers_inputs(model, settings, batch_size or 1, seq_len)
        return Subject(model, (), kwargs)

    return Target(class_name, build)


def _transformers_inputs(model: nn.Module, config: Any, batch_size: int, seq_len: int | None) -> dict[str, Any]:
    """Make random inputs by the names of `forward`'s parameters: tokens or images, and labels.

    Raises:
        OptionsError: the model takes other inputs.
    """
    known = inspect.signature(model.forward).parameters
    if "input_ids" in known:
        length = seq_len or min(1024, getattr(config, "max_position_embeddings", 1024))
        tokens = torch.randint(config.vocab_size, (batch_size, length))
        inputs: dict[str, Any] = {"input_ids": tokens}
        if "use_cache" in known:
            inputs["use_cache"] = False
    elif "pixel_values" in known:
        size = getattr(config, "image_size", DEFAULT_IMAGE_SIZE)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        dtype = next(model.parameters()).dtype
        inputs = {"pixel_values": torch.randn(batch_size, config.num_channels, height, width, dtype=dtype)}
    else:
        raise OptionsError(
            f"{type(model).__name__} takes neither input_ids nor pixel_values; write a factory: chunkc explain "
            "FILE.py:FACTORY"
        )
    if "labels" in known:
        per_token = "input_ids" in known and "SequenceClassification" not in type(model).__name__
        inputs["labels"] = inputs["input_ids"].clone() if per_token else torch.zeros(batch_size, dtype=torch.int64)
    return inputs


def _call(factory: Callable[..., Any], given: Mapping[str, Any], mode: FakeTensorMode | None) -> Any:
    """Call the factory without allocating memory: in the mode, or on the meta device if there is none.

    Fake tensors keep their devices, so that `model.to(device)` works; but modules of them may refuse a conversion such
    as `model.bfloat16()`, which swaps tensors that the mode watches. The meta device serves for those.
    """
    try:
        if mode is not None:
            with mode:
                return factory(**given)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
    with torch.device("meta"):
        return factory(**given)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionsError(f"{path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _are_keywords(kwargs: object) -> bool:
    return isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_text(path), str(path), finite=False)  # some models' own have Infinity
    except OptionsError as error:
        raise OptionsError(f"--config {path}: {error}") from None
    if not isinstance(values, dict):
        raise OptionsError(f"--config {path} must hold a JSON object")
    return values


def _shape(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value)}"
    return f"{type(value).__name__}"
