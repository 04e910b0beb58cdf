"""Threads look only at gradients of what they train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from chunkc.runtime.store.gradient_states import Trainers

NAMES = frozenset("ab")


@pytest.fixture
def elsewhere() -> Callable[[Callable[[], object]], object]:
    """Calls in one other thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result()


def test_at_first_everybody_may_look() -> None:
    assert not Trainers().trained_by_others()


def test_only_who_trains_may_look(elsewhere: Callable) -> None:
    trainers = Trainers()
    elsewhere(lambda: trainers.claim(NAMES))
    assert trainers.trained_by_others() == NAMES
    assert not elsewhere(trainers.trained_by_others)


def test_training_moves_to_another_thread(elsewhere: Callable) -> None:
    trainers = Trainers()
    elsewhere(lambda: trainers.claim(NAMES))
    trainers.claim(NAMES)
    assert not trainers.trained_by_others()
    assert elsewhere(trainers.trained_by_others) == NAMES


def test_each_trains_its_own(elsewhere: Callable) -> None:
    trainers = Trainers()
    trainers.claim(NAMES)
    elsewhere(lambda: trainers.claim(frozenset("bc")))
    assert trainers.trained_by_others() == frozenset("c")
    assert elsewhere(trainers.trained_by_others) == frozenset("a")


def test_who_works_for_another_thread_may_look_as_that_one(elsewhere: Callable) -> None:
    trainers = Trainers()
    here = threading.get_ident()
    elsewhere(lambda: trainers.claim(NAMES, thread=here))
    assert not trainers.trained_by_others()
    assert not elsewhere(trainers.trained_by_others)


def test_a_backward_in_autograd_s_thread_works_for_one_caller_at_a_time(elsewhere: Callable) -> None:
    trainers = Trainers()
    elsewhere(lambda: trainers.claim(NAMES, thread=-1))
    assert trainers.trained_by_others() == NAMES
    elsewhere(lambda: trainers.claim(frozenset("c"), thread=-2))
    assert elsewhere(trainers.trained_by_others) == NAMES
