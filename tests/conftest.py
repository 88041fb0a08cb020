"""Settings of every test: one thread, so that sums are taken in one order and compare bitwise.

``tests/`` is importable through ``pythonpath`` in pyproject.toml, where every test also has its
timeout; ``--strict-config`` makes that an error rather than nothing without pytest-timeout.

It also says which tests are long ones, beside those that are marked so where they stand: what runs
at two ranks in the fast suite runs at three and four in the long one, and so do variations of a
fast test that take many seconds.
"""

import os
import re

# Before torch is imported, since OpenMP reads it then; the ranks of a test inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)

#: Files whose tests have the number of ranks among their parameters.
BY_RANKS = {
    "test_checkpoint.py",
    "test_checkpoint_fit.py",
    "test_checkpoint_precision.py",
    "test_comm.py",
    "test_dcp.py",
    "test_ddp_hooks.py",
    "test_option_database.py",
    "test_parity.py",
    "test_precision_parity.py",
    "test_state_dict.py",
    "test_trainability.py",
    "test_zero2_clip.py",
    "test_zero2_join.py",
}

LONG = re.compile(
    r"test_a_failing_rank_shows_its_traceback_and_ends_the_demo"
    r"|test_a_load_that_fails_on_one_rank"
    r"|test_a_tensor_parallel_model_trains_as_with_the_unsharded_optimizer\[(1-2|2-1)\]"
    r"|test_channels_last_parameters_keep_numbers_and_format"
    r"|test_four_ranks_repeat_themselves_to_the_bit_and_come_close_to_ddp"
    r"|test_gradients_travel_in_the_dtype_that_is_asked_for"
    r"|test_known_models_are_divided_fairly\[llama3_8b-1024\]"
    r"|test_muon_is_dealt_fairly\[llama3_8b-64"
    r"|test_parameters_that_nobody_used_stay_as_they_are"
    r"|test_the_ddp_hooks_step_on_masters"
    r"|test_the_naive_versions_agree"
    r"|test_the_page_has_the_table_as_it_is_made"
    r"|test_under_ddp_relayed"
    r"|test_zero_2_goes_on"
    r"|test_a_program_that_ends_finishes_its_save"
    r"|test_an_interrupt_leaves_no_rank_behind"
    r"|test_a_rank_that_dies_silently_is_named"
    r"|test_communication_that_overlaps_the_model_may_be_late_and_in_any_order\[2-whole"
    r"|test_a_grad_scaler_comes_to_ddps_decisions_and_numbers_whichever_rank_overflows"
    r"|test_a_tensor_parallel_model_trains_as_with_the_unsharded_optimizer\[2-2\]"
    r"|test_compiled_before_after_or_in_place_equals_not_compiled_to_the_bit"
    r"|test_holding_back_clearing_and_giving_up_gradients_equals_ddp_to_the_bit\[False\]"
    r"|test_after_a_failure_anywhere_and_zero_grad_training_goes_on_with_the_right_numbers"
    r"|test_gradients_that_are_held_back_add_up_in_fp32"
    r"|test_the_demo_ends_with_equal_numbers_and_a_complete_record"
    r"|test_the_state_of_every_class_follows_the_plan"
    r"|test_uneven_inputs\["
    r"|test_state_is_that_of_the_local_part_and_loads_at_the_same_place\[2-2\]"
    r"|test_every_scheduler_gives_the_same_parameters"
    r"|test_killed_at_8_moments"
    r"|test_memory_does_not_grow_with_the_checkpoint"
    r"|test_names_from_inside_of_wrappers_are_known\[.*-True\]"
    r"|test_no_way_of_reading_a_parameter_in_flight_sees_an_old_value\[shuffled\]"
    r"|test_plans_do_not_depend_on_the_hash_seed"
    r"|test_state_moves_between_zero_1_zero_2_and_the_plain_optimizer_to_the_bit"
    r"|test_training_reads_nothing_that_has_not_arrived\[shuffled\]"
    r"|test_two_ranks_equal_ddp_at_every_step_to_the_bit\[SGD\]"
    r"|test_what_is_damaged_is_refused_by_name\[contents\]"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        more_ranks = item.path.name in BY_RANKS and re.search(r"[\[-][34](?=[\]-])", item.name)
        if more_ranks or LONG.match(item.name):
            item.add_marker(pytest.mark.slow)
