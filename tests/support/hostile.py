"""A small checkpoint to damage, tools to edit its files, and the properties of every load.

An attacker who can write to a checkpoint can recompute its digests: `seal` does.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from problems import difference
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt

MANIFEST, CONTENTS = "checkpoint.json", "contents.json"


class Counting(nn.Module):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count, "seen": torch.full((20,), float(self.count))}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 24)
        self.norm = nn.BatchNorm1d(24)
        self.scale = nn.Parameter(torch.ones(()))
        self.counting = Counting()


def build(seed: int, steps: int) -> tuple[Net, ZeroRedundancyOptimizer]:
    """Return a model and its optimizer after some steps, the same on all ranks."""
    torch.manual_seed(seed)
    net = Net()
    opt = ZeroRedundancyOptimizer(net.named_parameters(), optim.AdamW, lr=0.01 * seed)
    take_steps(net, opt, steps)
    return net, opt


def take_steps(net: Net, opt: ZeroRedundancyOptimizer, steps: int) -> None:
    for _ in range(steps):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        opt.step()
        net.counting.count += 1
        net.norm.running_mean.add_(1)


def write(path: Path) -> None:
    net, opt = build(1, 3)
    ckpt.save(path, opt, net, {"step": 3, "seen": torch.arange(100)})


def picture(net: Net, opt: ZeroRedundancyOptimizer) -> Any:
    """Return a copy of everything that a load may change."""
    local = opt.shards.local
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in (*opt.param_groups, *opt.optim.param_groups)
    ]
    found = {"model": net.state_dict(), "state": local.states(), "options": options}
    return copy.deepcopy({**found, "stepped": local.stepped})


def outcome(path: Path, net: Net, opt: ZeroRedundancyOptimizer) -> tuple[str | None, str | None]:
    """The message of the CheckpointError that loading raised, if any; and what is wrong, if any."""
    before = picture(net, opt)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt.load(path, opt, net)
    except ckpt.CheckpointError as error:
        changed = difference(before, picture(net, opt))
        return str(error), None if changed is None else f"it raised, and changed {changed}"
    except Exception as error:
        return None, f"it raised {type(error).__name__}: {error}"
    return None, None


def names(parent: Path) -> list[str]:
    return sorted(os.listdir(parent))


# ------------------------------------------------------------------------------------ damage


def copy_of(valid: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(valid, to)
    return to


def seal(path: Path) -> None:
    """Make lengths and digests fit what is in the files, as far as they are files."""
    manifest = json.loads((path / MANIFEST).read_text())
    for name, said in manifest["files"].items():
        file = path / name
        if file.is_file() and file.stat().st_size < 2**30:
            said["nbytes"] = file.stat().st_size
            said["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    write_manifest(path, manifest)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("digest", None)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps({**manifest, "digest": digest}))


def edit_contents(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change what a checkpoint says it holds; `edit` changes it in place or returns another."""
    said = json.loads((path / CONTENTS).read_text())
    other = edit(said)
    (path / CONTENTS).write_text(json.dumps(said if other is None else other))
    seal(path)


def split(file: Path) -> tuple[Any, bytes]:
    """The header and the data of a safetensors file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(path: Path, name: str, edit: Callable[[Any], Any]) -> None:
    header, data = split(path / name)
    other = edit(header)
    join(path / name, header if other is None else other, data)
    seal(path)


def flip(file: Path) -> None:
    """Change the last bit of a file."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
