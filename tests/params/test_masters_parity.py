"""16-bit parameters with sharded fp32 masters train to the numbers of masters that nobody shards.

The arithmetic is the same element by element, so there is no reason for any bit to differ. Where a
norm is involved it is the largest element, which is the same in whatever order it is looked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_ways import WAYS, in_ddp, overlapping
from doubles import AnyOrder, LateArrival, behind_the_door
from models import MLP, MixedDtypes, Problem, make_gpt, noise
from problems import LAYOUTS, copies, differing
from ranks import run_ranks
from reference.naive_masters import NaiveMasters
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _low(make: Callable[[], nn.Module], dtype: torch.dtype = BF16) -> Callable[[], nn.Module]:
    return lambda: make().to(dtype)


def _square(model: Callable[..., Any], step: int) -> Tensor:
    out: Tensor = model(noise(step, 6, 16).bfloat16()).float().square().mean()
    return out


def _half_square(model: Callable[..., Any], step: int) -> Tensor:
    out: Tensor = model(noise(step, 6, 16).half()).float().square().mean()
    return out


def _tokens(model: Callable[..., Any], step: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(61, (3, 13), generator=random)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])[1]
    return loss


def _mixed(model: Callable[..., Any], step: int) -> Tensor:
    out: Tensor = model(noise(step, 6, 16)).square().mean()
    return out


PROBLEMS = {
    "mlp": Problem(_low(MLP), _square),
    "gpt": Problem(_low(make_gpt), _tokens),
    "mixed": Problem(MixedDtypes, _mixed),
}
OPTIONS = {"lr": 0.003, "weight_decay": 0.1}


class _Naive:
    """A module trained by the oracle, with the same calls as a sharded one."""

    def __init__(self, module: nn.Module, policy: MixedPrecision, **options: Any) -> None:
        for param in module.parameters():
            dist.broadcast(param.detach(), src=0)
        self.module = module
        self._policy = policy
        self.opt = NaiveMasters(
            [{"params": list(module.parameters())}], optim.AdamW, **{**OPTIONS, **options}
        )

    def backward(self, problem: Problem, step: int, scale: float = 1.0) -> Tensor:
        loss = problem.loss(self.module, step)
        (loss * scale).backward()
        self.opt.add_mean_gradients(self._policy.reduce_dtype)
        return loss.detach()

    def backward_without_sync(self, problem: Problem, steps: range) -> None:
        """Add up each rank's own gradients in fp32, and send the sum in the wire's dtype."""
        totals: dict[Tensor, Tensor] = {}
        for step in steps:
            problem.loss(self.module, step).backward()
            for param in self.module.parameters():
                assert param.grad is not None
                totals[param] = totals.get(param, 0) + param.grad.float()
                param.grad = None
        for param, total in totals.items():
            # Scaled in fp32, rounded once.
            wire = self._policy.reduce_dtype or param.dtype
            scaled = (total * (1 / dist.get_world_size())).to(wire)
            parts = [torch.empty_like(scaled) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, scaled)
            mean = parts[0].float()
            for part in parts[1:]:
                mean = mean + part.float()
            self.master_of(param).grad = mean

    def master_of(self, param: Tensor) -> Tensor:
        return next(m for p, m in zip(self.opt.params, self.opt.masters, strict=True) if p is param)

    def clip(self, max_norm: float) -> Tensor:
        self.opt.give_means()
        return nn.utils.clip_grad_norm_(self.opt.masters, max_norm, torch.inf)

    def finish(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


class _Zero:
    """The same with a sharded optimizer."""

    def __init__(self, module: nn.Module, policy: MixedPrecision | None, **options: Any) -> None:
        self.module = module
        self.opt = ZeroRedundancyOptimizer(
            module.parameters(),
            optim.AdamW,
            module=module,
            **{"precision": policy, "bucket_bytes": 1, **OPTIONS, **options},
        )

    def backward(self, problem: Problem, step: int, scale: float = 1.0) -> Tensor:
        loss = problem.loss(self.module, step)
        (loss * scale).backward()
        return loss.detach()

    def backward_without_sync(self, problem: Problem, steps: range) -> None:
        with self.opt.no_sync():
            for step in steps[:-1]:
                self.backward(problem, step)
        self.backward(problem, steps[-1])

    def clip(self, max_norm: float) -> Tensor:
        return self.opt.clip_grad_norm_(max_norm, torch.inf)

    def finish(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


Loop = Callable[[Any, Problem], list[Tensor]]


def _plain(setup: Any, problem: Problem) -> list[Tensor]:
    losses = []
    for step in range(6):
        losses.append(setup.backward(problem, step))
        setup.finish()
    return losses


def _clipped(setup: Any, problem: Problem) -> list[Tensor]:
    seen = []
    for step in range(5):
        seen.append(setup.backward(problem, step))
        seen.append(setup.clip(1e-3).float())
        setup.finish()
    return seen


def _rounds(setup: Any, problem: Problem) -> list[Tensor]:
    """Several backwards before a step, each of them reduced and added up in fp32."""
    for step in range(4):
        for part in range(3):
            setup.backward(problem, 10 * step + part)
        setup.finish()
    return []


def _without_sync(setup: Any, problem: Problem) -> list[Tensor]:
    for step in range(4):
        setup.backward_without_sync(problem, range(10 * step, 10 * step + 3))
        setup.finish()
    return []


def _freezing(setup: Any, problem: Problem) -> list[Tensor]:
    """Layers are frozen and unfrozen; what they had is there when they come back."""
    layers: Any = setup.module.layers
    for step in range(9):
        if step == 3:
            layers[1].requires_grad_(False)
            layers[3].requires_grad_(False)
        if step == 6:
            layers[1].requires_grad_(True)
        setup.backward(problem, step)
        setup.finish()
    return []


LOOPS: dict[str, Loop] = {
    "plain": _plain,
    "clipped": _clipped,
    "rounds": _rounds,
    "no_sync": _without_sync,
    "freezing": _freezing,
}
POLICIES = {
    "default": MixedPrecision(),
    "fp32 wire": MixedPrecision(reduce_dtype=FP32),
    "bf16 wire": MixedPrecision(reduce_dtype=BF16),
}


def _seen(setup: Any, problem: Problem, loop: Loop) -> list[Tensor]:
    return [*copies(loop(setup, problem)), *copies(setup.module.parameters())]


def _compare(names: list[str], loops: list[str], policies: list[str]) -> list[str]:
    failures = []
    overlaps = itertools.cycle((True, False))
    for name, loop, policy in itertools.product(names, loops, policies):
        problem = PROBLEMS[name]
        naive = _Naive(problem.fresh(), POLICIES[policy])
        expected = _seen(naive, problem, LOOPS[loop])
        for layout in LAYOUTS:
            # Without a policy, masters are the default here.
            given = None if policy == "default" else POLICIES[policy]
            zero = _Zero(problem.fresh(), given, layout=layout, overlap=next(overlaps))
            if wrong := differing(expected, _seen(zero, problem, LOOPS[loop])):
                failures.append(f"{name}, {loop}, {policy}, {layout}: {wrong}")
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_zero2_with_masters_has_their_numbers(world_size: int) -> None:
    names, loops = list(PROBLEMS), ["plain", "clipped", "rounds"]
    assert run_ranks(_compare, world_size, names, loops, ["default"]) == [[]] * world_size
    assert run_ranks(_compare, world_size, ["mlp"], ["freezing"], ["default"]) == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("names", "loops", "policies"),
    [
        (["mlp", "gpt"], ["no_sync"], list(POLICIES)),
        (["mlp", "mixed"], ["plain", "rounds"], ["fp32 wire", "bf16 wire"]),
    ],
    ids=["held back", "wires"],
)
def test_gradients_add_up_in_fp32_and_travel_in_the_dtype_that_is_asked_for(
    world_size: int, names: list[str], loops: list[str], policies: list[str]
) -> None:
    assert run_ranks(_compare, world_size, names, loops, policies) == [[]] * world_size


def _wire_bytes() -> dict[str, tuple[int, int]]:
    """Bytes that this rank has sent for gradients and for parameters, by policy."""
    found = {}
    for name, policy in POLICIES.items():
        zero = _Zero(PROBLEMS["gpt"].fresh(), policy)
        zero.backward(PROBLEMS["gpt"], 0)
        reduced = zero.opt.shards.comm.ledger  # type: ignore[attr-defined]
        zero.opt.mode.pipeline.gradients.collect()
        before = reduced.nbytes_sent["reduce_scatter"]
        zero.finish()
        gathered = zero.opt.mode.gather_comm.ledger.nbytes_sent["all_gather"]
        found[name] = (before, gathered)
    return found


def test_parameters_travel_in_their_own_dtype_and_gradients_as_told() -> None:
    for found in run_ranks(_wire_bytes, 2):
        reduced, gathered = found["default"]
        assert reduced == gathered  # 16 bits both ways
        assert found["bf16 wire"] == (reduced, gathered)
        assert found["fp32 wire"] == (2 * reduced, gathered)


def _with_doubles() -> list[str]:
    failures = []
    problem = PROBLEMS["gpt"]
    expected = _seen(_Naive(problem.fresh(), MixedPrecision()), problem, _plain)
    for double, layout in itertools.product((LateArrival, AnyOrder), LAYOUTS):
        with behind_the_door(double):
            zero = _Zero(problem.fresh(), None, layout=layout)
            if wrong := differing(expected, _seen(zero, problem, _plain)):
                failures.append(f"{double.__name__}, {layout}: {wrong}")
    return failures


def test_masters_wait_for_what_is_in_flight() -> None:
    assert run_ranks(_with_doubles, 2) == [[], []]


def _alone() -> list[str]:
    failures = []
    for layout, dtype in itertools.product(LAYOUTS, (BF16, FP16)):
        problem = Problem(_low(MLP, dtype), _square if dtype is BF16 else _half_square)
        module = problem.fresh()
        naive = NaiveMasters([{"params": list(module.parameters())}], optim.AdamW, **OPTIONS)
        for step in range(5):
            problem.loss(module, step).backward()
            naive.take_gradients()
            naive.step()
            naive.zero_grad()
        zero = _Zero(problem.fresh(), None, layout=layout)
        for step in range(5):
            zero.backward(problem, step)
            zero.finish()
        if wrong := differing(copies(module.parameters()), copies(zero.module.parameters())):
            failures.append(f"{layout}, {dtype}: {wrong}")
    return failures


def test_one_rank_alone_has_the_same_numbers() -> None:
    assert _alone() == []
    assert run_ranks(_alone, 1) == [[]]


# ------------------------------------------------------------------------------- frozen, scaled


def _frozen_from_the_start() -> int:
    module = MLP().bfloat16()
    for layer in list(module.layers)[:-1]:
        layer.requires_grad_(False)
    zero = _Zero(module, None)
    return sum(master.numel() for master in zero.opt.shards.masters().values())


def test_what_never_trained_has_no_master() -> None:
    trained = sum(param.numel() for param in MLP().layers[-1].parameters())
    assert sum(run_ranks(_frozen_from_the_start, 2)) == trained


def _scaled(layout: str) -> list[str]:
    """The stock GradScaler on fp16 parameters; at step 2 one rank has an infinity."""
    failures = []
    problem = Problem(_low(MLP, FP16), _half_square)
    scale = 2.0**10
    naive = _Naive(problem.fresh(), MixedPrecision())
    expected = []
    for step in range(5):
        if step == 2:
            scale /= 2  # skipped
            continue
        naive.backward(problem, step, scale)
        naive.opt.give_means()
        for master in naive.opt.masters:
            assert master.grad is not None
            master.grad *= 1 / scale
        expected.append(naive.clip(1e-3))
        naive.finish()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    zero = _Zero(problem.fresh(), None, layout=layout)
    norms = []
    for step in range(5):
        loss = scaler.scale(problem.loss(zero.module, step))
        if step == 2 and dist.get_rank() == 1:
            loss = loss * torch.inf
        loss.backward()
        scaler.unscale_(zero.opt)
        norm = zero.clip(1e-3)
        if step != 2:
            norms.append(norm)
        scaler.step(zero.opt)
        scaler.update()
        zero.opt.zero_grad()
    if differing([*expected], [*norms]):
        failures.append(f"norms {expected} {norms}")
    if scaler.get_scale() != scale:
        failures.append(f"scale {scaler.get_scale()}")
    if wrong := differing(copies(naive.module.parameters()), copies(zero.module.parameters())):
        failures.append(f"parameters {wrong}")
    return failures


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_grad_scaler_unscales_fp16_gradients_in_fp32(layout: str) -> None:
    assert run_ranks(_scaled, 2, layout) == [[], []]


# --------------------------------------------------------------------------------- DDP's hooks


def _hooked() -> list[str]:
    failures = []
    for name, layout in itertools.product(("mlp", "gpt", "mixed"), LAYOUTS):
        problem = PROBLEMS[name]
        # DDP reduces in 16 bits; where the hooks take its results, so does the oracle.
        module = problem.fresh()
        model = in_ddp(module, allreduce_hook)
        after_ddp = NaiveMasters([{"params": list(module.parameters())}], optim.AdamW, **OPTIONS)
        for step in range(5):
            problem.loss(model, step).backward()
            after_ddp.take_gradients()
            after_ddp.step()
            after_ddp.zero_grad()
        naive = _Naive(problem.fresh(), MixedPrecision())
        for step in range(5):
            naive.backward(problem, step)
            naive.finish()
        for way in WAYS:
            expected = naive.module if way == "register" else module
            zero = overlapping(
                way,
                problem.fresh(),
                (optim.AdamW, OPTIONS),
                zero={"precision": MixedPrecision(), "layout": layout},
            )
            for step in range(5):
                problem.loss(zero.model, step).backward()
                zero.finish()
            if wrong := differing(copies(expected.parameters()), zero.params):
                failures.append(f"{name}, {layout}, {way}: {wrong}")
    return failures


@pytest.mark.slow
def test_the_ddp_hooks_step_on_masters() -> None:
    assert run_ranks(_hooked, 2) == [[], []]
