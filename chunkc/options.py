"""Check the options of `torch.compile(..., backend="chunkc", options={...})`, and turn budgets into bytes.

`parse_options` turns the dictionary into one frozen `Options`; its mistakes become one `OptionsError` of one
line. Environment variables stand in for options that are not given. Nothing here looks at the machine.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from chunkc.ir.errors import OptionsError
from chunkc.ir.layout import DiskHolds
from chunkc.ir.text import short
from chunkc.ir.units import NUMBER, parse_nbytes

Activations = Literal["auto", "keep", "offload", "rerun"]
"""Treatments of the values that a forward saves for its backward."""

LossTileRows = Annotated[int, Field(gt=0)] | Literal["auto", "never"]
"""Rows of a tile in which a loss and its logits are computed; chosen by their shape; or no tiles."""

MIN_CHUNK_NBYTES = 4 * 1024
AUTO_BUDGET = Fraction(9, 10)
"""The part of the available memory that `memory_budget="auto"` takes."""

VARIABLES: Mapping[str, str] = MappingProxyType({"memory_budget": "CHUNKC_MEMORY_BUDGET", "home": "CHUNKC_HOME"})
"""Environment variables by the option that each stands in for. One that is empty counts as not set."""

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

_PERCENT = re.compile(rf"{NUMBER}\s*%")

_ALLOWED = {
    "memory_budget": 'a positive int of bytes, a size such as "6GiB", "6GB" or "512MiB", '
    'a percentage such as "80%" (above 0%, at most 100%), or "auto"',
    "home": '"cpu", "disk" or "disk:DIR"',
    "disk_holds": '"auto", "states" or "everything"',
    "chunk_size": 'an int of bytes or a size such as "4MiB" (at least 4 KiB), or "auto"',
    "activations": '"auto", "keep", "offload" or "rerun"',
    "loss_tile_rows": '"auto", "never", or a positive int of rows',
    "codegen": '"inductor" or "eager"',
    "whole_graph": '"auto" or "never"',
    "strict": "True or False",
    "verify": "True or False",
    "debug": "True or False",
}


class Options(BaseModel):
    """Checked options. Build one with `parse_options`: its errors are written for users.

    Attributes:
        memory_budget: bytes (> 0), "auto", or a percentage of the compute tier such as "80%":
            `resolve_budget` makes bytes of it.
        home: "cpu", "disk" or "disk:DIR"; `home_kind` says which.
        disk_holds: what of the model data a disk home holds, the rest being in RAM: `disk_holds_everything` makes
            a choice of "auto".
        chunk_size: bytes (>= 4096) or "auto".
        activations: what becomes of the values that a forward saves for its backward. "auto": as many as the budget
            needs are offloaded or recomputed, whichever is quicker; none where all fit. "keep": they stay; "offload":
            all that can be go home in between; "rerun": all that can be are dropped, and made again by the backward.
        loss_tile_rows: of a cross entropy over more rows than that, logits and loss are computed in tiles of so many
            rows, and logits again in the backward. "auto": by the shape, where there are many logits (see
            `passes.rewrite.loss_tiles`); "never": all at once.
        codegen: how segments are compiled: "inductor", or "eager".
        whole_graph: "auto" compiles the graph whole where all fits; "never" always cuts it into segments.
        strict: refuse operators with unknown scratch memory, instead of guessing it.
        verify: check every plan with the independent verifier.
        debug: fill slots with NaN when they are taken and given back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    memory_budget: int | str = "auto"
    home: str = "cpu"
    disk_holds: Literal["auto", "states", "everything"] = "auto"
    chunk_size: int | Literal["auto"] = "auto"
    activations: Activations = "auto"
    loss_tile_rows: LossTileRows = "auto"
    codegen: Literal["inductor", "eager"] = "inductor"
    whole_graph: Literal["auto", "never"] = "auto"
    strict: bool = False
    verify: bool = True
    debug: bool = False

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _check_memory_budget(cls, value: object) -> int | str:
        if isinstance(value, str) and value == "auto":
            return "auto"
        if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
            if not 0 < Fraction(match[1]) <= 100:
                raise ValueError("a percentage is above 0% and at most 100%")
            return f"{match[1]}%"
        return _size_nbytes(value, at_least=1)

    @field_validator("chunk_size", mode="before")
    @classmethod
    def _check_chunk_size(cls, value: object) -> int | str:
        if isinstance(value, str) and value == "auto":
            return "auto"
        return _size_nbytes(value, at_least=MIN_CHUNK_NBYTES)

    @field_validator("home")
    @classmethod
    def _check_home(cls, value: str) -> str:
        kind, colon, directory = value.partition(":")
        is_plain = value in ("cpu", "disk")
        is_directory = kind == "disk" and bool(colon) and bool(directory.strip()) and "\0" not in directory
        if not (is_plain or is_directory):
            raise ValueError("not a home")
        return value

    @property
    def home_kind(self) -> Literal["cpu", "disk"]:
        """The kind of memory in which model data lives when it is not on the compute tier."""
        return "cpu" if self.home == "cpu" else "disk"

    @property
    def in_common(self) -> Options:
        """The options that ranks of one model must share: all but the directory of a disk home."""
        return self.model_copy(update={"home": self.home_kind})

    @property
    def over_ranks(self) -> Options:
        """The options as they apply to a model that ranks train together.

        So far, `activations="auto"` keeps all saved values. `loss_tile_rows="auto"` makes no tiles: ranks may have
        batches of other shapes, but run the same calls, so no shape decides about tiles.
        """
        chosen: dict[str, str] = {}
        if self.activations == "auto":
            chosen["activations"] = "keep"
        if self.loss_tile_rows == "auto":
            chosen["loss_tile_rows"] = "never"
        return self.model_copy(update=chosen)

    @property
    def can_skip_segmentation(self) -> bool:
        """Whether a graph may be compiled whole: it would save all that it has, and read that at once."""
        return self.whole_graph == "auto" and self.activations not in ("offload", "rerun")

    @property
    def may_leave(self) -> bool:
        """Whether values that forwards save may be offloaded or recomputed."""
        return self.activations != "keep"

    @property
    def may_repeat(self) -> bool:
        """Whether the backward may repeat parts of the forward."""
        return self.activations in ("rerun", "auto")

    def at_home(self, home: str, disk_holds: str, source: Mapping[str, object]) -> Options:
        """Take over the home in which the parameters live already, unless the user's options ask for another one.

        Raises:
            OptionsError: they do.
        """
        present = {"home": home, "disk_holds": disk_holds}
        for option, value in present.items():
            if option in source and source[option] != value:
                raise OptionsError(
                    f"{option} is {source[option]!r}, but the model's parameters already live where it is {value!r}; "
                    f"give init(), place() and torch.compile() the same {option}"
                )
        return self.model_copy(update=present)

    def disk_holds_everything(self, device: str) -> bool:
        """Whether a disk home holds parameters and gradients too, not only optimizer states.

        Args:
            device: the type of the device that computes. "auto" is everything on a CPU, where RAM is the compute tier,
                and states behind a GPU, which copies from pinned RAM at its link's full rate.
        """
        return self.disk_holds == "everything" or (self.disk_holds == "auto" and device == "cpu")

    def on_disk(self, device: str) -> DiskHolds:
        """Return the model data that has its home on a disk when a device of that type computes."""
        if self.home_kind == "cpu":
            return "nothing"
        return "everything" if self.disk_holds_everything(device) else "states"


def parse_options(options: dict[str, Any] | None, environment: Mapping[str, str] = _NO_VARIABLES) -> Options:
    """Check the `options` of `torch.compile`; None means all defaults.

    Args:
        environment: where `VARIABLES` are looked up, for options that are not given.

    Raises:
        OptionsError: one line that names each bad key or variable, the value given and what is allowed.
    """
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise OptionsError(f"options must be a dict, not {_show(options)}; its keys are {_allowed_keys()}")
    unknown = [key for key in options if key not in Options.model_fields]
    if unknown:
        raise OptionsError("; ".join(_unknown_key(key) for key in unknown))
    variables = {key: name for key, name in VARIABLES.items() if key not in options and environment.get(name)}
    settings = {key: _from_text(environment[name]) for key, name in variables.items()} | options
    try:
        return Options.model_validate(settings)
    except ValidationError as error:
        # A union reports one error per member: name each key once.
        keys = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
        names = {
            key: f"environment variable {variables[key]}" if key in variables else f"option {key!r}" for key in keys
        }
        lines = [f"{names[key]} is {_show(settings[key])}; allowed: {_ALLOWED[key]}" for key in keys]
    raise OptionsError("; ".join(lines))


def resolve_budget(memory_budget: int | str, total_nbytes: int, available_nbytes: int) -> int:
    """Return the budget in bytes.

    Args:
        memory_budget: as in `Options`: bytes, "auto" (90 % of what is available) or "80%" (of the total).
        total_nbytes: the compute tier's memory.
        available_nbytes: the part of it that is free now.
    Raises:
        OptionsError: the percentage of this machine's memory is less than one byte.
    """
    if isinstance(memory_budget, int):
        return memory_budget
    if memory_budget == "auto":
        nbytes = int(AUTO_BUDGET * available_nbytes)
    else:
        match = _PERCENT.fullmatch(memory_budget)
        assert match is not None, f"parse_options let {memory_budget!r} through"
        nbytes = int(Fraction(match[1]) / 100 * total_nbytes)
    if nbytes < 1:
        raise OptionsError(
            f"option 'memory_budget' is {memory_budget!r}, which leaves no memory: the compute tier has "
            f"{total_nbytes:,} bytes, {available_nbytes:,} of them available; "
            f"allowed: {_ALLOWED['memory_budget']}"
        )
    return nbytes


def parse_size(text: str, name: str) -> int:
    """Convert a size such as "6GiB" to bytes, for an option outside `Options`.

    Raises:
        OptionsError: `text` is no size.
    """
    try:
        return _size_nbytes(_from_text(text), at_least=1)
    except ValueError:
        raise OptionsError(f'{name} is {_show(text)}; allowed: bytes, or a size such as "6GiB" or "6GB"') from None


def _from_text(text: str) -> int | str:
    """Convert digits to a number, where a value can be given as text only; return other text as it is."""
    return int(text) if text.isascii() and text.isdigit() else text


def _size_nbytes(value: object, *, at_least: int) -> int:
    """Convert an int, or a string such as "1.5GiB", to bytes; a fraction of a byte is cut off."""
    if isinstance(value, str):
        value = parse_nbytes(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("not a whole number of bytes")
    if value < at_least:
        raise ValueError(f"less than {at_least} bytes")
    return int(value)


def _show(value: object) -> str:
    """Write a value on one short line, with its type unless it is a string."""
    text = short(value)
    return text if isinstance(value, str) else f"{text} ({type(value).__name__})"


def _allowed_keys() -> str:
    return ", ".join(repr(key) for key in Options.model_fields)


def _unknown_key(key: object) -> str:
    nearest = difflib.get_close_matches(key, Options.model_fields, n=1, cutoff=0.5) if isinstance(key, str) else []
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"unknown option {_show(key)}{hint}; allowed: {_allowed_keys()}"
