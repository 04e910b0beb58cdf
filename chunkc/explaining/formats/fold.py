"""Fold identical layers: names that differ in one number become one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NUMBER = re.compile(r"\b\d+\b")


@dataclass(frozen=True)
class Folded:
    """A line for `count` names. If there are several, `label` has `*` for the number that they differ in."""

    label: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        return self.label if self.count == 1 else f"{self.label} (x{self.count})"


def fold(contents: Mapping[str, int]) -> tuple[Folded, ...]:
    """Return lines for `contents` (name -> bytes), largest first, with the same sum of bytes.

    A number counts if it stands alone, as in `model.layers.3.mlp` and `param:3`, not in `conv1`. A name with several
    numbers joins the larger family: `h.0.mlp.1` becomes `h.*.mlp.1` if there are more blocks than submodules of one.
    """
    families: dict[str, list[str]] = {}
    for name in contents:
        for pattern in _patterns(name):
            families.setdefault(pattern, []).append(name)
    lines: list[Folded] = []
    left = dict(contents)
    for pattern, names in sorted(families.items(), key=lambda item: -len(item[1])):
        members = [name for name in names if name in left]
        if len(members) > 1:
            lines.append(Folded(pattern, len(members), sum(left.pop(name) for name in members)))
    lines += [Folded(name, 1, nbytes) for name, nbytes in left.items()]
    return tuple(sorted(lines, key=lambda line: (-line.nbytes, line.label)))


def by_kind(contents: Mapping[str, int]) -> dict[str, int]:
    """Sum the bytes of `kind: module` names by kind, largest first."""
    sums: dict[str, int] = {}
    for name, nbytes in contents.items():
        kind = kind_of(name)
        sums[kind] = sums.get(kind, 0) + nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def kind_of(name: str) -> str:
    """Return the kind of a name: `activations` of `activations: model.layers.3`."""
    return name.partition(":")[0].strip()


def fold_names(names: Iterable[str]) -> str:
    """Abbreviate chunk names: `grad:3, param:0-3, param:7`."""
    families: dict[str, list[int]] = {}
    plain = []
    for name in set(names):
        head, colon, number = name.rpartition(":")
        if colon and number.isdecimal():
            families.setdefault(head, []).append(int(number))
        else:
            plain.append(name)
    parts = sorted(plain)
    for head, numbers in sorted(families.items()):
        parts += [f"{head}:{run}" for run in _runs(sorted(numbers))]
    return ", ".join(parts)


def _patterns(name: str) -> list[str]:
    return [f"{name[: m.start()]}*{name[m.end() :]}" for m in _NUMBER.finditer(name)]


def _runs(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
