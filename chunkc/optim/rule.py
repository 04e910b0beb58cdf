"""Define what differs between optimizers: the rule, its hyperparameters, and the rule's updates on one device.

Everything else is in `stepping` and `optimizer`: parameter groups, states, the step, its schedule, `state_dict`.
A new rule is a `Rule` and an `Updater`, kernels, and a class with a constructor. One that changes each element by
itself has only its arithmetic, for which `elementwise` has the updater: see `lion`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.ir.states import MOMENTS, StateFormat
from chunkc.ir.text import short
from chunkc.kernels.formats import GradScale
from chunkc.kernels.hyperparameters import GRAD_DTYPES
from chunkc.optim.states import flat, flat_like, place_in_group, real_parts

MAXIMIZE = "maximize"
DIFFERENTIABLE = "differentiable"

WITHOUT_EFFECT = {
    "foreach": "an update is one fused pass whatever it says",
    "fused": "an update is one fused pass whatever it says",
    "capturable": "step() runs on the host, and no CUDA graph can capture it",
}
"""Arguments of `torch.optim` that groups have as there, but that change nothing -> why."""

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups, as `torch.optim` has them."""

Spans = Sequence[tuple[int, int, Any]]
"""Elements `[begin, end)` of a group with their hyperparameters, in order."""

OverRanks = Callable[[torch.Tensor, Sequence[int]], None]
"""A sum of tensors' numbers over the ranks, in place, with the same bits on each. All ranks with shards of them call
it.

It takes a CPU tensor `[..., num_tensors]`, and the first element of each of these tensors, as the spans have it.
"""

TileUpdate = Callable[[Mapping[str, torch.Tensor], Tile], None]
"""The update of a tile of a chunk group, or of one stage of it, in place.

It takes the tile's elements as flat tensors, those of the kinds that the stage needs, by kind.
"""


@dataclass(frozen=True)
class Extent:
    """The elements of a chunk group that a flat tensor has.

    Attributes:
        chunk: the index of the chunk group; for a parameter that is in none, -1 less its number in the optimizer.
        first_element: of the group.
    """

    chunk: int
    first_element: int


@dataclass(frozen=True, eq=False)
class ResidentTensor:
    """A parameter to update in place, with its hyperparameters, its states by kind, and its index in the optimizer."""

    parameter: torch.Tensor
    hyper: Any
    states: Mapping[str, torch.Tensor]
    number: int

    @property
    def extent(self) -> Extent:
        return Extent(*(place_in_group(self.parameter) or (-1 - self.number, 0)))

    def flats(self) -> dict[str, torch.Tensor]:
        """Return all that the update needs, as flat real tensors; `put_back` the parameter's afterwards."""
        parameter, gradient = self.parameter, self.parameter.grad
        assert gradient is not None
        flats = {PARAM: flat_like(parameter, parameter), GRAD: flat_like(gradient, parameter)}
        flats |= {kind: flat(state) for kind, state in self.states.items()}
        return {kind: real_parts(tensor) for kind, tensor in flats.items()}


@dataclass(frozen=True)
class GroupWork:
    """The elements of a chunk group that a step updates.

    Attributes:
        index: the group's index.
        tiles: ranges of the group's elements that are updated at one time.
        scale: the scale of the gradients.
        sums: where other ranks have shards of the group's tensors: the sum over ranks of what the rule needs of whole
            tensors.
    """

    index: int
    spans: Spans
    tiles: Sequence[tuple[int, int]]
    scale: GradScale
    sums: OverRanks | None = None


class Updater(ABC):
    """A rule's updates on one device, and what is kept there from step to step."""

    def begin_step(self) -> None:
        """Forget the former step's hyperparameters."""
        return

    @abstractmethod
    def of_group(self, work: GroupWork) -> TileUpdate:
        """Return the update of a chunk group, tile by tile."""

    @abstractmethod
    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        """Update parameters that do not move. The iterable prepares each one when it yields it."""

    @abstractmethod
    def compile_ahead(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale) -> None:
        """Compile all code that an update of a group on the CPU may run, for these flat tensors by kind."""


class Rule(ABC):
    """The arithmetic of an update. A frozen record: it has no parameters and no tensors.

    Attributes:
        num_stages: number of stages of an update (see `chunkc.ir.updates`). Of two, the first takes norms of whole
            tensors, and the spans of a group are its tensors.
        moments: all kinds of states that may exist besides masters and the moments' scales.
        optional: hyperparameters that a saved parameter group may lack; it then has this optimizer's own.
    """

    num_stages: ClassVar[int] = 1
    moments: ClassVar[tuple[str, ...]] = MOMENTS
    optional: ClassVar[tuple[str, ...]] = (MAXIMIZE,)

    @abstractmethod
    def states(self, groups: Groups) -> StateFormat:
        """Return the format in which states of parameters in these groups are kept."""

    def idle(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the kinds of states that parameters of a group need not have, though those of other groups do."""
        return ()

    def loaded(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a saved state, possibly `torch.optim`'s, of a parameter of a saved group to what this rule keeps.

        Raises:
            OptionsError: a kind is missing.
        """
        idle = self.idle(group)
        missing = [kind for kind in ("step", *self.moments) if kind not in state and kind not in idle]
        if missing:
            raise OptionsError(f"it lacks {', '.join(missing)}")
        return dict(state)

    @abstractmethod
    def hyper(self, group: Mapping[str, Any], step: int) -> Any:
        """Return the hyperparameters of one update, hashable.

        Raises:
            ValueError: one is out of range, or no number.
        """

    @abstractmethod
    def updater(self, device: torch.device, *, by_triton: bool) -> Updater:
        """Return new updates on a device."""

    @property
    def must_know_steps(self) -> bool:
        """Whether the host needs the number of a step before its update, as random bits do that depend on it."""
        return False

    def check_dtype(self, dtype: torch.dtype, title: str) -> None:
        """Refuse parameters that have no kernel.

        Args:
            title: the optimizer's name, for the message.

        Raises:
            OptionsError, UnsupportedError: no kernel takes the dtype with these options, or with any.
        """
        if dtype not in GRAD_DTYPES:
            raise UnsupportedError(f"{title} updates fp32, bf16 and fp16, not {dtype}")

    def gradient_apart(self, gradient: torch.Tensor, hyper: Any) -> torch.Tensor:
        """Return what the rule reads of a gradient that is the parameter's own memory; `gradient` is a copy."""
        return gradient


def adam_hyper(group: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Read the hyperparameters that Adam and LAMB have in common, by name."""
    beta1, beta2 = pair(group, "betas")
    numbers = {name: number(group, name) for name in ("lr", "eps", "weight_decay")}
    return numbers | {"beta1": beta1, "beta2": beta2, "step": step, "maximize": flag(group, "maximize")}


def number(group: Mapping[str, Any], name: str) -> float:
    """Read a number of a parameter group: a real number, or a tensor of one element with a real dtype.

    Raises:
        OptionsError: the group has none of that name, or something else.
    """
    if name not in group:
        raise OptionsError(f"a parameter group lacks {name}")
    return plain(group[name], name)


def pair(group: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Read two numbers of a parameter group.

    Raises:
        OptionsError: the group has none of that name, or something else.
    """
    if name not in group:
        raise OptionsError(f"a parameter group lacks {name}")
    value = group[name]
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OptionsError(f"{name} is {shown(value)}; allowed: two numbers")
    return plain(value[0], f"{name}[0]"), plain(value[1], f"{name}[1]")


def flag(group: Mapping[str, Any], name: str) -> bool:
    """Read a flag of a parameter group; False if the group has none of that name.

    Raises:
        OptionsError: it is not a bool.
    """
    value = group.get(name, False)
    if not isinstance(value, bool):
        raise OptionsError(f"{name} is {shown(value)}; allowed: True or False")
    return value


def plain(value: object, name: str) -> float:
    """Convert a real number, or a tensor of one, to a float.

    Raises:
        OptionsError: it is something else.
    """
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.device.type != "meta"
        is_number = is_number and value.dtype != torch.bool and not value.dtype.is_complex
    else:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise OptionsError(f"{name} is {shown(value)}; allowed: a number, or a tensor of one")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise OptionsError(f"{name} is {shown(value)}; allowed: a number that a float can have") from None


def shown(value: object) -> str:
    """Format a value on one short line, with its type."""
    return f"{short(value)} ({type(value).__name__})"
