"""The two halves of a save: `plan_save` assigns tensors to files, `write_checkpoint` writes them.

A `FileLayout` has the files, for ranks that save and for one process that writes for all.
`plan_save` looks at the optimizer and the model, exchanges the structure of the state, and moves no
tensor. `write_checkpoint` needs neither of them: a background save runs it on copies.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import platform
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardstep.checkpoint.files import (
    MAX_JSON_NBYTES,
    Digest,
    Progress,
    Stages,
    no_progress,
    write_text,
)
from shardstep.checkpoint.format import (
    CONTENTS,
    Chunk,
    Contents,
    SavedModel,
    SavedOptimizer,
    SavedParam,
    Stored,
    Tree,
    attach_masters,
    master_in_file,
    to_json,
)
from shardstep.checkpoint.inputs import (
    ModelState,
    check_model,
    names_of,
    refuse_dtensor_params,
    split_state_dict,
)
from shardstep.checkpoint.safetensors import Source, write
from shardstep.checkpoint.staging import Staging, keep_last
from shardstep.comm import Comm, SoloComm
from shardstep.comm.consensus import run_on_all_ranks
from shardstep.local.multi_class import PER_PARAMETER, extras, saved_name
from shardstep.params.flat import view_box
from shardstep.params.groups import group_ranges
from shardstep.params.names import unwrapped, unwrapped_name
from shardstep.plan import Box, ShardPlan, boxes
from shardstep.state.exchange import Kept, survey
from shardstep.state.tree import encode

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

WEIGHTS = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The files that one rank has to write, and the JSON texts on rank 0."""

    path: Path
    files: dict[str, dict[str, Source]]
    texts: dict[str, str]
    keep_last: int | None


def plan_save(
    comm: Comm,
    path: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None,
    model: torch.nn.Module | None,
    extra: Any,
    keep: int | None,
) -> SaveJob:
    """Assign everything to files. Called on every rank."""

    def check() -> str:
        if keep is not None and keep < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep}: this save is kept too")
        if optimizer is None and model is None and extra is None:
            raise ValueError("there is nothing to save: give an optimizer, a model or extra")
        check_model(model)
        refuse_dtensor_params(optimizer, model)
        with_optimizer = " with an optimizer" if optimizer is not None else ""
        with_model = " with a model" if model is not None else ""
        return f"{Path(path).absolute()}{with_optimizer}{with_model}"

    given = run_on_all_ranks(comm, "saving a checkpoint", check)
    if len(set(given)) > 1:
        shown = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(given))
        raise ValueError(f"all ranks have to save the same to one path, but were given {shown}")
    files = FileLayout(comm.world_size, {comm.group_rank})
    kept: dict[int, Kept] = {}
    if optimizer is not None:
        shards = optimizer.shards
        shards.wait_for_params()
        shards.check_in_step()
        own = attach_masters(shards.local.states(), shards.masters())
        kept = survey(comm, shards.plan, own)

    texts: dict[str, str] = {}

    def describe() -> str:
        contents = Contents(
            None if optimizer is None else _add_optimizer(files, optimizer, model, kept),
            None if model is None else _add_model(files, unwrapped(model)),
            None if extra is None else files.add_value("extra", extra),
            made_by(comm.world_size),
        )
        if comm.group_rank == 0:
            texts.update(json_files(contents))
        # Rank 0 describes the files of all ranks, so these must agree on places.
        params = () if contents.optimizer is None else contents.optimizer.params
        states = [param.state and param.state.stored for param in params]
        tensors = contents.model and (contents.model.tensors, contents.model.aliases)
        return hashlib.sha256(repr([states, tensors]).encode()).hexdigest()

    if len(set(run_on_all_ranks(comm, "saving a checkpoint", describe))) > 1:
        raise ValueError(
            f"rank {comm.group_rank}: the ranks would save different models or optimizers; build "
            "the same on all ranks"
        )
    return SaveJob(Path(path).absolute(), files.own_files, texts, keep)


def _add_optimizer(
    files: FileLayout,
    optimizer: ZeroRedundancyOptimizer,
    model: torch.nn.Module | None,
    kept: Mapping[int, Kept],
) -> SavedOptimizer:
    """Assign the state that the ranks keep to files."""
    shards = optimizer.shards
    names, positional = names_of(optimizer, model)
    pieces, held = pieces_of(shards.plan), shards.held

    def part(index: int, number: int, box: Box) -> torch.Tensor:
        """Return a box of a tensor of a parameter's state, which this rank holds."""
        state = kept[index]
        if not (state.shared and state.per_element[number]):
            return state.tensors[number]
        return view_box(state.tensors[number], box, state.spec.stride, held[index].start)

    params = []
    for index, spec in enumerate(shards.plan.specs):
        state = None
        if index in kept:
            state = Tree(master_in_file(kept[index].node), {})
            if state.node is kept[index].node:
                state.leaves = kept[index].leaves  # decoding them again takes a tenth of a save
        param = SavedParam(names[index], spec.shape, spec.dtype, spec.trainable, state)
        params.append(files.add_state(index, param, pieces[index], partial(part, index)))
    shards.sync_options()
    global_state = shards.local.global_state()
    if not all(isinstance(key, str) for key in global_state):
        raise TypeError(
            f"the optimizer keeps state under {list(global_state)}; a checkpoint holds it under "
            "parameters and names"
        )
    return SavedOptimizer(
        saved_name(shards.optim),
        positional,
        shards.local.stepped,
        tuple(params),
        files.add_groups(optimizer.param_groups, names),
        files.add_value("state", global_state),
        files.add_value("beside", extras(shards.optim)),
        shards.rounding_step,
    )


def _add_model(files: FileLayout, model: torch.nn.Module) -> SavedModel:
    """Assign the model's tensors, which every rank has, to ranks."""
    # All names of each buffer: the state dict may lack the first.
    buffers = {unwrapped_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    return files.add_model(split_state_dict(model.state_dict()), of_rank_0=buffers)


def write_checkpoint(comm: Comm, job: SaveJob, progress: Progress = no_progress) -> Path:
    """Write all files, then make them a checkpoint. Called on every rank."""
    staging = Staging(job.path)
    what = f"saving to {job.path}"

    def create_folder() -> str:
        if comm.group_rank == 0:
            staging.create()
        return str(staging.path)

    def write_own() -> list[list[Any]]:
        written = []
        for name, tensors in job.files.items():
            metadata = {"format": "pt"} if name.startswith("model") else None
            written.append([name, *astuple(write(folder / name, tensors, metadata, progress))])
        return written

    def commit() -> None:
        if comm.group_rank == 0:
            files = {name: Digest(*rest) for rank in written for name, *rest in rank}
            for name, text in job.texts.items():
                files[name] = write_text(folder / name, text)
            others = staging.commit(files)
            if job.keep_last is not None:
                keep_last(others, job.keep_last)

    try:
        folder = Path(str(run_on_all_ranks(comm, what, create_folder)[0]))
        written = run_on_all_ranks(comm, what, write_own)
        run_on_all_ranks(comm, what, commit)
    finally:
        staging.discard()
    return job.path


def write_alone(
    path: str | os.PathLike[str], files: FileLayout, contents: Contents, stages: Stages
) -> Path:
    """Write the files of all ranks from one process, and return the checkpoint."""
    job = SaveJob(Path(path).absolute(), files.own_files, json_files(contents), keep_last=None)
    total = sum(stored.nbytes for _, stored in contents.tensors())
    return write_checkpoint(SoloComm(), job, stages("writing", total))


# ------------------------------------------------------------------------ the files


class FileLayout:
    """The files of a checkpoint. Every process names all of them.

    It fills `own_files`, the files of `own_ranks`, which it writes.
    """

    def __init__(self, world_size: int, own_ranks: Container[int]) -> None:
        self.world_size = world_size
        self._own_ranks = own_ranks
        self.own_files: dict[str, dict[str, Source]] = {}

    def add_chunk(
        self, kind: str, group_rank: int, key: str, box: Box, tensor: Source | None
    ) -> Chunk:
        """Assign a chunk to a rank's file, and keep its tensor if this process writes the file."""
        single = self.world_size == 1 or kind == "extra"
        number = "" if single else f"-{group_rank + 1:05}-of-{self.world_size:05}"
        file = f"{kind}{number}.safetensors"
        if group_rank in self._own_ranks:
            assert tensor is not None
            self.own_files.setdefault(file, {})[key] = tensor
        return Chunk(file, key, box)

    def add_whole(self, kind: str, group_rank: int, key: str, tensor: Source) -> Stored:
        """Assign a tensor, in one chunk, to a rank's file."""
        shape = tuple(tensor.shape)
        chunk = self.add_chunk(kind, group_rank, key, Box.whole(shape), tensor)
        return Stored(tensor.dtype, shape, (chunk,))

    def add_state(
        self,
        index: int,
        param: SavedParam,
        pieces: Sequence[tuple[int, Box]],
        source: Callable[[int, Box], Source],
    ) -> SavedParam:
        """Assign the tensors of a parameter's state that are not in the text to files.

        `pieces` are the boxes of the parameter, each with its rank. `source` returns a box of a
        tensor by its number, on the rank that writes it.
        """
        if param.state is None:
            return param
        stored = {}
        for number, leaf in enumerate(param.state.leaves):
            if leaf.data is not None:
                continue
            # The first rank with a part writes a tensor of the whole parameter.
            whole = [(pieces[0][0], Box.whole(leaf.shape))]
            chunks = []
            for rank, box in pieces if leaf.shape == param.shape else whole:
                key = f"{index}.{number}:{param.name}:{leaf.path}@{list(box.offsets)}"
                tensor = source(number, box) if rank in self._own_ranks else None
                chunks.append(self.add_chunk("optimizer", rank, key, box, tensor))
            stored[number] = Stored(leaf.dtype, leaf.shape, tuple(chunks))
        return replace(param, state=param.state.with_stored(stored))

    def add_model(self, model: ModelState, of_rank_0: Container[str] = ()) -> SavedModel:
        """Assign a model's tensors, which every rank has, to ranks."""
        owners = assign_owners(model.tensors, of_rank_0, self.world_size)
        tensors = {}
        for name, rank in owners.items():
            tensors[name] = self.add_whole("model", rank, name, model.tensors[name])
        return SavedModel(tensors, model.aliases, self.add_value("model", model.extra))

    def add_groups(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[str]
    ) -> tuple[tuple[tuple[str, ...], Tree], ...]:
        """Assign the options of parameter groups to rank 0. Warn of options that are code."""
        found = []
        for number, (group, own) in enumerate(zip(groups, group_ranges(groups), strict=True)):
            options = {}
            for key in [key for key in group if key not in PER_PARAMETER]:
                try:
                    encode(group[key])
                    options[key] = group[key]
                except TypeError:
                    warnings.warn(
                        f"option {key!r} of parameter group {number} is a "
                        f"{type(group[key]).__name__}, which a checkpoint cannot hold; it is left "
                        "out and keeps its value on load",
                        stacklevel=3,
                    )
            tree = self.add_value(f"group {number}", options)
            found.append((tuple(names[own.start : own.stop]), tree))
        return tuple(found)

    def add_value(self, name: str, value: Any) -> Tree:
        """Assign the tensors of a nested value to rank 0."""
        try:
            node, tensors = encode(value, name)
        except TypeError as error:
            raise TypeError(
                f"{error}; a checkpoint holds tensors, numbers, text, lists and dicts"
            ) from None
        return self.add_tree(name, Tree(node, {}), tensors.__getitem__)

    def add_tree(self, name: str, tree: Tree, source: Callable[[int], Source]) -> Tree:
        """Assign the tensors of a nested value to rank 0. `source` returns them by number."""
        stored = {}
        for number, leaf in enumerate(tree.leaves):
            if leaf.data is None:
                key = f"{name}.{number}:{leaf.path}"
                stored[number] = self.add_whole("extra", 0, key, source(number))
        return Tree(tree.node, stored)


def pieces_of(plan: ShardPlan) -> list[list[tuple[int, Box]]]:
    """Return the boxes of each parameter, with the ranks that hold them in order."""
    pieces: list[list[tuple[int, Box]]] = [[] for _ in plan.specs]
    for rank, held in enumerate(plan.holdings):
        for param, interval in held.items():
            spec = plan.specs[param]
            pieces[param] += [(rank, box) for _, box in boxes(interval, spec.shape, spec.stride)]
    return pieces


def assign_owners(
    tensors: Mapping[str, Source | Stored], of_rank_0: Container[str], world_size: int
) -> dict[str, int]:
    """Return the rank that writes or reads each replicated tensor, balanced by bytes.

    Rank 0 owns the tensors in `of_rank_0`, which may differ between ranks.
    """
    loads = [(0, rank) for rank in range(world_size)]
    owner = {}
    for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
        if name in of_rank_0:
            owner[name] = 0
            continue
        load, rank = loads[0]
        owner[name] = rank
        heapq.heapreplace(loads, (load + tensors[name].nbytes, rank))
    return {name: owner[name] for name in tensors}


def json_files(contents: Contents) -> dict[str, str]:
    """Return the text of the JSON files for these contents, by file name."""
    texts = {CONTENTS: to_json(contents)}
    if len(texts[CONTENTS]) > MAX_JSON_NBYTES:
        raise ValueError(
            f"{CONTENTS} would have {len(texts[CONTENTS]):,} bytes, but at most "
            f"{MAX_JSON_NBYTES:,} are read; keep large values in tensors"
        )
    if contents.model is not None:
        file_of = {name: stored.chunks[0].file for name, stored in contents.model.tensors.items()}
        if set(file_of.values()) - {WEIGHTS}:
            total = sum(stored.nbytes for stored in contents.model.tensors.values())
            texts[HF_INDEX] = hf_index(file_of, total)
    return texts


def hf_index(file_of: Mapping[str, str], nbytes: int) -> str:
    """Return the index that Hugging Face's loaders need for several files of weights."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(file_of)}, indent=2)


def made_by(world_size: int) -> dict[str, Any]:
    """Return the versions that write the checkpoint, and the number of ranks."""
    from shardstep import __version__

    return {
        "shardstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": world_size,
    }
