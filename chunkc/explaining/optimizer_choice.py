"""Describe the optimizer of a training that is only explained, by its constructor's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature

import torch
from torch import nn

from chunkc.explaining.updates import Updates
from chunkc.ir.errors import OptionsError
from chunkc.optim.adam import Adam, AdamW
from chunkc.optim.lamb import LAMB
from chunkc.optim.lion import Lion
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.optim.sgd import SGD
from chunkc.optim.update_mode import AUTO, DEVICE, UpdateMode
from chunkc.session.declared_states import Declared, declared, stages_of_updates

OPTIMIZERS: Mapping[str, type[ChunkedOptimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "lamb": LAMB,
    "lion": Lion,
    "sgd": SGD,
}


@dataclass(frozen=True)
class OptimizerChoice:
    """A user's choice of an optimizer.

    If all attributes but `update_on` and `overlap` are defaults, the model's own optimizer is taken if it has one, else
    `AdamW`.

    Attributes:
        optimizer: of `OPTIMIZERS`; None: `AdamW`, if any other argument is given.
        update_on, overlap, moments_dtype, master_weights, stochastic_rounding, momentum, undoable: of its constructor.
            None: its default.
    """

    update_on: str = DEVICE
    overlap: str = AUTO
    optimizer: str | None = None
    moments_dtype: torch.dtype | str | None = None
    master_weights: bool | str | None = None
    stochastic_rounding: bool = False
    momentum: float | None = None
    undoable: bool = False

    @property
    def _mode(self) -> UpdateMode:
        return UpdateMode(self.overlap, self.update_on, self.undoable)

    @property
    def _arguments(self) -> dict[str, torch.dtype | str | float]:
        """Given arguments that not every optimizer has."""
        optional = {
            "moments_dtype": self.moments_dtype,
            "master_weights": self.master_weights,
            "stochastic_rounding": self.stochastic_rounding or None,
            "momentum": self.momentum,
            "undoable": self.undoable or None,
        }
        return {name: value for name, value in optional.items() if value is not None}

    def of(self, model: nn.Module) -> Updates:
        """Return the updates of the optimizer for a model.

        Raises:
            OptionsError, UnsupportedError: as the constructor raises them for these parameters.
        """
        if self.optimizer not in (None, *OPTIMIZERS):
            raise OptionsError(f"optimizer is {self.optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")
        kind = OPTIMIZERS[self.optimizer or "adamw"]
        for name in self._arguments:
            having = [other.__name__ for other in OPTIMIZERS.values() if name in signature(other).parameters]
            if kind.__name__ not in having:
                others = f"{', '.join(having[:-1])} and {having[-1]} have" if having[1:] else f"{having[0]} has"
                raise OptionsError(f"{kind.__name__} has no {name}; {others}")
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        trained = list(named.values())
        if self.optimizer is None and self._arguments.keys() <= {"undoable"}:
            self._make(kind, {torch.float32: "in float32"})
            own = [declaration for parameter in trained if (declaration := declared(parameter)) is not None]
            return Updates(self._mode, "the model's optimizer" if own else kind.__name__, stages_of_updates(trained))
        first = {parameter.dtype: name for name, parameter in reversed(named.items())}
        by_dtype = self._make(kind, first or {torch.float32: "in float32"})
        num_stages = max(declaration.num_stages for declaration in by_dtype.values())
        return Updates(self._mode, kind.__name__, num_stages, {dtype: own.states for dtype, own in by_dtype.items()})

    def _make(self, kind: type[ChunkedOptimizer], names: Mapping[torch.dtype, str]) -> dict[torch.dtype, Declared]:
        """Make such an optimizer for an empty parameter of each dtype, and return its declarations.

        `names`: dtype -> the parameter's name in errors.
        """
        dtypes = sorted(names, key=str)
        empty = [nn.Parameter(torch.empty(0, dtype=dtype, device="cpu")) for dtype in dtypes]
        given = [(names[dtype], parameter) for dtype, parameter in zip(dtypes, empty)]
        kind(given, update_on=self.update_on, overlap=self.overlap, **self._arguments)  # type: ignore[arg-type]
        declarations = {parameter.dtype: declared(parameter) for parameter in empty}
        return {dtype: declaration for dtype, declaration in declarations.items() if declaration is not None}


ADAMW = OptimizerChoice()
