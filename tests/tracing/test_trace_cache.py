"""What is traced is kept for later processes: the same graphs come back, or the graph is traced again."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._functorch._aot_autograd import graph_compile
from torch._inductor.fx_passes import joint_graph
from torch._inductor.pattern_matcher import Arg, CallFunction, PatternMatcherPass, register_graph_pattern
from torch.nn.attention import SDPBackend, sdpa_kernel
from traced_graphs import TOKENS, Deep, all_captured, text
from zoo import DEEP, LADDER, Case

from chunkc.ir.errors import UnsupportedError
from chunkc.tracing import trace_cache
from chunkc.tracing.capture import TracedGraphs
from chunkc.tracing.trace_cache import stand_in

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of entries, which are not used where passes are checked."""
    monkeypatch.delenv("CHUNKC_VERIFY_PASSES")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "aotautograd"


def traced(model: nn.Module, *arguments: Tensor, codegen: str = "eager", **keywords: Any) -> tuple[str, dict[str, int]]:
    """All of a model's graphs as text, and how many were found in the cache, missed there, saved, or not looked up."""
    counters.clear()
    graphs = all_captured(model, *arguments, codegen=codegen, **keywords)
    counted = {
        name.removeprefix("autograd_cache_"): number
        for name, number in counters["aot_autograd"].items()
        if name.startswith("autograd_cache_")
    }
    return "\n".join(all_of(graph) for graph, _ in graphs), counted


def all_of(graphs: TracedGraphs) -> str:
    numbers = (graphs.num_user_outputs, graphs.new_buffers, graphs.by_placeholder, graphs.gradients)
    modules = [module for module in (graphs.forward, graphs.backward) if module is not None]
    marks = [
        [node.name, *map(node.meta.get, ("recompute", "original_aten", "stack_trace")), trained(node.meta.get("val"))]
        for module in modules
        for node in module.graph.nodes
    ]
    return f"{numbers}\n{text(graphs)}\n{marks}"


def trained(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


# --- the same graphs ---

CASES = {
    **LADDER,
    **DEEP,
    **{
        f"deep, {variant or 'plain'}": Case(
            variant, lambda variant=variant: Deep(variant), lambda seed: {"tokens": TOKENS}
        )
        for variant in (
            "",
            "checkpoints",
            "batch norms",
            "counts",
            "states",
            "tied",
            "frozen",
            "one for all",
            "dropout",
        )
    },
}

TRACED_EACH_TIME = {
    *("autocast_gpt", "autocast_convnet", "deep_autocast_gpt"),  # autocast inside the model
    *("mixtral", "lstm"),  # a custom operator; no graph
    *("t5, eager", "whisper, eager"),  # a constant
}


@pytest.mark.quick(6, second=12)
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_graphs_that_are_read_are_those_that_are_traced(name: str, codegen: str) -> None:
    model, batch = CASES[name].make(), CASES[name].batch(0)
    with config.patch(enable_autograd_cache=False):
        expected, _ = traced(model, codegen=codegen, **batch)
    first, saved = traced(model, codegen=codegen, **batch)
    second, found = traced(model, codegen=codegen, **batch)
    assert first == expected
    assert second == expected
    assert found.get("hit", 0) == saved.get("saved", 0)
    assert ("saved" in saved) == (name not in TRACED_EACH_TIME and f"{name}, {codegen}" not in TRACED_EACH_TIME)


class Attention(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 8, 3, 1, 16).unbind(2)
        return nn.functional.scaled_dot_product_attention(q, k, v * self.scale).sum()


X = torch.randn(2, 8, 16)


BLOCK = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x))
"""


def test_lines_are_those_of_the_present_program(tmp_path: Path) -> None:
    def block(lines_before: int) -> nn.Module:
        names: dict[str, Any] = {"__name__": "block"}
        (tmp_path / f"block{lines_before}.py").write_text("\n" * lines_before + BLOCK)
        path = tmp_path / f"block{lines_before}.py"
        exec(compile(path.read_text(), str(path), "exec"), names)
        return names["Block"]()

    assert traced(block(0), X)[1] == {"miss": 1, "saved": 1}
    found, counted = traced(block(7), X)
    assert counted == {"hit": 1}
    assert "block7.py:17" in found
    assert "block0" not in found


def test_modules_are_those_of_the_present_program() -> None:
    """The same operations, in no module there and in two here."""

    class InOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            for _ in range(2):
                x = nn.functional.gelu(x, approximate="none")
            return x.sum()

    class InTwo(InOne):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.GELU(), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.linear(x))).sum()

    traced(InOne(), X)
    found, _ = traced(InTwo(), X)
    with config.patch(enable_autograd_cache=False):
        expected, _ = traced(InTwo(), X)
    assert found == expected
    assert "module='b'" in found


# --- what a trace depends on is in the key ---


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    with patch.object(owner, name, value):
        yield


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


@pytest.mark.parametrize(
    "state",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: changed(torch.backends.opt_einsum, "strategy", "greedy"),
        lambda: defaults(torch.float64),
        lambda: torch.autograd.detect_anomaly(check_nan=False),
        lambda: changed(trace_cache, "_code", lambda: "another version"),
        lambda: config.patch(aggressive_recomputation=True),
    ],
    ids=["kernels", "their order", "mkldnn", "einsum", "default dtype", "anomalies", "code", "partitioner"],
)
def test_another_state_is_another_entry(state: Callable[[], AbstractContextManager[Any]]) -> None:
    model = Attention()
    assert traced(model, X)[1] == {"miss": 1, "saved": 1}
    with state():
        assert "hit" not in traced(model, X)[1]
    assert traced(model, X)[1] == {"hit": 1}


@pytest.mark.parametrize(
    "other",
    [lambda: Attention(2.0), lambda: Attention().requires_grad_(False), lambda: Attention().double()],
    ids=["a number", "nothing trained", "dtype"],
)
def test_another_graph_is_another_entry(other: Callable[[], nn.Module]) -> None:
    x = X.double() if next(other().parameters()).dtype == torch.float64 else X
    assert traced(Attention(), X)[1] == {"miss": 1, "saved": 1}
    assert traced(other(), x)[1] == {"miss": 1, "saved": 1}


def test_the_kernel_of_attention_is_the_one_that_is_allowed() -> None:
    """PyTorch's own key does not tell which kernels are."""
    model = Attention()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused, _ = traced(model, X)
    with sdpa_kernel(SDPBackend.MATH):
        plain, _ = traced(model, X)
    assert "flash" in fused
    assert "flash" not in plain


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x + y).sum()


def test_inputs_that_share_memory_are_another_entry() -> None:
    """AOTAutograd's graph takes what changes with one of them into account; PyTorch's key has their forms alone."""
    x = torch.randn(4, 16)
    assert traced(ChangesItsInput(), x.clone(), torch.randn(4, 16))[1] == {"miss": 1, "saved": 1}
    with pytest.raises(BackendCompilerFailed, match="share memory"):
        traced(ChangesItsInput(), x, x.view(4, 16))
    assert traced(ChangesItsInput(), x.clone(), torch.randn(4, 16))[1] == {"hit": 1}


def test_leaves_are_other_inputs_than_results() -> None:
    leaf = torch.randn(2, 8, 16, requires_grad=True)
    assert traced(Attention(), leaf * 1)[1] == {"miss": 1, "saved": 1}
    assert traced(Attention(), leaf)[1] == {"miss": 1, "saved": 1}


# --- what no key can hold is traced each time ---


@torch.library.custom_op("chunkc_trace_cache::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: 2 * gradient)


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.constants = [torch.ones(16)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.tensor([2.0] * 16)).sum()


@contextmanager
def another_sum() -> Iterator[None]:
    """Python code in place of PyTorch's own for an operator as it is traced."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "linear", lambda x, weight, bias=None: x @ weight.T + bias, "CompositeImplicitAutograd", allow_override=True
    )
    try:
        yield
    finally:
        library._destroy()


def another_decomposition() -> AbstractContextManager[Any]:
    """A user's own formula in the table that Inductor's code is made by."""
    return patch.object(trace_cache, "decompositions", lambda codegen: {torch.ops.aten.relu.default: twice_as_much})


@contextmanager
def another_pattern() -> Iterator[None]:
    found = PatternMatcherPass()
    register_graph_pattern(CallFunction(torch.ops.aten.exp.default, Arg()), pass_dict=found)(lambda match, x: None)
    with patch.object(joint_graph, "pass_patterns", [*joint_graph.pass_patterns, found]):
        yield


@torch._dynamo.allow_in_graph
@functools.wraps(nn.functional.silu)
def disguised(x: Tensor) -> Tensor:
    return 3 * nn.functional.silu(x)


class Disguised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return disguised(x).sum()


@functools.wraps(torch.relu)
def twice_as_much(x: Tensor) -> Tensor:
    return 2 * x.clamp(min=0)


@contextmanager
def graphs_in_logs() -> Iterator[None]:
    with patch.object(graph_compile.aot_graphs_log, "isEnabledFor", lambda level: True):
        yield


def saved_as_bfloat16() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 16), Twice()), nullcontext),
        (Attention, lambda: patch.dict(os.environ, {"CHUNKC_DISABLE_PASS": "hoist"})),
        (Attention, lambda: patch.dict(os.environ, {"CHUNKC_VERIFY_PASSES": "1"})),
        (Attention, lambda: torch.compiler.config.patch(force_disable_caches=True)),
        (Attention, another_sum),
        (Attention, another_decomposition),
        (Attention, another_pattern),
        (lambda: nn.Sequential(nn.Linear(16, 16), Disguised()), nullcontext),
        (Attention, graphs_in_logs),
        (Attention, saved_as_bfloat16),
    ],
    ids=[
        "custom operator",
        "left out",
        "verified",
        "caches off",
        "replaced operator",
        "decomposition",
        "pattern",
        "disguised",
        "logs",
        "saved otherwise",
    ],
)
def test_traced_each_time(make: Callable[[], nn.Module], state: Callable[[], AbstractContextManager[Any]]) -> None:
    model = make()
    with state():
        for _ in range(2):
            assert traced(model, X)[1].keys() <= {"bypass"}


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return twice(x).sum()


def test_a_tensor_in_the_graph_is_not_kept() -> None:
    model = WithConstant()
    first, _ = traced(model, X)
    second, counted = traced(model, X)
    assert first == second
    assert "hit" not in counted


def test_symbolic_sizes_are_traced_each_time() -> None:
    model = Attention()
    for _ in range(2):
        assert traced(nn.Linear(16, 16), X, options={"dynamic": True})[1] == {}
    assert traced(model, X)[1] == {"miss": 1, "saved": 1}


# --- damage ---


@pytest.mark.parametrize("damage", ["cut", "another number", "emptied"])
def test_a_damaged_entry_is_ignored(folder: Path, damage: str) -> None:
    model = Attention(3.25)
    expected, _ = traced(model, X)
    (entry,) = (path for path in folder.rglob("*") if path.is_file())
    whole = entry.read_bytes()
    number, another = struct.pack(">d", 3.25), struct.pack(">d", 7.25)
    assert number in whole
    entry.write_bytes({"cut": whole[:-9], "emptied": b""}.get(damage, whole.replace(number, another)))
    found, counted = traced(model, X)
    assert found == expected
    assert counted.keys() & {"miss", "bypass"}


def test_the_stand_in_does_not_run() -> None:
    ((graphs, _),) = all_captured(Attention(), X)
    assert graphs.backward is not None
    module = stand_in(graphs.backward.graph)
    with pytest.raises(UnsupportedError, match="compiled autograd would run"):
        module(*(node for node in module.graph.nodes if node.op == "placeholder"))


# --- other processes and machines ---

TRAINS = """
import sys, torch, chunkc
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

saved, given = sys.argv[1:]
if given:
    torch.compiler.load_cache_artifacts(open(given, "rb").read())
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(8)]
model = torch.compile(torch.nn.Sequential(*layers), backend="chunkc", options={"memory_budget": "60KB"})
optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if saved:
    open(saved, "wb").write(torch.compiler.save_cache_artifacts()[0])
bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.int32)
print(int(bits.long().mul(torch.arange(1, bits.numel() + 1)).sum()), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.second_tier
def test_other_processes_and_machines_train_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, saved: str = "", given: str = "") -> list[str]:
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / folder))
        done = forked.run(program, saved, given, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    program, artifacts = tmp_path / "trains.py", str(tmp_path / "artifacts")
    program.write_text(TRAINS)
    bits, found = run("here", saved=artifacts)
    assert found == "0"
    assert run("there", given=artifacts) == [bits, "1"], "in another process, of what the first has saved"
