"""Checkpoints made of plain state dicts: no rank, no optimizer and no model is needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.file_layout import FileLayout, made_by, state_key, texts_of
from shardstep.checkpoint.format import (
    Contents,
    SavedModel,
    SavedOptimizer,
    SavedParam,
    Stored,
    Tree,
)
from shardstep.checkpoint.mastered import MASTER, attach_masters
from shardstep.checkpoint.safetensors import Stages, no_stages
from shardstep.checkpoint.write import Job, saved_options, sort_out, write_out
from shardstep.comm import SoloComm
from shardstep.local.multi_class import full_name
from shardstep.params.names import strip_wrapper_prefixes
from shardstep.plan import Box
from shardstep.state.torch_dict import OURS
from shardstep.state.tree import encode, leaves, with_leaves

MODEL_KEYS = ("model", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")


def import_state_dict(
    path: str | os.PathLike[str],
    optimizer: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    extra: Any = None,
    *,
    names: Sequence[str] | None = None,
    optimizer_class: str | None = None,
    stages: Stages = no_stages,
) -> Path:
    """Make a checkpoint of plain state dicts, for `load` to take at any world size.

    Called in one process. What wrappers put into names (`module.`, `_orig_mod.`) is taken out.

    Args:
        path: the folder to make; there must be nothing yet.
        optimizer: the state dict of an unsharded optimizer: torch's own form, in which parameters
            are numbers, or that of `torch.distributed.checkpoint`, in which they are names.
        model: the state dict of the model.
        extra: anything else: numbers, text, tensors, lists and dicts of these.
        names: the names of the optimizer's parameters, in the order of its groups, if the dict has
            none. Without names, parameters are matched by their places on load.
        optimizer_class: the class of the optimizer, such as `"AdamW"` for torch's or
            `"some.module.Lion"`; None if it is not known, and not to be compared on load.
        stages: told what is done.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: if the dicts do not describe an optimizer and a model.
        FileExistsError: if there is something at `path`.
        OSError: if it cannot be written there.
    """
    shelves = FileLayout(1, {0})
    try:
        weights = None if model is None else _model(shelves, _unwrapped(model))
        contents = Contents(
            None
            if optimizer is None
            else _optimizer(shelves, optimizer, weights, names, optimizer_class),
            weights,
            None if extra is None else shelves.tree("extra", extra),
            {**made_by(1), "imported": True},
        )
    except TypeError as error:
        raise CheckpointError(str(error)) from error
    return write_alone(path, shelves, contents, stages)


def write_alone(
    path: str | os.PathLike[str], shelves: FileLayout, contents: Contents, stages: Stages
) -> Path:
    """Write a checkpoint in one process."""
    job = Job(Path(path).absolute(), shelves.own, texts_of(contents), keep=None)
    total = sum(stored.nbytes for _, stored in contents.tensors())
    return write_out(SoloComm(), job, stages("writing", total))


# -------------------------------------------------------------------------------- state dicts


def _unwrapped(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state dict with the names that the user's own module has."""
    if not model or not all(isinstance(name, str) for name in model):
        raise CheckpointError("this is not the state dict of a model: its keys are not names")
    names = strip_wrapper_prefixes(model)
    if len(set(names)) != len(names):
        raise CheckpointError("two tensors of the model have the same name without wrappers")
    return dict(zip(names, model.values(), strict=True))


def _model(shelves: FileLayout, state_dict: Mapping[str, Any]) -> SavedModel:
    tensors, aliases, rest = sort_out(state_dict)
    saved = {}
    for name, tensor in tensors.items():
        chunk = shelves.put("model", 0, name, Box.whole(tensor.shape), tensor)
        saved[name] = Stored(tensor.dtype, tuple(tensor.shape), (chunk,))
    return SavedModel(saved, aliases, shelves.tree("model", rest))


def _optimizer(
    shelves: FileLayout,
    state_dict: Mapping[str, Any],
    model: SavedModel | None,
    names: Sequence[str] | None,
    optimizer_class: str | None,
) -> SavedOptimizer:
    state, groups = _parts(state_dict)
    state = attach_masters(state, _masters(state_dict))
    keys = [key for group in groups for key in group["params"]]
    called, positional = _names(groups, keys, names)
    params = []
    for index, (key, name) in enumerate(zip(keys, called, strict=True)):
        shape, dtype = _form(name, state.get(key), None if positional else model)
        params.append(_param(shelves, index, name, shape, dtype, state.get(key)))
    listed, start = [], 0
    for number, group in enumerate(groups):
        stop = start + len(group["params"])
        listed.append((tuple(called[start:stop]), saved_options(shelves, number, group)))
        start = stop
    loose = {key: value for key, value in state.items() if key not in set(keys)}
    beside = {key: value for key, value in state_dict.items() if key not in OURS}
    if not all(isinstance(key, str) for key in loose):
        raise CheckpointError(
            f"the optimizer's state dict has state for {list(loose)[:5]}, which no group has"
        )
    return SavedOptimizer(
        _kind(optimizer_class),
        positional,
        stepped=bool(state),
        params=tuple(params),
        groups=tuple(listed),
        loose=shelves.tree("state", loose),
        beside=shelves.tree("beside", beside),
        rounded=_rounded(state_dict),
    )


def _masters(state_dict: Mapping[str, Any]) -> Mapping[Any, torch.Tensor]:
    """The masters that a state dict of ours has beside the state."""
    masters = state_dict.get("masters", {})
    if not isinstance(masters, Mapping) or not all(
        isinstance(master, torch.Tensor) for master in masters.values()
    ):
        raise CheckpointError(
            "'masters' of the optimizer's state dict are not tensors by parameter"
        )
    return masters


def _rounded(state_dict: Mapping[str, Any]) -> int:
    """How many steps were rounded stochastically."""
    step = state_dict.get("rounding_step", 0)
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"'rounding_step' of the optimizer's state dict is {step!r}")
    return step


def _parts(state_dict: Mapping[str, Any]) -> tuple[Mapping[Any, Any], list[Mapping[str, Any]]]:
    """The state and the groups, if this is an optimizer's state dict."""
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    listed = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not listed:
        raise CheckpointError(
            "this is not the state dict of an optimizer: it has no 'state' and 'param_groups' as "
            "torch.optim writes them"
        )
    return state, groups


def _names(
    groups: Iterable[Mapping[str, Any]], keys: Sequence[Any], given: Sequence[str] | None
) -> tuple[list[str], bool]:
    """What the parameters are called, and whether they are numbers only."""
    if given is not None:
        known: list[Any] = list(given)
        if len(known) != len(keys):
            raise CheckpointError(
                f"{len(known)} names were given for the {len(keys)} parameters of the optimizer"
            )
    elif all(isinstance(key, str) for key in keys):
        known = list(keys)
    else:
        known = [name for group in groups for name in group.get("param_names", ())]
    if len(known) != len(keys) or not keys:
        return [f"param {index}" for index in range(len(keys))], True
    called = strip_wrapper_prefixes(map(str, known))
    if len(set(called)) != len(called):
        raise CheckpointError("two parameters of the optimizer have the same name")
    return called, False


def _form(name: str, state: Any, model: SavedModel | None) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a parameter: as the model has it, or else as its state shows.

    A wrong guess does no harm: a shape that is not the parameter's is refused on load.
    """
    if model is not None:
        stored = model.tensors.get(model.aliases.get(name, name))
        if stored is not None:
            return stored.shape, stored.dtype
    tensors = encode(state)[1] if state is not None else []
    # Beside values per element there are counters, which are scalars.
    larger = {tuple(tensor.shape) for tensor in tensors if tensor.dim()}
    if not tensors or len(larger) > 1:
        raise CheckpointError(
            f"the shape of parameter {name!r} cannot be told from its state"
            f"{'' if tensors else ', since it has none'}; give the model's state dict too, and "
            "names for the parameters if the optimizer's has none"
        )
    shape = larger.pop() if larger else ()
    alike = [tensor for tensor in tensors if tuple(tensor.shape) == shape]
    return shape, alike[-1].dtype


def _param(
    shelves: FileLayout,
    index: int,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    state: Any,
) -> SavedParam:
    if state is None or (isinstance(state, Mapping) and not state):
        return SavedParam(name, shape, dtype, True, None, ())
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"the state of parameter {name!r} is a {type(state).__name__}, and not a dict"
        )
    try:
        node, tensors = encode(state)
    except TypeError as error:
        raise CheckpointError(f"parameter {name!r}: {error}") from error
    found = leaves(node)
    stored = {}
    for number, (leaf, tensor) in enumerate(zip(found, tensors, strict=True)):
        if leaf.data is None or leaf.path == MASTER:
            box = Box.whole(leaf.shape)
            key = state_key(index, number, name, leaf, box)
            chunk = shelves.put("optimizer", 0, key, box, tensor)
            stored[number] = Stored(leaf.dtype, leaf.shape, (chunk,))
    node = with_leaves(node, lambda n, leaf: [*leaf[:-1], None] if n in stored else leaf)
    per_element = tuple(leaf.shape == shape for leaf in found)
    return SavedParam(name, shape, dtype, True, Tree(node, stored), per_element)


def _kind(optimizer_class: str | None) -> str | None:
    """The full name of a class, given that or the short name of one of torch's."""
    if optimizer_class is None or "." in optimizer_class:
        return optimizer_class
    cls = getattr(torch.optim, optimizer_class, None)
    if not isinstance(cls, type):
        raise CheckpointError(
            f"torch.optim has no class {optimizer_class!r}; give the full name, such as "
            "some.module.Lion"
        )
    return full_name(cls)
