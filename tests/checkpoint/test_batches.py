"""A data loader is resumed where it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import chunkc
from chunkc.checkpoint import Batches


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Noisy(Numbers):
    """A worker process draws for each item."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index + torch.rand(()).item())


def shuffled() -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_size=3, shuffle=True)


def by_generator() -> DataLoader[torch.Tensor]:
    sampler = RandomSampler(Numbers(), replacement=True, generator=torch.Generator().manual_seed(3))
    return DataLoader(Numbers(), batch_size=3, sampler=sampler)


def by_workers() -> DataLoader[torch.Tensor]:
    return DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=1)


def trained(batches: Iterator[list[float]], num_batches: int) -> list[Any]:
    """Batches, and what a step draws between them."""
    return [(next(batches), torch.rand(()).item(), random.random(), np.random.rand()) for _ in range(num_batches)]


def endless(loader: Batches) -> Iterator[list[float]]:
    while True:
        for batch in loader:
            yield batch.tolist()


@pytest.mark.parametrize(("make", "num_before"), [*product([shuffled, by_generator], [0, 2, 4, 6]), (by_workers, 6)])
def test_batches_and_random_numbers_go_on(
    tmp_path: Path, make: Callable[[], DataLoader[torch.Tensor]], num_before: int
) -> None:
    torch.manual_seed(1)
    loader = Batches(make())
    assert len(loader) == 4
    batches = endless(loader)
    with chunkc.Checkpoint(tmp_path, model=nn.Linear(1, 1), dataloader=loader) as ck:
        trained(batches, num_before)
        ck.save(num_before)
        expected = trained(batches, 7)
    torch.manual_seed(2)
    other = Batches(make())
    assert chunkc.Checkpoint(tmp_path, model=nn.Linear(1, 1), dataloader=other).load_latest() == num_before
    assert trained(endless(other), 7) == expected


def test_a_loader_that_knows_its_position_is_asked(tmp_path: Path) -> None:
    class Stateful:
        at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader = Stateful()
    loader.at = 7
    with chunkc.Checkpoint(tmp_path, model=nn.Linear(1, 1), dataloader=loader) as ck:
        ck.save(1)
    loader.at = 0
    assert chunkc.Checkpoint(tmp_path, model=nn.Linear(1, 1), dataloader=loader).load_latest() == 1
    assert loader.at == 7


def test_an_epoch_that_is_left_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    """A loop that ends after so many steps, and is begun again with more of them."""
    model = nn.Linear(1, 1)
    torch.manual_seed(1)
    never = list(islice(endless(Batches(shuffled())), 6))
    torch.manual_seed(1)
    loader, found = Batches(shuffled()), []
    with chunkc.Checkpoint(tmp_path, model=model, dataloader=loader) as ck:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == 2:
                break
        ck.save(2)
    other = Batches(shuffled())
    chunkc.Checkpoint(tmp_path, model=model, dataloader=other).load_latest()
    assert found + list(islice(endless(other), 4)) == never


@pytest.mark.parametrize("saved_inside", [True, False])
def test_a_new_epoch_after_a_position_was_saved_in_one_that_was_left_is_refused(saved_inside: bool) -> None:
    loader = Batches(shuffled())
    for _ in loader:
        if saved_inside:
            loader.state_dict()
        break
    if not saved_inside:
        loader.state_dict()
    with pytest.raises(chunkc.UnsupportedError, match=r"after 1 of its batches.*end_epoch\(\)"):
        next(iter(loader))


def test_epochs_that_are_left_and_ended_resume_exactly(tmp_path: Path) -> None:
    """Each epoch takes two of four batches."""

    def epoch(loader: Batches) -> list[Any]:
        found = []
        for batch in loader:
            found.append((batch.tolist(), torch.rand(()).item()))
            if len(found) == 2:
                loader.end_epoch()  # and the loop ends
        return found

    torch.manual_seed(1)
    loader = Batches(shuffled())
    with chunkc.Checkpoint(tmp_path, model=nn.Linear(1, 1), dataloader=loader) as ck:
        assert len(epoch(loader)) == 2
        ck.save(1)
        expected = epoch(loader), epoch(loader)
    torch.manual_seed(2)
    other = Batches(shuffled())
    chunkc.Checkpoint(tmp_path, model=nn.Linear(1, 1), dataloader=other).load_latest()
    assert (epoch(other), epoch(other)) == expected


def test_an_epoch_that_was_left_before_anything_was_saved_is_nobodys_matter() -> None:
    loader = Batches(shuffled())
    assert len(next(iter(loader))) == 3
    assert sum(1 for _ in loader) == 4
    assert loader.state_dict()["begun"] is None
