from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chunkc.explaining.formats.fold import by_kind, fold, fold_names


def test_layers_that_differ_in_one_number_become_one_line() -> None:
    lines = fold({f"model.layers.{i}": 10 for i in range(40)} | {"model.norm": 3})
    assert [str(line) for line in lines] == ["model.layers.* (x40)", "model.norm"]
    assert [line.nbytes for line in lines] == [400, 3]


def test_a_name_joins_its_larger_family() -> None:
    names = [f"h.{block}.mlp.{part}" for block in range(12) for part in range(2)]
    assert {str(line) for line in fold(dict.fromkeys(names, 1))} == {"h.*.mlp.0 (x12)", "h.*.mlp.1 (x12)"}


def test_kinds_and_numbers_inside_words_stay_apart() -> None:
    contents = {"activations: h.0": 1, "temporaries: h.1": 2, "conv1": 3, "conv2": 4}
    assert {str(line) for line in fold(contents)} == set(contents)


names = st.lists(st.sampled_from(["h", "mlp", "0", "1", "2", "17", "conv1"]), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(names, st.integers(0, 1 << 40), max_size=30))
def test_no_byte_and_no_name_is_lost(contents: dict[str, int]) -> None:
    lines = fold(contents)
    assert sum(line.nbytes for line in lines) == sum(contents.values())
    assert sum(line.count for line in lines) == len(contents)
    assert [line.nbytes for line in lines] == sorted((line.nbytes for line in lines), reverse=True)


def test_by_kind_adds_up_what_stands_before_the_colon() -> None:
    assert by_kind({"slots: param:1": 5, "activations: a": 4, "activations: b": 4, "others": 1}) == {
        "activations": 8,
        "slots": 5,
        "others": 1,
    }


def test_chunk_names_become_ranges() -> None:
    assert fold_names(["param:3", "param:1", "param:2", "grad:7", "param:9", "tied", "param:1"]) == (
        "tied, grad:7, param:1-3, param:9"
    )
