"""Refuses options that a class looks up by what ranks do not share: identity or place of a tensor.

bitsandbytes lets single parameters have other options than their group, such as 32 bits in an 8-bit
class, and remembers them by `id` or by their number in the group. A rank steps on views of them,
and on other ones under those numbers, so it would treat none that way, or the wrong ones.
"""

from __future__ import annotations

import sys
from typing import Any

from shardstep.local.multi_class import CLASS_KEY
from shardstep.params.inputs import unwrap_partial


def refuse_overrides(optimizer_class: Any) -> None:
    """Make sure that a class of bitsandbytes was told nothing about single parameters.

    Raises:
        ValueError: if it was.
    """
    optimizer_class = unwrap_partial(optimizer_class)
    library: Any = sys.modules.get("bitsandbytes.optim.optimizer")
    base = getattr(library, "Optimizer8bit", None)
    if base is None or not isinstance(optimizer_class, type):
        return
    manager = library.GlobalOptimManager.get_instance()
    told = manager.pid2config or manager.index2config or manager.module_weight_config_triple
    if told and issubclass(optimizer_class, base):
        raise ValueError(
            "bitsandbytes' GlobalOptimManager has options for single parameters (StableEmbedding "
            f"gives it some), which {optimizer_class.__name__} does not find on a rank that holds "
            "other tensors; clear its pid2config, index2config and module_weight_config_triple, "
            f"and give those parameters a group and an {CLASS_KEY!r} of their own"
        )
