"""Between backward and step a rank holds its part of the gradient, a few buckets, and no more."""

from __future__ import annotations

import gc
import weakref

import torch
from memory import held_memory
from models import ADAMW, MLP, MLP_PROBLEM, Problem, noise, with_zero
from on_ranks import on_ranks
from torch import Tensor

from shardstep.gradients.sharded_grad import ShardedGrad

POOL = 4
"""Buckets that are filled or in flight at a time."""

BIG = Problem(
    lambda: MLP(width=192, depth=16), lambda model, step: model(noise(step, 4, 16)).square().mean()
)


def _measure(layout: str, overlap: bool, hold_back: bool) -> dict[str, int]:
    module = BIG.fresh()
    before = held_memory()
    psi = sum(param.nbytes for param in module.parameters())
    zero = with_zero(module, ADAMW, layout=layout, overlap=overlap)
    for step in range(2):
        zero.backward(step, BIG)
        zero.finish()
    resting = sum(held_memory().values())
    if hold_back:
        with zero.no_sync():
            zero.backward(7, BIG)
    zero.backward(8, BIG)
    in_flight = sum(held_memory().values())
    zero.clip(1e12)  # the gradients have arrived now
    with_gradients = sum(held_memory().values())
    gradients = [param.grad for param in module.parameters()]
    zero.opt.step()
    stepped = sum(held_memory().values())
    buckets = zero.opt.plan.training_buckets
    return {
        "psi": psi,
        "num_buckets": len(buckets),
        "largest": max(bucket.nbytes for bucket in buckets),
        "share": max(
            sum(bucket.segment(r).numel * bucket.dtype.itemsize for bucket in buckets)
            for r in range(zero.opt.world_size)
        ),
        "counted": zero.opt.report().gradient_nbytes,
        "in flight": in_flight - resting,
        "grew by": with_gradients - resting,
        "grew by the step": stepped - with_gradients,
        "beyond the model": resting - sum(before.values()),
        "divided": sum(isinstance(grad, ShardedGrad) for grad in gradients),
        "num_params": len(gradients),
    }


@on_ranks(2, 3, fresh=True)
def test_gradients_take_their_share_and_a_pool_of_buckets() -> None:
    gc.freeze()  # leaves what torch has made at its import out of the search
    world_size = torch.distributed.get_world_size()
    outcomes = [
        (layout, _measure(layout, overlap, hold_back))
        for layout in ("sliced", "whole")
        for overlap, hold_back in ((True, False), (False, False), (True, True))
    ]
    for layout, found in outcomes:
        assert found["num_buckets"] >= 3 * POOL  # or a pool would be all there is
        assert found["divided"] == found["num_params"]
        # A share and POOL buckets are all there ever is.
        assert found["counted"] <= found["share"] + POOL * found["largest"]
        assert found["share"] < 1.1 * found["psi"] / world_size
        # What is received is added up when it is waited for: until then there is, for each
        # bucket of the pool, this rank's segment from everybody else.
        in_flight = found["in flight"] - found["share"]
        assert in_flight <= POOL * (world_size - 1) * found["largest"]
        if layout == "sliced":
            assert in_flight <= POOL * found["largest"] + 0.01 * found["psi"]
        # A backward pass leaves a share of the gradient, and flags, norms and the like.
        assert found["grew by"] < found["share"] + 0.01 * found["psi"]
        assert found["grew by the step"] < 0.01 * found["psi"]
        # AdamW's two states, a share each; parameters have moved into buckets.
        most = 2 * found["share"] + POOL * found["largest"] + 0.06 * found["psi"]
        assert found["beyond the model"] < most


@on_ranks(2)
def test_whole_gradients_are_never_alive_all_at_once() -> None:
    """Gradients that are alive at once while backward runs: those of buckets not yet complete."""
    zero = with_zero(BIG.fresh(), ADAMW)
    for step in range(2):
        zero.backward(step, BIG)
        zero.finish()
    params = list(zero.module.parameters())
    alive: list[int] = []

    def look(param: Tensor) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        alive.append(sum(g.nbytes for g in grads if not isinstance(g, ShardedGrad)))

    handles = [param.register_post_accumulate_grad_hook(look) for param in params]
    zero.backward(3, BIG)
    for handle in handles:
        handle.remove()
    zero.finish()
    found = {
        "peak": max(alive),
        "largest": max(bucket.nbytes for bucket in zero.opt.plan.training_buckets),
        "psi": sum(param.nbytes for param in params),
    }
    assert found["peak"] <= 2 * found["largest"]
    assert found["peak"] < found["psi"] / 4


@on_ranks(2)
def test_what_autograd_has_made_is_freed_after_backward() -> None:
    zero = with_zero(BIG.fresh(), ADAMW)
    made: list[weakref.ref[Tensor]] = []
    for param in zero.module.parameters():
        param.register_hook(lambda grad: made.append(weakref.ref(grad)))
    zero.backward(0, BIG)
    gc.collect()
    assert made
    assert all(ref() is None for ref in made)


@on_ranks(2, fresh=True)
def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    """Tensors that stay behind when gradients are set to zero, or never cleared."""
    gc.freeze()
    for way in ("in place", "through the module", "never"):
        zero = with_zero(MLP_PROBLEM.fresh(), ADAMW)
        counts = []
        for step in range(9):
            zero.backward(step)
            zero.opt.step()
            if way == "in place":
                zero.opt.zero_grad(set_to_none=False)
            elif way == "through the module":
                zero.module.zero_grad(set_to_none=False)
            counts.append(len(held_memory()))
        assert counts[-1] <= counts[2], f"{way}: {counts}"
        zero.opt.detach()
