"""`load`: every rank reads its shards, and nothing changes before all ranks have read.

The checkpoint is matched with optimizer and model from descriptions alone. Then digests are
checked, each file by one rank. Then each rank reads its shards of the state and a share of the
model's tensors into new memory. When every rank has succeeded, the state is installed and the
model's tensors are broadcast.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardstep.checkpoint.files import CheckpointError
from shardstep.checkpoint.format import SavedOptimizer, SavedParam, Stored, split_masters
from shardstep.checkpoint.inputs import check_model, optimizer_and_comm, split_state_dict
from shardstep.checkpoint.match import Match
from shardstep.checkpoint.read import Checkpoint, saved_model, saved_optimizer
from shardstep.comm import Operation, broadcast
from shardstep.comm.consensus import run_on_all_ranks
from shardstep.local.multi_class import CLASS_KEY, MultiClass, parts_of
from shardstep.params.flat import flat, view_box
from shardstep.params.groups import group_ranges
from shardstep.params.names import unwrapped
from shardstep.plan import Interval, ParamSpec, boxes
from shardstep.state.torch_dict import Share, warn_of_missing_state
from shardstep.state.tree import Leaf, wrappers

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load.

    Attributes:
        path: the checkpoint.
        extra: the `extra` that was saved.
        missing: names that were not found in the checkpoint; these were left as they were.
        unexpected: names in the checkpoint that nothing here has.
    """

    path: Path
    extra: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None = None,
    model: torch.nn.Module | None = None,
    *,
    strict: bool = True,
    names: Mapping[str, str] | None = None,
    verify: bool = True,
) -> Loaded:
    """Load a checkpoint that was saved at any world size and layout.

    Called on every rank of the optimizer's process group, or of the default group. If it raises, it
    raises on every rank, and optimizer and model are unchanged. (If a rank dies at the very end,
    while the model's tensors are broadcast, the model on other ranks may be partly new.)

    Args:
        path: the checkpoint; `latest(folder)` finds the newest.
        optimizer: the optimizer to load into, over the same parameters or some of them.
        model: the model to load into, plain or inside DDP or torch.compile.
        strict: whether everything here must be in the checkpoint, and the other way round. If
            False, what was found is loaded, and the result and a warning name the rest. If True,
            and the optimizer is given without the checkpoint's model, rank 0 warns.
        names: for parameters with other names in the checkpoint: from the name here to the name
            there.
        verify: whether every file that is read is compared with its digest first.

    Returns:
        The extra that was saved, and the names that were not found.

    Raises:
        CheckpointError: if the checkpoint is damaged or does not fit.
        TypeError: if `path`, `optimizer` or `model` is of another type.
    """
    optimizer, comm = optimizer_and_comm(optimizer)
    what = f"loading {path}"
    if optimizer is not None:
        optimizer.shards.wait_for_params()
    matches: list[Match] = []

    def find() -> list[str]:
        check_model(model)
        if path is None:
            raise TypeError("path is None: latest() returns None if it finds no checkpoint")
        checkpoint = Checkpoint(Path(path).absolute())
        matches.append(Match(checkpoint, comm, optimizer, model, strict, dict(names or {})))
        # `verify` decides on collectives, so it has to agree too.
        return [checkpoint.manifest.digest, f"{matches[0].find()} {bool(verify)}"]

    digests, parts = map(set, zip(*run_on_all_ranks(comm, what, find), strict=True))
    if len(digests) > 1:
        raise CheckpointError(
            f"rank {comm.group_rank}: the ranks find different checkpoints at {path}; it must be "
            "on a file system that they share"
        )
    if len(parts) > 1:
        raise CheckpointError(
            f"rank {comm.group_rank}: the ranks would load different parts of {path}; build the "
            "same model and optimizer on all ranks, and give all the same arguments"
        )
    match = matches[0]
    with match.checkpoint as checkpoint:
        if verify:
            needed = _files_needed(match)[comm.group_rank :: comm.world_size]
            run_on_all_ranks(comm, what, lambda: checkpoint.verify(needed))
        if optimizer is not None:
            found = match.found.items()
            with_entries = [index for index, param in found if param.state and param.state.node[1]]
            run_on_all_ranks(comm, what, lambda: optimizer.shards.give_masters(with_entries))
        loading = _Loading(match)
        run_on_all_ranks(comm, what, loading.read)
        loading.install(what)
    _warn(match)
    return Loaded(checkpoint.path, loading.extra, tuple(match.missing), tuple(match.unexpected))


def _files_needed(match: Match) -> list[str]:
    """Return the files with tensors of the parts that are loaded."""
    contents = match.checkpoint.contents
    if match.optimizer is None:
        contents = replace(contents, optimizer=None)
    if match.model is None:
        contents = replace(contents, model=None)
    tensors = [stored for _, stored in contents.tensors()]
    # Masters may be read for the model alone.
    tensors += [weight.stored for weight in match.weights.values()]
    return sorted({chunk.file for stored in tensors for chunk in stored.chunks})


@dataclass(slots=True)
class _Loading:
    """A load on one rank: `read` changes nothing, `install` does when all ranks have read."""

    match: Match
    share: Share | None = None  # of the optimizer
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's share
    extra_state: dict[str, Any] = field(default_factory=dict)
    extra: Any = None

    def read(self) -> None:
        """Read everything that this rank needs, and change nothing."""
        match, checkpoint = self.match, self.match.checkpoint
        if match.optimizer is not None:
            self.share = self._read_optimizer(match.optimizer, saved_optimizer(checkpoint))
        if match.model is not None:
            for name, weight in match.weights_of(match.comm.group_rank).items():
                if match.strict and len(weight.alternatives) > 1:
                    self._check_alternatives(name, weight.alternatives)
                self.weights[name] = checkpoint.read_tensor(weight.stored)
            self.extra_state = checkpoint.read_value(saved_model(checkpoint).extra_state)
        if checkpoint.contents.extra is not None:
            self.extra = checkpoint.read_value(checkpoint.contents.extra)

    def _read_optimizer(self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer) -> Share:
        match, shards = self.match, optimizer.shards
        read_value, found = match.checkpoint.read_value, match.found
        specs, held = shards.plan.specs, shards.held
        read = {
            index: self._read_state(
                found[index], specs[index], held[index], shards.params[index].device
            )
            for index in sorted(held.keys() & found.keys())
            if found[index].state is not None
        }
        states, masters = split_masters(read)
        wider = match.wider_weights()
        with_master = {index for index, each in found.items() if each.master is not None}
        for index, master in shards.masters().items():
            if index not in masters and index in wider:
                masters[index] = torch.empty_like(master)
                self._read_shard(wider[index], specs[index], held[index], masters[index])
            elif index not in found:
                masters[index] = master.clone()
        # Parameters that are not in the checkpoint keep their state.
        kept = {index for index in range(len(specs)) if index not in found}
        return Share(
            [{} if tree is None else read_value(tree) for tree in match.options],
            states,
            masters,
            read_value(saved.global_state),
            read_value(saved.extra_entries),
            wide=range(len(specs)) if saved.rounding_step else kept | with_master,
            stepped=saved.stepped or (shards.local.stepped and bool(kept)),
            has_masters=bool(shards.widened) and bool(wider or with_master),
            rounding_step=saved.rounding_step,
        )

    def _check_alternatives(self, name: str, alternatives: list[Stored]) -> None:
        """Raise if the checkpoint has different tensors for the names of one tensor here."""
        # As bytes: NaN does not equal itself.
        read_tensor = self.match.checkpoint.read_tensor
        first, *others = (flat(read_tensor(each)).view(torch.uint8) for each in alternatives)
        for stored, other in zip(alternatives[1:], others, strict=True):
            self.match.require(
                alternatives[0].dtype == stored.dtype and torch.equal(first, other),
                f"model tensor {name!r} is one tensor of several names here, and under these there "
                "are different ones there; untie it, or pass strict=False to take the first",
            )

    def _read_state(
        self, param: SavedParam, spec: ParamSpec, held: Interval, device: torch.device
    ) -> Any:
        """Read the state of the elements `held` of a parameter."""
        assert param.state is not None
        tree, checkpoint = param.state, self.match.checkpoint
        whole = held == Interval(0, spec.numel)
        wrapped = wrappers(tree.node)
        self.match.require(
            whole or not wrapped,
            f"state of parameter {param.name!r} is a tensor of class {wrapped[:1]}, which cannot "
            'be cut; construct the optimizer with layout="whole"',
        )

        def read_leaf(number: int, leaf: Leaf) -> torch.Tensor:
            if leaf.shape != param.shape:
                self.match.require(
                    whole or not leaf.shape or leaf.data is not None,
                    f"state {leaf.path!r} of parameter {param.name!r} belongs to the whole "
                    'parameter; construct the optimizer with layout="whole"',
                )
                return checkpoint.read_leaf(tree, number, leaf)
            if number not in tree.stored:
                full = leaf.empty(device)
                return full if whole else flat(full, spec.stride)[held.slice].clone()
            form = (spec.shape, spec.stride) if whole else ((held.numel,), (1,))
            tensor = torch.empty_strided(*form, dtype=leaf.dtype, device=device)
            self._read_shard(tree.stored[number], spec, held, tensor)
            return tensor

        return checkpoint.read_value(tree, read_leaf)

    def _read_shard(
        self, stored: Stored, spec: ParamSpec, held: Interval, shard: torch.Tensor
    ) -> None:
        """Fill `shard` with the elements `held` of a tensor that has the parameter's shape."""
        for _, box in boxes(held, spec.shape, spec.stride):
            view = view_box(shard, box, spec.stride, held.start)
            self.match.checkpoint.read_box(stored, box, view)

    def install(self, what: str) -> None:
        """Install everything. Called on every rank, when all have read."""
        match = self.match
        with ExitStack() as undo:
            run_on_all_ranks(match.comm, what, partial(self._install_fallible, undo))
            undo.pop_all()
        self._install_weights()
        if match.optimizer is not None and self.share is not None:
            # After the weights: a master that does not round to its parameter is discarded.
            self.share.finish(match.optimizer.shards)

    def _install_fallible(self, undo: ExitStack) -> None:
        """Install the parts that run the user's code, which may raise. Each undo is set first."""
        match = self.match
        try:
            if match.model is not None:
                # Creating masters may have moved parameters.
                targets = split_state_dict(unwrapped(match.model).state_dict()).tensors
                for name, weight in match.weights.items():
                    weight.target = targets[name]
            if match.optimizer is not None and self.share is not None:
                self._install_state(match.optimizer, self.share, undo)
            for name, (module, old) in match.extra_state.items():
                # A module may return the object it keeps, and write to it in place.
                undo.callback(_set_back, module, copy.deepcopy(old))
                module.set_extra_state(self.extra_state[name])
        except Exception as error:
            raise CheckpointError(
                f"{match.checkpoint.path}: {type(error).__name__} when it is loaded: {error}"
            ) from error

    def _install_state(
        self, optimizer: ZeroRedundancyOptimizer, share: Share, undo: ExitStack
    ) -> None:
        shards, local = optimizer.shards, optimizer.shards.optim
        for each in dict.fromkeys((local, *parts_of(local))):
            undo.callback(_restore, each, dict(vars(each)), list(each.param_groups))
        shards.sync_options()
        mine = optimizer.param_groups
        groups = []
        for group, params, options in zip(mine, group_ranges(mine), share.groups, strict=True):
            taken = {
                key: on_device_of(group.get(key), value)
                for key, value in options.items()
                if key != CLASS_KEY or isinstance(local, MultiClass)
            }
            groups.append({**group, **taken, "params": list(params)})
        present = shards.local.states().items()
        kept = {index: state for index, state in present if index not in self.match.found}
        replace(share, groups=groups, states={**kept, **share.states}).install(shards)

    def _install_weights(self) -> None:
        """Copy the tensors that this rank has read, and broadcast them."""
        match = self.match
        with torch.no_grad():
            for name, value in self.weights.items():
                match.weights[name].target.copy_(value)
            for rank in range(match.comm.world_size):
                share = [_physical(weight.target) for weight in match.weights_of(rank).values()]
                broadcast(match.comm, share, rank, Operation.LOAD)


def on_device_of(present: Any, loaded: Any) -> Any:
    """Return a loaded option on its present device: a learning rate may be a CUDA tensor."""
    if isinstance(present, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded.to(present.device)
    return loaded


def _set_back(module: torch.nn.Module, old: Any) -> None:
    """Give a module its extra state back. If it refuses, others still get theirs."""
    with suppress(Exception):
        module.set_extra_state(old)


def _restore(optimizer: Optimizer, attributes: dict[str, Any], groups: list[Any]) -> None:
    """Undo a `load_state_dict`, which replaces state and groups."""
    vars(optimizer).clear()
    vars(optimizer).update(attributes)
    optimizer.param_groups[:] = groups


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in a tensor's memory, without pending conjugation or negation."""
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    return tensor.conj() if tensor.is_conj() else tensor


def _warn(match: Match) -> None:
    """Warn of a partial load and of a missing model, on rank 0, and of missing state."""
    if match.comm.group_rank == 0 and (match.missing or match.unexpected):
        warnings.warn(
            f"{match.checkpoint.path} was loaded in part: {match.differences()}", stacklevel=3
        )
    forgotten = match.optimizer is not None and match.model is None and match.strict
    if match.comm.group_rank == 0 and forgotten and match.checkpoint.contents.model is not None:
        warnings.warn(
            f"{match.checkpoint.path} has a model, but no model was given, so its weights were not "
            "loaded: pass model=, or strict=False to load the optimizer alone",
            stacklevel=3,
        )
    if match.optimizer is not None:
        shards, found = match.optimizer.shards, match.found
        present = found.keys() - match.without_state
        if present:
            # Parameters that are not in the checkpoint were named above.
            present |= set(range(len(shards.params))) - found.keys()
        warn_of_missing_state(shards, present)
