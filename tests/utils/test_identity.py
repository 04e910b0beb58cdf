"""Parameters as keys: by identity, and only for as long as they live."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from chunkc.utils.identity import ByIdentity


def test_equal_parameters_are_told_apart() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    values: ByIdentity[str] = ByIdentity()
    values[one] = "one"
    assert (values.get(one), values.get(other), values.get(one.detach())) == ("one", None, None)
    values[other] = "other"
    values[one] = "again"
    assert (values.get(one), values.get(other), values.values()) == ("again", "other", ["again", "other"])
    del values[one]
    assert (values.get(one), values.values()) == (None, ["other"])


def test_a_parameter_that_is_gone_leaves_nothing() -> None:
    values: ByIdentity[int] = ByIdentity()
    for number in range(100):  # tensors take each other's places in memory
        made = nn.Parameter(torch.zeros(2))
        assert values.get(made) is None
        values[made] = number
        assert values.values() == [number]
        del made
        gc.collect()
        assert values.values() == []


def test_the_loss_of_a_former_entry_leaves_the_present_one() -> None:
    values: ByIdentity[str] = ByIdentity()
    parameter = nn.Parameter(torch.zeros(2))
    values[parameter] = "former"
    former, _ = values._entries[id(parameter)]
    values[parameter] = "present"
    values._lost(former)
    assert values.get(parameter) == "present"


def test_a_parameter_that_only_autograd_holds_for_a_while_keeps_its_value() -> None:
    values: ByIdentity[str] = ByIdentity()
    parameter = nn.Parameter(torch.zeros(2))
    values[parameter] = "kept"
    doubled = parameter * 2
    del parameter
    gc.collect()
    assert values.values() == ["kept"]
    found = doubled.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    assert values.get(found) == "kept"
    del found, doubled
    gc.collect()
    assert values.values() == []


def test_threads_that_come_and_go() -> None:
    values: ByIdentity[int] = ByIdentity()

    def work() -> None:
        for number in range(500):
            parameter = nn.Parameter(torch.zeros(1))
            values[parameter] = number
            assert values.get(parameter) == number
            values.values()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result()
    gc.collect()
    assert values.values() == []
