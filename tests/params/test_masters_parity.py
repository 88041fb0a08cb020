"""16-bit parameters with sharded fp32 masters train to the numbers of unsharded masters.

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
from models import MLP, MixedDtypes, Problem, make_gpt, train, with_zero
from models import PROBLEMS as IN_FP32
from on_ranks import on_ranks
from problems import LAYOUTS, assert_same, copies
from reference.naive_masters import NaiveMasters, sum_over_ranks
from sixteen_bits import BF16, FP32, loss_of
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shardstep import MixedPrecision

PROBLEMS = {
    "mlp": Problem(lambda: MLP().bfloat16(), loss_of),
    "fp16": Problem(lambda: MLP().half(), loss_of),
    "gpt": Problem(lambda: make_gpt().bfloat16(), IN_FP32["gpt"].loss),
    "mixed": Problem(MixedDtypes, loss_of),
}
POLICIES = {
    "default": MixedPrecision(),
    "fp32 wire": MixedPrecision(reduce_dtype=FP32),
    "bf16 wire": MixedPrecision(reduce_dtype=BF16),
}
KIND = (optim.AdamW, {"lr": 0.003, "weight_decay": 0.1})


class _Naive:
    """A module trained by the oracle, with the calls of a `Setup`.

    DDP, if it is around the module, has reduced the gradients already.
    """

    def __init__(self, module: nn.Module, wire: torch.dtype | None = None, ddp: Any = None) -> None:
        self._reduced = ddp is not None or not dist.is_initialized()
        for param in () if self._reduced else module.parameters():
            dist.broadcast(param.detach(), src=0)
        self.model = ddp or module
        self.module = module
        self._wire = wire
        self.opt = NaiveMasters([{"params": list(module.parameters())}], KIND[0], **KIND[1])

    def backward(self, step: int, problem: Problem, scale: float = 1.0) -> Tensor:
        loss = problem.loss(self.model, step)
        (loss * scale).backward()
        if self._reduced:
            self.opt.take_gradients()
        else:
            self.opt.add_mean_gradients(self._wire)
        return loss.detach()

    def backward_without_sync(self, steps: range, problem: Problem) -> None:
        """Add up each rank's own gradients in fp32, and send the sum in the wire's dtype."""
        totals: dict[Tensor, Tensor] = {}
        for step in steps:
            problem.loss(self.module, step).backward()
            for param in self.module.parameters():
                assert param.grad is not None
                totals[param] = totals.get(param, 0) + param.grad.float()
                param.grad = None
        masters = dict(zip(self.opt.params, self.opt.masters, strict=True))
        for param, total in totals.items():
            # Scaled in fp32, rounded once.
            scaled = (total * (1 / dist.get_world_size())).to(self._wire or param.dtype)
            masters[param].grad = sum_over_ranks(scaled, FP32)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        self.opt.give_means()
        return nn.utils.clip_grad_norm_(self.opt.masters, max_norm, norm_type)

    def finish(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


def _zero(problem: Problem, policy: MixedPrecision | None = None, **options: Any) -> Any:
    """The same with a sharded optimizer. Without a policy, masters are the default here."""
    return with_zero(problem.fresh(), KIND, precision=policy, **options)


def _plain(setup: Any, problem: Problem) -> list[Tensor]:
    return train(setup, problem, range(6))


def _clipped(setup: Any, problem: Problem) -> list[Tensor]:
    seen = []
    for step in range(5):
        seen.append(setup.backward(step, problem))
        seen.append(setup.clip(1e-3, torch.inf).float())
        setup.finish()
    return seen


def _rounds(setup: Any, problem: Problem) -> list[Tensor]:
    """Several backwards before a step, each of them reduced and added up in fp32."""
    for step in range(4):
        for part in range(3):
            setup.backward(10 * step + part, problem)
        setup.finish()
    return []


def _without_sync(setup: Any, problem: Problem) -> list[Tensor]:
    for step in range(4):
        *held_back, last = steps = range(10 * step, 10 * step + 3)
        if isinstance(setup, _Naive):
            setup.backward_without_sync(steps, problem)
        else:
            with setup.no_sync():
                for each in held_back:
                    setup.backward(each, problem)
            setup.backward(last, problem)
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
        setup.backward(step, problem)
        setup.finish()
    return []


Loop = Callable[[Any, Problem], list[Tensor]]


def _seen(setup: Any, problem: Problem, loop: Loop = _plain) -> list[Tensor]:
    return [*copies(loop(setup, problem)), *copies(setup.module.parameters())]


def _compare(names: list[str], loops: list[Loop], policies: list[str]) -> None:
    overlaps = itertools.cycle((True, False))
    for case in itertools.product(names, loops, policies):
        problem, loop, policy = PROBLEMS[case[0]], case[1], case[2]
        expected = _seen(_Naive(problem.fresh(), POLICIES[policy].reduce_dtype), problem, loop)
        for layout in LAYOUTS:
            given = None if policy == "default" else POLICIES[policy]
            zero = _zero(problem, given, layout=layout, overlap=next(overlaps))
            assert_same(expected, _seen(zero, problem, loop), (*case, layout))


@pytest.mark.slow
@on_ranks(1, 2, 3)
def test_zero2_with_masters_has_their_numbers() -> None:
    _compare(list(PROBLEMS), [_plain, _clipped, _rounds], ["default"])
    _compare(["mlp"], [_freezing], ["default"])


def test_without_a_process_group_too() -> None:
    _compare(["mlp", "fp16"], [_plain], ["default"])


@pytest.mark.slow
@on_ranks(2, 3)
def test_gradients_add_up_in_fp32_and_travel_in_the_dtype_that_is_asked_for() -> None:
    _compare(["mlp", "gpt"], [_without_sync], list(POLICIES))
    _compare(["mlp", "mixed"], [_plain, _rounds], ["fp32 wire", "bf16 wire"])


@on_ranks(2)
def test_parameters_travel_in_their_own_dtype_and_gradients_as_told() -> None:
    """Bytes that this rank has sent for gradients and for parameters, by policy."""
    found = {}
    for name, policy in POLICIES.items():
        zero = _zero(PROBLEMS["gpt"], policy)
        zero.backward(0, PROBLEMS["gpt"])
        zero.opt.mode.pipeline.gradients.collect()
        reduced = zero.opt.shards.comm.ledger.nbytes_sent["reduce_scatter"]
        zero.finish()
        found[name] = (reduced, zero.opt.mode.gather_comm.ledger.nbytes_sent["all_gather"])
    reduced, gathered = found["default"]
    assert reduced == gathered  # 16 bits both ways
    assert found["bf16 wire"] == (reduced, gathered)
    assert found["fp32 wire"] == (2 * reduced, gathered)


@pytest.mark.slow
@on_ranks(2)
def test_masters_wait_for_what_is_in_flight() -> None:
    problem = PROBLEMS["gpt"]
    expected = _seen(_Naive(problem.fresh()), problem)
    for double, layout in itertools.product((LateArrival, AnyOrder), LAYOUTS):
        with behind_the_door(double):
            assert_same(
                expected,
                _seen(_zero(problem, layout=layout), problem),
                f"{double.__name__}, {layout}",
            )


@on_ranks(2)
def test_what_never_trained_has_no_master() -> None:
    module = MLP().bfloat16()
    for layer in list(module.layers)[:-1]:
        layer.requires_grad_(False)
    zero = with_zero(module, KIND, precision=None)
    numel = torch.tensor(sum(each.numel() for each in zero.opt.shards.masters().values()))
    dist.all_reduce(numel)
    assert numel == sum(param.numel() for param in module.layers[-1].parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_grad_scaler_unscales_fp16_gradients_in_fp32(layout: str) -> None:
    """The stock GradScaler on fp16 parameters; at step 2 one rank has an infinity."""
    problem = PROBLEMS["fp16"]
    scale = 2.0**10
    naive = _Naive(problem.fresh())
    expected = []
    for step in range(5):
        if step == 2:
            scale /= 2  # skipped
            continue
        naive.backward(step, problem, scale)
        naive.opt.give_means()
        for master in naive.opt.masters:
            assert master.grad is not None
            master.grad *= 1 / scale
        expected.append(naive.clip(1e-3, torch.inf))
        naive.finish()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    zero = _zero(problem, layout=layout)
    norms = []
    for step in range(5):
        loss = scaler.scale(problem.loss(zero.module, step))
        if step == 2 and dist.get_rank() == 1:
            loss = loss * torch.inf
        loss.backward()
        scaler.unscale_(zero.opt)
        norm = zero.clip(1e-3, torch.inf)
        if step != 2:
            norms.append(norm)
        scaler.step(zero.opt)
        scaler.update()
        zero.opt.zero_grad()
    assert scaler.get_scale() == scale
    assert_same([*expected, *copies(naive.module.parameters())], [*norms, *zero.params])


@pytest.mark.slow
@on_ranks(2)
def test_the_ddp_hooks_step_on_masters() -> None:
    for name in ("mlp", "gpt", "mixed"):
        problem = PROBLEMS[name]
        # DDP reduces in 16 bits; where the hooks take its results, so does the oracle.
        module = problem.fresh()
        after_ddp = _seen(_Naive(module, ddp=in_ddp(module, allreduce_hook)), problem)
        in_fp32 = _seen(_Naive(problem.fresh()), problem)
        for way, layout in itertools.product(WAYS, LAYOUTS):
            options = {"precision": MixedPrecision(), "layout": layout}
            zero = overlapping(way, problem.fresh(), KIND, zero=options)
            expected = in_fp32 if way == "register" else after_ddp
            assert_same(expected, _seen(zero, problem), f"{name}, {layout}, {way}")
