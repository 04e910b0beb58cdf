"""What users of offloading systems complain about, and which test holds that it does not happen here.

The tests stand where their subject is. What is listed here is looked up: a test that is renamed or removed is missed.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

COMPLAINTS: dict[str, tuple[str, ...]] = {
    "host RAM runs out with no forecast": (
        "weights/test_larger_than_memory.py::test_no_stage_takes_more_than_explain_says",
        "explaining/test_host.py::test_in_ram_all_of_home_is_in_memory",
    ),
    "pinned memory is rounded up to powers of two": (
        "runtime/storage/test_pinned.py::test_regions_are_pinned_exactly_and_unpinned_when_nobody_uses_them",
    ),
    "a CPU optimizer fails to build at its first use": (
        "kernels/test_cpp.py::test_a_compiler_that_does_not_work_is_the_users_to_mend",
        "kernels/test_cpp.py::test_an_update_says_it",
    ),
    "out of memory in a warm-up, though training would fit": (
        "engine/test_engine.py::test_deepspeeds_loop",
        "engine/test_engine.py::test_mixed_precision_is_that_of_a_plain_loop",
    ),
    "saving or resuming runs out of memory": (
        "checkpoint/test_training.py::test_nothing_is_taken_from_the_budget_nor_much_from_the_host",
        "weights/test_larger_than_memory.py::test_no_stage_takes_more_than_explain_says",
    ),
    "tied weights are saved twice": (
        "weights/test_save.py::test_a_shared_weight_is_written_once",
        "checkpoint/test_training.py::test_the_files_are_what_others_read",
    ),
    "the optimizer's step is stale after a resume": (
        "checkpoint/test_training.py::test_a_resumed_run_has_the_bits_of_one_that_was_never_ended",
        "faults/test_kills.py::test_at_a_hundred_moments",
    ),
    "schedulers, clipping, accumulation and groups do not work": (
        "engine/test_engine.py::test_deepspeeds_loop",
        "engine/test_optimizer_semantics.py::test_every_scheduler",
        "engine/test_optimizer_semantics.py::test_groups_added_later",
        "lightning/test_strategy.py::test_gradients_are_clipped_in_mixed_precision",
    ),
    "frozen parameters and LoRA, parameters unused in some steps": (
        "optim/test_optimizer.py::test_what_is_unfrozen_is_trained",
        "integrations/test_peft.py::test_lora_trains_as_without_chunkc_and_the_frozen_base_only_comes",
    ),
    "idle experts, tied weights, modules called twice": (
        "properties/test_ladder.py::test_eager_segments_train_to_the_same_bits_within_every_budget",
        "properties/test_ladder.py::test_generated_segments_train_to_the_same_bits_within_every_budget",
    ),
    "nn.MultiheadAttention": ("integrations/test_models.py::test_trains_and_answers_as_plain_pytorch",),
    "lengths that vary": (
        "integrations/test_models.py::test_lengths_that_vary",
        "end_to_end/test_dynamic_shapes.py::test_new_shapes_are_planned_and_not_compiled",
    ),
    "graph breaks": (
        "end_to_end/test_several_graphs.py::test_residents_in_the_way_of_a_later_graph_s_backward",
        "properties/test_ladder.py::test_eager_segments_train_to_the_same_bits_within_every_budget",
    ),
    "ranks decide differently and hang": (
        "distributed/test_agreement.py::test_a_difference_names_what_and_who",
        "distributed/test_distribute.py::test_all_ranks_raise_an_error_in_time",
        "distributed/test_races.py::test_every_agreement_matters",
    ),
    "a missing wait gives wrong gradients, found only as NaN": (
        "faults/test_missing_waits.py::test_every_wait_matters",
        "engine/test_engine.py::test_wrong_gradients_are_found_only_as_nan",
    ),
    "an estimate says that it fits when it does not, or the reverse": (
        "end_to_end/test_prediction.py::test_every_operation_to_the_byte",
        "end_to_end/test_budget_error.py::test_the_minimum_is_small_and_one_byte_less_does_not_work",
        "end_to_end/test_minimum_of_graphs.py::test_what_explain_says_works_at_the_first_try_and_one_byte_less_does_not",
    ),
    "every release of PyTorch breaks it": (
        "test_torch_private.py::test_private_parts_are_touched_in_one_place",
        "test_torch_private.py::test_a_missing_part_is_an_error_at_import",
    ),
}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_each_complaint_has_its_tests(complaint: str) -> None:
    for test in COMPLAINTS[complaint]:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"{test} is gone: which test holds it now?"
