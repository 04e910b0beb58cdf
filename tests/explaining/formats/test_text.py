from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console
from synthetic import MIB, large, measured, not_fitting, ranked, small

from chunkc.explaining.formats import print_text, render_text
from chunkc.explaining.formats.advice import advice
from chunkc.explaining.formats.text import headline
from chunkc.ir.estimates import EstimatedOperator
from chunkc.ir.explanation import Layers, Peak


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_the_verdict_says_by_how_much() -> None:
    assert headline(small()) == "fits, with 10.00 MiB of 200.00 MiB to spare"
    assert headline(not_fitting()) == ("does not fit: the smallest budget that works is 90.00 MiB more than 100.00 MiB")
    assert "home does not fit the host" in headline(small(host_fits=False))


def test_numbers_are_exact_and_overhead_is_apart() -> None:
    text = render_text(small())
    for start, nbytes in [
        ("budget", 200),
        ("smallest budget", 150),
        ("predicted peak", 190),
        ("overhead", 30),
        ("peak and overhead", 220),
        ("of these on disk", 60),
        ("of these in host", 100),
        ("to the device", 40),
    ]:
        assert f"{nbytes * MIB:,}" in line_of(text, start), start


def test_one_rank_s_exchanges_and_what_its_host_needs_stand_in_tables() -> None:
    text = render_text(ranked())
    assert "rank 0 of 4 on 2 hosts, in stage 3 of ZeRO\n" in text
    for start, words in [
        ("parameters of this rank", "3,932,160"),
        ("parameters of this rank", "25.0 % of all"),
        ("chunks gathered", " 2"),
        ("gradients reduced and scattered", " 1"),
        ("to device, in one step", f"{20 * MIB:,}"),
        ("between devices, in one step", f"{90 * MIB:,}  each way"),
        ("between hosts, in one step", f"{90 * MIB:,}  each way"),
        ("2 ranks of a host", f"{200 * MIB:,}"),
        ("model data at home", f"{160 * MIB / 3_932_160:.2f} bytes a parameter"),
    ]:
        assert words in line_of(text, start), start
    on_cpu = ranked(device_is_host=True, host_fits=False)
    assert f"{2 * (100 + 190) * MIB:,}" in line_of(render_text(on_cpu), "with predicted peaks, 2 ranks of a host")
    assert advice(on_cpu)[0].startswith(
        "Homes of all its ranks take 200.00 MiB of the same memory, 580.00 MiB with the"
    )
    assert advice(ranked(host_fits=False))[0].startswith("Homes of all its ranks take 200.00 MiB of the host's memory")


def test_what_ranks_of_a_layer_exchange_stands_in_the_table_of_ranks() -> None:
    assert "collectives of layers" not in render_text(ranked())
    ranks = ranked().ranks
    assert ranks is not None
    text = render_text(ranked(ranks=replace(ranks, layers=Layers(4, 48, 30 * MIB, 0.002))))
    line = line_of(text, "collectives of layers, in one step")
    assert " ".join(line.split()).endswith("step 48 of 4 ranks, in 2.00 ms")
    assert f"{30 * MIB:,}  each way" in line_of(text, "sent in these")


def test_identical_layers_fold_and_modules_stand_below_their_kind() -> None:
    text = render_text(small())
    assert f"{60 * MIB:,}" in line_of(text, "activations: model.layers.* (x4)")
    slots = text.splitlines().index(line_of(text, "slots "))
    assert {text.splitlines()[slots + i].split()[0] for i in (1, 2)} == {"param:1", "grad:1"}


def test_many_modules_end_in_one_line_that_holds_the_rest() -> None:
    contents = {f"activations: {'x' * (i + 1)}": (100 - i) * MIB for i in range(30)}
    text = render_text(small(peak=Peak("backward.0", "aten.mm", "", contents)))
    assert f"{sum(range(71, 87)) * MIB:,}" in line_of(text, "16 smaller")
    assert f"{sum(contents.values()):,}" in line_of(text, "activations")


def test_plain_text_has_no_escapes_and_a_colour_terminal_has_the_same_words() -> None:
    plain = render_text(not_fitting(measured=measured()))
    assert "\x1b" not in plain
    assert plain.isascii()
    assert max(map(len, plain.splitlines())) <= 110
    buffer = io.StringIO()
    print_text(
        not_fitting(measured=measured()), Console(file=buffer, width=110, force_terminal=True, color_system="256")
    )
    assert "\x1b[" in buffer.getvalue()
    without_colour = re.sub(r"\x1b\[[0-9;]*m", "", buffer.getvalue())
    assert [line.rstrip() for line in without_colour.splitlines()] == plain.splitlines()


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    text = render_text(small(model="[bold]m[/bold]", notes=("[red]x",)))
    assert "[bold]m[/bold] on" in text
    assert "[red]x" in text


def test_a_narrow_console_loses_no_number() -> None:
    buffer = io.StringIO()
    print_text(small(), Console(file=buffer, width=60))
    assert f"{190 * MIB:,}" in buffer.getvalue()


def test_measured_stands_beside_predicted() -> None:
    text = render_text(small(measured=measured()))
    assert "predicted +2,097,152 bytes, +1.06 %" in line_of(text, "measured peak")
    assert "1 equal to the byte" in line_of(text, "calls metered")
    assert "backward.0" in line_of(text, "furthest apart")
    assert "75.0 %" in line_of(text, "computing so far")
    unmetered = render_text(small(measured=measured(peak_nbytes=None, moments=(("forward.0", None),), time_s={})))
    assert "measured peak" not in unmetered


def test_guesses_are_listed_where_there_are_any() -> None:
    assert "guessed" not in render_text(small())
    text = render_text(small(estimates=(EstimatedOperator("lib::odd", "model.mix", 3 * MIB),)))
    assert "guessed: what these operators take inside" in text
    assert line_of(text, "lib::odd").split() == ["lib::odd", "3.00", "MiB", f"{3 * MIB:,}", "model.mix"]


def test_an_explanation_without_moments_is_text_too() -> None:
    bare = small(moments=(), events=(), notes=(), peak=Peak("", "", "", {}), device_memory_nbytes=None)
    assert "device has" not in render_text(bare)


def test_a_large_model_stays_short() -> None:
    assert len(render_text(large(100)).splitlines()) < 60


class TestAdvice:
    def test_none_where_it_fits(self) -> None:
        assert advice(small()) == ()

    def test_the_budget_comes_first(self) -> None:
        assert advice(not_fitting())[0] == "Raise the memory budget to 199,229,440 bytes (190.00 MiB) or more."

    def test_no_budget_is_named_that_the_device_does_not_have(self) -> None:
        first = advice(not_fitting(device_memory_nbytes=200 * MIB))[0]
        assert first.startswith("No budget helps on this device")
        assert "220.00 MiB" in first

    def test_it_follows_what_fills_the_peak(self) -> None:
        def words(option: str = "auto", **mib: int) -> str:
            contents = {f"{kind}: m": n * MIB for kind, n in mib.items()}
            peak = Peak("forward.0", "aten.mm", "head", contents)
            return " ".join(advice(not_fitting(peak=peak, activations=option))[1:])

        assert "activation checkpointing" in words(activations=90, temporaries=10)
        assert "aten.mm in head" in words(activations=10, temporaries=90)
        assert "chunk_size" in words(slots=90, activations=10)
        assert "Temporaries" not in words(slots=90, temporaries=10)
        assert "--activations auto" in words("keep", activations=90)
        assert "--activations auto" not in words(activations=90)

    def test_a_host_too_small_is_told_of_the_disk(self) -> None:
        (only,) = advice(small(host_fits=False, host_memory_nbytes=64 * MIB, disk_nbytes=0))
        assert 'home="disk"' in only
        assert "64.00 MiB" in only

    def test_a_home_on_disk_already_is_not_advised_again(self) -> None:
        (only,) = advice(small(host_fits=False, host_memory_nbytes=64 * MIB))
        assert "with the optimizer states on disk" in only
        assert "use `home" not in only
        assert 'use `disk_holds="everything"`' in only
        on_a_cpu = small(host_fits=False, host_memory_nbytes=64 * MIB, device_is_host=True)
        (only,) = advice(on_a_cpu)
        assert "of the same memory" in only
        assert 'use `disk_holds="everything"`' in only
        (only,) = advice(replace(on_a_cpu, disk_nbytes=on_a_cpu.home_nbytes))
        assert "The peak takes" in only
