"""Make the optimizer of a configuration's `optimizer` section, with DeepSpeed's defaults.

Types and parameters mean the same as in DeepSpeed 0.19: see `DeepSpeedEngine._configure_basic_optimizer`, `FusedAdam`,
`FusedLamb` and `FusedLion`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, StrictBool
from torch.optim import Optimizer

from chunkc import optim
from chunkc.engine.keys import AUTO, unknown_key
from chunkc.engine.sections import Section, checked, left_open
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.text import short
from chunkc.session.logs import logger

PATH = "optimizer.params"

_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Params(Section):
    lr: float = Field(1e-3, ge=0)
    weight_decay: float | None = Field(None, ge=0)
    maximize: StrictBool = False
    update_on: Literal["device", "cpu", "auto"] | None = None
    overlap: Literal["auto", "none", "forward", "backward", "both"] = "auto"

    def check(self) -> None:
        """Raise UnsupportedError for a parameter that asks for a feature chunkc's optimizer does not have."""


class _Formats(_Params):
    undoable: StrictBool = False
    moments_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    master_weights: StrictBool | Literal["split", "float32"] | None = None
    stochastic_rounding: StrictBool = False
    rounding_seed: int = 0


class _Adam(_Formats):
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, ge=0)
    bias_correction: StrictBool = True
    amsgrad: StrictBool = False
    adam_w_mode: StrictBool | None = None
    torch_adam: StrictBool = False
    use_hybrid_adam: StrictBool | None = None
    set_grad_none: StrictBool = True
    fp32_optimizer_states: StrictBool = True
    foreach: StrictBool | None = None
    fused: StrictBool | None = None

    def check(self) -> None:
        _refuse(not self.bias_correction, "bias_correction", False, "moments are corrected; remove it")
        _refuse(not self.fp32_optimizer_states, "fp32_optimizer_states", False, 'use "moments_dtype": "bfloat16"')


class _Lamb(_Params):
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, ge=0)
    bias_correction: StrictBool = True
    eps_inside_sqrt: StrictBool = False
    max_coeff: float = Field(10.0, ge=0)
    min_coeff: float = Field(0.01, ge=0)
    amsgrad: StrictBool = False

    def check(self) -> None:
        _refuse(not self.bias_correction, "bias_correction", False, "moments are corrected; remove it")
        _refuse(self.eps_inside_sqrt, "eps_inside_sqrt", True, "remove it")
        _refuse(self.amsgrad, "amsgrad", True, "remove it")


class _Lion(_Formats):
    betas: tuple[_Beta, _Beta] = (0.9, 0.99)
    set_grad_none: StrictBool = True
    foreach: StrictBool | None = None
    fused: StrictBool | None = None


class _Sgd(_Formats):
    momentum: float = Field(0.0, ge=0)
    dampening: float = 0.0
    nesterov: StrictBool = False
    foreach: StrictBool | None = None
    fused: StrictBool | None = None


def _refuse(is_asked: bool, name: str, value: object, instead: str) -> None:
    if is_asked:
        raise UnsupportedError(f"{PATH}.{name} is {short(value)}, which chunkc does not do: {instead}")


_OWN: Mapping[str, type[_Params]] = {"adam": _Adam, "adamw": _Adam, "lamb": _Lamb, "lion": _Lion, "sgd": _Sgd}
"""DeepSpeed's types with an optimizer in `chunkc.optim`, in lower case -> their parameters."""


def make_optimizer(
    kind: str, params: Mapping[str, Any], parameters: Iterable[Any], *, update_on: str, is_patrickstars: bool = False
) -> Optimizer:
    """Make an optimizer of a type.

    Args:
        kind: `"Adam"`, `"AdamW"`, `"Lamb"`, `"Lion"`, `"SGD"`, in upper or lower case, or the name of a class of
            `torch.optim`.
        params: the section's parameters: DeepSpeed's, PatrickStar's, or arguments of the class in `chunkc.optim`.
        parameters: parameters of the model, or groups of them.
        update_on: device of updates, "cpu" or "device", if `params` does not set it.
        is_patrickstars: whether the configuration was written for PatrickStar; then warn where Adam's weight decay
            differs: PatrickStar's is not decoupled.

    Raises:
        OptionsError: there is no such type, or a parameter is unknown or invalid.
        UnsupportedError: a parameter asks for a feature that chunkc's optimizer does not have.
    """
    if "max_grad_norm" in params:
        raise OptionsError(
            f"{PATH}.max_grad_norm: chunkc's optimizers do not clip; set the top-level key gradient_clipping"
        )
    name = kind.lower()
    if name not in _OWN:
        return _of_torch(kind, params, parameters)
    found = checked(_OWN[name], params, PATH)
    found.check()
    common: dict[str, Any] = {"lr": found.lr, "maximize": found.maximize, "overlap": found.overlap}
    common["update_on"] = found.update_on or update_on
    decay = found.weight_decay
    if isinstance(found, _Formats):
        formats = {"moments_dtype", "master_weights", "stochastic_rounding", "rounding_seed"}
        common |= found.model_dump(include={"undoable", *formats})
    if isinstance(found, _Adam):
        decoupled = name == "adamw" or (True if found.adam_w_mode is None else found.adam_w_mode)
        if is_patrickstars and name == "adam" and found.adam_w_mode is None and decay:
            logger.warning(
                "%s.adam_w_mode: Adam decouples its weight decay, as in DeepSpeed; PatrickStar's does not: write false "
                "for that",
                PATH,
            )
        if found.use_hybrid_adam is False and found.update_on is None:
            common["update_on"] = "cpu"
        if decay is None:
            decay = 1e-2 if found.torch_adam and decoupled else 0.0
        chosen = optim.AdamW if decoupled else optim.Adam
        return chosen(parameters, betas=found.betas, eps=found.eps, weight_decay=decay, amsgrad=found.amsgrad, **common)
    if isinstance(found, _Lamb):
        common |= found.model_dump(include={"betas", "eps", "min_coeff", "max_coeff"})
        return optim.LAMB(parameters, weight_decay=decay or 0.0, always_adapt=True, **common)
    if isinstance(found, _Lion):
        return optim.Lion(parameters, betas=found.betas, weight_decay=decay or 0.0, **common)
    assert isinstance(found, _Sgd)
    return optim.SGD(
        parameters,
        momentum=found.momentum,
        dampening=found.dampening,
        nesterov=found.nesterov,
        weight_decay=decay or 0.0,
        **common,
    )


def _of_torch(kind: str, params: Mapping[str, Any], parameters: Iterable[Any]) -> Optimizer:
    """Make an optimizer of `torch.optim`, as DeepSpeed does with types that it has no code for."""
    chosen: Callable[..., Optimizer] | None = getattr(torch.optim, kind, None)
    if not (inspect.isclass(chosen) and issubclass(chosen, Optimizer)) or chosen is Optimizer:
        raise OptionsError(
            f"optimizer.type is {short(kind)}; allowed: Adam, AdamW, Lamb, Lion, SGD, or the name of a class of "
            "torch.optim"
        )
    known = list(inspect.signature(chosen).parameters)
    for name, value in params.items():
        if name not in known:
            raise OptionsError(unknown_key(f"{PATH}.{name}", [f"{PATH}.{other}" for other in known]))
        if value == AUTO:
            raise OptionsError(left_open(f"{PATH}.{name}"))
    try:
        return chosen(parameters, **params)
    except (TypeError, ValueError) as error:
        raise OptionsError(f"{PATH}: {error}") from error
