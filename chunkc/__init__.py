"""chunkc: a `torch.compile` backend that trains models larger than the memory they compute in.

model = torch.compile(model, backend="chunkc", options={"memory_budget": "6GiB"})
optimizer = chunkc.optim.AdamW(model.parameters(), lr=3e-4)
"""

from chunkc import optim
from chunkc.explaining.explain import explain
from chunkc.ir.errors import (
    BudgetError,
    ChunkcError,
    ChunkStateError,
    HomeError,
    OptionsError,
    StreamError,
    UnsupportedError,
    VerificationError,
)
from chunkc.ir.explanation import Explanation
from chunkc.optim.updates_under_way import synchronize
from chunkc.passes.scratch.declared import declare_scratch
from chunkc.place import place
from chunkc.report import Report, report

__all__ = [
    "BudgetError",
    "ChunkStateError",
    "ChunkcError",
    "Explanation",
    "HomeError",
    "OptionsError",
    "Report",
    "StreamError",
    "UnsupportedError",
    "VerificationError",
    "declare_scratch",
    "explain",
    "optim",
    "place",
    "report",
    "synchronize",
]
