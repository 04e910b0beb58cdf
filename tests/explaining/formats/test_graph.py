from __future__ import annotations

import ast

from synthetic import GRAPHS, not_fitting, small

from chunkc.explaining.formats import render_graph


def test_it_is_python_with_one_function_for_each_phase() -> None:
    tree = ast.parse(render_graph(small()))
    assert [type(node) for node in tree.body] == [ast.FunctionDef] * len(GRAPHS)
    for node, code in zip(tree.body, GRAPHS.values()):
        assert ast.unparse(node) == ast.unparse(ast.parse(code))


def test_headers_count_their_own_phase_only() -> None:
    forward, backward = render_graph(small()).split("# backward\n")
    assert "prefetch: 2 copies, 40.00 MiB" in forward
    assert "prefetch" not in backward
    assert "write_back: 1 copy, 20.00 MiB" in backward


def test_a_name_of_several_lines_stays_a_comment() -> None:
    ast.parse(render_graph(small(model="a\nb = (")))


def test_it_says_which_plan_and_when_there_is_no_graph() -> None:
    assert "plan for the smallest budget" in render_graph(not_fitting())
    assert "no graph" in render_graph(small(graphs={}))
