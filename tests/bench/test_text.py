"""The demonstration's text: which files, in which order, and crops that a seed fixes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from models.text import batches, stdlib_text

TEXT = np.arange(256, dtype=np.uint8)


def test_the_standard_library_is_a_lot_of_python_and_always_the_same():
    text = stdlib_text()
    assert len(text) > 1_000_000
    assert b"class OrderedDict" in text.tobytes()
    assert np.array_equal(text, stdlib_text())


def test_files_come_in_order_of_their_paths_without_installed_packages(tmp_path: Path):
    for name in ("b.py", "a/z.py", "a.py", "site-packages/x.py", "a/dist-packages/y.py", "note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    assert stdlib_text(tmp_path).tobytes() == b"<a.py><a/z.py><b.py>"


def test_y_is_the_next_byte_and_all_fits_a_crop():
    pairs = list(batches(TEXT, num_batches=50, batch_size=3, length=16, seed=1))
    assert len(pairs) == 50
    for x, y in pairs:
        assert x.shape == y.shape == (3, 16)
        assert x.dtype == y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert torch.equal(y, x + 1)  # of this text, each byte is one more than the one before


def test_a_seed_fixes_the_crops_and_another_changes_them():
    def crops(seed: int) -> torch.Tensor:
        pairs = batches(TEXT, num_batches=4, batch_size=2, length=8, seed=seed)
        return torch.stack([x for x, _ in pairs])

    assert torch.equal(crops(0), crops(0))
    assert not torch.equal(crops(0), crops(1))
    assert len({tuple(row) for row in crops(0).flatten(0, 1).tolist()}) > 1


def test_the_shortest_text_gives_its_one_crop_and_a_shorter_one_is_an_error():
    x, y = next(batches(TEXT[:9], num_batches=1, batch_size=1, length=8, seed=0))
    assert x.tolist() == [list(range(8))]
    assert y.tolist() == [list(range(1, 9))]
    with pytest.raises(ValueError, match="8 bytes; a crop takes 9"):
        next(batches(TEXT[:8], num_batches=1, batch_size=1, length=8, seed=0))
