"""The demonstration: its command line, its verdicts, its figures, and its runs in processes of their own. Its text:
which files, in which order, and crops that a seed fixes.
"""

import json
from pathlib import Path
from typing import Any

import demo
import numpy as np
import pytest
import torch
from demo import SIZES, RunFailed, RunResult, judge, run_in_process, summarise
from measuring.one_run import RunSpec
from models.gpt import GPT
from models.text import batches, stdlib_text

from chunkc.models import num_parameters


def test_the_model_has_at_least_twenty_million_parameters():
    with torch.device("meta"):
        assert 20e6 <= num_parameters(GPT(SIZES["small"][0])) <= 25e6


def test_the_model_is_causal_and_its_loss_starts_at_that_of_chance():
    torch.manual_seed(0)
    config, _ = SIZES["tiny"]
    model = GPT(config)
    x = torch.randint(256, (2, config.length), requires_grad=False)
    loss = model(x, x)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # log(256)
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    changed = x.clone()
    changed[:, -1] += 1
    model(x, x)
    model(changed % 256, x)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


def _result(losses: tuple[float, ...] = (3.0, 2.0, 1.0, 0.5), **end: Any) -> RunResult:
    report = {
        "predicted_peak_nbytes": 95,
        "chunk_size_nbytes": 4096,
        "num_chunks": 3,
        "traffic_nbytes": {"to_device": 10, "to_home": 20},
        "time_s": {"compile": 1.0},
    }
    fields = {"event": "end", "measured_peak_nbytes": 90, **report, **end}
    return RunResult(22_000_000, losses, (10.0, 3.0, 1.0, 2.0)[: len(losses)], fields)


def _summary(limited: RunResult | None = None) -> dict[str, Any]:
    plain = RunResult(22_000_000, (3.0, 2.0, 1.0, 0.5005), (8.0, 2.0, 1.0, 1.0), {"measured_peak_nbytes": 300})
    return summarise(plain, limited or _result(), _result(), 100)


@pytest.mark.parametrize(
    ("limited", "broken"),
    [
        (_result(), ()),
        (_result(measured_peak_nbytes=96), (0,)),
        (_result(predicted_peak_nbytes=101, measured_peak_nbytes=100), (0,)),
        (_result(predicted_peak_nbytes=100, measured_peak_nbytes=90), (1,)),
        (_result((3.0, 2.0, 1.0, 0.5 + 1e-12)), (2,)),
        (_result((3.0, 2.0, 1.0, 0.49)), (2, 3)),
        (_result((3.0, float("nan"), 1.0, 0.5)), (2, 3)),
    ],
)
def test_each_broken_promise_is_noticed(limited: RunResult, broken: tuple[int, ...]):
    kept = list(judge(_summary(limited)).values())
    assert [index for index, ok in enumerate(kept) if not ok] == list(broken)


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path: Path):
    (tmp_path / "short").write_text("too short")
    spec = RunSpec("plain", SIZES["tiny"][0], 2, 3, 0, 3e-4, data=str(tmp_path / "short"))
    events: list[dict[str, Any]] = []
    with (tmp_path / "log").open("w") as log:
        log.write("an earlier run\n")
        log.flush()
        with pytest.raises(RunFailed, match="the text has 9 bytes") as caught:
            run_in_process(spec, log, events.append)
    assert "an earlier run" not in str(caught.value)
    assert [event["event"] for event in events] == ["begin"]


@pytest.mark.parametrize(("measured_nbytes", "exit_code"), [(90, 0), (99, 1)])
def test_the_driver_runs_all_three_and_leaves_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured_nbytes: int, exit_code: int
):
    specs: list[RunSpec] = []

    def run(spec: RunSpec, _log: Any, on_event: Any) -> RunResult:
        specs.append(spec)
        on_event({"event": "begin", "num_parameters": 1})
        on_event({"event": "step", "step": 0, "loss": 3.0, "step_s": 1.0})
        if spec.mode == "plain":
            return _result(measured_peak_nbytes=302)
        moments = [["forward", 95, measured_nbytes], ["backward", 90, None]]
        return _result(measured_peak_nbytes=measured_nbytes, moments=moments, plan_text="the plan")

    monkeypatch.setattr(demo, "run_in_process", run)
    assert demo.main(["--out", str(tmp_path / "a/b"), "--seed", "5"]) == exit_code
    assert [(spec.mode, spec.memory_budget_nbytes, spec.is_limited) for spec in specs] == [
        ("plain", 0, False),
        ("chunkc", 302 // 3, True),
        ("chunkc", demo.UNLIMITED_NBYTES, False),
    ]
    assert {(spec.model, spec.seed, spec.num_steps) for spec in specs} == {(SIZES["small"][0], 5, 30)}
    names = {path.name for path in (tmp_path / "a/b").iterdir()}
    assert names == {"summary.json", "memory.png", "losses.png", "plan.txt", "log.txt"}
    assert (tmp_path / "a/b/plan.txt").read_text() == "the plan\n"
    summary = json.loads((tmp_path / "a/b/summary.json").read_text())
    assert all(summary["promises"].values()) == (exit_code == 0)


@pytest.mark.slow
def test_plain_runs_repeat_to_the_bit_and_are_metered(tmp_path: Path):
    spec = RunSpec("plain", SIZES["tiny"][0], 2, 4, 0, 3e-3)
    with (tmp_path / "log").open("w") as log:
        first, second = (run_in_process(spec, log, lambda _event: None) for _ in range(2))
    assert len(first.losses) == len(first.steps_s) == 4
    assert first.losses == second.losses
    assert first.losses[-1] < first.losses[0]
    states_nbytes = 16 * first.num_parameters  # parameters, gradients, two moments
    assert states_nbytes < first.end["measured_peak_nbytes"] < 3 * states_nbytes


@pytest.mark.slow
def test_the_whole_demonstration(tmp_path: Path):
    assert demo.main(["--size", "tiny", "--steps", "4", "--fraction", "3/4", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["measured_peak_nbytes"] <= summary["predicted_peak_nbytes"] <= summary["memory_budget_nbytes"]
    assert summary["losses"] == summary["unlimited_budget_losses"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan.txt").read_text().strip()


TEXT = np.arange(256, dtype=np.uint8)


def test_the_standard_library_is_a_lot_of_python_and_always_the_same():
    text = stdlib_text()
    assert len(text) > 1_000_000
    assert b"class OrderedDict" in text.tobytes()
    assert np.array_equal(text, stdlib_text())


def test_files_come_in_order_of_their_paths_without_installed_packages(tmp_path: Path):
    for name in ("b.py", "a/z.py", "a.py", "site-packages/x.py", "a/dist-packages/y.py", "note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    assert stdlib_text(tmp_path).tobytes() == b"<a.py><a/z.py><b.py>"


def test_y_is_the_next_byte_and_all_fits_a_crop_that_a_seed_fixes():
    pairs, again, other = (
        list(batches(TEXT, num_batches=50, batch_size=3, length=16, seed=seed)) for seed in (1, 1, 2)
    )
    assert len(pairs) == 50
    assert all(torch.equal(x, same) for (x, _), (same, _) in zip(pairs, again, strict=True))
    assert not all(torch.equal(x, one) for (x, _), (one, _) in zip(pairs, other, strict=True))
    assert len({tuple(row) for x, _ in pairs for row in x.tolist()}) > 1
    for x, y in pairs:
        assert x.shape == y.shape == (3, 16)
        assert x.dtype == y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert torch.equal(y, x + 1)  # of this text, each byte is one more than the one before


def test_the_shortest_text_gives_its_one_crop_and_a_shorter_one_is_an_error():
    x, y = next(batches(TEXT[:9], num_batches=1, batch_size=1, length=8, seed=0))
    assert x.tolist() == [list(range(8))]
    assert y.tolist() == [list(range(1, 9))]
    with pytest.raises(ValueError, match="8 bytes; a crop takes 9"):
        next(batches(TEXT[:8], num_batches=1, batch_size=1, length=8, seed=0))
