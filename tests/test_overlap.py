"""`overlap`: the bits of an update inside `step()`, whatever is late; without a wait, others; misuse raises."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import TINY, array, compile_case, differences, refuse
from torch import Tensor, nn
from zoo import Case, floats

import chunkc
from chunkc.runtime.store import ChunkStore
from chunkc.runtime.tier import CpuTier
from chunkc.session import owner

pytestmark = pytest.mark.timeout(120)

MODES = ("forward", "backward", "both")
SLOW_S = 0.03


class Stack(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def case(dtype: torch.dtype = torch.float32) -> Case:
    return Case("stack", lambda: Stack(dtype), lambda seed: {"x": floats(seed, (4, 64)).to(dtype)})


class Late:
    """Seconds by which jobs come late: at random by a seed, or all by as much."""

    def __init__(self, seed: int | None = None, fixed_s: float = 0.0) -> None:
        self.random, self.fixed_s = random.Random(seed), fixed_s
        self.seed = seed

    def __call__(self) -> float:
        if self.seed is None or not self.fixed_s:
            return self.fixed_s
        return self.random.uniform(0.0, self.fixed_s) if self.random.random() < 0.5 else 0.0


class Subject:
    """The model, compiled under its minimum, each layer a chunk; copies and updates come late as the two say."""

    def __init__(self, overlap: str, copies: Late, updates: Late, of: Case | None = None) -> None:
        self.case = of or case()
        nbytes = minimum_nbytes(self.case)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("chunkc.runtime.devices.CpuTier", lambda: CpuTier(delay=copies))
            self.model, self.compiled = compile_case(self.case, memory_budget=nbytes, whole_graph="never")
        self.session: Any = owner(next(self.model.parameters()))[0]  # type: ignore[index]
        self.store: ChunkStore = self.session.store
        self.store.updates._stream._delay = updates
        self.optimizer = chunkc.optim.AdamW(
            self.model.parameters(), lr=1e-2, weight_decay=0.1, update_on="cpu", overlap=overlap
        )

    def backward(self, step: int) -> Tensor:
        loss = self.compiled(**self.case.batch(step))
        loss.backward()
        return loss

    def train(self, steps: range, *, reading: bool) -> list[Any]:
        """Losses and gradients, and, if `reading`, parameters right after each step."""
        results: list[Any] = []
        for step in steps:
            results.append(array(self.backward(step)))
            results += [array(p.grad) for p in self.model.parameters()]
            self.optimizer.step()
            results += [array(p) for p in self.model.parameters() if reading]
            self.optimizer.zero_grad()
        return results

    def state(self) -> list[Any]:
        """Parameters and states, when all updates are over."""
        self.optimizer.synchronize()
        states = self.optimizer.state
        return [
            array(t) for p in self.model.parameters() for t in (p, *(states[p][kind] for kind in sorted(states[p])))
        ]

    @property
    def num_under_way(self) -> int:
        return len(self.store.updates._pending)


@functools.cache
def _minimum(dtype: torch.dtype) -> int:
    return refuse(case(dtype), memory_budget=TINY).minimum_nbytes


def minimum_nbytes(of: Case) -> int:
    return _minimum(next(of.build().parameters()).dtype)


def subject(overlap: str, **options: Any) -> Subject:
    return Subject(overlap, Late(), Late(), **options)


def results(made: Subject, mode: str) -> list[Any]:
    """All that may be read with this mode."""
    return [*made.train(range(4), reading=mode == "backward"), *made.state()]


@functools.cache
def expected(mode: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What `overlap="none"` gives."""
    return results(subject("none", of=case(dtype)), mode)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow)], ids=["few", "many"])
def test_late_copies_and_updates_change_no_bit(mode: str, seeds: range) -> None:
    for seed in seeds:
        found = results(Subject(mode, Late(seed, 0.004), Late(seed + 100, 0.02)), mode)
        assert not differences(found, expected(mode)), seed


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_changes_no_bit(mode: str) -> None:
    found = results(Subject(mode, Late(0, 0.004), Late(1, 0.02), case(torch.bfloat16)), mode)
    assert not differences(found, expected(mode, torch.bfloat16))


@pytest.mark.parametrize("name", ["lamb", "8 bits, rounded at random"])
def test_other_rules_change_no_bit(name: str) -> None:
    def train(overlap: str) -> list[Any]:
        made = Subject(overlap, Late(0, 0.004), Late(1, 0.02), case(torch.bfloat16))
        options: dict[str, Any] = {"update_on": "cpu", "overlap": overlap}
        if name == "lamb":
            made.optimizer = chunkc.optim.LAMB(made.model.parameters(), lr=1e-2, **options)
        else:
            options |= {"moments_dtype": "int8", "stochastic_rounding": True}
            made.optimizer = chunkc.optim.AdamW(made.model.parameters(), lr=1e-2, **options)
        return [*made.train(range(3), reading=False), *made.state()]

    assert not differences(train("both"), train("none"))


def test_it_does_overlap() -> None:
    made = Subject("both", Late(), Late(fixed_s=0.05))
    made.train(range(1), reading=False)
    assert made.num_under_way == 4, "step() waits"
    made.backward(1)
    assert made.num_under_way == 4, "nothing began in the backward"
    made.optimizer.step()
    made.optimizer.synchronize()
    assert made.num_under_way == 0


def test_the_next_forward_s_first_chunks_come_first() -> None:
    made, order = subject("forward"), []
    begin = made.store.updates.begin
    made.backward(0)
    made.store.updates._needed = dict.fromkeys([2, 0, 3, 1])
    made.store.updates.begin = lambda group, *args, **options: (order.append(group), begin(group, *args, **options))  # type: ignore[method-assign]
    made.optimizer.step()
    assert order == [2, 0, 3, 1]
    made.optimizer.synchronize()


# ---------------------------------------------------------------- each wait, left out


def without_fetch_after_update(patch: pytest.MonkeyPatch, made: Subject) -> None:
    patch.setattr(made.store.updates, "before", lambda group: ())


def without_arrival(patch: pytest.MonkeyPatch, made: Subject) -> None:
    patch.setattr(made.store, "home_moments", lambda group: [*made.store.tier.mark()])


def without_the_step_s_wait(patch: pytest.MonkeyPatch, made: Subject) -> None:
    patch.setattr(made.optimizer._overlap, "end_step", lambda session, at_home: None)


@pytest.mark.parametrize(
    ("mode", "copies_s", "updates_s", "leave_out"),
    [
        ("forward", 0.0, SLOW_S, without_fetch_after_update),
        ("backward", SLOW_S, 0.0, without_arrival),
        ("backward", 0.0, SLOW_S, without_the_step_s_wait),
    ],
)
def test_every_wait_matters(mode: str, copies_s: float, updates_s: float, leave_out: Any) -> None:
    for broken in (False, True):
        made = Subject(mode, Late(fixed_s=copies_s), Late(fixed_s=updates_s))
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                leave_out(patch, made)
            found = made.train(range(4), reading=mode == "backward")
            made.store.updates.finish()
        wanted = expected(mode)[: len(found)]
        assert bool(differences(found, wanted)) == broken


# ---------------------------------------------------------------- doors that wait


@contextmanager
def under_way(overlap: str = "forward") -> Iterator[Subject]:
    """Updates have been begun by a step, and are slow."""
    made = Subject(overlap, Late(), Late(fixed_s=SLOW_S))
    made.backward(0)
    made.optimizer.step()
    assert made.num_under_way
    yield made
    made.optimizer.synchronize()


def doors() -> dict[str, Any]:
    return {
        "synchronize": lambda m: m.optimizer.synchronize(),
        "chunkc.synchronize": lambda m: chunkc.synchronize(m.compiled),
        "state": lambda m: m.optimizer.state,
        "state_dict": lambda m: m.optimizer.state_dict(),
        "load_state_dict": lambda m: m.optimizer.load_state_dict(copy.deepcopy(m.optimizer.state_dict())),
        "zeroing": lambda m: m.optimizer.zero_grad(set_to_none=False),
        "deepcopy": lambda m: copy.deepcopy(m.optimizer),
        "pickle": lambda m: torch.save(m.optimizer, io.BytesIO()),
        "another forward": lambda m: m.compiled(**m.case.batch(1)),
        "another step": lambda m: (m.optimizer.step(), m.optimizer.synchronize()),
    }


@pytest.mark.parametrize("door", doors())
def test_doors_of_our_own_wait(door: str) -> None:
    with under_way() as made:
        doors()[door](made)
        assert all(not made.store.updates.before(group) for group in range(4))


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    whole, first = subject("both"), subject("both")
    expected_losses = whole.train(range(4), reading=False)
    found = first.train(range(2), reading=False)
    chunkc.synchronize(first.model)
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
    second = subject("both")
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    found += second.train(range(2, 4), reading=False)
    assert not differences(found, expected_losses)
    assert not differences(second.state(), whole.state())


def test_copies_and_pickles_keep_the_mode() -> None:
    optimizer = chunkc.optim.AdamW([nn.Parameter(torch.zeros(2))], update_on="cpu", overlap="both")
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(optimizer), torch.load(buffer, weights_only=False)):
        assert other._overlap.mode == "both"
        other.param_groups[0]["params"][0].grad = torch.ones(2)
        other.step()
        assert len(other.state) == 1


def test_what_compiled_code_does_not_train_is_updated_inside_the_step() -> None:
    with under_way() as made:
        made.optimizer.synchronize()
        made.session.trained -= {"layers.1.weight"}
        made.backward(1)
        made.optimizer.step()
        names = [{s.spec.name for s in group.slices} for group in made.store.layout.groups]
        ready = [not made.store.updates.before(group) for group in range(4)]
        index = next(i for i, group in enumerate(names) if "layers.1.weight" in group)
        assert ready[index]
        assert not all(ready)


def test_a_failed_update_is_named_at_the_next_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject("forward")
    made.train(range(1), reading=False)
    made.optimizer.synchronize()
    made.backward(1)
    with monkeypatch.context() as patch:
        patch.setattr("chunkc.adam_rule.adam_chunk_update", lambda *args, **options: 1 / 0)
        patch.setattr(made.optimizer, "_in_place", lambda *args: None)
        made.optimizer.step()
        with pytest.raises(chunkc.StreamError, match=r"chunk param:0 \(layers.0.weight.*division by zero"):
            made.backward(2)
    with pytest.raises(chunkc.StreamError, match=r"layers.*division by zero"):
        made.optimizer.synchronize()
    made.optimizer.zero_grad()
    made.train(range(3, 4), reading=False)


# ---------------------------------------------------------------- what the backward's overlap refuses


def trained_once(overlap: str = "backward") -> Subject:
    made = subject(overlap)
    made.train(range(1), reading=False)
    return made


def clip(made: Subject) -> None:
    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1e-3)


def replace_a_gradient(made: Subject) -> None:
    weight = made.model.layers[2].weight  # type: ignore[union-attr, index]
    weight.grad = weight.grad.clone()  # type: ignore[union-attr]


def drop_a_gradient(made: Subject) -> None:
    made.model.layers[2].weight.grad = None  # type: ignore[union-attr, index]


def change_a_parameter(made: Subject) -> None:
    with torch.no_grad():
        made.model.layers[2].weight.clamp_(-0.1, 0.1)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("change", [clip, replace_a_gradient, drop_a_gradient, change_a_parameter])
def test_changes_after_the_update_began_are_refused(change: Any) -> None:
    made = trained_once()
    made.backward(1)
    change(made)
    with pytest.raises(chunkc.UnsupportedError, match=r"layers.*changed after its update had begun.*overlap=.forward"):
        made.optimizer.step()


def train_scaled(overlap: str, *, unscale: bool) -> list[Any]:
    made, scaler = subject(overlap), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        scaler.scale(made.compiled(**made.case.batch(step))).backward()
        if unscale:
            scaler.unscale_(made.optimizer)
        scaler.step(made.optimizer)
        scaler.update()
        made.optimizer.zero_grad()
    return made.state()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_waits_for_all_gradients(unscale: bool) -> None:
    assert not differences(train_scaled("forward", unscale=unscale), train_scaled("none", unscale=unscale))
    with pytest.raises(chunkc.UnsupportedError, match=r"a GradScaler must see all gradients.*overlap=.forward"):
        train_scaled("backward", unscale=unscale)


def test_a_learning_rate_that_changes_between_backward_and_step_is_refused() -> None:
    made = trained_once()
    made.backward(1)
    made.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(chunkc.OptionsError, match=r"hyper-parameters of layers.*change them after step"):
        made.optimizer.step()


def test_a_scheduler_steps_after_the_optimizer() -> None:
    def train(overlap: str) -> list[Any]:
        made = subject(overlap)
        scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.5)
        for step in range(4):
            made.train(range(step, step + 1), reading=False)
            scheduler.step()
        return made.state()

    assert not differences(train("both"), train("none"))


def test_a_second_backward_before_the_step_is_refused() -> None:
    made = trained_once()
    loss = made.compiled(**made.case.batch(1))
    other = made.compiled(**made.case.batch(2))
    other.backward()
    assert made.num_under_way == 0, "a forward is still without its backward"
    loss.backward()
    assert made.num_under_way == 4
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(3))
    made.optimizer.step()
    made.compiled(**made.case.batch(3))


def test_gradients_accumulate_where_the_user_says_so() -> None:
    def train(overlap: str) -> list[Any]:
        made = subject(overlap)
        for step in range(3):
            with made.optimizer.accumulating():
                made.backward(2 * step)
                made.backward(2 * step + 1)
                assert overlap == "both" or made.num_under_way == 0
            made.backward(2 * step + 10)
            made.optimizer.step()
            made.optimizer.zero_grad()
        return made.state()

    for mode in ("backward", "both"):
        assert not differences(train(mode), train("none"))


def test_parameters_with_hooks_are_updated_in_the_step() -> None:
    def train(overlap: str) -> list[Any]:
        made = subject(overlap)
        made.model.layers[1].weight.register_hook(lambda grad: grad * 2)  # type: ignore[union-attr, index]
        found = made.train(range(2), reading=False)
        made.backward(2)
        assert made.num_under_way == (3 if overlap == "backward" else 0)
        made.optimizer.step()
        return [*found, *made.state()]

    assert not differences(train("backward"), train("none"))


def test_a_new_group_and_a_loaded_state_begin_anew() -> None:
    made = trained_once()
    made.backward(1)
    assert made.num_under_way == 4
    made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.optimizer.zero_grad()
    made.backward(2)
    assert made.num_under_way == 0
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    made.optimizer.step()


def test_only_what_makes_sense_is_taken() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(chunkc.OptionsError, match='"none", "forward", "backward", "both"'):
        chunkc.optim.AdamW(parameters, update_on="cpu", overlap="always")
    with pytest.raises(chunkc.OptionsError, match='use update_on="cpu" or "auto"'):
        chunkc.optim.AdamW(parameters, overlap="forward")
