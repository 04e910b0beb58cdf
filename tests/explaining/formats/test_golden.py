"""Texts, graphs, advice and differences of small explanations, against files that a person has read.

To accept a change, delete the file under `tests/golden/` and run this file twice: the first run writes it and fails.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import EVENTS, MIB, PLAN, large, measured, not_fitting, ranked, small

from chunkc.explaining.formats import diff, render_graph, render_text, render_trace
from chunkc.explaining.formats.advice import advice
from chunkc.explaining.formats.why import MAX_HAPPENINGS, why_rows
from chunkc.ir.estimates import EstimatedOperator
from chunkc.ir.explanation import Alternative, Chunks, Explanation, Happening, Layers, Peak, StepTime, Why

GOLDEN = Path(__file__).resolve().parents[2] / "golden"

MOVED_LESS = EVENTS[2:]
SLOWER = StepTime(total=0.015, compute=0.010, to_device=0.004, to_home=0.002, optimizer=0.001, stall=0.004)
SMALL_HOST = {"host_fits": False, "host_memory_nbytes": 64 * MIB}

DIFFERENCES = {
    "nothing": (small(), small()),
    "the peak alone": (small(), small(predicted_peak_nbytes=170 * MIB)),
    "times, counts and words": (
        small(),
        small(fits=False, chunks=Chunks(size_nbytes=20 * MIB, count=3, resident=0), step_time_s=SLOWER),
    ),
    "ranks": (small(), ranked()),
    "a chunk that ceases to move": (small(), small(events=MOVED_LESS)),
    "a chunk that begins to move": (small(events=MOVED_LESS), small()),
    "a chunk that moves more often": (small(), small(events=(*EVENTS, EVENTS[5]))),
    "waiting, which is not moving": (small(), small(events=(EVENTS[0], *EVENTS[2:]))),
    "a line of the plan": (small(), small(plan_text=PLAN.replace("    prefetch(param:1)\n", ""))),
    "a note, which is outside the summary": (small(), small(notes=())),
}


def filled(option: str = "auto", **mib: int) -> Explanation:
    """What does not fit for what these kinds take, in MiB."""
    contents = {f"{kind}: m": n * MIB for kind, n in mib.items()}
    return not_fitting(peak=Peak("forward.0", "aten.mm", "head", contents), activations=option)


ADVICE = {
    "it fits": small(),
    "the device has as much": not_fitting(),
    "the device has less": not_fitting(device_memory_nbytes=200 * MIB),
    "activations": filled(activations=90, temporaries=10),
    "activations that are kept": filled("keep", activations=90),
    "temporaries": filled(activations=10, temporaries=90),
    "slots": filled(slots=90, activations=10),
    "slots, and few temporaries": filled(slots=90, temporaries=10),
    "the host is too small": small(**SMALL_HOST, disk_nbytes=0),
    "the host is too small beside states on disk": small(**SMALL_HOST),
    "so is a CPU's memory": small(**SMALL_HOST, device_is_host=True),
    "everything is on disk": small(**SMALL_HOST, device_is_host=True, disk_nbytes=small().home_nbytes),
    "ranks": ranked(host_fits=False),
    "ranks on a CPU": ranked(host_fits=False, device_is_host=True),
}


def layers() -> Explanation:
    """Of ranks that compute layers together."""
    ranks = ranked().ranks
    assert ranks is not None
    return ranked(ranks=replace(ranks, layers=Layers(4, 48, 30 * MIB, 0.002)))


def sections(texts: dict[str, str]) -> str:
    return "\n".join(f"=== {title}\n{text}" for title, text in texts.items())


def happening(**changes: object) -> Happening:
    values: dict[str, Any] = {"at_s": 0.5, "phase": "forward", "item": "param:1", "what": "fetched", "nbytes": MIB}
    values |= {"copy_s": 0.0, "stall_s": 0.0, "before": "forward.2", "module": "layers.2"}
    return Happening(**values | changes)


def part(item: str, what: str, copy_s: float, stall_s: float = 0.0, phase: str = "update") -> Happening:
    return happening(phase=phase, item=item, what=what, copy_s=copy_s, stall_s=stall_s, before="update.1")


HAPPENINGS = {
    "a copy, a late one and the end": (
        happening(copy_s=0.25),
        happening(what="needed", stall_s=0.125),
        happening(what="let go", before="", module=""),
    ),
    "parts of an update, of which each kind is one line": (
        part("param:1[0:8]", "fetched", 0.25),
        part("param:1[0:8]", "needed", 0.0, 0.5),
        part("param:1[8:16]", "fetched", 0.25),
        part("grad:1", "let go", 0.0, phase="backward"),
        part("param:1[8:16]", "let go", 0.0),
        part("param:1[8:16]", "needed", 0.0),
        part("param:1[0:8]", "copied home", 0.125),
    ),
    "what never moves": (),
    "too many to show": (happening(),) * (MAX_HAPPENINGS + 1200),
}
ALTERNATIVES = (
    Alternative("slow", 3.0),
    Alternative("fast", 1.5),
    Alternative("same", 2.0),
    Alternative("no", None, 4096),
)


def answers() -> str:
    """Answers to `--why` about a step of two seconds in a budget of 1 GiB; of many rows, the last ones."""
    asked = {title: Why("layers.2", ("param:1: moves",), happenings, ()) for title, happenings in HAPPENINGS.items()}
    asked["alternatives"] = Why("layers.2", (), (), ALTERNATIVES)
    lines = {title: list(why_rows(why, 2.0, 1 << 30)) for title, why in asked.items()}
    assert len(dict(lines["too many to show"])["what happens to it, in one step"]) == MAX_HAPPENINGS + 1
    return sections(
        {
            title: "".join(
                f"{head}\n" + "".join(f"  {' | '.join(row).rstrip()}\n" for row in rows[-8:]) for head, rows in of
            )
            for title, of in lines.items()
        }
    )


UNMETERED = measured(peak_nbytes=None, moments=(("forward.0", None),), time_s={})

DUMPS = {
    "explain_fits.txt": lambda: render_text(small()),
    "explain_does_not_fit.txt": lambda: render_text(not_fitting()),
    "explain_measured.txt": lambda: render_text(small(measured=measured())),
    "explain_unmetered.txt": lambda: render_text(small(measured=UNMETERED)),
    "explain_large.txt": lambda: render_text(large(12)),
    "explain_ranks.txt": lambda: render_text(ranked()),
    "explain_layers.txt": lambda: render_text(layers()),
    "explain_ranks_on_cpu.txt": lambda: render_text(ranked(device_is_host=True, host_fits=False)),
    "explain_guesses.txt": lambda: render_text(small(estimates=(EstimatedOperator("lib::odd", "model.mix", 3 * MIB),))),
    "explain_bare.txt": lambda: render_text(
        small(moments=(), events=(), notes=(), peak=Peak("", "", "", {}), device_memory_nbytes=None)
    ),
    "explain_advice.txt": lambda: sections(
        {title: "".join(f"{line}\n" for line in advice(of)) for title, of in ADVICE.items()}
    ),
    "explain_why.txt": answers,
    "explain_graph.py.txt": lambda: render_graph(small()),
    "explain_graph_does_not_fit.py.txt": lambda: render_graph(not_fitting()),
    "explain_no_graph.py.txt": lambda: render_graph(small(graphs={})),
    "explain_trace.txt": lambda: render_trace(small(measured=measured())),
    "explain_trace_of_ranks.txt": lambda: render_trace(ranked()),
    "explain_diff.txt": lambda: diff(
        small(),
        not_fitting(events=MOVED_LESS, home_nbytes=180 * MIB, plan_text=PLAN.replace("groups: [0]", "groups: none")),
    ),
    "explain_diffs.txt": lambda: sections({title: diff(*of) for title, of in DIFFERENCES.items()}),
}


@pytest.mark.parametrize("name", DUMPS)
def test_dumps_are_as_they_were(name: str) -> None:
    dump, path = DUMPS[name](), GOLDEN / name
    if not path.exists():
        path.write_text(dump)
        pytest.fail(f"{path} was missing and has been written: read it")
    assert dump == path.read_text()


def test_nothing_is_left_over() -> None:
    assert {path.name for path in GOLDEN.glob("explain_*")} == set(DUMPS)
