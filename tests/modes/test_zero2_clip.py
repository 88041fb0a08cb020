"""Norm, clipping and the verdict of a GradScaler are those of the whole gradient, on every rank."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from models import (
    MLP,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    Problem,
    Setup,
    from_rank,
    noise,
    rank,
    train,
    with_ddp,
    with_zero,
)
from on_ranks import on_ranks
from problems import LAYOUTS, assert_same, same_bits
from ranks import run_ranks
from scenarios import distance
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from traffic import counted

from shardstep import ZeroRedundancyOptimizer
from shardstep.gradients.feeders import Feeder


def _tiny() -> nn.Module:
    """So small that with whole parameters one of three ranks owns nothing."""
    return nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 4, bias=False))


CLIPPED = {
    "mlp": MLP_PROBLEM,
    "branching": PROBLEMS["branching"],
    "mixed dtypes": PROBLEMS["mixed dtypes"],
    "tiny": Problem(_tiny, MLP_PROBLEM.loss),
}


def _clip_all(setup: Setup, problem: Problem, norm_type: float) -> list[Tensor]:
    norms = []
    for step in range(4):
        setup.backward(step, problem)
        # At some steps it has an effect, at others none.
        norms.append(setup.clip((0.01, 1e6)[step % 2], norm_type).detach().clone())
        setup.finish()
    return norms


@pytest.mark.slow
@on_ranks(2, 3, timeout=110)
def test_norms_and_clipped_steps_equal_those_under_ddp_and_are_the_same_on_all_ranks() -> None:
    """Both layouts, unused parameters, a rank that owns nothing: each element counts once."""
    for case in itertools.product(CLIPPED, (1.0, 2.0, float("inf"), 3.5)):
        problem, norm_type = CLIPPED[case[0]], case[1]
        ddp = with_ddp(problem.fresh(), SGD, find_unused_parameters=problem.find_unused)
        expected = _clip_all(ddp, problem, norm_type)
        # A bfloat16 gradient has its own norm rounded to bfloat16, a part of it apart. A 1-norm is
        # a sum of 50,000 numbers in single precision; torch's own is as far from the exact one.
        single = 3e-6 if norm_type == 1 else 1e-6
        tolerance = 5e-3 if case[0] == "mixed dtypes" else single
        for layout in LAYOUTS:
            zero = with_zero(problem.fresh(), SGD, layout=layout)
            got = _clip_all(zero, problem, norm_type)
            assert_same(from_rank(0, got), got)
            for a, b in zip(expected, got, strict=True):
                assert torch.allclose(a.float(), b.float(), rtol=tolerance, atol=0), (case, a, b)
            assert distance(ddp.params, zero.params) <= max(1e-5, tolerance), (case, layout)


@on_ranks(1, 2, 3)
def test_every_element_counts_once() -> None:
    """A gradient of ones: the 1-norm is the number of elements."""
    for layout in LAYOUTS:
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, layout=layout)
        sum(param.sum() for param in zero.module.parameters()).backward()
        norm = zero.clip(1e9, 1.0).item()
        count = sum(param.numel() for param in zero.module.parameters())
        assert norm == count, f"{layout}: {norm} for {count} elements"


@on_ranks(2)
def test_clipping_costs_one_small_collective() -> None:
    with counted() as traffic:
        zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    zero.clip(1.0)  # the gradients have arrived now
    traffic.reset()
    zero.clip(1.0)
    assert traffic.calls == {"header": 1, "all_gather": 1}
    assert traffic.nbytes["all_gather"] <= 16


@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_asked_to() -> None:
    """One rank has a NaN in its batch: all ranks raise, and nothing was scaled."""
    for layout, bad in itertools.product(LAYOUTS, (float("nan"), float("inf"))):
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, layout=layout)
        loss = MLP_PROBLEM.loss(zero.model, 0)
        (loss * bad if rank() == 0 else loss).backward()
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            zero.clip(1.0, error_if_nonfinite=True)
        assert not torch.isfinite(zero.clip(1.0))
        zero.opt.zero_grad()
        zero.backward(0)
        zero.clip(1.0, error_if_nonfinite=True)
        zero.finish()


# -------------------------------------------------------- what would clip a part, or nothing at all


@on_ranks(2)
def test_whatever_would_see_a_part_of_a_gradient_raises_and_names_what_to_call() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    params = list(zero.module.parameters())
    acts: dict[str, Callable[[], object]] = {
        "add": lambda: params[0].grad + 1,
        "add on the right": lambda: torch.ones(params[0].shape) + params[0].grad,
        "add in place": lambda: params[0].grad.add_(1),
        "add to it": lambda: params[0].grad.add_(torch.ones(params[0].shape)),
        "mul by many": lambda: params[0].grad.mul_(torch.ones(params[0].shape)),
        "norm of rows": lambda: params[0].grad.norm(dim=0),
        "count": lambda: params[0].grad.norm(0),
        "item": lambda: params[-1].grad[0].item(),
        "clone": lambda: params[0].grad.clone(),
        "tolist": lambda: params[0].grad.tolist(),
        "isnan": lambda: torch.isnan(params[0].grad).any(),
        "cat": lambda: torch.cat([p.grad.flatten() for p in params]),
        "copy from": lambda: torch.zeros(params[0].shape).copy_(params[0].grad),
        "copy to": lambda: params[0].grad.copy_(torch.zeros(params[0].shape)),
        "all_reduce": lambda: torch.distributed.all_reduce(params[0].grad),
        "to": lambda: params[0].grad.to(torch.float64),
    }
    zero.backward(0)
    named = r"layers\..*optimizer\.clip_grad_norm_|not supported for tensor subclasses"
    for act in acts.values():
        with pytest.raises(Exception, match=named):
            act()
    grad: Any = params[0].grad
    by_name: dict[str, Callable[[], object]] = {
        "untyped_storage": zero.module.share_memory,
        "data_ptr": grad.data_ptr,
        "numpy": grad.numpy,
        "pickling": lambda: pickle.dumps(grad),
        "__dlpack__": grad.__dlpack__,
        "an assignment to .data": lambda: setattr(grad, "data", torch.zeros(grad.shape)),
        "div_ with rounding_mode": lambda: grad.div_(2, rounding_mode="floor"),
        "linalg_vector_norm with dtype": lambda: torch.linalg.vector_norm(grad, dtype=torch.double),
        "a norm of order 2 over None with keepdim": lambda: grad.norm(keepdim=True),
    }
    for operation, act in by_name.items():
        with pytest.raises(RuntimeError, match=f"^{operation} is not possible on the gradient of"):
            act()
    zero.module.float()  # converts nothing, and assigns every gradient to itself
    # Nothing of this has done any harm, and what can be known of a gradient is.
    for param in params:
        assert param.grad is not None
        assert (param.grad.shape, param.grad.dtype) == (param.shape, param.dtype)
        assert "layers." in repr(param.grad)
    reference = with_ddp(MLP_PROBLEM.fresh(), SGD)
    reference.backward(0)
    for setup in (zero, reference):
        setup.finish()
    assert_same(reference.params, zero.params)


def _by_hand(setup: Any, params: list[Any]) -> Any:
    for param in params:
        param.grad.mul_(3).div_(2.0)
    return torch.stack([param.grad.detach().norm() for param in params])


TORCH_CALLS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "norm": lambda setup, params: nn.utils.clip_grad_norm_(params, 0.01),
    "foreach": lambda setup, params: nn.utils.clip_grad_norm_(params, 0.01, 1.0, foreach=True),
    "inf": lambda setup, params: nn.utils.clip_grad_norm_(iter(params), 0.01, float("inf")),
    "inf foreach": lambda setup, params: nn.utils.clip_grad_norm_(
        params, 0.01, float("inf"), foreach=True
    ),
    "part": lambda setup, params: nn.utils.clip_grad_norm_(params[2:5], 0.01),
    "value": lambda setup, params: nn.utils.clip_grad_value_(params, 0.001),
    "value foreach": lambda setup, params: nn.utils.clip_grad_value_(params, 0.001, foreach=True),
    "total": lambda setup, params: nn.utils.get_total_norm([p.grad for p in params]),
    "by hand": _by_hand,
    # Norms that are asked for again after a change are not those from before.
    "twice": lambda setup, params: [
        setup.clip(0.01) if again else params[0].grad.norm() for again in (0, 1, 0)
    ],
}


@on_ranks(2)
def test_one_list_may_hold_gradients_of_two_models() -> None:
    """Torch's functions act on lists of gradients if they are told to."""
    for call in ("foreach", "inf foreach", "value foreach"):
        both = [
            [make(MLP_PROBLEM.fresh(), SGD) for make in (way, way)] for way in (with_zero, with_ddp)
        ]
        norms = []
        for one, two in both:
            one.backward(0)
            two.backward(1)
            one.module.layers[0].zero_grad()
            params = [*two.module.parameters(), *one.module.parameters()]
            norms.append(TORCH_CALLS[call](one, params[::-1]))
            torch._foreach_mul_([param.grad for param in params if param.grad is not None], 2.0)
            one.finish()
            two.finish()
        if norms[0] is not None:
            assert torch.allclose(*norms, rtol=1e-6, atol=0)
        for zero, ddp in zip(*both, strict=True):
            assert distance(ddp.params, zero.params) < 1e-6


def _clip_with_accelerate(setup: Any, params: list[Any]) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).clip_grad_norm_(params, 0.01)


def _read_with_lightning(setup: Any, params: list[Any]) -> Any:
    from lightning.pytorch.utilities.grads import grad_norm

    return torch.stack([torch.as_tensor(norm) for norm in grad_norm(setup.module, 2).values()])


CALLS = {"accelerate": _clip_with_accelerate, "lightning": _read_with_lightning, **TORCH_CALLS}


@pytest.mark.parametrize(
    ("layout", "package"),
    [
        *(("whole", None), ("sliced", None)),
        pytest.param("whole", "accelerate", marks=pytest.mark.slow),  # its import takes seconds
        pytest.param("whole", "lightning", marks=pytest.mark.slow),
    ],
)
def test_functions_of_torch_and_of_packages_clip_as_under_ddp(
    layout: str, package: str | None
) -> None:
    if package is not None:
        pytest.importorskip(package)
    run_ranks(_clip_as_ddp, 2, layout, list(TORCH_CALLS) if package is None else [package])


def _clip_as_ddp(layout: str, names: Iterable[str]) -> None:
    """Norms over the slices of a tensor are added in another order."""
    for name in names:
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, layout=layout)
        ddp = with_ddp(MLP_PROBLEM.fresh(), SGD)
        results = []
        for setup in (zero, ddp):
            train(setup, MLP_PROBLEM, range(1))
            setup.backward(1)
            results.append(CALLS[name](setup, list(setup.module.parameters())))
            setup.finish()
        pairs = [*zip(zero.params, ddp.params, strict=True)]
        if results[0] is not None:
            ours, theirs = ([r] if isinstance(r, Tensor) else r for r in results)
            pairs += zip(ours, theirs, strict=True)
        exact = layout == "whole" and name != "twice"
        near = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-8}
        for ours, theirs in pairs:
            assert torch.allclose(ours, theirs, **near), f"{name}: {ours} is not {theirs}"


@on_ranks(2)
def test_norms_by_name_and_clipping_by_value() -> None:
    for make in (with_zero, with_ddp):
        setup = make(MLP_PROBLEM.fresh(), SGD)
        opt = setup.opt
        if make is with_ddp:
            opt = ZeroRedundancyOptimizer(setup.module.parameters(), optim.SGD, lr=0.1)
        setup.backward(0)
        norms = opt.grad_norms()
        named = dict(setup.module.named_parameters())
        assert list(norms) == list(named), f"{make.__name__}: {list(norms)}"
        for name, param in named.items():
            full = opt.full_grad(param)
            assert torch.allclose(norms[name], full.norm(), rtol=1e-5), f"{make.__name__}: {name}"
        opt.clip_grad_value_(0.001)
        assert all(opt.full_grad(param).abs().max() <= 0.001 for param in named.values())


@on_ranks(2)
def test_a_placeholder_is_not_taken_for_the_gradient_of_another_parameter() -> None:
    """One parameter is given what stands in another one's `grad`; its numbers are not in it."""
    zero, other = (with_zero(MLP_PROBLEM.fresh(), SGD) for _ in range(2))
    target = zero.module.get_parameter("layers.1.weight")
    sources = [setup.module.get_parameter("layers.2.weight") for setup in (zero, other)]
    acts: list[Callable[[], object]] = [
        zero.opt.step,
        lambda: zero.clip(1.0),
        lambda: zero.opt.full_grad("layers.2.weight"),
        lambda: zero.backward(1),
    ]
    match = r"layers\.1\.weight.*full_grad\('layers\.2\.weight'\)"
    for source, act in itertools.product(sources, acts):
        zero.backward(0)
        other.backward(0)
        target.grad = source.grad
        with pytest.raises(RuntimeError, match=match):
            act()
        zero.opt.zero_grad()
        other.opt.zero_grad()
    reference = with_ddp(MLP_PROBLEM.fresh(), SGD)
    for setup in (zero, reference):
        train(setup, MLP_PROBLEM, range(2))
    assert_same(reference.params, zero.params)


# ----------------------------------------------------------------------------------- GradScaler


class _Sum(nn.Module):
    """Two parameters whose gradients are one tensor, and one whose gradient is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + self.b) * x).sum() + self.c.sum()


@on_ranks(1, 2)
def test_gradients_that_share_memory_are_scaled_once() -> None:
    """After `no_sync()` autograd adds them to placeholders, which does not copy them."""
    module = _Sum()
    opt = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, module=module)
    with opt.no_sync():
        pass
    module(torch.arange(4.0)).backward()
    norm = opt.clip_grad_norm_(1.0)
    for name, grad in {"a": torch.arange(4.0), "b": torch.arange(4.0), "c": torch.ones(4)}.items():
        torch.testing.assert_close(opt.full_grad(name), grad / norm)


@on_ranks(2)
def test_torch_s_loops_over_gradients_do_not_look_at_all_of_them_each_time() -> None:
    """Otherwise clipping a model of 1,000 parameters would take seconds."""
    zero = with_zero(MLP(depth=8), SGD)
    params = list(zero.module.parameters())
    zero.backward(0)
    with mock.patch.object(Feeder, "present", autospec=True, side_effect=Feeder.present) as look:
        nn.utils.clip_grad_norm_(params, 1e-3, foreach=False)
        nn.utils.clip_grad_value_(params, 1e-4, foreach=False)
        for param in params:
            assert param.grad is not None
            param.grad.zero_()
    assert look.call_count < len(params)


@on_ranks(1, 2)
def test_a_gradient_that_was_cleared_by_hand_has_no_norm() -> None:
    module = _Sum()
    opt = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, module=module)
    module(torch.arange(4.0)).backward()
    assert list(opt.grad_norms()) == ["a", "b", "c"]
    module.b.grad = None
    assert list(opt.grad_norms()) == ["a", "c"]
    opt.zero_grad()
    for param in opt.param_groups[0]["params"]:
        param.requires_grad_(False)
    opt.zero_grad()
    assert opt.grad_norms() == {}


@on_ranks(3)
def test_one_ranks_infinity_is_everybodys_even_for_a_rank_that_owns_nothing() -> None:
    """Three ranks, one of which owns nothing, and each in turn has the infinity."""
    problem = CLIPPED["tiny"]
    for bad, layout in itertools.product(range(3), LAYOUTS):
        zero = with_zero(problem.fresh(), SGD, layout=layout)
        scaler = GradScaler("cpu", init_scale=64.0)
        before = zero.params
        loss = problem.loss(zero.model, 0)
        scaler.scale(loss * float("inf") if rank() == bad else loss).backward()
        scaler.unscale_(zero.opt)
        scaler.step(zero.opt)
        scaler.update()
        assert scaler.get_scale() == 32.0
        assert not any((a - b).any() for a, b in zip(before, zero.params, strict=True))


@on_ranks(1, 2, 4)
def test_an_empty_parameter_counts_for_nothing_in_any_norm() -> None:
    """Some rank owns it nevertheless."""
    for dtype in (torch.float32, torch.bfloat16):
        params = {"weight": torch.arange(6.0), "nothing": torch.empty(0, 3)}
        zero = with_zero(nn.ParameterDict(params).to(dtype), SGD)
        sum(param.square().sum() for param in zero.module.parameters()).backward()
        assert [zero.clip(100.0, norm_type) for norm_type in (torch.inf, 1.0)] == [10.0, 30.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@on_ranks(2)
def test_the_norm_is_as_precise_as_the_most_precise_gradient(dtype: torch.dtype) -> None:
    """The norm of gradients of 64 bits a number, and torch's own."""
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(9, 70, dtype=dtype, generator=random), torch.randn(5, generator=random)]
    divided, plain = (nn.ParameterList(value.clone() for value in values) for _ in range(2))
    opt = ZeroRedundancyOptimizer(divided.parameters(), optim.SGD, module=divided, lr=0.1)
    for module in (divided, plain):
        sum(param.abs().square().sum() for param in module).backward()
    norm, expected = opt.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)


@on_ranks(2)
def test_without_gradients_the_norm_is_zero() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    assert same_bits(zero.clip(1.0), torch.tensor(0.0))


@on_ranks(2, raises=RuntimeError, match="already been called")
def test_unscaling_twice_raises_on_every_rank() -> None:
    zero = with_zero(MLP(), SGD)
    scaler = GradScaler("cpu")
    scaler.scale(zero.model(noise(0, 6, 16)).sum()).backward()
    scaler.unscale_(zero.opt)
    scaler.unscale_(zero.opt)


@on_ranks(2)
def test_gradients_that_no_sync_held_back_are_not_taken_for_everybodys() -> None:
    """Only backward passes under `no_sync`, an infinity on one rank, then a scaler's step."""
    torch.manual_seed(0)
    model = nn.Linear(96, 16)
    opt = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, module=model, lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0)
    scales = []
    for step in range(4):
        with opt.no_sync():
            for _ in range(2):
                factor = float("inf") if step == 1 and rank() == 1 else 1.0
                loss = model(torch.ones(2, 96)).sum() * factor
                scaler.scale(loss).backward()
        assert all(type(p.grad).__name__ == "ShardedGrad" for p in model.parameters())
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [2.0, 1.0, 1.0, 1.0]
    opt.verify()  # all ranks have the same parameters
