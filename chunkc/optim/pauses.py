"""Count the steps for which no update is tried in the backward, after the program has made `step()` undo some.

The pause has one step at first, and twice as many each time that the next attempt has to be undone, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pauses:
    """Pauses between attempts to update in the backward.

    Attributes:
        has_undone: whether updates of this step were undone.
    """

    has_undone: bool = False
    _misses: int = 0
    _left: int = 0

    @property
    def may_try(self) -> bool:
        """Whether updates may begin now."""
        return self._left == 0 and not self.has_undone

    def end_step(self) -> None:
        """Count a step: the pause after the nth that had to undo updates in a row has 2^(n-1) steps, at most 1024."""
        if self.has_undone:
            self._left, self._misses, self.has_undone = 2 ** min(self._misses, 10), self._misses + 1, False
        elif self._left:
            self._left -= 1
        else:
            self._misses = 0
