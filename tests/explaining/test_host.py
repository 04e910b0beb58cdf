"""What a model takes of the host's memory, from its construction on."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import chunkc
from chunkc.explaining.formats import render_text
from chunkc.ir.explanation import Explanation, HostNeeds

WIDTH = 256
MATRIX_NBYTES = 4 * WIDTH * WIDTH
BIAS_NBYTES = 4 * WIDTH
NUM_LAYERS = 6


def explain(**options: object) -> tuple[Explanation, HostNeeds]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)), nn.Flatten(0))
        x = torch.ones(4, WIDTH)
    found = chunkc.explain(model, x, memory_budget="2MiB", chunk_size="256KiB", activations="keep", **options)
    assert found.host is not None
    return found, found.host


def test_on_a_disk_one_tensor_is_in_memory() -> None:
    found, host = explain(home="disk")
    assert found.chunks.resident == 0
    assert host.building == NUM_LAYERS * BIAS_NBYTES + 2 * MATRIX_NBYTES
    assert host.loading == host.building
    assert host.training == found.predicted_peak_nbytes
    biases = NUM_LAYERS * (4 * BIAS_NBYTES + 2 * 4)  # with gradients and states, and the counters of all
    assert host.saving == biases + 2 * MATRIX_NBYTES
    assert host.resuming == biases + 2 * MATRIX_NBYTES


def test_in_ram_all_of_home_is_in_memory() -> None:
    found, host = explain()
    parameters = NUM_LAYERS * (MATRIX_NBYTES + BIAS_NBYTES)
    assert host.building == host.loading == parameters + 2 * MATRIX_NBYTES
    assert host.training == found.predicted_peak_nbytes + found.home_nbytes
    assert host.saving >= found.home_nbytes + 2 * MATRIX_NBYTES
    text = render_text(found)
    assert all(f"{nbytes:,}" in text for nbytes in dataclasses.asdict(host).values())


def test_behind_a_gpu_the_host_has_home_alone() -> None:
    found, host = explain(hardware="rtx3090", overlap="none")
    assert host.training == found.home_nbytes
    assert host.saving == found.home_nbytes + 2 * MATRIX_NBYTES
    on_disk, host_of_disk = explain(hardware="rtx3090", home="disk", overlap="none")
    assert on_disk.disk_nbytes == 2 * NUM_LAYERS * MATRIX_NBYTES
    assert host_of_disk.building == host.building
    assert host_of_disk.training == found.home_nbytes - on_disk.disk_nbytes


def test_what_an_older_version_wrote_has_no_host() -> None:
    found, _ = explain()
    values = found.to_dict()
    del values["host"]
    assert Explanation.from_dict(values).host is None
