"""Render an explanation for a terminal: whether it fits, the peak's contents, the traffic, and the times."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console, Group
from rich.padding import Padding
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from chunkc.explaining.formats.advice import advice
from chunkc.explaining.formats.fold import Folded, by_kind, fold, kind_of
from chunkc.explaining.formats.units import share, short_seconds
from chunkc.explaining.formats.why import why_rows
from chunkc.ir.explanation import Explanation, GatheredGroup, HostNeeds, Ranks, Why
from chunkc.ir.text import printable
from chunkc.ir.units import short_nbytes

WIDTH = 110
"""Columns of the text without a terminal."""

MAX_LINES = 14
"""Modules that are named among the peak's contents."""

_GOOD, _BAD, _DIM = "green", "red", "dim"

Row = Sequence[str | Text]


def render_text(explanation: Explanation) -> str:
    """Render plain text, without colours or escape codes, the same on every machine."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, force_terminal=False, color_system=None, _environ={})
    print_text(explanation, console)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_text(explanation: Explanation, console: Console) -> None:
    """Print the same on a console of any width, in colours if it has them."""
    parts: list[Text | Padding] = [*_verdict(explanation)]
    for title, table in _tables(explanation) if explanation.why is None else _why(explanation.why, explanation):
        parts += [Text(f"\n{title}", style="bold"), Padding(table, (0, 0, 0, 2))]
    for title, lines in (("what to do", advice(explanation)), ("notes", explanation.notes)):
        if lines and explanation.why is None:
            parts += [Text(f"\n{title}", style="bold"), Padding(_list(lines), (0, 0, 0, 2))]
    segments = console.render(Group(*parts), console.options.update(highlight=False))
    console.print(Segments(segment._replace(text=printable(segment.text)) for segment in segments), end="")


def headline(explanation: Explanation) -> str:
    """Return the verdict in one line."""
    budget, peak = explanation.memory_budget_nbytes, explanation.predicted_peak_nbytes
    if not explanation.fits:
        short = short_nbytes(explanation.minimum_budget_nbytes - budget)
        return f"does not fit: the smallest budget that works is {short} more than {short_nbytes(budget)}"
    if not explanation.host_fits:
        where = "into the same memory" if explanation.device_is_host else "the host"
        return f"fits the device with {short_nbytes(budget - peak)} to spare, but home does not fit {where}"
    return f"fits, with {short_nbytes(budget - peak)} of {short_nbytes(budget)} to spare"


def _verdict(explanation: Explanation) -> Iterator[Text]:
    parameters = f"{explanation.num_parameters:,} parameters"
    yield Text.assemble(
        (explanation.model, "bold"), f" on {explanation.hardware}   {parameters}, codegen {explanation.codegen}"
    )
    yield Text(headline(explanation), style=_GOOD if explanation.fits and explanation.host_fits else _BAD)


def _tables(explanation: Explanation) -> Iterator[tuple[str, Table]]:
    yield "device memory", _device(explanation)
    of = "the peak" if explanation.fits else "the peak of the plan for the smallest budget"
    where = " in ".join(filter(None, (explanation.peak.op, explanation.peak.module)))
    source = f"\n  {explanation.peak.source}" if explanation.peak.source else ""
    yield f"{of}: {explanation.peak.moment}, {where}{source}", _peak(explanation)
    if explanation.moments:
        yield "fullest moment of each phase", _phases(explanation)
    if explanation.estimates:
        yield "guessed: what these operators take inside", _estimates(explanation)
    yield "home", _home(explanation)
    if explanation.saved_at_home:
        yield "saved values that go home between forward and backward", _saved(explanation.saved_at_home)
    if explanation.saved_again:
        title = f"saved values that the backward makes again, in {short_seconds(explanation.recompute_s)}"
        yield title, _saved(explanation.saved_again)
    if explanation.host is not None:
        yield "host memory, at most", _host(explanation.host, explanation.host_memory_nbytes)
    if (ranks := explanation.ranks) is not None:
        hosts = f"{ranks.num_hosts} host{'s' if ranks.num_hosts > 1 else ''}"
        stage = f"in stage {ranks.zero_stage} of ZeRO" if ranks.zero_stage else "in stages of ZeRO chosen per chunk"
        yield f"rank 0 of {ranks.num_ranks} on {hosts}, {stage}", _ranks(ranks, explanation)
    yield "chunks and traffic", _chunks(explanation)
    yield "step time, predicted", _time(explanation)
    if explanation.measured is not None:
        yield "measured", _measured(explanation)


def _why(why: Why, explanation: Explanation) -> Iterator[tuple[str, Table]]:
    """Yield the answer to `--why` alone."""
    budget = explanation.memory_budget_nbytes if explanation.fits else explanation.minimum_budget_nbytes
    for title, rows in why_rows(why, explanation.step_time_s.total, budget):
        num_columns = max(map(len, rows))
        yield title, _table(("",) * num_columns, rows, right=())


def _device(explanation: Explanation) -> Table:
    budget, peak = explanation.memory_budget_nbytes, explanation.predicted_peak_nbytes
    overhead, memory = explanation.overhead_nbytes, explanation.device_memory_nbytes
    measured = None if explanation.measured is None else explanation.measured.peak_nbytes
    unplanned = 0 if explanation.measured is None else explanation.measured.unplanned_nbytes
    rows: list[Row] = [
        _bytes("budget", budget),
        _bytes("smallest budget", explanation.minimum_budget_nbytes, of=budget),
        _bytes("predicted peak" if explanation.fits else "predicted peak, smallest budget", peak, of=budget),
    ]
    if measured is not None:
        rows.append(
            _bytes("measured peak", measured, f"predicted {peak - measured:+,} bytes, {_error(peak, measured)}")
        )
        if unplanned:
            rows.append(_bytes("measured besides, in no plan", unplanned))
    rows += [
        _bytes("most of activations and temporaries", explanation.non_model_peak_nbytes, of=budget),
        _bytes("overhead, apart (context, libraries)", overhead),
    ]
    if memory is not None:
        rows.append(_bytes("peak and overhead", peak + overhead, f"{share(peak + overhead, memory)} of the device"))
        rows.append(_bytes("device has", memory))
    return _table(("", "", "bytes", ""), rows, right=(1, 2))


def _peak(explanation: Explanation) -> Table:
    """List kinds, largest first, with the modules of each; the smallest modules of each kind are one line."""
    contents = explanation.peak.contents
    total = sum(contents.values())
    lines = fold(contents)
    shown = set(lines[:MAX_LINES])
    rows: list[Row] = []
    for kind, nbytes in by_kind(contents).items():
        parts = [line for line in lines if kind_of(line.label) == kind]
        if len(parts) == 1:
            rows.append(_part(str(parts[0]), nbytes, total))
            continue
        rows.append(_part(kind, nbytes, total))
        rows += [_part(f"  {_module(line)}", line.nbytes, total) for line in parts if line in shown]
        smaller = [line.nbytes for line in parts if line not in shown]
        if smaller:
            rows.append(_part(f"  {len(smaller)} smaller", sum(smaller), total))
    return _table(("", "", "bytes", ""), rows, right=(1, 2, 3))


def _module(line: Folded) -> str:
    """Return the line without its kind."""
    return str(line).partition(":")[2].strip() or "of no module"


def _part(label: str, nbytes: int, total: int) -> Row:
    return (label, short_nbytes(nbytes), f"{nbytes:,}", share(nbytes, total))


def _phases(explanation: Explanation) -> Table:
    rows: list[Row] = []
    for phase in dict.fromkeys(moment.phase for moment in explanation.moments):
        fullest = max((m for m in explanation.moments if m.phase == phase), key=lambda moment: moment.nbytes)
        rows.append((phase, short_nbytes(fullest.nbytes), f"{fullest.nbytes:,}", fullest.op, fullest.module))
    return _table(("", "", "bytes", "", ""), rows, right=(1, 2))


def _estimates(explanation: Explanation) -> Table:
    rows = [(e.operator, short_nbytes(e.nbytes), f"{e.nbytes:,}", e.module) for e in explanation.estimates]
    return _table(("", "", "bytes", ""), rows, right=(1, 2))


def _home(explanation: Explanation) -> Table:
    home, disk = explanation.home_nbytes, explanation.disk_nbytes
    memory = explanation.host_memory_nbytes
    ranks = explanation.ranks
    per_parameter = home / max(1, explanation.num_parameters if ranks is None else ranks.num_parameters)
    rows = [
        _bytes("model data at home", home, f"{per_parameter:.2f} bytes a parameter"),
        _bytes("of these in host memory", home - disk, of=memory, name="host"),
        _bytes("of these on disk", disk),
    ]
    if ranks is not None:
        what = f"{'with predicted peaks, ' if explanation.device_is_host else ''}{ranks.ranks_per_host} ranks of a host"
        rows.append(_bytes(what, explanation.host_needs_nbytes, of=memory, name="host"))
    elif explanation.device_is_host:
        rows.append(
            _bytes("with the predicted peak, in the same", explanation.host_needs_nbytes, of=memory, name="host")
        )
    if memory is not None:
        rows.append(_bytes("host has", memory))
    return _table(("", "", "bytes", ""), rows, right=(1, 2))


def _ranks(ranks: Ranks, explanation: Explanation) -> Table:
    """List a rank's exchanges, and the bytes on its links."""
    part = share(ranks.num_parameters, explanation.num_parameters)
    rows: list[Row] = [
        ("parameters of this rank", f"{ranks.num_parameters:,}", "", f"{part} of all"),
        ("chunks gathered, in one step", f"{ranks.gathers:,}", "", ""),
        ("gradients reduced and scattered", f"{ranks.scatters:,}", "", ""),
    ]
    if (layers := ranks.layers) is not None:
        takes = f"of {layers.num_ranks} ranks, in {short_seconds(layers.seconds)}"
        rows.append(("collectives of layers, in one step", f"{layers.collectives:,}", "", takes))
        rows.append(_bytes("sent in these", layers.nbytes, "each way"))
    for link, nbytes in ranks.link_nbytes.items():
        each = "each way" if link.startswith("between") else ""
        rows.append(_bytes(f"{link.replace('_', ' ')}, in one step", nbytes, each))
    rows += _alike(ranks.groups)
    return _table(("", "", "bytes", ""), rows, right=(1, 2))


def _alike(groups: Sequence[GatheredGroup]) -> Iterator[Row]:
    """Yield a line for each run of chunks that are treated alike: whether they are whole, and how often gathered."""
    for (is_whole, gathers), neighbours in groupby(groups, key=lambda group: (group.is_whole, group.gathers)):
        alike = list(neighbours)
        first, last = alike[0].chunk, alike[-1].chunk
        where = "whole on every rank" if is_whole else "not whole"
        seconds = short_seconds(sum(group.gather_s for group in alike))
        times = {1: "once", 2: "twice"}.get(gathers, f"{gathers} times")
        says = f"{where}, gathered {times} in {seconds}" if gathers else f"{where}, gathered in no step"
        yield _bytes(first if len(alike) == 1 else f"{first} to {last}", sum(group.nbytes for group in alike), says)


def _saved(nbytes: Mapping[str, int]) -> Table:
    """List modules, largest first; the smallest are one line."""
    total = sum(nbytes.values())
    lines = fold(dict(sorted(nbytes.items(), key=lambda item: -item[1])))
    rows: list[Row] = [_part("all", total, total)]
    rows += [_part(f"  {line}", line.nbytes, total) for line in lines[:MAX_LINES]]
    if smaller := [line.nbytes for line in lines[MAX_LINES:]]:
        rows.append(_part(f"  {len(smaller)} smaller", sum(smaller), total))
    return _table(("", "", "bytes", ""), rows, right=(1, 2, 3))


def _host(needs: HostNeeds, memory: int | None) -> Table:
    """List the stages of the model's life, in order."""
    rows = [_bytes(stage, nbytes, of=memory, name="host") for stage, nbytes in dataclasses.asdict(needs).items()]
    return _table(("", "", "bytes", ""), rows, right=(1, 2))


def _chunks(explanation: Explanation) -> Table:
    chunks, traffic = explanation.chunks, explanation.traffic_nbytes
    rows = [
        _bytes(f"{chunks.count:,} chunks of parameters, each", chunks.size_nbytes, f"{chunks.resident:,} resident"),
        _bytes("to the device, in one step", traffic.to_device),
        _bytes("to home, in one step", traffic.to_home),
    ]
    return _table(("", "", "bytes", ""), rows, right=(1, 2))


def _time(explanation: Explanation) -> Table:
    time = explanation.step_time_s
    rows = [
        ("forward and backward", short_seconds(time.compute), share(time.compute, time.total)),
        ("optimizer", short_seconds(time.optimizer), share(time.optimizer, time.total)),
        ("stall (waiting for copies)", short_seconds(time.stall), share(time.stall, time.total)),
        ("one step", short_seconds(time.total), ""),
        ("link to the device busy meanwhile", short_seconds(time.to_device), share(time.to_device, time.total)),
        ("link to home busy meanwhile", short_seconds(time.to_home), share(time.to_home, time.total)),
    ]
    return _table(("", "", ""), rows, right=(1, 2))


def _measured(explanation: Explanation) -> Table:
    """Compare predictions with measurements: bytes of the calls, and how the time divides."""
    assert explanation.measured is not None
    predicted: dict[str, int] = {}
    for moment in explanation.moments:
        predicted[moment.call] = max(predicted.get(moment.call, 0), moment.nbytes)
    pairs = [
        (call, predicted[call], n) for call, n in explanation.measured.moments if n is not None and call in predicted
    ]
    rows: list[Row] = [("calls metered", f"{len(pairs):,}", f"{sum(p == m for _, p, m in pairs):,} equal to the byte")]
    if pairs:
        call, expected, actual = max(pairs, key=lambda pair: abs(pair[1] - pair[2]))
        if expected != actual:
            difference = f"predicted {short_nbytes(expected)}, measured {short_nbytes(actual)}"
            rows.append(
                (f"furthest apart, {call}", f"{expected - actual:+,}", f"{difference}, {_error(expected, actual)}")
            )
    time_s = explanation.measured.time_s
    busy = time_s.get("compute", 0.0) + time_s.get("wait", 0.0)
    for key, label in (("compute", "computing so far"), ("wait", "waiting so far")):
        if key in time_s:
            of = f"{share(time_s[key], busy)} of both" if busy else ""
            rows.append((label, short_seconds(time_s[key]), of))
    for key, label in (("to_device", "link to the device busy so far"), ("to_home", "link to home busy so far")):
        if key in time_s:
            rows.append((label, short_seconds(time_s[key]), ""))
    return _table(("", "", ""), rows, right=(1,))


def _bytes(label: str, nbytes: int, remark: str = "", *, of: int | None = None, name: str = "budget") -> Row:
    if of is not None:
        remark = f"{share(nbytes, of)} of the {name}"
    return (label, short_nbytes(nbytes), f"{nbytes:,}", remark)


def _error(predicted: int, measured: int) -> str:
    return f"{100 * (predicted - measured) / measured:+.2f} %" if measured else "nothing was measured"


def _table(columns: Sequence[str], rows: Iterable[Row], *, right: Sequence[int]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for index, title in enumerate(columns):
        exact = title == "bytes"
        table.add_column(
            title,
            justify="right" if index in right else "left",
            style=_DIM if exact else None,
            no_wrap=index in right,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _list(lines: Iterable[str]) -> Table:
    """List sentences with hanging dashes."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("-", Text(line))
    return table
