"""Save the position in a data loader that has no `state_dict`, such as `torch.utils.data.DataLoader`.

    loader = chunkc.checkpoint.Batches(DataLoader(dataset, batch_size=8, shuffle=True))
    ck = chunkc.Checkpoint(DIR, model=model, optimizer=optimizer, dataloader=loader)

A shuffled order is drawn when an epoch begins. So the position is the state of the random generators at that moment,
and the number of batches taken since. Resuming draws the order again, and skips that many batches.

A `break` may end the run, which resumes within the epoch, or only the epoch. `end_epoch` says that it ends the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from chunkc.checkpoint.random_state import random_state, set_random_state
from chunkc.ir.errors import UnsupportedError


class Batches:
    """Iterate over a loader's batches, epoch by epoch; can resume within an epoch.

    Skipped batches are loaded and discarded. Resuming is exact if batches depend only on the generators' states at the
    beginning of the epoch. Random augmentations in workers (`num_workers`) do. In this process they do not: training
    steps draw from the same generators in between.

    Args:
        loader: an iterable over the batches of one epoch. The `torch.Generator` of the loader or of its sampler is part
            of the state.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._begun: dict[str, Any] | None = None
        self._taken = 0
        self._resumes = False
        self._told: int | None = None  # `_taken` at the last `state_dict` of this epoch

    def __len__(self) -> int:
        """Return the loader's number of batches in an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of a resumed epoch, or over a new epoch.

        Raises:
            UnsupportedError: the previous epoch was left by `break`, and its position was saved after the last batch
                taken: a resumed run would continue that epoch.
        """
        if self._begun is not None and not self._resumes and self._told == self._taken:
            raise UnsupportedError(
                f"an epoch was left after {self._taken} of its batches, a checkpoint was saved there, and a new epoch "
                "begins: a run that is resumed would go on in the former one. Call end_epoch() of these Batches before "
                "the checkpoint is saved"
            )
        if self._resumes and self._begun is not None:
            now = self._state()
            self._set_state(self._begun)
            batches = iter(self.loader)
            for _ in range(self._taken):
                next(batches, None)
            set_random_state(now["random"])  # the training steps' random numbers continue from the checkpoint
        else:
            self._begun, self._taken = self._state(), 0
            batches = iter(self.loader)
        self._resumes, self._told = False, None
        begun = self._begun
        for batch in batches:
            self._taken += 1
            yield batch
            if self._begun is not begun:  # the consumer called end_epoch or load_state_dict, or began another epoch
                return
        self._begun = None

    def end_epoch(self) -> None:
        """End the epoch: a loop over it gets no more batches, and the next loop begins a new epoch."""
        self._begun, self._resumes = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        self._told = self._taken
        return {"begun": self._begun, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position; the next iteration continues from it."""
        self._begun, self._taken = state["begun"], state["taken"]
        self._resumes = self._begun is not None

    def _generators(self) -> list[torch.Generator]:
        sampler = getattr(self.loader, "sampler", None)
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        holders = (self.loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _state(self) -> dict[str, Any]:
        return {"random": random_state(), "generators": [generator.get_state() for generator in self._generators()]}

    def _set_state(self, state: dict[str, Any]) -> None:
        set_random_state(state["random"])
        for generator, of_generator in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(of_generator.clone())
