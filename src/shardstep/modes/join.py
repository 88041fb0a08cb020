"""Uneven inputs: a rank that has run out of data shadows the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import JoinHook

from shardstep.comm import Comm, all_gather_json
from shardstep.params.flat import flat
from shardstep.plan import ShardPlan

if TYPE_CHECKING:
    from shardstep.modes.front import ModeFront


class _ZeROJoinHook(JoinHook):
    """Shadows the ranks that still have data.

    A joined rank still owns its part of the state, so it has to go on updating it.
    """

    def __init__(self, zero: ModeFront) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        """Take part. Called on every joined rank."""
        self._zero.mode.shadow(self._zero.step, self._zero.zero_grad)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave `Join`. Called on every rank once all have joined."""
        self._zero.mode.end_join()
        self._zero.mode.join.leave()


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of groups that JSON can hold: numbers, strings and scalars.

    A joined rank runs no schedulers, and needs the options of a rank that does.
    """

    def plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    found = []
    for group in groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for key, value in options.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                options[key] = value.item()
        found.append({key: value for key, value in options.items() if plain(value)})
    return found


def take_options(
    groups: Sequence[MutableMapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> None:
    """Write options from `options_of` on another rank into these groups."""
    for group, options in zip(groups, given, strict=True):
        for key, value in options.items():
            before = group.get(key)
            if isinstance(before, torch.Tensor):
                before.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(before, tuple) else value


def share_options(comm: Comm, groups: Sequence[MutableMapping[str, Any]], joined: bool) -> None:
    """Give joined ranks the options of a rank that has data. Called on every rank."""
    answers = all_gather_json(comm, None if joined else options_of(groups))
    if joined:
        take_options(groups, next(options for options in answers if options is not None))


@contextmanager
def keep_gradients(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put a joined rank's own gradients back after a step on those of the others.

    Otherwise the first backward pass after `Join` would add to gradients that the user never saw.
    """
    own = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, own, strict=True):
            param.grad = grad


def provide_gradients(
    comm: Comm,
    plan: ShardPlan,
    groups: Sequence[MutableMapping[str, Any]],
    joined: bool,
) -> None:
    """Send each joined rank the gradients of its pieces, and the options of the groups.

    Called on every rank, before a step. DDP shadows its reductions on a joined rank but does not
    put their results into `param.grad` there. A joined rank calls this within `keep_gradients`.

    Raises:
        ValueError: on every rank, if a gradient is sparse.
    """
    params = [param for group in groups for param in group["params"]]
    without = [index for index, param in enumerate(params) if param.grad is None]
    sparse = [
        index
        for index, param in enumerate(params)
        if param.grad is not None and param.grad.layout is not torch.strided
    ]
    own = None if joined else [without, sparse, options_of(groups)]
    answers = all_gather_json(comm, own)
    source = next(rank for rank, answer in enumerate(answers) if answer is not None)
    without, sparse, options = answers[source]
    if sparse:
        raise ValueError(
            f"parameter {plan.specs[sparse[0]].name!r} has a sparse gradient, which cannot be sent "
            "to joined ranks"
        )
    if joined:
        take_options(groups, options)
    for target in (rank for rank, answer in enumerate(answers) if answer is None):
        if comm.group_rank not in (source, target):
            continue
        for bucket in plan.training_buckets:
            for piece in bucket.pieces(target):
                if piece.param in without or not piece.param_interval.numel:
                    continue
                param = params[piece.param]
                if joined and param.grad is None:
                    param.grad = torch.zeros_like(param)
                part = flat(param.grad.resolve_conj(), param.stride())[piece.param_interval.slice]
                raw = part.view(torch.uint8)
                if joined:
                    comm.receive(raw, source)
                else:
                    comm.send(raw, target)
