"""Options: every way of writing a value, one clear line for every mistake, and budgets in bytes."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from chunkc.ir.errors import OptionsError
from chunkc.options import Options, parse_options, resolve_budget

GIB = 2**30
DEFAULTS = {
    "memory_budget": "auto", "home": "cpu", "disk_holds": "auto", "chunk_size": "auto", "activations": "auto",
    "loss_tile_rows": "auto", "codegen": "inductor", "whole_graph": "auto", "strict": False, "verify": True,
    "debug": False,
}  # fmt: skip


def refusal(given: Any, environment: dict[str, str] | None = None) -> str:
    """The error's text, which is one line."""
    with pytest.raises(OptionsError) as caught:
        parse_options(given, environment or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults():
    assert parse_options(None).model_dump() == DEFAULTS
    assert parse_options({}) == parse_options(None)


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        (1, 1), ("6GiB", 6 * GIB), (" 6gib ", 6 * GIB), ("1.5GiB", 3 * GIB // 2),
        ("80%", "80%"), (" 12.5 % ", "12.5%"), ("auto", "auto"),  # which are kept for later
    ],
)  # fmt: skip
def test_budgets(given: object, budget: int | str):
    assert parse_options({"memory_budget": given}).memory_budget == budget


@pytest.mark.parametrize(("text", "budget"), [("1048576", 2**20), ("80%", "80%"), ("auto", "auto"), ("", "auto")])
def test_budgets_in_the_environment(text: str, budget: int | str):
    assert parse_options(None, {"CHUNKC_MEMORY_BUDGET": text}).memory_budget == budget


@pytest.mark.parametrize(
    ("budget", "total", "available", "nbytes"),
    [(12345, 10, 10, 12345), ("auto", 1000, 500, 450), ("80%", 1000, 500, 800), ("12.5%", 1000, 500, 125),
     ("100%", 2**62 + 1, 1, 2**62 + 1), ("auto", 1000, 0, 0), ("0.01%", 1000, 1000, 0)],
)  # fmt: skip
def test_budgets_of_a_machine(budget: int | str, total: int, available: int, nbytes: int):
    if nbytes:
        assert resolve_budget(budget, total, available) == nbytes
    else:
        with pytest.raises(OptionsError, match="leaves no memory"):
            resolve_budget(budget, total, available)


@pytest.mark.parametrize(
    ("given", "on_a_cpu", "on_a_gpu"), [("auto", True, False), ("states", False, False), ("everything", True, True)]
)
def test_what_a_disk_holds(given: str, on_a_cpu: bool, on_a_gpu: bool):
    options = parse_options({"home": "disk", "disk_holds": given})
    assert options.disk_holds_everything("cpu") is on_a_cpu
    assert options.disk_holds_everything("cuda") is on_a_gpu


@pytest.mark.parametrize(("home", "kind"), [("cpu", "cpu"), ("disk", "disk"), ("disk:~/a:b", "disk")])
def test_home(home: str, kind: str) -> None:
    assert parse_options({"home": home}).home_kind == kind


BAD = {
    "memory_budget": (
        True, 1.5, float("nan"), float("inf"), -1, 0, None, [1], b"6GiB", "lots", "", "0%", "101%", "-5%", "6XB", "6",
        "6G", "GiB", "-6GiB", "0GiB", "0.1B", "nan%", "1e3MiB", "AUTO", "9" * 5000 + "GiB", "6GiB\nmore", "٦GiB",
    ),
    "chunk_size": ("80%", 4095, "4kB", True, 4096.0, "big", None),
    "home": ("gpu", "disk:", "disk: ", "cpu:x", "disk:a\0b", "", 3, None, Path("disk")),
    "codegen": ("Inductor", "", None, True),
    "activations": ("always", True, None),
    "loss_tile_rows": (0, -1, 1.5, "many", True, None),
    "whole_graph": ("always", True, None),
    "verify": (1, 0, "yes", "true", None),
    "debug": (1, "False", None),
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_one_line_with_the_key_the_value_and_what_is_allowed(key: str, value: object):
    message = refusal({key: value})
    assert message.startswith(f"option {key!r} is ")
    assert message.count(key) == 1
    assert message.count("allowed: ") == 1
    assert len(message) < 300
    if len(repr(value)) < 20:
        assert repr(value) in message


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("memory_buget", "memory_budget"), ("budget", "memory_budget"), ("chunksize", "chunk_size"), ("Verify", "verify"),
     ("zzzz", None), (7, None), (None, None)],
)  # fmt: skip
def test_an_unknown_key_lists_the_keys_and_the_nearest_if_any_is_near(key: Any, nearest: str | None):
    message = refusal({key: 1})
    assert f"unknown option {key!r}" in message
    assert all(repr(known) in message for known in DEFAULTS)
    assert message.count("did you mean") == message.count(f"(did you mean {nearest!r}?)") == (nearest is not None)


def test_several_mistakes_are_one_value_error_without_pydantic_behind_it():
    assert all(key in refusal({"verify": 1, "codegen": "c"}) for key in ("'verify'", "'codegen'"))
    assert "must be a dict" in refusal([("debug", True)])
    with pytest.raises(ValueError, match="debug") as caught:
        parse_options({"debug": 1})
    assert caught.value.__context__ is None


def test_options_are_frozen_and_hashable():
    options = parse_options({"debug": True})
    assert hash(options) == hash(parse_options({"debug": True}))
    with pytest.raises(ValidationError):
        options.debug = False
    assert set(Options.model_fields) == set(DEFAULTS)


# --- environment variables ---


def test_variables_stand_in_for_options_that_are_not_given():
    environment = {"CHUNKC_MEMORY_BUDGET": "6GiB", "CHUNKC_HOME": "disk:/var/tmp", "CHUNKC_DEBUG": "1"}
    options = parse_options({"chunk_size": 4096}, environment)
    assert (options.memory_budget, options.home, options.chunk_size) == (6 * GIB, "disk:/var/tmp", 4096)
    assert parse_options(None, environment) == parse_options({}, environment)
    assert options.debug is False


def test_variables_lose_against_options_even_where_they_make_no_sense():
    environment = {"CHUNKC_MEMORY_BUDGET": "lots", "CHUNKC_HOME": "tape"}
    options = parse_options({"memory_budget": "1GiB", "home": "cpu"}, environment)
    assert (options.memory_budget, options.home) == (GIB, "cpu")


def test_mistakes_name_the_variable_and_options_by_their_own_names():
    text = refusal({"chunk_size": 3}, {"CHUNKC_MEMORY_BUDGET": "lots", "CHUNKC_HOME": "tape"})
    assert "environment variable CHUNKC_MEMORY_BUDGET is 'lots'; allowed: a positive int" in text
    assert "environment variable CHUNKC_HOME is 'tape'; allowed: \"cpu\"" in text
    assert "option 'chunk_size' is 3 (int)" in text


def test_no_shape_of_one_rank_decides_about_tiles() -> None:
    assert parse_options({}).over_ranks.loss_tile_rows == "never"
    assert parse_options({"loss_tile_rows": 8}).over_ranks.loss_tile_rows == 8
