"""Moves optimizer state from the ranks that hold it to the ranks that want it.

Consolidating to one rank and following a changed plan differ only in which rank wants which part.
All ranks gather the structure of the state as JSON. Tensors go as bytes from holder to taker, in
bounded chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.comm import Comm, all_gather_json
from shardstep.params.flat import flat
from shardstep.plan import Copy, Holding, Interval, ParamSpec, ShardPlan, transfers
from shardstep.state.tree import Leaf, Node, decode, encode, leaves, with_leaves

CHUNK_NBYTES = 16 * 2**20

NOTHING: Node = ["dict", []]
"""The state of a parameter that has none yet."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of one parameter over all ranks, described as if its first holder had all of it.

    `per_element` tells which tensors have a value for each element of the parameter. `shared` is
    True if several ranks hold parts of the parameter. `tensors` are this rank's, or none.
    """

    spec: ParamSpec
    node: Node
    leaves: list[Leaf]
    per_element: list[bool]
    shared: bool
    tensors: list[torch.Tensor]

    def cuts(self, leaf: int, wanted: Interval) -> bool:
        """Return whether this tensor is cut or joined on the way to `wanted`."""
        return self.per_element[leaf] and (self.shared or wanted != self.spec.whole)


def move_state(
    comm: Comm,
    plan: ShardPlan,
    wanted: Sequence[Holding],
    states: Mapping[int, Any],
    params: Sequence[torch.Tensor] | None,
) -> dict[int, Any]:
    """Return a copy of the state of the elements that this rank wants. Called on every rank.

    `states` is this rank's state under `plan`, by parameter. `wanted` has one entry per rank. The
    state is put on the devices of `params`, or on the CPU if there are none.
    """
    held = plan.holdings
    kept = survey(comm, plan, states)
    me = comm.group_rank
    arrived: dict[int, list[torch.Tensor]] = {}
    results: dict[int, Any] = {}
    for param in sorted(wanted[me].keys() & kept.keys()):
        device = torch.device("cpu") if params is None else params[param].device
        arrived[param] = []
        results[param] = _make(kept[param], wanted[me][param], device, arrived[param])
    for copy in transfers(held, wanted):
        if copy.param not in kept or me not in (copy.source, copy.target):
            continue
        state, aim = kept[copy.param], wanted[copy.target][copy.param]
        for leaf, described in enumerate(state.leaves):
            cuts = state.cuts(leaf, aim)
            if not cuts and described.data is not None:
                continue  # the JSON has its values
            source = target = None
            if me == copy.source:
                source = _part(state.tensors[leaf], held[me][copy.param], copy, state.spec, cuts)
            if me == copy.target:
                target = _part(arrived[copy.param][leaf], aim, copy, state.spec, cuts)
            _carry(comm, copy, source, target)
    return results


def survey(comm: Comm, plan: ShardPlan, states: Mapping[int, Any]) -> dict[int, Kept]:
    """Return the state over all ranks of each parameter that has any.

    Called on every rank. Raises a RuntimeError on every rank if the parts of a parameter's state do
    not fit together.
    """
    own: dict[int, Node] = {}
    tensors: dict[int, list[torch.Tensor]] = {}
    failure = None
    for param, value in states.items():
        try:
            own[param], tensors[param] = encode(value)
        except Exception as error:  # a mapping or a tensor class may raise anything
            failure = f"parameter {plan.specs[param].name!r} on rank {comm.group_rank}: {error}"
            break
    answers = all_gather_json(comm, [failure, list(own.items())])
    for failed, _ in answers:
        if failed is not None:
            raise RuntimeError(f"the optimizer state cannot be moved: {failed}")
    nodes = [dict(items) for _, items in answers]
    return {
        param: _combine(spec, plan.holdings, nodes, param, tensors.get(param, []))
        for param, spec in enumerate(plan.specs)
        if any(param in node for node in nodes)
    }


def _combine(
    spec: ParamSpec,
    held: Sequence[Holding],
    nodes: Sequence[Mapping[int, Node]],
    param: int,
    tensors: list[torch.Tensor],
) -> Kept:
    """Combine the state that the holders of a parameter have of it, or raise a RuntimeError."""
    holders = [rank for rank, holding in enumerate(held) if param in holding]
    without = [rank for rank in holders if param not in nodes[rank]]
    if all(each.get(param, NOTHING) == NOTHING for each in nodes):
        # Reading `optimizer.state[param]` creates an empty state, perhaps on some ranks only.
        nodes = [{param: NOTHING} for _ in nodes]
    elif without:
        raise RuntimeError(
            f"parameter {spec.name!r} has optimizer state on some ranks but not on rank "
            f"{without[0]}, which owns a part of it too: its gradient was None there alone. Make "
            "sure that gradients are synchronised before step()"
        )
    # Shapes and data differ between holders. All else must be equal.
    skeletons = [with_leaves(nodes[rank][param], lambda _, leaf: leaf[:2]) for rank in holders]
    for rank, skeleton in zip(holders, skeletons, strict=True):
        if skeleton != skeletons[0]:
            raise RuntimeError(
                f"ranks {holders[0]} and {rank}, which own parts of parameter {spec.name!r}, keep "
                f"different state for it: {skeletons[0]} and {skeleton}; an optimizer that is not "
                'element-wise must be constructed with layout="whole"'
            )
    found = [leaves(nodes[rank][param]) for rank in holders]
    shapes = [
        spec.shape if held[rank][param] == spec.whole else (held[rank][param].numel,)
        for rank in holders
    ]
    per_element = []
    for parts in zip(*found, strict=True):
        per_element.append([part.shape for part in parts] == shapes)
        same = {part.data for part in parts}
        if not per_element[-1] and len(holders) > 1 and (len(same) > 1 or None in same):
            raise RuntimeError(
                f"state {parts[0].path!r} of parameter {spec.name!r} belongs to the whole "
                "parameter, but ranks that own parts of it hold different values of it; this "
                'optimizer is not element-wise: construct it with layout="whole"'
            )
    node, shared = nodes[holders[0]][param], len(holders) > 1
    if not shared:
        return Kept(spec, node, found[0], per_element, shared, tensors)
    form = [list(spec.shape), list(spec.stride)]
    node = with_leaves(
        node, lambda n, leaf: [*leaf[:2], *form, leaf[4], None] if per_element[n] else leaf
    )
    return Kept(spec, node, leaves(node), per_element, shared, tensors)


def _make(kept: Kept, wanted: Interval, device: torch.device, made: list[torch.Tensor]) -> Any:
    """Return the state for `wanted`, to be filled; append its tensors to `made`."""

    def make(leaf: Leaf) -> torch.Tensor:
        where = torch.device("cpu") if leaf.on_cpu else device
        if not kept.cuts(len(made), wanted):
            made.append(leaf.empty(where))
        elif wanted != kept.spec.whole:
            made.append(torch.empty(wanted.numel, dtype=leaf.dtype, device=where))
        else:
            form = kept.spec.shape, kept.spec.stride
            made.append(torch.empty_strided(*form, dtype=leaf.dtype, device=where))
        return made[-1]

    return decode(kept.node, make)


def _part(
    tensor: torch.Tensor, held: Interval, copy: Copy, spec: ParamSpec, cuts: bool
) -> torch.Tensor:
    """Return the part that `copy` takes of a tensor for `held`, in the parameter's memory order."""
    if not cuts:
        return flat(tensor)
    in_order = flat(tensor, spec.stride if held == spec.whole else None)
    return in_order[copy.param_interval.shift(-held.start).slice]


def _carry(
    comm: Comm, copy: Copy, source: torch.Tensor | None, target: torch.Tensor | None
) -> None:
    """Send one tensor's bytes from the source rank to the target rank."""
    if source is not None and target is not None:
        target.copy_(source)
    elif source is not None:
        for chunk in torch.split(source.view(torch.uint8), CHUNK_NBYTES):
            comm.send(chunk, copy.target)
    elif target is not None:
        for chunk in torch.split(target.view(torch.uint8), CHUNK_NBYTES):
            comm.receive(chunk, copy.source)
