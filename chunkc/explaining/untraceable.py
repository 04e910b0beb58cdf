"""Turn errors in tracing a model into errors for the user."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from chunkc.explaining.error_attribution import is_own_fault
from chunkc.ir.errors import ChunkcError, UnsupportedError
from chunkc.torch_private.dynamo import BackendCompilerFailed, TorchDynamoException
from chunkc.torch_private.fake import DataDependentOutputException, DynamicOutputShapeException

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_OF_TRACING = (*_NEEDS_VALUES, ConstraintViolationError, TorchDynamoException)


class NeedsValuesError(UnsupportedError):
    """A model branches on the values of tensors."""


def why_no_graph(model: nn.Module) -> str:
    """Say why Dynamo captures no graph of a model."""
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return "it leaves nn.LSTM, nn.GRU and nn.RNN alone; set torch._dynamo.config.allow_rnn = True, also to train"
    return "the call of this model computes nothing it can compile"


def explained_error(error: Exception, module: Callable[[], str]) -> Exception:
    """Return the error for the user, for an error in tracing or running the model; itself if it is clear as it is.

    Args:
        module: run the model once more, and return the name of the module that raises; "" if none does.
    """
    if isinstance(error, ChunkcError):
        return error
    if isinstance(error, BackendCompilerFailed):
        inner = error.inner_exception
        if isinstance(inner, ChunkcError) or is_own_fault(inner):
            return inner
        return UnsupportedError(f"the model cannot be traced: {first_line(inner)}")
    if not isinstance(error, _OF_TRACING) and is_own_fault(error):
        return error
    where = f"{name}: " if (name := module()) else ""
    if isinstance(error, _NEEDS_VALUES):
        return NeedsValuesError(
            f"the model needs the values of tensors outside its graphs ({where}{first_line(error)}); only what "
            "torch.compile captures can be explained"
        )
    if isinstance(error, ConstraintViolationError):
        return UnsupportedError(f"the model cannot be traced with symbols: {first_line(error)}")
    if isinstance(error, TorchDynamoException):
        return UnsupportedError(f"the model cannot be traced: {where}{first_line(error.__cause__ or error)}")
    if name:
        error.add_note(f"in {name}")
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; for Dynamo's errors the line that explains."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.partition(": ")[2] for line in lines if line.startswith("  Explanation: ")), lines[0])
