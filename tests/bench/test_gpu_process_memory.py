"""The driver's count of a process's memory, by a stand-in for NVML."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gpu import process_memory as gpu_process_memory


class NVMLError(Exception):
    pass


def nvml(*processes: tuple[int, int | None], fails_at: str = "") -> tuple[SimpleNamespace, list[str]]:
    """What stands for `pynvml`, and the calls it got."""
    calls: list[str] = []

    def call(name: str, result: object = None):
        def called(*arguments: object) -> object:
            calls.append(name)
            if name == fails_at:
                raise NVMLError(name)
            return result

        return called

    running = [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in processes]
    names = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetHandleByIndex": "gpu"}
    found = {name: call(name, result) for name, result in names.items()}
    found["nvmlDeviceGetComputeRunningProcesses"] = call("nvmlDeviceGetComputeRunningProcesses", running)
    return SimpleNamespace(NVMLError=NVMLError, **found), calls


def test_the_process_s_own_bytes_among_others():
    library, calls = nvml((1, 10), (2, 20))
    assert gpu_process_memory.process_nbytes(2, library) == 20
    assert calls[0] == "nvmlInit"
    assert calls[-1] == "nvmlShutdown"


def test_in_a_container_a_single_process_is_the_one_that_asks():
    assert gpu_process_memory.process_nbytes(7, nvml((4711, 30))[0]) == 30


@pytest.mark.parametrize("processes", [(), ((1, 10), (2, 20)), ((7, None),)])
def test_what_the_driver_does_not_tell(processes: tuple[tuple[int, int | None], ...]):
    assert gpu_process_memory.process_nbytes(7, nvml(*processes)[0]) is None


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetComputeRunningProcesses"])
def test_a_driver_that_is_not_there(name: str):
    library, calls = nvml((7, 1), fails_at=name)
    assert gpu_process_memory.process_nbytes(7, library) is None
    assert (calls[-1] == "nvmlShutdown") == (name != "nvmlInit")
