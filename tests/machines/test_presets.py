"""Machines by name and by file: plausible figures, exact round trips, errors that help."""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import CPU, GIB, Hardware
from chunkc.ir.links import LinkSpec, host_links
from chunkc.machines.datasheets import DATASHEETS, Efficiency
from chunkc.machines.presets import (
    PRESETS,
    default_hardware_path,
    load_hardware,
    preset,
    read_hardware,
    save_hardware,
    usual_host_nbytes,
)

ALL_REACHED = Efficiency(matrix=1, memory=1, link=1, both_links=1, cpu_update=1, disk=1)


def refused(text: str) -> str:
    with pytest.raises(OptionsError) as caught:
        load_hardware(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(folder: Path, content: Any, name: str = "machine.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


AMD = {"mi300x", "w7900"}
UNIFIED = {"dgx-spark"}
PCIE = {15.75: "3.0, or 8 lanes of 4.0", 31.5: "4.0", 63.0: "5.0"}


def test_all_promised_presets_are_there() -> None:
    promised = """
        rtx2060-6g rtx3090 rtx4090 rtx4060-8g rtx4060ti-16g rtx4070ti-s-16g rtx5070ti-16g rtx5080 rtx5090
        a6000 rtx6000-ada rtx-pro-6000 w7900 l4 a10g l40s v100-32g a100-40g a100-80g
        h100 h100-sxm h100-pcie h200 b200 gh200 mi300x dgx-spark cpu
    """
    assert set(PRESETS) == set(promised.split())
    assert replace(load_hardware("h100-sxm"), name="h100") == load_hardware("h100")


@pytest.mark.parametrize("name", DATASHEETS)
def test_a_datasheet_is_plausible(name: str) -> None:
    sheet = DATASHEETS[name]
    assert sheet.fp16 >= sheet.fp32
    assert sheet.bf16 in (None, sheet.fp16)
    assert sheet.tf32 is None or sheet.fp32 <= sheet.tf32 <= sheet.fp16
    assert 5 < sheet.fp32 < 200
    assert 20 < sheet.fp16 < 2500
    assert 200 <= sheet.memory_bandwidth <= 9000
    assert sheet.link in PCIE or name in {"gh200", *UNIFIED}, "NVLink-C2C"
    assert sheet.between_devices is None or sheet.between_devices > 2 * sheet.link
    assert (sheet.capability is None) == (name in AMD), "rules by capability are those of NVIDIA's libraries"
    assert re.search(r"data ?sheet|white paper", sheet.source)
    assert ("AMD" if name in AMD else "NVIDIA") in sheet.source
    assert ("counted as NVIDIA's" in sheet.source) == (name in AMD)


def test_bf16_is_missing_only_before_ampere() -> None:
    without = {name for name, sheet in DATASHEETS.items() if sheet.bf16 is None}
    assert without == {name for name, sheet in DATASHEETS.items() if sheet.capability and sheet.capability < (8, 0)}


def test_one_memory_is_not_promised_twice() -> None:
    spark = load_hardware("dgx-spark")
    assert spark.device_memory_nbytes + spark.host_memory_nbytes <= 128e9
    assert spark.both_links_bytes_per_s <= 273e9 / 2, "a copy reads and writes the memory"
    assert "a home in RAM adds no memory, only a home on disk does" in spark.source


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_everything_and_its_source(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.source
    optional = {"tf32_flops_per_s", "bf16_flops_per_s", "fp16_flops_per_s", "page_table_nbytes_per_gib"} | (
        {"capability"} if name in {"cpu", *AMD} else set()
    )
    for field in fields(Hardware):
        assert getattr(hardware, field.name) is not None or field.name in optional, field.name
    assert hardware.kind == ("cpu" if name == "cpu" else "cuda")


@pytest.mark.parametrize("name", DATASHEETS)
def test_no_preset_claims_its_peak(name: str) -> None:
    reached, peak = asdict(preset(name)), asdict(preset(name, ALL_REACHED))
    for key, value in reached.items():
        if key == "links":
            for link, best in zip(value, peak[key], strict=True):
                assert (
                    link == best
                    if name == "gh200" and link["name"] == "to_home"
                    else (0.5 * best["bytes_per_s"] < link["bytes_per_s"] < best["bytes_per_s"])
                )
        elif key.endswith("_per_s") and value is not None:
            assert 0.5 * peak[key] < value < peak[key], key
        else:
            assert value == peak[key], key


@pytest.mark.parametrize("name", DATASHEETS)
def test_orders_of_magnitude(name: str) -> None:
    h = load_hardware(name)
    assert h.device_memory_nbytes is not None
    assert 5 * GIB < h.device_memory_nbytes < 193 * GIB
    assert 0.2 * GIB < h.context_nbytes < 1 * GIB
    half = h.matrix_flops_per_s(torch.float16)
    assert h.matrix_flops_per_s(torch.float32) < h.matrix_flops_per_s(torch.float32, tf32=True) * 1.001 <= half * 1.001
    rates = {link.name: link.bytes_per_s for link in h.links}
    assert rates["to_device"] < h.both_links_bytes_per_s < rates["to_device"] + rates["to_home"]
    assert rates["to_disk"] < rates["from_disk"] < rates["to_home"] <= rates["to_device"] < h.memory_bytes_per_s
    assert h.cpu_update_bytes_per_s < h.memory_bytes_per_s
    assert rates["to_device"] < DATASHEETS[name].host_bandwidth * 1e9, "it is read from RAM"


def test_directions_of_a_link_may_differ() -> None:
    rates = {link.name: link.bytes_per_s for link in load_hardware("gh200").links}
    assert (rates["to_device"], rates["to_home"]) == (pytest.approx(0.85 * 384e9), 170e9)


def test_memory_is_less_than_on_the_box() -> None:
    box = {
        **{"rtx2060-6g": 6, "rtx3090": 24, "rtx4090": 24, "v100-32g": 32, "a100-40g": 40, "a100-80g": 80, "h100": 80},
        **{"rtx4060-8g": 8, "rtx4060ti-16g": 16, "rtx4070ti-s-16g": 16, "rtx5070ti-16g": 16, "rtx5080": 16},
        **{"rtx5090": 32, "a6000": 48, "rtx6000-ada": 48, "rtx-pro-6000": 96, "w7900": 48, "l4": 24, "a10g": 24},
        **{"l40s": 48, "h100-sxm": 80, "h100-pcie": 80, "mi300x": 192},
    }
    for name, gib in box.items():
        nbytes = load_hardware(name).device_memory_nbytes
        assert nbytes is not None
        assert 0.91 * gib * GIB < nbytes < gib * GIB, name


def test_what_has_no_unit_for_bf16_trains_in_fp16() -> None:
    for name in ("v100-32g", "rtx2060-6g"):
        hardware = load_hardware(name)
        assert hardware.bf16_flops_per_s is None
        assert hardware.flops_per_s == hardware.fp16_flops_per_s
        assert hardware.matrix_flops_per_s(torch.bfloat16) == hardware.fp32_flops_per_s


@pytest.mark.parametrize(
    ("name", "num_hosts", "num_devices", "host_gib"),
    [
        ("8xv100-32g", 1, 8, 240),
        ("8xa100-40g", 1, 8, 1024),
        ("8xa100-80g", 1, 8, 1024),
        ("4xa100-40g", 1, 4, 512),
        ("8xh100", 1, 8, 2048),
        ("2x8xh100", 2, 16, 2048),
        ("32xa100", 4, 32, 1024),
        ("4x8xa100-40g", 4, 32, 1024),
        (" 2 X 8xV100-32G", 2, 16, 240),
    ],
)
def test_hosts_of_devices(name: str, num_hosts: int, num_devices: int, host_gib: int) -> None:
    found = load_hardware(name)
    assert (found.num_hosts, found.num_devices) == (num_hosts, num_devices)
    assert found.host_memory_nbytes == host_gib * GIB, "of each host"
    assert found.name == "".join(name.lower().split())


def test_a_cluster_is_its_hosts() -> None:
    assert load_hardware("32xa100") == replace(load_hardware("4x8xa100-40g"), name="32xa100")
    assert load_hardware("1x8xh100") == load_hardware("8xh100")


def test_the_cpu_is_the_one_plans_are_made_with() -> None:
    assert load_hardware("cpu") is CPU


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("rtx309", "'rtx3090'"),
        ("a100", "'a100-40g' or 'a100-80g'"),
        ("8xv100", "'v100-32g'"),
        ("gh20", "'gh200'"),
        ("rtx4060", "'rtx4060-8g' or 'rtx4060ti-16g'"),
        ("5090", "'rtx5090'"),
        ("2xrtx-5080", "'rtx5080'"),
        ("spark", "'dgx-spark'"),
    ],
)
def test_a_near_miss_names_the_nearest(text: str, nearest: str) -> None:
    assert f"did you mean {nearest}" in refused(text)


@pytest.mark.parametrize("text", ["", "zzz", "8x", "x", "8x8x8xh100", "/tmp", "machine.toml"])
def test_a_wild_miss_names_what_is_allowed(text: str) -> None:
    message = refused(text)
    assert all(name in message for name in PRESETS)
    assert ".yaml" in message


def test_no_devices() -> None:
    for text in ("0xh100", "0x8xh100", "2x0xh100"):
        assert "at least 1" in refused(text)
    assert "more than 999,999 devices" in refused("999999x999999xh100")


@pytest.mark.parametrize("name", [*PRESETS, "8xv100-32g", "2x8xh100"])
def test_a_saved_machine_comes_back_equal(tmp_path: Path, name: str) -> None:
    hardware, path = load_hardware(name), tmp_path / "new" / "folder" / "h.json"
    save_hardware(hardware, path)
    assert load_hardware(str(path)) == hardware
    save_hardware(CPU, path)
    assert read_hardware(path) == CPU


def test_a_file_changes_a_preset_with_units(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "based_on": "2xrtx3090",
            "name": "mine",
            "host_memory_nbytes": "288GiB",
            "device_memory_nbytes": 20_000_000_000,
            "context_nbytes": 0,
            "to_device_bytes_per_s": "24.5 GB/s",
            "to_home_bytes_per_s": "22GiB/s",
            "bf16_flops_per_s": "60TFLOPS",
            "fp32_flops_per_s": "30 TFLOP/s",
            "disk_read_bytes_per_s": "2.5e9",
        },
    )
    assert load_hardware(path) == replace(
        load_hardware("2xrtx3090"),
        name="mine",
        host_memory_nbytes=288 * GIB,
        device_memory_nbytes=20_000_000_000,
        context_nbytes=0,
        links=host_links(
            24.5e9, 22.0 * GIB, from_disk=2.5e9, to_disk=load_hardware("2xrtx3090").link("to_disk").bytes_per_s
        ),
        both_links_bytes_per_s=None,
        bf16_flops_per_s=60e12,
        fp32_flops_per_s=30e12,
    )


def test_a_file_says_what_its_links_do(tmp_path: Path) -> None:
    links = {"to_device": {"bytes_per_s": "24GB/s", "latency_s": "10ms"}, "from_disk": {"latency_s": 1e-4}}
    found = load_hardware(written(tmp_path, {"based_on": "rtx3090", "name": "rtx3090", "links": links}))
    known = load_hardware("rtx3090")
    wanted = (
        LinkSpec("to_device", 24e9, 10e-3),
        known.link("to_home"),
        replace(known.link("from_disk"), latency_s=1e-4),
        known.link("to_disk"),
    )
    assert found == replace(known, links=wanted, both_links_bytes_per_s=None), "the preset's is of its own rates"
    disk = {"based_on": "rtx3090", "name": "rtx3090", "disk_read_bytes_per_s": 1e9}
    both = known.both_links_bytes_per_s
    assert load_hardware(written(tmp_path, disk)).both_links_bytes_per_s == both
    disk["to_device_bytes_per_s"] = 2e9
    assert load_hardware(written(tmp_path, disk)).both_links_bytes_per_s is None
    assert load_hardware(written(tmp_path, disk | {"both_links_bytes_per_s": 3e9})).both_links_bytes_per_s == 3e9
    whole = {"flops_per_s": 1, "memory_bytes_per_s": 1, "links": {name: {"bytes_per_s": 2} for name in FOUR_LINKS[:2]}}
    assert load_hardware(written(tmp_path, whole)).links == host_links(2.0, 2.0)
    mixed = {"to_device_bytes_per_s": 3, "links": {"to_device": {"latency_s": "1 ms"}}, "based_on": "rtx3090"}
    assert load_hardware(written(tmp_path, mixed)).link("to_device") == LinkSpec("to_device", 3.0, 1e-3)


def test_yaml_and_its_numbers_that_are_text(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = "based_on: h100  # ours\nfp16_flops_per_s: 8e14\nhost_memory_nbytes: 2TB\n"
    wanted = replace(load_hardware("h100"), fp16_flops_per_s=8e14, host_memory_nbytes=2 * 10**12)
    for name in ("a.yaml", "a.yml", "A.YAML"):
        assert load_hardware(written(tmp_path, text, name)) == wanted


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = written(tmp_path, "based_on: cpu", "a.yaml")
    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install pyyaml" in refused(path)


FOUR_LINKS = ("to_device", "to_home", "from_disk", "to_disk")
FOUR = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e11, "to_device_bytes_per_s": 1e10, "to_home_bytes_per_s": 1e10}


def test_four_figures_make_a_file(tmp_path: Path) -> None:
    assert load_hardware(written(tmp_path, FOUR)) == Hardware(1e12, 1e11, host_links(1e10, 1e10))


@pytest.mark.parametrize("missing", FOUR)
def test_a_needed_key_is_missing(tmp_path: Path, missing: str) -> None:
    message = refused(written(tmp_path, {key: value for key, value in FOUR.items() if key != missing}))
    assert f"{missing} missing" in message
    assert "based_on" in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"based_on": "h100", "host_memory": 1}, ["'host_memory'", "did you mean 'host_memory_nbytes'", "fp32_flops"]),
        ({"based_on": "h100", "zz": 1}, ["unknown key 'zz'", "cpu_update_bytes_per_s"]),
        ({"based_on": "h101"}, ["'h101'", "did you mean 'h100'"]),
        ({"based_on": 3}, ["based_on is 3", "a preset"]),
        ({"based_on": "h100", "host_memory_nbytes": "lots"}, ["host_memory_nbytes is 'lots'", '"24GiB"']),
        ({"based_on": "h100", "host_memory_nbytes": "24GB/s"}, ["host_memory_nbytes", '"24GiB"']),
        ({"based_on": "h100", "host_memory_nbytes": -1}, ["host_memory_nbytes is -1"]),
        ({"based_on": "h100", "host_memory_nbytes": True}, ["host_memory_nbytes is True"]),
        ({"based_on": "h100", "flops_per_s": "3GB/s"}, ["flops_per_s is '3GB/s'", '"71TFLOPS"']),
        ({"based_on": "h100", "to_home_bytes_per_s": 0}, ["to_home_bytes_per_s is 0", '"24GB/s"']),
        ({"based_on": "h100", "to_home_bytes_per_s": None}, ["to_home_bytes_per_s is None"]),
        ({"based_on": "h100", "links": {"moon": {}}}, ["links is", "to_device, to_home, from_disk, to_disk"]),
        ({"based_on": "h100", "links": {"to_home": {"rate": 1}}}, ["links is", '"bytes_per_s": "24GB/s"']),
        ({"based_on": "h100", "links": {"to_home": {"latency_s": -1}}}, ["links is", '"latency_s": "10us"']),
        ({"based_on": "h100", "links": 3}, ["links is 3"]),
        (
            {"based_on": "h100", "links": {"to_home": {"bytes_per_s": 1}}, "to_home_bytes_per_s": 1},
            ["to_home_bytes_per_s and links say the rate of 'to_home' twice"],
        ),
        ({**FOUR, "links": {"to_disk": {"latency_s": 1}}}, ["to_disk has no bytes_per_s"]),
        ({"based_on": "h100", "kind": "tpu"}, ["kind is 'tpu'", '"cpu" or "cuda"']),
        ({"based_on": "h100", "num_devices": 1.5}, ["num_devices is 1.5", "whole number"]),
        ({"based_on": "h100", "num_devices": 0}, ["num_devices is 0"]),
        ({"based_on": "h100", "num_hosts": 0}, ["num_hosts is 0", "whole number"]),
        ({"based_on": "h100", "num_hosts": 2}, ["2 hosts cannot share 1 devices"]),
        ({"based_on": "h100", "name": ""}, ["name is ''", "a text"]),
        ({"based_on": "h100", "context_nbytes": "200GiB"}, ["context_nbytes leaves nothing"]),
        ({"based_on": "h100", "kind": "tpu", "name": 3}, ["kind is 'tpu'", "name is 3"]),
        ('{"based_on": "h100", "flops_per_s": NaN}', ["flops_per_s is nan"]),
        ([1, 2], ["maps names to figures"]),
        ("{", ["not JSON"]),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, content: Any, parts: list[str]) -> None:
    path = written(tmp_path, content)
    message = refused(path)
    assert path in message
    for part in parts:
        assert part in message


def test_broken_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    assert "not YAML" in refused(written(tmp_path, "a: [1\nb: }", "a.yaml"))
    assert "maps names to figures" in refused(written(tmp_path, "", "b.yaml"))
    assert "unknown key 3" in refused(written(tmp_path, "3: 4", "c.yaml"))


def test_the_default_path_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    in_home = tmp_path / "me" / ".config" / "chunkc" / "hardware.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert default_hardware_path() == tmp_path / "config" / "chunkc" / "hardware.json"
    for ignored in ("", "relative/config"):
        monkeypatch.setenv("XDG_CONFIG_HOME", ignored)
        assert default_hardware_path() == in_home
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert default_hardware_path() == in_home


def test_a_host_is_usual_until_it_is_stated() -> None:
    gpu, several = load_hardware("rtx3090"), load_hardware("8xv100-32g")
    assert usual_host_nbytes("rtx3090") == gpu.host_memory_nbytes == 64 * GIB
    assert usual_host_nbytes("8xv100-32g") == several.host_memory_nbytes
    assert usual_host_nbytes("my machine") is None
