"""Measures this machine, in a process of its own: `chunkc.machines.calibrate`'s figures as one line of JSON.

python rates.py '{"device": "cpu", "is_small": true}'
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.metrics import Row, Section, Unit, one
from measuring.subject_process import Process, Spec, Timeout, only_replies

from chunkc.ir.hardware import Hardware
from chunkc.ir.links import TO_DEVICE, TO_HOME, LinkSpec
from chunkc.machines.calibrate import MIB, Sizes, calibrate

_SMALL = Sizes(
    matrix=512,
    memory_nbytes=16 * MIB,
    link_nbytes=4 * MIB,
    update_numel=MIB // 4,
    disk_nbytes=4 * MIB,
    repeats=2,
    share_s=0.2,
    enough_s=0.005,
)


@dataclass(frozen=True)
class RatesSpec(Spec):
    """Rates to measure; `is_small`: quickly."""

    SCRIPT = "suites/rates.py"

    device: str
    is_small: bool


def measure(spec: RatesSpec, cache: Path, *, timeout_s: Timeout) -> Hardware:
    """The machine's rates, measured in a fresh process.

    Raises:
        SubjectFailed: the process failed.
    """
    with Process(spec, cache, timeout_s=timeout_s) as process:
        links = tuple(LinkSpec(**link) for link in process.ready["links"])
        return Hardware(**process.ready | {"links": links})


def section_of(hardware: Hardware) -> Section:
    """Make a table of the rates."""
    rates: dict[str, tuple[Unit, float | None]] = {
        "matrix products": ("flops_per_s", hardware.flops_per_s),
        "memory": ("nbytes_per_s", hardware.memory_bytes_per_s),
        **{
            link.name.replace("_", " "): ("nbytes_per_s", link.bytes_per_s)
            for link in hardware.links
            if link.name in (TO_DEVICE, TO_HOME)
        },
        "both at once": ("nbytes_per_s", hardware.both_links_bytes_per_s),
        "CPU update": ("nbytes_per_s", hardware.cpu_update_bytes_per_s),
    }
    metrics = {name: one(unit, rate) for name, (unit, rate) in rates.items() if rate is not None}
    return Section("The machine", {"source": hardware.source}, [Row({"": "rate"}, metrics)])


def _main() -> None:
    reply = only_replies()
    fields = json.loads(sys.argv[1])
    hardware = calibrate(device=fields["device"], sizes=_SMALL if fields["is_small"] else None)
    reply(asdict(hardware))


if __name__ == "__main__":
    _main()
