"""The meter counts every byte, the limit holds to the byte, only torch's own blocks are counted."""

from __future__ import annotations

import gc
import mmap
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import forked
import pytest
import torch

from chunkc.ir.errors import ChunkcError, UnsupportedError
from chunkc.runtime.device import cpu_allocator


@pytest.fixture(autouse=True)
def _meter():
    cpu_allocator.install()
    gc.collect()
    yield
    cpu_allocator.set_limit(None)


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def run_python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(code)
    return forked.run(program, environment={**os.environ, **environment})


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1001, 1 << 20])
def test_counts_exactly_the_requested_bytes(nbytes: int) -> None:
    before = cpu_allocator.current_nbytes()
    block = allocate(nbytes)
    assert cpu_allocator.current_nbytes() - before == nbytes
    view = block[nbytes // 2 :]
    del block
    assert cpu_allocator.current_nbytes() - before == nbytes, "a view keeps the storage alive"
    del view
    assert cpu_allocator.current_nbytes() == before


def test_blocks_stay_aligned_as_torch_promises() -> None:
    assert all(allocate(nbytes).data_ptr() % 64 == 0 for nbytes in range(1, 300, 7))


def test_peak_is_the_largest_sum_of_live_blocks() -> None:
    cpu_allocator.reset_peak()
    base = cpu_allocator.current_nbytes()
    first = allocate(1000)
    second = allocate(500)
    del first
    third = allocate(300)
    assert cpu_allocator.peak_nbytes() - base == 1500
    assert cpu_allocator.current_nbytes() - base == 800
    cpu_allocator.reset_peak()
    assert cpu_allocator.peak_nbytes() == cpu_allocator.current_nbytes()
    del second, third
    assert cpu_allocator.peak_nbytes() - base == 800


def work() -> torch.Tensor:
    """Sorting allocates scratch inside the operator, so the peak is above the inputs and outputs."""
    torch.manual_seed(0)
    values = torch.randn(5000)
    return torch.sort(values).values


def test_a_limit_equal_to_the_peak_passes_and_one_byte_less_raises() -> None:
    work()
    cpu_allocator.reset_peak()
    base = cpu_allocator.current_nbytes()
    expected = work()
    peak = cpu_allocator.peak_nbytes()
    del expected
    assert cpu_allocator.current_nbytes() == base
    with cpu_allocator.hard_limit(peak):
        expected = work()
    saved = expected.tolist()
    del expected
    with cpu_allocator.hard_limit(peak - 1):
        with pytest.raises(torch.OutOfMemoryError, match=f"a limit of {peak - 1} bytes"):
            work()
        assert cpu_allocator.peak_nbytes() <= peak, "a refused request is not charged"
    gc.collect()
    assert cpu_allocator.current_nbytes() == base, "nothing stays charged after a refusal"
    assert work().tolist() == saved, "and torch goes on working"


def test_the_message_says_requested_current_and_limit() -> None:
    held = allocate(100)
    base = cpu_allocator.current_nbytes()
    with (
        cpu_allocator.hard_limit(base + 10),
        pytest.raises(
            torch.OutOfMemoryError,
            match=f"requested 11 bytes with {base} bytes in use and a limit of {base + 10}",
        ),
    ):
        allocate(11)
    del held


def test_hard_limit_restores_the_former_limit_also_after_an_error() -> None:
    def nested() -> None:
        with cpu_allocator.hard_limit(1 << 41):
            with cpu_allocator.hard_limit(None):
                assert cpu_allocator.limit_nbytes() is None
            assert cpu_allocator.limit_nbytes() == 1 << 41
            raise ZeroDivisionError

    cpu_allocator.set_limit(1 << 40)
    with pytest.raises(ZeroDivisionError):
        nested()
    assert cpu_allocator.limit_nbytes() == 1 << 40


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="-5"):
        cpu_allocator.set_limit(-5)
    assert cpu_allocator.limit_nbytes() is None


def test_a_limit_below_the_current_bytes_refuses_all_but_empty_tensors() -> None:
    held = allocate(1000)
    with cpu_allocator.hard_limit(0):
        assert allocate(0).numel() == 0
        with pytest.raises(torch.OutOfMemoryError):
            allocate(1)
    del held


def test_mapped_and_borrowed_memory_is_not_charged(tmp_path: Path) -> None:
    path = tmp_path / "home"
    path.write_bytes(bytes(1 << 16))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        base = cpu_allocator.current_nbytes()
        with cpu_allocator.hard_limit(base):
            borrowed = torch.frombuffer(mapped, dtype=torch.float32)
            from_file = torch.from_file(str(path), shared=True, size=1 << 14, dtype=torch.float32)
            from_file.fill_(2.0)
        assert cpu_allocator.current_nbytes() == base
        assert borrowed[-1].item() == 2.0
        del borrowed, from_file
        assert cpu_allocator.current_nbytes() == base


def test_blocks_freed_by_other_threads_are_uncharged() -> None:
    num_threads, num_blocks = 4, 400
    base = cpu_allocator.current_nbytes()
    pipes: list[queue.Queue[torch.Tensor | None]] = [queue.Queue() for _ in range(num_threads)]

    def produce_and_free(rank: int) -> None:
        for index in range(num_blocks):
            pipes[(rank + 1) % num_threads].put(allocate(1 + (index * 37) % 4096))
        pipes[(rank + 1) % num_threads].put(None)
        while pipes[rank].get() is not None:
            pass

    threads = [threading.Thread(target=produce_and_free, args=(rank,)) for rank in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cpu_allocator.current_nbytes() == base


def test_threads_racing_for_the_last_bytes_never_pass_the_limit() -> None:
    room, nbytes = 5, 1 << 12
    base = cpu_allocator.current_nbytes()
    won: list[torch.Tensor] = []
    barrier = threading.Barrier(8)

    def race() -> None:
        barrier.wait()
        for _ in range(50):
            try:
                won.append(allocate(nbytes))
            except torch.OutOfMemoryError:
                continue

    cpu_allocator.reset_peak()
    with cpu_allocator.hard_limit(base + room * nbytes + 1):
        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == room
        assert cpu_allocator.peak_nbytes() == base + room * nbytes
    won.clear()
    assert cpu_allocator.current_nbytes() == base


def test_resizing_a_storage_in_place_is_followed() -> None:
    base = cpu_allocator.current_nbytes()
    block = allocate(1000)
    cpu_allocator.reset_peak()
    block.untyped_storage().resize_(3000)
    assert cpu_allocator.current_nbytes() - base == 3000
    assert cpu_allocator.peak_nbytes() - base == 4000, "the old block lives until its bytes are copied"
    block.untyped_storage().resize_(0)
    assert cpu_allocator.current_nbytes() == base


@pytest.mark.second_tier
def test_memory_from_before_install_is_neither_charged_nor_uncharged(tmp_path: Path) -> None:
    outcome = run_python(
        "import torch\n"
        "from chunkc.runtime.device import cpu_allocator as meter\n"
        "old = torch.ones(1000)\n"
        "assert not meter.is_installed()\n"
        "meter.install(); meter.install()\n"
        "assert meter.is_installed() and meter.current_nbytes() == 0 and meter.limit_nbytes() is None\n"
        "new = torch.ones(10)\n"
        "assert meter.current_nbytes() == 40, meter.current_nbytes()\n"
        "del old\n"
        "assert meter.current_nbytes() == 40, meter.current_nbytes()\n"
        "outlives_everything = new\n",
        tmp_path,
    )
    assert outcome.returncode == 0, outcome.stderr


def test_reading_a_meter_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_allocator, "_library", None)
    for function in (cpu_allocator.current_nbytes, cpu_allocator.peak_nbytes, cpu_allocator.limit_nbytes):
        with pytest.raises(ChunkcError, match=r"install\(\)"):
            function()


@pytest.mark.second_tier
def test_ninja_is_found_beside_python_when_the_environment_is_not_activated(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    outcome = run_python(
        "import os\n"
        "from chunkc.runtime.device import cpu_allocator as meter\n"
        "path = os.environ['PATH']\n"
        "with meter._ninja_on_path():\n"
        "    import torch.utils.cpp_extension as extension\n"
        "    assert extension.is_ninja_available()\n"
        "assert os.environ['PATH'] == path\n",
        tmp_path,
        PATH=str(tmp_path),
    )
    assert outcome.returncode == 0, outcome.stderr


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_allocator, "_library", None)
    monkeypatch.setattr(cpu_allocator.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)  # any program that exists
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="pip install ninja"):
        cpu_allocator.install()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="no-such-compiler"):
        cpu_allocator.install()


@pytest.mark.second_tier
@pytest.mark.timeout(120)
def test_a_lock_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """torch's lock is a file, which outlives the process that made it."""
    script = (
        "from pathlib import Path\n"
        "from chunkc.runtime.device import cpu_allocator as meter\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "load = meter.cpp_extension.load\n"
        "def killed(**options):\n"
        "    (Path(options['build_directory']) / 'lock').touch()\n"
        "    raise SystemExit\n"
        "meter.cpp_extension.load = killed\n"
        "try:\n"
        "    meter.install()\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert len(list(folder.glob('*/lock'))) == 1\n"
        "meter.cpp_extension.load = load\n"
        "meter.install()\n"
        "assert not list(folder.glob('*/lock'))\n"
    )
    outcome = run_python(script, tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert outcome.returncode == 0, outcome.stderr
