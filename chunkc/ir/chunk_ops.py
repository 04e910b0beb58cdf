"""The chunk nodes of a rewritten FX graph. They are targets only: the runtime lowers them, nothing calls them.

%prefetch   = prefetch("param:3")                      take a slot, start to fill it from home
%wait       = wait("param:3")                          the copy, either way, is done
%p          = parameter("param:3", "h.2.mlp.weight")   a view of the slot
%sink       = sink("h.2.mlp.weight", "grad:3", %g, True)   a gradient into its slot (None: resident, into
                                                       `p.grad`); True: nothing else reads its storage
%write_back = write_back("grad:3")                     start to copy the slot home
%evict      = evict("param:3")                         give the slot back
%settle     = settle(3)                                group 3 is settled: its gradients are complete and on their way
                                                       home, and the phase reads and writes nothing of it there again
%update     = update(3, 0, 65536)                      one fused optimizer pass over these elements of group 3
%update_1   = update(3, 0, 65536, 1, 2)                the second stage of two
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK


def _never_called(name: str) -> NoReturn:
    raise AssertionError(f"{name} is lowered by the runtime and never called")


def prefetch(chunk: str) -> None:
    _never_called("prefetch")


def wait(chunk: str) -> None:
    _never_called("wait")


def evict(chunk: str) -> None:
    _never_called("evict")


def write_back(chunk: str) -> None:
    _never_called("write_back")


def parameter(chunk: str, name: str) -> None:
    _never_called("parameter")


def sink(parameter_name: str, chunk: str | None, gradient: object, owned: bool) -> None:
    _never_called("sink")


def settle(group: int) -> None:
    _never_called("settle")


def update(group: int, begin: int, end: int, stage: int = 0, num_stages: int = 1) -> None:
    _never_called("update")


EVENT_TARGETS: dict[str, Callable[[str], None]] = {
    PREFETCH: prefetch,
    WAIT: wait,
    EVICT: evict,
    WRITE_BACK: write_back,
}
