"""Goes seeded walks from the command line and prints a digest of each, to compare two source trees.

    PYTHONPATH=src:tests/support python tests/support/run_walks.py \
        --mode "module 16 bits" --seeds 1000:1300 --ranks 2

A line is `mode seed digest`, and what went wrong if anything did. The digest is of the parameters
on every rank after each act, and of the optimizer's state at the end. Two source trees compute the
same if they print the same lines. `sys.path` says which tree is walked; the tests' support files
and the walks are those next to this file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # without DDP's warnings of unused parameters
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import torch.distributed as dist
from models import world_size
from ranks import RankFailure, run_ranks
from walk_modes import MODES
from walks import Walk, contiguous

ACTS = 40
AT_A_TIME = 10  # seeds for one start of the ranks


def add(digest: Any, value: Any) -> None:
    """Add a value to a digest: tensors by form and bits, containers by their contents."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(bytes(contiguous(value).view(-1).view(torch.uint8).tolist()))
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for inner in value:
            add(digest, inner)
    else:
        digest.update(repr(value).encode())


class Watched:
    """A walk whose parameters are added to a digest after each act, and state at its end."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.digest = hashlib.sha256()
        self._check, self._leave = walk.check, walk.leave
        walk.check, walk.leave = self.check, self.leave  # type: ignore[method-assign]

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.walk.sharded.param_groups for param in group["params"]]

    def check(self) -> None:
        self._check()
        add(self.digest, self.walk.acts[-1].partition(" ")[0])
        add(self.digest, [param.data for param in self._params()])

    def leave(self) -> None:
        add(self.digest, [self.walk.sharded.full_state(param) for param in self._params()])
        add(self.digest, [self.walk.sharded.full_master(param) for param in self._params()])
        self._leave()


def go(mode: str, seeds: range) -> list[str]:
    """Go one walk for each seed. Called on every rank; the digests of all ranks make one."""
    lines = []
    warnings.simplefilter("ignore")
    for seed in seeds:
        watched = Watched(MODES[mode](seed))
        wrong = ""
        try:
            watched.walk.go(ACTS)
            wrong = "; ".join(watched.walk.wrong)
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {error}".partition("\n")[0]
        every: list[Any] = [watched.digest.hexdigest()] * world_size()
        if world_size() > 1:
            dist.all_gather_object(every, watched.digest.hexdigest())
        digest = hashlib.sha256(" ".join(every).encode()).hexdigest()[:16]
        lines.append(f"{mode} {seed} {digest} {wrong}".rstrip())
    return lines


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, go the walks and return 1 if any went wrong."""
    parser = argparse.ArgumentParser(description="Go seeded walks; print a digest of each.")
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    parser.add_argument("--seeds", default="0:10", help="a range, first:end")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args(argv)
    first, end = map(int, given.seeds.split(":"))
    failed = False
    for mode in MODES if given.mode == "all" else [given.mode]:
        for start in range(first, end, AT_A_TIME):
            seeds = range(start, min(end, start + AT_A_TIME))
            try:
                lines = run_ranks(go, given.ranks, mode, seeds)[0]
            except RankFailure as error:
                lines = [f"{mode} {seeds} failed: {error}"]
            failed |= any(len(line.split()) > len(mode.split()) + 2 for line in lines)
            print(*lines, sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    import run_walks  # so that ranks can import `go`

    sys.exit(run_walks.main())
