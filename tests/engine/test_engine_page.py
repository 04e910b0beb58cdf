"""`docs/engine.md` names every key, and what becomes of it."""

from __future__ import annotations

from itertools import groupby

from doc_pages import ROOT, named, prose, rows

from chunkc.engine.keys import KEYS, Key
from chunkc.engine.optimizers import _OWN
from chunkc.engine.schedules import SCHEDULES

PAGE = (ROOT / "docs" / "engine.md").read_text()


def test_the_table_of_keys() -> None:
    """In order; neighbours of one section that share fate and note share a row."""

    def parts(key: Key) -> tuple[str, str, str]:
        return key.name.rpartition(".")[0], key.fate, key.note

    expected = [
        [f"`{section}`" if section else "(top)", ", ".join(f"`{k.name.rpartition('.')[2]}`" for k in keys), fate, note]
        for (section, fate, note), keys in groupby(KEYS, key=parts)
    ]
    assert rows(PAGE, "section") == expected


def test_the_table_of_optimizer_parameters() -> None:
    described = {name for row in rows(PAGE, "key of `optimizer.params`") for name in named(row[0])}
    assert described == {name for kind in _OWN.values() for name in kind.model_fields}


def test_schedulers() -> None:
    assert set(SCHEDULES) <= set(named(prose(PAGE)))
