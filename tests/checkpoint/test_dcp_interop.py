"""DCP moves state between this library and torch's optimizers. Only a complete load changes an
optimizer. Placeholders serve DCP alone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import TwoLayers, train_alike
from on_ranks import on_ranks
from problems import LAYOUTS, difference, differing
from ranks import run_ranks
from test_checkpoint import Net
from test_dcp import (
    ADAMW,
    advance,
    load,
    load_adamw,
    load_and_advance,
    load_one,
    named,
    plain,
    save,
    save_one,
    unbroken,
    unnamed,
    zero,
)
from torch import nn, optim
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from shardstep import ZeroRedundancyOptimizer
from shardstep.checkpoint import Sharded
from shardstep.checkpoint.dcp.placeholder import Placeholder
from shardstep.plan import Interval, ParamSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


# ---------------------------------------------------------------------------- torch's own side


def _torch_loads(names: bool, folder: Path) -> list[torch.Tensor]:
    net, opt = plain(ADAMW) if names else unnamed()
    advance(opt, net, range(9, 11), missing=False)  # so that there is something to replace
    target = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, opt)}
    dcp.load(target, checkpoint_id=folder)
    set_optimizer_state_dict(net, opt, target["optim"])
    net.load_state_dict(target["model"])
    return advance(opt, net, range(3, 6), missing=False)


def _torch_saves(folder: Path) -> None:
    net, opt = unnamed()
    ddp = DistributedDataParallel(net)
    advance(opt, net, range(3), missing=False)
    state = get_optimizer_state_dict(ddp, opt)
    dcp.save({"model": net.state_dict(), "optim": state}, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("save_it", "load_it", "num_loading"),
    [
        (partial(save_one, case=ADAMW, steps=3, param_names=True), partial(_torch_loads, True), 1),
        (partial(save_one, case=ADAMW, steps=3), partial(_torch_loads, False), 2),
        *((_torch_saves, partial(load_adamw, missing=False, layout=each), 3) for each in LAYOUTS),
    ],
    ids=["ours, named", "ours, unnamed", *(f"torch's, {layout}" for layout in LAYOUTS)],
)
def test_plain_optimizers_and_ours_load_from_each_other(
    tmp_path: Path, save_it: Any, load_it: Any, num_loading: int
) -> None:
    run_ranks(save_it, 2, tmp_path)
    expected = unbroken(ADAMW, missing=False)
    for got in run_ranks(load_it, num_loading, tmp_path):
        assert differing(expected, got) == []


def _with_module(folder: Path, saving: bool) -> list[torch.Tensor]:
    net = TwoLayers()
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, module=net)
    if saving:
        train_alike(net, opt, range(3))
        save(folder, net, opt)
        return []
    torch._foreach_zero_([param.detach() for param in net.parameters()])
    load(folder, net, opt)
    return train_alike(net, opt, range(3, 6))


def _fsdp(folder: Path, saving: bool) -> Any:
    net = TwoLayers()
    for part in (net.up, net.down, net):
        fully_shard(part)
    opt = optim.AdamW(net.parameters())
    if saving:
        train_alike(net, opt, range(3))
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, opt)}
    if saving:
        dcp.save(state, checkpoint_id=folder)
        return []
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, opt, state["optim"])
    train_alike(net, opt, range(3, 6))
    return [param.full_tensor() for param in net.parameters()]  # type: ignore[attr-defined]


def test_fsdp2_and_module_mode_load_from_each_other_and_themselves(tmp_path: Path) -> None:
    net = TwoLayers()
    expected = train_alike(net, optim.AdamW(net.parameters()), range(6))
    run_ranks(_with_module, 2, tmp_path / "ours", True)
    run_ranks(_fsdp, 2, tmp_path / "fsdp", True)
    for resume, world_size in ((_fsdp, 2), (_with_module, 2), (_with_module, 1)):
        for saved_by in ("ours", "fsdp"):
            for got in run_ranks(resume, world_size, tmp_path / saved_by, False):
                assert differing(expected, got) == [], (resume, world_size, saved_by)


def test_what_was_saved_converts_to_one_file_without_shards(tmp_path: Path) -> None:
    run_ranks(save_one, 2, tmp_path / "sharded", ADAMW, 3)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "file")
    state = torch.load(tmp_path / "file", weights_only=False)["optim"]
    net, opt = plain(ADAMW)
    advance(opt, net, range(3), missing=False)
    expected = get_optimizer_state_dict(net, opt)
    for name, inner in expected["state"].items():
        for key, value in inner.items():
            assert torch.equal(value, state["state"][name][key])
    assert [g["params"] for g in state["param_groups"]] == [
        g["params"] for g in expected["param_groups"]
    ]


# --------------------------------------------------------------------------------- when it fails


def replaces_state(folder: Path) -> None:
    """Loading replaces state, also by none."""
    net, opt = zero(ADAMW)
    save(folder / "fresh", net, opt)
    advance(opt, net, range(3))
    save(folder / "trained", net, opt)
    advance(opt, net, range(7, 12))
    load(folder / "trained", net, opt)
    assert differing(unbroken(ADAMW), advance(opt, net, range(3, 6))) == []
    load(folder / "fresh", net, opt)
    assert not opt.state


def survives_a_failure(folder: Path) -> None:
    """A load that fails half way changes nothing."""
    net, opt = zero(ADAMW)
    advance(opt, net, range(2))
    save(folder, net, opt)
    dist.barrier()
    if opt.rank == 0:
        broken = sorted(folder.glob("*.distcp"))[-1]
        broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    advance(opt, net, range(2, 3))
    dist.barrier()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load({"optim": Sharded(opt)}, checkpoint_id=folder)
    assert differing(unbroken(ADAMW), advance(opt, net, range(3, 6))) == []


def finds_swapped_groups(folder: Path) -> None:
    """Groups are known by their parameters, not by their places."""
    save_one(folder, ADAMW, 3, missing=True)
    net = Net()
    groups = [{"params": group["params"]} for group in named(ADAMW, net)[::-1]]
    opt = ZeroRedundancyOptimizer(groups, optim.AdamW)
    assert differing(unbroken(ADAMW), load_and_advance(folder, net, opt)) == []


@pytest.mark.parametrize("scenario", [replaces_state, survives_a_failure, finds_swapped_groups])
def test_an_optimizer_has_what_was_loaded_completely_and_nothing_else(
    tmp_path: Path, scenario: Any
) -> None:
    run_ranks(scenario, 2, tmp_path)


def test_what_was_not_read_is_not_a_number() -> None:
    live = torch.zeros(10)
    form = ((4, 6), torch.float32, torch.device("cpu"))
    cut = (Interval(8, 18), ParamSpec.of("w", (4, 6)))
    placeholder = Placeholder("a moment", *form, True, live, cut)
    boxes = placeholder.__create_chunk_list__()
    assert [(tuple(b.offsets), tuple(b.sizes)) for b in boxes] == [
        ((1, 2), (1, 4)),
        ((2, 0), (1, 6)),
    ]
    room = placeholder.__get_tensor_shard__(MetadataIndex("w", (2, 0)))
    assert room is not None
    room.copy_(torch.arange(6.0).view(1, 6))
    read = placeholder.take_part()
    assert read is not None
    assert read.isnan().tolist() == [True] * 4 + [False] * 6
    assert read[4:].tolist() == [0, 1, 2, 3, 4, 5]
    assert live.tolist() == [0] * 10
    with pytest.raises(RuntimeError, match="already taken from this dict"):
        placeholder.take_part()


@on_ranks(2, raises=dcp.api.CheckpointException, match="Missing key.*param_groups")
def test_other_groups_are_refused(tmp_path: Path) -> None:
    net = Net()
    opt = ZeroRedundancyOptimizer(net.named_parameters(), optim.AdamW)
    advance(opt, net, range(2))
    save(tmp_path, net, opt)
    load(tmp_path, *zero(ADAMW))  # the same parameters in three groups


# --------------------------------------------------------------------------------- saving later


def _saves_later(folder: Path, blocking: bool) -> None:
    net, opt = zero(ADAMW)
    advance(opt, net, range(3))
    # Separate connections, since the next steps communicate meanwhile.
    options: dict[str, Any] = {"process_group": dist.new_group(backend="gloo")}
    if blocking:
        options["storage_writer"] = dcp.FileSystemWriter(folder)
    else:
        options["checkpoint_id"] = folder
    future: Any = dcp.async_save({"model": net, "optim": Sharded(opt)}, **options)
    advance(opt, net, range(3, 9))
    future.result()


@pytest.mark.parametrize("blocking", [False, True])
def test_an_asynchronous_save_has_the_state_of_its_call(tmp_path: Path, blocking: bool) -> None:
    run_ranks(_saves_later, 2, tmp_path, blocking)
    after, *_ = run_ranks(load_one, 3, tmp_path, ADAMW)
    net, opt = plain(ADAMW)
    advance(opt, net, range(3))
    expected = opt.state_dict()
    assert difference(dict(sorted(expected["state"].items())), after["state"]) is None


# ------------------------------------------------------------------------------- what is refused


@on_ranks(2)
def test_a_placeholder_is_not_pickled_or_computed_with() -> None:
    net, opt = zero(ADAMW)
    advance(opt, net, range(2))
    state = Sharded(opt).state_dict()
    found = [leaf for leaf in pytree.tree_leaves(dict(state)) if isinstance(leaf, Placeholder)]
    first = found[0]
    acts: list[Callable[[], Any]] = [
        lambda: pickle.dumps(first),
        lambda: torch.save(state, io.BytesIO()),
        lambda: first + 1,
        lambda: first.clone(),
        lambda: copy.deepcopy(first),
        lambda: torch.empty(first.shape).copy_(first),
        lambda: first.copy_(torch.empty(first.shape)),
        lambda: torch.stack([first, first]),
    ]
    assert len(found) > 5
    for act in acts:
        with pytest.raises(RuntimeError, match=r"'exp_avg' of parameter.*consolidate_state_dict"):
            act()


@pytest.mark.parametrize("module", [False, True])
@on_ranks(3)
def test_without_the_wrapper_every_rank_names_it_and_none_hangs(
    tmp_path: Path, module: bool
) -> None:
    """More ranks than pieces: `opt.state` of the one that owns nothing must say what others' do."""
    net = nn.Linear(8, 8, bias=False)
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, module=net if module else None)
    remedy = r"consolidate_state_dict.*Sharded\(optimizer\).*Sharded\(optimizer\).as_optimizer"
    for stepped in (False, True):
        assert bool(opt.state) is stepped
        with pytest.raises(RuntimeError, match=remedy):
            get_state_dict(net, opt)
        net(torch.ones(1, 8)).sum().backward()
        opt.step()
    with pytest.raises(RuntimeError, match=remedy):
        dcp.save({"optim": opt}, checkpoint_id=tmp_path)
    owners = torch.tensor(len(opt.state))
    dist.all_reduce(owners)
    assert 0 < owners < 3
    opt.state.clear()
    assert not opt.state
