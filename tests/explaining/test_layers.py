"""A model whose layers several ranks compute together, explained without any rank: what each has, and exchanges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import chunkc
from chunkc.cli.command import main
from chunkc.explaining.formats import render_text
from chunkc.explaining.formats.json_ import parse_json, render_json
from chunkc.explaining.layers import fake_mesh
from chunkc.explaining.over_ranks import with_ranks
from chunkc.ir.errors import ChunkcError, OptionsError, UnsupportedError
from chunkc.ir.explanation import Explanation
from chunkc.ir.hardware import CPU
from chunkc.ir.links import BETWEEN_DEVICES, BETWEEN_HOSTS
from chunkc.machines.presets import load_hardware
from chunkc.models import MODELS, registry

WIDTH, INNER, BATCH, NUM_BLOCKS = 64, 256, 8, 2
ROOMY = 1 << 30
MATRIX_NBYTES = 4 * WIDTH * INNER
SUM_NBYTES = 4 * BATCH * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(mesh: DeviceMesh | None) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        if mesh is not None:
            plan: dict[str, Any] = {}
            for at in range(NUM_BLOCKS):
                plan |= {f"{at}.up": ColwiseParallel(), f"{at}.down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
    return model


def explain(mesh: str, **options: Any) -> Explanation:
    hardware = options.pop("hardware", CPU)
    machine = with_ranks(hardware if not isinstance(hardware, str) else load_hardware(hardware), None, mesh)
    x = torch.ones(BATCH, WIDTH, device="meta", requires_grad=True)
    with fake_mesh(machine) as on_paper:
        return chunkc.explain(blocks(on_paper), x, hardware=machine, **{"memory_budget": ROOMY, **options})


def test_a_rank_has_its_part_of_its_share_of_each_layer() -> None:
    alone = explain("1x1")
    for mesh, num_parts in (("1x1x2", 2), ("1x1x4", 4), ("2x2x2", 4)):
        found = explain(mesh)
        assert found.fits
        assert found.num_parameters == alone.num_parameters == 2 * NUM_BLOCKS * WIDTH * INNER
        assert found.ranks.num_parameters * num_parts == found.num_parameters, mesh
        assert found.home_nbytes * num_parts == 4 * alone.num_parameters * 4
        assert found.ranks.layers.num_ranks == int(mesh[-1])


def test_layers_need_less_memory_than_parts_of_whole_ones() -> None:
    """What is gathered is this rank's share of a layer."""
    parts, shared = explain("1x4", zero_stage=3), explain("1x2x2", zero_stage=3)
    assert shared.minimum_budget_nbytes < parts.minimum_budget_nbytes
    assert sum(group.nbytes for group in shared.ranks.groups) == NUM_BLOCKS * MATRIX_NBYTES


def test_each_block_adds_up_its_products_in_the_forward_and_its_gradients_in_the_backward() -> None:
    found = explain("1x2x4", hardware="8xh100")
    layers = found.ranks.layers
    assert layers.collectives == 2 * NUM_BLOCKS
    assert layers.nbytes == 2 * NUM_BLOCKS * 2 * SUM_NBYTES * 3 // 4
    link = load_hardware("8xh100").link(BETWEEN_DEVICES)
    ring_s = 2 * (SUM_NBYTES * 3 / 4 / link.bytes_per_s + 3 * link.latency_s)
    assert 0 < layers.seconds <= 2 * NUM_BLOCKS * ring_s
    calls = [event for event in found.events if event.kind == "call"]
    assert sum(event.end_s - event.start_s for event in calls) > layers.seconds, "they are calls of the step"
    assert found.ranks.link_nbytes[BETWEEN_DEVICES] > layers.nbytes
    text = render_text(found)
    assert "collectives of layers, in one step" in text
    assert any("4 ranks compute each layer together" in note for note in found.notes)
    assert parse_json(render_json(found)) == found


def test_layers_on_several_hosts_take_the_link_between_hosts() -> None:
    inside, across = (explain(mesh, hardware="2x8xh100").ranks for mesh in ("1x2x8", "1x1x16"))
    assert (inside.num_hosts, across.num_hosts) == (2, 2)
    assert across.layers.seconds > inside.layers.seconds
    assert inside.link_nbytes[BETWEEN_DEVICES] == inside.layers.nbytes, "parts are exchanged between hosts alone"
    assert across.link_nbytes[BETWEEN_HOSTS] == across.layers.nbytes


@contextmanager
def ranks_of_a_layer(num_ranks: int) -> Iterator[DeviceMesh]:
    with fake_mesh(with_ranks(CPU, None, f"1x1x{num_ranks}")) as mesh:
        assert mesh is not None
        yield mesh


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "over 2 ranks: say so in the last of three numbers of mesh"),
        ({"world_size": 4}, "over 2 ranks: say so in the last of three numbers of mesh"),
        ({"mesh": "1x2x4"}, "over 2 ranks: say so in the last of three numbers of mesh"),
        ({"mesh": "1x2x2", "activations": "rerun"}, "distributed models keep what the forward saves"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with ranks_of_a_layer(2) as mesh, pytest.raises(ChunkcError, match=message):
        chunkc.explain(blocks(mesh), torch.ones(BATCH, WIDTH, device="meta"), hardware="cpu", **options)


def test_a_model_with_whole_layers_is_refused() -> None:
    with pytest.raises(OptionsError, match="mesh says that 2 devices compute each layer together, but parallelize_mod"):
        chunkc.explain(blocks(None), torch.ones(BATCH, WIDTH, device="meta"), hardware="cpu", mesh="1x2x2")


def test_sizes_in_symbols_are_refused() -> None:
    x = torch.ones(BATCH, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    with ranks_of_a_layer(2) as mesh, pytest.raises(UnsupportedError, match="PyTorch traces no DTensors with symbols"):
        chunkc.explain(blocks(mesh), x, hardware="cpu", mesh="1x1x2")


def test_the_model_stays_as_it_is() -> None:
    with ranks_of_a_layer(2) as mesh:
        model = blocks(mesh)
        before = dict(model.named_parameters())
        chunkc.explain(model, torch.ones(BATCH, WIDTH, device="meta"), hardware="cpu", mesh="1x1x2")
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        assert [type(module) for module in model] == [Block] * NUM_BLOCKS


def test_no_process_group_is_left() -> None:
    with ranks_of_a_layer(2):
        with pytest.raises(OptionsError, match="is in a process group"), ranks_of_a_layer(2):
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()
    with fake_mesh(CPU) as mesh:
        assert mesh is None
        assert not dist.is_initialized()


FACTORIES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def build(batch_size=8, mesh=None):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    if mesh is not None:
        parallelize_module(model, mesh["tp"], PLAN)
    return model, (torch.randn(batch_size, 64),)


def own_mesh(batch_size=8):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return build(batch_size, mesh)


def whole():
    return build()
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(FACTORIES)
    return "nets.py"


def test_a_factory_gets_the_mesh_or_makes_its_own(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for factory in ("build", "own_mesh"):
        ask = ["explain", f"{factories}:{factory}", "--hardware", "4xh100", "--mesh", "1x2x2", "--format", "json"]
        assert main(ask) == 0
        found.append(json.loads(capsys.readouterr().out))
        found[-1].pop("model")
    assert found[0] == found[1]
    assert found[0]["ranks"]["layers"]["collectives"] == 1, "its input needs no gradient"
    assert found[0]["num_parameters"] == 2 * 64 * 256 + 256 + 64
    assert found[0]["ranks"]["num_parameters"] == 64 * 256 // 2 + 64 + 32
    assert not dist.is_initialized()


def test_the_largest_batch_is_searched_size_by_size(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["explain", f"{factories}:build", "--hardware", "4xh100", "--mesh", "1x2x2", "--memory-budget", "71MiB"]
    assert main([*ask, "--largest", "batch_size"]) == 0
    text = capsys.readouterr().out
    assert "is the largest that fits" in text
    assert "PyTorch traces no DTensors with symbols for sizes" in " ".join(text.split())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["nets.py:whole"], "parallelize_module has cut none"),
        (["--module", "transformers:GPT2LMHeadModel"], "--module builds a model with whole layers"),
        (["mixtral-8x7b"], "chunkc does not know how to cut the layers of mixtral-8x7b"),
        (["gpt2-xl"], "the layers of gpt2-xl cannot be cut over 2 devices: every device"),
    ],
)
def test_what_cannot_be_cut_is_said(
    factories: str, target: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *target, "--hardware", "4xh100", "--mesh", "1x2x2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        pytest.param("gpt2-small", 4, marks=pytest.mark.second_tier),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("bert-base", 6), ("vit-base-32", 4), ("llama3-1b", 7))),
    ],
)
def test_built_in_models_are_cut_as_megatron_cuts_them(
    name: str, sums: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums in the forward of each block, and in its backward one for each matrix whose columns are cut."""
    found, num_layers = [], 2
    config = replace(MODELS[name].config, num_layers=num_layers)  # type: ignore[call-arg]
    monkeypatch.setattr(registry, "MODELS", {name: replace(MODELS[name], config=config)})
    for mesh in ("1x1", "1x1x2"):
        ask = ["explain", name, "--hardware", "4xh100", "--mesh", mesh, "--batch-size", "1", "--format", "json"]
        assert main(ask) == 0
        found.append(json.loads(capsys.readouterr().out))
    whole, shared = found
    assert shared["num_parameters"] == whole["num_parameters"]
    assert shared["ranks"]["layers"]["collectives"] == num_layers * sums
    assert shared["predicted_peak_nbytes"] < whole["predicted_peak_nbytes"]


def test_hardware_of_a_file_may_say_it(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"based_on": "4xh100", "devices_per_layer": 2}))
    assert load_hardware(str(path)) == replace(load_hardware("4xh100"), devices_per_layer=2)
