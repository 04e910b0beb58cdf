"""The verifier: what the planner makes is valid, and bytes are counted exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from verify_cases import LAYOUT, PHASES, SPARES, case

from chunkc.ir import chunk_ops
from chunkc.ir.layout import Chunk, ParamSpec
from chunkc.ir.states import StateFormat
from chunkc.ir.verify.updates import UpdatedGroups
from chunkc.ir.verify.verifier import verify_phase
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.room import fixed_nbytes
from chunkc.session.session import owner


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("spare", SPARES)
def test_what_the_planner_makes_is_valid_and_its_bytes_are_counted_exactly(phase: str, spare: int) -> None:
    """The planner's lifetimes and the verifier's reference counts come to the same peak."""
    subject = case(phase, spare)
    assert subject.violations() == []
    name = "forward" if phase == "casting" else phase
    peak = max(m.nbytes for p in subject.plan.phases if p.phase == name for m in p.moments)
    assert subject.violations(budget_nbytes=peak) == []
    assert subject.rules(budget_nbytes=peak - 1) == {"budget"}


FORMATS = [
    StateFormat(moments, master)
    for moments in ("float32", "bfloat16", "int8")
    for master in ("split", "float32", "none")
]


@pytest.mark.parametrize("states", FORMATS, ids=str)
@pytest.mark.parametrize("granule_nbytes", [1, 512])
@pytest.mark.parametrize("resident", [(), (1,), (0, 1, 2)])
def test_what_stays_is_added_up_anew(states: StateFormat, granule_nbytes: int, resident: tuple[int, ...]) -> None:
    """Planner and verifier come to the same bytes, each by its own sums."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    specs = [
        ParamSpec(f"{name}.{index}", shape, (1,), dtype, trainable, granule_nbytes, states.seen_by(dtype))
        for index, (dtype, trainable) in enumerate(zip(dtypes, (True, True, False)))
        for name, shape in (("weight", (1000,)), ("bias", (3,)))
    ]
    layout = replace(lay_out(specs, 4096), overhead_nbytes=77)
    assert (len(layout.groups), len(layout.small)) == (3, 3)
    moving = next((group.index for group in layout.groups if group.index not in resident), None)
    graph = fx.Graph()
    if moving is None:
        graph.call_function(chunk_ops.settle, (0,))  # any node: bytes are looked at there
    else:
        for event, *link in (("prefetch", "to_device"), ("wait", "to_device"), ("evict",)):
            graph.call_function(chunk_ops.EVENT_TARGETS[event], (Chunk("param", moving), *link))
    slots_nbytes = 0 if moving is None else layout.chunk_nbytes_of(Chunk("param", moving))
    needed = fixed_nbytes(layout, frozenset(resident)) + 55 + slots_nbytes

    def violations(budget_nbytes: int) -> set[str]:
        found = verify_phase(
            graph, layout=layout, memories={}, resident=resident, external_nbytes=55, budget_nbytes=budget_nbytes
        )
        return {violation.partition(" ")[0] for violation in found} - {"home"}

    assert violations(needed) == set()
    assert violations(needed - 1) == {"budget"}


class _Model(nn.Module):
    """Its backward needs neither its input nor its output: both are the caller's all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * 3


def test_a_stage_begins_once_every_element_has_been_through_the_one_before() -> None:
    updated = UpdatedGroups(LAYOUT)
    half, rest = (0, 512), (512, 1024)
    assert updated.add(0, half, 0, 2)
    assert not updated.add(0, half, 1, 2)
    assert updated.add(0, rest, 0, 2)
    assert updated.add(0, rest, 1, 2)


def test_bytes_of_a_compiled_model_are_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a phase's predicted peak nothing is reported, one byte below it is: what the caller holds counts."""
    import chunkc.policy.plans as plans_module

    seen: dict[str, tuple[fx.Graph, dict[str, Any]]] = {}

    def recording(graph: fx.Graph, **options: Any) -> list[str]:
        phase = next(n for n in graph.nodes if n.op == "call_module").meta["call"].partition(".")[0]
        seen[phase] = (graph, options)
        return verify_phase(graph, **options)

    monkeypatch.setattr(plans_module, "verify_phase", recording)
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"memory_budget": 400_000, "codegen": "eager", "chunk_size": 16640, "whole_graph": "never"}
    plain = _Model()
    inputs = torch.randn(32, 64)
    output = torch.compile(plain, backend="chunkc", options=options)(inputs)
    output.square().sum().backward()  # beside both, which a plan counts as held
    hit = owner(plain.layers[0].weight)
    assert hit is not None
    assert set(seen) == {"forward", "backward"}
    for phase, (graph, found) in seen.items():
        plan = hit[0].records.latest[phase].plan
        plan = plan.beginning_with(plan.gradients)  # the budget holds with earlier gradients too
        peak = max(moment.nbytes for moment in plan.moments if moment.phase == phase)
        assert verify_phase(graph, **(found | {"budget_nbytes": peak})) == []
        below = verify_phase(graph, **(found | {"budget_nbytes": peak - 1}))
        assert below, f"the {phase} needs {peak:,} bytes, and passes with one less"
