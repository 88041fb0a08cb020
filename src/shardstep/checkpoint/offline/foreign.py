"""Files of other programs as checkpoints: what `torch.save` wrote, and weights in safetensors.

Files of torch's are read with `weights_only=True` and mapped, never unpickled in full.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.file_layout import HF_INDEX, WEIGHTS, FileLayout, made_by
from shardstep.checkpoint.format import Contents, SavedModel, Stored
from shardstep.checkpoint.offline.importing import import_state_dict, write_alone
from shardstep.checkpoint.safetensors import File, Source, Stages, Streamed, no_stages
from shardstep.checkpoint.staging import read_json
from shardstep.params.names import strip_wrapper_prefixes
from shardstep.plan import Box
from shardstep.state.tree import encode

MODEL_KEYS = ("model", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")


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
    """Make a checkpoint of a file of another program, or of a folder of safetensors.

    Args:
        file: a file that `torch.save` wrote, with an optimizer's state dict, a model's, or a dict
            of them; what else is in it becomes the checkpoint's `extra`, as far as a checkpoint can
            hold it. Or a model's weights in safetensors: a file, or a folder with
            `model.safetensors` or several files and their index.
        path: the folder to make; there must be nothing yet.
        model_key: under which key of the file the model's state dict is, if not under a usual one.
        optimizer_key: under which key the optimizer's is, if not under a usual one.
        names, optimizer_class, stages: as for `import_state_dict`.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: if the file is damaged, cannot be read without running code from it, or has
            neither a model nor an optimizer.
        FileExistsError: if there is something at `path`.
        OSError: if it cannot be written there.
    """
    source = Path(file)
    if source.is_dir() or source.suffix == ".safetensors":
        if any(each is not None for each in (model_key, optimizer_key, names, optimizer_class)):
            raise ValueError(f"{source} has weights alone: keys, names and classes have no place")
        return _import_safetensors(source, Path(path), stages)
    found = _find(source, _read_torch(source), model_key, optimizer_key)
    return import_state_dict(
        path,
        found.optimizer,
        found.model,
        found.extra or None,
        names=names,
        optimizer_class=optimizer_class,
        stages=stages,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What is in a file of torch's."""

    optimizer: Any
    model: Any
    extra: dict[Any, Any]


def _read_torch(file: Path) -> Any:
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # The format of before torch 1.6 cannot be mapped.
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: holds more than tensors, numbers, text, lists and dicts, and is not read, "
            "since that could run any code; load it where you trust it and save state dicts alone"
        ) from error
    except OSError:
        raise
    except Exception as error:
        # What is no such file can make torch raise anything.
        raise CheckpointError(
            f"{file}: cannot be read as a file of torch.save ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _find(file: Path, value: Any, model_key: str | None, optimizer_key: str | None) -> _Found:
    """Tell what in a file is the model's, what the optimizer's, and what neither."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{file}: has a {type(value).__name__} in it, and not a state dict")
    for key in (model_key, optimizer_key):
        if key is not None and key not in value:
            raise CheckpointError(
                f"{file}: has no {key!r}; it has {', '.join(repr(each) for each in value)}"
            )
    keyed = model_key is not None or optimizer_key is not None
    if not keyed and {"state", "param_groups"} <= value.keys():
        return _Found(value, None, {})
    model_key = model_key or next((key for key in MODEL_KEYS if key in value), None)
    optimizer_key = optimizer_key or next((key for key in OPTIMIZER_KEYS if key in value), None)
    if model_key is None and optimizer_key is None:
        if all(isinstance(each, torch.Tensor) for each in value.values()):
            return _Found(None, value, {})
        raise CheckpointError(
            f"{file}: neither a model nor an optimizer was found; say under which of its keys "
            f"they are: {', '.join(repr(each) for each in value)}"
        )
    optimizer = value[optimizer_key] if optimizer_key is not None else None
    if isinstance(optimizer, list) and len(optimizer) == 1:
        optimizer = optimizer[0]
    model = value[model_key] if model_key is not None else None
    for key, each in ((model_key, model), (optimizer_key, optimizer)):
        if each is not None and not isinstance(each, Mapping):
            raise CheckpointError(f"{file}: {key!r} is a {type(each).__name__}, not a state dict")
    rest = {key: each for key, each in value.items() if key not in (model_key, optimizer_key)}
    if rest.keys() == {"extra"} and isinstance(rest["extra"], Mapping):
        # What `export` wrote.
        rest = dict(rest["extra"])
    return _Found(optimizer, model, _holdable(file, rest))


def _holdable(file: Path, value: Mapping[Any, Any]) -> dict[Any, Any]:
    """What of this a checkpoint can hold."""
    kept = {}
    for key, each in value.items():
        try:
            encode({key: each})
        except TypeError as error:
            warnings.warn(f"{file}: {key!r} is left out: {error}", stacklevel=2)
        else:
            kept[key] = each
    return kept


def _weight_files(source: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that a model's weights are in, and which is said to have which tensor."""
    if not source.is_dir():
        return [source], {}
    if (source / WEIGHTS).exists():
        return [source / WEIGHTS], {}
    if not (source / HF_INDEX).exists():
        raise CheckpointError(f"{source}: has neither {WEIGHTS} nor {HF_INDEX}")
    said = read_json((source / HF_INDEX).resolve())
    where = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{source / HF_INDEX}: has no weight_map")
    files = sorted(set(where.values()))
    if any(Path(name).name != name for name in files):
        raise CheckpointError(f"{source / HF_INDEX}: leads out of the folder")
    return [source / name for name in files], where


def _streamed(file: File, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Streamed:
    return Streamed(dtype, shape, lambda box, target: file.read(name, dtype, shape, box, target))


def _import_safetensors(source: Path, path: Path, stages: Stages) -> Path:
    """Weights from file to file, a chunk at a time."""
    shelves = FileLayout(1, {0})
    with ExitStack() as opened:
        tensors: dict[str, Source] = {}
        file_of: dict[str, str] = {}
        files, where = _weight_files(source)
        for file in files:
            # A folder of a download cache is full of links; a checkpoint of ours has none.
            weights = opened.enter_context(File(file.resolve()))
            for name, entry in weights.entries.items():
                if name in tensors:
                    raise CheckpointError(f"{file}: tensor {name!r} is in {file_of[name]} too")
                tensors[name] = _streamed(weights, name, entry.dtype, entry.shape)
                file_of[name] = file.name
        for name, said in where.items():
            if file_of.get(name) != said:
                raise CheckpointError(f"{source / said}: there should be a tensor {name!r}")
        names = strip_wrapper_prefixes(tensors)
        if len(set(names)) != len(names):
            raise CheckpointError(f"{source}: two tensors have the same name without wrappers")
        saved = {}
        for name, tensor in zip(names, tensors.values(), strict=True):
            box = Box.whole(tensor.shape)
            chunk = shelves.put("model", 0, name, box, tensor)
            saved[name] = Stored(tensor.dtype, tuple(tensor.shape), (chunk,))
        model = SavedModel(saved, {}, shelves.tree("model", {}))
        contents = Contents(model=model, made_by={**made_by(1), "imported": True})
        return write_alone(path, shelves, contents, stages)
