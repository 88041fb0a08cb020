"""Checkpoints that load anywhere, are complete or not there, and run no code.

Reading order: `limits` (what may be claimed) and `tree` (state as text and tensors), `exchange` and
`plain` (state between ranks, and in plain state dicts); `safetensors`, `folder` and `contents` (a
file, a folder of files, what is in them); `names`, `shelves`, `job` and `save`; `read`, `match` and
`load`; `offline`.
"""

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.folder import latest
from shardstep.checkpoint.load import Loaded, load
from shardstep.checkpoint.offline import state_dict, weights
from shardstep.checkpoint.save import AsyncSave, async_save, save

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "Loaded",
    "async_save",
    "latest",
    "load",
    "save",
    "state_dict",
    "weights",
]
