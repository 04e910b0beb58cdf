"""What touches PyTorch's private parts lies in `chunkc/torch_private/`, and what is said on a PyTorch not checked."""

from __future__ import annotations

import ast
import copy
import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd import graph_compile
from torch._logging._internal import trace_log

from chunkc.torch_private import aot
from chunkc.torch_private.copying import copied_by
from chunkc.torch_private.versions import CHECKED, WHOLE, is_newer, lacks, newer_than_checked

ROOT = Path(__file__).resolve().parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
SOURCES = [
    path
    for package, folder in SETUP["package-dir"].items()
    if package != "chunkc.torch_private"
    for path in sorted((ROOT / folder).glob("*.py"))
]

EVERYWHERE = {
    "torch.utils._pytree",  # the same functions in all versions; what newer ones publish as torch.utils.pytree
    "torch._ops.OpOverload",  # the types of what torch.ops hands out, of which nothing but the type is asked
    "torch._ops.HigherOrderOperator",
    "torch._dynamo.maybe_mark_dynamic",  # public in all but its place: PyTorch's own guide tells users to call it
}
"""Parts that may be named anywhere."""

ATTRIBUTES = {
    "_schema",  # of an operator: its name and arguments, as every tool that walks FX graphs reads them
    "_overloadname",
    "_version",  # of a tensor: PyTorch's notes on autograd describe it
    "_cdata",  # of a storage: tells apart the storages of one graph, asked many times for every node
    "_wrapped_call_impl",  # of a module: what its call is on Python's stack, in all versions
    "_call_impl",
    "_modules",  # of a module: its parts, by name
    "_buffers",
    "_parameters",
    "_is_view",  # of a tensor: PyTorch's notes on views name it
}
"""Attributes of PyTorch's objects that may be read anywhere."""

STANDARD_LIBRARY = {"_fields", "_replace", "_asdict", "_getframe", "_exit", "_ArgumentGroup"}


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:  # names of operators
        return False
    known = any(dotted == name or dotted.startswith(f"{name}.") for name in EVERYWHERE)
    return not known and any(part.startswith("_") and not part.startswith("__") for part in parts)


def dotted_name(node: ast.expr) -> str:
    """`torch.cpu.is_there` of such an attribute; "" of what is called or computed."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted_name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def own_names(tree: ast.Module) -> set[str]:
    """Private names that a module defines: functions, attributes of its own objects, fields."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_uses(source: str) -> Iterator[str]:
    """What a source names of PyTorch's private parts."""
    tree = ast.parse(source)
    own = own_names(tree) | ATTRIBUTES | STANDARD_LIBRARY
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if is_private(name))
        elif isinstance(node, ast.Attribute):
            name = dotted_name(node)
            is_of_others = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own
            if node not in inner and is_private(name):
                yield name
            elif is_of_others and not name.startswith(("torch.", "aten.", "_aten.", "prims.")):
                yield node.attr
        elif isinstance(node, ast.Call) and dotted_name(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (
                part.value
                for part in node.args[1:2]
                if isinstance(part, ast.Constant) and str(part.value).startswith("_dynamo")
            )


def test_private_parts_are_touched_in_one_place() -> None:
    found = {path: sorted(set(private_uses(path.read_text()))) for path in SOURCES}
    assert {path: uses for path, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._inductor import config",
        "import torch._dynamo",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch import _C",
        "def late():\n    from torch._functorch.aot_autograd import aot_module_simplified",
        "import torch\ntorch._C._DisableAutocast()",
        "import torch\ntorch._dynamo.config.patch()",
        "import torch\ntorch.cpu._is_amx_tile_supported()",
        "def hooks(tensor):\n    return tensor._backward_hooks",
        "def marks(tensor):\n    return getattr(tensor, '_dynamo_dynamic_indices')",
    ],
)
def test_a_private_part_would_be_seen(source: str) -> None:
    assert list(private_uses(source))


def test_what_is_stable_may_stand_anywhere() -> None:
    for source in (
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch.ops.aten._to_copy.default",
        "import torch\nisinstance(x, torch._ops.OpOverload)",
        "class A:\n    def __init__(self, other):\n        self._x = other._x",
        "def name(operator):\n    return operator._schema.name",
    ):
        assert not list(private_uses(source)), source


def test_the_package_has_no_upper_bound_and_begins_with_the_first_version_checked() -> None:
    (torch_needed,) = (
        name
        for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if name.startswith("torch")
    )
    assert torch_needed == f"torch>={CHECKED[0]}"


@pytest.mark.parametrize("version", [f"{checked}.{patch}" for checked in CHECKED for patch in ("0", "9+cpu")])
def test_nothing_is_said_on_a_checked_version(version: str) -> None:
    assert not is_newer(version)
    assert newer_than_checked(version) is None


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0+cu130", "2.100.0", "3.0.0a0+git1234567"])
def test_a_newer_version_is_told_apart(version: str) -> None:
    text = newer_than_checked(version)
    assert text is not None
    assert f"2.11 to {CHECKED[-1]}, and this is {version}" in text
    assert f'pip install "torch=={WHOLE}.*"' in text
    assert version in str(lacks(ImportError("cannot import name 'x'"), version))


MISSING = """
import torch._inductor.compile_fx
del torch._inductor.compile_fx.compile_fx_inner
import chunkc
"""


@pytest.mark.second_tier
def test_a_missing_part_is_an_error_at_import() -> None:
    """`chunkc` may be imported already: another process."""
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, cwd=ROOT, timeout=300)
    (last,) = done.stderr.strip().splitlines()[-1:]
    assert done.returncode == 1
    assert last.startswith("ImportError: PyTorch 2.")
    assert "compile_fx_inner" in last
    assert "pip install" in last


def test_copiers_see_storages_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave them to torch, or copy them."""
    monkeypatch.setattr(copy, "_deepcopy_dispatch", dict(copy._deepcopy_dispatch))  # type: ignore[attr-defined]
    seen: list[str] = []
    other = nn.Parameter(torch.ones(3))
    copied_by(torch.UntypedStorage, lambda storage, memo: seen.append("storage"))
    copied_by(nn.Parameter, lambda parameter, memo: seen.append("parameter"))
    tensor, parameter = torch.arange(4.0), nn.Parameter(torch.arange(4.0))
    for original in (tensor, parameter):
        found = copy.deepcopy(original)
        assert found.equal(original)
        assert found.data_ptr() != original.data_ptr()
    assert seen == ["storage", "parameter"]
    copied_by(nn.Parameter, lambda parameter, memo: other)
    assert copy.deepcopy(nn.ParameterList([parameter]))[0] is other


def test_graphs_are_written_as_text_only_where_logs_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    write = graph_compile._log_fw_bw_graphs
    monkeypatch.setattr(trace_log, "handlers", [])
    with aot.without_unread_texts():
        assert graph_compile._log_fw_bw_graphs is not write
        assert graph_compile._log_fw_bw_graphs(None, None, None, None, None) == (None, None)
        assert graph_compile._log_joint_graph(None, None) is None
    assert graph_compile._log_fw_bw_graphs is write
    monkeypatch.setattr(graph_compile.aot_graphs_log, "isEnabledFor", lambda level: True)
    with aot.without_unread_texts():
        assert graph_compile._log_fw_bw_graphs is write
    monkeypatch.undo()
    monkeypatch.setattr(trace_log, "handlers", [logging.NullHandler()])
    with aot.without_unread_texts():
        assert graph_compile._log_fw_bw_graphs is write
