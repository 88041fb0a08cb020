"""Checkpoints that load anywhere, are complete or not there, and run no code.

Reading order: `limits` (what may be claimed) and `tree` (state as text and tensors), `exchange` and
`plain` (state between ranks, and in plain state dicts); `safetensors`, `folder` and `contents` (a
file, a folder of files, what is in them); `names`, `shelves`, `job` and `save`; `read`, `match` and
`load`. Without ranks: `offline` (plain dicts), `summary`, `reshard`, `export` and `scratch`,
`importing` and `foreign`. For `torch.distributed.checkpoint`: `stand_in`, `portable`, `stateful`;
for other programs' state dicts: `outside` and `gaps`.
"""

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.export import export
from shardstep.checkpoint.folder import latest
from shardstep.checkpoint.foreign import import_file
from shardstep.checkpoint.importing import import_state_dict
from shardstep.checkpoint.load import Loaded, load
from shardstep.checkpoint.offline import state_dict, verify, weights
from shardstep.checkpoint.outside import by_name
from shardstep.checkpoint.reshard import reshard
from shardstep.checkpoint.save import AsyncSave, async_save, save
from shardstep.checkpoint.stateful import Sharded
from shardstep.checkpoint.summary import is_checkpoint, listing, summary

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
    "save",
    "state_dict",
    "summary",
    "verify",
    "weights",
]
