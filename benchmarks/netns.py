"""Hosts on one machine: network namespaces joined by a switch, each link limited to a rate.

```
   host 0            host 1            host 2
   eth0 10.77.0.1    eth0 10.77.0.2    eth0 10.77.0.3
     │ tbf ↓↑ tbf      │                 │
   port0 ──────────── port1 ─────────── port2      the bridge, in a namespace of its own
```

Every name carries the process id of its maker, so that two runs never meet and the remains of a
run that was killed can be told from those of a run still alive. Nothing is connected to the
machine's own network. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
"""What every host calls its one interface."""

MAX_HOSTS = 250

_PREFIX = "shardstep-bench"
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True)
class Host:
    """One namespace on the switch; a process of this machine if it has none."""

    index: int
    namespace: str
    address: str
    interface: str = INTERFACE
    port: int = 29500

    def command(self, argv: list[str]) -> list[str]:
        """`argv` as run inside this host. The process keeps its id: `ip` execs it."""
        if not self.namespace:
            return argv
        return ["ip", "netns", "exec", self.namespace, *argv]


@contextmanager
def switched_hosts(num_hosts: int, rate: str) -> Iterator[list[Host]]:
    """Make the hosts, and remove them however the block is left.

    Args:
        num_hosts: how many; one rank is meant to run on each.
        rate: of each link in each direction, such as `1gbit` or `250mbit`; `none` leaves the
            links as fast as the machine is.

    The caller ends the processes it started in the hosts before leaving the block.
    """
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise ValueError(f"num_hosts must be between 1 and {MAX_HOSTS}, got {num_hosts}")
    bits_per_second(rate)
    _require_tools()
    _remove(_left_by_the_dead())
    prefix = f"{_PREFIX}-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [
        Host(index=i, namespace=f"{prefix}-host{i}", address=f"10.77.0.{i + 1}")
        for i in range(num_hosts)
    ]
    try:
        _add_switch(switch)
        for host in hosts:
            _add_host(host, switch, rate)
        yield hosts
    finally:
        _remove([name for name in _namespaces() if name.startswith(f"{prefix}-")])


@contextmanager
def local_hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Give each rank the machine itself, over its loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield [Host(index, "", "127.0.0.1", "lo", port) for index in range(num_hosts)]


def bits_per_second(rate: str) -> float | None:
    """`1gbit` as 1e9, `none` as None."""
    if rate == "none":
        return None
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate must be 'none' or look like '1gbit' or '250mbit', got {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


def _add_switch(switch: str) -> None:
    _run(f"ip netns add {switch}")
    _run(f"ip -n {switch} link add bridge type bridge")
    _run(f"ip -n {switch} link set bridge up")


def _add_host(host: Host, switch: str, rate: str) -> None:
    inside, port = host.namespace, f"port{host.index}"
    _run(f"ip netns add {inside}")
    _run(f"ip -n {inside} link set lo up")
    _run(f"ip link add {INTERFACE} netns {inside} type veth peer name {port} netns {switch}")
    _run(f"ip -n {inside} address add {host.address}/24 dev {INTERFACE}")
    _run(f"ip -n {switch} link set {port} master bridge")
    _shape(inside, INTERFACE, rate)
    _shape(switch, port, rate)
    _run(f"ip -n {switch} link set {port} up")
    _run(f"ip -n {inside} link set {INTERFACE} up")


def _shape(namespace: str, device: str, rate: str) -> None:
    bits = bits_per_second(rate)
    if bits is None:
        return
    # The burst has to hold one 64 KiB segmentation-offload packet or the kernel cuts each one up,
    # and about a millisecond of traffic or the timer's grain costs throughput; more than that
    # would let a small message pass faster than the link.
    burst = max(128 * 1024, int(bits / 8 / 1000))
    _run(
        f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate} burst {burst} latency 50ms"
    )


def _require_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root: run this as root")


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def _left_by_the_dead() -> list[str]:
    mine = re.compile(rf"{_PREFIX}-(\d+)-")
    found = ((name, mine.match(name)) for name in _namespaces())
    return [name for name, match in found if match and not Path(f"/proc/{match[1]}").exists()]


def _remove(namespaces: list[str]) -> None:
    # The interfaces go with their namespace, and a veth with its peer.
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], check=False)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")
