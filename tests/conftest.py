"""Settings of every test: one thread, so that sums are taken in one order and compare bitwise.

``tests/support`` is importable through ``pythonpath`` in pyproject.toml. The timeout of every test
is there too; ``--strict-config`` makes that an error rather than nothing without pytest-timeout.
"""

import os
from typing import Any

# Before torch is imported, since OpenMP reads it then; the ranks of a test inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from ranks import end_idle_processes
from shared_gpu import MPS

torch.set_num_threads(1)

# How long an example takes says more of the machine than of the code, and what fails is to fail
# again. To search further: `pytest --hypothesis-profile=search`.
CALM: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=True, **CALM)
settings.register_profile("search", max_examples=1000, **CALM)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test at three or four ranks as slow if it also runs at fewer."""

    def world_size(item: pytest.Item) -> Any:
        return item.callspec.params.get("world_size") if hasattr(item, "callspec") else None

    at_few = {item.nodeid.partition("[")[0] for item in items if world_size(item) in (1, 2)}
    for item in items:
        if item.nodeid.partition("[")[0] in at_few and world_size(item) in (3, 4):
            item.add_marker(pytest.mark.slow)


def pytest_sessionfinish() -> None:
    end_idle_processes()
    MPS.stop()
