"""The benchmark harness: command line, arithmetic, turns, tables; and one small suite for real."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import report
import run
from measuring import subject_process
from measuring.context import Context
from measuring.metrics import Metric, Row, Section, flat, one, paired_ratios
from measuring.subject_process import SubjectFailed, SubjectProcess, Turn, interleave, rotated
from models.gpt import GPTConfig
from peers.specs import CHUNKC, SubjectSpec
from peers.subject import serve
from suites import fits

TINY = GPTConfig(num_layers=1, width=32, num_heads=2, length=16)


def _turn(*step_s: float, losses: tuple[float, ...] = (3.0,), counters: dict[str, float] | None = None) -> Turn:
    return Turn(step_s, step_s, step_s, losses, counters or {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fast"], "there is no suite 'fast'; there are fits, disk, adam, budget, scale"),
        (["fits", "disk", "--out", "a.json"], "one suite"),
        (["--out", "a.json"], "one suite"),
        (["--time-limit", "0"], "seconds above 0"),
    ],
)
def test_command_line_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        run.parse_args(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_ratios_are_taken_round_by_round():
    base = [(1.0, 1.0, 9.0), (10.0, 10.0, 10.0)]  # the machine got ten times slower
    ratios = paired_ratios([(2.0, 2.0, 2.0), (20.0, 20.0, 90.0)], base)
    assert ratios.samples == (2.0, 2.0)
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([(1.0,)], base)


def test_subjects_take_turns_and_none_profits_from_its_place():
    order: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self, num_steps: int) -> Turn:
            order.append(self.name)
            return _turn(*(float(step) for step in range(num_steps)))

    turns = interleave({name: Fake(name) for name in "abc"}, num_rounds=3, num_steps=4)
    assert "".join(order) == "abcbcacab"
    first_timed = float(subject_process.NUM_SETTLING_STEPS)
    assert [turn.step_s for turn in turns["b"]] == [tuple(first_timed + step for step in range(4))] * 3
    assert rotated("abc", 4) == ["b", "c", "a"]


def test_step_metrics():
    metrics = fits.metrics_of([_turn(2.0, 4.0)], [_turn(1.0, 3.0)], 12, 7)
    assert metrics["step"].samples == (2.0, 4.0)
    assert metrics["to plain"].samples == (1.5,)
    assert metrics["tokens/s"].samples == (6.0, 3.0)
    assert metrics["moments"].median == 7
    assert "moments" not in fits.metrics_of([_turn(2.0)], [_turn(1.0)], 12, None)


@pytest.mark.parametrize("losses", [(3.1,), (float("nan"),)])
def test_times_of_different_models_are_not_compared(losses: tuple[float, ...]):
    with pytest.raises(ValueError, match="do not train the same model"):
        fits.metrics_of([_turn(1.0, losses=losses)], [_turn(1.0)], 12, None)


def test_cells():
    def shown(unit: str, *samples: float) -> str:
        return report.cell(Metric(unit, samples).to_json())  # type: ignore[arg-type]

    assert shown("s", 0.5123) == "0.512 s"
    assert shown("s", 0.01, 0.02, 0.03) == "20 ms (15–25)"
    assert shown("s", 1234.5) == "1,234 s"
    assert shown("nbytes", 3 * 2**20) == "3.0 MiB"
    assert shown("ratio", 1.0, 1.1, 1.2) == "1.100 x (1.050–1.150)"
    assert shown("nbytes", 12 * 2**30) == "12.00 GiB"
    assert shown("per_s", 12345.6) == "12,346"
    assert shown("nbytes_per_s", 43.21e9) == "43.2 GB/s"
    assert shown("flops_per_s", 1.5e12) == "1.5 TFLOPS"
    assert shown("number", 4.7e-7) == "4.7e-07"
    assert shown("number", 4) == "4"
    with pytest.raises(ValueError, match="furlong"):
        report.cell({**one("s", 1).to_json(), "unit": "furlong"})


def test_tables_show_every_metric_that_some_row_has():
    rows = [
        Row({"subject": "plain"}, {"step": one("s", 1.0)}),
        Row({"subject": "chunkc"}, {"moments": one("number", 4), "step": one("s", 2.0)}, note="fine"),
    ]
    assert report.table([row.to_json() for row in rows]).splitlines() == [
        "| subject | moments | step | note |",
        "| --- | ---: | ---: | --- |",
        "| plain | – | 1 s |  |",
        "| chunkc | 4 | 2 s | fine |",
    ]


def _fake_suite(fails: bool) -> Callable[[Context], Iterator[Section]]:
    def suite(context: Context) -> Iterator[Section]:
        context.show("something", 0, 2)
        setting = {"num_layers": 24, "width": 1256, "is_small": context.is_small}
        yield Section("First", setting, [Row({"subject": "plain"}, {"step": flat("s", [(1.0,), (2.0,)])})])
        if fails:
            raise SubjectFailed("it fell over")
        yield Section("Second", {}, [])

    return suite


def test_a_run_writes_json_and_prints_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(run, "SUITES", {"fits": _fake_suite(fails=False)})
    out = tmp_path / "a/b.json"
    assert run.main(["fits", "--small", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["suite"], result["is_small"], result["is_complete"]) == ("fits", True, True)
    assert result["sections"][0]["rows"][0]["metrics"]["step"] == {
        "unit": "s",
        "median": 1.5,
        "quartiles": [1.25, 1.75],
        "samples": [1.0, 2.0],
    }
    assert result["hardware"]["num_cores"] >= 1
    assert result["hardware"]["ram_nbytes"] > 2**28
    assert result["versions"]["torch"].startswith("2.")
    printed = capsys.readouterr().out
    assert "### Second" in printed
    assert "24 layers, width 1,256" in printed
    assert "| plain | 1.5 s (1.25–1.75) |" in printed
    assert report.main([str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_a_run_cut_short_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "SUITES", {"fits": _fake_suite(fails=True)})
    out = tmp_path / "b.json"
    assert run.main(["fits", "--out", str(out)]) == 1
    result = json.loads(out.read_text())
    assert [section["title"] for section in result["sections"]] == ["First"]
    assert result["is_complete"] is False
    assert "sections are missing" in report.markdown(result)
    monkeypatch.setattr(run, "SUITES", {"scale": lambda _context: iter(())})
    assert run.main(["scale", "--out", str(out), "--time-limit", "1e-6"]) == 0
    assert json.loads(out.read_text())["is_complete"] is False


def test_a_subject_obeys():
    options = {"memory_budget": 2**40, "codegen": "eager", "whole_graph": "never"}
    replies: list[dict[str, Any]] = []
    serve(SubjectSpec(TINY, 2, CHUNKC, options), ["step 3", "report", "step 1"], replies.append)
    ready, steps, peaks, more = replies
    assert ready["num_parameters"] > 0
    assert len(steps["steps"]) == 3
    for step in [*steps["steps"], *more["steps"]]:
        assert step["step_s"] == pytest.approx(step["forward_backward_s"] + step["optimizer_s"])
        assert step["loss"] == pytest.approx(5.545, abs=0.3)  # log(256)
    assert peaks["num_moments"] > 4
    assert set(steps["counters"]) == {"to_device_nbytes", "to_home_nbytes", "wait_s", "host_s", "num_instructions"}


def test_a_subject_says_what_would_fit_and_knows_no_other_commands():
    options = {"memory_budget": 1, "codegen": "eager", "whole_graph": "never"}
    replies: list[dict[str, Any]] = []
    with pytest.raises(ValueError, match="jump"):
        serve(SubjectSpec(TINY, 2, CHUNKC, options, is_placed=True), ["step 1", "jump"], replies.append)
    assert replies[1]["minimum_nbytes"] > 1


@pytest.mark.slow
def test_a_subject_that_fails_says_why():
    spec = SubjectSpec(TINY, 2, CHUNKC, {"memory_budget": 2**40, "codegen": "fortran"})
    with SubjectProcess(spec) as subject:
        assert subject.ready["num_parameters"] > 0
        with pytest.raises(SubjectFailed, match="fortran"):
            subject.step(1)


def test_a_failure_of_chunkc_is_a_failure_of_the_suite_and_a_peers_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def suite(rows: list[Row]) -> Callable[[Context], Iterator[Section]]:
        return lambda _context: iter([Section("Only", {}, rows)])

    peer = Row({"system": "other"}, {}, note="it is not installed")
    bad = Row({"system": "chunkc"}, {}, note="it fell over", is_failure=True)
    for rows, code in (([peer], 0), ([peer, bad], 1)):
        monkeypatch.setattr(run, "SUITES", {"adam": suite(rows)})
        assert run.main(["adam", "--out", str(tmp_path / "c.json")]) == code
    captured = capsys.readouterr()
    assert "FAILED Only: chunkc: it fell over" in captured.err
    assert "| chunkc | **FAILED** it fell over |" in captured.out


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch):
    class Sleeper:
        SCRIPT = "measuring/context.py"  # reads nothing, prints nothing, ends

        def to_json(self) -> str:
            return "{}"

    process = subject_process.Process(Sleeper())
    with pytest.raises(SubjectFailed, match="exit code 0"), process:
        pass
    with pytest.raises(SubjectFailed, match="no answer within 0 s"), subject_process.Process(Sleeper(), timeout_s=0.0):
        pass


_HANGING = """
import signal, sys, threading, time
sys.path.insert(0, {bench!r})
from measuring.subject_process import only_replies

def a_lock_that_never_opens():
    time.sleep(1000)

reply = only_replies()
threading.Thread(target=a_lock_that_never_opens, daemon=True).start()
reply({{"ready": 1}})
a_lock_that_never_opens()
"""


def test_a_process_that_hangs_says_where_and_is_not_waited_for_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "hanging.py").write_text(_HANGING.format(bench=str(Path(subject_process.__file__).parents[1])))

    class Hanging:
        SCRIPT = str(tmp_path / "hanging.py")

        def to_json(self) -> str:
            return "{}"

    process = subject_process.Process(Hanging(), timeout_s=60.0)
    with process:
        process._timeout_s = 0.5
        with pytest.raises(subject_process.TimedOut) as caught:
            process.ask("anything")
        assert str(caught.value).count("in a_lock_that_never_opens") == 2  # of both threads
        monkeypatch.setattr(process, "_has_ended_within", lambda seconds: waited.append(seconds) is not None)
        waited: list[float] = []
    assert waited == [subject_process._EXIT_TIMEOUT_S, subject_process.REAP_S]
    assert process.exit_note == "its process had not ended 30 s after it was killed"
    assert process.exit_note in capsys.readouterr().err
    process._process.wait(60)


def test_a_title_that_comes_again_takes_the_place_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [Row({"system": "chunkc"}, {}, note=note) for note in ("one", "two")]
    sections = [Section("A", {}, rows[:1]), Section("B", {}, ()), Section("A", {}, rows[1:])]
    monkeypatch.setattr(run, "SUITES", {"fits": lambda _context: iter(sections)})
    out = tmp_path / "e.json"
    assert run.main(["fits", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["sections"]
    assert [section["title"] for section in found] == ["A", "B"]
    assert found[0]["rows"][0]["note"] == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
