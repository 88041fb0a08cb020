"""The cells of the table in docs/frameworks.md: a framework with and without sharding, compared.

A framework is a function that trains as its users do and returns everything that can be compared.
Every cell is "equal", to the bit, or says what differs.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten_with_path

COLUMNS = (
    "train",
    "accumulate",
    "clip",
    "bf16",
    "evaluate",
    "save",
    "resume",
    "resume at another N",
    "cross-load with plain",
)
PLAIN = "plain"
KINDS = ("drop-in", "module")
LAST_BIT = "norm to its last bit"
"""The norm of sharded gradients is summed in another order than that of whole ones."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    kind: str  # "plain", "drop-in" or "module"
    folder: Path  # for what it saves; a run saves after 2 of 4 steps
    accumulate: int = 1
    clip: float = 0.0
    bf16: bool = False
    resume: Path | None = None  # the folder of a run that was stopped after 2 steps


Run = Callable[[Trial], dict[str, Any]]
"""Returns "weights", "losses", "evaluated" and "saved" (what was written after 2 steps)."""


def compare(one: Any, other: Any) -> str:
    """Return "equal" if two trees of tensors and values are, or the first difference."""
    mine, theirs = (dict(tree_flatten_with_path(tree)[0]) for tree in (one, other))
    if mine.keys() != theirs.keys():
        names = ["".join(map(str, path)) for path in mine.keys() ^ theirs.keys()]
        return f"other entries: {sorted(names)[:3]}"
    for path, value in mine.items():
        a, b = value, theirs[path]
        same = (
            a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())  # state is consolidated there
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            else bool(np.all(a == b))
        )
        if not same:
            return f"{''.join(map(str, path))}: {a} and {b}"
    return "equal"


def rows(run: Run, kinds: Sequence[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return the cells of each kind, at the world size of this process group."""
    trials = {
        "train": {},
        "accumulate": {"accumulate": 2},
        "clip": {"clip": 0.05},
        "bf16": {"bf16": True},
    }
    with launched():

        def trained(kind: str) -> dict[str, dict[str, Any]]:
            return {
                name: repeatable(run, Trial(kind, folder / f"{name}-{kind}", **options))
                for name, options in trials.items()
            }

        def resumed(saver: str, loader: str) -> Any:
            trial = Trial(loader, folder / f"{saver}-{loader}", resume=folder / f"train-{saver}")
            return repeatable(run, trial)["weights"]

        plain, again = trained(PLAIN), resumed(PLAIN, PLAIN)
        found = {}
        for kind in kinds:
            mine = trained(kind)
            row = {
                name: compare(
                    [mine[name][key] for key in TRAINED], [plain[name][key] for key in TRAINED]
                )
                for name in trials
            }
            if row["clip"] != "equal":
                row["clip"] = compare_clipped(mine["clip"], plain["clip"])
            row["evaluate"] = compare(mine["train"]["evaluated"], plain["train"]["evaluated"])
            row["save"] = compare(mine["train"]["saved"], plain["train"]["saved"])
            row["resume"] = compare(resumed(kind, kind), again)
            crosswise = [resumed(kind, PLAIN), resumed(PLAIN, kind)]
            row["cross-load with plain"] = compare(crosswise, [again, again])
            found[kind] = row
        return found


TRAINED = ("weights", "losses", "norms")


def compare_clipped(mine: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return `LAST_BIT` if the norms differ by no more than that, and with them the weights."""
    norms = [torch.as_tensor(each["norms"], dtype=torch.float32) for each in (mine, plain)]
    first = torch.allclose(norms[0][:1], norms[1][:1], rtol=2**-22, atol=0)
    if not first or not torch.allclose(*norms, rtol=1e-5, atol=0):
        return f"norms: {norms}"
    weights = zip(mine["weights"].values(), plain["weights"].values(), strict=True)
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in weights)
    return LAST_BIT if close else "clipped differently"


def rows_elsewhere(run: Run, kinds: Sequence[str], folder: Path) -> dict[str, str]:
    """Resume what `rows` saved, at another world size, sharded and plain, and compare."""
    with launched():
        found = {}
        for kind in kinds:
            start = folder / f"train-{kind}"
            mine, plain = (
                repeatable(run, Trial(each, folder / f"elsewhere-{kind}-{each}", resume=start))
                for each in (kind, PLAIN)
            )
            found[kind] = compare(mine, plain)
        return found


def repeatable(run: Run, trial: Trial) -> dict[str, Any]:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002  Lightning and Accelerate save its state
    random.seed(7)
    return run(trial)


def on_cpu() -> bool:
    """Return whether the ranks train on the CPU, over Gloo, or else on a GPU, over NCCL."""
    return dist.get_backend() != "nccl"


def lightning_devices() -> dict[str, Any]:
    """Return the arguments by which Lightning trains on these ranks.

    It gives each rank of a node a GPU of its own. Over NCCL each rank is a node of its own here.
    """
    size = dist.get_world_size()
    if on_cpu():
        return {"accelerator": "cpu", "devices": size}
    return {"accelerator": "gpu", "devices": 1, "num_nodes": size}


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Give this process the environment that `torchrun` gives to a rank."""
    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank if on_cpu() else "0",  # all ranks share one GPU
        "GROUP_RANK": "0" if on_cpu() else rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": str(on_cpu()).lower(),
        "HF_HUB_OFFLINE": "1",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
