"""Lines of the user's code: found on traces, through checkpointing and fusion, and of each layer by itself."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.explaining.formats import render_text
from chunkc.ir.explanation import Explanation
from chunkc.passes.graphs.origins import source_line

HERE = Path(__file__).name
TORCH = Path(torch.__file__).parent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


def line_of(code: str, owner: type[nn.Module] = Block) -> str:
    """`file.py:12, code` of the one line of a `forward` in this file that contains `code`."""
    lines, first = inspect.getsourcelines(owner.forward)
    ((number, line),) = [(first + at, line.strip()) for at, line in enumerate(lines) if code in line]
    return f"{HERE}:{number}, {line}"


def explain(model: nn.Module, **options: str) -> Explanation:
    return chunkc.explain(model, torch.ones(4, 64), memory_budget=1, **options)


def sources(explanation: Explanation, op: str, phase: str) -> dict[str, set[str]]:
    """Module -> the lines of its moments of one operation."""
    found: dict[str, set[str]] = {}
    for moment in explanation.moments:
        if moment.op == op and moment.phase == phase:
            found.setdefault(moment.module, set()).add(moment.source)
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_layer_has_its_own_module_and_the_line_of_its_code(checkpointed: bool) -> None:
    up, down = line_of("self.up(x)"), line_of("self.down(hidden)")
    explanation = explain(Net(checkpointed=checkpointed))
    wanted = {f"blocks.{layer}.{name}": {line} for layer in range(4) for name, line in (("up", up), ("down", down))}
    assert sources(explanation, "aten.addmm", "forward") == wanted
    assert sources(explanation, "aten.mm", "backward") == wanted
    assert line_of("x.square()", Net) in {moment.source for moment in explanation.moments}
    assert {moment.source for moment in explanation.moments if moment.phase == "update"} == {""}


def test_inductors_kernels_have_the_line_of_what_they_compute() -> None:
    explanation = explain(Net(), codegen="inductor")
    found = sources(explanation, "aten.addmm", "forward")
    assert found["blocks.1.up"] == {line_of("self.up(x)")}
    assert found["blocks.2.down"] == {line_of("self.down(hidden)")}
    relu = sources(explanation, "cpp_fused_relu_0", "forward")
    assert {line for lines in relu.values() for line in lines} == {line_of("self.up(x)")}
    assert set(relu) == {f"blocks.{layer}" for layer in range(4)}


def test_equal_origins_are_one_record() -> None:
    """A deep model has a million operations and few lines."""
    explanation = explain(Net())
    assert len({id(moment.source) for moment in explanation.moments if moment.source}) == len(
        {moment.source for moment in explanation.moments if moment.source}
    )


def test_code_of_torch_alone_has_no_line() -> None:
    explanation = explain(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    assert {moment.source for moment in explanation.moments} == {""}


def test_the_text_says_the_line_of_the_peak() -> None:
    explanation = chunkc.explain(Net(), torch.ones(4096, 64), memory_budget="1GiB")
    assert explanation.peak.source in {line_of("self.up(x)"), line_of("self.down(hidden)"), line_of("square()", Net)}
    assert f"\n  {explanation.peak.source}\n" in render_text(explanation)


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        ("", ""),
        ("not a trace at all", ""),
        ('  File "<chunkc>", line 1, in call\n', ""),
        ('  File "<chunkc>", line 1, in call\n  File "/me/net.py", line 7, in g\n    f(x)\n', "net.py:7, f(x)"),
        ('  File "/me/net.py", line 7, in forward\n    y = f(x)\n        ^^^^\n', "net.py:7, y = f(x)"),
        (f'  File "/net.py", line 7, in g\n    f(x)\n  File "{TORCH}/x.py", line 3, in h\n    a\n', "net.py:7, f(x)"),
        ('  File "/me/net.py", line 7, in g\n    f(x)\nGradient addition node due to ...:', "net.py:7, f(x)"),
        ('  File "/me/net.py", line 7, in g', "net.py:7"),
    ],
)  # fmt: skip
def test_the_innermost_line_that_is_the_users(trace: str, line: str) -> None:
    assert source_line(trace) == line
