"""Makes the walks importable against an older source tree, in which modules have other names."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

FORMER_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "shardstep.local.multi_class": ("shardstep.mixture", {"MultiClass": "Mixture"}),
    "shardstep.params.stochastic_rounding": ("shardstep.rounding", {}),
}
"""Modules the walks import, with the module and the names that an older source tree has instead."""


def _accept_former_names() -> None:
    for now, (former, renamed) in FORMER_NAMES.items():
        try:
            importlib.import_module(now)
        except ModuleNotFoundError:
            found = importlib.import_module(former)
            alias = types.ModuleType(now)
            alias.__dict__.update(vars(found))
            alias.__dict__.update({new: getattr(found, old) for new, old in renamed.items()})
            sys.modules.setdefault(now.rpartition(".")[0], types.ModuleType("package"))
            sys.modules[now] = alias


os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # without DDP's warnings of unused parameters
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
_accept_former_names()
