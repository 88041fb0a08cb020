"""Between backward and step a rank holds its part of the gradient, a few buckets, and no more."""

from __future__ import annotations

import gc
import weakref

from memory import held_memory
from models import ADAMW, MLP, MLP_PROBLEM, Problem, noise, train, with_zero
from on_ranks import on_ranks
from problems import LAYOUTS
from torch import Tensor

from shardstep.gradients.sharded_grad import ShardedGrad

POOL = 4
"""Buckets that are filled or in flight at a time."""

BIG = Problem(
    lambda: MLP(width=192, depth=16), lambda model, step: model(noise(step, 4, 16)).square().mean()
)


@on_ranks(2, 3, fresh=True)
def test_gradients_take_their_share_and_a_pool_of_buckets() -> None:
    gc.freeze()  # leaves what torch has made at its import out of the search
    for layout in LAYOUTS:
        for overlap, hold_back in ((True, False), (False, False), (True, True)):
            _measure(layout, overlap, hold_back)


def _measure(layout: str, overlap: bool, hold_back: bool) -> None:
    module = BIG.fresh()
    before = _held()
    psi = sum(param.nbytes for param in module.parameters())
    zero = with_zero(module, ADAMW, layout=layout, overlap=overlap)
    train(zero, BIG, range(2))
    resting = _held()
    if hold_back:
        with zero.no_sync():
            zero.backward(7, BIG)
    zero.backward(8, BIG)
    in_flight = _held() - resting
    zero.clip(1e12)  # the gradients have arrived now
    with_gradients = _held()
    assert all(isinstance(param.grad, ShardedGrad) for param in module.parameters())
    zero.opt.step()
    stepped = _held()
    buckets, ranks = zero.opt.plan.training_buckets, zero.opt.world_size
    assert len(buckets) >= 3 * POOL  # or a pool would be all there is
    largest = max(bucket.nbytes for bucket in buckets)
    share = max(
        sum(bucket.segment(rank).numel * bucket.dtype.itemsize for bucket in buckets)
        for rank in range(ranks)
    )
    # A share and POOL buckets are all there ever is.
    assert zero.opt.report().gradient_nbytes <= share + POOL * largest
    assert share < 1.1 * psi / ranks
    # What is received is added up when it is waited for: until then there is, for each bucket of
    # the pool, this rank's segment from everybody else.
    assert in_flight - share <= POOL * (ranks - 1) * largest
    if layout == "sliced":
        assert in_flight - share <= POOL * largest + 0.01 * psi
    # A backward pass leaves a share of the gradient, and flags, norms and the like.
    assert with_gradients - resting < share + 0.01 * psi
    assert stepped - with_gradients < 0.01 * psi
    # AdamW's two states, a share each; parameters have moved into buckets.
    assert resting - before < 2 * share + POOL * largest + 0.06 * psi


def _held() -> int:
    return sum(held_memory().values())


@on_ranks(2)
def test_whole_gradients_are_never_alive_all_at_once() -> None:
    """Gradients that are alive at once while backward runs: those of buckets not yet complete."""
    zero = with_zero(BIG.fresh(), ADAMW)
    train(zero, BIG, range(2))
    params = list(zero.module.parameters())
    alive: list[int] = []

    def look(param: Tensor) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        alive.append(sum(g.nbytes for g in grads if not isinstance(g, ShardedGrad)))

    handles = [param.register_post_accumulate_grad_hook(look) for param in params]
    train(zero, BIG, range(2, 3))  # with new hooks, gradients wait for the end of one pass
    alive.clear()
    zero.backward(3, BIG)
    for handle in handles:
        handle.remove()
    zero.finish()
    largest = max(bucket.nbytes for bucket in zero.opt.plan.training_buckets)
    assert max(alive) <= 2 * largest
    assert max(alive) < sum(param.nbytes for param in params) / 4


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
