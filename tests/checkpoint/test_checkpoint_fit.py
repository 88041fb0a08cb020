"""What fits a checkpoint and what does not: names, shapes, kinds of state and of models.

What does not fit is said on every rank and changes nothing; what is loaded in part, or starts from
zero, is said too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hostile
import pytest
import torch
import torch.distributed as dist
from hostile import build, picture
from models import PROBLEMS, Problem, Setup, with_zero
from problems import difference, differing
from ranks import run_ranks
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint import safetensors

load_module = importlib.import_module("shardstep.checkpoint.load")  # the package has a `load` too


@contextlib.contextmanager
def warned(*patterns: str) -> Iterator[None]:
    """Exactly these warnings are given: of a partial load on rank 0, the others on all ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught if each.category is UserWarning]
    first = not dist.is_initialized() or dist.get_rank() == 0
    expected = [each for each in patterns if first or "in part" not in each]
    assert len(said) == len(expected), said
    for pattern, message in zip(expected, said, strict=True):
        assert pattern in message, (pattern, message)


def refused(
    path: Path, opt: Any, net: Any, message: str, exception: Any = ckpt.CheckpointError, **kw: Any
) -> None:
    """Loading raises, and changes nothing."""
    before = picture(net, opt) if opt is not None and net is not None else None
    with pytest.raises((exception, RuntimeError), match=re.escape(message)):
        ckpt.load(path, opt, net, **kw)
    if before is not None:
        assert difference(before, picture(net, opt)) is None


def clean(path: Path) -> Path:
    """An empty place for this, on all ranks."""
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    if dist.is_initialized():
        dist.barrier()
    return path


# --------------------------------------------------------------- a load that fails on one rank


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


def fails_on_one_rank(parent: Path) -> None:
    """Every rank raises, and nothing is changed on any: at each place where a load can fail."""
    for make in (build, mixed):
        _fails_on_one_rank(clean(parent / make.__name__), make)


def _fails_on_one_rank(parent: Path, build: Any) -> None:
    net, opt = build(1, 3)
    ckpt.save(parent / "one", opt, net, {"a": torch.ones(100)})
    dist.barrier()
    other, target = build(2, 2)
    other.norm.running_mean.fill_(dist.get_rank())
    rank = dist.get_rank()
    install = load_module.install

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("step")

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
        (load_module, "install", broken, "'step'"),
        (load_module, "install", late, "'step'"),
        (hostile.Counting, "set_extra_state", swallow, "count is wrong"),
    ]
    for who in (0, 1):
        for owner, name, function, message in places:
            patch = mock.patch.object(owner, name, function)
            with patch if rank == who else contextlib.nullcontext():
                before = picture(other, target)
                errors = (ckpt.CheckpointError, RuntimeError, OSError)
                with pytest.raises(errors, match=message):
                    ckpt.load(parent / "one", target, other)
                # The counter is the module's own: it was set back by the module's own means,
                # except where those are what fails.
                after = picture(other, target)
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
    refused(parent / ("a" if rank == 0 else "none"), opt, net, "not a folder")
    # One that was removed while it is read is named.
    dist.barrier()
    if rank == 1:
        (parent / "a" / "optimizer-00001-of-00002.safetensors").unlink()
    dist.barrier()
    refused(parent / "a", opt, net, "optimizer-00001-of-00002.safetensors")


def asks_for_something_else(parent: Path) -> None:
    """Ranks that ask for different things raise: nobody waits, or loads what the others do not."""
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


def on_two_ranks(parent: Path, *names: str) -> None:
    for name in names:
        globals()[name](clean(parent / name))


@pytest.mark.slow
def test_a_load_that_fails_on_one_rank(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path, "fails_on_one_rank", "sees_another_folder")


def test_ranks_that_ask_for_different_things(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path, "asks_for_something_else")


# ------------------------------------------------------------------------- names and groups


class Small(nn.Module):
    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.register_parameter(f"{prefix}w", nn.Parameter(torch.randn(40, 3)))
        self.register_parameter(f"{prefix}b", nn.Parameter(torch.randn(40)))
        self.register_buffer(f"{prefix}count", torch.zeros(3))


def stepped(
    net: nn.Module, params: Any = None, cls: Any = optim.Adam, steps: int = 2, **options: Any
) -> ZeroRedundancyOptimizer:
    """An optimizer that has taken steps."""
    given = params if params is not None else net.named_parameters()
    opt = ZeroRedundancyOptimizer(given, cls, **{"lr": 0.01, **options})
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        for group in opt.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.grad = torch.randn(param.shape, generator=random).to(param.dtype)
        opt.step()
    return opt


def whole(opt: ZeroRedundancyOptimizer, net: nn.Module) -> dict[str, Any]:
    """All state, by name, on every rank."""
    return {name: opt.full_state(param) for name, param in net.named_parameters()}


def by_other_names(parent: Path) -> None:
    net = Small()
    opt = stepped(net)
    ckpt.save(parent / "a", opt, net)
    other = Small("x_")
    fresh = stepped(other, steps=1)
    refused(parent / "a", fresh, None, "not found in the checkpoint: 'optimizer: x_w'")
    mapping = {"x_w": "w", "x_b": "b", "x_count": "count"}
    result = ckpt.load(parent / "a", fresh, other, names=mapping)
    assert (result.missing, result.unexpected) == ((), ())
    assert difference(list(whole(opt, net).values()), list(whole(fresh, other).values())) is None
    assert not differing(list(net.state_dict().values()), list(other.state_dict().values()))
    # Only one of them is known there: the rest is said, and stays as it was.
    third = Small("x_")
    last = stepped(third, steps=1, lr=0.5)
    before, weights = whole(last, third), third.x_b.detach().clone()
    with warned("was loaded in part: not found in the checkpoint"):
        result = ckpt.load(parent / "a", last, third, strict=False, names={"x_w": "w"})
    assert result.missing == ("optimizer: x_b", "model: x_b", "model: x_count")
    assert result.unexpected == ("optimizer: b", "model: b", "model: count")
    assert difference(before["x_b"], whole(last, third)["x_b"]) is None
    assert torch.equal(third.x_b, weights)
    assert difference(whole(opt, net)["w"], whole(last, third)["x_w"]) is None


def regrouped(parent: Path) -> None:
    """Options follow the parameters by name; where they were different, that is said."""
    net = Small()
    groups = [{"params": [("w", net.w)], "lr": 0.1}, {"params": [("b", net.b)], "lr": 0.2}]
    opt = stepped(net, groups)
    ckpt.save(parent / "a", opt)
    other = Small()
    turned = [{"params": [("b", other.b)]}, {"params": [("w", other.w)]}]
    fresh = stepped(other, turned, steps=0)
    ckpt.load(parent / "a", fresh)
    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.1]
    assert [group["lr"] for group in fresh.optim.param_groups] == [0.2, 0.1]
    assert difference(whole(opt, net), whole(fresh, other)) is None
    one = stepped(Small(), steps=0, lr=0.7)
    refused(parent / "a", one, None, "groups [0, 1] there")
    # What a user has set since the last step is this optimizer's own.
    one.param_groups[0]["lr"] = 0.3
    ckpt.load(parent / "a", one, strict=False)
    assert one.param_groups[0]["lr"] == one.optim.param_groups[0]["lr"] == 0.3


def other_optimizers(parent: Path) -> None:
    net = Small()
    opt = stepped(net)
    ckpt.save(parent / "adam", opt, net)
    refused(parent / "adam", stepped(Small(), cls=optim.AdamW), None, "torch.optim.adam.Adam")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = stepped(other := Small(), cls=optim.AdamW, steps=0)
        ckpt.load(parent / "adam", fresh, strict=False)
    assert difference(whole(opt, net), whole(fresh, other)) is None
    more = Small()
    more.extra = nn.Parameter(torch.ones(3))
    refused(parent / "adam", stepped(more), None, "'optimizer: extra'")
    wide = nn.Module()
    wide.w, wide.b = nn.Parameter(torch.ones(40, 4)), nn.Parameter(torch.ones(40))
    refused(parent / "adam", stepped(wide), None, "has shape (40, 3) there, but (40, 4) here")
    refused(parent / "adam", None, wide, "has shape (40, 3) there, but (40, 4) here")
    ckpt.save(parent / "no-model", opt)
    refused(parent / "no-model", None, net, "there is no model")
    ckpt.save(parent / "no-optimizer", model=net)
    refused(parent / "no-optimizer", stepped(Small()), None, "there is no optimizer")
    narrow = Small()
    narrow.count = torch.zeros(3, dtype=torch.int64)
    refused(parent / "adam", None, narrow, "cannot hold")
    spread = Small()
    spread.count = torch.zeros(1).expand(3)
    refused(parent / "adam", None, spread, "share memory")


class Copying(Small):
    """Gives copies away in its state dict, as modules that convert on saving do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


def models_that_hand_out_copies(parent: Path) -> None:
    """Writing to copies would load nothing, and say nothing."""
    net = Small()
    ckpt.save(parent / "a", stepped(net), net)
    refused(parent / "a", None, Copying(), "made up by the model's state_dict()")


def by_place(parent: Path) -> None:
    """Parameters without names are known by their places, if there are equally many."""
    net = Small()
    opt = stepped(net, list(net.parameters()))
    ckpt.save(parent / "numbered", opt)
    ckpt.save(parent / "named", opt, net)
    for saved, params, model in (
        ("numbered", "named", False),
        ("named", "plain", False),
        ("numbered", "plain", False),
        ("named", "plain", True),
        ("numbered", "plain", True),
    ):
        other = Small()
        given = list(other.parameters()) if params == "plain" else list(other.named_parameters())
        fresh = stepped(other, given, steps=1)
        if model and saved == "named":
            ckpt.load(parent / saved, fresh, other)
        else:
            ckpt.load(parent / saved, fresh)
        assert difference(whole(opt, net), whole(fresh, other)) is None, (saved, params)
    few = Small()
    refused(parent / "numbered", stepped(few, [("w", few.w)]), None, "knows no names")


def wrapped(parent: Path) -> None:
    """DDP and torch.compile, around the model or parts of it, leave names as they are."""

    def plain() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))

    def ddp(net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net)

    def compiled(net: nn.Module) -> nn.Module:
        return torch.compile(net)  # type: ignore[return-value]

    def in_part(net: nn.Module) -> nn.Module:
        net[0] = torch.compile(net[0])  # type: ignore[operator,index]
        return net

    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda net: net,
        "ddp": ddp,
        "compiled": compiled,
        "compiled ddp": lambda net: compiled(ddp(net)),
        "ddp of compiled": lambda net: ddp(compiled(net)),
        "compiled in part": in_part,
    }
    states = {}
    for way, wrap in ways.items():
        net = wrap(plain())
        opt = stepped(net)
        states[way] = list(whole(opt, net).values())
        ckpt.save(parent / way, opt, net)
        assert set(ckpt.weights(parent / way)) == set(plain().state_dict()), way
    for saved in ways:
        for way in ("plain", "compiled ddp", "compiled in part"):
            wrap = ways[way]
            net = wrap(plain())
            opt = stepped(net, steps=1)
            with torch.no_grad():
                for param in net.parameters():
                    param.zero_()
            ckpt.load(parent / saved, opt, net)
            assert difference(states[saved], list(whole(opt, net).values())) is None, (saved, way)
            expected = list(ckpt.weights(parent / saved).values())
            assert not differing(expected, [p.detach() for p in net.parameters()]), (saved, way)
            # Names that the optimizer was given mean the same without the model.
            again = stepped(wrap(plain()), steps=1)
            ckpt.load(parent / saved, again)


@pytest.mark.slow
def test_names_and_groups(tmp_path: Path) -> None:
    parts = ("by_other_names", "regrouped", "other_optimizers", "by_place")
    run_ranks(on_two_ranks, 2, tmp_path, *parts, "models_that_hand_out_copies", "wrapped")


# ------------------------------------------------------------------- starting from zero


def from_zero(parent: Path) -> None:
    """Nobody resumes from zero without a word."""
    net = Small()
    ckpt.save(parent / "never", ZeroRedundancyOptimizer(net.named_parameters(), optim.Adam), net)
    with warned("the loaded state is empty: this resumes from zero"):
        ckpt.load(parent / "never", stepped(net), net)

    part = Small()
    opt = ZeroRedundancyOptimizer(part.named_parameters(), optim.Adam)
    part.w.grad = torch.ones_like(part.w)
    opt.step()
    ckpt.save(parent / "part", opt)
    with warned("nothing for 1 of 2 trainable parameters ('b'): these resume from zero"):
        ckpt.load(parent / "part", stepped(Small()))

    frozen = Small()
    frozen.b.requires_grad_(False)
    opt = stepped(frozen)
    ckpt.save(parent / "frozen", opt)
    still = Small()
    still.b.requires_grad_(False)
    with warned():
        ckpt.load(parent / "frozen", stepped(still))
    with warned("nothing for 1 of 2 trainable parameters ('b'): these resume from zero"):
        ckpt.load(parent / "frozen", stepped(Small()))

    with warned():
        net = Small()
        ckpt.save(parent / "sgd", stepped(net, cls=optim.SGD))
        ckpt.load(parent / "sgd", stepped(Small(), cls=optim.SGD))
        net = Small()
        ckpt.save(parent / "momentum", stepped(net, cls=optim.SGD, momentum=0.9))
        ckpt.load(parent / "momentum", stepped(Small(), cls=optim.SGD, momentum=0.9))

    lost = stepped(net := Small())
    lost.optim.state.clear()
    ckpt.save(parent / "lost", lost)
    with warned("the loaded state is empty"):
        ckpt.load(parent / "lost", stepped(net))

    hollow = stepped(net := Small())
    for state in hollow.optim.state.values():
        state.clear()
    ckpt.save(parent / "hollow", hollow)
    with warned("the loaded state is empty"):
        ckpt.load(parent / "hollow", stepped(Small()))


class Picky(optim.Optimizer):
    """Has an option that is code, and state that belongs to no parameter."""

    shardstep_layout = "whole"

    def __init__(self, params: Any, lr: float = 0.1, rule: Any = None, note: Any = None) -> None:
        super().__init__(params, {"lr": lr, "rule": rule, "note": note})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param] = {
                        "nested": {"moments": [param.detach() * 2, (param.detach() + 1, 3)]},
                        "turned": param.detach().flatten()[::2].clone().view(-1, 1).t(),
                        7: None,
                        "text": "ü\ud800",
                        "many": torch.arange(50),
                        "flag": True,
                        "inf": float("inf"),
                    }
                    param.data.mul_(0.9)
        self.state["loose"] = {"count": 3, "history": [torch.arange(40.0), torch.ones(2)]}  # type: ignore[index]


def kinds_of_state(parent: Path) -> None:
    net = Small()
    opt = stepped(net, cls=Picky, rule=len, note={"a": (1, [2, torch.ones(30)])})
    with pytest.warns(UserWarning, match="option 'rule' of parameter group 0 is a builtin"):
        ckpt.save(parent / "a", opt)
    other = Small()
    fresh = stepped(other, cls=Picky, rule=max, steps=0)
    # A value that was set after the last step stays as well.
    fresh.param_groups[0]["rule"] = min
    ckpt.load(parent / "a", fresh)
    assert fresh.param_groups[0]["rule"] is min
    assert fresh.optim.param_groups[0]["rule"] is min
    assert difference(opt.param_groups[0]["note"], fresh.param_groups[0]["note"]) is None
    assert difference(whole(opt, net), whole(fresh, other)) is None
    assert difference(opt.optim.state["loose"], fresh.optim.state["loose"]) is None  # type: ignore[index]


def test_what_starts_from_zero_is_said(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path, "from_zero", "kinds_of_state")


# --------------------------------------------------------------------------- kinds of models


class Strange(nn.Module):
    """Tensors of every dtype, shape and name."""

    DTYPES = (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e8m0fnu,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    )
    NAMES = ("a/b", "-", "ünï ☃", "x" * 3000, "0:w:exp_avg@[0]", "'\"\\", "\n", "__metadata", " ")

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name in self.NAMES:
            self.register_parameter(name, nn.Parameter(torch.randn(11, 3, generator=random)))
        self.none = nn.Parameter(torch.zeros(0))
        self.flat = nn.Parameter(torch.zeros(3, 0, 2))
        self.scalar = nn.Parameter(torch.randn((), generator=random))
        self.one = nn.Parameter(torch.randn(1, generator=random))
        self.low = nn.Parameter(torch.randn(33, 5, generator=random).bfloat16())
        self.wave = nn.Parameter(torch.randn(9, 4, dtype=torch.complex64, generator=random))
        self.conv = nn.Parameter(
            torch.randn(8, 6, 3, 5, generator=random).to(memory_format=torch.channels_last)
        )
        self.turned = nn.Parameter(torch.randn(6, 40, generator=random).t())
        for dtype in self.DTYPES:
            raw = torch.randint(0, 2, (5, 7, dtype.itemsize), generator=random, dtype=torch.uint8)
            value = raw.view(dtype).squeeze(-1) if dtype is not torch.bool else raw[..., 0].bool()
            self.register_buffer(f"of {dtype}".replace(".", " "), value)
        self.register_buffer("gaps", torch.randn(12, 8, generator=random)[::2, ::3])
        self.register_buffer("lonely", torch.randn(4, 2, generator=random)[::4, ::2])
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        wave = torch.randn(4, dtype=torch.complex64, generator=random)
        self.register_buffer("conj", wave.conj())
        self.register_buffer("neg", wave.clone().conj().imag)
        self.tied = self.one
        self.count = seed

    def get_extra_state(self) -> Any:
        return torch.tensor([self.count] * 30)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state[0])


def strange_models(parent: Path) -> None:
    net = Strange(1)
    opt = stepped(net)
    ckpt.save(parent / "sync", opt, net)
    ckpt.async_save(parent / "async", opt, net).wait()
    for name in ("sync", "async"):
        other = Strange(2)
        fresh = stepped(other, steps=1)
        with warned():
            ckpt.load(parent / name, fresh, other)
        assert difference(whole(opt, net), whole(fresh, other)) is None
        expected, got = net.state_dict(), other.state_dict()
        assert list(expected) == list(got)
        for key, value in expected.items():
            pair = (each.resolve_conj().resolve_neg() for each in (value, got[key]))
            assert difference(*pair) is None, key
        assert other.count == 1
        assert other.one is other.tied
        # And the numbers go on alike.
        for each, both in ((net, opt), (other, fresh)):
            for number, param in enumerate(each.parameters()):
                param.grad = torch.full_like(param, 0.1 * number)
            both.step()
        assert not differing(list(net.parameters()), list(other.parameters()))
        ckpt.load(parent / name, opt, net)


def buffers_of_rank_0(parent: Path) -> None:
    rank = dist.get_rank()
    net = nn.BatchNorm1d(50)
    opt = stepped(net)
    net.running_mean.fill_(10 + rank)
    ckpt.save(parent / "a", opt, net)
    net.running_mean.fill_(0)
    ckpt.load(parent / "a", opt, net)
    assert torch.equal(net.running_mean, torch.full((50,), 10.0))
    # One that a parent has as well, but does not save.
    parent_net = nn.Module()
    parent_net.register_buffer("shortcut", torch.full((50,), 10.0 + rank), persistent=False)
    parent_net.child = nn.Module()
    parent_net.child.register_buffer("kept", parent_net.shortcut)
    parent_net.weight = nn.Parameter(torch.ones(100))
    ckpt.save(parent / "b", None, parent_net)
    assert torch.equal(ckpt.weights(parent / "b")["child.kept"], torch.full((50,), 10.0))


def strange_names(parent: Path) -> None:
    """Names that are given to the optimizer may be anything, and are not taken for paths."""
    names = (
        "..",
        "../../x",
        "/etc/passwd",
        "",
        "a.b",
        "a",
        "b.exp_avg",
        "param 1",
        "module.",
        "\0",
    )

    def make(steps: int) -> tuple[list[nn.Parameter], ZeroRedundancyOptimizer]:
        params = [nn.Parameter(torch.full((number + 3,), 1.0)) for number in range(len(names))]
        return params, stepped(nn.Module(), list(zip(names, params, strict=True)), steps=steps)

    params, opt = make(2)
    ckpt.save(parent / "a", opt)
    others, fresh = make(1)
    ckpt.load(parent / "a", fresh)
    for one, two in zip(params, others, strict=True):
        assert difference(opt.full_state(one), fresh.full_state(two)) is None
    assert sorted(os.listdir(parent)) == ["a"]


def tied_otherwise(parent: Path) -> None:
    """Weights that are tied here and not there, and the other way round."""

    def pair(tied: bool) -> nn.Module:
        net = nn.Module()
        net.a, net.b = nn.Parameter(torch.randn(9, 5)), nn.Parameter(torch.randn(9, 5))
        if tied:
            net.b = net.a
        return net

    torch.manual_seed(3)
    one, two = pair(True), pair(False)
    ckpt.save(parent / "tied", model=one)
    ckpt.load(parent / "tied", model=two)
    assert torch.equal(two.a, one.a)
    assert torch.equal(two.b, one.a)
    renamed = pair(True)
    ckpt.load(parent / "tied", model=renamed)
    assert torch.equal(renamed.b, one.a)
    # Two that have come to be the same are one tensor, and two that differ are not.
    ckpt.save(parent / "alike", model=two)
    ckpt.load(parent / "alike", model=pair(True))
    with torch.no_grad():
        two.b[0, 0] += 1
    ckpt.save(parent / "untied", model=two)
    refused(parent / "untied", None, renamed, "'a' is one tensor of several names here")
    assert torch.equal(renamed.b, one.a)
    ckpt.load(parent / "untied", model=renamed, strict=False)
    assert torch.equal(renamed.b, two.a)


def test_kinds_of_models(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path, "strange_models", "buffers_of_rank_0", "strange_names")
    run_ranks(on_two_ranks, 2, tmp_path, "tied_otherwise")


class Named(nn.Module):
    """One child is called as DDP calls what it wraps, and has a namesake outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2, bias=False)
        self.weight = nn.Parameter(torch.ones(4))


def test_a_module_with_two_names_takes_its_extra_state_under_both(tmp_path: Path) -> None:
    def pair(count: int) -> nn.Module:
        net = nn.Module()
        net.one = net.two = hostile.Counting()
        net.one.count = count
        return net

    ckpt.save(tmp_path / "saved", model=pair(5))
    net = pair(1)
    ckpt.load(tmp_path / "saved", model=net)
    assert net.one.count == 5


class InPlace(nn.Module):
    """Gives the very tensor that it keeps, and writes to it; takes no negative numbers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.kept = torch.full((3,), value)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        if (state < 0).any():
            raise ValueError("a negative number")
        self.kept.copy_(state)


def test_extra_state_that_is_written_in_place_is_set_back(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "saved", model=nn.ModuleList([InPlace(7), InPlace(-1)]))
    net = nn.ModuleList([InPlace(1), InPlace(2)])
    refused(tmp_path / "saved", None, net, "a negative number")
    assert torch.equal(net[0].kept, torch.full((3,), 1.0))


def test_values_that_a_model_makes_up_cannot_be_given_back(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda _, found, prefix, __: found.update({"version": 3}))
    ckpt.save(tmp_path / "saved", model=net)
    refused(tmp_path / "saved", None, net, "'version' is made up by the model's state_dict()")


def test_a_view_that_stands_for_other_numbers_is_no_second_name(tmp_path: Path) -> None:
    net = nn.Module()
    net.register_buffer("wave", torch.randn(5, dtype=torch.complex64))
    net.register_buffer("back", net.wave.conj())
    ckpt.save(tmp_path / "saved", None, net)
    found = ckpt.weights(tmp_path / "saved")
    assert torch.equal(found["wave"], net.wave)
    assert torch.equal(found["back"], net.back)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    net.wave.zero_()
    ckpt.load(tmp_path / "saved", None, net)
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())


def test_a_child_called_module_keeps_its_name(tmp_path: Path) -> None:
    net = Named()
    opt = ZeroRedundancyOptimizer(net.named_parameters(), optim.SGD, momentum=0.9)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    ckpt.save(tmp_path / "saved", opt)
    saved = json.loads((tmp_path / "saved" / "contents.json").read_text())["optimizer"]["params"]
    assert {param["name"] for param in saved} == {"module.weight", "weight"}


def test_a_child_called_module_is_exported_by_its_name(tmp_path: Path) -> None:
    """And is found by it, and by what a checkpoint has called it that was saved without a model."""

    def make() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        net = nn.ModuleDict({"module": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
        return net, stepped(net)

    net, opt = make()
    ckpt.save(tmp_path / "with", opt, net)
    ckpt.save(tmp_path / "without", opt)
    ckpt.export(tmp_path / "with", tmp_path / "named.pt", "torch-named", part="optimizer")
    named = torch.load(tmp_path / "named.pt", weights_only=True)
    assert named["param_groups"][0]["params"] == [name for name, _ in net.named_parameters()]
    for name in ("with", "without"):
        _, fresh = make()
        fresh.optim.state.clear()
        ckpt.load(tmp_path / name, fresh)
        assert difference(opt.state_dict(), fresh.state_dict()) is None, name
    other, fresh = make()
    ckpt.load(tmp_path / "with", fresh, other)
    wrapped, _ = make()
    ddp = [(f"module.{name}", param) for name, param in wrapped.named_parameters()]
    ckpt.load(tmp_path / "with", stepped(wrapped, ddp))
    ckpt.save(tmp_path / "ddp", stepped(wrapped, ddp))
    ckpt.load(tmp_path / "ddp", opt)


def test_one_process_without_a_group(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, "by_other_names", "regrouped", "from_zero", "tied_otherwise")
    on_two_ranks(tmp_path, "strange_models", "kinds_of_state", "other_optimizers")


# ------------------------------------------------------------------------------------ ZeRO-2


def steps(setup: Setup, problem: Problem, numbers: range) -> None:
    for step in numbers:
        setup.backward(step, problem)
        setup.finish()


def everything(setup: Setup) -> list[Tensor]:
    """Parameters, buffers and state, in full."""
    setup.opt.consolidate_state_dict(to=0)
    states = setup.opt.state_dict()["state"] if setup.opt.rank == 0 else {}
    tensors = [*setup.module.state_dict().values()]
    for _, state in sorted(states.items()):
        tensors += [torch.as_tensor(value) for _, value in sorted(state.items())]
    return [tensor.detach().clone() for tensor in tensors]


def zero2(parent: Path) -> None:
    """Saved while gathers are in flight, loaded between steps: training goes on to the bit."""
    # Of the last, parameters in 16 bits have masters, which are saved and loaded with the rest.
    for name in ("gpt", "conv", "branching", "mixed dtypes"):
        problem = PROBLEMS[name]
        straight = with_zero(problem.fresh())
        steps(straight, problem, range(3))
        # Right after the step, with parameters still on their way.
        ckpt.save(parent / f"{name}-sync", straight.opt, straight.module)
        there = everything(straight)
        steps(straight, problem, range(3, 6))
        end = everything(straight)

        background = with_zero(problem.fresh())
        steps(background, problem, range(3))
        saving = ckpt.async_save(parent / f"{name}-async", background.opt, background.module)
        steps(background, problem, range(3, 6))
        saving.wait()
        assert not differing(end, everything(background)), name

        for kind in ("sync", "async"):
            # Into one that has other values, and whose last gathers are in flight.
            resumed = with_zero(problem.fresh())
            steps(resumed, problem, range(7, 9))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if name == "branching" else "error")
                ckpt.load(parent / f"{name}-{kind}", resumed.opt, resumed.module)
            assert not differing(there, everything(resumed)), (name, kind)
            steps(resumed, problem, range(3, 6))
            assert not differing(end, everything(resumed)), (name, kind)
        # The model alone, without being told of the optimizer.
        alone = with_zero(problem.fresh())
        steps(alone, problem, range(3))
        ckpt.save(parent / f"{name}-model", model=alone.module)
        weights = ckpt.weights(parent / f"{name}-model")
        expected = {n: v for n, v in straight.module.state_dict().items() if n in weights}
        assert len(expected) == len(weights)
        assert not differing(there[: len(weights)], list(weights.values())), name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_2_goes_on(tmp_path: Path, world_size: int) -> None:
    run_ranks(on_two_ranks, world_size, tmp_path, "zero2", timeout=100)


# ------------------------------------------------------------- what was meant for another place


def test_arguments_of_another_kind_are_named(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    opt = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    plain: Any = optim.SGD(model.parameters(), lr=0.1)
    state: Any = model.state_dict()
    nowhere: Any = ckpt.latest(tmp_path)
    path = tmp_path / "step-1"
    ckpt.save(tmp_path / "before", opt, model)
    for act in (ckpt.save, ckpt.async_save, ckpt.load):
        given: Any = act
        with pytest.raises(TypeError, match=r"optimizer has to be .*not a SGD; .*import_state"):
            given(path, plain, model)
        with pytest.raises(TypeError, match=r"optimizer has to be .*not a Linear"):
            given(path, model, opt)
        with pytest.raises(TypeError, match=r"model has to be .*, not a OrderedDict"):
            given(path if given is not ckpt.load else tmp_path / "before", opt, state)
    with pytest.raises(TypeError, match=r"there is no checkpoint .*latest\(\)"):
        ckpt.load(nowhere, opt, model)
    assert not path.exists()
