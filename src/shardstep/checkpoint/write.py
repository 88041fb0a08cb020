"""The work of a save: each rank writes its pieces, and one rename makes of all a checkpoint.

It has two halves. `prepare` finds out what is to be written where: it looks at the optimizer
and the model, exchanges the structure of the state, and moves no tensor. `write_out` writes, and
needs neither the optimizer nor the model any more: a background save runs it on copies.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardstep.checkpoint.file_layout import (
    FileLayout,
    deal,
    holders_of,
    made_by,
    state_key,
    texts_of,
)
from shardstep.checkpoint.format import (
    Contents,
    SavedModel,
    SavedOptimizer,
    SavedParam,
    Stored,
    Tree,
)
from shardstep.checkpoint.mastered import MASTER, attach_masters
from shardstep.checkpoint.names import check_model, names_of, tensors_of
from shardstep.checkpoint.safetensors import Digest, Progress, Source, no_progress, write
from shardstep.checkpoint.staging import Staging, keep_last, write_text
from shardstep.comm import Comm, connect
from shardstep.comm.consensus import run_on_all_ranks
from shardstep.local.multi_class import extras, full_name
from shardstep.params.dtensor import NO_OFFSETS, refuse_dtensors
from shardstep.params.names import unwrapped, unwrapped_name
from shardstep.plan import Box, Holding, boxes
from shardstep.state.exchange import Kept, survey
from shardstep.state.tree import Node, encode, with_leaves

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


EXTRA_STATE = "_extra_state"
"""What torch calls the state that a module gives and takes by functions, tensor or not."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank has to write.

    Attributes:
        goal: where the checkpoint is to be.
        files: this rank's files, with the tensors in each.
        texts: further files, on rank 0.
        keep: how many of the newest checkpoints beside the goal are to stay; None for all.
    """

    goal: Path
    files: dict[str, dict[str, Source]]
    texts: dict[str, str]
    keep: int | None


def comm_of(optimizer: ZeroRedundancyOptimizer | None) -> Comm:
    """The ranks that save or load together.

    Raises:
        TypeError: if the optimizer is another one.
    """
    from shardstep.optimizer import ZeroRedundancyOptimizer

    if optimizer is not None and not isinstance(optimizer, ZeroRedundancyOptimizer):
        raise TypeError(
            "optimizer has to be a ZeroRedundancyOptimizer of this library, not a "
            f"{type(optimizer).__name__}; the state dict of another one becomes a checkpoint with "
            "checkpoint.import_state_dict"
        )
    return optimizer.shards.comm if optimizer is not None else connect(None)


def prepare(
    path: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None,
    model: torch.nn.Module | None,
    extra: Any,
    keep: int | None,
) -> Job:
    """Find out what is to be written where. Called on every rank."""
    comm = comm_of(optimizer)

    def check() -> list[Any]:
        if keep is not None and keep < 1:
            raise ValueError(f"keep_last has to be at least 1, not {keep}: this save is kept too")
        if optimizer is None and model is None and extra is None:
            raise ValueError("there is nothing to save: give an optimizer, a model or extra")
        check_model(model)
        refuse_dtensors(tensors_of(optimizer, model), NO_OFFSETS)
        return [str(Path(path).absolute()), optimizer is not None, model is not None]

    said = run_on_all_ranks(comm, "saving a checkpoint", check)
    if any(each != said[0] for each in said):
        shown = "; ".join(
            f"rank {rank}: {goal}"
            + (" with an optimizer" if with_optimizer else "")
            + (" with a model" if with_model else "")
            for rank, (goal, with_optimizer, with_model) in enumerate(said)
        )
        raise ValueError(f"all ranks have to save the same to one path, but were given {shown}")
    goal = Path(said[0][0])
    shelves = FileLayout(comm.world_size, {comm.group_rank})
    contents = Contents(made_by=made_by(comm.world_size))
    texts: dict[str, str] = {}
    if optimizer is not None:
        optimizer.shards.wait_for_params()
        names, positional = names_of(optimizer, model)
        held = [optimizer.plan.intervals(rank) for rank in range(comm.world_size)]
        own = attach_masters(optimizer.shards.states(), optimizer.shards.masters())
        kept, tensors = survey(comm, optimizer.plan.specs, held, own)
        states = _place_state(shelves, names, held, kept, tensors, comm.group_rank)

    def describe() -> str:
        nonlocal contents, texts
        if optimizer is not None:
            optimizer.shards.sync_options()
            saved = _saved_optimizer(shelves, optimizer, names, positional, kept, states)
            contents = replace(contents, optimizer=saved)
        if model is not None:
            contents = replace(contents, model=_saved_model(shelves, unwrapped(model)))
        if extra is not None:
            contents = replace(contents, extra=shelves.tree("extra", extra))
        if comm.group_rank == 0:
            texts = texts_of(contents)
        return _where(contents)

    # What is in the files of all ranks is described by one of them.
    if len(set(run_on_all_ranks(comm, "saving a checkpoint", describe))) > 1:
        raise ValueError(
            f"rank {comm.group_rank}: the ranks would save different models or optimizers; build "
            "them alike on all ranks"
        )
    return Job(goal, shelves.own, texts, keep)


def _where(contents: Contents) -> str:
    """A digest of which tensor is in which file, for ranks to compare."""
    params = contents.optimizer.params if contents.optimizer is not None else ()
    states = [param.state.stored for param in params if param.state is not None]
    tensors = contents.model.tensors if contents.model is not None else {}
    aliases = contents.model.aliases if contents.model is not None else {}
    told = repr([states, tensors, aliases])
    return hashlib.sha256(told.encode()).hexdigest()


def write_out(comm: Comm, job: Job, progress: Progress = no_progress) -> Path:
    """Write, and make it a checkpoint. Called on every rank.

    Args:
        comm: the ranks.
        job: what this one has to write.
        progress: told of the bytes that this rank has written.

    Raises:
        OSError: if a file could not be written; on every rank something is raised, and nothing is
            left behind.
    """
    staging: Staging | None = None
    what = f"saving to {job.goal}"

    def begin() -> str | None:
        nonlocal staging
        if comm.group_rank == 0:
            staging = Staging(job.goal)
            return str(staging.path)
        return None

    def write_own() -> list[list[Any]]:
        written = []
        for name, tensors in job.files.items():
            metadata = {"format": "pt"} if name.startswith("model") else None
            digest = write(folder / name, tensors, metadata, progress)
            written.append([name, digest.nbytes, digest.sha256])
        return written

    def commit() -> None:
        if staging is not None:
            files = {name: Digest(*rest) for rank in everything for name, *rest in rank}
            for name, text in job.texts.items():
                files[name] = write_text(folder / name, text)
            staging.commit(files)
            if job.keep is not None:
                keep_last(job.goal.parent, job.keep)

    try:
        folder = Path(str(run_on_all_ranks(comm, what, begin)[0]))
        everything = run_on_all_ranks(comm, what, write_own)
        run_on_all_ranks(comm, what, commit)
    finally:
        if staging is not None:
            staging.discard()
    return job.goal


def _place_state(
    shelves: FileLayout,
    names: Sequence[str],
    held: Sequence[Holding],
    kept: Mapping[int, Kept],
    tensors: Mapping[int, Sequence[torch.Tensor]],
    group_rank: int,
) -> dict[int, Tree]:
    """Put every tensor of the state on the shelf of the rank that holds it."""
    holders = holders_of(held)
    states: dict[int, Tree] = {}
    for param, found in kept.items():
        spec = found.spec
        stored: dict[int, Stored] = {}
        for number, leaf in enumerate(found.leaves):
            divided = found.shared and found.per_element[number]
            # Masters are in files whatever their size: a model may be loaded from them.
            if leaf.data is not None and not divided and leaf.path != MASTER:
                continue
            chunks = []
            # What belongs to the whole parameter is the same on all that hold a part of it.
            for rank in holders[param] if divided else holders[param][:1]:
                here = held[rank][param]
                whole = [(here, Box.whole(leaf.shape))]
                for stretch, box in boxes(here, spec.shape, spec.stride) if divided else whole:
                    tensor = tensors[param][number] if rank == group_rank else None
                    if tensor is not None and divided:
                        tensor = tensor.as_strided(
                            box.sizes,
                            spec.stride,
                            tensor.storage_offset() + stretch.start - here.start,
                        )
                    key = state_key(param, number, names[param], leaf, box)
                    chunks.append(shelves.put("optimizer", rank, key, box, tensor))
            shape = spec.shape if divided else leaf.shape
            stored[number] = Stored(leaf.dtype, shape, tuple(chunks))
        states[param] = Tree(_described_whole(found, stored), stored)
    return states


def _described_whole(found: Kept, stored: Mapping[int, Stored]) -> Node:
    """The structure of a parameter's state as if one rank held all of it."""

    def leaf(number: int, node: Node) -> Node:
        if number not in stored:
            return node
        kind, dtype, shape, stride, on_cpu, _ = node
        if found.shared and found.per_element[number]:
            shape, stride = list(found.spec.shape), list(found.spec.stride)
        return [kind, dtype, shape, stride, on_cpu, None]

    return with_leaves(found.node, leaf)


def _saved_optimizer(
    shelves: FileLayout,
    optimizer: ZeroRedundancyOptimizer,
    names: Sequence[str],
    positional: bool,
    kept: Mapping[int, Kept],
    states: Mapping[int, Tree],
) -> SavedOptimizer:
    params = [
        SavedParam(
            names[index],
            spec.shape,
            spec.dtype,
            spec.trainable,
            states.get(index),
            tuple(kept[index].per_element) if index in kept else (),
        )
        for index, spec in enumerate(optimizer.plan.specs)
    ]
    groups = []
    start = 0
    for number, group in enumerate(optimizer.param_groups):
        stop = start + len(group["params"])
        options = saved_options(shelves, number, group)
        groups.append((tuple(names[start:stop]), options))
        start = stop
    global_state = optimizer.shards.global_state()
    if not all(isinstance(key, str) for key in global_state):
        raise TypeError(
            f"the optimizer keeps state under {list(global_state)}; a checkpoint holds it under "
            "parameters and names"
        )
    loose = shelves.tree("state", global_state)
    kind = kind_of(optimizer)
    return SavedOptimizer(
        kind,
        positional,
        optimizer.shards.stepped,
        tuple(params),
        tuple(groups),
        loose,
        shelves.tree("beside", extras(optimizer.optim)),
        optimizer.shards.rounding_step,
    )


def saved_options(shelves: FileLayout, number: int, group: Mapping[str, Any]) -> Tree:
    """The options of a parameter group, as far as they are data."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key in _unsaveable(options):
        warnings.warn(
            f"option {key!r} of parameter group {number} is a {type(options[key]).__name__}, "
            "which a checkpoint cannot hold; it is left out and keeps its value on load",
            stacklevel=3,
        )
        del options[key]
    return shelves.tree(f"group {number}", options)


def kind_of(optimizer: ZeroRedundancyOptimizer) -> str:
    """The class of the local optimizer, by name."""
    return full_name(type(optimizer.optim))


def _unsaveable(options: Mapping[str, Any]) -> list[str]:
    """The options that are code, not data."""
    found = []
    for key, value in options.items():
        try:
            encode(value)
        except TypeError:
            found.append(key)
    return found


def _saved_model(shelves: FileLayout, model: torch.nn.Module) -> SavedModel:
    """Deal the model's tensors, which every rank has, to the ranks to be written."""
    found, aliases, rest = model_tensors(model)
    # By all of its names: the first may be one that is not saved.
    buffers = model.named_buffers(remove_duplicate=False)
    shared = {unwrapped_name(name) for name, _ in buffers}
    tensors = {}
    for name, rank in deal(found, shared, shelves.world_size).items():
        tensor = found[name]
        box = Box.whole(tensor.shape)
        chunk = shelves.put("model", rank, name, box, tensor)
        tensors[name] = Stored(tensor.dtype, tuple(tensor.shape), (chunk,))
    return SavedModel(tensors, aliases, shelves.tree("model", rest))


def model_tensors(
    model: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """A model's tensors by name, further names of the same tensors, and what else it keeps.

    Raises:
        TypeError: for a tensor that is not plain.
    """
    return sort_out(model.state_dict())


def sort_out(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """The same of a model's state dict."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    places: dict[Any, str] = {}
    for name, value in state_dict.items():
        name = unwrapped_name(name)
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == EXTRA_STATE:
            rest[name] = value
            continue
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
            raise TypeError(
                f"model tensor {name!r} is a {type(value).__name__} ({value.layout}, on "
                f"{value.device}); a checkpoint holds plain dense tensors"
            )
        form = (value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
        place = (value.data_ptr(), value.device, *form)
        if value.numel() and place in places:
            aliases[name] = places[place]
        else:
            places[place] = name
            tensors[name] = value
    return tensors, aliases, rest
