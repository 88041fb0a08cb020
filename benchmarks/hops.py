"""The walk of one step, hop by hop: which functions of the library run, in order of first call.

    python benchmarks/hops.py --mode module

A hop is a function of the library that runs in an iteration, counted once; `->` marks those that
another file calls. One process claims two ranks, and communication returns at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

import shardstep
from overhead import _Instant
from shardstep import ZeroRedundancyOptimizer

PACKAGE = Path(shardstep.__file__).parent


class Hops:
    """Records calls of functions of the library."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Note a call."""
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        here = self._file(frame)
        caller = frame.f_back
        while caller is not None and self._file(caller) is None:
            caller = caller.f_back
        if here is not None:
            crossing = caller is None or self._file(caller) != here
            name = f"{here} {frame.f_code.co_qualname}"
            self.seen[name] = self.seen.get(name, False) or crossing

    def _file(self, frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def main() -> int:
    """Print the hops of one iteration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["module", "drop-in"], default="module")
    options = parser.parse_args()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    given: dict[str, Any] = {"module": model} if options.mode == "module" else {}
    with mock.patch("shardstep.optimizer.connect", return_value=_Instant()):
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **given)

    def iterate() -> None:
        model(torch.ones(2, 64)).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3):  # the first steps check more
        iterate()
    hops = Hops()
    sys.setprofile(hops)
    iterate()
    sys.setprofile(None)
    for number, (hop, crossing) in enumerate(hops.seen.items(), start=1):
        print(f"{number:3} {'->' if crossing else '  '} {hop}")
    files = {hop.split()[0] for hop in hops.seen}
    across = sum(hops.seen.values())
    print(
        f"{len(hops.seen)} functions, {across} of them called from another file, {len(files)} files"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
