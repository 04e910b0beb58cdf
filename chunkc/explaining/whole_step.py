"""Complete a `BudgetError` by tracing the call that raises it on fake tensors, as `chunkc.explain` does.

A graph is compiled when a call comes to it. An evaluation that comes first has no gradients, and the first graphs of a
model are planned without the later ones: each error would name another minimum. And a loss in tiles is another graph:
what it needs is known when it is traced. So the call of the compiled module has to be on the stack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import nn

from chunkc.explaining.explain import minimum_of_call
from chunkc.ir.errors import BudgetError, UnsupportedError
from chunkc.ir.text import first_of
from chunkc.ir.units import format_nbytes
from chunkc.machines.devices import device_of, hardware_of, parse_device
from chunkc.options import Options
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.session.logs import logger
from chunkc.tracing.caller import compiled_call
from chunkc.tracing.names import without_wrapper
from chunkc.utils.progress import compilation_progress

_TILE_ROWS = 1024
"""Rows of the tiles that an error proposes for a loss."""
_LARGE_LOSS_NBYTES = 4 << 20
"""Bytes of values at the peak from which tiles are worth a trace: those of a tile of 1,000 classes in float32."""


def completed(error: BudgetError, options: Options) -> BudgetError:
    """Return the error with the minimum of a whole step if its own covers less, and with that of a loss in tiles.

    As it is where the step cannot be traced. Call it while the module's call is on the stack, after Dynamo.
    """
    call = compiled_call()
    if call is not None and call.num_others:
        error = replace(error, num_others=call.num_others)
    is_part = (bool(error.covers) or error.evaluates) and error.training_nbytes is None
    is_large = error.values_nbytes >= max(_LARGE_LOSS_NBYTES, error.minimum_nbytes // 2)
    may_tile = error.has_loss and is_large and not isinstance(options.loss_tile_rows, int)
    if not (is_part or may_tile):
        return error
    if call is None or _is_cut(call.module.parameters()):
        return error
    parameters = dict(call.module.named_parameters())
    try:
        hardware = hardware_of(device_of(parameters) if parameters else parse_device("cpu"))
    except UnsupportedError as problem:  # some are on another device, as those of an embedding that the CPU looks up
        logger.debug("the minimum of a whole step is not known: %s", problem)
        return error

    def minimum(chosen: Options, *, trains: bool | None) -> tuple[int, frozenset[str], int]:
        with torch.inference_mode(False), torch.set_grad_enabled(trains is not False):
            return minimum_of_call(
                call.module, call.args, call.kwargs, options=chosen, hardware=hardware, trains=trains
            )

    try:
        with compilation_progress() as show:
            show("tracing a whole step for the smallest budget", 0, None)
            if is_part:
                training_nbytes, names, num_graphs = minimum(options, trains=error.evaluates or None)
                evaluation_nbytes = minimum(options, trains=False)[0] if error.evaluates and error.covers else None
                error = error.of_step(training_nbytes, evaluation_nbytes, _outside(call.module, names))
                if num_graphs > 1:
                    error = replace(error, remedies=())  # those are of the graph compiled so far
            if may_tile:
                tiled = options.model_copy(update={"loss_tile_rows": _TILE_ROWS})
                in_tiles, *_ = minimum(tiled, trains=False if error.evaluates else None)
                error = error.with_remedies([(f"loss_tile_rows={_TILE_ROWS}", in_tiles)])
    except Exception as problem:  # raised by the user's code; it must not hide the error at hand
        logger.debug("the minimum of a whole step is not known: %s", problem)
    return error


def _outside(model: nn.Module, names: Collection[str]) -> str:
    """Name the parameters of a model that are not among `names`, and say their bytes; "" if there are none."""
    every = {without_wrapper(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    inside = {id(every[name]) for name in names if name in every}
    outside = {name: p for name, p in model.named_parameters() if id(p) not in inside}
    return f"{first_of([*outside])} ({format_nbytes(sum(p.nbytes for p in outside.values()))})" if outside else ""


def _is_cut(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether parameters are cut over ranks: the needs of each rank depend on all ranks."""
    return any(isinstance(local_shard_of(parameter), LocalShard) for parameter in parameters)
