"""Runs are resumed with the same bits, whatever was changed between, and saved while they go on."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from larger_than_memory import stage, status_nbytes
from plain_modules import FeedForward
from safetensors.torch import load_file
from torch import Tensor, nn

import chunkc
from chunkc.checkpoint import sources, writing
from chunkc.ir.errors import CheckpointError, OptionsError, UnsupportedError
from chunkc.runtime.device import cpu_allocator
from chunkc.session.movable import can_move
from chunkc.session.pending_readers import await_readers
from chunkc.session.session import owner

SMALL = 1_400_000
"""A budget in which chunks of the model below move."""

LARGE = 1 << 30


class Model(nn.Module):
    """Blocks that draw random numbers, a buffer that each forward changes, and an output tied to the input."""

    count: Tensor

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(FeedForward(64, dropout=0.1) for _ in range(num_blocks))
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("count", torch.zeros(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        self.count.add_(1.0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.roll(-1, 1).flatten())


@dataclass
class Run:
    """A model in training."""

    model: nn.Module
    compiled: Any
    optimizer: Any
    scheduler: Any
    losses: list[float] = field(default_factory=list)

    def train(self, num_steps: int) -> list[float]:
        """Train some steps; return the losses, as floats of the same bits."""
        for _ in range(num_steps):
            loss = self.compiled(torch.randint(32, (4, 16)))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self.losses

    def checkpoint(self, folder: Path, **options: Any) -> chunkc.Checkpoint:
        return chunkc.Checkpoint(
            folder, model=self.compiled, optimizer=self.optimizer, scheduler=self.scheduler, **options
        )

    def bits(self) -> dict[str, bytes]:
        """Collect every tensor of model and optimizer."""
        chunkc.synchronize(self.model)
        found = {name: bytes_of(tensor) for name, tensor in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{kind}": bytes_of(value) for kind, value in state.items()}
        return found


def bytes_of(tensor: Tensor) -> bytes:
    array: np.ndarray = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()


def begin(
    *,
    budget: int | None = LARGE,
    home: str = "cpu",
    codegen: str = "eager",
    dtype: torch.dtype = torch.float32,
    optimizer: str = "AdamW",
    place: bool = False,
    seed: int = 0,
    num_blocks: int = 3,
    **settings: Any,
) -> Run:
    """Make a run that has trained nothing; without a budget, in plain PyTorch."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(seed)
    model: nn.Module = Model(num_blocks).to(dtype)
    compiled: Any = model
    if budget is not None:
        model = chunkc.place(model, home=home) if place else model
        options = {"memory_budget": budget, "home": home, "codegen": codegen, "whole_graph": "never"}
        compiled = torch.compile(model, backend="chunkc", options=options)
    kind = getattr(torch.optim if budget is None else chunkc.optim, optimizer)
    made = kind(model.parameters(), lr=1e-2, **settings)
    return Run(model, compiled, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 20))


def resumed(folder: Path, **how: Any) -> Run:
    """Make a run that resumes the latest checkpoint; its model and generators had other values before."""
    run = begin(seed=12345, **how)
    assert run.checkpoint(folder).load_latest() is not None
    return run


def saved_in_the_middle(folder: Path, **how: Any) -> Run:
    """A run of six steps, with its third step saved."""
    run = begin(**how)
    run.train(3)
    with run.checkpoint(folder) as ck:
        ck.save(3)
        run.train(3)
    return run


SECOND, RARE = pytest.mark.second_tier, pytest.mark.slow
AT_HOME = {"budget": SMALL, "place": True, "home": "disk"}
BF16 = {"dtype": torch.bfloat16}
RESUMED: list[Any] = [
    # In another budget and home.
    ({}, {"budget": LARGE}, {"budget": SMALL}),
    pytest.param({}, {"budget": SMALL}, {"budget": LARGE, "home": "disk"}, marks=SECOND),
    pytest.param({}, {"budget": LARGE, "home": "disk"}, AT_HOME, marks=RARE),
    pytest.param({}, AT_HOME, {"budget": SMALL}, marks=SECOND),
    pytest.param({"codegen": "inductor"}, {"budget": SMALL}, {"budget": SMALL, "home": "disk"}, marks=RARE),
    # Every form of states.
    *(
        pytest.param({"num_blocks": 2} | how, {"budget": SMALL}, AT_HOME, marks=marks)
        for how, marks in [
            (BF16, SECOND),
            (BF16 | {"master_weights": "float32", "moments_dtype": "int8"}, SECOND),
            (BF16 | {"stochastic_rounding": True}, SECOND),
            ({"moments_dtype": torch.bfloat16}, RARE),
            ({"optimizer": "LAMB"}, SECOND),
            ({"optimizer": "SGD", "momentum": 0.9}, SECOND),
            ({"optimizer": "SGD"}, RARE),
        ]
    ),
    # Plain PyTorch.
    *(({"optimizer": optimizer}, {"budget": None}, {"budget": None}) for optimizer in ("AdamW", "Adagrad", "SGD")),
]


@pytest.mark.parametrize(("how", "before", "after"), RESUMED, ids=str)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_ended(
    tmp_path: Path, how: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The run has six steps; its third one is saved."""
    reference = saved_in_the_middle(tmp_path, **before, **how)
    run = resumed(tmp_path, **after, **how)
    assert run.train(3) == reference.losses[3:]
    assert run.bits() == reference.bits()


@pytest.mark.parametrize(
    "how",
    [
        *(
            pytest.param({"budget": SMALL, "overlap": overlap, "update_on": "cpu"}, marks=marks)
            for overlap, marks in (("none", RARE), ("forward", SECOND), ("backward", RARE), ("both", SECOND))
        ),
        {"budget": None},
    ],
    ids=str,
)
def test_the_next_step_waits_for_what_it_changes(
    tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain optimizer, too."""
    slow(monkeypatch)
    test_a_resumed_run_has_the_bits_of_one_that_was_never_ended(tmp_path, {}, how, how)


@pytest.mark.second_tier
def test_a_checkpoint_of_plain_pytorch_is_one_of_chunkc_too(tmp_path: Path) -> None:
    """Both optimizers have the same states; steps differ in rounding only."""
    run = saved_in_the_middle(tmp_path, budget=None)
    gone_on = resumed(tmp_path, budget=SMALL)
    assert gone_on.train(3) == pytest.approx(run.losses[3:], rel=1e-3)


def test_the_files_are_what_others_read(tmp_path: Path) -> None:
    run = begin(budget=None)
    run.train(1)
    with run.checkpoint(tmp_path) as ck:
        ck.save(1)
    found = load_file(tmp_path / "step-000000000001" / "model.safetensors")
    assert "head.weight" not in found  # tied: once
    assert not any("_orig_mod" in key for key in found)
    fresh = begin(budget=None, seed=5).model
    missing, unexpected = fresh.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), run.model.parameters(), strict=True))
    document = json.loads((tmp_path / "step-000000000001" / "state.json").read_text())
    assert document["models"][""]["aliases"] == {"head.weight": "tokens.weight"}


def test_modules_compiled_one_by_one_have_the_same_keys(tmp_path: Path) -> None:
    run = begin(budget=None)
    with run.checkpoint(tmp_path) as ck:
        ck.save(0)
    other = begin(budget=None, seed=5)
    other.model.blocks[0] = torch.compile(other.model.blocks[0], backend="eager")  # type: ignore
    assert other.checkpoint(tmp_path).load_latest() == 0
    assert all(torch.equal(a, b) for a, b in zip(other.model.parameters(), run.model.parameters(), strict=True))


def test_a_scaler_and_several_models(tmp_path: Path) -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    parts = {"one": one, "two": two}
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in parts.items()}
    for model in parts.values():
        scaler.scale(model(torch.randn(2, 4)).sum()).backward()
    for optimizer in optimizers.values():
        scaler.step(optimizer)
    scaler.update(64.0)
    with chunkc.Checkpoint(tmp_path, model=parts, optimizer=optimizers, scaler=scaler) as ck:
        ck.save(1)
    fresh = {name: nn.Linear(4, 4) for name in parts}
    again = {name: torch.optim.Adam(model.parameters()) for name, model in fresh.items()}
    other = torch.amp.GradScaler("cpu")
    assert chunkc.Checkpoint(tmp_path, model=fresh, optimizer=again, scaler=other).load_latest() == 1
    assert other.get_scale() == 64.0
    assert torch.equal(fresh["two"].weight, two.weight)
    assert torch.equal(again["one"].state[fresh["one"].bias]["exp_avg"], optimizers["one"].state[one.bias]["exp_avg"])


# --- while training goes on ---


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Writing takes long: the next step is there before it is done."""
    write = writing._write_all

    def slowly(fd: int, content: memoryview) -> tuple[int, int]:
        time.sleep(seconds)
        return write(fd, content)

    monkeypatch.setattr(writing, "_write_all", slowly)


@pytest.mark.second_tier
def test_without_the_wait_a_change_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, seconds=0.1)  # steps take long, too, where other work has the processor
    monkeypatch.setattr("chunkc.optim.optimizer.await_readers", lambda parameters: None)
    with pytest.raises(CheckpointError, match=r"(weight|bias)(\.\w+)? was changed while it was being saved"):
        saved_in_the_middle(tmp_path, budget=SMALL)
    assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]


@contextmanager
def being_read(
    tensor: Tensor, monkeypatch: pytest.MonkeyPatch, seconds: float | None = None
) -> Iterator[threading.Event]:
    """Whoever saves this tensor has a view of it inside, and no longer than `seconds`. The event says that it has."""
    reached, gate, pieces_of, address = threading.Event(), threading.Event(), sources.pieces_of, tensor.data_ptr()

    def waiting(found: Tensor) -> Iterator[memoryview]:
        if found.data_ptr() == address:
            reached.set()
            gate.wait(seconds)
        yield from pieces_of(found)

    monkeypatch.setattr(sources, "pieces_of", waiting)
    yield reached
    gate.set()


@pytest.mark.parametrize("replaced", [False, True])
def test_what_the_user_changes_meanwhile_is_noticed(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written to, or other data."""
    run = begin(budget=None)
    ck, block = run.checkpoint(tmp_path), run.model.blocks[2]
    with being_read(block.up.weight, monkeypatch) as reached:
        ck.save(0)
        assert reached.wait(60)
        if replaced:
            block.down.weight.data = block.down.weight.data * 0.5
        else:
            with torch.no_grad():
                block.down.weight.clamp_(-0.01, 0.01)
    with pytest.raises(CheckpointError, match=r"blocks\.2\.down\.weight was changed"):
        ck.wait()
    ck.save(0)
    ck.close()
    assert resumed(tmp_path, budget=None).bits() == run.bits()


def test_replaced_data_is_taken_over_once_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbour in the chunk is being read: that is nobody's view to be kept."""
    run = begin(budget=SMALL)
    run.train(1)
    before, (up, down) = run.bits(), (run.model.blocks[2].up.weight, run.model.blocks[2].down.weight)
    (store, name), (_, other) = ((hit[0].store, hit[1]) for hit in map(owner, (up, down)) if hit is not None)
    assert other in store.views.in_chunk_of(name)
    with being_read(down, monkeypatch, seconds=0.5) as reached, run.checkpoint(tmp_path) as ck:
        ck.save(1)
        assert reached.wait(60)
        kept = up.detach()
        up.data = up.data * 0.5
        run.train(1)
        ck.wait()
    assert not torch.equal(kept, up)
    assert resumed(tmp_path, budget=LARGE).bits() == before


def test_loading_waits_for_who_saves_to_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(budget=None)
    with run.checkpoint(tmp_path / "old") as old:
        old.save(0)
        old.wait()
        run.train(1)
        before = run.bits()
        weight, new = run.model.blocks[2].up.weight, run.checkpoint(tmp_path / "new")
        with being_read(weight, monkeypatch, seconds=0.5) as reached:
            new.save(1)
            assert reached.wait(60)
            assert old.load_latest() == 0
        new.close()
    assert run.bits() != before
    assert resumed(tmp_path / "new", budget=None).bits() == before


def test_an_error_keeps_no_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has it, or never asks for it, still may have parameters that can move."""
    run = begin(budget=None)
    pieces_of, address = sources.pieces_of, run.model.blocks[0].up.weight.data_ptr()

    def failing(tensor: Tensor) -> Iterator[memoryview]:
        yield from pieces_of(tensor)
        if tensor.data_ptr() == address:
            raise OSError(28, "No space left on device")

    ck = run.checkpoint(tmp_path)
    monkeypatch.setattr(sources, "pieces_of", failing)
    ck.save(0)
    with pytest.raises(CheckpointError, match="make room") as caught:
        ck.wait()
    assert caught.value.__cause__ is not None
    assert all(can_move(parameter) for parameter in run.model.parameters())
    ck.save(1)
    await_readers(run.model.parameters())
    assert all(can_move(parameter) for parameter in run.model.parameters())
    with pytest.raises(CheckpointError):
        ck.close()


def test_a_directory_that_is_removed_meanwhile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by rank 0, where another rank has ended, while this one still writes."""
    run = begin(budget=None)
    new_file = writing._new_file

    def removed(path: Path) -> int:
        shutil.rmtree(path.parent)
        return new_file(path)

    ck = run.checkpoint(tmp_path)
    monkeypatch.setattr(writing, "_new_file", removed)
    ck.save(0)
    with pytest.raises(CheckpointError, match="was removed while it was being written"):
        ck.close()


@pytest.mark.second_tier
def test_a_model_is_compiled_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a parameter has its storage; the parameter goes into a chunk all the same."""
    slow(monkeypatch)
    run = begin(budget=SMALL)
    with run.checkpoint(tmp_path) as ck:
        ck.save(0)
        run.train(1)
    assert chunkc.report(run.compiled).num_chunks == 4
    assert resumed(tmp_path, budget=LARGE).train(1) == run.losses


@pytest.mark.second_tier
def test_nothing_is_taken_from_the_budget_nor_much_from_the_host(tmp_path: Path) -> None:
    """bf16 with masters, at home in RAM: masters are put together piece by piece."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs the kernel's peak of resident memory")
    cpu_allocator.install()
    model = chunkc.place(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).bfloat16())
    optimizer = chunkc.optim.AdamW(model.parameters())
    model(torch.randn(4, 1024).bfloat16()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ck = chunkc.Checkpoint(tmp_path, model=model, optimizer=optimizer)
    ck.save(1)  # whatever is made once is made
    ck.wait()
    begin_nbytes, peaks = cpu_allocator.current_nbytes(), dict[str, int]()
    cpu_allocator.reset_peak()
    with stage("saving", peaks, status_nbytes("VmRSS")):
        ck.save(2)
        ck.wait()
    allocated_nbytes = cpu_allocator.peak_nbytes() - begin_nbytes
    ck.close()
    saved_nbytes = sum(f.stat().st_size for f in (tmp_path / "step-000000000002").iterdir())
    assert saved_nbytes > 50 << 20
    assert peaks["saving"] < 10 << 20
    assert allocated_nbytes < 32 << 10  # the state of the generators


# --- what cannot be ---


def test_it_is_another_model(tmp_path: Path) -> None:
    run = begin(budget=None)
    run.train(1)
    with run.checkpoint(tmp_path) as ck:
        ck.save(1)
    other = begin(budget=None, num_blocks=4)
    before = other.bits()
    with pytest.raises(CheckpointError, match=r"of another model: model\.safetensors lacks blocks\.3\.norm\.weight"):
        other.checkpoint(tmp_path).load_latest()
    wide = begin(budget=None, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"is torch\.float32 \[.*\] in the checkpoint, and torch\.bfloat16"):
        wide.checkpoint(tmp_path).load_latest()
    untied = begin(budget=None)
    untied.model.head.weight = nn.Parameter(torch.zeros(32, 64))  # type: ignore
    with pytest.raises(CheckpointError, match=r"tied in the checkpoint, but not in the model: head\.weight"):
        untied.checkpoint(tmp_path).load_latest()
    fewer = begin(budget=None)
    frozen = torch.optim.AdamW([p for p in fewer.model.parameters() if p.dim() > 1])
    with pytest.raises(CheckpointError, match=r"other parameters.*: blocks\.0\.down\.bias"):
        chunkc.Checkpoint(tmp_path, model=fewer.model, optimizer=frozen, scheduler=fewer.scheduler).load_latest()
    with pytest.raises(CheckpointError, match=r"the scheduler are '' in the checkpoint and none here"):
        chunkc.Checkpoint(tmp_path, model=fewer.model, optimizer=fewer.optimizer).load_latest()
    assert other.bits() == before


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionsError, match="keep is 0"):
        chunkc.Checkpoint(tmp_path, model=model, keep=0)
    with pytest.raises(OptionsError, match=r"model is a str; allowed: torch\.nn"):
        chunkc.Checkpoint(tmp_path, model="model")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=r"wrap it in chunkc\.checkpoint\.Batches"):
        chunkc.Checkpoint(tmp_path, model=model, dataloader=[1, 2])
    with pytest.raises(OptionsError, match=r"model has the name '\.\./x'"):
        chunkc.Checkpoint(tmp_path, model={"../x": model})
    ck = chunkc.Checkpoint(tmp_path, model=model)
    for step in (-1, True, 1.0):
        with pytest.raises(OptionsError, match="step is"):
            ck.save(step)  # type: ignore[arg-type]


def test_what_is_no_data_is_refused_by_name(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"calls": [print]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    ck = chunkc.Checkpoint(tmp_path, model=nn.Linear(2, 2), scheduler=Odd())
    with pytest.raises(UnsupportedError, match=r"scheduler\.calls\.0 is a builtins\.builtin_function_or_method"):
        ck.save(0)


def test_extra_state_is_saved_too(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        number = 0

        def get_extra_state(self) -> dict[str, Any]:
            return {"number": self.number, "table": torch.arange(self.number)}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            assert torch.equal(state["table"], torch.arange(state["number"]))
            self.number = state["number"]

    model = nn.Sequential(Counting(2, 2))
    model[0].number = 7  # type: ignore
    with chunkc.Checkpoint(tmp_path, model=model) as ck:
        ck.save(0)
    fresh = nn.Sequential(Counting(2, 2))
    assert chunkc.Checkpoint(tmp_path, model=fresh).load_latest() == 0
    assert fresh[0].number == 7


def test_8_bit_moments_of_a_parameter_that_is_not_contiguous(tmp_path: Path) -> None:
    """Their scales go along memory."""
    size = torch.logspace(-4, 0, 16).view(16, 1, 1, 1) * torch.logspace(-3, 0, 16).view(1, 16, 1, 1)

    def gradient() -> torch.Tensor:
        return (torch.randn(16, 16, 3, 3) * size).contiguous(memory_format=torch.channels_last)

    def made() -> tuple[nn.Module, chunkc.optim.AdamW]:
        torch.manual_seed(0)
        model = nn.Conv2d(16, 16, 3, bias=False).to(memory_format=torch.channels_last)
        return model, chunkc.optim.AdamW(model.parameters(), lr=1e-3, moments_dtype="int8")

    pairs = [made(), made()]
    for _ in range(2):
        pairs[0][0].weight.grad = gradient()
        pairs[0][1].step()
    with chunkc.Checkpoint(tmp_path, model=pairs[0][0], optimizer=pairs[0][1]) as ck:
        ck.save(2)
    chunkc.Checkpoint(tmp_path, model=pairs[1][0], optimizer=pairs[1][1]).load_latest()
    last = gradient()
    for model, optimizer in pairs:
        model.weight.grad = last.clone(memory_format=torch.preserve_format)
        optimizer.step()
    assert torch.equal(pairs[0][0].weight, pairs[1][0].weight)
