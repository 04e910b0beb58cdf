"""Advise on a model that does not fit, by the contents of its peak."""

from __future__ import annotations

from chunkc.explaining.formats.fold import by_kind
from chunkc.explaining.formats.units import share
from chunkc.ir.explanation import Explanation
from chunkc.ir.text import is_of_a_loss
from chunkc.ir.units import short_nbytes

_WORTH = 0.2
"""The fraction of the peak from which a kind of bytes is worth advice."""

_MODEL_DATA = ("parameters", "gradients", "optimizer states", "slots")


def advice(explanation: Explanation) -> tuple[str, ...]:
    """Return a sentence for each change to try, the surest first; empty if the model fits device and host."""
    lines: list[str] = []
    if not explanation.fits:
        lines += [*_budget(explanation), *_contents(explanation)]
    if not explanation.host_fits:
        lines += _host(explanation)
    return tuple(lines)


def _budget(explanation: Explanation) -> list[str]:
    minimum, memory = explanation.minimum_budget_nbytes, explanation.device_memory_nbytes
    needed = minimum + explanation.overhead_nbytes
    if memory is not None and needed > memory:
        return [
            f"No budget helps on this device: the smallest one and the overhead take {short_nbytes(needed)}, "
            f"the device has {short_nbytes(memory)}."
        ]
    return [f"Raise the memory budget to {minimum:,} bytes ({short_nbytes(minimum)}) or more."]


def _contents(explanation: Explanation) -> list[str]:
    kinds = by_kind(explanation.peak.contents)
    total = sum(kinds.values())
    lines = []
    if _large(kinds.get("activations", 0), total):
        checkpointing = ", and so does activation checkpointing (`--activation-checkpointing`)"
        leaving = " With `--activations auto`, the default, they leave between forward and backward."
        lines.append(
            f"Activations are {share(kinds['activations'], total)} of that peak: a smaller batch or a shorter sequence "
            "takes fewer (`--largest batch_size` finds the largest that fits)"
            f"{'' if explanation.activation_checkpointing else checkpointing}."
            f"{leaving if explanation.activations == 'keep' and explanation.ranks is None else ''}"
        )
    if _large(kinds.get("temporaries", 0), total):
        where = f" in {explanation.peak.module}" if explanation.peak.module else ""
        option = " (`--loss-tile-rows 256`, of a cross entropy)" if is_of_a_loss(explanation.peak.op) else ""
        lines.append(
            f"Temporaries are {share(kinds['temporaries'], total)} of that peak: {explanation.peak.op}{where} takes "
            f"fewer with a smaller batch, or when it is computed in parts{option}."
        )
    model_data = sum(kinds.get(kind, 0) for kind in _MODEL_DATA)
    if _large(model_data, total):
        lines.append(
            f"Model data is {share(model_data, total)} of that peak, though most of it may move: chunks smaller than "
            f"{short_nbytes(explanation.chunks.size_nbytes)} (`chunk_size`) or a lower precision take less room."
        )
    return lines


def _host(explanation: Explanation) -> list[str]:
    num_ranks = 1 if explanation.ranks is None else explanation.ranks.ranks_per_host
    host = num_ranks * (explanation.home_nbytes - explanation.disk_nbytes)
    memory = explanation.host_memory_nbytes
    have = "" if memory is None else f", and there are {short_nbytes(memory)}"
    if explanation.device_is_host and not host:
        peak = short_nbytes(explanation.predicted_peak_nbytes)
        return [f"The peak takes {peak} of the host's memory{have}: give a smaller memory budget."]
    option = '`disk_holds="everything"`' if explanation.disk_nbytes else '`home="disk"`'
    takes = (
        f"Home takes {short_nbytes(host)}" if num_ranks == 1 else f"Homes of all its ranks take {short_nbytes(host)}"
    )
    if explanation.device_is_host:
        both = short_nbytes(explanation.host_needs_nbytes)
        return [f"{takes} of the same memory, {both} with the peak{have}: use {option}."]
    states = " with the optimizer states on disk" if explanation.disk_nbytes else ""
    return [f"{takes} of the host's memory{states}{have}: use {option}, or a host with more."]


def _large(nbytes: int, total: int) -> bool:
    return total > 0 and nbytes >= _WORTH * total
