"""chunkc: a `torch.compile` backend that trains models larger than the memory they compute in.

model = torch.compile(model, backend="chunkc", options={"memory_budget": "6GiB"})
optimizer = chunkc.optim.AdamW(model.parameters(), lr=3e-4)
"""

from chunkc.utils.garbage import count_all_as_old, no_automatic_collection

with no_automatic_collection():  # which would visit the objects of all modules several times: an eighth of the import
    from chunkc import checkpoint, optim
    from chunkc.checkpoint.training import Checkpoint
    from chunkc.distribute import distribute
    from chunkc.distributed.process_group import init_process_group
    from chunkc.engine import initialize_engine
    from chunkc.explaining.explain import explain
    from chunkc.ir.errors import (
        BudgetError,
        CheckpointError,
        ChunkcError,
        ChunkStateError,
        DistributedError,
        FileError,
        HomeError,
        InternalError,
        OptionsError,
        StreamError,
        UnsupportedError,
        VerificationError,
    )
    from chunkc.ir.explanation import Explanation
    from chunkc.optim.gradient_scaling import GradScaler
    from chunkc.optim.update_scheduler import synchronize
    from chunkc.passes.memory.scratch.declared import declare_scratch
    from chunkc.report import Report, report
    from chunkc.session.init import init
    from chunkc.session.place import place
    from chunkc.weights.load import load
    from chunkc.weights.save import save

    count_all_as_old()

__all__ = [
    "BudgetError",
    "Checkpoint",
    "CheckpointError",
    "ChunkStateError",
    "ChunkcError",
    "DistributedError",
    "Explanation",
    "FileError",
    "GradScaler",
    "HomeError",
    "InternalError",
    "OptionsError",
    "Report",
    "StreamError",
    "UnsupportedError",
    "VerificationError",
    "checkpoint",
    "declare_scratch",
    "distribute",
    "explain",
    "init",
    "init_process_group",
    "initialize_engine",
    "load",
    "optim",
    "place",
    "report",
    "save",
    "synchronize",
]
