"""Turn an unforeseen failure of a compilation into an error that says what was compiled and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from torch import fx

from chunkc.ir.errors import ChunkcError, InternalError
from chunkc.passes.graphs.graphs import module_path
from chunkc.torch_private.dynamo import ACTED_ON_BY_DYNAMO


@contextmanager
def as_internal_errors(*passing: type[Exception]) -> Iterator[None]:
    """Raise an exception that leaves the block as an `InternalError`.

    Errors of chunkc, those that Dynamo acts on, and those in `passing` leave it as they are. So does an `IndexError`
    that PyTorch's own code raises: Dynamo hands it to the user, as a dimension that the model's tensors do not have.

    Raises:
        InternalError: with the failure as its cause, and the failure's traceback as a note, since what keeps the error
            must not keep the frames and their tensors.
    """
    unchanged: tuple[type[Exception], ...] = (ChunkcError, *ACTED_ON_BY_DYNAMO, *passing)
    try:
        yield
    except unchanged:
        raise
    except Exception as error:
        if isinstance(error, IndexError) and _is_raised_by_torch(error):
            raise
        internal = InternalError(_message(error))
        internal.add_note("Where it failed:\n" + "".join(traceback.format_tb(error.__traceback__)))
        raise internal from error


def _message(error: Exception) -> str:
    node = _innermost_node(error.__traceback__)
    compiled = "a graph"
    if node is not None:
        compiled = str(node.target) if node.op.startswith("call_") else node.name
        compiled += f" in {module}" if (module := module_path(node)) else ""
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return (
        f"chunkc failed when it compiled {compiled} ({type(error).__name__}: {reason}). This is a fault of chunkc, "
        'unless torch.compile(model, backend="aot_eager") fails alike: then PyTorch cannot trace the model. Report it '
        "with this traceback, the model, or the module named here, and what TORCH_LOGS=graph_code,aot_graphs prints; "
        "`chunkc explain` says whether it fails without training, too. Until then torch.compiler.disable keeps that "
        "module out of the graph"
    )


def _innermost_node(trace: TracebackType | None) -> fx.Node | None:
    """Return the graph node in the innermost frame that has one in a local variable."""
    for frame, _ in reversed(list(traceback.walk_tb(trace))):
        for value in frame.f_locals.values():
            if isinstance(value, fx.Node):
                return value
    return None


def _is_raised_by_torch(error: Exception) -> bool:
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
