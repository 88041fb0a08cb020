"""An optimizer is saved and loaded by `torch.distributed.checkpoint` as it lies, and loads at any
world size, in any layout and on torch's own side; nothing but a complete load changes it."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problems import LAYOUTS, Case, copies, difference, differing, make_groups, set_gradients, train
from ranks import raises_on_every_rank, run_ranks
from torch import nn, optim
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shardstep import ZeroRedundancyOptimizer
from shardstep.checkpoint import Sharded
from shardstep.checkpoint.dcp.placeholder import Placeholder
from shardstep.plan import Interval, ParamSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ADAMW = Case(optim.AdamW)
MOMENTUM = Case(optim.SGD, {"momentum": 0.9, "dampening": 0.3})
ADAFACTOR = Case(optim.Adafactor)
SAVED = [
    *((case, layout) for case in (ADAMW, MOMENTUM) for layout in LAYOUTS),
    (ADAFACTOR, "whole"),
]


class Net(nn.Module):
    """Parameters of many forms: channels-last, empty, of one element, frozen."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(53, 17)
            self.conv = nn.Conv2d(5, 7, 3)
            self.inner = nn.Sequential(nn.Linear(17, 40), nn.Linear(40, 33))
            self.scale = nn.Parameter(torch.randn(()))
            self.frozen = nn.Parameter(torch.randn(9, 4), requires_grad=False)
            self.long = nn.Parameter(torch.randn(1009))
        self.conv.to(memory_format=torch.channels_last)


def named(case: Case, module: nn.Module) -> list[dict[str, Any]]:
    """Three groups of named parameters."""
    pairs = list(module.named_parameters())
    groups = make_groups([param for _, param in pairs], case.optimizer_class)
    name_of = {param: name for name, param in pairs}
    return [{**g, "params": [(name_of[p], p) for p in g["params"]]} for g in groups]


def zero(case: Case, **options: Any) -> tuple[Net, ZeroRedundancyOptimizer]:
    net = Net()
    opt = ZeroRedundancyOptimizer(
        named(case, net), case.optimizer_class, **options, **case.fresh_options()
    )
    return net, opt


def plain(case: Case, module: nn.Module | None = None) -> tuple[nn.Module, Optimizer]:
    net = Net() if module is None else module
    return net, case.optimizer_class(named(case, net), **case.fresh_options())


def unnamed() -> tuple[nn.Module, Optimizer]:
    net = Net()
    groups = [{**g, "params": [p for _, p in g["params"]]} for g in named(ADAMW, net)]
    return net, optim.AdamW(groups)


def advance(opt: Any, net: nn.Module, steps: range, missing: bool = True) -> list[torch.Tensor]:
    """Take steps with gradients that depend on the step alone."""
    return train(opt, list(net.parameters()), steps, missing=missing)


def unbroken(case: Case, steps: int = 6, missing: bool = True) -> list[torch.Tensor]:
    """The parameters of the unsharded optimizer that was never saved or loaded."""
    net, opt = plain(case)
    return advance(opt, net, range(steps), missing)


def save(folder: Path, net: nn.Module, opt: ZeroRedundancyOptimizer, **options: Any) -> None:
    dcp.save({"model": net, "optim": Sharded(opt, **options)}, checkpoint_id=folder)


def load(folder: Path, net: nn.Module, opt: ZeroRedundancyOptimizer) -> None:
    dcp.load({"model": net, "optim": Sharded(opt)}, checkpoint_id=folder)


def load_and_advance(folder: Path, net: nn.Module, opt: Any, missing: bool = True) -> Any:
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()  # so that a load which does nothing is noticed
    load(folder, net, opt)
    return advance(opt, net, range(3, 6), missing)


# ------------------------------------------------------------- any world size and any layout


def _save_all(folder: Path) -> None:
    for number, (case, layout) in enumerate(SAVED):
        net, opt = zero(case, layout=layout, parameters_as_bucket_view=number % 2 == 0)
        advance(opt, net, range(3))
        opt.param_groups[1]["lr"] = 0.0037  # as a scheduler does
        save(folder / str(number), net, opt)


def _load_all(folder: Path) -> list[str]:
    failures = []
    for number, (case, saved_in) in enumerate(SAVED):
        reference, unsharded = plain(case)
        advance(unsharded, reference, range(3))
        unsharded.param_groups[1]["lr"] = 0.0037
        expected = advance(unsharded, reference, range(3, 6))
        for layout in LAYOUTS if case is not ADAFACTOR else ["whole"]:
            got = load_and_advance(folder / str(number), *zero(case, layout=layout))
            if wrong := differing(expected, got):
                failures.append(f"{case}, {saved_in} to {layout}: parameters {wrong}")
    return failures


@pytest.fixture(scope="module", params=[1, 2, 3])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_save_all, request.param, folder)
    return Path(folder)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_goes_on_as_if_it_had_not_stopped(saved: Path, world_size: int) -> None:
    assert run_ranks(_load_all, world_size, saved) == [[]] * world_size


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.up = nn.Linear(24, 50)
            self.down = nn.Linear(50, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _pass(net: nn.Module, opt: Any, steps: range) -> list[torch.Tensor]:
    for step in steps:
        random = torch.Generator().manual_seed(step)
        net(torch.randn(8, 24, generator=random)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return copies(net.parameters())


def _with_module(folder: Path, saving: bool) -> list[torch.Tensor]:
    net = Tiny()
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, module=net)
    if saving:
        _pass(net, opt, range(3))
        save(folder, net, opt)
        return []
    torch._foreach_zero_([param.detach() for param in net.parameters()])
    load(folder, net, opt)
    return _pass(net, opt, range(3, 6))


def _without_names(folder: Path, saving: bool) -> list[torch.Tensor]:
    net = Net()
    opt = ZeroRedundancyOptimizer(make_groups(list(net.parameters()), optim.AdamW), optim.AdamW)
    if saving:
        advance(opt, net, range(3))
        save(folder, net, opt)
        return []
    return load_and_advance(folder, net, opt)


def test_parameters_without_names_are_known_by_their_positions(tmp_path: Path) -> None:
    run_ranks(_without_names, 2, tmp_path, True)
    for got in run_ranks(_without_names, 3, tmp_path, False):
        assert differing(unbroken(ADAMW), got) == []


def _load_adamw(folder: Path, missing: bool, **options: Any) -> list[torch.Tensor]:
    return load_and_advance(folder, *zero(ADAMW, **options), missing)


def test_without_a_process_group_too(tmp_path: Path) -> None:
    _save_one(tmp_path, ADAMW, 3, missing=True)
    for got in [_load_adamw(tmp_path, True), *run_ranks(_load_adamw, 2, tmp_path, True)]:
        assert differing(unbroken(ADAMW), got) == []


# --------------------------------------------------------------------------- what is in a state


class Nesting(Optimizer):
    """Keeps tensors in tuples, lists and under numbers, values of all kinds, and one for all."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["pair"] = (torch.zeros_like(p, dtype=torch.float64), 3)
                    state["list"] = [torch.ones_like(p, dtype=torch.int8), 1.5, {"none": None}]
                    state["numbers"] = {2: {"deep": torch.zeros_like(p, dtype=torch.bool)}, 3: "x"}
                    state["words"] = ["a", "b"]
                    state["seen"] = 0
                    state["when"] = torch.tensor(0, dtype=torch.int64)
                    state["square"] = torch.zeros(p.numel() % 5 + 20, 3)  # of no form of p's
                state["seen"] += 1
                state["words"] = [f"step {state['seen']}"]
                state["when"] += 1
                state["square"] += float(p.grad.sum())
                state["pair"] = (state["pair"][0] + p.grad, state["pair"][1] + 1)
                state["list"][0].add_(1)
                state["numbers"][2]["deep"].copy_(p.grad > 0)
                p.sub_((group["lr"] * state["pair"][0] / state["seen"]).to(p.dtype))


NESTING = Case(Nesting)


def _consolidated(opt: ZeroRedundancyOptimizer) -> Any:
    """The whole state on rank 0, with options in one order: torch's loading changes it."""
    opt.consolidate_state_dict(to=0)
    if opt.rank > 0:
        return None
    state = opt.state_dict()
    return {**state, "param_groups": [dict(sorted(g.items())) for g in state["param_groups"]]}


def _save_one(
    folder: Path, case: Case, steps: int, missing: bool = False, param_names: bool = False
) -> Any:
    net, opt = zero(case)
    advance(opt, net, range(steps), missing)
    save(folder, net, opt, param_names=param_names)
    return _consolidated(opt)


def _save_in_part(folder: Path) -> Any:
    net, opt = zero(ADAMW)
    set_gradients(list(net.parameters()), 1, missing=False)
    net.long.grad = net.scale.grad = None  # these never take part
    opt.step()
    save(folder, net, opt)
    return _consolidated(opt)


def _load_one(folder: Path, case: Case) -> Any:
    net, opt = zero(case)
    load(folder, net, opt)
    return _consolidated(opt)


LR_TENSOR = Case(optim.Adam, {"lr": torch.tensor(0.003), "betas": (0.8, 0.95), "amsgrad": True})


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *((case, 3) for case in (NESTING, LR_TENSOR, Case(optim.Adagrad), Case(optim.SGD))),
        *((case, 0) for case in (NESTING, ADAMW, MOMENTUM, ADAFACTOR)),
    ],
    ids=str,
)
def test_state_and_options_of_any_form_come_back(tmp_path: Path, case: Case, steps: int) -> None:
    before, *_ = run_ranks(_save_one, 2, tmp_path, case, steps)
    after, *_ = run_ranks(_load_one, 3, tmp_path, case)
    assert difference(before, after) is None
    assert bool(after["state"]) == (steps > 0 and case.optimizer_class is not optim.SGD)


def test_a_parameter_that_never_took_part_has_no_state_afterwards(tmp_path: Path) -> None:
    before, _ = run_ranks(_save_in_part, 2, tmp_path)
    after, *_ = run_ranks(_load_one, 3, tmp_path, ADAMW)
    assert difference(before, after) is None


class Remembering(Optimizer):
    """Keeps the last three gradients in a list that grows step by step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    past = [*self.state[p].get("past", []), p.grad.clone()][-3:]
                    self.state[p]["past"] = past
                    p.sub_(group["lr"] * sum(past))


REMEMBERING = Case(Remembering)


def _load_longer_lists(folder: Path) -> Any:
    net, opt = zero(REMEMBERING)
    with pytest.raises(ValueError, match=r"saved with 3 entries in 'past', and 1 were read"):
        load(folder, net, opt)
    advance(opt, net, range(7, 10), False)
    load(folder, net, opt)
    return _consolidated(opt)


def test_a_list_that_is_longer_there_is_not_cut_short(tmp_path: Path) -> None:
    before, _ = run_ranks(_save_one, 2, tmp_path, REMEMBERING, 3)
    after, *_ = run_ranks(_load_longer_lists, 3, tmp_path)
    assert difference(before, after) is None


def _over_other_state(folder: Path) -> list[Any]:
    """Loading replaces state, also by none."""
    net, opt = zero(ADAMW)
    save(folder / "fresh", net, opt)
    advance(opt, net, range(3))
    save(folder / "trained", net, opt)
    advance(opt, net, range(7, 12))
    load(folder / "trained", net, opt)
    wrong: list[Any] = [*differing(unbroken(ADAMW), advance(opt, net, range(3, 6)))]
    load(folder / "fresh", net, opt)
    return [*wrong, *opt.state]


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    assert run_ranks(_over_other_state, 2, tmp_path) == [[], []]


class Dicing(Optimizer):
    """Draws random numbers."""

    shardstep_layout = "sliced"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.rand_like(p))
                self.state[p]["noise"] = torch.rand_like(p)


def _rehearsal() -> list[Any]:
    net, opt = zero(Case(Dicing))
    torch.manual_seed(3)
    before = copies(net.parameters()), torch.get_rng_state()
    Sharded(opt).state_dict()
    return [
        differing(before[0], copies(net.parameters())),
        torch.equal(before[1], torch.get_rng_state()),
        len(opt.optim.state),
        [param.grad is None for param in net.parameters()].count(False),
    ]


def test_finding_out_the_form_of_the_state_touches_nothing() -> None:
    assert run_ranks(_rehearsal, 2) == [[[], True, 0, 0]] * 2


class Reluctant(Optimizer):
    """Does not step without a closure."""

    shardstep_layout = "whole"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise ValueError("give me a closure")


def _form_unknown() -> None:
    _, opt = zero(Case(Reluctant))
    Sharded(opt).state_dict()


def test_a_class_whose_state_cannot_be_found_out_is_refused() -> None:
    raises_on_every_rank(_form_unknown, 2, RuntimeError, match="give me a closure.*one step first")


# ---------------------------------------------------------------------------- torch's own side


def _torch_loads(folder: Path, names: bool) -> list[torch.Tensor]:
    net, opt = plain(ADAMW) if names else unnamed()
    advance(opt, net, range(9, 11), missing=False)  # so that there is something to replace
    target = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, opt)}
    dcp.load(target, checkpoint_id=folder)
    set_optimizer_state_dict(net, opt, target["optim"])
    net.load_state_dict(target["model"])
    return advance(opt, net, range(3, 6), missing=False)


@pytest.mark.parametrize(("world_size", "names"), [(1, True), (2, False)])
def test_plain_optimizers_load_what_was_saved_here(
    tmp_path: Path, world_size: int, names: bool
) -> None:
    run_ranks(_save_one, 2, tmp_path, ADAMW, 3, False, names)
    expected = unbroken(ADAMW, missing=False)
    for got in run_ranks(_torch_loads, world_size, tmp_path, names):
        assert differing(expected, got) == []


def _torch_saves(folder: Path) -> None:
    net, opt = unnamed()
    ddp = DistributedDataParallel(net)
    advance(opt, net, range(3), missing=False)
    state = get_optimizer_state_dict(ddp, opt)
    dcp.save({"model": net.state_dict(), "optim": state}, checkpoint_id=folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ddp_saved_is_loaded_here(tmp_path: Path, layout: str) -> None:
    run_ranks(_torch_saves, 2, tmp_path)
    for got in run_ranks(partial(_load_adamw, layout=layout), 3, tmp_path, False):
        assert differing(unbroken(ADAMW, missing=False), got) == []


def _fsdp(folder: Path, saving: bool) -> Any:
    net = Tiny()
    for part in (net.up, net.down, net):
        fully_shard(part)
    opt = optim.AdamW(net.parameters())
    if saving:
        _pass(net, opt, range(3))
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, opt)}
    if saving:
        dcp.save(state, checkpoint_id=folder)
        return []
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, opt, state["optim"])
    _pass(net, opt, range(3, 6))
    return [param.full_tensor() for param in net.parameters()]  # type: ignore[attr-defined]


def test_fsdp2_and_module_mode_load_from_each_other_and_themselves(tmp_path: Path) -> None:
    net = Tiny()
    # All ranks have the same data, and the mean over one or two of them is exact.
    expected = _pass(net, optim.AdamW(net.parameters()), range(6))
    run_ranks(_with_module, 2, tmp_path / "ours", True)
    run_ranks(_fsdp, 2, tmp_path / "fsdp", True)
    for load, world_size in ((_fsdp, 2), (_with_module, 2), (_with_module, 1)):
        for saved_by in ("ours", "fsdp"):
            for got in run_ranks(load, world_size, tmp_path / saved_by, False):
                assert differing(expected, got) == [], (load, world_size, saved_by)


def test_what_was_saved_converts_to_one_file_without_shards(tmp_path: Path) -> None:
    run_ranks(_save_one, 2, tmp_path / "sharded", ADAMW, 3)
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


def _survives(folder: Path) -> list[Any]:
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
    return differing(unbroken(ADAMW), advance(opt, net, range(3, 6)))


def test_a_load_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    assert run_ranks(_survives, 2, tmp_path) == [[], []]


def test_what_was_not_read_is_not_a_number() -> None:
    placeholder = Placeholder("a moment", (4, 6), torch.float32, torch.device("cpu"), True)
    live = torch.zeros(10)
    spec = ParamSpec.of("w", (4, 6))
    placeholder.hold(live, (Interval(8, 18), spec))
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


def _other_groups(folder: Path) -> None:
    net = Net()
    opt = ZeroRedundancyOptimizer(net.named_parameters(), optim.AdamW)
    advance(opt, net, range(2))
    save(folder, net, opt)
    load(folder, *zero(ADAMW))  # the same parameters in three groups


def test_other_groups_are_refused(tmp_path: Path) -> None:
    raises_on_every_rank(
        _other_groups, 2, dcp.api.CheckpointException, tmp_path, match="Missing key.*param_groups"
    )


def _swapped_groups(folder: Path) -> list[Any]:
    """Groups are known by their parameters, not by their places."""
    net, opt = zero(ADAMW)
    advance(opt, net, range(3))
    save(folder, net, opt)
    net = Net()
    groups = [{"params": group["params"]} for group in named(ADAMW, net)[::-1]]
    opt = ZeroRedundancyOptimizer(groups, optim.AdamW)
    return differing(unbroken(ADAMW), load_and_advance(folder, net, opt))


def test_groups_in_another_order_keep_their_options(tmp_path: Path) -> None:
    assert run_ranks(_swapped_groups, 2, tmp_path) == [[], []]


# --------------------------------------------------------------------------------- saving later


def _saves_later(folder: Path, blocking: bool) -> None:
    net, opt = zero(ADAMW)
    advance(opt, net, range(3))
    # Connections of its own, since the next steps communicate meanwhile.
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
    after, *_ = run_ranks(_load_one, 3, tmp_path, ADAMW)
    net, opt = plain(ADAMW)
    advance(opt, net, range(3))
    expected = opt.state_dict()
    assert difference(dict(sorted(expected["state"].items())), after["state"]) is None


# ------------------------------------------------------------------------------- what is refused


def _refusals() -> list[str]:
    net, opt = zero(ADAMW)
    advance(opt, net, range(2))
    state = Sharded(opt).state_dict()
    found = [leaf for leaf in pytree.tree_leaves(dict(state)) if isinstance(leaf, Placeholder)]
    first = found[0]
    acts = {
        "pickle": lambda: pickle.dumps(first),
        "torch.save": lambda: torch.save(state, io.BytesIO()),
        "add": lambda: first + 1,
        "clone": lambda: first.clone(),
        "deepcopy": lambda: copy.deepcopy(first),
        "copy from": lambda: torch.empty(first.shape).copy_(first),
        "copy to": lambda: first.copy_(torch.empty(first.shape)),
        "stack": lambda: torch.stack([first, first]),
    }
    failures = [] if len(found) > 10 else ["too few placeholders"]
    for name, act in acts.items():
        try:
            act()
        except RuntimeError as error:
            if "consolidate_state_dict" in str(error) and "'exp_avg' of parameter" in str(error):
                continue
            failures.append(f"{name}: {error}")
        else:
            failures.append(f"{name} was done")
    return failures


def test_a_placeholder_is_not_pickled_or_computed_with() -> None:
    assert run_ranks(_refusals, 2) == [[], []]


def _asked_without_wrapper(way: str, folder: Path) -> None:
    net, opt = zero(ADAMW)
    if way == "dcp":
        dcp.save({"optim": opt}, checkpoint_id=folder)
        return
    if way == "with state":
        advance(opt, net, range(2))
        opt.zero_grad()
    get_optimizer_state_dict(net, opt)


@pytest.mark.parametrize("way", ["dcp", "with state", "without state"])
def test_without_the_wrapper_the_error_points_to_it(tmp_path: Path, way: str) -> None:
    match = r"consolidate_state_dict.*pass shardstep.checkpoint.Sharded\(optimizer\)"
    raises_on_every_rank(_asked_without_wrapper, 2, RuntimeError, way, tmp_path, match=match)


class App:
    """A user's own `Stateful`, which asks its parts."""

    def __init__(self, opt: ZeroRedundancyOptimizer) -> None:
        self.opt = Sharded(opt)
        self.epoch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"opt": self.opt.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.opt.load_state_dict(state_dict["opt"])
        self.epoch = state_dict["epoch"]


def _inside_another(folder: Path) -> list[Any]:
    net, opt = zero(ADAMW)
    app = App(opt)
    app.epoch = 7
    advance(opt, net, range(3))
    dcp.save({"app": app, "model": net}, checkpoint_id=folder)
    net, opt = zero(ADAMW, layout="whole")
    app = App(opt)
    dcp.load({"app": app, "model": net}, checkpoint_id=folder)
    assert isinstance(Sharded(opt), Stateful)
    return [app.epoch, *differing(unbroken(ADAMW), advance(opt, net, range(3, 6)))]


def test_it_can_be_part_of_something_else(tmp_path: Path) -> None:
    assert run_ranks(_inside_another, 2, tmp_path) == [[7], [7]]


class CountsOnTheCPU(optim.Optimizer):
    """Makes its counter without saying where, as torchao's classes do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["average"] = torch.zeros_like(param)
                state["step"] += 1


def test_a_counter_that_is_not_there_yet_is_expected_where_a_step_makes_it() -> None:
    """On the CPU, whatever device the parameters are on; here on one without data."""

    def elsewhere(piece: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(torch.empty_like(piece, device="meta"))

    opt = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(4, 4))], CountsOnTheCPU)
    with mock.patch("shardstep.local.local_optimizer._copy", elsewhere):
        states, _ = opt.mode.pipeline.local.rehearse([0])
    devices = {key: value.device.type for key, value in states[0].items()}
    assert devices == {"step": "cpu", "average": "meta"}
