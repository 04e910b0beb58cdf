"""Updates at home under Ctrl-C, wherever it comes: each is waited for, or never runs, and no failure is forgotten."""

from __future__ import annotations

import dis
import functools
import re
import sys
from types import CodeType, FrameType
from typing import Any

import pytest
from runtime_helpers import ctrl_c_in_a_wait, raiser
from update_cases import Gate

from chunkc.ir.errors import StreamError
from chunkc.runtime.device import streams as streams_module
from chunkc.runtime.device import updates as updates_module
from chunkc.runtime.device.updates import HomeUpdate, HomeUpdates

pytestmark = pytest.mark.timeout(60)


def note_when_opened(gate: Gate, ran: list[int]) -> None:
    """A job that stands still until the gate opens."""
    gate.wait()
    ran.append(1)


def test_an_interrupted_finish_forgets_no_failure() -> None:
    updates, gate = HomeUpdates(), Gate()
    updates.begin(0, HomeUpdate(raiser(ValueError("no such thing")), "the first"))
    updates.begin(1, HomeUpdate(gate.wait, "the second"))
    with pytest.raises(KeyboardInterrupt), ctrl_c_in_a_wait():
        updates.finish()
    gate.opened.set()
    with pytest.raises(StreamError, match="the first"):
        updates.finish()


class Interrupter:
    """A trace function: KeyboardInterrupt where Python may deliver a signal, at the `at`-th such place of this room.

    Python looks for signals after calls, at the beginning of functions and in loops.
    """

    DELIVERS = re.compile("CALL|RESUME|JUMP_BACKWARD")

    def __init__(self, at: int) -> None:
        self.left, self.delivered = at, False
        self.names: dict[CodeType, dict[int, str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (updates_module.__file__, streams_module.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        names = self.names.get(frame.f_code)
        if names is None:
            names = self.names[frame.f_code] = {i.offset: i.opname for i in dis.get_instructions(frame.f_code)}
        delivers = [True]  # at the beginning of the function

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if event == "opcode":
                due, delivers[0] = delivers[0], bool(self.DELIVERS.match(names.get(frame.f_lasti, "")))
                self.left -= due
                if due and self.left == 0:
                    self.delivered = True
                    raise KeyboardInterrupt
            return trace

        return trace


@pytest.mark.parametrize("is_first", [True, False])
def test_an_update_that_is_interrupted_anywhere_as_it_begins_is_waited_for_or_never_runs(is_first: bool) -> None:
    outcomes = set()
    for at in range(1, 200):
        updates, gate, ran = HomeUpdates(), Gate(), list[int]()
        if not is_first:  # the thread is there
            updates.begin(1, HomeUpdate(lambda: None, ""))
            updates.finish()
        update = HomeUpdate(functools.partial(note_when_opened, gate, ran), "it")
        interrupter, former = Interrupter(at), sys.gettrace()
        sys.settrace(interrupter)
        try:
            updates.begin(0, update)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(former)
        has_begun = updates.has(0, update)
        assert bool(updates.before(0)) == has_begun
        gate.opened.set()
        updates.finish()
        assert len(ran) == has_begun
        updates._stream.drain()
        assert len(ran) == has_begun, "it ran, or ran again, when nobody waited for it any more"
        outcomes.add((interrupter.delivered, has_begun))
        if not interrupter.delivered:
            break
    assert outcomes == {(True, False), (True, True), (False, True)}
