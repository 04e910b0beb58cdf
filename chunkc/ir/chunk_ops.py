"""Define the chunk nodes of a rewritten FX graph. They are targets only: the runtime lowers them, nothing calls them.

%prefetch   = prefetch("param:3", "to_device")         take a slot, start to fill it from home over the link
%wait       = wait("param:3", "to_device")             hold the computation until the copy on that link is done
%p          = parameter("param:3", "h.2.mlp.weight")   a view of the slot
%sink       = sink("h.2.mlp.weight", "grad:3", %g, True)   a gradient into its slot (None: resident, into
                                                       `p.grad`); True: no other value reads its storage
%write_back = write_back("grad:3", "to_home")          start to copy the slot home over that link
%evict      = evict("param:3")                         give the slot back
%settle     = settle(3)                                group 3 is complete: its gradients are home or on their way, and
                                                       the phase reads and writes nothing of its home after this
%update     = update(3, 0, 65536)                      one fused optimizer pass over these elements of group 3
%update_1   = update(3, 0, 65536, 1, 2)                the second stage of two

For a storage that the forward saves, in the forward and in the backward:

%write_back = write_back("forward.3:0", "to_home", 512, %a, %b)  start to copy its 512 bytes home; %a and %b lie in it
%wait       = wait("forward.3:0", "to_home")                     that copy is done
%evict      = evict("forward.3:0", %a, %b)                       the storage is released
%getitem    = getitem(%evict, 1)                                 the placeholder of %b until the backward
%prefetch   = prefetch("forward.3:0", "to_device", 512, %a, %b)  take 512 bytes, start to fill them
%wait       = wait("forward.3:0", "to_device", %prefetch)        that copy is done
%getitem_1  = getitem(%wait, 1)                                  the value that %b is the placeholder of

For a storage that the forward drops and the backward recomputes:

%evict      = evict("forward.3:0", %a, %b)                       without a copy: what lies in it is not kept for the
                                                                 backward; the forward may still read it
%getitem    = getitem(%evict, 1)                                 the placeholder of %b until the backward
%recompute  = recompute("forward.3:0", %c, %a, %b)               it is the storage of %c, which a repeated call computed
%getitem_1  = getitem(%recompute, 1)                             the value that %b is the placeholder of
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from chunkc.ir.items import MovedId, SavedStorage
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK


def _never_called(name: str) -> NoReturn:
    raise AssertionError(f"{name} is lowered by the runtime and never called")


def prefetch(item: MovedId, link: str, *nbytes_and_stand_ins: object) -> None:
    _never_called("prefetch")


def wait(item: MovedId, link: str, *prefetched: object) -> None:
    _never_called("wait")


def evict(item: MovedId, *values: object) -> None:
    _never_called("evict")


def write_back(item: MovedId, link: str, *nbytes_and_values: object) -> None:
    _never_called("write_back")


def parameter(chunk: Chunk, name: str) -> None:
    _never_called("parameter")


def sink(parameter_name: str, chunk: Chunk | None, gradient: object, owned: bool) -> None:
    _never_called("sink")


def settle(group: int) -> None:
    _never_called("settle")


def update(group: int, begin: int, end: int, stage: int = 0, num_stages: int = 1) -> None:
    _never_called("update")


def recompute(storage: SavedStorage, made: object, *stand_ins: object) -> None:
    _never_called("recompute")


EVENT_TARGETS: dict[str, Callable[..., None]] = {
    PREFETCH: prefetch,
    WAIT: wait,
    EVICT: evict,
    WRITE_BACK: write_back,
}
