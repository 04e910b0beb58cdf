"""Calls of segments, and programs of phases, written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chunkc.ir.program import PhaseProgram, SegmentCall


def names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return names that are given as one text, or one by one."""
    return tuple(given.split() if isinstance(given, str) else given)


def segment_call(
    name: str, inputs: str | Iterable[str], outputs: str | Iterable[str], storages: str | Iterable[str],
    segment: str = "segment0", **more: Any,
) -> SegmentCall:  # fmt: skip
    """Return a call of a second; storages are those of its outputs."""
    fields = {"parameters": (), "gradients": (), "module": "", "cost_s": 1.0} | more
    return SegmentCall(name, segment, names(inputs), names(outputs), names(storages), **fields)


def phase_program(
    phase: str, inputs: Mapping[str, str], storages: Mapping[str, int], calls: Sequence[SegmentCall],
    outputs: Sequence[str | None], *, held: Iterable[str] | None = None, parameters: Mapping[str, str] | None = None,
    num_user_outputs: int = 1, **more: Any,
) -> PhaseProgram:  # fmt: skip
    """Return a program whose caller holds all inputs, unless `held` says which."""
    kept = frozenset(inputs.values() if held is None else held)
    return PhaseProgram(
        phase, inputs, storages, kept, parameters or {}, tuple(calls), tuple(outputs), num_user_outputs, **more
    )
