"""Devices by name: presets, measured figures, cautious ones; and devices that are not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import chunkc
from chunkc.ir.hardware import CPU
from chunkc.ir.links import host_links
from chunkc.machines.devices import (
    device_of,
    hardware_by_name,
    hardware_of,
    memory_of,
    parse_device,
    preset_by_name,
)
from chunkc.machines.host import compute_tier_memory
from chunkc.machines.presets import load_hardware, preset, save_hardware

GIB = 1 << 30
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GB200", 184.0, None),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32g"),
        ("NVIDIA A10G", 22.1, "a10g"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.0, "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 95.0, None),
        ("NVIDIA RTX 6000 Ada Generation", 44.4, "rtx6000-ada"),
        ("NVIDIA RTX A6000", 47.5, "a6000"),
        ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090"),
        ("NVIDIA GeForce RTX 5080", 15.5, "rtx5080"),
        ("NVIDIA GeForce RTX 5080 Laptop GPU", 15.5, None),
        ("NVIDIA GeForce RTX 5070 Ti", 15.5, "rtx5070ti-16g"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, "rtx4070ti-s-16g"),
        ("NVIDIA GeForce RTX 4070 Ti", 11.7, None),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "rtx4060ti-16g"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.7, None),
        ("NVIDIA GeForce RTX 4060", 7.75, "rtx4060-8g"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 7.75, None),
        ("NVIDIA GB10", 121.7, None),
        ("AMD Instinct MI300X", 192.0, None),
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx3090"),
        ("NVIDIA GeForce RTX 2060", 5.8, "rtx2060-6g"),
        ("NVIDIA H200 MIG 1g.18gb", 16.0, None),
        ("Tesla V100-SXM2-16GB", 15.8, None),
        ("Tesla T4", 14.6, None),
    ],
)
def test_presets_by_the_driver_s_name(name: str, gib: float, expected: str | None) -> None:
    assert preset_by_name(name, int(gib * GIB)) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("h100 h100-sxm h100-pcie h200 gh200 8xh100", (9, 0)),
        ("dgx-spark", (12, 1)),
        ("rtx5070ti-16g rtx5080 rtx5090 rtx-pro-6000 8xrtx5090", (12, 0)),
        ("b200", (10, 0)),
        ("rtx4090 rtx4060-8g rtx4060ti-16g rtx4070ti-s-16g rtx6000-ada l4 l40s", (8, 9)),
        ("rtx3090 a6000 a10g", (8, 6)),
        ("a100-40g a100-80g 4xa100-80g", (8, 0)),
        ("rtx2060-6g", (7, 5)),
        ("v100-32g 8xv100-32g", (7, 0)),
        ("cpu mi300x w7900", None),
    ],
)
def test_capabilities_of_presets(names: str, expected: tuple[int, int] | None) -> None:
    assert {load_hardware(name).capability for name in names.split()} == {expected}


def test_a_capability_survives_a_new_name_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    mine = replace(preset("rtx3090"), name="my workstation")
    save_hardware(mine, path)
    assert load_hardware(str(path)) == mine
    assert mine.capability == (8, 6)
    path.write_text('{"based_on": "2xh100", "name": "the cluster"}')
    assert load_hardware(str(path)).capability == (9, 0)
    path.write_text('{"based_on": "h100", "capability": "12.0"}')
    assert load_hardware(str(path)).capability == (12, 0)


@pytest.mark.parametrize("written", ["8.6.1", 8.6, "Hopper", [9, 0], "", True, None])
def test_a_wrong_capability_is_named(tmp_path: Path, written: object) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"based_on": "h100", "capability": written}))
    with pytest.raises(chunkc.OptionsError, match=r"capability is .* allowed: a text such as"):
        load_hardware(str(path))


def test_a_preset_with_the_device_s_own_memory(tmp_path: Path) -> None:
    found = hardware_by_name("NVIDIA H200", 140 * GIB, tmp_path / "none.json")
    assert (found.name, found.device_memory_nbytes, found.kind) == ("h200", 140 * GIB, "cuda")
    assert found.links == preset("h200").links


def test_measured_figures_of_a_gpu_before_cautious_ones(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    cautious = hardware_by_name("Tesla T4", 15 * GIB, path)
    assert (cautious.name, cautious.device_memory_nbytes) == ("Tesla T4", 15 * GIB)
    assert "cautious" in cautious.source
    save_hardware(preset("cpu"), path)
    assert hardware_by_name("Tesla T4", 15 * GIB, path) == cautious  # figures of a CPU are none of a GPU's
    save_hardware(preset("rtx3090"), path)
    assert hardware_by_name("Tesla T4", 15 * GIB, path).name == "rtx3090"


def test_figures_measured_on_a_device_of_this_name_before_its_preset(tmp_path: Path) -> None:
    """The preset's figures fill in what the file does not state: links between devices are not measured."""
    path = tmp_path / "hardware.json"
    name = "NVIDIA H100 80GB HBM3"
    measured = replace(
        preset("h100"),
        name=name,
        links=host_links(40e9, 41e9),
        both_links_bytes_per_s=60e9,
        context_nbytes=500 << 20,
        page_table_nbytes_per_gib=4096,
        tf32_flops_per_s=None,
    )
    save_hardware(measured, path)
    found = hardware_by_name(name, 79 * GIB, path)
    assert (found.link("to_device").bytes_per_s, found.both_links_bytes_per_s) == (40e9, 60e9)
    assert (found.context_nbytes, found.page_table_nbytes_per_gib) == (500 << 20, 4096)
    assert found.link("between_devices") == preset("h100").link("between_devices")
    assert (found.tf32_flops_per_s, found.device_memory_nbytes) == (preset("h100").tf32_flops_per_s, 79 * GIB)
    assert hardware_by_name("NVIDIA H200", 140 * GIB, path).name == "h200", "another device's figures"
    save_hardware(replace(CPU, name=name), path)
    assert hardware_by_name(name, 79 * GIB, path).name == "h100", "figures of a CPU"


def test_devices_that_make_sense() -> None:
    assert parse_device("cpu:0") == torch.device("cpu")
    assert memory_of(torch.device("cpu"), CPU)[0] == compute_tier_memory()[0]
    with pytest.raises(chunkc.UnsupportedError, match="on the CPU and on CUDA devices"):
        parse_device("xpu")


@needs_no_gpu
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(chunkc.UnsupportedError, match="'cuda:1', but there is no CUDA device"):
        parse_device("cuda:1")


def test_all_parameters_are_on_one_device() -> None:
    meta = nn.Linear(2, 2, device="meta")
    tensors = {"a": torch.zeros(1), **dict(meta.named_parameters())}
    with pytest.raises(chunkc.UnsupportedError, match="a is on cpu and weight is on meta"):
        device_of(tensors)
    with pytest.raises(chunkc.UnsupportedError, match="weight is on meta"):
        device_of(dict(meta.named_parameters()))
    assert device_of({}) == torch.device("cpu")


@pytest.mark.parametrize(("hip", "capability"), [(None, (9, 4)), ("6.4", None)], ids=["CUDA", "ROCm"])
def test_an_amd_device_has_no_capability_of_nvidias(
    hip: str | None, capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch gives an MI300X 9.4, which would select the rules of a Hopper."""
    properties = SimpleNamespace(name="AMD Instinct MI300X", total_memory=191 * GIB, major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert hardware_of(torch.device("cuda", 0)).capability == capability
