"""Set how `copy.deepcopy` copies objects of a class, in its table of copiers, which goes before their own method.

The table is private to `copy`, and the same in all versions of Python since 2.5. An attribute of the object would do,
too, but it would be pickled with the object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Copier = Callable[[Any, dict[int, Any]], Any]
"""Takes an object, and the copies so far by `id` of their originals; returns a copy, or None to leave it to others."""


def copied_by(kind: type[Any], copier: Copier) -> None:
    """Let `copier` copy objects of just this class from now on; those that it leaves are copied as before."""
    table: dict[type[Any], Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    former = table.get(kind) or (lambda value, memo: value.__deepcopy__(memo))

    def copied(value: Any, memo: dict[int, Any]) -> Any:
        found = copier(value, memo)
        return former(value, memo) if found is None else found

    table[kind] = copied
