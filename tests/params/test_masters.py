"""Masters follow what is written to parameters, and are clipped and stepped on in fp32."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doubles import AnyOrder, LateArrival, behind_the_door
from on_ranks import on_ranks
from problems import LAYOUTS, assert_same, copies, make_params, set_gradients
from reference.naive_masters import NaiveMasters
from sixteen_bits import (
    AT_RANDOM,
    BF16,
    FP16,
    FP32,
    MASTERS,
    bf16_mlp,
    give_gradients,
    loss_of,
    train_on,
    zero_of,
)
from torch import nn, optim
from torch.distributed.algorithms.join import Join

from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep.params.step_tensors import CHUNK


@on_ranks(1, 2)
def test_a_zero_of_the_other_sign_is_a_write_wherever_an_element_lies() -> None:
    """How many elements of each master are not what was written: a zero, where there was another.

    A master that is less than half of the smallest number rounds to a zero with a sign.
    """
    params = [nn.Parameter(torch.zeros(numel, dtype=FP16)) for numel in (256, 257, 130, 3, 1)]
    opt = ZeroRedundancyOptimizer(params, optim.SGD, precision=MASTERS, lr=0.25)
    for param in params:
        param.grad = torch.full_like(param, 2.0**-24)
    opt.step()
    with torch.no_grad():
        assert all(param.signbit().all() for param in params)
        for param in params:
            param.zero_()
    masters = [opt.full_master(param) for param in params]
    assert not any(master.count_nonzero() for master in masters)


@on_ranks(1, 2)
def test_what_a_user_writes_counts_in_8_bits_too() -> None:
    """Training in 8 bits, and a write to elements that one rank owns."""
    weight = nn.Parameter(torch.ones(200).to(torch.float8_e4m3fn))
    opt = ZeroRedundancyOptimizer([weight], optim.SGD, precision=MASTERS, lr=1 / 64)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        opt.step()
    weight.data[:3] = torch.full((3,), 0.5).to(weight.dtype)
    opt.step()
    expected = torch.full((200,), 1 - 4 / 64)
    expected[:3] = 0.5 - 1 / 64
    assert torch.equal(opt.full_master(weight), expected)


@on_ranks(1)
def test_a_write_counts_in_every_chunk_that_is_compared() -> None:
    weight = nn.Parameter(torch.ones(2 * CHUNK + 100, dtype=BF16))
    opt = ZeroRedundancyOptimizer([weight], optim.SGD, precision=MASTERS, lr=0.25)
    expected = torch.ones(weight.numel())
    for element in (0, CHUNK - 1, CHUNK, 2 * CHUNK, -1):
        weight.data[element] = expected[element] = 3.0
    weight.grad = torch.full_like(weight, 2.0**-10)
    opt.step()
    assert torch.equal(opt.full_master(weight), expected - 2.0**-12)


@pytest.mark.parametrize("with_module", [False, True])
@on_ranks(2)
def test_masters_are_those_of_the_data_that_parameters_were_given(with_module: bool) -> None:
    """Masters of parameters that were given other data, before the next step."""
    module = bf16_mlp()
    opt = zero_of(module, with_module, precision=MASTERS)
    for step in range(2):
        give_gradients(module, step)
        opt.step()
        opt.zero_grad()
    module.layers[0].requires_grad_(False)  # another plan is due, which is not there yet
    for param in module.parameters():
        param.data = torch.full_like(param, 5.0)
    given = [param.data_ptr() for param in module.parameters()]
    for param in module.parameters():
        master = opt.full_master(param)
        assert master is None or torch.equal(master, torch.full_like(param, 5.0).float())
    opt.consolidate_state_dict()
    saved = opt.state_dict()["masters"] if opt.rank == 0 else {}
    assert all((each == 5).all() for each in saved.values())
    assert [param.data_ptr() for param in module.parameters()] == given, "looking has moved them"


def test_a_step_leaves_parameters_without_a_gradient_unchanged_to_autograd() -> None:
    params = make_params([(70, 3), (5,)], dtypes=(BF16,), frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.AdamW, precision=MASTERS)
    params[0].grad = torch.ones_like(params[0])
    versions = [param._version for param in params]
    opt.step()
    assert params[0]._version > versions[0]
    assert params[1]._version == versions[1]


class _Twice(optim.Optimizer):
    """Evaluates its closure twice in a step, and goes downhill each time."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            closure()
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("policy", [MASTERS, AT_RANDOM])
def test_a_closure_that_is_evaluated_again_sees_the_update_in_between(policy: Any) -> None:
    param = nn.Parameter(torch.full((3,), 9.0, dtype=BF16))
    opt: Any = ZeroRedundancyOptimizer([param], _Twice, precision=policy, lr=0.25)
    seen = []

    def closure() -> None:
        opt.zero_grad()
        seen.append(param[0].item())
        (param - 1).square().sum().backward()

    opt.step(closure)
    opt.step(closure)
    # Half of the way to 1 each time; all of it without rounding.
    assert seen == [9.0, 5.0, 3.0, 2.0]
    assert param[0].item() == 1.5


# --------------------------------------------------------------------------------------- the norm


def test_a_drop_in_computes_the_norm_of_16_bit_gradients_in_fp32() -> None:
    """The norm is that of the gradients in fp32, not one that was rounded to 16 bits on the way."""
    for norm_type in (2.0, 1.0, torch.inf):
        params = make_params(dtypes=(BF16, FP32, torch.complex64))
        opt = ZeroRedundancyOptimizer(params, optim.SGD, precision=MASTERS, lr=0.1)
        set_gradients(params, 1)
        wide = [p.detach().to(torch.promote_types(p.dtype, FP32)) for p in params]
        for tensor, param in zip(wide, params, strict=True):
            tensor.grad = None if param.grad is None else param.grad.to(tensor.dtype, copy=True)
        full = [tensor for tensor in wide if tensor.numel()]  # torch has no norm of nothing
        expected = nn.utils.clip_grad_norm_(full, 1.0, norm_type)
        norm = opt.clip_grad_norm_(1.0, norm_type)
        assert norm.dtype == FP32
        assert torch.allclose(norm, expected, rtol=1e-6, atol=0), (norm_type, norm, expected)
        for tensor, param in zip(wide, params, strict=True):
            if tensor.grad is not None and param.grad is not None:
                got = param.grad.to(tensor.dtype)
                torch.testing.assert_close(got, tensor.grad, rtol=0.01, atol=0)


def test_a_drop_in_raises_for_a_norm_that_is_not_finite_if_asked_to() -> None:
    params = make_params([(70, 3), (5,)], dtypes=(BF16,), frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.SGD, precision=MASTERS, lr=0.1)
    assert opt.clip_grad_norm_(1.0).item() == 0  # no gradients yet
    params[0].grad = torch.full_like(params[0], torch.inf)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        opt.clip_grad_norm_(1.0, error_if_nonfinite=True)


# ---------------------------------------------------------------------------------- uneven inputs


@on_ranks(2)
def test_a_rank_without_data_goes_on_stepping_on_its_masters() -> None:
    """Rank 1 has two batches, rank 0 five."""
    mine = range(5 if dist.get_rank() == 0 else 2)
    module, oracle = bf16_mlp(), bf16_mlp()
    opt = zero_of(module)
    with Join([opt]):
        train_on(module, opt, mine)
    naive = NaiveMasters([{"params": list(oracle.parameters())}], optim.AdamW, lr=0.003)
    for step in range(5):
        # A rank without data has gradients of zeros.
        (loss_of(oracle, step) * (1.0 if step in mine else 0.0)).backward()
        naive.add_mean_gradients()
        naive.step()
        naive.zero_grad()
    assert_same(list(oracle.parameters()), list(module.parameters()))


# --------------------------------------------------------------------- what is sent, kept, scaled


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_grad_scaler_unscales_fp16_gradients_in_fp32(layout: str) -> None:
    """The stock GradScaler on fp16 parameters; at step 2 one rank has an infinity.

    The norm is the largest element, which is the same in any order.
    """
    module, oracle = bf16_mlp(FP16), bf16_mlp(FP16)
    naive = NaiveMasters([{"params": list(oracle.parameters())}], optim.AdamW, lr=0.003)
    opt = zero_of(module, layout=layout)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        loss = scaler.scale(loss_of(module, step))
        (loss * torch.inf if step == 2 and dist.get_rank() == 1 else loss).backward()
        scaler.unscale_(opt)
        norm = opt.clip_grad_norm_(1e-3, torch.inf)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step == 2:
            continue  # skipped
        scale = 2.0**10 if step < 2 else 2.0**9
        (loss_of(oracle, step) * scale).backward()
        naive.add_mean_gradients()
        naive.give_means()
        for master in naive.masters:
            assert master.grad is not None
            master.grad *= 1 / scale
        expected = nn.utils.clip_grad_norm_(naive.masters, 1e-3, torch.inf)
        naive.step()
        naive.zero_grad()
        assert_same([expected, *oracle.parameters()], [norm, *module.parameters()])
    assert scaler.get_scale() == 2.0**9


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_masters_wait_for_what_is_in_flight(layout: str) -> None:
    seen = []
    for double in (None, LateArrival, AnyOrder):
        module = bf16_mlp()
        with behind_the_door(double) if double else contextlib.nullcontext():
            opt = zero_of(module, layout=layout)
        train_on(module, opt, range(6))
        seen.append(copies(module.parameters()))
    assert_same(seen[0], seen[1])
    assert_same(seen[0], seen[2])


@pytest.mark.parametrize("with_late_hook", [False, True])
@on_ranks(2)
def test_held_back_gradients_add_up_in_the_dtype_of_the_master(with_late_hook: bool) -> None:
    """A hook that comes after the optimizer may change the first of them until backward ends."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(model.weight)
    policy = MixedPrecision(reduce_dtype=torch.float32)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, module=model, precision=policy, lr=1.0
    )
    if with_late_hook:
        model.weight.register_post_accumulate_grad_hook(lambda param: None)
    with opt.no_sync():
        for size in (1.0, 2.0**-9, 2.0**-9):
            model(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    master = opt.full_master("weight")
    assert master is not None
    assert master.item() == -1 - 2.0**-8
