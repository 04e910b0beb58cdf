"""Tensor parallelism on one mesh dimension, chunkc on another; run as `rank_cases` is."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent))

import rank_cases
from rank_cases import (
    HUGE,
    adamw,
    arrays,
    batches,
    bits,
    check_close,
    check_weights,
    compiled,
    mean,
    of_all,
    told,
)

import chunkc
from chunkc.runtime.device import cpu_allocator

VOCABULARY, WIDTH = 12, 24
NUMBERS_NBYTES = 256
"""What a loop has of its own beside what is planned: losses, their gradients, norms."""


class Block(nn.Module):
    """The local tensors of `up` have rows that ranks cannot share evenly; `gate` is in no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 58), nn.Linear(58, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x).sigmoid() * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_blocks: int, *, checkpoints: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def made(seed: int = 0, num_blocks: int = 3, *, checkpoints: bool = False) -> Model:
    torch.manual_seed(seed)
    return Model(num_blocks, checkpoints=checkpoints)


@cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


@cache
def cube() -> DeviceMesh:
    """Two copies of each part: the layers of each rank of a row are those of a rank of the other one."""
    shape = (2, dist.get_world_size() // 4, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "dp", "tp"))


def parallel(model: Model, plan: str = "plain", place: DeviceMesh | None = None) -> Model:
    """As its user writes it. With "rows", the norm of the first block computes on a part of the batch's rows."""
    layers = (place or grid())["tp"]
    styles: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for at in range(len(model.blocks)):
        styles |= {f"blocks.{at}.up": ColwiseParallel(), f"blocks.{at}.down": RowwiseParallel()}
    if plan == "rows":
        given = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),))
        parallelize_module(model, layers, {"blocks.0.norm": given})
        styles["blocks.0.norm"] = SequenceParallel(sequence_dim=0)
        styles["blocks.0.up"] = ColwiseParallel(input_layouts=Shard(0))
    parallelize_module(model, layers, styles)
    return model


def cut(model: Model, stage: Any = 3, plan: str = "plain") -> Any:
    place = cube() if plan == "copies" else grid()
    over = place["copies", "dp"] if plan == "copies" else place["dp"]
    return chunkc.distribute(parallel(model, plan, place), over, zero_stage=stage)


def own(batch: Tensor) -> Tensor:
    """The part of a batch of this rank and the other one that computes its layers."""
    each = len(batch) // (dist.get_world_size() // 2)
    return batch[dist.get_rank() // 2 * each :][:each]


def train(run: Any, model: nn.Module, optimizer: Any, steps: range, clip: str = "torch") -> list[float]:
    """Losses and norms of steps of two micro-batches; of a model that is not distributed with all of each batch."""
    losses = []
    is_cut = any(isinstance(p, DTensor) for p in model.parameters())
    for step in steps:
        for batch in batches(step):
            loss = run(own(batch) if is_cut else batch) / 2
            loss.backward()
            losses.append(mean(loss) if is_cut else loss.item())
        norm = optimizer.clip_grad_norm_(0.1) if clip == "chunkc" else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def lamb(model: nn.Module, **how: Any) -> Any:
    return chunkc.optim.LAMB(model.parameters(), lr=1e-2, eps=1e-3, **how)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": adamw,
    "lamb": lamb,
    "lamb at home": partial(lamb, update_on="cpu", overlap="forward"),
}


def _as_one_process(
    runs: Sequence[tuple[Any, str, str, str]], num_blocks: int = 3, optimizers: Sequence[str] = ("adamw",)
) -> None:
    """Train in one process, then on the ranks: in a stage, with a plan, a code generator and a way to clip; each time
    with room for all, and then with none to spare under a hard limit. With "apart", the second rank of each layer still
    has room for all then, and so another plan; with "copies", there are two of all parts."""
    reference: Any = made(num_blocks=num_blocks)
    if "adamw" in optimizers:
        plain: Any = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    else:
        plain = lamb(reference)
    expected, weights = train(reference, reference, plain, range(3)), arrays(reference)
    grid()["dp"], grid()["tp"]
    if any(plan == "copies" for _, plan, _, _ in runs):
        cube()["copies", "dp"], cube()["tp"]
    cpu_allocator.install()
    by_way: dict[tuple[Any, ...], set[str]] = {}
    found = []
    for (stage, plan, codegen, clip), name in product(runs, optimizers):
        least = HUGE
        for _ in range(2):
            torch._dynamo.reset()
            model = cut(made(num_blocks=num_blocks, checkpoints=plan == "checkpoints"), stage, plan)
            budget = HUGE if plan == "apart" and grid()["tp"].get_local_rank() == 1 else least
            optimizer, run = OPTIMIZERS[name](model), compiled(model, budget, codegen)
            losses = train(run, model, optimizer, range(2), clip)
            with cpu_allocator.hard_limit(chunkc.report(model).predicted_peak_nbytes + NUMBERS_NBYTES):
                losses += train(run, model, optimizer, range(2, 3), clip)
            chunkc.synchronize(model)
            report = chunkc.report(model)
            check_close(losses, expected, within=1e-6)
            check_weights(model, weights)
            check_moments(report, budget, codegen)
            way = plan in ("rows", "copies") and plan, codegen, clip
            by_way.setdefault(way, set()).add(bits(model))
            found.append(hashlib.blake2b(b"".join(value.tobytes() for value in arrays(model))).hexdigest())
            least = report.minimum_budget_nbytes
    assert all(len(of_way) == 1 for of_way in by_way.values()), "a budget or a stage changed the result"
    assert of_all(found) == [found] * dist.get_world_size(), "what ranks have alike stays alike"


def check_moments(report: chunkc.Report, budget: int, codegen: str) -> None:
    """Check that measured bytes are those that were predicted, but for the loop's own."""
    assert report.measured_peak_nbytes is not None
    assert report.measured_peak_nbytes - NUMBERS_NBYTES <= report.predicted_peak_nbytes <= budget
    off = sorted(measured - predicted for _, predicted, measured in report.moments if measured is not None)
    assert off[0] >= 0
    assert off[-1] <= NUMBERS_NBYTES
    if codegen == "eager":
        assert off[len(off) * 3 // 4] - off[0] <= 16, "exact to the byte, beside the loop's own collectives"


def as_one_process() -> None:
    _as_one_process([(3, "rows", "eager", "torch")])


def in_all_ways() -> None:
    ways = [(3, "plain", "eager", "torch"), (1, "plain", "eager", "chunkc"), (None, "apart", "eager", "torch")]
    _as_one_process([*ways, (2, "rows", "inductor", "chunkc"), (None, "checkpoints", "eager", "torch")])


def lamb_as_one_process() -> None:
    _as_one_process([(3, "rows", "eager", "torch")], optimizers=("lamb",))


def lamb_in_all_ways() -> None:
    ways = [(3, "plain", "eager", "torch"), (None, "apart", "eager", "torch"), (1, "copies", "eager", "torch")]
    _as_one_process(ways, optimizers=("lamb", "lamb at home"))


def copies() -> None:
    _as_one_process([(3, "copies", "eager", "chunkc")], num_blocks=1)


def many_layers() -> None:
    _as_one_process([(3, "plain", "eager", "torch"), (3, "plain", "inductor", "torch")], num_blocks=8)


def saved(folder: Path) -> None:
    """With PyTorch's own checkpoints, read by ranks that have other weights and states."""
    model = cut(made())
    optimizer, run = adamw(model), compiled(model, HUGE)
    train(run, model, optimizer, range(1))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "saved")
    whole = [value.tolist() for value in arrays(model)]
    losses = train(run, model, optimizer, range(1, 2))
    torch._dynamo.reset()
    other = cut(made(seed=1))
    optimizer, run = adamw(other), compiled(other, HUGE)
    train(run, other, optimizer, range(1))
    weights, states = get_state_dict(other, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "saved")
    set_state_dict(other, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert [value.tolist() for value in arrays(other)] == whole
    assert train(run, other, optimizer, range(1, 2)) == losses


def other_sizes() -> None:
    """Batches whose sizes change, each the same on all ranks: compiled each for itself."""
    reference, model = made(), cut(made())
    found = []
    for one, run, make in (
        (reference, reference, torch.optim.AdamW),
        (model, compiled(model, HUGE), chunkc.optim.AdamW),
    ):
        optimizer, losses = make(one.parameters(), lr=1e-2, eps=1e-3), []
        for shape in ((8, 5), (6, 4), (4, 7), (8, 5)):
            tokens = torch.arange(shape[0] * shape[1]).view(shape) % VOCABULARY
            loss = run(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    check_close(found[1], found[0], within=1e-6)


def overflow() -> None:
    """The last rank's gradient overflows, of a parameter that is cut inside layers; the first one of all is not.
    chunkc's scaler asks all ranks, and PyTorch's only those over which an optimizer's first gradient is cut."""
    for scaler in (chunkc.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)):
        torch._dynamo.reset()
        model = cut(made())
        optimizer, before = adamw(model), bits(model)
        scaler.scale(compiled(model, HUGE)(own(batches(0)[0]))).backward()
        if dist.get_rank() == dist.get_world_size() - 1:
            model.blocks[0].up.weight.grad.to_local().view(-1)[-1] = torch.inf
        refused = told(lambda: (scaler.step(optimizer), scaler.update()))  # noqa: B023
        assert bits(model) == before, "nothing was updated"
        if isinstance(scaler, chunkc.GradScaler):
            assert (refused, scaler.get_scale()) == ("nothing", 2.0)
        else:
            assert "whether a gradient overflowed (take chunkc.GradScaler" in refused


def refused() -> None:
    """What does not go with tensor parallelism."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def other_mesh() -> None:
        chunkc.distribute(parallel(made()), init_device_mesh("cpu", (dist.get_world_size(),)))

    def returned() -> None:
        styles = {"inner": ColwiseParallel(use_local_output=False)}
        model = chunkc.distribute(parallelize_module(Returns(), grid()["tp"], styles), grid()["dp"])
        compiled(model, HUGE)(torch.ones(4, WIDTH))

    def with_buffer() -> None:
        model = nn.Sequential(nn.LayerNorm(4))
        model[0].register_buffer("mean", torch.zeros(4))
        parallelize_module(model, grid()["tp"], {"0": SequenceParallel()})
        chunkc.distribute(model, grid()["dp"])

    for action, message in (
        (other_mesh, "embed.weight is a DTensor over ranks that have no mesh in common"),
        (with_buffer, "the buffer 0.mean is a DTensor"),
        (
            lambda: chunkc.distribute(fully_shard(nn.Linear(4, 4), mesh=grid()["tp"]), grid()["dp"]),
            "the model is cut by fully_shard already",
        ),
        (
            lambda: compiled(parallel(made()), HUGE)(batches(0)[0]),
            "the model takes a DTensor that chunkc.distribute has not made",
        ),
        (returned, "the model returns a DTensor: return its to_local()"),
        (
            lambda: torch.compile(cut(made()), backend="chunkc", dynamic=True)(batches(0)[0]),
            "dynamic=True of torch.compile makes symbols of the model's numbers",
        ),
        (lambda: chunkc.distribute(cut(made()), grid()["dp"]), "scale is distributed or compiled already"),
    ):
        torch._dynamo.reset()
        found = told(action)
        assert found.startswith(f"UnsupportedError: {message}"), found


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
