"""The machine's figures: what is allowed, and what is derived from them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import GIB, THROUGH_RAM, Hardware
from chunkc.ir.links import (
    BETWEEN_DEVICES,
    BETWEEN_HOSTS,
    FROM_DISK,
    GATHER,
    SCATTER,
    TO_DEVICE,
    TO_DISK,
    TO_HOME,
    LinkSpec,
    host_links,
)

PLAIN = Hardware(4.0, 3.0, host_links(2.0, 1.0))
GPU = Hardware(
    flops_per_s=8.0,
    memory_bytes_per_s=100.0,
    links=host_links(10.0, 5.0, from_disk=3.0, to_disk=2.0),
    name="gpu",
    kind="cuda",
    device_memory_nbytes=1000,
    context_nbytes=100,
    fp32_flops_per_s=1.0,
    tf32_flops_per_s=4.0,
    fp16_flops_per_s=8.0,
    both_links_bytes_per_s=7.5,
    host_memory_nbytes=5000,
    cpu_update_bytes_per_s=20.0,
)


def test_four_figures_are_enough() -> None:
    assert PLAIN.num_devices == 1
    assert PLAIN.usable_memory_nbytes is None
    assert PLAIN.matrix_flops_per_s(torch.bfloat16) == 4.0
    assert hash(PLAIN) == hash(Hardware(4.0, 3.0, host_links(2.0, 1.0)))


def test_updates_run_at_the_rate_of_the_memory_they_read() -> None:
    cores = replace(GPU, kind="cpu", context_nbytes=0)
    assert (GPU.update_bytes_per_s, cores.update_bytes_per_s, PLAIN.update_bytes_per_s) == (100.0, 20.0, 3.0)
    assert cores.times(4).update_bytes_per_s == 20.0


def test_page_tables_take_what_was_measured_or_as_for_pages_of_4_kib() -> None:
    assert GPU.page_table_nbytes(112 * 10**9) == -(-112 * 10**9 * 8 // 4096) == 218_750_000
    assert GPU.page_table_nbytes(0) == 0
    measured = replace(GPU, page_table_nbytes_per_gib=4096)
    assert (measured.page_table_nbytes(3 * GIB), measured.page_table_nbytes(1)) == (3 * 4096, 1)
    assert replace(GPU, page_table_nbytes_per_gib=0).page_table_nbytes(GIB) == 0
    assert replace(GPU, kind="cpu", context_nbytes=0).page_table_nbytes(GIB) == 0
    with pytest.raises(OptionsError, match="page_table_nbytes_per_gib is -1"):
        replace(GPU, page_table_nbytes_per_gib=-1)


def test_an_automatic_budget_leaves_room_for_page_tables() -> None:
    """Of all of the host's memory: each device maps its part of it."""
    host = replace(GPU, device_memory_nbytes=GIB, host_memory_nbytes=64 * GIB, context_nbytes=100)
    assert host.automatic_memory_nbytes == GIB - 100 - 64 * 2**21
    four = replace(host, num_devices=4)
    assert four.automatic_memory_nbytes == GIB - 100 - 16 * 2**21
    assert replace(host, host_memory_nbytes=1 << 50).automatic_memory_nbytes == 0
    assert PLAIN.automatic_memory_nbytes is None


def test_what_a_machine_does_not_state_is_the_base_s() -> None:
    base = replace(GPU, links=(*host_links(1.0, 1.0), LinkSpec("between_devices", 9.0)), page_table_nbytes_per_gib=7)
    found = replace(GPU, name="measured", both_links_bytes_per_s=None).over(base)
    assert found.links == (*GPU.links, LinkSpec("between_devices", 9.0))
    assert (found.name, found.page_table_nbytes_per_gib) == ("measured", 7)
    assert found.both_links_bytes_per_s == base.both_links_bytes_per_s
    assert replace(GPU, page_table_nbytes_per_gib=0).over(base).page_table_nbytes_per_gib == 0


@pytest.mark.parametrize(
    ("dtype", "tf32", "rate"),
    [
        (torch.float32, False, 1.0),
        (torch.float32, True, 4.0),
        (torch.float16, False, 8.0),
        (torch.float16, True, 8.0),
        (torch.bfloat16, False, 1.0),  # no unit for it: as slow as fp32
        (torch.float64, False, 8.0),  # nothing is known
    ],
)
def test_matrix_rates_by_dtype(dtype: torch.dtype, tf32: bool, rate: float) -> None:
    assert GPU.matrix_flops_per_s(dtype, tf32=tf32) == rate
    assert replace(GPU, tf32_flops_per_s=None).matrix_flops_per_s(torch.float32, tf32=tf32) == 1.0


def test_a_machine_that_trains_in_a_dtype_has_its_rate() -> None:
    for dtype, rate in ((torch.float32, 1.0), (torch.float16, 8.0), (torch.bfloat16, 1.0)):
        assert GPU.training_in(dtype) == replace(GPU, flops_per_s=rate)


@pytest.mark.parametrize(
    ("to_device", "to_home", "seconds"),
    [
        (100, 0, 10.0),
        (0, 100, 20.0),
        (100, 50, 20.0),  # 150 bytes at 7.5: both take twice as long
        (100, 100, 30.0),  # 20 s as above, then 50 bytes alone
        (0, 0, 0.0),
    ],
)
def test_links_slow_each_other(to_device: int, to_home: int, seconds: float) -> None:
    assert GPU.link_seconds({TO_DEVICE: to_device, TO_HOME: to_home}) == pytest.approx(seconds)


def test_links_that_do_not_meet_take_the_longer_time() -> None:
    assert replace(GPU, both_links_bytes_per_s=None).link_seconds({TO_DEVICE: 100, TO_HOME: 100}) == pytest.approx(20.0)
    assert replace(GPU, both_links_bytes_per_s=99.0).link_seconds({TO_DEVICE: 100, TO_HOME: 100}) == pytest.approx(20.0)


def test_more_devices_share_a_larger_machine() -> None:
    four = GPU.times(4)
    assert (four.name, four.num_devices) == ("4xgpu", 4)
    assert four.links == host_links(10.0, 5.0, from_disk=12.0, to_disk=8.0)
    larger = {"host_memory_nbytes", "cpu_update_bytes_per_s"}
    for field in fields(Hardware):
        if field.name not in ("name", "num_devices", "links"):
            factor = 4 if field.name in larger else 1
            value = getattr(GPU, field.name)
            assert getattr(four, field.name) == (value * factor if factor > 1 else value), field.name


def test_one_device_is_the_machine_itself() -> None:
    assert GPU.times(1) is GPU
    assert PLAIN.times(3).host_memory_nbytes is None


def test_more_hosts_have_as_much_each() -> None:
    two = GPU.times(4).on_hosts(2)
    assert two == replace(GPU.times(4), name="2x4xgpu", num_devices=8, num_hosts=2)
    assert two.devices_per_host == 4
    assert replace(two, kind="cpu", context_nbytes=0).update_bytes_per_s == 20.0
    assert GPU.on_hosts(1) is GPU


def test_ranks_use_a_device_each_and_no_more_hosts_than_they_need() -> None:
    machine = GPU.times(8).on_hosts(4)
    used = {ranks: machine.used_by(ranks) for ranks in (1, 8, 9, 32)}
    assert {ranks: (one.num_devices, one.num_hosts) for ranks, one in used.items()} == {
        1: (1, 1),
        8: (8, 1),
        9: (9, 2),
        32: (32, 4),
    }
    assert used[9].devices_per_host == 5
    assert machine.used_by(4, 4).devices_per_host == 1
    assert used[8] == replace(machine, num_devices=8, num_hosts=1), "all else is as it was"


def test_processes_share_a_cpu_however_many_there_are() -> None:
    cores = replace(GPU, kind="cpu", context_nbytes=0)
    assert cores.used_by(3) == replace(cores, num_devices=3)
    assert cores.used_by(4, 2) == replace(cores, num_devices=4, num_hosts=2)
    assert cores.used_by(4).update_bytes_per_s == 5.0, "they share the cores"


@pytest.mark.parametrize(("ranks", "hosts"), [(0, None), (2, 3), (2, 0), (33, None), (9, 1), (5, 5)])
def test_ranks_without_a_device_are_refused(ranks: int, hosts: int | None) -> None:
    with pytest.raises(OptionsError, match=r"ranks (on \d+ hosts)?") as caught:
        GPU.times(8).on_hosts(4).used_by(ranks, hosts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, -2])
def test_no_device_is_no_machine(count: int) -> None:
    with pytest.raises(OptionsError, match="at least one device"):
        GPU.times(count)
    with pytest.raises(OptionsError, match="at least one host"):
        GPU.on_hosts(count)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["flops_per_s", "device_memory_nbytes", "num_devices"])
def test_figures_are_positive_and_finite(field: str, value: float) -> None:
    with pytest.raises(OptionsError, match=f"{field} is {value}") as caught:
        replace(GPU, **{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((LinkSpec(TO_DEVICE, 0.0), LinkSpec(TO_HOME, 1.0)), "'to_device': bytes_per_s is 0.0"),
        ((LinkSpec(TO_DEVICE, 1.0), LinkSpec(TO_HOME, float("nan"))), "'to_home': bytes_per_s is nan"),
        ((LinkSpec(TO_DEVICE, 1.0, -1.0), LinkSpec(TO_HOME, 1.0)), "'to_device': latency_s is -1.0"),
        ((LinkSpec(TO_DEVICE, 1.0),), "no link to_home"),
        ((), "no link to_device and no link to_home"),
        ((*host_links(1.0, 1.0), LinkSpec(TO_HOME, 1.0)), "'to_home' is listed 2 times"),
        ((*host_links(1.0, 1.0), LinkSpec("moon", 1.0)), "'moon' is not known; there are to_device, to_home"),
    ],
)
def test_links_that_make_no_sense(links: tuple[LinkSpec, ...], message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        replace(GPU, links=links)
    assert "\n" not in str(caught.value)


def test_a_copy_takes_the_latencies_and_the_slowest_rate_of_its_route() -> None:
    links = (LinkSpec(TO_DEVICE, 10.0, 0.5), LinkSpec(TO_HOME, 5.0), LinkSpec(FROM_DISK, 20.0, 2.0))
    machine = replace(GPU, links=links)
    assert machine.copy_s(TO_DEVICE, 100) == pytest.approx(0.5 + 10)
    assert machine.copy_s(FROM_DISK, 100) == pytest.approx(2.5 + 10)  # the disk is faster than what is behind it
    assert GPU.copy_s(FROM_DISK, 30) == pytest.approx(10)
    assert machine.copy_s(TO_DISK, 100) == machine.copy_s(TO_HOME, 100)  # no such disk is stated


BETWEEN = (LinkSpec(BETWEEN_DEVICES, 8.0, 0.5), LinkSpec(BETWEEN_HOSTS, 2.0, 1.0))
EIGHT = replace(GPU, links=(*GPU.links, *BETWEEN)).times(4).on_hosts(2)


def test_an_exchange_is_a_copy_of_a_part_and_a_collective_between_all_ranks() -> None:
    four = EIGHT.used_by(4)
    own_s = {GATHER: 100 / 10.0, SCATTER: 100 / 5.0}
    for queue, seconds in own_s.items():
        assert four.copy_s(queue, 400) == four.exchange_s(queue, 400)
        assert four.exchange_s(queue, 400) == pytest.approx(seconds + 300 / 8.0 + 3 * 0.5)
        assert four.exchange_s(queue, 0) == 0
    assert GPU.exchange_s(GATHER, 400) == GPU.copy_s(TO_DEVICE, 400), "a rank alone has all of it"


def test_the_slower_link_decides_where_ranks_are_on_several_hosts() -> None:
    assert EIGHT.used_by(4).between_ranks == BETWEEN[0]
    assert EIGHT.used_by(4, 2).between_ranks == BETWEEN[1]
    fast_network = replace(EIGHT, links=(*GPU.links, BETWEEN[0], LinkSpec(BETWEEN_HOSTS, 20.0, 1.0)))
    assert fast_network.between_ranks == LinkSpec(BETWEEN_DEVICES, 8.0, 1.0)
    unknown = replace(EIGHT, links=(*GPU.links, BETWEEN[0]))
    assert unknown.used_by(4).exchange_s(GATHER, 400)
    with pytest.raises(OptionsError, match="does not say the link 'between_hosts'"):
        unknown.exchange_s(GATHER, 400)


def test_devices_of_a_layer_exchange_inside_their_host_where_they_fit() -> None:
    inside, whole = EIGHT.used_by(8, None, 1, 4), EIGHT.used_by(8, None, 1, 8)
    assert (inside.devices_per_row, inside.between_devices_of_a_layer) == (2, BETWEEN[0])
    assert (whole.devices_per_row, whole.between_devices_of_a_layer) == (1, BETWEEN[1])
    assert inside.carried_in_layers(30) == {BETWEEN_DEVICES: 30}
    assert whole.carried_in_layers(30) == {BETWEEN_DEVICES: 30, BETWEEN_HOSTS: 30}
    assert EIGHT.used_by(2, 2, 1, 2).carried_in_layers(30) == {BETWEEN_HOSTS: 30}
    assert GPU.times(2).used_by(2, None, 1, 2).carried_in_layers(30) == {TO_DEVICE: 30, TO_HOME: 30}


def test_parts_are_cut_over_the_devices_that_do_not_share_layers() -> None:
    """Two rows of four devices on two hosts: each device exchanges with one on the other host, and with none on its."""
    two = EIGHT.used_by(8, None, 1, 4)
    assert two.carried_nbytes(GATHER, 400) == {TO_DEVICE: 200, BETWEEN_HOSTS: 200}
    assert two.exchange_s(GATHER, 400) == pytest.approx(200 / 10.0 + 200 / 2.0 + 1.0)
    copies = EIGHT.used_by(8, 2, 2, 2)
    assert copies.carried_nbytes(GATHER, 400) == {TO_DEVICE: 200, BETWEEN_DEVICES: 200}
    assert copies.carried_nbytes(SCATTER, 400) == {TO_HOME: 200, BETWEEN_DEVICES: 200, BETWEEN_HOSTS: 200}


def test_layers_that_devices_cannot_share() -> None:
    with pytest.raises(OptionsError, match="layers of 3 devices do not divide 8"):
        replace(EIGHT, devices_per_layer=3)


def test_devices_without_a_link_exchange_through_ram() -> None:
    """Both directions at once, 7.5 bytes a second instead of 15: each at half its rate."""
    assert GPU.times(2).between_ranks == LinkSpec(THROUGH_RAM, 2.5)
    assert replace(GPU, both_links_bytes_per_s=None).times(2).between_ranks == LinkSpec(THROUGH_RAM, 5.0)


def test_devices_of_a_host_share_its_disk() -> None:
    host = GPU.times(4)
    assert host.copy_s(FROM_DISK, 30) == GPU.copy_s(FROM_DISK, 30)
    assert host.used_by(1).copy_s(FROM_DISK, 30) == pytest.approx(3), "its link is slower than the disks are"
    assert host.link_seconds({TO_DISK: 20}) == GPU.link_seconds({TO_DISK: 20}) == pytest.approx(10)


def test_what_comes_from_the_disk_crosses_the_device_s_link_too() -> None:
    assert GPU.link_seconds({TO_DEVICE: 100, FROM_DISK: 1}) == pytest.approx(10.1)
    assert GPU.link_seconds({TO_DEVICE: 100, FROM_DISK: 300}) == pytest.approx(100)
    assert GPU.link_seconds({TO_DISK: 20, TO_HOME: 30}) == pytest.approx(10)


@pytest.mark.parametrize("context", [-1, 1000, 2000])
def test_a_context_leaves_some_memory(context: int) -> None:
    with pytest.raises(OptionsError, match="context_nbytes"):
        replace(GPU, context_nbytes=context)
    assert (GPU.usable_memory_nbytes, replace(GPU, context_nbytes=0).usable_memory_nbytes) == (900, 1000)
