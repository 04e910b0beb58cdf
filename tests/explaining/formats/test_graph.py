from __future__ import annotations

import ast

from synthetic import GRAPHS, small

from chunkc.explaining.formats import render_graph


def test_it_is_python_with_one_function_for_each_phase() -> None:
    tree = ast.parse(render_graph(small()))
    assert [type(node) for node in tree.body] == [ast.FunctionDef] * len(GRAPHS)
    for node, code in zip(tree.body, GRAPHS.values()):
        assert ast.unparse(node) == ast.unparse(ast.parse(code))


def test_a_name_of_several_lines_stays_a_comment() -> None:
    ast.parse(render_graph(small(model="a\nb = (")))
