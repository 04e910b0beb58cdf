"""What the user is told of a model that cannot be captured."""

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
    """What the model does next depends on the values of tensors."""


def why_none(model: nn.Module) -> str:
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return "it leaves nn.LSTM, nn.GRU and nn.RNN alone; set torch._dynamo.config.allow_rnn = True, also to train"
    return "the call of this model computes nothing it can compile"


def told(error: Exception, module: Callable[[], str]) -> Exception:
    """What the user is told of an error in tracing or running the model; the error itself where it says it all.

    Args:
        module: runs the model once more, and says which of its modules raises, if any.
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
    where = f"{found}: " if (found := module()) else ""
    if isinstance(error, _NEEDS_VALUES):
        return NeedsValuesError(
            f"the model needs the values of tensors outside its graphs ({where}{first_line(error)}); only what "
            "torch.compile captures can be explained"
        )
    if isinstance(error, ConstraintViolationError):
        return UnsupportedError(f"the model cannot be traced with symbols: {first_line(error)}")
    if isinstance(error, TorchDynamoException):
        return UnsupportedError(f"the model cannot be traced: {where}{first_line(error.__cause__ or error)}")
    if found:
        error.add_note(f"in {found}")
    return error


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of Dynamo's errors the one that explains."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.partition(": ")[2] for line in lines if line.startswith("  Explanation: ")), lines[0])
