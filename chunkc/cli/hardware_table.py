"""Make the table of presets that `--hardware` accepts, with the peaks that their sources state."""

from __future__ import annotations

from collections.abc import Iterator

from chunkc.ir.links import TO_DEVICE
from chunkc.ir.units import short_nbytes
from chunkc.machines.datasheets import Efficiency
from chunkc.machines.presets import PRESETS, preset

LIST = "list"
"""Value of `--hardware` that prints this table."""

_PEAKS = Efficiency(matrix=1, memory=1, link=1, both_links=1, cpu_update=1, disk=1)
_TITLES = ("name", "memory", "fp16/bf16 TFLOPS", "memory GB/s", "link GB/s", "host RAM", "source")


def hardware_table() -> str:
    """Return a line of titles and one for each preset; columns are padded, except the last."""
    rows = [_TITLES, *_rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, [*widths[:-1], 0])) for row in rows)


def _rows() -> Iterator[tuple[str, ...]]:
    for name in PRESETS:
        peaks = preset(name, _PEAKS)
        assert peaks.device_memory_nbytes is not None
        assert peaks.host_memory_nbytes is not None
        fp16, bf16 = (
            "-" if rate is None else f"{rate / 1e12:.4g}" for rate in (peaks.fp16_flops_per_s, peaks.bf16_flops_per_s)
        )
        link = peaks.link(TO_DEVICE)
        assert link is not None
        yield (
            name,
            short_nbytes(peaks.device_memory_nbytes),
            fp16 if fp16 == bf16 else f"{fp16}/{bf16}",
            f"{peaks.memory_bytes_per_s / 1e9:.4g}",
            f"{link.bytes_per_s / 1e9:.4g}",
            short_nbytes(peaks.host_memory_nbytes),
            peaks.source,
        )
