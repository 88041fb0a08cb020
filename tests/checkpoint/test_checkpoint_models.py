"""Models of all kinds in a checkpoint: dtypes, names, ties, buffers and extra state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hostile
import torch
import torch.distributed as dist
from problems import difference, differing
from ranks import run_ranks
from test_checkpoint_fit import refused, run_here, stepped, warned, whole
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt


class Strange(nn.Module):
    """Tensors of every dtype, shape and name."""

    DTYPES = (
        "float64 float16 bfloat16 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
        "float8_e8m0fnu bool uint8 int8 int16 uint16 int32 uint32 int64 uint64"
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
        for dtype in (getattr(torch, name) for name in self.DTYPES.split()):
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
        # The next step gives the same numbers.
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
    names = ["..", "../../x", "/etc/passwd", "", "a.b", "a", "b.exp_avg", "param 1", "module."]
    names.append("\0")

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
    one, two, renamed = pair(True), pair(False), pair(True)
    ckpt.save(parent / "tied", model=one)
    for net in (two, renamed):
        ckpt.load(parent / "tied", model=net)
        assert not differing([one.a, one.a], [net.a, net.b])
    # Two equal tensors load into one, and two different ones do not.
    ckpt.save(parent / "equal", model=two)
    ckpt.load(parent / "equal", model=pair(True))
    with torch.no_grad():
        two.b[0, 0] += 1
    ckpt.save(parent / "untied", model=two)
    refused(parent / "untied", None, renamed, "'a' is one tensor of several names here")
    assert torch.equal(renamed.b, one.a)
    ckpt.load(parent / "untied", model=renamed, strict=False)
    assert torch.equal(renamed.b, two.a)


def test_kinds_of_models(tmp_path: Path) -> None:
    parts = (strange_models, buffers_of_rank_0, strange_names, tied_otherwise)
    run_ranks(run_here, 2, tmp_path, *parts)
    run_here(tmp_path, strange_models, tied_otherwise)


def test_a_module_with_two_names_takes_its_extra_state_under_both(tmp_path: Path) -> None:
    one = hostile.Counting()
    net = nn.ModuleList([one, one])
    one.count = 5
    ckpt.save(tmp_path / "saved", model=net)
    one.count = 1
    ckpt.load(tmp_path / "saved", model=net)
    assert one.count == 5


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
    """It is called as DDP calls what it wraps, and its parameter has a namesake outside of it.

    It is found by its name, with and without the model.
    """

    def make() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        net = nn.Module()
        net.module = nn.Linear(3, 2, bias=False)
        net.weight = nn.Parameter(torch.ones(4))
        return net, stepped(net)

    net, opt = make()
    ckpt.save(tmp_path / "with", opt, net)
    ckpt.save(tmp_path / "without", opt)
    ckpt.export(tmp_path / "with", tmp_path / "named.pt", "torch-named", part="optimizer")
    named = torch.load(tmp_path / "named.pt", weights_only=True)
    assert named["param_groups"][0]["params"] == [name for name, _ in net.named_parameters()]
    for name in ("with", "without"):
        saved = json.loads((tmp_path / name / "contents.json").read_text())["optimizer"]["params"]
        assert {param["name"] for param in saved} == {"module.weight", "weight"}
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
