"""Define every error that chunkc raises on purpose. All derive from `ChunkcError`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from chunkc.ir.units import format_nbytes, short_nbytes


class ChunkcError(RuntimeError):
    """Base of all errors raised by chunkc."""


class OptionsError(ChunkcError, ValueError):
    """Invalid option: unknown name, wrong type, or a value outside its range."""


class UnsupportedError(ChunkcError):
    """Model feature that chunkc cannot plan for; the message says what to do instead."""


class InternalError(ChunkcError):
    """An unforeseen failure inside chunkc while it compiled a graph: a bug in chunkc, with the failure as its cause."""


class FileError(ChunkcError):
    """Unreadable, unwritable or malformed weight file."""


VALUES = "activations, temporaries and inputs"
"""Label of the bytes at a peak that are not model data."""

_LARGEST = 3
"""The number of modules with the most values that an error names."""
_HELPS = 0.95
"""The fraction of the smallest budget under which a change has to get for an error to name it."""

_EARLIER_CALLS_NEEDED_LESS = (
    "\nEarlier calls fitted. Where calls grow, as with longer sequences or more calls before a backward, make the "
    "largest one first: its minimum is enough for all."
)

_NOTHING_RAN = "Nothing has run: the step would run out of memory."
"""Ends with the words by which `accelerate.utils.find_executable_batch_size` knows that a smaller batch may fit."""


@dataclass(eq=False, repr=False, kw_only=True)
class BudgetError(ChunkcError):
    """Budget too small for any plan. Raised before anything is allocated or moved.

    Attributes:
        minimum_nbytes: the smallest budget, in bytes, that works for all that is known.
        budget_nbytes: the budget that was asked for.
        moment: name and kind of the operation at the peak.
        module: the user's module that operation belongs to ("" for the model itself).
        contents: (label, bytes) of the memory at the peak, largest first.
        values: (module, bytes) of the values among them, largest first, if they are known.
        remedies: (change, smallest budget with it in bytes) of what would need less, the smallest first; estimates.
        call: name of the call at the peak.
        has_loss: the graph that lacks room computes a cross entropy.
        covers: the part of the step that the minimum holds for, if it is not all of it.
        evaluates: the minimum is that of an evaluation, of a model that could be trained.
        training_nbytes: the smallest budget of a whole training step, if it was traced because the minimum covered
            less. The minimum is no less then, unless it is an evaluation's.
        num_others: how many other modules of the model are compiled by themselves; the minimum may be too small for
            them.
        grown: earlier steps have fitted, and this call needs more than they did.
        outside: parameters that no graph takes, and their bytes, in words, if the whole step was traced.
        elsewhere: a home that would fit the budget, and why it cannot be chosen, if there is any.
    """

    minimum_nbytes: int
    budget_nbytes: int
    moment: str
    module: str
    contents: Sequence[tuple[str, int]]
    covers: str = ""
    elsewhere: str = ""
    evaluates: bool = False
    training_nbytes: int | None = None
    grown: bool = False
    num_others: int = 0
    outside: str = ""
    call: str = ""
    values: Sequence[tuple[str, int]] = ()
    remedies: Sequence[tuple[str, int]] = ()
    has_loss: bool = False

    def __post_init__(self) -> None:
        self.contents, self.values, self.remedies = map(tuple, (self.contents, self.values, self.remedies))
        of_values = {VALUES: _largest_of(self.values, self.values_nbytes)}
        filled = "".join(
            f"\n  {format_nbytes(nbytes):>36}  {label}{of_values.get(label, '')}" for label, nbytes in self.contents
        )
        so_far = " so far" if self.covers else ""
        full = f"\n{self.elsewhere}" if self.elsewhere else ""
        if self.outside:
            full += f"\nNo graph takes {self.outside}: outside of memory_budget, with their gradients and states."
        less = ", ".join(f"{change} (about {short_nbytes(nbytes)})" for change, nbytes in self.remedies)
        advice = f"\nWhat would need less: {less}." if less else ""
        later = _EARLIER_CALLS_NEEDED_LESS if self.grown else ""
        super().__init__(
            f"memory_budget is {format_nbytes(self.budget_nbytes)}; the smallest that works is "
            f"{format_nbytes(self.minimum_nbytes)}{self._scope()}. "
            f"The peak{so_far} is at {self.moment} in {self.module or 'the model'}, filled by:"
            f"{filled}{full}\n{_NOTHING_RAN}{advice}{later}"
        )

    def _scope(self) -> str:
        """Return the phrase that says what the minimum is for, if that needs saying."""
        training_nbytes = self.training_nbytes
        if self.evaluates:
            of = f"{self.covers} of an evaluation" if self.covers else "an evaluation"
            needs = "more, as chunkc explain says" if training_nbytes is None else format_nbytes(training_nbytes)
            return f" for {of}, which makes no gradients; a training step with this batch needs {needs}"
        if self.num_others:
            others = "another module" if self.num_others == 1 else f"{self.num_others} other modules"
            return (
                f" for a training step of this compiled module and of those before it; {others} of the model, compiled "
                "separately, may need more: chunkc.report says the minimum of all after a step in a larger budget"
            )
        if self.covers and training_nbytes is not None:
            return " for a whole training step of the compiled module, which was traced, as other graphs may follow"
        if self.covers:
            return (
                f" for {self.covers}: what comes later may need more, and chunkc explain says the minimum of the whole "
                "step, as chunkc.report does after a step in a larger budget"
            )
        return ""

    @property
    def values_nbytes(self) -> int:
        """Bytes at the peak that are not model data."""
        return dict(self.contents).get(VALUES, 0)

    def covering(
        self, minimum_nbytes: int, covers: str, *, evaluates: bool = False, grown: bool = False
    ) -> BudgetError:
        """Return the error with a minimum that is not smaller, and the scope it holds for."""
        most_nbytes = max(minimum_nbytes, self.minimum_nbytes)
        return replace(self, minimum_nbytes=most_nbytes, covers=covers, evaluates=evaluates, grown=grown)

    def with_remedies(self, remedies: Iterable[tuple[str, int]]) -> BudgetError:
        """Return the error with more of what would need less: (change, bytes); without those that hardly help."""
        most_nbytes = self.minimum_nbytes * _HELPS
        worthwhile = {(change, nbytes) for change, nbytes in (*self.remedies, *remedies) if nbytes < most_nbytes}
        return replace(self, remedies=sorted(worthwhile, key=lambda remedy: (remedy[1], remedy[0])))

    def of_step(self, training_nbytes: int, evaluation_nbytes: int | None = None, outside: str = "") -> BudgetError:
        """Return the error with the smallest budgets of a whole training step, and of a whole evaluation."""
        if evaluation_nbytes is not None:
            whole = replace(self, training_nbytes=training_nbytes, outside=outside)
            return whole.covering(evaluation_nbytes, "", evaluates=True, grown=self.grown)
        minimum_nbytes = self.minimum_nbytes if self.evaluates else max(self.minimum_nbytes, training_nbytes)
        is_most = self.minimum_nbytes >= minimum_nbytes * _HELPS
        remedies = self.remedies if is_most else ()  # they were estimated for a part of the step
        return replace(
            self, minimum_nbytes=minimum_nbytes, training_nbytes=training_nbytes, outside=outside, remedies=remedies
        )

    def __reduce__(self) -> tuple:
        return partial(BudgetError, **{field.name: getattr(self, field.name) for field in fields(self)}), ()


def _largest_of(values: Sequence[tuple[str, int]], all_nbytes: int) -> str:
    """Return the phrase that says where most of the values are from; "" if that is not known."""
    largest = [f"{short_nbytes(nbytes)} of {module}" for module, nbytes in values[:_LARGEST]]
    rest = all_nbytes - sum(nbytes for _, nbytes in values[:_LARGEST])
    return f": {', '.join([*largest, *([f'{short_nbytes(rest)} of others'] if rest else [])])}" if largest else ""


class HomeError(ChunkcError, OSError):
    """Failure of the home tier: no space, no permission, an I/O error. `errno` says which."""

    def __reduce__(self) -> tuple:
        return _rebuild_home_error, (self.args, self.errno)


def _rebuild_home_error(args: tuple, errno: int | None) -> HomeError:
    error = HomeError(*args)
    error.errno = errno
    return error


class CheckpointError(ChunkcError):
    """Failure to save or load a checkpoint: the medium, damage, another process, another model."""


class ChunkStateError(ChunkcError):
    """Illegal chunk transition: a bug in a plan or in the runtime, never the user's fault."""


class StreamError(ChunkcError):
    """Death of a stream's worker thread or failure of a copy; the original error is the `__cause__`."""


class DistributedError(StreamError):
    """Mismatch or loss of a rank: ranks that train one model differ, or one is gone or late. No rank can go on."""


class VerificationError(ChunkcError):
    """Violation of the verifier's rules. `violations` lists them all."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("the plan is not valid:\n  " + "\n  ".join(self.violations))

    def __reduce__(self) -> tuple:
        return VerificationError, (self.violations,)
