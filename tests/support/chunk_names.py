"""Chunks by the names that plans print: tests read better so."""

from __future__ import annotations

import re

from chunkc.ir.layout import Chunk

_NAME = re.compile(r"(\w+):(\d+)(?:\[(\d+):(\d+)\])?")


def chunk(name: str) -> Chunk:
    """Parse a chunk's name: `param:3`, or `param:3[0:65536]` for a part."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return Chunk(match[1], int(match[2]), None if match[3] is None else (int(match[3]), int(match[4])))
