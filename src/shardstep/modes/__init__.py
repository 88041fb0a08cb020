"""The ways of using the optimizer: drop-in, `module=`, inside DDP; uneven inputs."""

from shardstep.modes.base import Mode
from shardstep.modes.drop_in import DropIn
from shardstep.modes.inside_ddp import InsideDDP
from shardstep.modes.module import ModuleMode

__all__ = ["DropIn", "InsideDDP", "Mode", "ModuleMode"]
