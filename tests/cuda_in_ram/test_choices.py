"""What chunkc does on a device that is not as it should be. No arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda_in_ram
import pytest
import torch
from device_gpt import SMALL, train

import chunkc

HUGE = 1 << 34
HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


def on_a_device(choices: str, script: str) -> str:
    """What a script prints, in a process of its own on a device of these choices."""
    here = Path(__file__).parent
    command = [sys.executable, str(here / "run.py"), "--set", choices, sys.executable, "-c", script]
    paths = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_a_device_is_what_was_chosen() -> None:
    script = """
import torch
found = torch.cuda.get_device_properties(0)
print(found.major, found.minor, found.total_memory, torch.cuda.device_count())
"""
    assert on_a_device("capability=75,memory=0x40000000,devices=2", script).split() == ["7", "5", str(1 << 30), "2"]


def test_a_device_with_addresses_of_its_own_is_refused() -> None:
    script = """
import torch, chunkc
try:
    chunkc.place(torch.nn.Linear(512, 512), device="cuda")
except chunkc.UnsupportedError as error:
    print("refused:", error)
"""
    assert "addresses of its own" in on_a_device(f"attribute.{HOST_POINTERS}=0", script)


def test_memory_that_cannot_be_pinned_is_an_error_that_says_how_much() -> None:
    with cuda_in_ram.choose(pinnable=4096), pytest.raises(chunkc.HomeError, match="cannot pin"):
        train(SMALL, torch.float32, HUGE)


def test_after_a_failed_launch_the_device_stays_broken() -> None:
    script = """
import cuda_in_ram, torch
x = torch.ones(8, device="cuda")
cuda_in_ram.configure(fail_launch=1)
for _ in range(2):
    try:
        x.add_(1)
        torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        print("failed:", "unspecified launch failure" in str(error))
"""
    assert on_a_device("", script).split() == ["failed:", "True"] * 2


def test_memory_that_is_out_is_torch_s_own_error() -> None:
    with cuda_in_ram.choose(memory=1 << 20), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 28, device="cuda")


def test_bf16_with_inductor_on_a_device_that_lacks_it_is_an_error_that_says_what_to_do() -> None:
    """Inductor asks Dynamo to skip such a frame: the model would run without plan or budget."""
    script = """
import chunkc, torch
from device_gpt import SMALL, train
try:
    train(SMALL, torch.bfloat16, 1 << 34, codegen="inductor", steps=1)
except chunkc.UnsupportedError as error:
    print("BF16" in str(error), "codegen" in str(error))
"""
    assert on_a_device("capability=75", script).split() == ["True", "True"]


def test_an_automatic_budget_does_not_count_parameters_twice() -> None:
    """A model that is on the device has what it takes there for itself."""
    script = """
import torch
from harness import session_of

linear = torch.nn.Linear(8192, 8192, bias=False, device="cuda")
total = torch.cuda.mem_get_info()[1]
compiled = torch.compile(linear, backend="chunkc", options={"memory_budget": "auto", "codegen": "eager"})
compiled(torch.zeros(1, 8192, device="cuda")).sum().backward()
print(session_of(linear).budget_nbytes / total)
"""
    tests = str(Path(__file__).parents[1])
    found = on_a_device("memory=0x40000000", f"import sys; sys.path.append({tests!r}); import conftest\n{script}")
    assert 0.85 < float(found) < 0.9, "256 MiB of 1 GiB would be missing"
