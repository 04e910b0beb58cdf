"""Lightning's Trainer and Fabric with two processes, beside one; see `lightning_ranks`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import forked
import lightning
import lightning_ranks as on_ranks
import pytest
import torch

import chunkc
from chunkc.lightning import ChunkcStrategy

SCRIPT = Path(on_ranks.__file__)
BY_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launched(folder: Path, *cases: str, launcher: tuple[str, ...] | list[str] = ()) -> dict[str, Any]:
    """What came of cases; Lightning itself starts the second process unless a launcher is given."""
    command = [*launcher, str(SCRIPT), str(folder), *cases]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = forked.run(*command, environment=environment, starts=["chunkc.lightning"])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def plain(folder: Path, resume: Path | None = None) -> Any:
    """Lightning and PyTorch alone, in one process, with all ranks' batches together."""
    module = on_ranks.Module(torch.optim.AdamW)
    on_ranks.fitted(module, folder, "auto", 1, resume)
    return module


@pytest.mark.second_tier
def test_several_processes_train_save_and_resume_as_one_does(tmp_path: Path) -> None:
    """Accumulation, clipping, validation, the schedule, tied weights; the same bits after a resume; one file."""
    alone = plain(tmp_path / "plain")
    found = launched(tmp_path, "train", "mistakes")
    trained = found["train"]
    assert trained["losses"] == pytest.approx(alone.losses, rel=1e-6)
    assert trained["validated"] == pytest.approx(alone.validated, rel=1e-6)
    assert trained["stage 1"] == pytest.approx(alone.losses, rel=1e-6)
    in_stage_1, as_planned = trained["scattered"]
    assert 2 * in_stage_1 == as_planned, "once in each step, instead of once in each of its two batches"
    assert trained["resumed on meta"] == {"losses": trained["losses"][4:], "bits": trained["bits"]}

    by_one, by_ranks = (
        torch.load(tmp_path / name / "epoch=0.ckpt", weights_only=True, mmap=True) for name in ("plain", "whole")
    )
    assert list(by_ranks["state_dict"]) == list(by_one["state_dict"])
    for name, tensor in by_one["state_dict"].items():
        torch.testing.assert_close(by_ranks["state_dict"][name], tensor, rtol=1e-5, atol=1e-6)
    tied = (by_ranks["state_dict"][f"net.{name}.weight"] for name in ("up", "again"))
    assert len({tensor.data_ptr() for tensor in tied}) == 1, "saved once"
    assert {path.suffix for path in (tmp_path / "whole").iterdir()} == {".ckpt"}, "nothing is left beside them"

    one = on_ranks.Module(chunkc.optim.AdamW)
    on_ranks.fitted(one, tmp_path / "one", ChunkcStrategy(**on_ranks.OPTIONS), 1, tmp_path / "whole" / "epoch=0.ckpt")
    assert one.losses == pytest.approx(alone.losses[4:], rel=1e-6), "one process goes on from a checkpoint of two"

    said = found["mistakes"]
    assert said["averaging"].startswith("UnsupportedError: StochasticWeightAveraging copies the model")
    assert said["sync_batchnorm"].startswith("UnsupportedError: sync_batchnorm is not supported")
    assert said["early optimizer"].startswith(
        "OptionsError: AdamW has parameters that the model does not have any more"
    )
    assert said["unwritable"].startswith("CheckpointError: no room in /proc/nowhere")


@pytest.mark.slow
def test_torchrun_starts_fabric(tmp_path: Path) -> None:
    """The optimizer is made before the model is distributed, as in one process."""
    found = launched(tmp_path, "fabric", launcher=BY_TORCHRUN)["fabric"]
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    expected, _ = on_ranks.fabric_losses(fabric, tmp_path, 1, torch.optim.AdamW, range(4))
    assert found["losses"] == pytest.approx(expected, rel=1e-6)
    assert found["again"] == found["losses"][2:]
    assert found["resumed bits"] == found["bits"]
    assert "call fabric.launch()" in found["early"]
    assert found["gathered"] == [0.0, 1.0]
    assert found["broadcast"] == 0


@pytest.mark.slow
def test_torchrun_starts_the_trainer_and_lightning_starts_fabric(tmp_path: Path) -> None:
    """They go on from a checkpoint of one process, too."""
    (tmp_path / "fabric").mkdir()
    alone = plain(tmp_path / "trainer" / "plain")
    found = launched(tmp_path / "trainer", "train", "resume", launcher=BY_TORCHRUN)
    trained = found["train"]
    assert trained["losses"] == pytest.approx(alone.losses, rel=1e-6)
    assert found["resume"]["resumed"] == {"losses": trained["losses"][4:], "bits": trained["bits"]}
    assert found["resume"]["of one"] == pytest.approx(alone.losses[4:], rel=1e-6)
    found = launched(tmp_path / "fabric", "fabric")["fabric"]
    assert found["again"] == found["losses"][2:]
