"""torch's own database of optimizer options, as cases that can be sent to ranks."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from typing import Any

import torch
from torch.optim import Optimizer


def read() -> list[tuple[type[Optimizer], str, dict[str, Any]]]:
    """Every class with every set of options that torch tests it with on the CPU."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        # torch's test code derives from its class, and we run none of that.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_optimizers import optim_db

    found = []
    for info in optim_db:
        for given in info.optim_inputs_func(torch.device("cpu"), torch.float32):
            found.append((info.optim_cls, given.desc, dict(given.kwargs)))
            for impl in ("foreach", "fused"):
                if impl in info.supported_impls and impl not in given.kwargs:
                    options = {**given.kwargs, impl: True}
                    if is_valid(info.optim_cls, options):
                        found.append((info.optim_cls, f"{given.desc}, {impl}", options))
    return found


def is_valid(cls: Any, options: dict[str, Any]) -> bool:
    """Whether torch has this implementation for these options: a foreach one may want numbers."""
    param = torch.nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.ones(2, 2)
    try:
        cls([param], **options).step()
    except (RuntimeError, ValueError):
        return False
    return True
