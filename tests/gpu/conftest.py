"""Tests on a real GPU. Blocks are split exactly, so that what is measured is what was asked for, rounded."""

from __future__ import annotations

import os

for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
    os.environ.setdefault(_name, "expandable_segments:True")
