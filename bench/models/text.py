"""Real text that every machine has: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

_NOT_STDLIB = frozenset({"site-packages", "dist-packages"})


def stdlib_text(folder: Path | None = None) -> npt.NDArray[np.uint8]:
    """Read all `*.py` files of the standard library (or below `folder`), one after the other, ordered by path.

    Raises:
        FileNotFoundError: there is none, as where Python's library is an archive.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    files = sorted(
        (path for path in root.rglob("*.py") if not _NOT_STDLIB.intersection(path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    if not files:
        raise FileNotFoundError(f"no *.py file below {root}; name a text with --data FILE")
    return np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)


def file_text(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of one file."""
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)


def batches(
    text: npt.NDArray[np.uint8], *, num_batches: int, batch_size: int, length: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random crops: `num_batches` pairs (x, y), both int64 [batch_size, length], y being x one byte later.

    The same arguments give the same crops. Raises ValueError where the text is shorter than one crop.
    """
    num_starts = len(text) - length
    if num_starts < 1:
        raise ValueError(f"the text has {len(text)} bytes; a crop takes {length + 1}: use a longer text")
    generator = np.random.default_rng(seed)
    for _ in range(num_batches):
        starts = generator.integers(0, num_starts, size=(batch_size, 1))
        crops = text[starts + np.arange(length + 1)].astype(np.int64)
        yield torch.tensor(crops[:, :-1]), torch.tensor(crops[:, 1:])
