"""The only door to collectives: how bytes travel on each backend, and how many did.

Everything above talks to a `Comm`. It moves raw bytes, so that every dtype travels alike, and it
counts what it sends. There are two: `SoloComm` for one rank, and `GroupComm` over a process group.
"""

from shardstep.comm.api import Comm, Ledger, SoloComm, Work
from shardstep.comm.group import GroupComm, connect, refuse_stray_rank

__all__ = ["Comm", "GroupComm", "Ledger", "SoloComm", "Work", "connect", "refuse_stray_rank"]
