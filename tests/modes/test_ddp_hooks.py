"""DDP with the step inside its backward trains like DDP with the unsharded optimizer.

Everywhere here both hooks and `register` go through the same loop as DDP with the same
communication hook and an ordinary optimizer. At two ranks the arithmetic is the same, so losses and
parameters have to be the same to the bit, from the first iteration on.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_ways import (
    HOOKS,
    SGD_MOMENTUM,
    WAYS,
    Loop,
    compare,
    expected,
    in_ddp,
    overlapping,
    plain_loop,
    seen_in,
)
from doubles import AnyOrder, LateArrival, behind_the_door
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    PROBLEMS,
    Branching,
    Kind,
    Problem,
    Setup,
    failing,
    furthest,
    noise,
    rank,
    train,
)
from problems import copies, difference, differing
from ranks import raises_on_every_rank, run_ranks
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step, register

FINE = [[], []]


# DDP compares the annotations of a hook with classes, so that here, where they are strings, hooks
# that it is handed have none.


def at_once(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that is done when it returns: the next bucket finds it so."""
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# ------------------------------------------------------------------------ every option of DDP's


def every_option(static: bool) -> list[str]:
    """Both values of `shard_buckets`, which is there for compatibility alone."""
    checks = []
    for view, shard_buckets in itertools.product((False, True), repeat=2):
        for way, found in compare(
            plain_loop(),
            gradient_as_bucket_view=view,
            static_graph=static,
            shard_buckets=shard_buckets,
        ):
            checks.append((f"{way}, view={view}, shard_buckets={shard_buckets}", found))
    return failing(checks)


@pytest.mark.parametrize("static_graph", [False, True])
def test_parity_from_the_first_iteration(static_graph: bool) -> None:
    assert run_ranks(every_option, 2, static_graph) == FINE


def rebuilt_buckets() -> tuple[int, int]:
    """How many buckets DDP has at first, and after it has seen the order of gradients."""
    seen: list[int] = []

    def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.index())
        return allreduce_hook(None, bucket)

    setup = overlapping("interleaved", MLP_PROBLEM.fresh(), comm_hook=count)
    setup.backward(0)
    first = len(seen)
    setup.finish()
    setup.backward(1)
    return first, len(seen) - first


def test_ddp_has_several_buckets_in_these_tests_and_rebuilds_them() -> None:
    for first, then in run_ranks(rebuilt_buckets, 2):
        assert then > 2
        assert first != then


def models() -> list[str]:
    checks = []
    for name, problem in PROBLEMS.items():
        for view in (False, True):
            found = compare(plain_loop(problem, 4), problem, gradient_as_bucket_view=view)
            checks += [(f"{name}, {way}, view={view}", each) for way, each in found]
    return failing(checks)


def test_every_kind_of_model() -> None:
    assert run_ranks(models, 2) == FINE


class Checkpointed(MLP):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        for layer in self.layers[:-1]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        out: Tensor = self.layers[-1](x)
        return out


class CheckpointedAnew(Checkpointed):
    reentrant = False


def checkpointing() -> list[str]:
    checks = []
    for model, static in (
        (Checkpointed, True),
        (CheckpointedAnew, True),
        (CheckpointedAnew, False),
    ):
        problem = Problem(model, MLP_PROBLEM.loss)
        for way, found in compare(plain_loop(problem), problem, static_graph=static):
            checks.append((f"{way}, {model.__name__}, static_graph={static}", found))
    return failing(checks)


def test_activation_checkpointing() -> None:
    """Passes within the pass end earlier; nothing may be taken for complete there."""
    assert run_ranks(checkpointing, 2) == FINE


# ---------------------------------------------------------------------------- optimizer classes


class TrustRatio(Optimizer):
    """Somebody else's class: needs whole tensors, and assigns to `data`."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 1 - group["beta"])
                ratio = param.norm().clamp(0.1, 10) / mean.norm().clamp_min(1e-3)
                param.data = param.data - group["lr"] * ratio * mean


class CountsInGroups(Optimizer):
    """Counts its steps beside the parameters, if there is anything to step on.

    A rank whose parameters have no gradient counts otherwise than the others, so it would be
    refused. Here every parameter has one, and the class says that it may be divided.
    """

    shardstep_layout = "whole"

    shardstep_layout = "whole"

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [param for param in group["params"] if param.grad is not None]
            group["count"] += bool(given)
            for param in given:
                param.sub_(param.grad, alpha=group["lr"] / group["count"])


class CountsInItself(Optimizer):
    """Counts its steps in an attribute."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / self.count)


class Matrices(nn.Module):
    """Muon takes nothing but matrices."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [16, 96, 96, 48, 4]
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


MATRICES = Problem(Matrices, MLP_PROBLEM.loss)
KINDS: list[Kind] = [
    SGD_MOMENTUM,
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (optim.Adam, {"lr": torch.tensor(0.01), "fused": True}),
    (optim.Adafactor, {"lr": 0.01}),
    (TrustRatio, {}),
]


def classes() -> list[str]:
    checks = []
    for kind in KINDS:
        checks += [(f"{kind}, {way}", found) for way, found in compare(plain_loop(), kind=kind)]
    if hasattr(optim, "Muon"):
        muon: Kind = (optim.Muon, {"lr": 0.01})
        checks += [(f"Muon, {w}", f) for w, f in compare(plain_loop(MATRICES), MATRICES, muon)]
    for counting in (CountsInGroups, CountsInItself):
        for way, found in compare(plain_loop(), kind=(counting, {}), ways=["hook", "register"]):
            checks.append((f"{counting.__name__}, {way}", found))
    return failing(checks)


def test_every_kind_of_optimizer() -> None:
    assert run_ranks(classes, 2) == FINE


def counting_by_buckets(counting: type[Optimizer], module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    setup = overlapping("interleaved", module(), (counting, {}), comm_hook=at_once)
    setup.backward(0)


class OneWeight(nn.Module):
    """There is nothing in it for the second rank to own, and so to count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("module", [MLP, OneWeight])
@pytest.mark.parametrize("counting", [CountsInGroups, CountsInItself])
def test_what_counts_steps_cannot_step_by_buckets(
    counting: type[Optimizer], module: type[nn.Module]
) -> None:
    match = f"{counting.__name__} counts its steps.*use hook_with_zero_step"
    raises_on_every_rank(counting_by_buckets, 2, RuntimeError, counting, module, match=match)


def several_groups(module: nn.Module) -> list[Any]:
    params = list(module.parameters())
    return [
        {"params": params[::3], "lr": 0.02},
        {"params": params[1::3], "weight_decay": 0.3, "betas": (0.7, 0.9)},
        {"params": params[2::3], "eps": 1e-3},
    ]


Scheduler = Callable[[Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(
        opt, [lambda n: 1 + n, lambda n: 0.5**n] * 1 + [lambda n: 1.0]
    ),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    "OneCycleLR, which changes betas": lambda opt: lr_scheduler.OneCycleLR(opt, 0.05, 8),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, "max", 0.5, patience=0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(opt, 0.8)], [3]
    ),
}


def scheduled(make: Scheduler) -> Loop:
    def loop(setup: Setup) -> list[Tensor]:
        scheduler, losses = make(setup.opt), []
        for step in range(6):
            losses.append(setup.backward(step))
            setup.opt.step()
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([float(-step)] if plateau else []))
            setup.opt.zero_grad()
            losses.append(torch.tensor([group["lr"] for group in setup.opt.param_groups]))
        return losses

    return loop


def options_that_change() -> list[str]:
    checks = []
    for name, make in SCHEDULERS.items():
        for way, found in compare(scheduled(make), groups=several_groups):
            checks.append((f"{name}, {way}", found))
    return failing(checks)


def test_groups_with_options_of_their_own_and_schedulers() -> None:
    assert run_ranks(options_that_change, 2) == FINE


# ------------------------------------------------------------------------- communication hooks


def bf16(state, bucket):  # type: ignore[no-untyped-def]
    """Under another name: DDP refuses the one it knows where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def power_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def communication_hooks() -> list[str]:
    checks = []
    for hook in (allreduce_hook, default_hooks.fp16_compress_hook, bf16, at_once):
        for kind in (ADAMW, (optim.Adafactor, {"lr": 0.01})):
            for way, found in compare(plain_loop(), kind=kind, ways=list(HOOKS), comm_hook=hook):
                checks.append((f"{hook.__name__}, {kind}, {way}", found))
    # One bucket: PowerSGD sends from the threads in which earlier messages arrive, and on Gloo
    # DDP's own buckets mix their messages up.
    for way, found in compare(
        plain_loop(steps=6),
        ways=list(HOOKS),
        comm_hook=powerSGD_hook.powerSGD_hook,
        state=power_state,
        bucket_cap_mb=25,
    ):
        checks.append((f"PowerSGD, {way}", found))
    return failing(checks)


def test_any_communication_hook() -> None:
    assert run_ranks(communication_hooks, 2) == FINE


# --------------------------------------------------------------------------- unused parameters


def one_branch(model: Callable[..., Any], step: int) -> Tensor:
    out: Tensor = model(noise(step, 6, 16), [0]).square().mean()
    return out


def branch_of_rank(model: Callable[..., Any], step: int) -> Tensor:
    """Each rank has a branch of its own, and the graph of each stays as it is."""
    out: Tensor = model(noise(step, 6, 16), [rank()]).square().mean()
    return out


def fewer_branches(model: Callable[..., Any], step: int) -> Tensor:
    """Branches fall out of use one by one; everybody has been stepped on before."""
    out: Tensor = model(noise(step, 6, 16), range(max(1, 3 - step))).square().mean()
    return out


def unused() -> list[str]:
    checks = []
    for loss in (one_branch, branch_of_rank, fewer_branches):
        for kind in (ADAMW, SGD_MOMENTUM):
            problem = Problem(Branching, loss, find_unused=True)
            found = compare(plain_loop(problem, 5), problem, kind)
            checks += [(f"{loss.__name__}, {kind}, {way}", each) for way, each in found]
    for loss, view in itertools.product((one_branch, branch_of_rank), (False, True)):
        problem = Problem(Branching, loss)
        found = compare(
            plain_loop(problem, 5), problem, static_graph=True, gradient_as_bucket_view=view
        )
        checks += [(f"static, {loss.__name__}, view={view}, {way}", each) for way, each in found]
    return failing(checks)


@pytest.mark.slow
def test_parameters_that_nobody_used_stay_as_they_are() -> None:
    """Not even weight decay and momentum touch them, as under DDP."""
    assert run_ranks(unused, 2) == FINE


def freeze_and_thaw(problem: Problem) -> Loop:
    def loop(setup: Setup) -> list[Tensor]:
        losses = []
        for step in range(6):
            if step in (2, 4):
                setup.module.branches[0].requires_grad_(step == 4)  # type: ignore[operator,union-attr]
            losses.append(setup.backward(step, problem))
            setup.finish()
        return losses

    return loop


def all_branches(model: Callable[..., Any], step: int) -> Tensor:
    out: Tensor = model(noise(step, 6, 16), [0, 1, 2]).square().mean()
    return out


class PartlyFrozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[3].bias.requires_grad_(False)


def frozen() -> list[str]:
    problem = Problem(Branching, all_branches, find_unused=True)
    partly = Problem(PartlyFrozen, MLP_PROBLEM.loss)
    return failing(
        [
            *compare(freeze_and_thaw(problem), problem),
            *compare(plain_loop(partly), partly),
            *compare(plain_loop(partly), partly, static_graph=True, gradient_as_bucket_view=True),
        ]
    )


def test_frozen_parameters() -> None:
    assert run_ranks(frozen, 2) == FINE


# --------------------------------------------------------------------- loops that do other things


def accumulating(setup: Setup) -> list[Tensor]:
    losses = []
    for step in range(4):
        with setup.no_sync():
            losses += [setup.backward(10 * step + 1), setup.backward(10 * step + 2)]
        losses.append(setup.backward(10 * step))
        setup.finish()
    return losses


def accumulating_branches(setup: Setup) -> None:
    problem = Problem(Branching, fewer_branches, find_unused=True)
    for step in range(4):
        with setup.no_sync():
            setup.backward(max(0, step - 1), problem)
        setup.backward(step, problem)
        setup.finish()


def evaluating(setup: Setup) -> list[Tensor]:
    seen = []
    for step in range(4):
        seen.append(setup.backward(step))
        setup.opt.step()
        setup.module.eval()
        with torch.no_grad():
            seen += [setup.model(noise(50, 3, 16, of=0)), setup.module(noise(51, 3, 16, of=0))]
        setup.module.train()
        setup.opt.zero_grad()
    return seen


def clearing_first(setup: Setup) -> None:
    for step in range(4):
        setup.opt.zero_grad()
        setup.backward(step)
        setup.opt.step()


def never_clearing(setup: Setup) -> None:
    for step in range(3):
        setup.backward(step)
        setup.opt.step()


def filling_with_zeros(setup: Setup) -> None:
    for step in range(3):
        setup.backward(step)
        setup.opt.step()
        setup.opt.zero_grad(set_to_none=False)


def moving_parameters(setup: Setup) -> None:
    """Somebody gives a parameter other memory, or other values, between iterations."""
    for step in range(4):
        if step == 2:
            first, *_, last = setup.module.parameters()
            first.data = first.data.clone()
            with torch.no_grad():
                last.mul_(0.5)
        setup.backward(step)
        setup.finish()


def other_loops() -> list[str]:
    checks = []
    for view in (False, True):
        for loop in (accumulating, evaluating, clearing_first, moving_parameters):
            found = compare(loop, gradient_as_bucket_view=view)
            checks += [(f"{loop.__name__}, view={view}, {way}", each) for way, each in found]
        for loop in (never_clearing, filling_with_zeros):
            found = compare(loop, ways=list(HOOKS), gradient_as_bucket_view=view)
            checks += [(f"{loop.__name__}, view={view}, {way}", each) for way, each in found]
        problem = Problem(Branching, fewer_branches, find_unused=True)
        found = compare(accumulating_branches, problem, gradient_as_bucket_view=view)
        checks += [(f"accumulating_branches, view={view}, {way}", each) for way, each in found]
    return failing(checks)


def test_accumulating_evaluating_clearing_and_moving() -> None:
    assert run_ranks(other_loops, 2) == FINE


def chained(make: Callable[[nn.Module], Setup]) -> list[Tensor]:
    """One backward pass through two DDP modules, each with an optimizer of its own."""
    torch.manual_seed(3)
    front, back = make(nn.Linear(16, 16)), make(MLP())
    losses = []
    for step in range(4):
        loss = back.model(front.model(noise(step, 6, 16))).square().mean()
        loss.backward()
        losses.append(loss.detach())
        front.finish()
        back.finish()
    return [*losses, *front.params, *back.params]


def two_modules() -> list[str]:
    reference = chained(expected)
    return failing(
        (way, differing(reference, chained(lambda module, way=way: overlapping(way, module))))
        for way in WAYS
    )


def test_two_modules_in_one_backward() -> None:
    assert run_ranks(two_modules, 2) == FINE


def groups_added_before() -> list[str]:
    reference = seen_in(expected(MLP_PROBLEM.fresh()), plain_loop())
    checks = []
    for way in WAYS:
        model = in_ddp(MLP_PROBLEM.fresh())
        first, *rest = model.parameters()
        opt: Any = ZeroRedundancyOptimizer(
            [first], ADAMW[0], overlap_with_ddp=True, bucket_bytes=1, **ADAMW[1]
        )
        opt.add_param_group({"params": rest})
        if way == "register":
            register(model, opt)
        else:
            model.register_comm_hook(None, HOOKS[way](allreduce_hook, model, opt))
        setup = Setup(model, model.module, opt, model.no_sync, lambda: torch.zeros(()))
        checks.append((way, differing(reference, seen_in(setup, plain_loop()))))
    return failing(checks)


def test_a_group_may_be_added_before_the_hook_is_made() -> None:
    assert run_ranks(groups_added_before, 2) == FINE


# ---------------------------------------------------------------- nothing stale, nothing counted


def read_after_backward(double: Any) -> list[str]:
    """What somebody reads who comes right after backward, in every way that there is."""
    checks = []
    reference = expected(MLP_PROBLEM.fresh())
    with behind_the_door(double) if double else contextlib.nullcontext():
        setups = {way: overlapping(way, MLP_PROBLEM.fresh()) for way in WAYS}
    for step in range(3):
        reference.backward(step)
        reference.finish()
        for way, setup in setups.items():
            setup.backward(step)
            readers: dict[str, Callable[[Setup], Iterable[Tensor]]] = {
                "state_dict": lambda s: s.model.state_dict().values(),  # type: ignore[attr-defined]
                "module": lambda s: s.module.state_dict().values(),
                "copy": lambda s: copy.deepcopy(s.module).parameters(),
                "clones": lambda s: [p.detach().clone() for p in s.module.parameters()],
            }
            names = list(readers)
            read = readers[names[step % len(names)]]
            found = differing(copies(reference.module.parameters()), copies(read(setup)))
            checks.append((f"{way}, step {step}", found))
            setup.finish()
    return failing(checks)


@pytest.mark.parametrize("double", [None, LateArrival, AnyOrder])
def test_parameters_read_right_after_backward_are_up_to_date(double: Any) -> None:
    assert run_ranks(read_after_backward, 2, double) == FINE


def behind_doubles() -> list[str]:
    checks = []
    problem = PROBLEMS["branching"]
    for double in (LateArrival, AnyOrder):
        with behind_the_door(double):
            for way, found in [
                *compare(plain_loop()),
                *compare(plain_loop(), ways=list(HOOKS), comm_hook=at_once),
                *compare(accumulating, gradient_as_bucket_view=True),
                *compare(plain_loop(problem), problem),
            ]:
                checks.append((f"{double.__name__}, {way}", found))
    return failing(checks)


def test_no_result_is_used_before_it_has_arrived() -> None:
    assert run_ranks(behind_doubles, 2) == FINE


def hooks_of_the_step() -> list[tuple[int, int]]:
    counted = []
    for way in WAYS:
        setup = overlapping(way, MLP_PROBLEM.fresh())
        before: list[int] = []
        after: list[int] = []
        setup.opt.register_step_pre_hook(lambda *_, seen=before: seen.append(1))
        setup.opt.register_step_post_hook(lambda *_, seen=after: seen.append(1))
        train(setup, MLP_PROBLEM, range(3))
        counted.append((len(before), len(after)))
    return counted


def test_hooks_on_the_step_run_once_for_each() -> None:
    """An average of the weights, say, that is updated after every step."""
    assert run_ranks(hooks_of_the_step, 2) == [[(3, 3)] * 3] * 2


class ReadsPastAutograd(nn.Module):
    """Backward needs the last layer's weight once more, after its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) @ self.layers[-1].weight.detach()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


READS = Problem(ReadsPastAutograd, MLP_PROBLEM.loss)


def read_in_backward() -> list[str]:
    return failing(compare(plain_loop(READS), READS, ways=["hook", "register"]))


def read_in_backward_by_buckets() -> None:
    setup = overlapping("interleaved", READS.fresh(), comm_hook=at_once)
    for step in range(3):
        setup.backward(step, READS)
        setup.finish()


def test_no_parameter_changes_while_backward_needs_it() -> None:
    assert run_ranks(read_in_backward, 2) == FINE
    # Whoever has stepped already has to say so, whether or not it owns the weight.
    raises_on_every_rank(
        read_in_backward_by_buckets, 2, RuntimeError, match="modified by an inplace operation"
    )


# ------------------------------------------------------------------------------------ the state


def state_after(steps: int) -> list[str]:
    """Saved after so many iterations, the state is the unsharded one, and training goes on."""
    checks: list[tuple[str, Any]] = []
    plain = expected(MLP_PROBLEM.fresh(), groups=several_groups)
    train(plain, MLP_PROBLEM, range(steps))
    whole = copy.deepcopy(plain.opt.state_dict())
    train(plain, MLP_PROBLEM, range(steps, steps + 3))
    for way in WAYS:
        setup = overlapping(way, MLP_PROBLEM.fresh(), groups=several_groups)
        for step in range(steps):
            setup.backward(step)
            setup.opt.step()
            if step < steps - 1:
                setup.opt.zero_grad()
        setup.opt.consolidate_state_dict(to=1)  # gathers may be in flight, gradients are there
        state = [setup.opt.state_dict() if rank() == 1 else None]
        if rank() == 1:
            checks.append((f"{way}, state", difference(whole, state[0])))
        dist.broadcast_object_list(state, src=1)
        assert state[0] is not None
        weights = copy.deepcopy(setup.module.state_dict())
        for other in WAYS:
            again = overlapping(other, MLP_PROBLEM.fresh(), groups=several_groups)
            again.module.load_state_dict(weights)
            again.opt.load_state_dict(state[0])
            train(again, MLP_PROBLEM, range(steps, steps + 3))
            checks.append((f"{way}, then {other}", differing(plain.params, again.params)))
        setup.opt.zero_grad()
        train(setup, MLP_PROBLEM, range(steps, steps + 3))
        checks.append((f"{way}, going on", differing(plain.params, setup.params)))
    return failing(checks)


@pytest.mark.parametrize("steps", [1, 3])
def test_state_is_saved_and_loaded(steps: int) -> None:
    assert run_ranks(state_after, 2, steps) == FINE


# ----------------------------------------------------------------------------- groups and ranks


def in_a_subgroup() -> list[str]:
    """Global ranks 1 and 2 are ranks 0 and 1 of their group; DDP's default is another."""
    group = dist.new_group([1, 2])
    if rank() == 0:
        return []
    checks = []
    reference = seen_in(
        expected(MLP_PROBLEM.fresh(), process_group=group),
        plain_loop(),
    )
    for way in WAYS:
        setup = overlapping(
            way,
            MLP_PROBLEM.fresh(),
            process_group=group,
            state=lambda: group,
            zero={"process_group": group},
        )
        checks.append((way, differing(reference, seen_in(setup, plain_loop()))))
    return failing(checks)


def test_within_a_subgroup() -> None:
    assert run_ranks(in_a_subgroup, 3) == [[]] * 3


def at_more_ranks(ways: Iterable[str]) -> tuple[list[str], list[list[Tensor]]]:
    """With the same hook in DDP the hooks' arithmetic is the same at any number of ranks. What
    `register` adds up, it adds in the order of the ranks; Gloo's all-reduce in another."""
    problem = PROBLEMS["branching"]
    found: list[tuple[str, Any]] = []
    seen = []
    for each in (MLP_PROBLEM, problem):
        options = {"find_unused_parameters": each.find_unused}
        reference = seen_in(
            expected(each.fresh(), comm_hook=allreduce_hook, **options), plain_loop(each)
        )
        for way in ways:
            got = seen_in(overlapping(way, each.fresh(), **options), plain_loop(each))
            if way == "register":
                found.append((way, furthest(reference, got) > 1e-4))
            else:
                found.append((way, differing(reference, got)))
            seen.append(got)
    return failing(found), seen


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_other_numbers_of_ranks(world_size: int) -> None:
    first = run_ranks(at_more_ranks, world_size, WAYS)
    assert [found for found, _ in first] == [[]] * world_size
    for _, seen in first:
        # Losses are each rank's own; the parameters are everybody's.
        for got, other in zip(seen, first[0][1], strict=True):
            assert differing(got[5:], other[5:]) == []
    for (_, before), (_, after) in zip(
        first, run_ranks(at_more_ranks, world_size, WAYS), strict=True
    ):
        for one, two in zip(before, after, strict=True):
            assert differing(one, two) == []


def sharded_within(ways: Iterable[str]) -> list[str]:
    """DDP over four ranks, the state divided among pairs of them: each pair has a copy."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    reference = seen_in(expected(MLP_PROBLEM.fresh(), comm_hook=allreduce_hook), plain_loop())
    checks = []
    for way in ways:
        setup = overlapping(way, MLP_PROBLEM.fresh(), zero={"process_group": pairs[rank() // 2]})
        checks.append((way, differing(reference, seen_in(setup, plain_loop()))))
    return failing(checks)


def test_the_state_may_be_divided_among_some_of_ddps_ranks() -> None:
    assert run_ranks(sharded_within, 4, list(HOOKS)) == [[]] * 4


# ------------------------------------------------------------------------------- uneven inputs


def uneven(
    inputs: Callable[[], int],
    problem: Problem = MLP_PROBLEM,
    *,
    accumulate: bool = False,
    clear_first: bool = False,
    divide_by_initial_world_size: bool = True,
) -> Loop:
    def loop(setup: Setup) -> None:
        joinables = [each for each in (setup.model, setup.opt) if isinstance(each, Joinable)]
        with Join(joinables, divide_by_initial_world_size=divide_by_initial_world_size):
            for step in range(inputs()):
                if clear_first:
                    setup.opt.zero_grad()
                if accumulate:
                    with setup.no_sync():
                        setup.backward(step + 100, problem)
                setup.backward(step, problem)
                setup.opt.step()
                if not clear_first:
                    setup.opt.zero_grad()

    return loop


def last_goes_on() -> int:
    return 2 + 2 * rank()


def first_goes_on() -> int:
    """And the last rank has nothing at all."""
    return 2 * (dist.get_world_size() - 1 - rank())


PLAIN_SGD: Kind = (optim.SGD, {"lr": 0.05})


def joining(world_size: int) -> list[str]:
    checks: list[tuple[str, Any]] = []

    def check(name: str, loop: Loop, *args: Any, **options: Any) -> None:
        if world_size > 2:  # DDP divides by three in another way than its own hook does
            options = {"comm_hook": allreduce_hook, "ways": list(HOOKS), **options}
        checks.extend((f"{name}, {way}", found) for way, found in compare(loop, *args, **options))

    for view, static in itertools.product((False, True), repeat=2):
        check(
            f"view={view}, static={static}",
            uneven(last_goes_on),
            gradient_as_bucket_view=view,
            static_graph=static,
        )
    check("first goes on", uneven(first_goes_on))
    check("clearing first", uneven(last_goes_on, clear_first=True))
    check("accumulating", uneven(last_goes_on, accumulate=True))
    check("Adafactor", uneven(last_goes_on), kind=(optim.Adafactor, {"lr": 0.01}))
    for loss in (one_branch, fewer_branches):
        problem = Problem(Branching, loss, find_unused=True)
        for clear_first in (False, True):
            loop = uneven(last_goes_on, problem, clear_first=clear_first)
            name = f"{loss.__name__}, clear_first={clear_first}"
            check(name, loop, problem, ways=list(HOOKS))
            # DDP goes on counting as used what a joined rank used last, and gives it a gradient
            # of zeros. `register` does not; where zeros change nothing, it is the same.
            if world_size == 2:
                kind = ADAMW if loss is one_branch else PLAIN_SGD
                check(name, loop, problem, kind, ways=["register"])
    not_by_all = uneven(last_goes_on, divide_by_initial_world_size=False)
    check("other divisor", not_by_all, ways=list(HOOKS), comm_hook=allreduce_hook)
    return failing(checks)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_inputs(world_size: int) -> None:
    assert run_ranks(joining, world_size, world_size) == [[]] * world_size


def after_joining() -> list[str]:
    """What a rank without data did not see it knows all the same: the state is the last step's."""
    checks: list[tuple[str, Any]] = []
    for way in WAYS:
        setup = overlapping(way, MLP_PROBLEM.fresh())
        seen_in(setup, uneven(first_goes_on))
        setup.opt.consolidate_state_dict()
        if rank() == 0:
            state = setup.opt.state_dict()["state"]
            checks.append((way, {float(each["step"]) for each in state.values()} != {2.0}))
    return failing(checks)


def test_the_state_of_joined_ranks_is_current() -> None:
    assert run_ranks(after_joining, 2) == FINE


# --------------------------------------------------------------------------------------- errors


def make_zero(model: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, lr=0.1, **{"overlap_with_ddp": True, **options}
    )


def tie(way: str, model: Any, opt: Any) -> None:
    if way == "register":
        register(model, opt)
    else:
        HOOKS[way](allreduce_hook, model, opt)


def without_overlap(way: str) -> None:
    model = in_ddp(MLP())
    tie(way, model, make_zero(model, overlap_with_ddp=False))


def other_parameters(way: str) -> None:
    tie(way, in_ddp(MLP()), make_zero(MLP()))


def not_in_ddp(way: str) -> None:
    model = MLP()
    tie(way, model, make_zero(model))


def the_wrong_way_round(way: str) -> None:
    model = in_ddp(MLP())
    tie(way, make_zero(model), model)


def too_few_parameters(way: str) -> None:
    model = in_ddp(MLP())
    tie(way, model, make_zero(model.module.layers))
    model.module.late = nn.Linear(3, 3)
    tie(way, model, make_zero(model.module.layers))


def a_closure(way: str) -> None:
    setup = overlapping(way, MLP())
    setup.backward(0)
    setup.opt.step(lambda: 0.0)


def never_tied(way: str) -> None:
    model = in_ddp(MLP())
    make_zero(model).step()


def never_registered(way: str) -> None:
    model = in_ddp(MLP())
    opt = make_zero(model)
    hook_with_zero_step(allreduce_hook, model, opt)
    model(noise(0, 6, 16)).sum().backward()
    opt.step()


def module_too(way: str) -> None:
    model = MLP()
    make_zero(model, module=model)


def ignored_by_ddp(way: str) -> None:
    module: Any = MLP()
    module._ddp_params_and_buffers_to_ignore = ["layers.2.weight"]
    model = in_ddp(module)
    tie(way, model, make_zero(model))


def beyond_ddp(way: str) -> None:
    alone = [dist.new_group([each]) for each in range(2)][rank()]
    model = in_ddp(MLP(), process_group=alone)
    tie(way, model, make_zero(model))


def not_all_joined(way: str) -> None:
    setup = overlapping(way, MLP())
    with Join([setup.model]):  # type: ignore[list-item]
        for step in range(2 + rank()):
            setup.backward(step)


def joined_the_other_way_round(way: str) -> None:
    setup = overlapping(way, MLP())
    with Join([setup.opt, setup.model]):  # type: ignore[list-item]
        for step in range(2 + rank()):
            setup.backward(step)


ERRORS: dict[Callable[[str], None], tuple[type[Exception], str]] = {
    without_overlap: (ValueError, "constructed with overlap_with_ddp=True"),
    other_parameters: (ValueError, "parameter 0 of the optimizer is not a parameter of the DDP"),
    not_in_ddp: (TypeError, "has to be a DistributedDataParallel and zero .* not a MLP and a Zero"),
    the_wrong_way_round: (TypeError, "not a ZeroRedundancyOptimizer and a DistributedData"),
    too_few_parameters: (ValueError, "'late.weight' of the DDP module trains but was not given"),
    a_closure: (ValueError, "cannot evaluate a closure"),
    never_tied: (RuntimeError, r"no DDP module was tied.*register\(ddp, optimizer\)"),
    never_registered: (RuntimeError, r"but none was: register the hook with ddp.register_comm"),
    module_too: (ValueError, "module= replaces DDP: leave out overlap_with_ddp=True"),
    ignored_by_ddp: (ValueError, "'layers.2.weight' .* in DDP's parameters_to_ignore"),
    beyond_ddp: (ValueError, r"\[0, 1\], reaches beyond the DDP module's, of ranks \[[01]\]"),
    not_all_joined: (RuntimeError, r"use Join\(\[ddp, zero\]\)"),
    joined_the_other_way_round: (RuntimeError, r"use Join\(\[ddp, zero\]\)"),
}


def each_refused(way: str) -> list[str]:
    """Mistakes that are found before anything is sent leave the ranks fit for the next one."""
    checks = []
    for mistake, (error, match) in ERRORS.items():
        if mistake in (not_all_joined, joined_the_other_way_round):
            continue
        try:
            mistake(way)
            checks.append((mistake.__name__, "nothing raised"))
        except error as raised:
            checks.append((mistake.__name__, not re.search(match, str(raised)) and str(raised)))
    return failing(checks)


@pytest.mark.parametrize("way", WAYS)
def test_mistakes_are_refused_on_every_rank(way: str) -> None:
    assert run_ranks(each_refused, 2, way) == FINE


@pytest.mark.parametrize("mistake", [not_all_joined, joined_the_other_way_round])
def test_the_optimizer_joins_behind_ddp(mistake: Callable[[str], None]) -> None:
    error, match = ERRORS[mistake]
    for way in WAYS:
        raises_on_every_rank(mistake, 2, error, way, match=match)


class SparseFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16, sparse=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.tokens(tokens))
        return out


def some_tokens(model: Callable[..., Any], step: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * step + rank())
    out: Tensor = model(torch.randint(40, (6,), generator=random)).square().mean()
    return out


SPARSE = Problem(SparseFirst, some_tokens)


def sparse_gradients() -> list[str]:
    found = compare(
        plain_loop(SPARSE), SPARSE, (optim.SGD, {"lr": 0.1}), ["hook"], zero={"layout": "whole"}
    )
    for way in ("interleaved", "register"):
        with pytest.raises(ValueError, match="'tokens' makes sparse gradients"):
            overlapping(way, SPARSE.fresh(), (optim.SGD, {"lr": 0.1}), zero={"layout": "whole"})
    return failing(found)


def test_sparse_gradients_step_at_the_end_or_are_refused() -> None:
    assert run_ranks(sparse_gradients, 2) == FINE


def _too_late() -> list[str]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(torch.ones(1, 4)).sum()).backward()
    said = []
    for call in (lambda: zero.clip_grad_norm_(1.0), lambda: scaler.step(zero)):
        with pytest.raises(RuntimeError, match="comes too late") as error:
            call()
        said.append(str(error.value))
    return said


def test_what_would_change_gradients_after_the_step_was_taken_raises() -> None:
    for said in run_ranks(_too_late, 2):
        assert "clip_grad_norm_()" in said[0]
        assert "GradScaler" in said[1]
