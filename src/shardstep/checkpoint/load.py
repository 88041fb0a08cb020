"""Loading: every rank reads what it owns now, and nothing is changed before all have read it.

What is here is matched with what is there, by the descriptions alone. Then digests are checked,
each file by one rank. Then each rank reads its pieces of the optimizer's state, and a share of the
model's tensors, into fresh memory. Only when every rank has succeeded is anything installed: the
state where it was read, the model's tensors by sending them round.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.format import SavedParam, Stored
from shardstep.checkpoint.mastered import split_masters
from shardstep.checkpoint.match import Match, summary
from shardstep.checkpoint.names import check_model
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.write import comm_of
from shardstep.comm import Comm
from shardstep.comm.broadcast import broadcast
from shardstep.comm.consensus import run_on_all_ranks
from shardstep.local.multi_class import CLASS_KEY, MultiClass, optimizer_name
from shardstep.params.names import shorten_list
from shardstep.params.storage import flat
from shardstep.plan import Box, Interval, ParamSpec, boxes
from shardstep.state.torch_dict import install
from shardstep.state.tree import Leaf, wrappers

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of a load.

    Attributes:
        path: the checkpoint.
        extra: what was given as `extra` when it was saved.
        missing: what is here and was not found in the checkpoint; it was left as it was.
        unexpected: what is in the checkpoint and has no place here.
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
    """Load a checkpoint, saved at any world size and layout.

    Called on every rank of the optimizer's process group, or of the default group. If it raises, it
    raises on every rank, and optimizer and model are as they were. (If a rank dies at the very end,
    while the model's tensors are sent round, the model on the others may be old and new in parts.)

    Args:
        path: the checkpoint; `latest(folder)` finds the newest.
        optimizer: the optimizer to load into, over the same parameters or some of them.
        model: the model to load into, as it is or inside of DDP or torch.compile.
        strict: whether everything here has to be in the checkpoint and the other way round. If
            False, what was found is loaded, and the rest is said in the result and in a warning.
        names: for parameters that are called otherwise in the checkpoint: from the name here to the
            name there.
        verify: whether every file that is read is compared with its digest first.

    Returns:
        The extra that was saved, and what was not found.

    Raises:
        CheckpointError: if the checkpoint is damaged or does not fit.
        TypeError: if `path`, `optimizer` or `model` is something else.
    """
    comm = comm_of(optimizer)
    what = f"loading {path}"
    if optimizer is not None:
        optimizer.shards.wait_for_params()
    with _opened(comm, what, path, model) as checkpoint:
        match = Match(checkpoint, comm, optimizer, model, strict, dict(names or {}))
        # With what else decides on what is done together: a rank that is not told to verify would
        # leave the others waiting.
        if len(set(run_on_all_ranks(comm, what, lambda: f"{match.find()} {bool(verify)}"))) > 1:
            raise CheckpointError(
                f"rank {comm.group_rank}: the ranks would load different parts of {path}; build "
                "model and optimizer alike on all ranks, and give all the same arguments"
            )
        if verify:
            states = optimizer is not None or match.reads_masters
            needed = _files_needed(checkpoint, states, model is not None)
            mine = needed[comm.group_rank :: comm.world_size]
            run_on_all_ranks(comm, what, lambda: checkpoint.verify(mine))
        if optimizer is not None:
            run_on_all_ranks(comm, what, lambda: optimizer.shards.give_masters(match.given))
        loading = _Loading(match)
        run_on_all_ranks(comm, what, loading.read)
        loading.install(what)
    if comm.group_rank == 0:
        _warn(match)
    return Loaded(checkpoint.path, loading.extra, tuple(match.missing), tuple(match.unexpected))


def _opened(
    comm: Comm, what: str, path: str | os.PathLike[str], model: torch.nn.Module | None
) -> Checkpoint:
    """The checkpoint, if all ranks find the same and have a model for it. Called on every rank."""
    found: list[Checkpoint] = []

    def open_it() -> str:
        check_model(model)
        if path is None:
            raise TypeError(
                "there is no checkpoint to load: latest() returns None if it finds none"
            )
        found.append(Checkpoint(Path(path).absolute()))
        return found[0].manifest.digest

    if len(set(run_on_all_ranks(comm, what, open_it))) > 1:
        raise CheckpointError(
            f"rank {comm.group_rank}: the ranks find different checkpoints at {path}; it has to be "
            "on a file system that they share"
        )
    return found[0]


def _files_needed(checkpoint: Checkpoint, optimizer: bool, model: bool) -> list[str]:
    """The files with tensors of the parts that are loaded."""
    contents = replace(
        checkpoint.contents,
        optimizer=checkpoint.contents.optimizer if optimizer else None,
        model=checkpoint.contents.model if model else None,
    )
    return sorted({chunk.file for _, stored in contents.tensors() for chunk in stored.chunks})


@dataclass(slots=True)
class _Loading:
    """A load under way on one rank: first all is read, then all is installed."""

    match: Match
    states: dict[int, Any] = field(default_factory=dict)
    masters: dict[int, torch.Tensor] = field(default_factory=dict)
    mastered: set[int] = field(default_factory=set)
    loose: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    extra: Any = None

    # -------------------------------------------------------------------------------- reading

    def read(self) -> None:
        """Read everything that this rank is to have, and change nothing."""
        match, checkpoint = self.match, self.match.checkpoint
        contents, value = checkpoint.contents, checkpoint.value
        if match.optimizer is not None and contents.optimizer is not None:
            plan = match.optimizer.plan
            held = plan.intervals(match.optimizer.rank)
            states = {}
            for index in sorted(held.keys() & match.found.keys()):
                param, device = match.found[index], match.optimizer.shards.params[index].device
                if param.state is not None:
                    states[index] = self._state(param, plan.specs[index], held[index], device)
            self.states, self.masters = split_masters(states)
            self.mastered = set(self.masters)
            for index, master in match.optimizer.shards.masters().items():
                stored = None if index in self.masters else match.wide(index)
                if stored is not None:
                    made = torch.empty_like(master)
                    self.masters[index] = self._piece(stored, plan.specs[index], held[index], made)
                elif index not in match.found:
                    self.masters[index] = master.clone()
            self.loose = value(contents.optimizer.loose)
            self.beside = value(contents.optimizer.beside)
            self.groups = [{} if tree is None else value(tree) for tree in match.options]
        if match.model is not None and contents.model is not None:
            for name, stored in match.weights.items():
                if match.mine(name):
                    self._check_twins(name)
                    self.weights[name] = checkpoint.whole(stored)
            self.rest = value(contents.model.rest)
        if contents.extra is not None:
            self.extra = value(contents.extra)

    def _check_twins(self, name: str) -> None:
        """Make sure that what is one tensor here is not two different ones there."""
        if not self.match.strict or name not in self.match.twins:
            return
        first, *others = map(self.match.checkpoint.whole, self.match.twins[name])
        for other in others:
            if first.dtype != other.dtype or not torch.equal(_bits(first), _bits(other)):
                raise CheckpointError(
                    f"{self.match.checkpoint.path}: model tensor {name!r} is one tensor of several "
                    "names here, and under these there are different ones there; untie it, or pass "
                    "strict=False to take the first"
                )

    def _state(
        self, param: SavedParam, spec: ParamSpec, here: Interval, device: torch.device
    ) -> Any:
        """The state of the elements `here` of a parameter."""
        assert param.state is not None
        tree, checkpoint = param.state, self.match.checkpoint
        whole = here == Interval(0, spec.numel)
        if not whole and (kinds := wrappers(tree.node)):
            raise CheckpointError(
                f"{checkpoint.path}: state of parameter {param.name!r} is a tensor of class "
                f"{kinds[0]}, which cannot be cut; construct the optimizer with "
                'layout="whole"'
            )

        def make(number: int, leaf: Leaf) -> torch.Tensor:
            if not param.per_element[number]:
                if not whole and leaf.shape and leaf.data is None:
                    raise CheckpointError(
                        f"{checkpoint.path}: state {leaf.path!r} of parameter {param.name!r} "
                        "belongs to the whole parameter; construct the optimizer with "
                        'layout="whole"'
                    )
                return checkpoint.leaf(tree, number, leaf)
            if number not in tree.stored:
                full = leaf.empty(device)
                return full if whole else flat(full, spec.stride)[here.slice].clone()
            form = (spec.shape, spec.stride) if whole else ((here.numel,), (1,))
            tensor = torch.empty_strided(*form, dtype=leaf.dtype, device=device)
            return self._piece(tree.stored[number], spec, here, tensor)

        return checkpoint.value(tree, make)

    def _piece(
        self, stored: Stored, spec: ParamSpec, here: Interval, piece: torch.Tensor
    ) -> torch.Tensor:
        """Fill `piece` with the elements `here` of a tensor that has one for each of a parameter's.

        It has the parameter's shape and strides if it is all of them, and is flat otherwise.
        """
        if here == Interval(0, spec.numel):
            self.match.checkpoint.read(stored, Box.whole(spec.shape), piece)
            return piece
        for stretch, box in boxes(here, spec.shape, spec.stride):
            view = piece.as_strided(box.sizes, spec.stride, stretch.start - here.start)
            self.match.checkpoint.read(stored, box, view)
        return piece

    # ------------------------------------------------------------------------------ installing

    def install(self, what: str) -> None:
        """Put everything in its place. Called on every rank, when all have read."""
        match = self.match
        undo: list[Callable[[], None]] = []

        def put() -> None:
            # What may fail goes first, each with the way back: code of the user's is run.
            try:
                match.look_again()
                if match.optimizer is not None:
                    self._put_state(match.optimizer, undo)
                for there, (name, old) in match.rest.items():
                    # A module may give what it keeps, and write to that when it is given another.
                    undo.append(partial(match.modules[name].set_extra_state, copy.deepcopy(old)))
                    match.modules[name].set_extra_state(self.rest[there])
            except Exception as error:
                raise CheckpointError(
                    f"{match.checkpoint.path}: what is in it is not taken: "
                    f"{type(error).__name__}: {error}"
                ) from error

        try:
            run_on_all_ranks(match.comm, what, put)
        except BaseException:
            for each in reversed(undo):
                # A module that takes neither the new nor the old is no reason to leave the rest.
                with contextlib.suppress(Exception):
                    each()
            raise
        if match.optimizer is not None:
            match.optimizer.shards.stepped = match.stepped
            match.optimizer.shards.publish_options()
        self._put_weights()
        if match.optimizer is not None:
            # After the weights: a master that does not round to its parameter is not believed.
            match.optimizer.shards.set_masters(self.masters)
            saved = match.checkpoint.contents.optimizer
            assert saved is not None
            match.optimizer.shards.rounding_step = saved.rounded

    def _put_state(
        self, optimizer: ZeroRedundancyOptimizer, undo: list[Callable[[], None]]
    ) -> None:
        """Load into the local optimizer."""
        local = optimizer.optim
        parts = local.parts if isinstance(local, MultiClass) else []
        undo += [_way_back(each) for each in (local, *parts)]
        optimizer.shards.sync_options()
        # What is not in the checkpoint stays as it is.
        states = {
            index: state
            for index, state in optimizer.shards.states().items()
            if index not in self.match.found
        }
        groups = []
        first = 0
        for mine, options in zip(optimizer.param_groups, self.groups, strict=True):
            last = first + len(mine["params"])
            if not isinstance(local, MultiClass):
                options.pop(CLASS_KEY, None)
            groups.append({**mine, **options, "params": list(range(first, last))})
            first = last
        plan = optimizer.plan
        held = sorted(plan.intervals(optimizer.rank))
        states |= self.states
        install(local, held, states, self.loose, groups, plan.specs, self.beside, self._wide(held))

    def _wide(self, held: Sequence[int]) -> set[int]:
        """Those of the parameters whose state is that of a tensor of a wider dtype already."""
        saved = self.match.checkpoint.contents.optimizer
        assert saved is not None
        if saved.rounded:
            return set(held)
        return {index for index in held if index not in self.match.found} | self.mastered

    def _put_weights(self) -> None:
        """Copy what this rank has read to where it belongs, and send it to the others."""
        match = self.match
        with torch.no_grad():
            for rank in range(match.comm.world_size):
                share = [
                    _as_it_lies(match.targets[n]) for n in match.weights if match.owners[n] == rank
                ]
                if rank == match.comm.group_rank:
                    for name, value in self.weights.items():
                        match.targets[name].copy_(value)
                broadcast(match.comm, share, rank)


def _way_back(optimizer: Optimizer) -> Callable[[], None]:
    """What makes an optimizer as it is now, after it has loaded something or tried to."""
    # Loading puts new state and new groups in the place of the old ones, which stay as they are.
    attributes, groups = dict(vars(optimizer)), list(optimizer.param_groups)

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups[:] = groups

    return restore


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: numbers that are none do not equal themselves."""
    return tensor.reshape(-1).view(torch.uint8)


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in a tensor's memory, where it stands for their conjugates or negatives."""
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    return tensor.conj() if tensor.is_conj() else tensor


def _warn(match: Match) -> None:
    """Say what looks like a mistake."""
    path = match.checkpoint.path
    if match.missing or match.unexpected:
        said = summary(match.missing, match.unexpected)
        warnings.warn(f"{path} was loaded in part: {said}", stacklevel=3)
    if not match.empty or match.optimizer is None:
        return
    specs = match.optimizer.plan.specs
    if len(match.empty) < sum(specs[index].trainable for index in match.found):
        said = (
            f"has no optimizer state for {shorten_list(match.empty)}, which train; they had never "
            "had a gradient when it was saved, and start from zero"
        )
    elif not match.stepped:
        said = "was saved before the first step: the optimizer starts from zero"
    elif _keeps_nothing(match.optimizer):
        return
    else:
        said = (
            "has no optimizer state at all, though steps had been taken when it was saved: the "
            f"optimizer starts from zero, unless a {optimizer_name(match.optimizer.optim)} keeps "
            "no state"
        )
    warnings.warn(f"{path} {said}", stacklevel=3)


def _keeps_nothing(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether this is the one optimizer of torch that has no state after a step."""
    plain = type(optimizer.optim) is torch.optim.SGD
    return plain and not any(group["momentum"] for group in optimizer.param_groups)
