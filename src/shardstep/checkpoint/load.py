"""Loading: every rank reads what it owns now, and nothing is changed before all have read it.

Digests are checked first, each file by one rank. Then each rank reads its pieces of the optimizer's
state, and a share of the model's tensors, into fresh memory. Only when every rank has succeeded is
anything installed: the state where it was read, the model's tensors by sending them round.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardstep.agree import together
from shardstep.attach import broadcast
from shardstep.buffers import flat
from shardstep.checkpoint.contents import SavedModel, SavedOptimizer, SavedParam, Stored
from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.job import comm_of, kind_of, model_tensors
from shardstep.checkpoint.names import names_of, unwrapped
from shardstep.checkpoint.plain import install
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.shelves import deal
from shardstep.checkpoint.tree import Leaf
from shardstep.comm import Comm
from shardstep.plan import Box, Interval, ParamSpec, boxes

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
    raises on every rank, and optimizer and model are as they were.

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
    """
    comm = comm_of(optimizer)
    goal = Path(path).absolute()
    what = f"loading {goal}"
    if optimizer is not None:
        optimizer._gather.land()
    with _opened(comm, what, goal) as checkpoint:
        if verify:
            needed = _files_needed(checkpoint, optimizer is not None, model is not None)
            mine = needed[comm.group_rank :: comm.world_size]
            together(comm, what, lambda: checkpoint.verify(mine))
        loading = _Loading(checkpoint, comm, optimizer, model, strict, dict(names or {}))
        together(comm, what, loading.read)
        loading.install(what)
        return loading.result(verdict=comm.group_rank == 0)


def _opened(comm: Comm, what: str, path: Path) -> Checkpoint:
    """The checkpoint, if all ranks find the same. Called on every rank."""
    found: list[Checkpoint] = []

    def open_it() -> str:
        found.append(Checkpoint(path))
        return found[0].manifest.digest

    if len(set(together(comm, what, open_it))) > 1:
        raise CheckpointError(
            f"rank {comm.group_rank}: the ranks find different checkpoints at {path}; it has to be "
            "on a file system that they share"
        )
    return found[0]


def _files_needed(checkpoint: Checkpoint, optimizer: bool, model: bool) -> list[str]:
    kinds = ("extra", *(["optimizer"] if optimizer else []), *(["model"] if model else []))
    names = (name for name in checkpoint.manifest.files if name.endswith(".safetensors"))
    return sorted(name for name in names if name.startswith(kinds))


@dataclass(slots=True)
class _Loading:
    """A load under way on one rank: first all is read, then all is installed."""

    checkpoint: Checkpoint
    comm: Comm
    optimizer: ZeroRedundancyOptimizer | None
    model: torch.nn.Module | None
    strict: bool
    names: dict[str, str]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    loose: dict[Any, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    stepped: bool = False
    owners: dict[str, int] = field(default_factory=dict)
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    arrived: dict[str, torch.Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    extra: Any = None

    # -------------------------------------------------------------------------------- reading

    def read(self) -> None:
        """Read everything that this rank is to have, and change nothing."""
        contents = self.checkpoint.contents
        if self.optimizer is not None:
            if contents.optimizer is None:
                raise CheckpointError(f"{self.checkpoint.path}: there is no optimizer in it")
            self._read_optimizer(self.optimizer, contents.optimizer)
        if self.model is not None:
            if contents.model is None:
                raise CheckpointError(f"{self.checkpoint.path}: there is no model in it")
            self._read_model(unwrapped(self.model), contents.model)
        if contents.extra is not None:
            self.extra = self.checkpoint.value(contents.extra)
        if self.strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"{self.checkpoint.path} does not fit: {_summary(self.missing, self.unexpected)}; "
                "give names={here: there} for what is called otherwise, or strict=False to load "
                "what fits"
            )

    def _read_optimizer(self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer) -> None:
        if self.strict and saved.kind not in (None, kind_of(optimizer)):
            raise CheckpointError(
                f"{self.checkpoint.path} was saved from {saved.kind}, but this optimizer is "
                f"{kind_of(optimizer)}; pass strict=False if their state means the same"
            )
        specs = optimizer.plan.specs
        found = self._match(optimizer, saved)
        held = optimizer.plan.intervals(optimizer.rank)
        for index, param in found.items():
            if param.shape != specs[index].shape:
                raise CheckpointError(
                    f"{self.checkpoint.path}: parameter {param.name!r} has shape {param.shape} "
                    f"there, but {specs[index].shape} here; this checkpoint is of another model"
                )
            if param.state is None:
                if specs[index].trainable:
                    self.empty.append(specs[index].name)
            elif index in held:
                device = optimizer._params[index].device
                self.states[index] = self._state(param, specs[index], held[index], device)
        self.loose = self.checkpoint.value(saved.loose)
        self.groups = self._options(optimizer, saved, found)
        self.stepped = saved.stepped

    def _match(
        self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer
    ) -> dict[int, SavedParam]:
        """For each parameter here, by its number, the one it is in the checkpoint."""
        names, positional = names_of(optimizer, self.model)
        if positional != saved.positional:
            # One side knows only places. They mean the same if there are equally many.
            if len(names) != len(saved.params):
                raise CheckpointError(
                    f"{self.checkpoint.path} has {len(saved.params)} parameters and this optimizer "
                    f"{len(names)}, and one of them knows no names; construct the optimizer from "
                    "model.named_parameters(), or give model= when saving and loading"
                )
            return dict(enumerate(saved.params))
        there = {param.name: param for param in saved.params}
        found = {}
        for index, name in enumerate(names):
            param = there.pop(self.names.get(name, name), None)
            if param is None:
                self.missing.append(f"optimizer: {name}")
            else:
                found[index] = param
        self.unexpected += [f"optimizer: {name}" for name in there]
        return found

    def _state(
        self, param: SavedParam, spec: ParamSpec, here: Interval, device: torch.device
    ) -> Any:
        """The state of the elements `here` of a parameter."""
        assert param.state is not None
        tree = param.state
        whole = here == Interval(0, spec.numel)

        def make(number: int, leaf: Leaf) -> torch.Tensor:
            if not param.per_element[number]:
                if not whole and leaf.shape and leaf.data is None:
                    raise CheckpointError(
                        f"{self.checkpoint.path}: state {leaf.path!r} of parameter {param.name!r} "
                        "belongs to the whole parameter; construct the optimizer with "
                        'layout="whole"'
                    )
                return self.checkpoint.leaf(tree, number, leaf)
            if number not in tree.stored:
                full = leaf.empty(device)
                return full if whole else flat(full, spec.stride)[here.slice].clone()
            if whole:
                tensor = torch.empty_strided(
                    spec.shape, spec.stride, dtype=leaf.dtype, device=device
                )
                self.checkpoint.read(tree.stored[number], Box.whole(spec.shape), tensor)
                return tensor
            tensor = torch.empty(here.numel, dtype=leaf.dtype, device=device)
            for stretch, box in boxes(here, spec.shape, spec.stride):
                view = tensor.as_strided(box.sizes, spec.stride, stretch.start - here.start)
                self.checkpoint.read(tree.stored[number], box, view)
            return tensor

        return self.checkpoint.value(tree, make)

    def _options(
        self,
        optimizer: ZeroRedundancyOptimizer,
        saved: SavedOptimizer,
        found: Mapping[int, SavedParam],
    ) -> list[dict[str, Any]]:
        """For each group here, the options that its parameters had."""
        group_of = {name: n for n, (names, _) in enumerate(saved.groups) for name in names}
        options: list[dict[str, Any]] = []
        start = 0
        for number, group in enumerate(optimizer.param_groups):
            stop = start + len(group["params"])
            there = {group_of[found[index].name] for index in range(start, stop) if index in found}
            if not there and number < len(saved.groups) and not saved.groups[number][0]:
                there = {number}
            if len(there) > 1 and self.strict:
                raise CheckpointError(
                    f"{self.checkpoint.path}: the parameters of group {number} are in groups "
                    f"{sorted(there)} there, whose options may differ; construct the optimizer "
                    "with the same groups, or pass strict=False to keep this one's options"
                )
            chosen = saved.groups[there.pop()][1] if len(there) == 1 else None
            options.append({} if chosen is None else self.checkpoint.value(chosen))
            start = stop
        return options

    def _read_model(self, model: torch.nn.Module, saved: SavedModel) -> None:
        self.targets, aliases, rest = model_tensors(model)
        further: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            further.setdefault(name, []).append(alias)
        self.owners = deal(self.targets, set(), self.comm.world_size)
        used: set[str] = set()
        for name, target in self.targets.items():
            # A tensor with several names may have been saved under any of them.
            known = [self.names.get(each, each) for each in (name, *further.get(name, ()))]
            there = [saved.aliases.get(each, each) for each in known]
            hit = next((each for each in there if each in saved.tensors), None)
            if hit is None:
                self.missing.append(f"model: {name}")
                continue
            used.update(each for each in there if each in saved.tensors)
            stored = saved.tensors[hit]
            if stored.shape != tuple(target.shape):
                raise CheckpointError(
                    f"{self.checkpoint.path}: model tensor {name!r} has shape {stored.shape} "
                    f"there, but {tuple(target.shape)} here; this checkpoint is of another model"
                )
            if self.owners[name] == self.comm.group_rank:
                self.arrived[name] = self._weight(name, stored)
        self.unexpected += [f"model: {name}" for name in saved.tensors if name not in used]
        told = self.checkpoint.value(saved.rest)
        self.rest = {name: told[name] for name in rest if name in told}
        self.missing += [f"model: {name}" for name in rest if name not in told]
        self.unexpected += [f"model: {name}" for name in told if name not in rest]

    def _weight(self, name: str, stored: Stored) -> torch.Tensor:
        return self.checkpoint.whole(stored)

    # ------------------------------------------------------------------------------ installing

    def install(self, what: str) -> None:
        """Put everything in its place. Called on every rank, when all have read."""
        if self.optimizer is not None:
            self._install_optimizer(self.optimizer, what)
        if self.model is not None:
            self._install_model(unwrapped(self.model))

    def _install_optimizer(self, optimizer: ZeroRedundancyOptimizer, what: str) -> None:
        local = optimizer.optim
        before = local.state, local.param_groups
        numbers = {
            index: n for n, index in enumerate(sorted(optimizer.plan.intervals(optimizer.rank)))
        }
        groups = []
        first = 0
        for mine, options in zip(local.param_groups, self.groups, strict=True):
            last = first + len(mine["params"])
            groups.append({**mine, **options, "params": list(range(first, last))})
            first = last

        def put() -> None:
            state = {numbers[index]: value for index, value in self.states.items()}
            dtypes = [optimizer.plan.specs[index].dtype for index in sorted(numbers)]
            install(local, {**state, **self.loose}, groups, dtypes)

        try:
            together(self.comm, what, put)
        except BaseException:
            # Loading makes new ones of both and leaves the old ones as they were.
            local.state, local.param_groups = before
            raise
        optimizer._stepped = self.stepped
        optimizer._local.publish_options()

    def _install_model(self, model: torch.nn.Module) -> None:
        with torch.no_grad():
            for rank in range(self.comm.world_size):
                share = [
                    target
                    for name, target in self.targets.items()
                    if self.owners[name] == rank and f"model: {name}" not in set(self.missing)
                ]
                if rank == self.comm.group_rank:
                    for name, value in self.arrived.items():
                        self.targets[name].copy_(value)
                broadcast(self.comm, share, rank)
        for name, value in self.rest.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.set_extra_state(value)

    # ------------------------------------------------------------------------------ the verdict

    def result(self, verdict: bool) -> Loaded:
        """What to tell the caller; and, if asked to, warnings for what looks like a mistake."""
        if verdict:
            self._warn()
        return Loaded(self.checkpoint.path, self.extra, tuple(self.missing), tuple(self.unexpected))

    def _warn(self) -> None:
        path = self.checkpoint.path
        if self.missing or self.unexpected:
            said = _summary(self.missing, self.unexpected)
            warnings.warn(f"{path} was loaded in part: {said}", stacklevel=5)
        if self.empty and not self.stepped:
            warnings.warn(
                f"{path} was saved before the first step: the optimizer starts from zero",
                stacklevel=5,
            )
        elif self.empty and self.optimizer is not None:
            trainable = sum(spec.trainable for spec in self.optimizer.plan.specs)
            if len(self.empty) < trainable:
                warnings.warn(
                    f"{path} has no optimizer state for {_some(self.empty)}, which train; they had "
                    "never had a gradient when it was saved, and start from zero",
                    stacklevel=5,
                )


def _summary(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"not found in the checkpoint: {_some(missing)}")
    if unexpected:
        parts.append(f"in the checkpoint but not here: {_some(unexpected)}")
    return "; ".join(parts)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
