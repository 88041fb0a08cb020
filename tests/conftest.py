"""Settings of every test: one thread, so that sums are taken in one order and compare bitwise.

``tests/`` is importable through ``pythonpath`` in pyproject.toml, where every test also has its
timeout; ``--strict-config`` makes that an error rather than nothing without pytest-timeout.
"""

import os

# Before torch is imported, since OpenMP reads it then; the ranks of a test inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
