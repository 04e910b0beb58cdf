"""Benchmarks are imported as they import each other: their folder is on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
