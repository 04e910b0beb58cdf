"""The words of ARCHITECTURE.md are used in sources and documents, and the words that they replace are not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from doc_pages import PAGES, prose

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path for folder in ("chunkc", "passes", "runtime", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))
]

OLD = {
    r"absences?": "activation plan; offloaded, recomputed",
    r"stretch(es)?|runs? again": "recompute region, recompute",
    r"twins?": "shadow copies",
    r"nurser(y|ies)": "unassigned home memory",
    r"doubts?": "pending steps",
    r"rehears\w*|on paper": "dry run; predicted",
    r"reconcil\w*": "detect changes",
    r"situations?": "planner state",
    r"standing|stands? whole": "replicated",
    r"used up|uses up|spent": "consumed, of a gradient; transient, of a group that keeps none",
    r"early updates?": "updates in the backward",
}
"""Words that are not to come back, in sources and documents -> what is said instead."""

OLD_IN_SOURCES = OLD | {
    r"of_all|whose|who|whom|whoever|somebody|nobody|anybody": "the noun: caller, thread, optimizer, storage",
    r"beside": "besides, with, in addition to",
}
"""In documents, users are persons, and one line of a plot may lie beside another."""

DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md"]

NO_BEGINNING = re.compile(
    "(What|Who|Whose|Which|Where|How|One|It|All|Those|That|These|This|Of|When|With|Not|No|Its|Their|Some|Each|Every|As|In|On"
    "|For|If|Must|May|Can|There|They|So|Also|Nothing|Everything)"
)
"""Words that no docstring begins with: a function's begins with a verb or "Whether", any other with its noun."""


def old_words(line: str, words: dict[str, str]) -> list[str]:
    return [
        f"{m[0]}: {new}"
        for old, new in words.items()
        for m in re.finditer(rf"(?<![A-Za-z])({old})(?![A-Za-z])", line, re.I)
    ]


def first_words(source: str) -> list[tuple[int, str]]:
    """(line, first word) of every docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    texts = [(getattr(node, "lineno", 1), ast.get_docstring(node)) for node in nodes]
    return [(line, re.split(r"\W", text, maxsplit=1)[0]) for line, text in texts if text]


def test_no_old_word_is_left_in_sources() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{number}": words
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (words := old_words(line, OLD_IN_SOURCES))
    }
    assert found == {}


def test_no_old_word_is_left_in_documents() -> None:
    """Blocks are left out: code, and what programs print."""
    found = {
        f"{path.relative_to(ROOT)}: {line}": words
        for path in DOCUMENTS
        for line in prose(path.read_text()).splitlines()
        if (words := old_words(line, OLD))
    }
    assert found == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": word
        for path in SOURCES
        for line, word in first_words(path.read_text())
        if NO_BEGINNING.fullmatch(word)
    }
    assert found == {}


def test_an_old_word_would_be_seen() -> None:
    assert old_words("whose gradients were spent", OLD_IN_SOURCES) == [
        "spent: consumed, of a gradient; transient, of a group that keeps none",
        "whose: the noun: caller, thread, optimizer, storage",
    ]
    assert old_words("besides, consumed, understanding, wholesome", OLD_IN_SOURCES) == []
    assert old_words("a user whose values go to twins", OLD) == ["twins: shadow copies"]
    assert first_words('def f():\n    """What it does."""') == [(1, "What")]
