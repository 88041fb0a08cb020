"""The only door to collectives.

A `Comm` moves raw bytes, so every dtype travels the same way, and counts the bytes sent.
"""

from shardstep.comm.api import (
    Comm,
    Ledger,
    Operation,
    SoloComm,
    Work,
    all_gather_json,
    all_gather_rows,
    broadcast,
    naming,
    span,
)
from shardstep.comm.group import GroupComm, connect, refuse_stray_rank
from shardstep.comm.headers import BatchSkippedError, OutOfStepError

__all__ = [
    "BatchSkippedError",
    "Comm",
    "GroupComm",
    "Ledger",
    "Operation",
    "OutOfStepError",
    "SoloComm",
    "Work",
    "all_gather_json",
    "all_gather_rows",
    "broadcast",
    "connect",
    "naming",
    "refuse_stray_rank",
    "span",
]
