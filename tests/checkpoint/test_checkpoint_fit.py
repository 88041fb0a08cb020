"""Matching a checkpoint with an optimizer and a model: names, groups, shapes, classes and state.

A misfit raises on every rank and changes nothing. A partial load warns, and so does state that
starts from zero.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hostile import picture
from mixtures import mixture, steps
from problems import difference, differing
from ranks import run_ranks
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt

load_module = importlib.import_module("shardstep.checkpoint.load")  # the package has a `load` too


@contextlib.contextmanager
def warned(*patterns: str) -> Iterator[None]:
    """Exactly these warnings are given: of partial loads on rank 0, the others on all ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught if each.category is UserWarning]
    first = not dist.is_initialized() or dist.get_rank() == 0
    expected = [each for each in patterns if first or not re.search("in part|no model", each)]
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
    barrier = dist.barrier if dist.is_initialized() else lambda: None
    barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    barrier()
    return path


def run_here(parent: Path, *parts: Callable[[Path], None]) -> None:
    """Run these on every rank, each with an empty folder."""
    for part in parts:
        part(clean(parent / part.__name__))


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
    # The checkpoint knows only one of them: the rest is named, and stays as it was.
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
    """Options follow the parameters by name. Parameters with different options are refused."""
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
    with warned("no model was given, so its weights were not loaded"):
        ckpt.load(parent / "adam", stepped(Small()))
    assert difference(whole(opt, net), whole(fresh, other)) is None
    more, wide, narrow, spread = Small(), Small(), Small(), Small()
    more.extra, wide.w = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(40, 4))
    narrow.count, spread.count = torch.zeros(3, dtype=torch.int64), torch.zeros(1).expand(3)
    ckpt.save(parent / "no-model", opt)
    ckpt.save(parent / "no-optimizer", model=net)
    other_shape = "has shape (40, 3) there, but (40, 4) here"
    for name, target, model, message in (
        ("adam", stepped(more), None, "'optimizer: extra'"),
        ("adam", stepped(wide), None, other_shape),
        ("adam", None, wide, other_shape),
        ("no-model", None, net, "there is no model"),
        ("no-optimizer", stepped(Small()), None, "there is no optimizer"),
        ("adam", None, narrow, "cannot hold"),
        ("adam", None, spread, "share memory"),
        ("adam", None, Copying(), "made up by the model's state_dict()"),
    ):
        refused(parent / name, target, model, message)


class Copying(Small):
    """Gives copies away in its state dict. Writing to these would load nothing, and say nothing."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


def by_place(parent: Path) -> None:
    """Parameters without names are known by their places, if there are equally many."""
    net = Small()
    opt = stepped(net, list(net.parameters()))
    ckpt.save(parent / "numbered", opt)
    ckpt.save(parent / "named", opt, net)
    for saved, named, with_model in (
        ("numbered", True, False),
        ("named", False, False),
        ("numbered", False, False),
        ("named", False, True),
    ):
        other = Small()
        fresh = stepped(other, None if named else list(other.parameters()), steps=1)
        ckpt.load(parent / saved, fresh, other if with_model else None)
        assert difference(whole(opt, net), whole(fresh, other)) is None, (saved, named)
    few = Small()
    refused(parent / "numbered", stepped(few, [("w", few.w)]), None, "knows no names")


def wrapped(parent: Path) -> None:
    """DDP and torch.compile, around the model or parts of it, leave names as they are."""

    def plain() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))

    ddp, compiled = DistributedDataParallel, torch.compile
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda net: net,
        "ddp": ddp,
        "compiled": compiled,
        "compiled ddp": lambda net: compiled(ddp(net)),
        "ddp of compiled": lambda net: ddp(compiled(net)),  # type: ignore[arg-type]
        "compiled in part": lambda net: nn.Sequential(compiled(net[0]), net[1]),  # type: ignore[index]
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
    run_ranks(run_here, 2, tmp_path, by_other_names, regrouped, other_optimizers, by_place, wrapped)


# ------------------------------------------------------------------- starting from zero


def from_zero(parent: Path) -> None:
    """Resuming from zero is warned of, and nothing else is."""
    empty = "the loaded state is empty: this resumes from zero"
    part = "nothing for 1 of 2 trainable parameters ('b'): these resume from zero"

    def partly(net: Small) -> ZeroRedundancyOptimizer:
        opt = stepped(net, steps=0)
        net.w.grad = torch.ones_like(net.w)
        opt.step()
        return opt

    def frozen(net: Small) -> ZeroRedundancyOptimizer:
        net.b.requires_grad_(False)
        return stepped(net)

    def lost(net: Small, hollow: bool = False) -> ZeroRedundancyOptimizer:
        opt = stepped(net)
        for state in [*opt.optim.state.values()] if hollow else [opt.optim.state]:
            state.clear()
        return opt

    hollow = partial(lost, hollow=True)
    never = partial(stepped, steps=0)
    sgd = partial(stepped, cls=optim.SGD)
    momentum = partial(sgd, momentum=0.9)
    cases: tuple[Any, ...] = (
        (never, stepped, empty),
        (partly, stepped, part),
        (frozen, frozen),
        (frozen, stepped, part),
        (sgd, sgd),
        (momentum, momentum),
        (lost, stepped, empty),
        (hollow, stepped, empty),
    )
    for number, (saved, loaded, *expected) in enumerate(cases):
        path = parent / str(number)
        with warned():
            ckpt.save(path, saved(Small()))
            target = loaded(Small())
        with warned(*expected):
            ckpt.load(path, target)


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
    run_ranks(run_here, 2, tmp_path, from_zero, kinds_of_state)


def test_state_that_a_partial_load_keeps_is_still_there(tmp_path: Path) -> None:
    """`bool(opt.state)` is False before any state: torch's functions would take a step."""
    one, two = (nn.Parameter(torch.ones(3)) for _ in range(2))
    ckpt.save(tmp_path / "one", ZeroRedundancyOptimizer([("one", one)], optim.Adam))
    opt = ZeroRedundancyOptimizer([("one", one), ("two", two)], optim.Adam)
    one.grad = two.grad = torch.ones(3)
    opt.step()
    with pytest.warns(UserWarning, match="loaded in part"):
        ckpt.load(tmp_path / "one", opt, strict=False)
    assert opt.state.get(one) is None
    assert opt.state[two]["step"] == 1
    assert opt.state


def test_one_process_without_a_group(tmp_path: Path) -> None:
    """The same without a process group."""
    run_here(tmp_path, by_other_names, regrouped, from_zero, kinds_of_state, other_optimizers)


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
        with pytest.raises(TypeError, match=r"optimizer must be .*not SGD; .*import_state"):
            given(path, plain, model)
        with pytest.raises(TypeError, match=r"optimizer must be .*not Linear"):
            given(path, model, opt)
        with pytest.raises(TypeError, match=r"model must be .*, not OrderedDict"):
            given(tmp_path / "before", opt, state)
    with pytest.raises(TypeError, match=r"path is None: latest\(\)"):
        ckpt.load(nowhere, opt, model)
    for value, named in ((plain, r"a SGD, .*; pass its state_dict\(\)"), (object(), "an object,")):
        with pytest.raises(TypeError, match=f"kept' is {named}"):
            ckpt.save(path, opt, model, {"kept": value})
    assert not path.exists()


def test_several_classes_that_were_saved_under_the_name_of_their_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = mixture()
    steps(model, opt, range(2))
    monkeypatch.setattr(
        "shardstep.checkpoint.write.saved_name", lambda optim: "shardstep.mixture.Mixture"
    )
    ckpt.save(tmp_path / "one", opt, model)
    other, fresh = mixture()
    ckpt.load(tmp_path / "one", fresh, other)
    assert difference(picture(model, opt), picture(other, fresh)) is None
