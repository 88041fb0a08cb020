"""The hosts of a group's ranks, and what NCCL uses between them.

NCCL serves a group with one thread. Over plain sockets that thread is slower than a fast network.
Collectives that take turns in two groups have two threads. That helps only while the threads need
not wait for cores.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

from shardstep.comm.api import Comm, all_gather_json

IN_PARALLEL = 2
"""Collectives that run beside each other, over plain sockets."""

CORES_PER_RANK = 5
"""Cores that a rank needs for that: for its own threads, and one for each group of NCCL."""

CLOUDS = frozenset({"0x1d0f", "0x1ae0"})
"""Makers of network cards (Amazon, Google) for which NCCL uses several threads for each group."""

DEVICES = Path("/sys/class")


def num_parallel_groups(comm: Comm) -> int:
    """Return in how many groups collectives of NCCL are to take turns. Called on every rank."""
    machine = socket.gethostname()
    # NCCL tells hosts apart in this way.
    host = os.environ.get("NCCL_HOSTID") or machine
    # Ranks of other groups may be on this machine, too, which `torchrun` counts.
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    num_local = int(given) if given.isdecimal() else 1
    said = all_gather_json(comm, [host, machine, num_local, num_cores(), over_plain_sockets()])
    num_known = Counter(machine for _, machine, *_ in said)
    helps = all(
        plain and cores >= CORES_PER_RANK * max(num_local, num_known[machine])
        for _, machine, num_local, cores, plain in said
    )
    return IN_PARALLEL if helps and len({host for host, *_ in said}) > 1 else 1


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def over_plain_sockets() -> bool:
    """Return whether NCCL uses sockets between hosts, and one thread for them."""
    settings = os.environ
    if {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"} & settings.keys():
        return False
    may_use_rdma = settings.get("NCCL_IB_DISABLE", "0") == "0" and any(DEVICES.glob("infiniband/*"))
    net = settings.get("NCCL_NET") or ("IB" if may_use_rdma else "Socket")
    asked = settings.get("NCCL_SOCKET_IFNAME", "")
    prefixes = () if asked.startswith("^") else tuple(asked.lstrip("=").split(","))
    makers = set()
    for path in DEVICES.glob("net/*/device/vendor"):
        if path.parts[-3].startswith(prefixes or ""):
            with suppress(OSError):
                makers.add(path.read_text().strip())
    return net.lower() == "socket" and not makers & CLOUDS
