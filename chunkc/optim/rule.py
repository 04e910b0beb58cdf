"""What one optimizer of `chunkc.optim` has that another has not: its rule, and the rule's updates on one device.

Everything else is `chunked_optimizer`'s: parameter groups, states at home or beside a parameter, the step, its plan,
what updates run beside, `state_dict`. A new rule is a `Rule` and an `Updater` (`elementwise` has the one of all rules
that change each element by itself), kernels, and a class with a constructor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.plan import Tile
from chunkc.ir.states import MOMENTS, StateFormat
from chunkc.ir.text import short
from chunkc.kernels.formats import GradScale
from chunkc.kernels.hyperparameters import GRAD_DTYPES
from chunkc.optim.states import flats_of, place_in_group

MAXIMIZE = "maximize"
DIFFERENTIABLE = "differentiable"

WITHOUT_EFFECT = {
    "foreach": "an update is one fused pass whatever it says",
    "fused": "an update is one fused pass whatever it says",
    "capturable": "step() runs on the host, and no CUDA graph can capture it",
}
"""Arguments of `torch.optim` that groups have as there, and that change nothing; why."""

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups, as `torch.optim` has them."""

Spans = Sequence[tuple[int, int, Any]]
"""Elements `[begin, end)` of a group with their hyper-parameters, in order."""

OverRanks = Callable[[torch.Tensor, Sequence[int]], None]
"""Adds up numbers of tensors over the ranks, in place: on each the same bits. All that have parts of them come to it.

It takes a CPU tensor `[..., num_tensors]`, and the first element of each of these tensors, as the spans have it.
"""

TileUpdate = Callable[[Mapping[str, torch.Tensor], Tile], None]
"""The update of a tile of a chunk group, or of one stage of it, in place.

It takes the tile's elements as flat tensors, those of the kinds that the stage needs, by kind.
"""


@dataclass(frozen=True)
class Extent:
    """Which elements a flat tensor has.

    Attributes:
        chunk: the index of the chunk group; for a parameter that is in none, -1 less its number in the optimizer.
        first_element: of the group.
    """

    chunk: int
    first_element: int


@dataclass(frozen=True, eq=False)
class ResidentTensor:
    """A parameter to be updated where it is, with its hyper-parameters, its states by kind, and its number."""

    parameter: torch.Tensor
    hyper: Any
    states: Mapping[str, torch.Tensor]
    number: int

    @property
    def extent(self) -> Extent:
        return Extent(*(place_in_group(self.parameter) or (-1 - self.number, 0)))

    def flats(self) -> dict[str, torch.Tensor]:
        """All that the update needs, as flat tensors; afterwards `put_back` the parameter's."""
        return flats_of(self.parameter, self.states)


@dataclass(frozen=True)
class GroupWork:
    """What a step is to update of a chunk group.

    Attributes:
        index: the group's.
        tiles: ranges of the group's elements that are updated at one time.
        scale: of the gradients.
        sums: where other ranks have parts of the group's tensors: adds up what is to be of the whole ones.
    """

    index: int
    spans: Spans
    tiles: Sequence[tuple[int, int]]
    scale: GradScale
    sums: OverRanks | None = None


class Updater(ABC):
    """A rule's updates on one device, and what is kept there from step to step."""

    def begin_step(self) -> None:
        """Forget the former step's hyper-parameters."""
        return

    @abstractmethod
    def of_group(self, work: GroupWork) -> TileUpdate:
        """The update of a chunk group, tile by tile."""

    @abstractmethod
    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        """Update parameters that do not move. Each is made ready when the iterable comes to it."""

    @abstractmethod
    def compile_ahead(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale) -> None:
        """Compile whatever an update of a group on the CPU may run: for these flat tensors by kind."""


class Rule(ABC):
    """How elements change. A frozen record: it has no parameters and no tensors.

    Attributes:
        num_stages: of an update (see `chunkc.ir.updates`). Of two, the first takes norms of whole tensors, and the
            spans of a group are its tensors.
        moments: all kinds of states that there may be besides masters and the moments' scales.
        optional: hyper-parameters that a saved parameter group may lack, which then has this optimizer's own.
    """

    num_stages: ClassVar[int] = 1
    moments: ClassVar[tuple[str, ...]] = MOMENTS
    optional: ClassVar[tuple[str, ...]] = (MAXIMIZE,)

    @abstractmethod
    def states(self, groups: Groups) -> StateFormat:
        """In what form states are kept of parameters in these groups."""

    def idle(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Kinds of states that parameters of a group need not have, though others' have them."""
        return ()

    def loaded(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """A saved state, which may be `torch.optim`'s, of a parameter of a saved group, as this rule keeps it.

        Raises:
            OptionsError: something is missing.
        """
        idle = self.idle(group)
        missing = [kind for kind in ("step", *self.moments) if kind not in state and kind not in idle]
        if missing:
            raise OptionsError(f"it lacks {', '.join(missing)}")
        return dict(state)

    @abstractmethod
    def hyper(self, group: Mapping[str, Any], step: int) -> Any:
        """The hyper-parameters of one update, hashable.

        Raises:
            ValueError: one is out of range, or no number.
        """

    @abstractmethod
    def updater(self, device: torch.device, *, by_triton: bool) -> Updater:
        """The updates on a device, with nothing kept yet."""

    @property
    def must_know_steps(self) -> bool:
        """Whether the host needs the number of a step before its update, as random bits do that depend on it."""
        return False

    def check_dtype(self, dtype: torch.dtype, title: str) -> None:
        """Refuse parameters that have no kernel.

        Args:
            title: the optimizer's, for people.

        Raises:
            OptionsError, UnsupportedError: there is none with these options, or none at all.
        """
        if dtype not in GRAD_DTYPES:
            raise UnsupportedError(f"{title} updates fp32, bf16 and fp16, not {dtype}")

    def gradient_apart(self, gradient: torch.Tensor, hyper: Any) -> torch.Tensor:
        """What the rule reads of a gradient that is the parameter's own memory, of which this is a copy."""
        return gradient


def adam_hyper(group: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What the hyper-parameters of Adam and of LAMB have in common, by name."""
    beta1, beta2 = pair(group, "betas")
    found = {name: number(group, name) for name in ("lr", "eps", "weight_decay")}
    return found | {"beta1": beta1, "beta2": beta2, "step": step, "maximize": flag(group, "maximize")}


def number(group: Mapping[str, Any], name: str) -> float:
    """A number of a parameter group: a real number, or a tensor of one element with a real dtype.

    Raises:
        OptionsError: the group has none of that name, or something else.
    """
    if name not in group:
        raise OptionsError(f"a parameter group lacks {name}")
    return plain(group[name], name)


def pair(group: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Two numbers of a parameter group.

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
    """A flag of a parameter group; False where the group has none of that name.

    Raises:
        OptionsError: it is not a bool.
    """
    value = group.get(name, False)
    if not isinstance(value, bool):
        raise OptionsError(f"{name} is {shown(value)}; allowed: True or False")
    return value


def plain(value: object, name: str) -> float:
    """A real number, or a tensor of one, as a float.

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
    """A value on one short line, with its type."""
    return f"{short(value)} ({type(value).__name__})"
