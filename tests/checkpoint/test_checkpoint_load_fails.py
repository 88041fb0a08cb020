"""A load that fails on one rank, or that ranks disagree on, raises on all and changes nothing."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import hostile
import pytest
import torch
import torch.distributed as dist
from hostile import build, picture
from problems import difference
from ranks import run_ranks
from test_checkpoint_fit import refused, run_here
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint import safetensors

load_module = importlib.import_module("shardstep.checkpoint.load")  # the package has a `load` too


def mixed(seed: int, steps: int) -> tuple[hostile.Net, ZeroRedundancyOptimizer]:
    """The same with two classes in one optimizer."""
    net, _ = build(seed, 0)
    named = dict(net.named_parameters())
    wide = [("wide.weight", named.pop("wide.weight"))]
    groups = [
        {"params": wide, "optimizer_class": optim.SGD, "lr": 0.1 * seed, "momentum": 0.9},
        {"params": list(named.items())},
    ]
    opt = ZeroRedundancyOptimizer(groups, optim.AdamW, lr=0.01 * seed)
    hostile.take_steps(net, opt, steps)
    return net, opt


def fails_on_one_rank(parent: Path, build: Any = build) -> None:
    """Every rank raises, and nothing is changed on any: at each place where a load can fail."""
    net, opt = build(1, 3)
    ckpt.save(parent / "one", opt, net, {"a": torch.ones(100)})
    dist.barrier()
    other, target = build(2, 2)
    other.norm.running_mean.fill_(dist.get_rank())
    rank = dist.get_rank()
    install = load_module.Share.install
    failing = mock.Mock(side_effect=OSError(5, "Input/output error"))
    broken = mock.Mock(side_effect=KeyError("step"))

    def late(*args: Any) -> Any:
        install(*args)
        raise KeyError("step")

    def swallow(self: Any, state: Any) -> None:
        self.count = -1
        raise ValueError("the count is wrong")

    places: list[tuple[Any, str, Any, str]] = [
        (os, "preadv", failing, "Input/output error"),
        (safetensors, "open_plain", failing, "Input/output error"),
        (load_module.Checkpoint, "verify", failing, "Input/output error"),
        (load_module.Match, "find", failing, "Input/output error"),
        (load_module.Share, "install", broken, "'step'"),
        (load_module.Share, "install", late, "'step'"),
        (hostile.Counting, "set_extra_state", swallow, "count is wrong"),
    ]
    for who, (owner, name, function, message) in itertools.product((0, 1), places):
        before = picture(other, target)
        patch = mock.patch.object(owner, name, function)
        with patch if rank == who else contextlib.nullcontext():
            with pytest.raises((ckpt.CheckpointError, RuntimeError, OSError), match=message):
                ckpt.load(parent / "one", target, other)
            after = picture(other, target)
        # The module sets its counter back itself, unless just that fails.
        if name == "set_extra_state" and rank == who:
            key = "counting._extra_state"
            before["model"].pop(key), after["model"].pop(key)
        assert difference(before, after) is None, (name, who)
        other.counting.count = 2
    ckpt.load(parent / "one", target, other)
    assert difference(picture(net, opt), picture(other, target)) is None


def sees_another_folder(parent: Path) -> None:
    """Ranks that find different checkpoints at one path, or one of them none."""
    net, opt = build(1, 1)
    rank = dist.get_rank()
    for name in ("a", "b"):
        ckpt.save(parent / name, opt, net)
    refused(parent / ("a" if rank == 0 else "b"), opt, net, "different checkpoints")
    refused(parent / ("a" if rank == 0 else "none"), opt, net, "does not exist")
    # One that was removed while it is read is named.
    dist.barrier()
    if rank == 1:
        (parent / "a" / "optimizer-00001-of-00002.safetensors").unlink()
    dist.barrier()
    refused(parent / "a", opt, net, "optimizer-00001-of-00002.safetensors")


def asks_for_something_else(parent: Path) -> None:
    """Ranks that ask for different things raise: none waits, and none loads."""
    net, opt = build(1, 1)
    rank = dist.get_rank()
    ckpt.save(parent / "a", opt, net)
    swap = {"wide.weight": "deep.weight", "deep.weight": "wide.weight"}
    twins = nn.ModuleDict({"wide": nn.Linear(9, 9), "deep": nn.Linear(9, 9)})
    twins_opt = ZeroRedundancyOptimizer(twins.named_parameters(), optim.AdamW)
    ckpt.save(parent / "twins", twins_opt)
    image = nn.Conv2d(4, 4, 3)
    ckpt.save(parent / "image", None, image)
    image = image.to(memory_format=(torch.channels_last if rank == 0 else torch.contiguous_format))
    for path, *parts, options in (
        (parent / "a", opt, net, {"strict": rank == 0}),
        (parent / "a", opt, net, {"verify": rank == 0}),
        (parent / "a", opt if rank == 0 else None, net, {}),
        (parent / "a", opt, net if rank == 0 else None, {}),
        (parent / "twins", twins_opt, None, {"names": swap if rank == 0 else None}),
        (parent / "image", None, image, {}),
    ):
        refused(path, *parts, "different parts", **options)


def two_classes_fail_on_one_rank(parent: Path) -> None:
    fails_on_one_rank(parent, mixed)


@pytest.mark.slow
def test_a_load_that_fails_on_one_rank(tmp_path: Path) -> None:
    parts = (fails_on_one_rank, two_classes_fail_on_one_rank, sees_another_folder)
    run_ranks(run_here, 2, tmp_path, *parts)


def test_ranks_that_ask_for_different_things(tmp_path: Path) -> None:
    run_ranks(run_here, 2, tmp_path, asks_for_something_else)
