"""Which parameters are read as casts, and the graphs that read them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.layout import ChunkLayout, ParamSpec
from chunkc.ir.shards import Shards
from chunkc.passes.graphs.graphs import storage_keys
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.rewrite.casts import read_as_casts, with_casts_given

WIDTH = 4
BF16, FP16 = torch.bfloat16, torch.float16
Function = Callable[[Tensor, Tensor, Tensor], Any]


def traced(function: Function, w: Tensor | None = None) -> fx.GraphModule:
    """A phase whose placeholders are `x_1`, `w_1`, `v_1`."""
    x, v = torch.ones(2, WIDTH, dtype=BF16), torch.ones(WIDTH, WIDTH)

    def phase(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        made = function(x, w, v)
        return made if isinstance(made, tuple) else (made,)

    return make_fx(phase, tracing_mode="fake")(x, torch.ones(WIDTH, WIDTH) if w is None else w, v)


def spec(name: str, dtype: torch.dtype = torch.float32, shards: Shards | None = None) -> ParamSpec:
    return ParamSpec(name, (WIDTH, WIDTH), (WIDTH, 1), dtype, trainable=True, shards=shards)


def one_group(*specs: ParamSpec) -> ChunkLayout:
    layout = lay_out(specs or [spec("h.w"), spec("h.v")], 1 << 9)
    assert len(layout.groups) == 1
    return layout


def found(*functions: Function, layout: ChunkLayout | None = None, w: Tensor | None = None) -> dict[str, str]:
    graphs = [traced(function, w).graph for function in functions]
    return read_as_casts(graphs, {"w_1": "h.w", "v_1": "h.v"}, layout or one_group())


def as_casts(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x @ w.to(BF16) @ v.to(BF16)


def only_one(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x @ w.to(BF16)


def as_it_is(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return x @ w.to(BF16), w * 2


def neither(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x * 2


BOTH, ONE, NONE = {"h.w": "param_bf16", "h.v": "param_bf16"}, {"h.w": "param_bf16"}, dict[str, str]()
READS: dict[str, tuple[dict[str, str], list[Function]]] = {
    "only as casts": (BOTH, [as_casts]),
    "only as casts in both phases": (BOTH, [as_casts, as_casts]),
    "in fp16": ({"h.w": "param_fp16"}, [lambda x, w, v: x.half() @ w.half()]),
    "by another operator": (ONE, [lambda x, w, v: x @ torch.ops.prims.convert_element_type(w, BF16)]),
    "the other one is not read": (ONE, [only_one]),
    "neither is read": (NONE, [neither]),
    "not in the other phase": (ONE, [only_one, neither]),
    "as it is in the other phase": (NONE, [only_one, as_it_is]),
    "as it is": (NONE, [as_it_is]),
    "as a view": (NONE, [lambda x, w, v: x @ w.t().to(BF16)]),
    "in two dtypes": (NONE, [lambda x, w, v: (x @ w.to(BF16), x.half() @ w.half())]),
    "beside one in another dtype": (NONE, [lambda x, w, v: (x @ w.to(BF16), x.half() @ v.half())]),
    "beside one as it is": (NONE, [lambda x, w, v: (x @ w.to(BF16), v * 2)]),
    "in double precision": (NONE, [lambda x, w, v: x.double() @ w.double()]),
    "returned": (NONE, [lambda x, w, v: w.to(BF16)]),
    "returned as a view": (NONE, [lambda x, w, v: (x @ (cast := w.to(BF16)), cast.t())]),
    "in another layout": (
        NONE,
        [lambda x, w, v: x @ torch.ops.aten._to_copy.default(w, dtype=BF16, memory_format=torch.contiguous_format)],
    ),
}


@pytest.mark.parametrize("how", READS)
def test_parameters_that_are_only_cast_are_read_as_casts(how: str) -> None:
    """What needs the parameter itself, in either phase, reads it."""
    expected, functions = READS[how]
    assert found(*functions) == expected


@pytest.mark.parametrize("dtype", [torch.int32, FP16])
def test_integers_and_16_bits_travel_as_they_are(dtype: torch.dtype) -> None:
    layout = one_group(spec("h.w", dtype))
    assert found(only_one, layout=layout, w=torch.ones(WIDTH, WIDTH, dtype=dtype)) == {}


def test_what_is_cut_over_ranks_is_exchanged_as_it_is() -> None:
    shards = Shards((WIDTH, WIDTH), 2, 0, 3)
    assert found(only_one, layout=one_group(spec("h.w", shards=shards))) == {}


def test_a_graph_that_is_given_casts_computes_the_same() -> None:
    original = traced(lambda x, w, v: x @ w.to(BF16) @ w.to(BF16).t() + v.to(BF16).sum())
    text, given = original.code, with_casts_given(original, ["w_1"])
    assert original.code == text, "the original is changed"
    x, w, v = torch.randn(2, WIDTH).to(BF16), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    assert torch.equal(*given(x, w.to(BF16), v), *original(x, w, v))
    casts = [node for node in given.graph.nodes if node.target is torch.ops.aten._to_copy.default]
    assert len(casts) == 1, "that of the parameter that is not given"
    placeholder = next(node for node in given.graph.nodes if node.name == "w_1")
    assert placeholder.meta["val"].dtype == BF16


def test_views_of_several_casts_are_views_of_what_is_given() -> None:
    """As in recomputed regions, each of which casts for itself; so no view of a slot crosses a cut."""
    original = traced(lambda x, w, v: (x @ w.to(BF16).t(), x @ w.to(BF16).t()))
    given = with_casts_given(original, ["w_1"])
    placeholder = next(node for node in given.graph.nodes if node.name == "w_1")
    views = [node for node in given.graph.nodes if node.target is torch.ops.aten.t.default]
    assert len(views) == 2
    assert {key for view in views for key in storage_keys(view)} == set(storage_keys(placeholder))
