"""Clip and unscale gradients without traffic: they are multiplied inside the update.

The norm of all gradients comes from sums that the backward took in slots (see `norms`), and so does whether one
overflowed. `.grad` keeps what the backward computed. A clipping factor holds for the gradients it was computed from: if
they are changed afterwards, by a backward, by hand or otherwise, the step raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from chunkc.ir.errors import UnsupportedError
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.kernels.fused_pass import host_tensor
from chunkc.optim.grad_scale import AssumedScale, inverted
from chunkc.optim.memory_checks import check_memory
from chunkc.optim.norms import Gradients, sum_of_squares, summing_on
from chunkc.optim.update_mode import UpdateMode
from chunkc.runtime.store.consumed_gradients import GradientPlaceholder
from chunkc.runtime.store.gradient_sums import clock, request_sums
from chunkc.runtime.store.shards import local_shard_of, local_shards_in
from chunkc.session.session import Session, managing, sessions_of
from chunkc.torch_private.grad_scaler import OverflowsElsewhere

EPS = 1e-6
"""The number added to a norm before it divides, as in PyTorch."""

SAME, CHANGED, REPLACED = "same", "changed", "replaced"
"""States of a gradient since it was clipped: unchanged; with other values; another tensor."""


@dataclass(frozen=True)
class _ClippedGradient:
    """A gradient, and how often it had been written when it was clipped: by its version counter, and by backwards into
    its home."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    num_written: int

    @staticmethod
    def of(parameter: torch.Tensor, gradient: torch.Tensor) -> _ClippedGradient:
        return _ClippedGradient(weakref.ref(gradient), gradient._version, _num_written(parameter))

    def status(self, parameter: torch.Tensor, gradient: torch.Tensor) -> str:
        if self.gradient() is not gradient:
            return REPLACED
        return SAME if (self.version, self.num_written) == (gradient._version, _num_written(parameter)) else CHANGED


def _num_written(parameter: torch.Tensor) -> int:
    """Return how often gradients of the parameter's group were written home."""
    home = managing(parameter)
    return 0 if home is None else home[0].store.sums.written[home[0].store.views.group_index(home[1])]


@dataclass
class _Clipped:
    """A clipping factor, and the gradients that it is for, by the id of their parameter.

    Attributes:
        norm: the norm of the gradients, before they are clipped.
        factor: 0-dim fp32.
        stepped: whether a step has multiplied the gradients.
    """

    norm: torch.Tensor
    factor: torch.Tensor
    gradients: dict[int, _ClippedGradient]
    stepped: bool = False

    def statuses(self, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> set[str]:
        """Return the statuses of gradients, which are given with their parameters."""
        clipped = [(self.gradients.get(id(parameter)), parameter, gradient) for parameter, gradient in gradients]
        return {REPLACED if c is None else c.status(parameter, gradient) for c, parameter, gradient in clipped}


class ClipsGradients(Optimizer):
    """An optimizer that multiplies gradients inside its updates, by the factor of `clip_grad_norm_`.

    Attributes:
        assumed_scale: the scale of gradients with which updates in a backward begin that can be undone.
        grad_scale, found_inf: set by a `GradScaler`: the divisor of gradients; no step is made if not 0.
    """

    overlap: UpdateMode
    assumed_scale: AssumedScale
    grad_scale: torch.Tensor | None  # without a value but in a scaler's step, which multiplies a value that it finds
    found_inf: torch.Tensor | None
    _clipped: _Clipped | None = None
    _groups_read_at: int = 0
    _norm_requested: bool = False

    @property
    def param_groups(self) -> Any:
        """The parameter groups, as in `torch.optim`.

        Code that reads them may change gradients without a count, as `torch.amp.GradScaler.unscale_` does. So sums of
        gradients that were taken before are not used any more.
        """
        if (
            "param_groups" not in self.__dict__
        ):  # a wrapper, as Lightning's, which then asks the optimizer that it wraps
            raise AttributeError("param_groups")
        self._groups_read_at = next(clock)
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    @torch.compiler.disable
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False, loss_scale: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Clip all gradients of this optimizer as `torch.nn.utils.clip_grad_norm_` does, but in the next `step()`.

        Nothing is copied for it if gradients are as the backward left them. `.grad` stays as it is.

        Args:
            error_if_nonfinite: raise an error if the norm is not finite; waits for the device.
            loss_scale: the factor of the loss, by which `GradScaler.step` will divide gradients.

        Returns:
            The norm of all gradients, divided by the loss scale: 0-dim fp32.

        Raises:
            RuntimeError: see `error_if_nonfinite`.
            UnsupportedError: gradients have been added to some that were clipped, or updates begin in the backward.
        """
        gradients = self._gradients()
        before = self._clipped if self._is_clipped(gradients) else None
        if before is None:
            unclipped = self.grad_norm() if loss_scale is None else self.grad_norm() / loss_scale
            norm = unclipped
        else:
            unclipped, norm = before.norm, before.norm * before.factor
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                "The total norm of order 2 for gradients from `parameters` is non-finite, so it cannot be clipped: "
                "set error_if_nonfinite=False to clip by it all the same"
            )
        factor = torch.clamp(max_norm / (norm + EPS), max=1.0).float()
        if before is not None:
            factor = factor * before.factor
        unclipped, factor, result = _kept(unclipped), _kept(factor), _kept(norm.float())
        for session in sessions_of(self._all_parameters()):
            session.live.watch(value for value in (unclipped, factor, result) if value.device.type != "cpu")
        self._clipped = _Clipped(unclipped, factor, {id(p): _ClippedGradient.of(p, g) for p, g in gradients})
        return result

    def scale_of_step(self) -> GradScale:
        """Return the scale of this step's gradients, as kernels take it: a scaler's, and the clipping factor.

        Raises:
            UnsupportedError: some gradients are not those that were clipped.
        """
        clip, scale, found_inf = self.clip_factor(), getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None and clip is None:
            return NO_SCALE
        unscale = None if scale is None else inverted(scale)
        return GradScale(unscale, clip, None if found_inf is None else found_inf.detach().float().reshape(()))

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all gradients as they are: 0-dim fp64, finite if and only if each element is.

        From the next backward on, sums of squares are taken while gradients are in slots, for as long as each step
        is preceded by a call of this method, directly or by another one.

        Raises:
            UnsupportedError: gradients cannot be read, or were consumed by updates.
        """
        if self.overlap.is_final:
            raise UnsupportedError(
                f'overlap="{self.overlap.mode}" updates during the backward, before the norm of all gradients is '
                'known; use undoable=True with it, or overlap="forward" or "none"'
            )
        gradients = self._gradients()
        self._norm_requested = True
        for session in sessions_of(self._all_parameters()):
            request_sums(self, [session.store.sums], summing_on(session.device))
        return sum_of_squares(Gradients(gradients, self._groups_read_at)).sqrt()

    @torch.no_grad()
    def overflows(self) -> torch.Tensor:
        """Return whether an element of a gradient is not finite: 0-dim fp32, 1 or 0.

        Raises:
            UnsupportedError: as `clip_grad_norm_`.
        """
        clipped = self._clipped
        norm = clipped.norm if clipped is not None and self._is_clipped(self._gradients()) else self.grad_norm()
        return (~torch.isfinite(norm)).float()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clipped = None
        super().zero_grad(set_to_none)

    def has_all_gradients_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether those of the parameters that have a gradient are this optimizer's."""
        own = set(map(id, self._all_parameters()))
        return all(id(local_shard_of(parameter)) in own for parameter in parameters if parameter.grad is not None)

    def clip_factor(self) -> torch.Tensor | None:
        """Return the factor of the gradients of this step: 0-dim fp32; None: they are not clipped.

        Raises:
            UnsupportedError: some gradients are not those that were clipped.
        """
        clipped, gradients = self._clipped, self._gradients(read=False)
        if clipped is None or not gradients or not self._is_clipped(gradients):
            if clipped is not None and gradients and not clipped.stepped:
                raise UnsupportedError(
                    "the gradients are not those that clip_grad_norm_ has clipped: call optimizer.zero_grad() where "
                    "gradients are dropped, and clip_grad_norm_ after the last backward of each step"
                )
            return None
        clipped.stepped = True
        is_one = clipped.factor.device.type == "cpu" and float(clipped.factor) == 1.0
        return None if is_one else clipped.factor

    def end_of_step(self, sessions: list[Session]) -> None:
        """Stop taking sums if no norm was requested since the step before."""
        if not self._norm_requested:
            for session in sessions:
                session.store.sums.requesters.pop(self, None)
        self._norm_requested = False

    def _is_clipped(self, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether these gradients are those that were clipped last.

        Raises:
            UnsupportedError: only some are, or some have been changed since.
        """
        statuses = set() if self._clipped is None else self._clipped.statuses(gradients)
        if CHANGED in statuses or len(statuses) > 1:
            raise UnsupportedError(
                "gradients were changed, or added to, after clip_grad_norm_ of their optimizer, which multiplies them "
                "in step() only: clip after the last change, call zero_grad() after each step, or use "
                "torch.nn.utils.clip_grad_norm_, which multiplies at once"
            )
        return statuses == {SAME}

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        return local_shards_in(self.__dict__["param_groups"])  # does not count as reading them, see `param_groups`

    def _gradients(self, *, read: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters that have a gradient, with it.

        Raises:
            UnsupportedError: a gradient is sparse, or cannot be `read`.
        """
        gradients = []
        for parameter in self._all_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if read and isinstance(gradient, GradientPlaceholder):
                raise gradient.refusal()
            check_memory(self, parameter, gradient)
            gradients.append((parameter, gradient))
        return gradients


def _kept(value: torch.Tensor) -> torch.Tensor:
    """Copy a CPU number that outlives this call out of torch's memory, which may be planned to the byte."""
    return host_tensor(value.numpy(), value.numpy().dtype) if value.device.type == "cpu" else value


class GradScaler(OverflowsElsewhere):
    """`torch.amp.GradScaler`, with the same arguments, for the usual loop:

        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)  # in place of unscale_ and torch's function; or left out
        scaler.step(optimizer)
        scaler.update()

    PyTorch's own scaler reads and writes every gradient to see whether one overflows, over the link if they are at
    home. This one does so only in `unscale_`, and for optimizers that are not of `chunkc.optim`.
    """

    @staticmethod
    def like(scaler: Any, device: str) -> Any:
        """Return a copy of PyTorch's own scaler; one of another type, or a disabled one, as it is."""
        if type(scaler) is not torch.amp.GradScaler or not scaler.is_enabled():
            return scaler
        copy = GradScaler(device)
        copy.load_state_dict(scaler.state_dict())
        return copy

    _stepped: weakref.WeakSet[ClipsGradients]

    def found_inf_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        if not isinstance(optimizer, ClipsGradients) or optimizer.overlap.is_final:
            return None
        self.__dict__.setdefault("_stepped", weakref.WeakSet()).add(optimizer)
        return optimizer.overflows()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale, as PyTorch's does, and announce it to optimizers that can undo updates, which waits for the
        device."""
        super().update(new_scale)
        for optimizer in self.__dict__.get("_stepped", ()):
            if optimizer.overlap.undoable:
                optimizer.assumed_scale.expect(inverted(torch.tensor(self.get_scale(), device="cpu")))

    def clip_grad_norm_(self, optimizer: Any, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clip gradients that the step will unscale: see `clip_grad_norm_` of chunkc's optimizers.

        Returns:
            The norm of all gradients, divided by the loss's scale.

        Raises:
            RuntimeError, UnsupportedError: as there.
        """
        return optimizer.clip_grad_norm_(
            max_norm, error_if_nonfinite=error_if_nonfinite, loss_scale=self.scale_now(optimizer)
        )
