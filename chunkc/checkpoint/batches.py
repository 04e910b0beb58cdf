"""The position in a data loader that cannot say it itself, such as `torch.utils.data.DataLoader`.

    loader = chunkc.checkpoint.Batches(DataLoader(dataset, batch_size=8, shuffle=True))
    ck = chunkc.Checkpoint(DIR, model=model, optimizer=optimizer, dataloader=loader)

A shuffled order is drawn when an epoch begins. So the state is that of the random generators at that moment, and how
many batches were taken since. To resume, the order is drawn once more, and the batches that were taken are skipped.

A loop that ends with `break` may end the run, which goes on within the epoch when it is resumed, or the epoch, after
which a new one begins. Only `end_epoch` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from chunkc.checkpoint.random_state import random_state, set_random_state
from chunkc.ir.errors import UnsupportedError


class Batches:
    """A loader's batches, epoch by epoch, that can be resumed within an epoch.

    Skipped batches are loaded, and thrown away. That is exact where what a batch contains depends on the generators'
    state at the beginning of the epoch and on nothing else: random augmentations in this process, between which a
    training step draws random numbers too, are not; with `num_workers` they are.

    Args:
        loader: gives the batches of an epoch when it is iterated over. A `torch.Generator` of its own, or of its
            sampler, is part of the state.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._begun: dict[str, Any] | None = None
        self._taken = 0
        self._resumes = False
        self._told: int | None = None  # how many batches were taken when the position was asked for

    def __len__(self) -> int:
        """The loader's number of batches in an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch that is resumed, without those taken; else of a new epoch.

        Raises:
            UnsupportedError: the former epoch was left by `break`, and the position that was saved last is within it:
                resuming from there would go on in that epoch.
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
            set_random_state(now["random"])
        else:
            self._begun, self._taken = self._state(), 0
            batches = iter(self.loader)
        self._resumes, self._told = False, None
        begun = self._begun
        for batch in batches:
            self._taken += 1
            yield batch
            if self._begun is not begun:
                return
        self._begun = None

    def end_epoch(self) -> None:
        """Leave the epoch: a loop over it gets no more batches, and the next one begins a new epoch."""
        self._begun, self._resumes = None, False

    def state_dict(self) -> dict[str, Any]:
        """The position, as data."""
        self._told = self._taken
        return {"begun": self._begun, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a position; the next epoch that is iterated over goes on from there."""
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
