"""Predicted bytes that are kept from one process to the next: the same as computed ones, or not taken."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.compiler._cache import CacheArtifactManager
from torch.fx.experimental.proxy_tensor import make_fx

import chunkc
from chunkc.ir.estimates import unread_wrapper
from chunkc.ir.program import SegmentMemory
from chunkc.machines import operators
from chunkc.passes import codegen
from chunkc.passes.graphs.shapes import AS_TRACED
from chunkc.passes.memory import kept_bytes as module
from chunkc.passes.memory.kept_bytes import MIN_NODES, kept_bytes
from chunkc.passes.memory.scratch import declared
from chunkc.passes.memory.scratch.measured import record_calls
from chunkc.passes.memory.segment_memory import bounded_memory, eager_memory
from chunkc.passes.segments.segments import Segment
from chunkc.torch_private import compile_cache, onednn


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new cache folder; artifacts are noted for the test alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    with CacheArtifactManager.with_fresh_cache():
        yield tmp_path / "chunkc"


def square(width: int = 8, **options: Any) -> torch.Tensor:
    return torch.empty(width, width, **options)


def graph_of(*inputs: torch.Tensor, num_operations: int = MIN_NODES, mode: str = "fake") -> fx.Graph:
    """Multiply the first input by the last, again and again."""

    def f(*inputs: torch.Tensor) -> tuple[torch.Tensor]:
        x = inputs[0]
        for _ in range(num_operations // 2):
            x = torch.relu(torch.mm(x, inputs[-1]))
        return (x,)

    return make_fx(f, tracing_mode=mode)(*(inputs or (square(),))).graph


class Computed:
    """`eager_memory` of a graph, which counts how often it is asked."""

    def __init__(self, graph: fx.Graph, num_threads: int = 2) -> None:
        self.graph, self.num_threads, self.count = graph, num_threads, 0

    def __call__(self) -> SegmentMemory:
        self.count += 1
        return eager_memory(self.graph, self.num_threads)


def asked(graph: fx.Graph, code: str = "", num_threads: int = 2) -> bool:
    """Whether bytes were computed; they are right in any case."""
    compute = Computed(graph, num_threads)
    memory = kept_bytes(graph, code, num_threads, AS_TRACED, compute)
    fresh = eager_memory(graph, num_threads)
    assert memory == fresh
    assert [step.position for step in memory.steps] == [step.position for step in fresh.steps]
    return compute.count == 1


def test_bytes_are_computed_once_for_each_code_and_number_of_threads() -> None:
    for code, num_threads in (("", 2), ("code", 2), ("other code", 2), ("", 3)):
        assert asked(graph_of(), code, num_threads)
        assert not asked(graph_of(), code, num_threads)


def test_estimates_are_kept(folder: Path) -> None:
    graph = graph_of()
    memory = bounded_memory(graph, 2, unread_wrapper("uses something"))
    for _ in range(2):
        assert kept_bytes(graph, "", 2, AS_TRACED, lambda: memory) == memory
    assert len(list(folder.iterdir())) == 1


# --- the key ---


def of_module(path: str) -> fx.Graph:
    graph = graph_of()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.meta["nn_module_stack"] = {"": (path, nn.ReLU)}
    return graph


def with_one_storage() -> fx.Graph:
    both = torch.empty(2, 8, 8)
    return graph_of(both[0], both[0])


VARIANTS: dict[str, tuple[Callable[[], fx.Graph], Callable[[], fx.Graph]]] = {
    "sizes": (graph_of, lambda: graph_of(square(9))),
    "operations": (graph_of, lambda: graph_of(num_operations=MIN_NODES + 2)),
    "dtype": (graph_of, lambda: graph_of(square(dtype=torch.bfloat16))),
    "strides": (graph_of, lambda: graph_of(square().t())),
    "module": (graph_of, lambda: of_module("L['self'].act")),
    "number of inputs": (graph_of, lambda: graph_of(square(), square())),
    "shared storage": (lambda: graph_of(square(), square()), with_one_storage),
    "bytes of a storage": (graph_of, lambda: graph_of(torch.empty(16, 8)[:8])),  # the first part of a larger tensor
    "conjugated": (
        lambda: graph_of(square(dtype=torch.complex64)),
        lambda: graph_of(square(dtype=torch.complex64).conj()),
    ),
}


@pytest.mark.parametrize(
    ("name", "code"), [*((name, "") for name in VARIANTS), *((name, "code") for name in ("sizes", "dtype", "strides"))]
)
def test_other_graphs_have_other_entries(name: str, code: str) -> None:
    """And bytes of code depend on its inputs."""
    former, other = VARIANTS[name]
    assert asked(former(), code)
    assert asked(other(), code)
    assert not asked(former(), code)


def test_bytes_of_code_do_not_depend_on_the_graph_that_inductor_changes(folder: Path) -> None:
    compute = Computed(graph_of())
    for graph in (graph_of(), graph_of(num_operations=2)):
        kept_bytes(graph, "code", 2, AS_TRACED, compute)
    assert compute.count == 1


SETTINGS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "matrix products": lambda patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    "default dtype": lambda patch: patch.setattr(torch, "get_default_dtype", lambda: torch.float64),
    "instructions of ATen": lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other"),
    "limit of oneDNN": lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "another"),
    **{
        name: lambda patch, name=name: patch.setattr(onednn, name, renamed(name, not getattr(onednn, name)()))  # type: ignore[misc]
        for name in ("is_x86", "uses_avx2", "uses_avx512", "multiplies_bfloat16", "multiplies_tiles")
    },
    "bfloat16": lambda patch: flip_computes(patch, torch.bfloat16),
    "float16": lambda patch: flip_computes(patch, torch.float16),
    **{
        name: lambda patch, at=at: patch.setattr(
            module, "_VERSIONS", (*module._VERSIONS[:at], "0", *module._VERSIONS[at + 1 :])
        )  # type: ignore[misc]
        for at, name in enumerate(("versions", "PyTorch's commit", "sources"))
    },
}


def renamed(name: str, answer: bool) -> Callable[[], bool]:
    def function() -> bool:
        return answer

    function.__name__ = name
    return function


def flip_computes(patch: pytest.MonkeyPatch, flipped: torch.dtype) -> None:
    computes = onednn.computes
    patch.setattr(onednn, "computes", lambda dtype: computes(dtype) != (dtype == flipped))


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_other_machines_settings_and_versions_have_other_entries(
    change: Callable[[pytest.MonkeyPatch], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(graph_of())
    with monkeypatch.context() as patch:
        change(patch)
        compute = Computed(graph_of())
        kept_bytes(graph_of(), "", 2, AS_TRACED, compute)
        assert compute.count == 1
    assert not asked(graph_of())


def test_onednn_describes_every_answer() -> None:
    """A function that is added there and that rules ask must change the text, too."""
    names = {name for name, value in vars(onednn).items() if callable(value) and value.__module__ == onednn.__name__}
    assert names == {
        "is_x86", "uses_avx2", "uses_avx512", "multiplies_bfloat16", "multiplies_tiles", "computes", "description",
        "_limit",
    }  # fmt: skip


def test_measured_operators_make_other_entries() -> None:
    assert asked(graph_of())
    path = operators.operators_path()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"another machine": {"aten.mm.default(...)": 1}}))
    assert asked(graph_of())
    assert not asked(graph_of())
    path.unlink()
    assert not asked(graph_of())


def test_sources_are_all_that_bytes_are_computed_by(tmp_path: Path) -> None:
    used = [sys.modules[name] for name in list(sys.modules) if name.startswith(("chunkc.passes", "chunkc.ir"))]
    contents = set(module._sources([Path(chunkc.ir.__file__ or "").parents[1], Path(module.__file__).parents[1]]))
    assert all(Path(str(one.__file__)).read_bytes() in contents for one in (*used, operators, onednn))
    rule = tmp_path / "rules" / "rule.py"
    rule.parent.mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "rules").symlink_to(rule.parent)
    rule.write_text("SLACK = 1")
    before = module._digest(module._sources([tmp_path / "package"]))
    rule.write_text("SLACK = 2")
    assert module._digest(module._sources([tmp_path / "package"])) != before


# --- what is not kept ---


@torch.library.custom_op("kept_bytes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def with_a_call(call: Callable[[torch.Tensor], torch.Tensor]) -> fx.Graph:
    def f(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(MIN_NODES):
            x = x.relu()
        return (call(x),)

    return make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(square()).graph


def on_meta() -> fx.Graph:
    with FakeTensorMode():
        return graph_of(square(device="meta"))


NOT_KEPT: dict[str, Callable[[], tuple[fx.Graph, str]]] = {
    "few operations": lambda: (graph_of(num_operations=MIN_NODES - 2), ""),
    "symbols": lambda: (graph_of(mode="symbolic"), ""),
    "symbols in code": lambda: (graph_of(mode="symbolic"), "code"),
    "custom operator": lambda: (with_a_call(twice), ""),
    "custom operator in code": lambda: (graph_of(), "buf0 = torch.ops.kept_bytes.twice.default(arg0_1)"),
    "constant": lambda: (with_a_call(lambda x: x + CONSTANT), ""),
    "device": lambda: (on_meta(), ""),
    "device of code": lambda: (on_meta(), "code"),
}
CONSTANT = torch.ones(8)


@pytest.mark.parametrize("case", NOT_KEPT.values(), ids=NOT_KEPT)
def test_bytes_that_depend_on_more_are_not_kept(folder: Path, case: Callable[[], tuple[fx.Graph, str]]) -> None:
    graph, code = case()
    compute = Computed(graph_of())
    for _ in range(2):
        kept_bytes(graph, code, 2, AS_TRACED, compute)
    assert compute.count == 2
    assert not folder.exists()


def test_nothing_is_taken_where_scratch_is_declared_or_calls_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(graph_of())
    with monkeypatch.context() as patch:
        patch.setitem(declared._declared, "aten::mm", lambda *_: 1 << 20)
        assert asked(graph_of())
    with record_calls():
        assert asked(graph_of())
    assert not asked(graph_of())


@pytest.mark.parametrize("off", [{"fx_graph_cache": False}, {"force_disable_caches": True}, {}], ids=str)
def test_nothing_is_kept_where_caches_are_off_or_without_sources(
    off: dict[str, bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a program that was frozen into one file: no other version of chunkc would have another key."""
    if not off:
        monkeypatch.setattr(module, "_VERSIONS", (*module._VERSIONS[:2], module._digest(module._sources([]))))
    with config.patch(off):
        assert asked(graph_of())
        assert asked(graph_of())
    assert not folder.exists()


# --- entries that are no good, and writers at once ---


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\xff\x00" + content,
        lambda content: content.replace(b"256", b"128"),
        lambda content: b"{}",
        lambda content: b'["0", "[]"]',
        lambda content: b"[1, 2]",
    ],
    ids=["truncated", "empty", "bytes", "number", "foreign", "other digest", "other content"],
)
def test_a_damaged_entry_is_ignored_and_replaced(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    asked(graph_of())
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    assert damage(whole) != whole
    entry.write_bytes(damage(whole))
    assert asked(graph_of())
    assert entry.read_bytes() == whole
    assert not asked(graph_of())


def test_an_entry_under_another_key_is_ignored(folder: Path) -> None:
    asked(graph_of())
    (other,) = folder.iterdir()
    asked(graph_of(square(16)))
    (entry,) = set(folder.iterdir()) - {other}
    entry.write_bytes(other.read_bytes())
    assert asked(graph_of(square(16)))


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: Path) -> None:
    folder.write_text("")
    assert asked(graph_of())
    assert asked(graph_of())


def test_a_write_that_fails_in_its_middle_leaves_the_former_entry(folder: Path) -> None:
    asked(graph_of())
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, former[1]))
        compile_cache.write(entry.name, ["0", "0" * len(whole)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)
    assert entry.read_bytes() == whole
    assert not asked(graph_of())


def test_several_write_and_read_at_once() -> None:
    graph = graph_of()
    fresh = eager_memory(graph, 2)
    start = threading.Barrier(8)
    found: list[SegmentMemory] = []

    def work() -> None:
        start.wait()
        for number in range(20):
            found.append(kept_bytes(graph, f"code {number}", 2, AS_TRACED, lambda: fresh))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 8 * 20
    assert all(memory == fresh for memory in found)
    assert not asked(graph, "code 0")


# --- to another machine ---


def test_artifacts_carry_entries(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(graph_of())
    asked(graph_of(square(9)))
    CacheArtifactManager.clear()
    asked(graph_of())  # read in this process, and not made
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    torch.compiler.load_cache_artifacts(saved[0])
    (loaded,) = (tmp_path / "elsewhere/chunkc").iterdir()
    assert loaded.read_bytes() == (folder / loaded.name).read_bytes()
    assert not asked(graph_of())
    assert asked(graph_of(square(9)))


def test_a_damaged_entry_is_not_carried(folder: Path) -> None:
    asked(graph_of())
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_text('["0", "[]"]')
    CacheArtifactManager.clear()
    asked(graph_of())
    assert [a.content for of in CacheArtifactManager._new_cache_artifacts.values() for a in of] == [whole]


LOADS = """
import sys, torch
with open(sys.argv[1], "rb") as file:
    torch.compiler.load_cache_artifacts(file.read())
assert "chunkc" not in sys.modules
"""


@pytest.mark.second_tier
def test_a_process_without_chunkc_loads_artifacts(folder: Path, tmp_path: Path) -> None:
    """Scripts load them before `torch.compile` imports the backend."""
    asked(graph_of())
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    (tmp_path / "saved").write_bytes(saved[0])
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "elsewhere"))
    subprocess.run([sys.executable, "-P", "-c", LOADS, tmp_path / "saved"], env=environment, check=True, timeout=300)
    assert [p.name for p in (tmp_path / "elsewhere/chunkc").iterdir()] == [p.name for p in folder.iterdir()]


# --- whole models ---


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(MIN_NODES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def trained(**options: Any) -> tuple[str, list[torch.Tensor]]:
    """The plan and the gradients of a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep()
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": 1 << 30, **options})
    compiled(torch.ones(4, 16)).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return chunkc.report(compiled).plan_text, gradients


def refuse(*args: object, **kwargs: object) -> SegmentMemory:
    raise AssertionError("bytes are computed anew")


@pytest.mark.parametrize(
    ("codegen_name", "whole_graph"),
    [("eager", "auto"), pytest.param("inductor", "never", marks=pytest.mark.second_tier)],
)
def test_a_second_start_computes_no_bytes_and_makes_the_same_plan_and_bits(
    codegen_name: str, whole_graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"codegen": codegen_name, "whole_graph": whole_graph}
    cold_plan, cold = trained(**options)
    monkeypatch.setattr(codegen, "inductor_memory", refuse)
    monkeypatch.setattr(codegen, "eager_memory", lambda graph, *args: refuse_large(graph, *args))
    warm_plan, warm = trained(**options)
    assert warm_plan == cold_plan
    assert len(cold) == 2 * MIN_NODES
    assert all(map(torch.equal, cold, warm))


def refuse_large(graph: fx.Graph, *args: Any) -> SegmentMemory:
    assert len(graph.nodes) < MIN_NODES, "bytes are computed anew"
    return eager_memory(graph, *args)


def test_explain_and_training_share_entries_of_eager_segments(folder: Path) -> None:
    segment = Segment("segment0", fx.GraphModule(nn.Module(), graph_of()))
    described = codegen.describe_segment(segment, "eager", 2)
    (entry,) = folder.iterdir()
    assert codegen.compile_segment(segment, "eager", 2).memory == described
    assert list(folder.iterdir()) == [entry]
