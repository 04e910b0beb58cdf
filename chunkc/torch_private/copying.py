"""Set how `copy.deepcopy` copies objects of a class: in its table of copiers, which it reads before `__deepcopy__`.

The table is private to `copy`, and unchanged since Python 2.5. A `__deepcopy__` attribute on the object would work
too, but would be pickled with the object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Copier = Callable[[Any, dict[int, Any]], Any]
"""Takes an object and the memo (`id` of an original -> its copy); returns a copy, or None for the former copier."""


def copied_by(kind: type[Any], copier: Copier) -> None:
    """Register `copier` for objects of exactly this class; if it returns None, the object is copied as before."""
    table: dict[type[Any], Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    former = table.get(kind) or (lambda value, memo: value.__deepcopy__(memo))

    def copied(value: Any, memo: dict[int, Any]) -> Any:
        found = copier(value, memo)
        return former(value, memo) if found is None else found

    table[kind] = copied
