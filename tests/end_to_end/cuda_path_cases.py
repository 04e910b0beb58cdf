"""Cases of `test_cuda_path.py`, for a process where Triton is interpreted from its first import on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from cuda_path_subjects import STEPS, Subject, adamw, budget, case, on_fake_gpu, on_gpu
from fake_gpu import FakeGpu
from harness import array, differences, take_step
from torch import Tensor

import chunkc
import chunkc.optim.on_device
import chunkc.optim.pending_steps
import chunkc.session.session
from chunkc.machines.presets import preset
from chunkc.optim.update_mode import UpdateMode


def test_triton_trains_as_torch() -> None:
    results, model = on_gpu(case(), 0), case().build()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), []
    for step in range(STEPS):
        losses.append(model(**case().batch(step)))
        take_step(losses[-1], optimizer)
    for found, expected in zip(results, [*losses, *model.parameters()], strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected.detach(), rtol=1e-5, atol=1e-6)


FP32, BF16 = torch.float32, torch.bfloat16
ADAMW = chunkc.optim.AdamW
RULES: list[tuple[torch.dtype, Any, dict[str, Any]]] = [
    (FP32, ADAMW, {}),
    (FP32, ADAMW, {"moments_dtype": "int8"}),
    (BF16, ADAMW, {"moments_dtype": BF16, "stochastic_rounding": True}),
    (BF16, chunkc.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    (FP32, chunkc.optim.LAMB, {}),
]


def test_the_budget_changes_no_bit() -> None:
    for codegen, rules in (("eager", RULES), ("inductor", RULES[:1])):
        for dtype, rule, settings in rules:
            results = []
            for percent in (0, 100):
                with on_fake_gpu():
                    room_nbytes = 1 << 16 if codegen == "inductor" else 0
                    subject = Subject(case(dtype), budget(case(dtype), percent) + room_nbytes, codegen=codegen)
                    results.append(subject.train(rule(subject.model.parameters(), lr=1e-2, **settings)))
            assert not differences(*results), (codegen, dtype, rule, settings)


def test_memory_that_cannot_be_pinned_changes_no_bit() -> None:
    of = case(torch.bfloat16)
    expected = on_gpu(of, 0)
    for lockable_nbytes, views_pageable, num_unpinned in ((8 * 8192, False, 0), (0, True, 8)):
        for update_on in ("device", "cpu"):
            gpu = FakeGpu(longest_s=0.001, lockable_nbytes=lockable_nbytes, views_pageable=views_pageable)
            with on_fake_gpu(gpu):
                subject = Subject(of, budget(of, 0))
                assert len(gpu.unpinned) == num_unpinned // 2  # parameters
                found = subject.train(adamw(subject, update_on))
                assert len(gpu.unpinned) > num_unpinned  # and gradients, and states
                if update_on == "device":
                    assert not differences(found, expected)


def test_updates_at_home_have_the_bits_of_the_cpu_s_slots() -> None:
    of = case()
    at_home = on_gpu(of, 0, "cpu")
    subject = Subject(of, budget(of, 0))
    chunked = subject.train(adamw(subject))
    norms = {i for i, p in enumerate(subject.model.parameters()) if p.dim() == 1}
    for index, (found, expected) in enumerate(zip(at_home[STEPS:], chunked[STEPS:], strict=True)):
        if index not in norms:  # those Triton updated
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-6, atol=1e-7)


def test_some_here_and_some_there() -> None:
    with on_fake_gpu():
        of = case()
        subject = Subject(of, budget(of, 0))
        optimizer = adamw(subject, "auto")
        loss = subject.compiled(**of.batch(0))
        loss.backward()
        session = subject.session
        groups = session.store.layout.groups
        mode, home = UpdateMode(update_on="auto"), session.options.home
        assert mode.at_home(groups, session.hardware, home=home) == frozenset()  # the CPU stands for a device
        session.device, session.hardware = torch.device("cuda:0"), preset("h200")
        at_home = mode.at_home(groups, session.hardware, home=home)
        assert 0 < len(at_home) < len(groups), at_home
        moved = session.store.slots.traffic.to_device_nbytes
        optimizer.step()
        subject.settle()
        kinds = 4 * sum(session.store.layout.groups[g].nbytes("param") for g in range(len(groups)) if g not in at_home)
        assert session.store.slots.traffic.to_device_nbytes - moved == kinds  # what is updated at home moved nowhere
        stepped = [float(optimizer.state[p]["step"]) for p in subject.model.parameters()]
        assert stepped == [1.0] * len(stepped)


def overlapped(mode: str, seed: int = 0, updates_s: float = 0.0) -> list[Any]:
    """Losses and weights of training with `overlap=mode`; updates come up to `updates_s` late, jobs of streams too."""
    of, gpu, random = case(), FakeGpu(longest_s=0.001), Random(seed)
    gpu.reseed(seed)
    with on_fake_gpu(gpu):
        subject = Subject(of, budget(of, 0))
        subject.session.store.updates._stream._delay = lambda: random.uniform(0.5, 1.0) * updates_s
        optimizer = adamw(subject, "cpu", overlap=mode)
        return subject.train(optimizer)


def test_overlapping_updates_change_no_bit() -> None:
    expected = overlapped("none")
    for mode in ("forward", "backward", "both"):
        for seed in range(2):
            assert not differences(overlapped(mode, seed, 0.01), expected), (mode, seed)


class LateAnswer:
    """Arrives when two more were asked for."""

    asked = 0

    def __init__(self, number: Tensor) -> None:
        self.number = float(number)
        LateAnswer.asked += 1
        self.due = LateAnswer.asked + 2

    def arrived(self) -> bool:
        return LateAnswer.asked >= self.due

    def read(self) -> float:
        return self.number


def skipping(make: Callable[[Subject], Any], remote: bool) -> tuple[list[Any], list[float]]:
    """Steps 1 and 2 of 6 overflow; one parameter has no gradient in step 2. Only the device knows, if `remote`."""
    former = chunkc.optim.pending_steps.is_remote, chunkc.optim.pending_steps.Answer
    chunkc.optim.pending_steps.is_remote, chunkc.optim.pending_steps.Answer = (lambda number: remote), LateAnswer
    try:
        with on_fake_gpu():
            subject = Subject(case(), budget(case(), 0))
            optimizer, counted = make(subject), []
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
            first, *_, last = subject.model.parameters()
            for step in range(6):
                loss = subject.compiled(**case().batch(step)) * (float("inf") if step in (1, 2) else 1.0)
                scaler.scale(loss).backward()
                subject.settle()
                if step == 2:
                    first.grad = None
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                counted.append(float(optimizer.state[last]["step"]))
            subject.settle()
            states = optimizer.state_dict()["state"]
            found = [array(state[kind]) for state in states.values() for kind in sorted(state)]
            return [*found, *(array(p) for p in subject.model.parameters())], counted
    finally:
        chunkc.optim.pending_steps.is_remote, chunkc.optim.pending_steps.Answer = former


def test_nobody_waits_to_know_whether_a_step_overflowed() -> None:
    def lamb(subject: Subject) -> Any:
        return chunkc.optim.LAMB(subject.model.parameters(), lr=1e-2, weight_decay=0.1)

    for make in (adamw, lamb, lambda subject: adamw(subject, "cpu")):
        seen, counted = skipping(make, remote=False)
        assert counted == [1, 1, 1, 2, 3, 4], counted
        found, optimistic = skipping(make, remote=True)
        assert not differences(found, seen)
        if make in (adamw, lamb):
            assert optimistic != counted  # the host was told late


def test_random_bits_wait_for_the_number_of_the_step() -> None:
    def make(subject: Subject) -> Any:
        return adamw(subject, moments_dtype=torch.bfloat16, stochastic_rounding=True)

    found, counted = skipping(make, remote=True)
    assert counted == [1, 1, 1, 2, 3, 4], counted
    assert not differences(found, skipping(make, remote=False)[0])


def test_tables_are_made_once_and_steps_stay_on_the_host() -> None:
    of = case()
    with on_fake_gpu():
        subject = Subject(of, budget(of, 0))
        optimizer = adamw(subject)
        subject.train(optimizer, 1)
        (adam,) = optimizer._updaters.values()
        tables = dict(adam.tables.items())
        subject.train(optimizer, 2)
        assert {key: id(t) for key, t in adam.tables.items()} == {key: id(t) for key, t in tables.items()}
        assert all(state["step"].device.type == "cpu" for state in optimizer.state.values())
        restored = adamw(subject)
        restored.load_state_dict(optimizer.state_dict())
        subject.settle()
        for p in subject.model.parameters():
            for kind, value in optimizer.state[p].items():
                assert torch.equal(restored.state[p][kind], value), kind


def interpreted(name: str) -> None:
    globals()[name]()
