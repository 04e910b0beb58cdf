"""Clipping by the norm of all gradients, at no traffic: the norm comes from sums that the backward took in slots (see
`norms`), and gradients are multiplied inside the update.

So `.grad` keeps what the backward computed. A factor holds for the gradients that it was made of, as they were: whoever
changes them after that, by a backward, by hand or otherwise, is told at the step.
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
from chunkc.optim import pending_steps as pending_steps
from chunkc.optim.memory_checks import check_memory
from chunkc.optim.norms import Gradients, sum_of_squares, summing_on
from chunkc.optim.update_mode import UpdateMode
from chunkc.runtime.store.consumed_gradients import GradientPlaceholder
from chunkc.runtime.store.gradient_sums import clock, request_sums
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.session import Session, managing, sessions_of
from chunkc.torch_private.grad_scaler import OverflowsElsewhere

EPS = 1e-6
"""What is added to a norm before it divides, in PyTorch."""

SAME, CHANGED, ANOTHER = "same", "changed", "another"
"""What has become of a gradient that was clipped: nothing; there are other values in it; another one is there."""


@dataclass(frozen=True)
class _Seen:
    """A gradient, and how often it had been written: by what counts versions, and by backwards into its home."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    written: int

    @staticmethod
    def of(parameter: torch.Tensor, gradient: torch.Tensor) -> _Seen:
        return _Seen(weakref.ref(gradient), gradient._version, _written(parameter))

    def now(self, parameter: torch.Tensor, gradient: torch.Tensor) -> str:
        if self.gradient() is not gradient:
            return ANOTHER
        return SAME if (self.version, self.written) == (gradient._version, _written(parameter)) else CHANGED


def _written(parameter: torch.Tensor) -> int:
    """How often gradients of the parameter's group went home."""
    home = managing(parameter)
    return 0 if home is None else home[0].store.sums.written[home[0].store.group_index(home[1])]


@dataclass
class _Clipped:
    """A factor, and the gradients that it is for.

    Attributes:
        norm: of the gradients, before they are clipped.
        factor: 0-dim fp32.
        stepped: whether a step has multiplied them.
    """

    norm: torch.Tensor
    factor: torch.Tensor
    gradients: dict[int, _Seen]
    stepped: bool = False

    def now(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> set[str]:
        """What has become of the gradients there are."""
        seen = [(self.gradients.get(id(parameter)), parameter, gradient) for parameter, gradient in found]
        return {ANOTHER if one is None else one.now(parameter, gradient) for one, parameter, gradient in seen}


class ClipsGradients(Optimizer):
    """An optimizer whose updates multiply gradients by what `clip_grad_norm_` found."""

    overlap: UpdateMode
    assumed_scale: AssumedScale
    _clipped: _Clipped | None = None
    _looked_at: int = 0
    _asked: bool = False

    @property
    def param_groups(self) -> Any:
        """As in `torch.optim`. Whoever reads it may change gradients in a way that nobody counts, as
        `torch.amp.GradScaler.unscale_` does: sums of gradients that were taken before are not used any more."""
        if "param_groups" not in self.__dict__:  # a wrapper, as Lightning's, which asks what it wraps then
            raise AttributeError("param_groups")
        self._looked_at = next(clock)
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    @torch.compiler.disable
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False, loss_scale: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all parameters of this optimizer, but the next `step()` multiplies.

        Nothing is copied for it where gradients are as the backward left them. `.grad` stays as it is.

        Args:
            error_if_nonfinite: raise an error where the norm is not finite; waits for the device.
            loss_scale: by what the loss was multiplied, and what `GradScaler.step` will divide gradients by.

        Returns:
            The norm of all gradients, divided by the loss scale: 0-dim fp32.

        Raises:
            RuntimeError: see `error_if_nonfinite`.
            UnsupportedError: gradients have been added to some that were clipped, or updates begin in the backward.
        """
        found = self._gradients()
        before = self._clipped if self._is_clipped(found) else None
        if before is None:
            whole = self.grad_norm() if loss_scale is None else self.grad_norm() / loss_scale
            norm = whole
        else:
            whole, norm = before.norm, before.norm * before.factor
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                "The total norm of order 2 for gradients from `parameters` is non-finite, so it cannot be clipped: "
                "set error_if_nonfinite=False to clip by it all the same"
            )
        factor = torch.clamp(max_norm / (norm + EPS), max=1.0).float()
        if before is not None:
            factor = factor * before.factor
        whole, factor, told = _kept(whole), _kept(factor), _kept(norm.float())
        for session in sessions_of(self._all_parameters()):
            session.live.watch(value for value in (whole, factor, told) if value.device.type != "cpu")
        self._clipped = _Clipped(whole, factor, {id(p): _Seen.of(p, g) for p, g in found})
        return told

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients as they are: 0-dim fp64, finite if and only if each element is.

        From the next backward on, sums of squares are taken where gradients are in slots; they are for as long as each
        step is preceded by a call of this, or of what calls it.

        Raises:
            UnsupportedError: gradients are somewhere where nobody can read them.
        """
        if self.overlap.is_final:
            raise UnsupportedError(
                f'overlap="{self.overlap.mode}" updates during the backward, before the norm of all gradients is '
                'known; use undoable=True beside it, or overlap="forward" or "none"'
            )
        found = self._gradients()
        self._asked = True
        for session in sessions_of(self._all_parameters()):
            request_sums(self, [session.store.sums], summing_on(session.device))
        return sum_of_squares(Gradients(found, self._looked_at)).sqrt()

    @torch.no_grad()
    def overflows(self) -> torch.Tensor:
        """Whether an element of a gradient is not finite: 0-dim fp32, 1 or 0.

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
        """What the gradients of this step are to be multiplied by: 0-dim fp32; None: nothing.

        Raises:
            UnsupportedError: some of them are not what was clipped.
        """
        clipped, found = self._clipped, self._gradients(read=False)
        if clipped is None or not found or not self._is_clipped(found):
            if clipped is not None and found and not clipped.stepped:
                raise UnsupportedError(
                    "the gradients are not those that clip_grad_norm_ has clipped: call optimizer.zero_grad() where "
                    "gradients are dropped, and clip_grad_norm_ after the last backward of each step"
                )
            return None
        clipped.stepped = True
        is_one = clipped.factor.device.type == "cpu" and float(clipped.factor) == 1.0
        return None if is_one else clipped.factor

    def end_of_step(self, sessions: list[Session]) -> None:
        """Take no more sums where nobody has asked for a norm since the step before."""
        if not self._asked:
            for session in sessions:
                session.store.sums.requesters.pop(self, None)
        self._asked = False

    def _is_clipped(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether these gradients are those that were clipped last.

        Raises:
            UnsupportedError: some are, or were before somebody changed them.
        """
        now = set() if self._clipped is None else self._clipped.now(found)
        if CHANGED in now or len(now) > 1:
            raise UnsupportedError(
                "gradients were changed, or added to, after clip_grad_norm_ of their optimizer, which multiplies them "
                "in step() only: clip after the last change, call zero_grad() after each step, or use "
                "torch.nn.utils.clip_grad_norm_, which multiplies at once"
            )
        return now == {SAME}

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        groups = self.__dict__["param_groups"]  # not a look at them, see `param_groups`
        return (local_shard_of(parameter) for group in groups for parameter in group["params"])

    def _gradients(self, *, read: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with their gradients, where there are any.

        Raises:
            UnsupportedError: one is sparse, or has no values that could be `read`.
        """
        found = []
        for parameter in self._all_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if read and isinstance(gradient, GradientPlaceholder):
                raise gradient.refusal()
            check_memory(self, parameter, gradient)
            found.append((parameter, gradient))
        return found


def _kept(value: torch.Tensor) -> torch.Tensor:
    """A number that outlives this call: on the CPU in none of torch's memory, which may be planned to the byte."""
    return host_tensor(value.numpy(), value.numpy().dtype) if value.device.type == "cpu" else value


def grad_scale_of(optimizer: Any, clip: torch.Tensor | None = None) -> GradScale:
    """What the scaler has set on an optimizer for the step under way, as its kernels want it.

    Args:
        clip: what gradients are multiplied by after that: 0-dim fp32.
    """
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found_inf is None and clip is None:
        return NO_SCALE
    unscale = None if scale is None else inverted(scale)
    return GradScale(unscale, clip, None if found_inf is None else found_inf.detach().float().reshape(()))


def inverted(scale: torch.Tensor) -> torch.Tensor:
    """What undoes a loss's scale, inverted as `GradScaler.unscale_` does it, in double precision: 0-dim fp32."""
    return scale.detach().double().reciprocal().float().reshape(())


def is_skipped(scale: GradScale) -> bool:
    """Whether the host can see that a gradient overflowed, without waiting for a device."""
    return scale.found_inf is not None and not pending_steps.is_remote(scale.found_inf) and bool(scale.found_inf != 0)


def on_the_cpu(scale: GradScale) -> GradScale:
    """The same, for an update on the CPU; waits for the device."""

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cpu()

    return scale if scale is NO_SCALE else GradScale(moved(scale.unscale), moved(scale.clip), moved(scale.found_inf))


class AssumedScale:
    """By what the next gradients are taken to be too large: by what the last ones were, or what a scaler has told.

    Attributes:
        is_likely: whether the next update will stand, if the next gradients are like the last ones: those overflowed
            nowhere, and were not clipped. A backward whose updates will be undone only loses time by them.
    """

    def __init__(self) -> None:
        self._scale = NO_SCALE
        self.is_likely = True

    def expect(self, unscale: torch.Tensor | None) -> None:
        """Gradients will be multiplied by this first, 0-dim fp32; None: by nothing."""
        self._scale = NO_SCALE if unscale is None else GradScale(unscale.cpu())

    def on(self, device: torch.device) -> GradScale:
        """The scale, for kernels there."""
        unscale = self._scale.unscale
        return self._scale if unscale is None or device.type == "cpu" else GradScale(unscale.to(device))

    def is_what_was(self, scale: GradScale) -> bool:
        """Whether an update with the assumed scale is one with that of the step, which is expected from now on.

        Waits for the device.
        """
        known, assumed = on_the_cpu(scale), self._scale
        self.expect(known.unscale)
        overflows = known.found_inf is not None and float(known.found_inf) != 0
        self.is_likely = not overflows and _factor(known.clip) == 1
        return self.is_likely and _factor(known.unscale) == _factor(assumed.unscale)


def _factor(of: torch.Tensor | None) -> float:
    return 1.0 if of is None else float(of)


class GradScaler(OverflowsElsewhere):
    """`torch.amp.GradScaler`, with the same arguments, for the usual loop:

        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)  # in place of unscale_ and torch's function; or left out
        scaler.step(optimizer)
        scaler.update()

    PyTorch's own reads and writes every gradient to see whether one overflows, through the link where they are at home.
    This one does so only in `unscale_`, and for optimizers that are not of `chunkc.optim`.
    """

    @staticmethod
    def like(scaler: Any, device: str) -> Any:
        """One that is as PyTorch's own on a device; whatever is another kind of scaler, or scales nothing, as it is."""
        if type(scaler) is not torch.amp.GradScaler or not scaler.is_enabled():
            return scaler
        made = GradScaler(device)
        made.load_state_dict(scaler.state_dict())
        return made

    _stepped: weakref.WeakSet[ClipsGradients]

    def found_inf_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        if not isinstance(optimizer, ClipsGradients) or optimizer.overlap.is_final:
            return None
        self.__dict__.setdefault("_stepped", weakref.WeakSet()).add(optimizer)
        return optimizer.overflows()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As PyTorch's. Optimizers whose updates can be undone are told the new scale, which waits for the device."""
        super().update(new_scale)
        for optimizer in self.__dict__.get("_stepped", ()):
            if optimizer.overlap.undoable:
                optimizer.assumed_scale.expect(inverted(torch.tensor(self.get_scale(), device="cpu")))

    def clip_grad_norm_(self, optimizer: Any, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clip what the step will divide: see `clip_grad_norm_` of chunkc's optimizers.

        Returns:
            The norm of all gradients, divided by the loss's scale.

        Raises:
            RuntimeError, UnsupportedError: as there.
        """
        return optimizer.clip_grad_norm_(
            max_norm, error_if_nonfinite=error_if_nonfinite, loss_scale=self.scale_now(optimizer)
        )
