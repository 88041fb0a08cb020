"""Make checkpoints from other programs' state: state dicts, `torch.save` files, safetensors.

A file of `torch.save` is mapped and read with `weights_only=True`, so no code in it runs.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.files import CheckpointError, Stages, no_stages, read_json, require
from shardstep.checkpoint.format import (
    NO_MASTER,
    Contents,
    SavedModel,
    SavedOptimizer,
    SavedParam,
    Tree,
    attach_masters,
    master_in_file,
)
from shardstep.checkpoint.inputs import ModelState, split_state_dict
from shardstep.checkpoint.offline.class_name import check_class_name
from shardstep.checkpoint.offline.summary import is_checkpoint
from shardstep.checkpoint.safetensors import File, Source, Streamed
from shardstep.checkpoint.write import (
    HF_INDEX,
    WEIGHTS,
    FileLayout,
    made_by,
    write_alone,
)
from shardstep.params.names import strip_wrapper_prefixes
from shardstep.plan import Box
from shardstep.state.torch_dict import KNOWN_KEYS
from shardstep.state.tree import encode, is_counts

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
    """Make a checkpoint of plain state dicts, for `load` at any world size.

    Called in one process. Prefixes of wrappers (`module.`, `_orig_mod.`) are removed from names.

    Args:
        path: the folder to make; it must not exist.
        optimizer: the state dict of an unsharded optimizer. Its parameters are numbers, as in
            `torch.optim`, or names, as in `torch.distributed.checkpoint`.
        model: the state dict of the model.
        extra: anything else: numbers, text, tensors, lists and dicts of these.
        names: names of the optimizer's parameters, in the order of its groups, if the dict has
            none. Without names, `load` matches parameters by position.
        optimizer_class: the optimizer's class, such as `"AdamW"` or `"some.module.Lion"`. `load`
            does not compare classes if it is None.
        stages: receives progress.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: if the dicts do not describe an optimizer and a model.
        FileExistsError: if `path` exists.
        OSError: if it cannot be written.
    """
    files = FileLayout(1, {0})
    try:
        saved_model = saved_optimizer = None
        if model is not None:
            if not model or not all(isinstance(name, str) for name in model):
                raise CheckpointError("this is not a model's state dict: its keys are not names")
            state = split_state_dict(_strip_names(model, "the model's state dict"))
            saved_model = files.add_model(state)
        if optimizer is not None:
            saved_optimizer = _save_optimizer(files, optimizer, saved_model, names, optimizer_class)
        saved_extra = None if extra is None else files.add_value("extra", extra)
    except TypeError as error:
        raise CheckpointError(str(error)) from error
    contents = Contents(saved_optimizer, saved_model, saved_extra, {**made_by(1), "imported": True})
    return write_alone(path, files, contents, stages)


def import_file(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    names: Sequence[str] | None = None,
    optimizer_class: str | None = None,
    stages: Stages = no_stages,
) -> Path:
    """Make a checkpoint of another program's file, or of a folder of safetensors.

    Args:
        file: one of:

            - a file of `torch.save` with an optimizer's state dict, a model's, or a dict of them.
              Other values become the checkpoint's `extra`, if a checkpoint can hold them.
            - a model's weights in safetensors: a file, or a folder with `model.safetensors` or
              with several files and their index.
        path: the folder to make; it must not exist.
        model_key: the key of the model's state dict in the file, if it is not a usual one.
        optimizer_key: the key of the optimizer's state dict. Without it, a usual key counts, or
            the only value with `state` and `param_groups`.
        names, optimizer_class, stages: as for `import_state_dict`.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: if the file is damaged, has neither a model nor an optimizer, or can only
            be read by running code from it.
        FileExistsError: if `path` exists.
        OSError: if it cannot be written.
    """
    source = Path(file)
    if is_checkpoint(source):
        raise CheckpointError(
            f"{source} is a shardstep checkpoint already; load it as it is, or rewrite it with "
            "reshard or export"
        )
    require(source.exists(), f"{source} does not exist")
    if source.is_dir() or source.suffix in (".safetensors", ".json"):
        if any(each is not None for each in (model_key, optimizer_key, names, optimizer_class)):
            raise ValueError(f"{source} has weights only; leave out keys, names and the class")
        return _import_safetensors(source, Path(path), stages)
    optimizer, model, extra = _find_parts(source, _read_torch(source), model_key, optimizer_key)
    return import_state_dict(
        path,
        optimizer,
        model,
        extra or None,
        names=names,
        optimizer_class=optimizer_class,
        stages=stages,
    )


# ------------------------------------------------------------------------- torch.save files


def _read_torch(file: Path) -> Any:
    mapped = zipfile.is_zipfile(file)  # the format before torch 1.6 cannot be mapped
    with file.open("rb") as opened:
        is_pickle = opened.read(1) == pickle.PROTO
    require(mapped or is_pickle, f"{file}: is neither a file of torch.save nor safetensors")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: holds more than tensors, numbers, text, lists and dicts, and reading that "
            "could run any code; load it where you trust it, and save only its state dicts"
        ) from error
    except OSError:
        raise
    except Exception as error:  # torch raises anything for a file of another kind
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{file}: cannot be read as a file of torch.save ({reason})"
        ) from error


def _find_parts(
    file: Path, value: Any, model_key: str | None, optimizer_key: str | None
) -> tuple[Any, Any, dict[Any, Any]]:
    """Return the optimizer, the model and the rest of a file."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{file}: expected a state dict, got a {type(value).__name__}")
    keys = ", ".join(map(repr, value))
    for key in (model_key, optimizer_key):
        if key is not None and key not in value:
            raise CheckpointError(f"{file}: has no {key!r}; it has {keys}")
    if model_key is None and optimizer_key is None and _is_optimizer(value):
        return value, None, {}
    model_key = model_key or next((key for key in MODEL_KEYS if key in value), None)
    optimizer_key = optimizer_key or next((key for key in OPTIMIZER_KEYS if key in value), None)
    if model_key is None and optimizer_key is None:
        if all(isinstance(each, torch.Tensor) for each in value.values()):
            return None, value, {}
        raise CheckpointError(
            f"{file}: neither a model nor an optimizer was found; name their keys, out of {keys}"
        )
    if optimizer_key is None:
        found = [key for key, each in value.items() if key != model_key and _is_optimizer(each)]
        optimizer_key = found[0] if len(found) == 1 else None
    model = None if model_key is None else value[model_key]
    optimizer = None if optimizer_key is None else value[optimizer_key]
    if isinstance(optimizer, list) and len(optimizer) == 1:
        optimizer = optimizer[0]  # as Lightning saves it
    for key, each in ((model_key, model), (optimizer_key, optimizer)):
        if each is not None and not isinstance(each, Mapping):
            raise CheckpointError(f"{file}: {key!r} is a {type(each).__name__}, not a state dict")
    rest = {key: each for key, each in value.items() if key not in (model_key, optimizer_key)}
    if rest.keys() == {"extra"} and isinstance(rest["extra"], Mapping):
        rest = dict(rest["extra"])  # as `export` writes it
    for key in list(rest):
        try:
            encode({key: rest[key]})
        except TypeError as error:
            warnings.warn(f"{file}: {key!r} is left out: {error}", stacklevel=2)
            del rest[key]
    return optimizer, model, rest


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


# ------------------------------------------------------------------------------ safetensors


def _import_safetensors(source: Path, path: Path, stages: Stages) -> Path:
    """Copy weights from file to file, one chunk at a time."""
    files = FileLayout(1, {0})
    with ExitStack() as opened:
        tensors: dict[str, Source] = {}
        file_of: dict[str, str] = {}
        paths, index = weight_files(source)
        for file in paths:
            # Folders of a download cache are full of links.
            weights = opened.enter_context(File(file.resolve()))
            for name, entry in weights.entries.items():
                if name in tensors:
                    raise CheckpointError(f"{file}: tensor {name!r} is in {file_of[name]} too")
                read = partial(weights.read, name, entry)
                tensors[name] = Streamed(entry.dtype, entry.shape, read)
                file_of[name] = file.name
        for name, listed in index.items():
            if file_of.get(name) != listed:
                expected = paths[0].parent / listed
                raise CheckpointError(f"{expected}: there should be a tensor {name!r}")
        model = files.add_model(ModelState(_strip_names(tensors, str(source)), {}, {}))
        contents = Contents(model=model, made_by={**made_by(1), "imported": True})
        return write_alone(path, files, contents, stages)


def weight_files(source: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files with a model's weights, and the index from tensors to files, if any."""
    found = source
    if source.is_dir():
        if (source / WEIGHTS).exists():
            return [source / WEIGHTS], {}
        if not (source / HF_INDEX).exists():
            raise CheckpointError(f"{source}: has neither {WEIGHTS} nor {HF_INDEX}")
        found = source / HF_INDEX
    if found.suffix != ".json":
        return [found], {}
    text = read_json(found.resolve())
    index = text.get("weight_map") if isinstance(text, dict) else None
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{found}: has no weight_map")
    names = sorted(set(index.values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{found}: leads out of the folder")
    return [found.parent / name for name in names], index


# ------------------------------------------------------------------------------ state dicts


def _strip_names(tensors: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the tensors under names without prefixes of wrappers."""
    names = strip_wrapper_prefixes(tensors)
    if len(set(names)) != len(names):
        raise CheckpointError(f"{what}: two tensors have the same name without wrappers")
    return dict(zip(names, tensors.values(), strict=True))


def _save_optimizer(
    files: FileLayout,
    state_dict: Mapping[str, Any],
    model: SavedModel | None,
    names: Sequence[str] | None,
    optimizer_class: str | None,
) -> SavedOptimizer:
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    masters, rounded = state_dict.get("masters", {}), state_dict.get("rounding_step", 0)
    listed = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not listed:
        raise CheckpointError(
            "this is not the state dict of an optimizer: it has no 'state' and 'param_groups' as "
            "torch.optim writes them"
        )
    by_param = isinstance(masters, Mapping)
    require(
        by_param and all(isinstance(each, torch.Tensor) for each in masters.values()),
        "'masters' of the optimizer's state dict are not tensors by parameter",
    )
    require(is_counts([rounded]), f"'rounding_step' of the optimizer's state dict is {rounded!r}")
    keys = [key for group in groups for key in group["params"]]
    class_name = check_class_name(optimizer_class, [state.get(key) for key in keys], groups)
    global_state = {key: value for key, value in state.items() if key not in set(keys)}
    unknown = [key for key in global_state if not isinstance(key, str)]
    unknown += [key for key in masters if key not in set(keys)]
    require(
        not unknown,
        f"the optimizer's state dict has state for {unknown[:5]}, which no group has",
    )
    state = attach_masters(state, masters)
    called = _param_names(groups, keys, names)
    positional = called is None
    called = called or [f"param {index}" for index in range(len(keys))]
    params = [
        _save_param(files, index, name, state.get(key), None if positional else model)
        for index, (key, name) in enumerate(zip(keys, called, strict=True))
    ]
    extra_entries = {key: value for key, value in state_dict.items() if key not in KNOWN_KEYS}
    return SavedOptimizer(
        class_name,
        positional,
        stepped=bool(state),
        params=tuple(params),
        groups=files.add_groups(groups, called),
        global_state=files.add_value("state", global_state),
        extra_entries=files.add_value("beside", extra_entries),
        rounding_step=rounded,
    )


def _param_names(
    groups: Sequence[Mapping[str, Any]], keys: Sequence[Any], given: Sequence[str] | None
) -> list[str] | None:
    """Return the parameters' names, or None if they have numbers only."""
    if given is not None:
        if len(given) != len(keys):
            raise CheckpointError(
                f"{len(given)} names were given for the {len(keys)} parameters of the optimizer"
            )
        known: list[Any] = list(given)
    elif all(isinstance(key, str) for key in keys):
        known = list(keys)
    else:
        known = [name for group in groups for name in group.get("param_names", ())]
    if len(known) != len(keys) or not keys:
        return None
    names = strip_wrapper_prefixes(map(str, known))
    if len(set(names)) != len(names):
        raise CheckpointError("two parameters of the optimizer have the same name")
    return names


def _shape_and_dtype(
    name: str, tensors: Sequence[torch.Tensor], model: SavedModel | None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Take a parameter's form from the model, or guess it from the tensors of its state.

    A wrong guess does no harm: `load` refuses a shape that is not the parameter's.
    """
    if model is not None:
        stored = model.tensors.get(model.aliases.get(name, name))
        if stored is not None:
            return stored.shape, stored.dtype
    # All tensors but scalar counters should have the parameter's shape.
    shapes = {tuple(tensor.shape) for tensor in tensors if tensor.dim()}
    if not tensors or len(shapes) > 1:
        raise CheckpointError(
            f"the shape of parameter {name!r} cannot be told from its state"
            f"{'' if tensors else ', since it has none'}; give the model's state dict too, and "
            "names for the parameters if the optimizer's has none"
        )
    shape = shapes.pop() if shapes else ()
    return shape, [tensor for tensor in tensors if tuple(tensor.shape) == shape][-1].dtype


def _save_param(
    files: FileLayout, index: int, name: str, state: Any, model: SavedModel | None
) -> SavedParam:
    if not isinstance(state, Mapping | None):
        raise CheckpointError(
            f"the state of parameter {name!r} is a {type(state).__name__}, and not a dict"
        )
    try:
        node, tensors = encode(state or {})
    except TypeError as error:
        raise CheckpointError(f"parameter {name!r}: {error}") from error
    tree = Tree(master_in_file(node), {}) if state else None
    param = SavedParam(name, *_shape_and_dtype(name, tensors, model), True, tree)
    require(param.master_fits, f"the master of {name!r} {NO_MASTER}")
    return files.add_state(index, param, [(0, Box.whole(param.shape))], lambda n, box: tensors[n])
