"""The structure of the optimizer state on all ranks, for parameters without state too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.comm import Comm, all_gather_json
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.local.multi_class import optimizer_name
from shardstep.state.exchange import Kept, survey
from shardstep.state.tree import Node, encode, leaves
from shardstep.state.view import ShardView


@dataclass(frozen=True, slots=True)
class ParamState:
    """The structure of one parameter's state, and this rank's tensors of it, in order."""

    kept: Kept
    started: bool  # or it would exist after a step
    tensors: Sequence[torch.Tensor]  # empty if this rank holds nothing of the parameter


GlobalState = tuple[Node, bool]
"""The structure of state of no parameter, and whether it is started."""


def survey_state(shards: ShardView) -> tuple[dict[int, ParamState], dict[Any, GlobalState]]:
    """Return the structure of all state, by parameter number and by key. Called on every rank."""
    comm, plan = shards.comm, shards.plan
    states = {index: state for index, state in shards.local.states().items() if state}
    kept, tensors = survey(comm, plan, states)
    found = {index: ParamState(each, True, tensors.get(index, ())) for index, each in kept.items()}
    lacking = [i for i, spec in enumerate(plan.specs) if spec.trainable and i not in kept]
    expected: dict[Any, Any] = {}
    if lacking:
        rehearsed: dict[int, Any] = {}
        failure = None
        try:
            rehearsed, expected = shards.local.rehearse(lacking)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = {rank: why for rank, why in enumerate(all_gather_json(comm, failure)) if why}
        if failures and not found:
            rank, failure = next(iter(failures.items()))
            raise RuntimeError(
                f"rank {comm.group_rank}: this optimizer has no state yet, and its structure is "
                f"unknown: a step of {optimizer_name(shards.optim)} on copies with zero gradients "
                f"failed on rank {rank} ({failure}); take one step first, or load a full "
                "state dict with optimizer.load_state_dict()"
            )
        if not failures:
            kept, tensors = survey(comm, plan, rehearsed)
            for index, each in kept.items():
                found[index] = ParamState(each, False, tensors.get(index, ()))
    return found, _survey_global_state(comm, shards.local.global_state(), expected)


def _survey_global_state(
    comm: Comm, existing: Mapping[Any, Any], expected: Mapping[Any, Any]
) -> dict[Any, GlobalState]:
    def make() -> tuple[dict[Any, GlobalState], list[str]]:
        found = {}
        lines = []
        for key, value in {**expected, **existing}.items():
            node, _ = encode(value, str(key))
            if any(leaf.data is None for leaf in leaves(node)):
                raise RuntimeError(
                    f"state {key!r} belongs to no parameter and is too large to compare between "
                    "ranks; save this optimizer with consolidate_state_dict() and state_dict()"
                )
            found[key] = (node, key in existing)
            lines.append(f"state {key!r}, of no parameter: {json.dumps(node)}")
        return found, lines

    return check_same_on_all_ranks(comm, "describing the optimizer state", make)
