"""Does all acts of the walks in turn for some minutes, in every mode, and watches resources.

    python tests/faults/soak.py --minutes 20
    python tests/faults/soak.py --cycles 300 --modes "module 32 bits" --acts freeze,iterate

Ranks hold one walk per mode, next to its unsharded optimizer. Each cycle does every act in every
mode, saves, goes a short walk with other optimizers, and notes memory, descriptors and threads.
These must be as they were after the first third of the time. Torch itself keeps some memory of each
process group that was destroyed. The ranks measure how much, and it is taken off.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in (".", "src", "tests/support", "examples")]
# torch keeps a record of the last 2,000 collectives, about 1 KB each.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
# Ranks take each object from malloc, which can tell how much is in use.
os.environ.setdefault("PYTHONMALLOC", "malloc")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch.distributed.distributed_c10d import _world  # noqa: E402
from walk_modes import MODES  # noqa: E402
from walks import Walk  # noqa: E402

from shardstep import checkpoint  # noqa: E402
from shardstep.comm import connect  # noqa: E402

SHORT_WALKS_ONLY = {"add", "hook", "freeze"}
"""Acts that pile up: they add to a model, or leave less and less of it to train."""


def cycle(walk: Walk, mode: str, folder: Path, acts: list[str], number: int) -> None:
    """Do these acts, or else all of them, a short walk, and two saves."""
    for act in acts or sorted(walk.weights.keys() - SHORT_WALKS_ONLY):
        walk.do(act)
        assert not walk.wrong, f"{mode}: {walk.wrong} after {walk.acts}"
    walk.acts.clear()
    walk.sharded.verify()
    if not acts:
        short = MODES[mode](walk.seed)
        short.go(9)
        assert not short.wrong, f"{mode}: {short.wrong} after {short.acts}"
        path = folder / mode.replace(" ", "-")
        checkpoint.save(path / f"now-{number}", walk.sharded, walk.models[1], keep_last=2)
        checkpoint.async_save(path / f"later-{number}", walk.sharded, keep_last=2).wait()


class _Malloc(ctypes.Structure):
    """What glibc's `mallinfo2` returns: ten counts, of which two are the bytes in use."""

    _fields_ = [("counts", ctypes.c_size_t * 10)]

    @property
    def in_use(self) -> int:
        """The bytes in use, in the heaps and in mappings of their own."""
        return self.counts[7] + self.counts[4]


def resources() -> dict[str, float]:
    """Return this process's resources, memory in megabytes. Called on every rank."""
    gc.collect()
    dist.barrier()
    # Connections of freed optimizers end when another is made. This one ends at the next call.
    connect(None).new_connection()
    # torch keeps an empty list, with its name, for each process group that was destroyed.
    for name in [name for name, groups in _world.tags_to_pg.items() if not groups]:
        del _world.tags_to_pg[name]
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Malloc
    # Give back what malloc keeps of freed memory: threads that came and went leave much of it.
    libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "memory in use": libc.mallinfo2().in_use / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "groups made": _world.group_count,
    }


def kept_of_a_group() -> float:
    """Return the megabytes that torch keeps of a process group of two ranks that was destroyed.

    Called on every rank.
    """

    def groups(number: int) -> float:
        for _ in range(number):
            group = dist.new_group(backend="gloo")
            dist.all_reduce(torch.zeros(1), group=group)
            dist.barrier()  # a rank that destroys it early ends it for one that still connects
            dist.destroy_process_group(group)
        return resources()["memory in use"]

    before = groups(50)
    return (groups(300) - before) / 300


def soak(
    minutes: float, cycles: float, folder: Path, modes: list[str], acts: list[str]
) -> list[dict[str, float]]:
    """Run cycles until the time is over. Return the resources after each."""
    warnings.simplefilter("ignore")
    # Names come and go, until Python's table of them doubles, by 4 MB. Let it do so now.
    for text in [f"name {number}" for number in range(200_000)]:
        sys.intern(text)
    walks = {mode: MODES[mode](0) for mode in modes}
    end = time.monotonic() + 60 * minutes
    seen: list[dict[str, float]] = []
    while True:
        # One clock decides, so that all ranks do as many cycles.
        over = torch.tensor(float(time.monotonic() > end or len(seen) >= cycles))
        dist.broadcast(over, 0)
        if over:
            kept, first = kept_of_a_group(), seen[0]["groups made"]
            for each in seen:
                each["kept by torch"] = kept * (each.pop("groups made") - first)
                each["memory"] -= each["kept by torch"]
                each["memory in use"] -= each["kept by torch"]
            return seen
        for mode, walk in walks.items():
            cycle(walk, mode, folder, acts, len(seen))
        seen.append(resources())


def growth(seen: list[dict[str, float]]) -> dict[str, float]:
    """Return by how much the least of each resource grew from the second third to the last."""
    third = max(1, len(seen) // 3)
    early, late = seen[third : 2 * third] or seen, seen[-third:]
    return {key: min(e[key] for e in late) - min(e[key] for e in early) for key in seen[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--cycles", type=float, default=float("inf"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--acts", default="", help="those to do, separated by commas; all")
    parser.add_argument("--megabytes", type=float, default=4.0, help="growth allowed to a rank")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        modes, acts = given.modes.split(","), [act for act in given.acts.split(",") if act]
        args = (given.minutes, given.cycles, Path(folder), modes, acts)
        ranks = run_ranks(soak, given.ranks, *args, timeout=60 * given.minutes + 300, fresh=True)
        failed = False
        for rank, seen in enumerate(ranks):
            grown = growth(seen)
            print(f"rank {rank}: {len(seen)} cycles, at first {seen[0]}, at last {seen[-1]}")
            print(f"rank {rank}: growth {grown}")
            for key in ("memory", "memory in use"):
                tenths = [round(each[key], 1) for each in seen[:: max(1, len(seen) // 10)]]
                print(f"rank {rank}: megabytes of {key} after each tenth {tenths}")
            del grown["kept by torch"]
            megabytes = max(grown.pop("memory"), grown.pop("memory in use"))
            failed |= megabytes > given.megabytes or any(n > 0 for n in grown.values())
        return int(failed)
    return 1


if __name__ == "__main__":
    import soak as this  # so that ranks can import it

    sys.exit(this.main())
