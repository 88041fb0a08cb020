"""Moves optimizer state from the ranks that hold it to the ranks that want it.

Consolidating to one rank and following a changed plan differ only in which rank wants which part.
All ranks gather the structure of the state as JSON. Tensors go as bytes from holder to taker, in
bounded chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.comm import Comm, all_gather_json
from shardstep.params.storage import flat
from shardstep.plan import Copy, Holding, Interval, ParamSpec, transfers
from shardstep.state.tree import Leaf, Node, decode, encode, leaves, with_leaves

CHUNK_NBYTES = 16 * 2**20

NOTHING: Node = ["dict", []]
"""The state of a parameter that has none yet."""

Device = Callable[[int, Leaf], torch.device]
"""Returns the device for a tensor of the given parameter's state."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of one parameter over all ranks.

    Attributes:
        node: the structure, as the first holder describes it.
        leaves: the tensors in it.
        per_element: for each tensor, True if it has a value for each element of the parameter.
        shared: several ranks hold parts of the parameter.
    """

    spec: ParamSpec
    node: Node
    leaves: list[Leaf]
    per_element: list[bool]
    shared: bool

    def travels(self, leaf: int, interval: Interval) -> bool:
        """Return whether this tensor has to be sent: the JSON does not have its values."""
        return self.cuts(leaf, interval) or self.leaves[leaf].data is None

    def cuts(self, leaf: int, wanted: Interval) -> bool:
        """Return whether this tensor is cut or joined on the way to `wanted`."""
        return self.per_element[leaf] and (self.shared or wanted != _everything(self.spec))


def move_state(
    comm: Comm,
    specs: Sequence[ParamSpec],
    held: Sequence[Holding],
    wanted: Sequence[Holding],
    states: Mapping[int, Any],
    device: Device,
) -> dict[int, Any]:
    """Give every rank the state of the elements it wants.

    Called on every rank.

    Args:
        comm: the ranks.
        specs: the parameters.
        held: for each rank, the elements whose state it holds.
        wanted: for each rank, the elements whose state it is to have.
        states: this rank's state by parameter.
        device: the device for each tensor that arrives.

    Returns:
        A copy of the state for this rank's elements in `wanted`.

    Raises:
        RuntimeError: on every rank, if the parts of a parameter's state do not fit together.
    """
    kept, tensors = survey(comm, specs, held, states)
    me = comm.group_rank
    arrived: dict[int, list[torch.Tensor]] = {}
    results: dict[int, Any] = {}
    for param in sorted(wanted[me].keys() & kept.keys()):
        made: list[torch.Tensor] = []
        results[param] = _make(kept[param], wanted[me][param], param, device, made)
        arrived[param] = made
    for copy in transfers(held, wanted):
        if copy.param not in kept or me not in (copy.source, copy.target):
            continue
        for leaf in range(len(kept[copy.param].leaves)):
            aim = wanted[copy.target][copy.param]
            if not kept[copy.param].travels(leaf, aim):
                continue
            cuts = kept[copy.param].cuts(leaf, aim)
            source = target = None
            if me == copy.source:
                have = tensors[copy.param][leaf]
                source = _part(have, held[me][copy.param], copy, specs[copy.param], cuts)
            if me == copy.target:
                target = flat(arrived[copy.param][leaf])
                if cuts:
                    target = target[copy.param_interval.shift(-aim.start).slice]
            _carry(comm, copy, source, target)
    return results


def survey(
    comm: Comm, specs: Sequence[ParamSpec], held: Sequence[Holding], states: Mapping[int, Any]
) -> tuple[dict[int, Kept], dict[int, list[torch.Tensor]]]:
    """Return the state over all ranks of each parameter that has any, and this rank's tensors.

    Called on every rank.

    Args:
        comm: the ranks.
        specs: the parameters.
        held: for each rank, the elements whose state it holds.
        states: this rank's state by parameter.

    Raises:
        RuntimeError: on every rank, if the parts of a parameter's state do not fit together.
    """
    nodes, tensors = _describe(comm, specs, states)
    kept = {
        param: _combine(spec, held, nodes, param)
        for param, spec in enumerate(specs)
        if any(param in node for node in nodes)
    }
    return kept, tensors


def _describe(
    comm: Comm, specs: Sequence[ParamSpec], states: Mapping[int, Any]
) -> tuple[list[dict[int, Node]], dict[int, list[torch.Tensor]]]:
    """Return every rank's structures and this rank's tensors."""
    own: dict[int, Node] = {}
    tensors: dict[int, list[torch.Tensor]] = {}
    failure = None
    for param, value in states.items():
        try:
            own[param], tensors[param] = encode(value)
        except TypeError as error:
            failure = f"parameter {specs[param].name!r} on rank {comm.group_rank}: {error}"
            break
    answers = all_gather_json(comm, [failure, list(own.items())])
    for failed, _ in answers:
        if failed is not None:
            raise RuntimeError(f"the optimizer state cannot be moved: {failed}")
    return [dict(items) for _, items in answers], tensors


def _combine(
    spec: ParamSpec, held: Sequence[Holding], nodes: Sequence[Mapping[int, Node]], param: int
) -> Kept:
    """Combine the state that the holders of a parameter have of it.

    Raises:
        RuntimeError: if their parts do not fit together.
    """
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
    found = [leaves(nodes[rank][param]) for rank in holders]
    forms = [[leaf.path for leaf in each] for each in found]
    skeletons = [_skeleton(nodes[rank][param]) for rank in holders]
    for rank, skeleton in zip(holders, skeletons, strict=True):
        if skeleton != skeletons[0]:
            raise RuntimeError(
                f"ranks {holders[0]} and {rank}, which own parts of parameter {spec.name!r}, keep "
                f"different state for it: {skeletons[0]} and {skeleton}; an optimizer that is not "
                'element-wise has to be constructed with layout="whole"'
            )
    per_element = [
        all(
            each[number].shape == _shape(held[rank][param], spec)
            for rank, each in zip(holders, found, strict=True)
        )
        for number in range(len(forms[0]))
    ]
    for number, divided in enumerate(per_element):
        same = {each[number].data for each in found}
        if not divided and len(holders) > 1 and (len(same) > 1 or None in same):
            raise RuntimeError(
                f"state {forms[0][number]!r} of parameter {spec.name!r} belongs to the whole "
                "parameter, but ranks that own parts of it hold different values of it; this "
                'optimizer is not element-wise: construct it with layout="whole"'
            )
    return Kept(spec, nodes[holders[0]][param], found[0], per_element, len(holders) > 1)


def _skeleton(node: Node) -> Node:
    """Return the description without shapes and data: it is equal on all holders."""
    return with_leaves(node, lambda number, leaf: leaf[:2])


def _make(
    kept: Kept, wanted: Interval, param: int, device: Device, made: list[torch.Tensor]
) -> Any:
    """Return the state for `wanted`, to be filled; append its tensors to `made`."""

    def make(leaf: Leaf) -> torch.Tensor:
        if not kept.cuts(len(made), wanted):
            tensor = leaf.empty(device(param, leaf))
        elif wanted == _everything(kept.spec):
            tensor = torch.empty_strided(
                kept.spec.shape, kept.spec.stride, dtype=leaf.dtype, device=device(param, leaf)
            )
        else:
            tensor = torch.empty(wanted.numel, dtype=leaf.dtype, device=device(param, leaf))
        made.append(tensor)
        return tensor

    return decode(kept.node, make)


def _part(
    tensor: torch.Tensor, held: Interval, copy: Copy, spec: ParamSpec, cuts: bool
) -> torch.Tensor:
    """Return the part that `copy` takes of a tensor for `held`, in the parameter's memory order."""
    if not cuts:
        return flat(tensor)
    whole = held == _everything(spec)
    return flat(tensor, spec.stride if whole else None)[
        copy.param_interval.shift(-held.start).slice
    ]


def _carry(
    comm: Comm, copy: Copy, source: torch.Tensor | None, target: torch.Tensor | None
) -> None:
    """Send one tensor's bytes from the source rank to the target rank."""
    if source is not None and target is not None:
        target.copy_(source)
    elif source is not None:
        for chunk in _chunks(source):
            comm.send(chunk, copy.target)
    elif target is not None:
        for chunk in _chunks(target):
            comm.receive(chunk, copy.source)


def _chunks(data: torch.Tensor) -> Iterator[torch.Tensor]:
    raw = data.view(torch.uint8)
    for start in range(0, raw.numel(), CHUNK_NBYTES):
        yield raw[start : start + CHUNK_NBYTES]


def _everything(spec: ParamSpec) -> Interval:
    return Interval(0, spec.numel)


def _shape(held: Interval, spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of a value per element on a rank that holds `held`."""
    return spec.shape if held == _everything(spec) else (held.numel,)
