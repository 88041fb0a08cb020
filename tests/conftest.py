"""Settings of every test: one thread, so that sums are taken in one order and compare bitwise.

``tests/`` is importable through ``pythonpath`` in pyproject.toml, where every test also has its
timeout; ``--strict-config`` makes that an error rather than nothing without pytest-timeout.

It also says which tests are long ones, beside those that are marked so where they stand: what runs
at two ranks in the fast suite runs at three and four in the long one, and so do variations of a
fast test that take many seconds.
"""

import os
import re
from typing import Any

# Before torch is imported, since OpenMP reads it then; the ranks of a test inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from ranks import end_idle_processes

torch.set_num_threads(1)

# How long an example takes says more of the machine than of the code, and what fails is to fail
# again. To search further: `pytest --hypothesis-profile=search`.
CALM: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=True, **CALM)
settings.register_profile("search", max_examples=1000, **CALM)
settings.load_profile("steady")

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

#: Variations of a fast test that take many seconds.
LONG = re.compile(
    r"test_communication_that_overlaps_the_model_may_be_late_and_in_any_order\[2-whole"
    r"|test_holding_back_clearing_and_giving_up_gradients_equals_ddp_to_the_bit\[False\]"
    r"|test_known_models_are_divided_fairly\[llama3_8b-1024\]"
    r"|test_muon_is_dealt_fairly\[llama3_8b-64"
    r"|test_names_from_inside_of_wrappers_are_known\[.*-True\]"
    r"|test_no_way_of_reading_a_parameter_in_flight_sees_an_old_value\[shuffled\]"
    r"|test_state_is_that_of_the_local_part_and_loads_at_the_same_place\[2-2\]"
    r"|test_training_reads_nothing_that_has_not_arrived\[shuffled\]"
    r"|test_two_ranks_equal_ddp_at_every_step_to_the_bit\[SGD\]"
    r"|test_uneven_and_empty_parts_and_missing_gradients\[(1-2|2-1)\]"
    r"|test_what_is_damaged_is_refused_by_name\[contents\]"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        more_ranks = item.path.name in BY_RANKS and re.search(r"[\[-][34](?=[\]-])", item.name)
        if more_ranks or LONG.match(item.name):
            item.add_marker(pytest.mark.slow)


def pytest_sessionfinish() -> None:
    end_idle_processes()
