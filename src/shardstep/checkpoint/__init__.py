"""Atomic checkpoints that load at any world size and layout, and run no code.

Reading order: `files`, `safetensors`, `format` and `staging` (on disk); `inputs`,
`write` and `save`; `read`, `match`, `load` and `resume`. Without ranks: `offline`.
For `torch.distributed.checkpoint`: `dcp`. `shardstep.state` turns state into text and tensors.
"""

from shardstep.checkpoint.dcp.stateful import Sharded
from shardstep.checkpoint.files import CheckpointError
from shardstep.checkpoint.load import Loaded, load
from shardstep.checkpoint.offline.export import export
from shardstep.checkpoint.offline.imports import import_file, import_state_dict
from shardstep.checkpoint.offline.reshard import reshard
from shardstep.checkpoint.offline.summary import is_checkpoint, listing, summary
from shardstep.checkpoint.read import state_dict, verify, weights
from shardstep.checkpoint.resume import latest, resume
from shardstep.checkpoint.save import AsyncSave, async_save, save
from shardstep.state.named_dict import by_name

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "Loaded",
    "Sharded",
    "async_save",
    "by_name",
    "export",
    "import_file",
    "import_state_dict",
    "is_checkpoint",
    "latest",
    "listing",
    "load",
    "reshard",
    "resume",
    "save",
    "state_dict",
    "summary",
    "verify",
    "weights",
]
