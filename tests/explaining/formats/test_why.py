"""The answer to `--why` as rows."""

from __future__ import annotations

from chunkc.explaining.formats.why import MAX_HAPPENINGS, why_rows
from chunkc.ir.explanation import Alternative, Happening, Why


def happening(**changes: object) -> Happening:
    values = {
        "at_s": 0.5,
        "phase": "forward",
        "item": "param:1",
        "what": "fetched",
        "nbytes": 1 << 20,
        "copy_s": 0.25,
        "stall_s": 0.0,
        "before": "forward.2",
        "module": "layers.2",
    }
    return Happening(**{**values, **changes})  # type: ignore[arg-type]


def why(happenings: int = 1, *alternatives: Alternative) -> Why:
    return Why("layers.2", ("param:1: moves",), tuple(happening() for _ in range(happenings)), alternatives)


def rows_of(asked: Why) -> dict[str, list[tuple[str, ...]]]:
    return {title: [tuple(row) for row in rows] for title, rows in why_rows(asked, 2.0, 1 << 30)}


def test_a_copy_a_late_one_and_the_end() -> None:
    one, late, end = (
        happening(),
        happening(what="needed", copy_s=0.0, stall_s=0.125),
        happening(what="let go", copy_s=0.0, before="", module=""),
    )
    _, rows, *_ = rows_of(Why("x", (), (one, late, end), ())).values()
    start = ("500 ms", "forward", "param:1")
    assert rows == [
        (*start, "fetched", "1.00 MiB", "in 250 ms", "before forward.2 of layers.2"),
        (*start, "needed", "1.00 MiB", "125 ms late", "before forward.2 of layers.2"),
        (*start, "let go", "1.00 MiB", "", "at the end"),
    ]


def test_parts_of_an_update_are_one_line_of_each_kind() -> None:
    def part(item: str, what: str, copy_s: float, stall_s: float, phase: str = "update") -> Happening:
        return happening(phase=phase, item=item, what=what, copy_s=copy_s, stall_s=stall_s, before="update.1")

    told = (
        part("param:1[0:8]", "fetched", 0.25, 0.0),
        part("param:1[0:8]", "needed", 0.0, 0.5),
        part("param:1[8:16]", "fetched", 0.25, 0.0),
        part("grad:1", "let go", 0.0, 0.0, "backward"),
        part("param:1[8:16]", "let go", 0.0, 0.0),
        part("param:1[8:16]", "needed", 0.0, 0.0),
        part("param:1[0:8]", "copied home", 0.125, 0.0),
    )
    _, rows, *_ = rows_of(Why("x", (), told, ())).values()
    where = "in an update"
    assert rows == [
        ("500 ms", "update", "2 parts of chunks", "fetched", "2.00 MiB", "in 500 ms", where),
        ("500 ms", "update", "1 part of chunks", "needed", "1.00 MiB", "500 ms late", where),
        ("500 ms", "backward", "grad:1", "let go", "1.00 MiB", "", "before update.1 of layers.2"),
        ("500 ms", "update", "1 part of chunks", "copied home", "1.00 MiB", "in 125 ms", where),
    ]


def test_what_never_moves() -> None:
    assert rows_of(why(0))["what happens to it, in one step"] == [("nothing: it is where it is all the time",)]


def test_too_many_to_show() -> None:
    rows = rows_of(why(MAX_HAPPENINGS + 1200))["what happens to it, in one step"]
    assert len(rows) == MAX_HAPPENINGS + 1
    assert rows[-1] == ("1,200 more: --format json has them",)


def test_alternatives_stand_beside_the_plan() -> None:
    others = (
        Alternative("slow", 3.0),
        Alternative("fast", 1.5),
        Alternative("same", 2.0),
        Alternative("no", None, 4096),
    )
    rows = rows_of(why(1, *others))["with all else as it is, in 1.00 GiB"]
    assert rows == [
        ("as it is planned", "2.00 s", ""),
        ("slow", "3.00 s", "1.00 s slower"),
        ("fast", "1.50 s", "500 ms faster"),
        ("same", "2.00 s", "as fast"),
        ("no", "", "needs a budget of 4.00 KiB"),
    ]
    assert "with all else as it is, in 1.00 GiB" not in rows_of(why(1))
