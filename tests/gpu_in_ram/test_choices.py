"""What chunkc does on a device that is not as it should be. No arithmetic."""

from __future__ import annotations

from pathlib import Path

import cuda_in_ram
import pytest
import torch
from device_gpt import SMALL, train
from device_process import on_a_device

import chunkc
from chunkc.runtime.device import numa

HUGE = 1 << 34
HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


def test_a_device_is_what_was_chosen() -> None:
    script = """
import torch
found = torch.cuda.get_device_properties(0)
print(found.major, found.minor, found.total_memory, torch.cuda.device_count())
"""
    assert on_a_device("capability=75,memory=0x40000000,devices=2", script).split() == ["7", "5", str(1 << 30), "2"]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (f"attribute.{HOST_POINTERS}=0", ["addresses of its own"]),
        ("capability=70", ["Tesla V100-SXM2-32GB has compute capability 7.0", "CUDA 12.6"]),  # as torch is not built
    ],
)
def test_a_device_that_cannot_be_used_is_refused(choices: str, said: list[str]) -> None:
    script = """
import torch, chunkc
assert "sm_70" not in torch.cuda.get_arch_list(), "a build of torch that has Volta: choose another device"
try:
    chunkc.place(torch.nn.Linear(512, 512), device="cuda")
except chunkc.UnsupportedError as error:
    print("refused:", error)
"""
    found = on_a_device(choices, script)
    assert all(text in found for text in ["refused:", *said])


def test_memory_that_cannot_be_pinned_is_an_error_that_says_how_much() -> None:
    with cuda_in_ram.choose(pinnable=4096), pytest.raises(chunkc.HomeError, match="cannot pin"):
        train(SMALL, torch.float32, HUGE)


@pytest.mark.parametrize("update", ["clipped, in slots", "AdamW", "SGD", "LAMB"])
def test_kernels_take_home_memory_that_is_not_pinned(update: str) -> None:
    """Where the device reads pageable memory: sums of squares at home, and parameters that no graph has moved."""
    script = f"""
import chunkc, torch
from chunkc.runtime.device.gpu import TorchGpu
from device_gpt import SMALL, smallest_budget, train

TorchGpu.pin = lambda self, address, nbytes: "refused"  # and not `pinnable=0`: torch pins small tables of its own
if {update!r} == "clipped, in slots":
    how = {{"clip": 0.1, "clip_in_step": True}}
    trained = train(SMALL, torch.float32, smallest_budget(SMALL, torch.float32, **how), **how)
    read_nbytes = trained.report.gradients_read_nbytes
    print(read_nbytes <= sum(weight.nbytes for weight in trained.weights))  # in the first of three steps
else:
    model = chunkc.place(torch.nn.Linear(64, 64), device="cuda")
    optimizer = getattr(chunkc.optim, {update!r})(model.parameters(), lr=1e-2)
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    print(model.weight.is_cuda)
"""
    assert on_a_device("attribute.88=1", script).split() == ["True"]


def test_pinned_memory_comes_from_the_node_that_the_device_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system says by the device's address on the PCI bus."""
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0/numa_node").write_text("0\n")
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    model = chunkc.place(torch.nn.Linear(512, 512), device="cuda")
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    assert [words[1] for words in lines if int(words[0], 16) <= model.weight.data_ptr()][-1] == "prefer:0"


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


def test_a_launch_that_fails_ends_training_and_the_process() -> None:
    """No thread waits for what does not come any more: of copies, or of updates on the CPU."""
    script = """
import cuda_in_ram, torch
from device_gpt import SMALL, train
cuda_in_ram.configure(fail_launch=200)
try:
    train(SMALL, torch.float32, 1 << 34, update_on="cpu", overlap="backward")
except torch.AcceleratorError as error:
    print("failed:", "unspecified launch failure" in str(error))
"""
    assert on_a_device("late=1", script).split() == ["failed:", "True"]


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
from chunkc.machines.devices import hardware_of
from chunkc.machines.host import compute_tier_memory

hardware = hardware_of(torch.device("cuda", 0))
tables = hardware.page_table_nbytes(compute_tier_memory()[1])
print((session_of(linear).budget_nbytes / 0.9 - (total - hardware.context_nbytes - tables)) / total)
"""
    found = on_a_device("memory=0x100000000", script)
    assert abs(float(found)) < 0.03, "256 MiB of 4 GiB would be missing"


def test_an_automatic_budget_leaves_what_the_driver_is_still_to_take() -> None:
    """Its context as far as it is not there yet, and page tables of all host memory that could be mapped."""
    script = """
import torch
from dataclasses import replace
from chunkc.ir.hardware import GIB
from chunkc.machines import devices

device = torch.device("cuda", 0)
devices.compute_tier_memory = lambda: (64 * GIB, 32 * GIB)
hardware = replace(devices.hardware_of(device), context_nbytes=600 << 20)
print(torch.cuda.mem_get_info()[1] - devices.memory_of(device, hardware)[1])
import ctypes
taken = ctypes.c_void_p()
assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(500 << 20)) == 0  # the driver's, say
print(torch.cuda.mem_get_info()[1] - devices.memory_of(device, hardware)[1])
print(torch.cuda.mem_get_info()[1] - devices.memory_of(device, replace(hardware, page_table_nbytes_per_gib=0))[1])
"""
    MIB = 1 << 20
    found = [int(line) / MIB for line in on_a_device("", script).split()]
    assert found == [600 + 64, 600 + 64, 600]


def test_what_calibrate_measures_here_counts_before_the_device_s_preset() -> None:
    script = """
import os, tempfile
folder = tempfile.mkdtemp()
os.environ["XDG_CONFIG_HOME"] = folder
import torch
from chunkc.machines import devices, presets
from chunkc.machines.calibrate import Sizes, calibrate

MIB = 1 << 20
device = torch.device("cuda", 0)
assert devices.hardware_of(device).name == "h100"
sizes = Sizes(256, MIB, MIB, 1 << 16, MIB, repeats=1, share_s=0.05, enough_s=0.001, pinned_nbytes=8 * MIB)
shown = []
measured = calibrate(device=device, directory=folder, sizes=sizes, show=lambda *step: shown.append(step))
assert shown[-1][1] == shown[-1][2] == len(shown) - 1
presets.save_hardware(measured, presets.default_hardware_path())
found = devices.hardware_of(device)
print(found.name == measured.name == torch.cuda.get_device_name(), found.link("to_home") == measured.link("to_home"))
print(found.both_links_bytes_per_s == measured.both_links_bytes_per_s, found.context_nbytes == measured.context_nbytes)
print(found.page_table_nbytes_per_gib == 0, found.link("between_devices") is not None)
"""
    assert on_a_device("", script).split() == ["True"] * 6


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": ""}, "False"),
    ],
    ids=["nothing", "older name"],
)
def test_the_allocator_splits_exactly_unless_the_user_has_decided_otherwise(
    config: dict[str, str], expected: str
) -> None:
    script = """
import chunkc, torch
from device_gpt import SMALL, train
train(SMALL, torch.float32, 1 << 34, steps=1)
print({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""
    assert on_a_device("", script, **config).strip() == f"{{{expected}}}"


def test_what_the_allocator_had_to_try_again_is_reported() -> None:
    assert train(SMALL, torch.float32, HUGE).report.num_allocator_retries == 0
    torch.cuda.empty_cache()
    with cuda_in_ram.choose(fail_malloc=1):
        report = train(SMALL, torch.float32, HUGE).report
    assert report.num_allocator_retries == 1
    assert "allocator retries  1" in str(report)
