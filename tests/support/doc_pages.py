"""README, ARCHITECTURE and the pages under `docs/`, taken apart: headings, links, tables and fenced blocks.

A fenced block is one of these, by the word after its backticks:

- `python` is run, after the page's earlier ones and in one namespace with them.
- `sh`: every line is run. Comments after ` # ` are left out.
- A first line `# NAME.py` (or `.yaml`), or `<!-- file: NAME -->` before the block, makes it a file of that name, which
  others import, read or run.
- `text` right after a block is what that one prints (`printed_differs`), a file as a program.

`<!-- not run: REASON -->` before a block leaves it out, for one of `REASONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *DOCS]

REASONS = ("needs a GPU", "needs the network", "takes minutes", "is another program's")
"""Why a block may be left out."""

_FENCE = re.compile(r"```(\w*)$")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->$")
_HEADING = re.compile(r"#{1,6} (.+)$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"<!-- file: (\S+) -->$")
_FILE_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of text, from 1.
        file_name: what it is to be saved as; None: it is no file.
        not_run: the reason that the page gives; None: it is run.
        expected: what it prints, where the page says so.
    """

    language: str
    text: str
    line: int
    file_name: str | None = None
    not_run: str | None = None
    expected: str | None = None

    @property
    def commands(self) -> list[str]:
        """Commands of a `sh` block, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s)#\s.*$", "", line).strip())]


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = text.splitlines()
    at, last_end = 0, -1
    reason = name = None
    while at < len(lines):
        line = lines[at].strip()
        if fence := _FENCE.match(line):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            body = "\n".join(lines[at + 1 : end])
            if fence[1] == "text" and found and not any(map(str.strip, lines[last_end + 1 : at])):
                found[-1] = replace(found[-1], expected=body)
            else:
                first = _FILE_NAME.match(body)
                found.append(Block(fence[1], body, at + 2, first[1] if first else name, reason))
            at = last_end = end
        if line:
            reason, name = (mark[1] if mark else None for mark in (_NOT_RUN.match(line), _FILE.match(line)))
        at += 1
    return found


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def links(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return _LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings, as GitHub writes them."""
    headings = (match[1] for line in prose(text).splitlines() if (match := _HEADING.match(line)))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def rows(text: str, first_header: str) -> list[list[str]]:
    """Return the cells of every table of a page with this header in its first column."""
    found: list[list[str]] = []
    inside = False
    for line in prose(text).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not cells:
            inside = False
        elif cells[0] == first_header:
            inside = True
        elif inside and not set(cells[0]) <= set(":-"):
            found.append(cells)
    return found


def named(cell: str) -> list[str]:
    """Find what stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


_NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_TIME = re.compile(r"^\s*(?:s|ms|µs)\b")
TOLERANCE = 0.3
"""Of numbers that a page shows: processors differ in what their libraries take."""


def printed_differs(expected: str, printed: str) -> str | None:
    """Why what was printed is not what a page shows; None where it is.

    Words must be the same, numbers alike (`TOLERANCE`), and seconds are not compared. A line `...` stands for any
    lines.
    """
    lines = [line for line in map(_spaced, printed.splitlines()) if line]
    at, may_skip = 0, False
    for wanted in filter(None, map(_spaced, expected.splitlines())):
        if wanted == "...":
            may_skip = True
            continue
        places = range(at, len(lines) if may_skip else min(at + 1, len(lines)))
        hit = next((place for place in places if _is_like(wanted, lines[place])), None)
        if hit is None:
            return f"the page says {wanted!r}, printed was:\n" + "\n".join(lines[at : at + 12])
        at, may_skip = hit + 1, False
    if at < len(lines) and not may_skip:
        return f"not on the page: {lines[at]!r}"
    return None


def _spaced(line: str) -> str:
    return " ".join(line.split())


def _is_like(wanted: str, line: str) -> bool:
    if _words(wanted) != _words(line):
        return False
    return all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in zip(_numbers(wanted), _numbers(line)))


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _words(line: str) -> str:
    return re.sub(r"# (KiB|MiB|GiB|bytes|ms|µs|s)\b", "# unit", _NUMBER.sub("#", line))


def _numbers(line: str) -> Iterator[float]:
    for match in _NUMBER.finditer(line):
        rest = line[match.end() :]
        unit = re.match(r"\s*(KiB|MiB|GiB)\b", rest)
        yield 0.0 if _TIME.match(rest) else float(match[0].replace(",", "")) * (_UNITS[unit[1]] if unit else 1)


def write_script(found: Sequence[Block], folder: Path) -> str:
    """Write one program of a page's Python blocks, which prints a mark before each of them; returns its file's name.

    Each block is a file of its own, with the page's line numbers: code that asks for a function's source finds it.
    """
    parts = []
    for block in found:
        path = folder / f"line_{block.line}.py"
        path.write_text("\n" * (block.line - 1) + block.text + "\n")
        parts.append(f"print({mark(block)!r}, flush=True)\n")
        parts.append(f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'), globals())\n")
    (folder / "snippets_of_the_page.py").write_text(EAGER + "".join(parts))
    return "snippets_of_the_page.py"


EAGER = """\
from chunkc.options import Options
Options.model_fields["codegen"].default = "eager"
Options.model_rebuild(force=True)
"""
"""Snippets run without Inductor's compiler, which takes most of a minute for each model; files run as they stand."""


def mark(block: Block) -> str:
    """Return the marker that `write_script` prints before a block."""
    return f"=== {block.line} ===\n"
