"""Fixtures and choices that all tests share. Helper modules are in `tests/support`, which pytest puts on `sys.path`.

They are one flat folder: `tests` itself on `sys.path` would offer its rooms (`kernels`, `runtime`, ...) as packages.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Generator, Iterable, Iterator

import forked
import pytest
import torch
from scripts import every_way  # noqa: F401  # a fixture

if importlib.util.find_spec("hypothesis") is not None:  # a machine that is lent (bench/on_gpu.sh) may not have it
    from hypothesis import settings

    settings.register_profile("unhurried", settings(), deadline=None)  # other work takes the processor's time
    settings.load_profile("unhurried")


def _compute_nothing_for_logs() -> None:
    """Skip what torch does at every compilation only to log it: a cache flush before it times its guards, and the text
    of each graph. Together they took an eighth of the time that a small model takes to compile."""
    from torch._dynamo import guards
    from torch._functorch._aot_autograd import graph_compile

    for module, name, answer in (
        (guards, "profile_guard_manager", 0.0),
        (graph_compile, "_log_joint_graph", None),
        (graph_compile, "_log_fw_bw_graphs", (None, None)),
    ):
        if hasattr(module, name):  # in the versions that have it
            setattr(module, name, lambda *_, answer=answer: answer)
    if "TORCH_TRACE" not in os.environ:
        # pytest gives handlers to loggers that do not propagate, and with any handler torch makes every trace's text
        trace = logging.getLogger("torch.__trace")
        trace.handlers.clear()
        trace.propagate = True


_compute_nothing_for_logs()
gc.disable()  # until all is collected: what is imported stays
os.environ["CHUNKC_VERIFY_PASSES"] = "1"  # of processes that tests start, too


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Sort tests into tiers: of one with many variants, `quick(n, second=m)` leaves n in the quick tests and m in the
    second tier. Where CHUNKC_VARIANTS says so, at most as many of each test's are left, of those that `-m` and `-k`
    take. Refuses names that another process would not give: workers could not share such tests."""
    if changing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"tests are named after addresses in memory; give them ids: {changing}")
    for found in _variants([i for i in items if i.get_closest_marker("quick") and not i.get_closest_marker("slow")]):
        mark = found[0].get_closest_marker("quick")
        assert mark is not None
        quick = _spread(found, mark.args[0])
        others = [item for item in found if item not in quick]
        second = _spread(others, mark.kwargs.get("second", len(others)))
        for item in others:
            item.add_marker(pytest.mark.second_tier if item in second else pytest.mark.slow)
    _leave_to_other_devices(items)
    yield
    if number := int(os.environ.get("CHUNKC_VARIANTS", 0)):
        left = {item for found in _variants(items) for item in _spread(found, number)}
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = [item for item in items if item in left]


def _variants(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The items of each test function, in order."""
    variants: dict[object, list[pytest.Item]] = {}
    for item in items:
        variants.setdefault(getattr(item, "function", item), []).append(item)
    return variants.values()


def _spread(found: list[pytest.Item], number: int) -> list[pytest.Item]:
    """Choose `number` of the items, or all, spread evenly."""
    number = min(number, len(found))
    return [found[index * len(found) // number] for index in range(number)]


def _leave_out_of_collections() -> None:
    """Freeze live objects: garbage collections look at them no more."""
    gc.collect()
    gc.freeze()


def _leave_to_other_devices(items: Iterable[pytest.Item]) -> None:
    """Skip tests of another device: on the GPU made of RAM (`tests/gpu_in_ram`) each test runs in one mode: of values
    with arithmetic, of memory without. Few need a real one."""
    if "CUDA_IN_RAM" not in os.environ:
        return
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        of_values = item.get_closest_marker("arithmetic") is not None
        if item.get_closest_marker("real_gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="the GPU made of RAM has no such thing"))
        elif item.get_closest_marker("memory_and_values") is None and of_values != (
            "CUDA_IN_RAM_ARITHMETIC" in os.environ
        ):
            item.add_marker(pytest.mark.skip(reason="for the device in its other mode"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the processor seconds of each test, its ended processes included, in the file that CHUNKC_TEST_SECONDS
    names: they decide its tier."""
    before = _processor_seconds()
    result = yield
    if path := os.environ.get("CHUNKC_TEST_SECONDS"):
        seconds = _processor_seconds() - before
        with open(path, "a") as file:
            file.write(f"{seconds:8.2f} {item.nodeid}\n")
    return result


def _processor_seconds() -> float:
    """Return those of this process and its ended children, in user and kernel code, and of what it had forked."""
    return sum(os.times()[:4]) + forked.processor_seconds


def pytest_collection_finish() -> None:
    """Leave what has been imported out of garbage collections: there are many, in the tests and in what they test, and
    a third of their time went into looking at modules."""
    _leave_out_of_collections()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _young_heap() -> Iterator[None]:
    """Begin each file's tests with nothing for garbage collections to look at: imports and caches of the files before
    made each of them ten times as long. What Dynamo compiled goes first, since what has been left out is never freed
    as a cycle."""
    yield
    torch._dynamo.reset()
    _leave_out_of_collections()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count what is left of theirs at the end would complain


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Reset Dynamo before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Use two threads on every machine: some operators take scratch per thread from a size on."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def short_switch_interval() -> Iterator[None]:
    """Switch threads every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
