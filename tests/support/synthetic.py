"""Explanations made by hand: small ones with known numbers, and large ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from chunkc.ir.explanation import (
    COMPUTE,
    Chunks,
    ExplainedMoment,
    Explanation,
    HostNeeds,
    Measured,
    Peak,
    Ranks,
    StepTime,
    TimedEvent,
    Traffic,
)
from chunkc.ir.links import BETWEEN_DEVICES, BETWEEN_HOSTS, GATHER, SCATTER, TO_DEVICE, TO_HOME

MIB = 1024**2
MS = 1e-3

PLAN = """plan: budget 209,715,200 bytes, minimum 157,286,400, predicted peak 199,229,440
resident groups: [0]; kept for the backward: ['param:2']
    prefetch(param:1)
    wait(param:1)
forward.0                104,857,600 = 20,971,520 resident + 41,943,040 non-model + 41,943,040 slots   aten.mm
"""

GRAPHS = {
    "forward": "def forward(self, primals_1):\n    wait = chunk_ops_wait('param:1')\n"
    "    segment0 = self.segment0(primals_1)\n    return segment0\n",
    "backward": "def forward(self, tangents_1):\n    return self.segment1(tangents_1)\n",
}


def moment(call: str, op: str, start_s: float, module: str = "model.layers.0", **mib: int) -> ExplainedMoment:
    contents = {kind.replace("_", " "): n * MIB for kind, n in mib.items()}
    phase = call.partition(".")[0]
    return ExplainedMoment(call, phase, op, module, "model.py:12" if module else "", start_s, contents)


def event(
    stream: str, kind: str, name: str, start_ms: float, end_ms: float, mib: int = 0, phase: str = "forward"
) -> TimedEvent:
    module = "model.layers.0" if kind == "call" else ""
    return TimedEvent(stream, kind, name, start_ms * MS, end_ms * MS, mib * MIB, phase, module)


EVENTS = (
    event(TO_DEVICE, "prefetch", "param:1", 0, 2, 20),
    event(COMPUTE, "stall", "param:1", 0, 2),
    event(TO_DEVICE, "prefetch", "param:2", 2, 4, 20),
    event(COMPUTE, "call", "forward.0", 2, 5),
    event(COMPUTE, "call", "backward.0", 5, 11, phase="backward"),
    event(TO_HOME, "write_back", "grad:1", 8, 10, 20, phase="backward"),
    event(COMPUTE, "update", "update.0", 11, 12, phase="update"),
)

MOMENTS = (
    moment("forward.0", "aten.mm", 2 * MS, parameters=20, slots=40, activations=30, temporaries=10),
    moment("forward.0", "aten.gelu", 4 * MS, parameters=20, slots=40, activations=50),
    moment("backward.0", "aten.mm", 5 * MS, parameters=20, slots=80, activations=60, temporaries=30),
    moment("backward.0", "aten.<sum>", 9 * MS, parameters=20, slots=60, activations=20),
    moment("update.0", "adamw", 11 * MS, "", parameters=20, slots=80),
)


def small(**changes: Any) -> Explanation:
    """Make an explanation with a peak of 190 MiB in `backward.0`, a budget of 200 MiB and a smallest one of 150 MiB.

    A step takes 12 ms, 2 ms of it stall.
    """
    activations = {f"activations: model.layers.{i}": 15 * MIB for i in range(4)}
    values = Explanation(
        model="small, batch 2",
        hardware="testbench",
        codegen="eager",
        fits=True,
        host_fits=True,
        num_parameters=15_728_640,
        memory_budget_nbytes=200 * MIB,
        minimum_budget_nbytes=150 * MIB,
        predicted_peak_nbytes=190 * MIB,
        non_model_peak_nbytes=90 * MIB,
        overhead_nbytes=30 * MIB,
        home_nbytes=160 * MIB,
        disk_nbytes=60 * MIB,
        device_memory_nbytes=256 * MIB,
        host_memory_nbytes=1024 * MIB,
        peak=Peak(
            "backward.0",
            "aten.mm",
            "model.layers.0",
            {"slots: param:1": 40 * MIB, "slots: grad:1": 40 * MIB, "temporaries: model.layers.0.mlp": 30 * MIB}
            | {"parameters: model.norm": 20 * MIB}
            | activations,
        ),
        chunks=Chunks(size_nbytes=20 * MIB, count=3, resident=1),
        traffic_nbytes=Traffic(to_device=40 * MIB, to_home=20 * MIB),
        step_time_s=StepTime(
            total=12 * MS, compute=9 * MS, to_device=4 * MS, to_home=2 * MS, optimizer=MS, stall=2 * MS
        ),
        moments=MOMENTS,
        events=EVENTS,
        notes=("Rates are those of the data sheet.",),
        graphs=GRAPHS,
        plan_text=PLAN,
        host=HostNeeds(90 * MIB, 80 * MIB, 100 * MIB, 110 * MIB, 140 * MIB),
    )
    return dataclasses.replace(values, **changes)


def ranked(**changes: Any) -> Explanation:
    """Make the explanation of rank 0 of four on two hosts, two on each, which gathers twice and scatters once."""
    exchanges = (
        event(GATHER, "prefetch", "param:1", 0, 2, 40),
        event(GATHER, "prefetch", "param:2", 2, 4, 40),
        event(SCATTER, "write_back", "grad:1", 8, 10, 40, phase="backward"),
    )
    own = tuple(e for e in EVENTS if e.stream == COMPUTE)
    link_nbytes = {TO_DEVICE: 20 * MIB, TO_HOME: 10 * MIB, BETWEEN_DEVICES: 90 * MIB, BETWEEN_HOSTS: 90 * MIB}
    ranks = Ranks(4, 2, 2, zero_stage=3, num_parameters=3_932_160, gathers=2, scatters=1, link_nbytes=link_nbytes)
    return small(**({"ranks": ranks, "events": (*exchanges, *own)} | changes))


def not_fitting(**changes: Any) -> Explanation:
    return small(**({"fits": False, "memory_budget_nbytes": 100 * MIB, "minimum_budget_nbytes": 190 * MIB} | changes))


def measured(**changes: Any) -> Measured:
    late = tuple(dataclasses.replace(e, start_s=1.1 * e.start_s, end_s=1.1 * e.end_s) for e in EVENTS)
    values = Measured(
        peak_nbytes=188 * MIB,
        moments=(("forward.0", 110 * MIB), ("backward.0", 188 * MIB), ("update.0", None)),
        time_s={"compute": 0.03, "wait": 0.01, "to_device": 0.012, "to_home": 0.006},
        events=late,
    )
    return dataclasses.replace(values, **changes)


def large(num_layers: int, ops_per_call: int = 10) -> Explanation:
    """Make an explanation of `4 * num_layers` calls: a decoder's forward and backward, with a peak in the middle.

    Chunks are copied in and out.
    """
    moments: list[ExplainedMoment] = []
    events: list[TimedEvent] = []
    now, half = 0.0, 2 * num_layers
    for index in range(2 * half):
        forward = index < half
        depth = index if forward else 2 * half - 1 - index
        phase, layer = ("forward" if forward else "backward"), depth // 2
        name, module = f"{phase}.{index % half}", f"model.layers.{layer}.{'attn' if depth % 2 else 'mlp'}"
        length = (2e-3 if forward else 4e-3) * (1 + 0.5 * (depth % 2))
        events.append(TimedEvent(TO_DEVICE, "prefetch", f"param:{layer}", now, now + 0.8 * length, 64 * MIB, phase, ""))
        if index % 16 == 7:
            stall = 0.4 * length
            events.append(TimedEvent(COMPUTE, "stall", f"param:{layer}", now, now + stall, 0, phase, ""))
            now += stall
        events.append(TimedEvent(COMPUTE, "call", name, now, now + length, 0, phase, module))
        if not forward:
            events.append(
                TimedEvent(
                    TO_HOME, "write_back", f"grad:{layer}", now + 0.2 * length, now + 0.9 * length, 64 * MIB, phase, ""
                )
            )
        for op in range(ops_per_call):
            contents = {
                "parameters": 300 * MIB,
                "slots": (3 if forward else 5) * 64 * MIB,
                "activations": (200 + (depth * 2000) // half) * MIB,
                "temporaries": (20 + 37 * ((op * 7 + depth) % 9)) * MIB,
            }
            source = f"modeling.py:{100 + op}"
            moments.append(
                ExplainedMoment(
                    name, phase, f"aten.op{op}.default", module, source, now + op / ops_per_call * length, contents
                )
            )
        now += length
    peak = max(moments, key=lambda m: m.nbytes)
    per_layer = {f"activations: model.layers.{i}": 2000 * MIB // num_layers for i in range(num_layers)}
    kinds = {f"{kind}: all": nbytes for kind, nbytes in peak.contents.items() if kind != "activations"}
    return small(
        model=f"decoder of {num_layers} layers, batch 4",
        hardware="rtx3090",
        memory_budget_nbytes=4 * 1024 * MIB,
        minimum_budget_nbytes=2900 * MIB,
        predicted_peak_nbytes=peak.nbytes,
        non_model_peak_nbytes=2500 * MIB,
        peak=Peak(peak.call, peak.op, peak.module, per_layer | kinds),
        step_time_s=StepTime(now, 0.9 * now, 0.8 * now, 0.4 * now, 0.05 * now, 0.05 * now),
        moments=tuple(moments),
        events=tuple(events),
    )
