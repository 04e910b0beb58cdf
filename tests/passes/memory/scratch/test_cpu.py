"""The scratch table's own rules: lookups, refusals, declarations, fake tensors. Bytes: `test_scratch_operators.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from metering import measure
from operator_calls import GONE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from chunkc.ir.errors import OptionsError
from chunkc.passes.memory.scratch import cpu, declared, operators
from chunkc.passes.memory.scratch.iterator import reduces_two_inner_dimensions

aten = torch.ops.aten


@pytest.fixture
def _declarations() -> Iterator[None]:
    former = dict(declared._declared)
    yield
    declared._declared.clear()
    declared._declared.update(former)


def scratch_of(target, *args, threads: int = 1, **kwargs) -> int:
    return cpu.scratch_nbytes(target, args, kwargs, target(*args, **kwargs), threads)


def test_fake_tensors_give_the_same_answer() -> None:
    args = (torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16))
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    real = cpu.scratch_nbytes(target, args, {}, target(*args), 2)
    with FakeTensorMode() as mode:
        fakes = tree_map(mode.from_tensor, args)
        outputs = target(*fakes)
        assert cpu.scratch_nbytes(target, fakes, {}, outputs, 2) == real > 0
        mixed = (mode.from_tensor(torch.ones(4, 5)), mode.from_tensor(torch.ones(4, 5).bfloat16()))
        assert cpu.scratch_nbytes(aten.add.Tensor, mixed, {}, aten.add.Tensor(*mixed), 2) == 4 * 5 * 4


def test_of_an_operator_nobody_looked_at_operands_and_results_once_more_are_a_guess() -> None:
    x = torch.randn(64, 64)
    target = aten.linalg_ldl_solve.default
    assert not cpu.is_known(target)
    assert cpu.scratch_nbytes(target, (x,), {}, x, 2) == 2 * 64 * 64 * 4
    row = torch.randn(64)
    expanded = row.expand(64, 64)  # kernels that want dense operands copy all of it
    assert cpu.scratch_nbytes(target, (expanded,), {}, row, 2) == 64 * 64 * 4 + 64 * 4


def test_a_check_of_a_tensor_s_form_takes_nothing() -> None:
    assert cpu.is_known(aten._assert_tensor_metadata.default)
    assert scratch_of(aten._assert_tensor_metadata.default, torch.ones(3), [3]) == 0


@pytest.mark.usefixtures("_declarations")
def test_a_declaration_is_used() -> None:
    x = torch.randn(64, 64)
    target = aten.linalg_ldl_solve.default
    declared.declare_scratch(
        "aten::linalg_ldl_solve", lambda args, kwargs, outputs, num_threads: args[0].numel() * num_threads
    )
    assert cpu.is_known(target)
    assert cpu.scratch_nbytes(target, (x,), {}, x, 3) == 3 * 64 * 64
    declared.declare_scratch("aten::linalg_ldl_solve", lambda *_: 0)
    assert cpu.scratch_nbytes(target, (x,), {}, x, 3) == 0
    conjugated = torch.ones(4, 4, dtype=torch.complex64).conj()  # copied before the operator begins
    assert cpu.scratch_nbytes(target, (conjugated,), {}, x, 3) == 8 * 4 * 4


@pytest.mark.parametrize("answer", [None, -1, 1.5, True, "8"])
@pytest.mark.usefixtures("_declarations")
def test_a_declaration_that_returns_no_bytes_is_refused(answer: object) -> None:
    declared.declare_scratch("aten::linalg_ldl_solve", lambda *_: answer)  # type: ignore[arg-type, return-value]
    with pytest.raises(OptionsError, match=r"aten::linalg_ldl_solve.*returned.*bytes"):
        cpu.scratch_nbytes(aten.linalg_ldl_solve.default, (torch.ones(2, 2),), {}, torch.ones(2, 2), 1)


@pytest.mark.parametrize(("name", "function"), [("mm", len), ("a::b::c", len), ("::mm", len), (3, len), ("a::b", 0)])
def test_a_declaration_that_makes_no_sense_is_refused(name: object, function: object) -> None:
    with pytest.raises(OptionsError, match="declare_scratch takes"):
        declared.declare_scratch(name, function)  # type: ignore[arg-type]


def test_every_record_is_of_an_operator_and_of_no_other_record_s() -> None:
    for name in operators.OPERATORS:
        namespace, operator = name.split("::")
        if namespace not in ("transformers", "torch_nn") and name not in GONE:
            there = getattr(torch.ops, namespace)
            assert hasattr(there, operator) or hasattr(there, f"{operator}_"), name
    assert sum(len(list(operators._names(words))) for _, words in operators._GROUPS) == len(operators.OPERATORS)


def test_results_of_operators_in_place_are_their_callers() -> None:
    assert cpu.corrects_outputs(aten.uniform.default)
    assert not cpu.corrects_outputs(aten.uniform_.default)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo], ids=str)
@pytest.mark.parametrize("target", [aten.clone.default, aten._to_copy.default], ids=str)
def test_copies_of_sparse_matrices_take_nothing_inside(target: torch._ops.OpOverload, layout: torch.layout) -> None:
    assert scratch_of(target, torch.ones(64, 64).to_sparse(layout=layout)) == 0


@pytest.mark.parametrize("size", [0, 5, 60])
@pytest.mark.usefixtures("metered")
def test_calls_on_sparse_matrices_take_no_more_than_predicted(size: int) -> None:
    matrix = torch.rand(size, size)
    listed, compressed = matrix.to_sparse(), matrix.to_sparse_csr()
    calls = [(aten.mm.default, args) for args in itertools.product((matrix, listed, compressed), repeat=2)]
    for dense in (matrix, matrix.t(), torch.rand(4, size, 6)):
        calls += [(aten._to_sparse.default, (dense,)), (aten._to_sparse.sparse_dim, (dense, 1))]
        calls += [(aten._to_sparse.sparse_dim, (dense, 2))]
    calls += [(aten.sparse_mask.default, (matrix.t(), mask)) for mask in (listed, compressed)]
    calls += [(aten.sparse_sampled_addmm.default, (compressed, left, matrix)) for left in (matrix, matrix.t())]
    for other, reduce in itertools.product((matrix, matrix.t(), matrix.bfloat16()), ("sum", "mean", "amax")):
        sparse, at = compressed.to(other.dtype), torch.zeros(size, size, dtype=torch.int64)
        calls += [(aten._sparse_mm_reduce_impl.default, (sparse, other, reduce))]
        backward = (sparse, other.t(), other, reduce, at, [True, True])
        calls += [(aten._sparse_mm_reduce_impl_backward.default, backward)]
    wrong = []
    for target, args in calls:
        try:
            measure(target, args, {})  # a library may keep tables from its first call on
            measured, outputs = measure(target, args, {})
        except (NotImplementedError, RuntimeError):
            continue  # not every pair has a kernel
        predicted = cpu.scratch_nbytes(target, args, {}, outputs, torch.get_num_threads())
        if predicted < measured:
            wrong.append(f"{target} {[t.layout for t in args]}: measured {measured}, predicted {predicted}")
    assert not wrong, "\n".join(wrong)


def test_low_precision_sums_walk_as_the_iterator_does() -> None:
    images = torch.empty(4, 5, 6, 7)
    assert reduces_two_inner_dimensions(images, {0, 2})
    assert not reduces_two_inner_dimensions(images, {2, 3}), "one run of memory"
    assert not reduces_two_inner_dimensions(images[:, :, :1], {2, 3})
    assert not reduces_two_inner_dimensions(images.to(memory_format=torch.channels_last), {0, 2, 3})
    assert reduces_two_inner_dimensions(images, {0, 2, 3})
