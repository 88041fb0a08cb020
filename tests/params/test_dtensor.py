"""DTensor parameters are sharded on their local part, with the numbers of the unsharded optimizer.

The unsharded optimizer steps on the same DTensors with the same gradients, on every rank. What it
does to an element it does on the rank that holds it, in the same order: no bit may differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensors import (
    CASES,
    LATER,
    MESHES,
    STEPS,
    Unsharded,
    backward,
    give_gradients,
    local,
    made_params,
    make_mesh,
    make_model,
    parts,
    placed_as,
    sharded,
    step_both,
)
from on_ranks import on_ranks
from problems import Case, OneByOne, assert_alike, assert_same, differing
from ranks import each_raises_on_every_rank
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint


def _train(mesh: Any, models: list[Any], opts: list[Any], steps: range) -> None:
    for step, (model, opt) in itertools.product(steps, zip(models, opts, strict=True)):
        backward(model, mesh, step)
        opt.step()
        opt.zero_grad()


@pytest.mark.slow
@on_ranks(2, 4)
def test_a_tensor_parallel_model_trains_as_with_the_unsharded_optimizer() -> None:
    meshes = MESHES[dist.get_world_size()]
    for shape, case, views in itertools.product(meshes, CASES, (False, True)):
        mesh = make_mesh(*shape)
        models = [make_model(mesh), make_model(mesh)]
        assert isinstance(models[1].up.weight, DTensor)
        opts: list[Any] = [
            Unsharded(models[0].parameters(), case),
            sharded(models[1].parameters(), mesh, case, parameters_as_bucket_view=views),
        ]
        start = parts(models[0].parameters())
        _train(mesh, models, opts, STEPS)
        expected, got = (parts(model.parameters()) for model in models)
        assert len(differing(start, expected)) == len(start), "something was left as it was"
        assert_same(expected, got, (shape, case, views))


@on_ranks(4)
def test_16_bit_dtensors_have_masters_of_their_local_parts() -> list[int]:
    """16-bit DTensors with masters: as an unsharded optimizer on fp32 DTensors that is rounded."""
    mesh = make_mesh(2, 2)
    case = CASES[0]
    got = made_params(mesh, torch.bfloat16)
    wide = [nn.Parameter(param.detach().float()) for param in got]
    plain = Unsharded(wide, case)
    opt = sharded(got, mesh, case, precision=MixedPrecision())
    for step in STEPS:
        give_gradients(got, mesh, step)
        for param, narrow in zip(wide, got, strict=True):
            param.grad = None if narrow.grad is None else narrow.grad.float()
        plain.step()
        opt.step()
    masters: list[Any] = [opt.full_master(param) for param in got]
    rounded = [part.bfloat16() for part in parts(wide)]
    return [*differing(rounded, parts(got)), *differing(parts(wide), masters)]


def gradients(params: Any) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


@pytest.mark.slow
@on_ranks(4)
def test_clipping_counts_every_part_once() -> None:
    mesh = make_mesh(2, 2)
    for plain in (True, False):
        for norm_type in (2.0, 1.0, float("inf")):
            models = [make_model(mesh, plain), make_model(mesh, plain)]
            for model in models:
                backward(model, mesh, 0)
            # torch's clipping does not take plain tensors and DTensors together: the norms of the
            # whole gradients are put together by hand.
            params = list(models[0].parameters())
            grads = [full(grad) for grad in gradients(params)]
            expected = nn.utils.get_total_norm(grads, norm_type)
            opt = sharded(models[1].parameters(), mesh, CASES[0])
            norm = opt.clip_grad_norm_(0.01, norm_type)
            assert not isinstance(norm, DTensor)
            assert torch.allclose(norm, expected, rtol=1e-6, atol=0), (norm_type, norm, expected)
            if not plain:
                theirs = nn.utils.clip_grad_norm_(params, 0.01, norm_type)
                assert isinstance(theirs, DTensor)
                assert_same([theirs.full_tensor()], [norm], norm_type)
                want, got = (parts(gradients(model.parameters())) for model in models)
                # torch 2.11 does not scale gradients that are sums still to be taken.
                after = nn.utils.get_total_norm([full(g) for g in gradients(params)], norm_type)
                if torch.allclose(after, torch.tensor(0.01), rtol=1e-3, atol=0):
                    assert_same(want, got, norm_type)
            whole = [full(g) for g in gradients(models[1].parameters())]
            after = nn.utils.get_total_norm(whole, norm_type)
            assert torch.allclose(after, torch.tensor(0.01), rtol=1e-3, atol=0), norm_type


@on_ranks(2, raises=RuntimeError, match="modified by an inplace operation")
def test_autograd_sees_that_a_step_changed_a_dtensor() -> None:
    mesh = make_mesh(2, 1)
    params = made_params(mesh)
    opt = sharded(params, mesh, CASES[0])
    out = (params[0] * params[0]).sum()
    give_gradients(params, mesh, 1)
    opt.step()
    out.backward()


@pytest.mark.slow
@on_ranks(4)
def test_dtensors_may_be_frozen_unfrozen_and_converted() -> None:
    """Another dtype, and another set of trainable parameters, between two steps."""
    mesh = make_mesh(2, 2)
    case = CASES[2]
    for views in (False, True):
        models = [make_model(mesh, plain=False), make_model(mesh, plain=False)]
        opt = sharded(models[1].parameters(), mesh, case, parameters_as_bucket_view=views)
        opts: list[Any] = [Unsharded(models[0].parameters(), case), opt]
        for steps, trains in ((STEPS[:2], True), (STEPS[2:4], False), (STEPS[4:], True)):
            for model in models:
                model.up.weight.requires_grad_(trains)
            _train(mesh, models, opts, steps)
        assert_same(*(parts(model.parameters()) for model in models), views)
        before = [part.double() for part in parts(models[1].parameters())]
        models[1].double()
        backward(models[1], mesh, 9, torch.float64)
        opt.step()
        now = parts(models[1].parameters())
        assert all(part.dtype == torch.float64 for part in now)
        assert len(differing(before, now)) == len(now), "a step left something as it was"


# ----------------------------------------------------------------------------------- the state


@on_ranks(2, 4)
def test_parameters_and_state_are_those_of_the_unsharded_part_and_load_at_the_same_place() -> None:
    """Trained, consolidated, loaded into another optimizer at the same place, and trained on.

    With bucket views before the load or after it, in turn.
    """
    meshes = MESHES[dist.get_world_size()]
    for (dp, tp), (number, case) in itertools.product(meshes, enumerate(CASES)):
        mesh = make_mesh(dp, tp)
        views = (number + tp) % 2 == 0
        expected, got = made_params(mesh), made_params(mesh)
        plain = Unsharded(expected, case)
        opt = sharded(got, mesh, case, parameters_as_bucket_view=views)
        assert not step_both(mesh, (expected, plain), (got, opt)), (case, views)
        for to in range(dp):
            opt.consolidate_state_dict(to=to)
        saved: list[Any] = [opt.state_dict() if mesh["dp"].get_local_rank() == dp - 1 else None]
        dist.broadcast_object_list(saved, group=mesh["dp"].get_group(), group_src=dp - 1)
        for index, param in enumerate(expected):
            want = {key: local(value) for key, value in plain.state(param).items()}
            assert_alike(want, opt.full_state(got[index]), (case, views, index))
            assert_alike(want, saved[0]["state"][index], (case, views, index))
        resumed = sharded(got, mesh, case, layout="auto", parameters_as_bucket_view=not views)
        resumed.load_state_dict(saved[0])
        assert not step_both(mesh, (expected, plain), (got, resumed), LATER), (case, views)


@on_ranks(4)
def test_the_unsharded_optimizers_state_dict_loads_on_its_own_rank() -> list[int]:
    """The state dict of the unsharded optimizer on this rank has DTensors in it."""
    mesh = make_mesh(2, 2)
    expected, got = made_params(mesh), made_params(mesh)
    plain = optim.AdamW(expected, lr=0.01)
    for step in STEPS:
        give_gradients(expected, mesh, step)
        plain.step()
    with torch.no_grad():
        for param, other in zip(got, expected, strict=True):
            local(param).copy_(local(other))
    opt = sharded(got, mesh, Case(optim.AdamW, {"lr": 0.01}))
    opt.load_state_dict(plain.state_dict())
    return step_both(mesh, (expected, plain), (got, opt), LATER)


@on_ranks(4, raises=ValueError, match=r"has shape \(8, 6\), but the parameter has shape \(4, 6\)")
def test_the_state_of_whole_tensors_is_refused() -> None:
    mesh = make_mesh(2, 2)
    params = [nn.Parameter(torch.ones(8, 6))]
    plain = optim.AdamW(params)
    params[0].grad = torch.ones(8, 6)
    plain.step()
    shards = [nn.Parameter(placed_as(torch.ones(8, 6), mesh["tp"], Shard(0)))]
    sharded(shards, mesh, CASES[0]).load_state_dict(plain.state_dict())


# -------------------------------------- operations that need all of a tensor refuse DTensors


class RowNorms(OneByOne):
    """Looks at whole tensors."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        p.sub_(self.direction(p.grad), alpha=lr)

    def direction(self, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def _build(dp: int, tp: int, placement: str, optimizer_class: Any, options: dict[str, Any]) -> None:
    mesh = make_mesh(dp, tp)
    placed: dict[str, Placement] = {"shard": Shard(0), "replicate": Replicate()}
    if placement == "partial":
        tensor: Tensor = DTensor.from_local(torch.ones(6, 4), mesh["tp"], [Partial()])
    else:
        tensor = placed_as(torch.ones(6, 4), mesh["tp"], placed[placement])
    params = [("plain", nn.Parameter(torch.ones(3))), ("fc.weight", nn.Parameter(tensor))]
    group = None if options.pop("everybody", False) else mesh["dp"].get_group()
    if options.pop("module", False):
        options["module"] = nn.ParameterDict({"plain": params[0][1], "weight": params[1][1]})
        params = list(options["module"].named_parameters())
    ZeroRedundancyOptimizer(params, optimizer_class, process_group=group, **options)


PART = "'fc.weight' .*Shard.* one of 2 parts.*'whole' RowNorms"
AT_RANDOM = MixedPrecision(master_dtype=None, stochastic_rounding=True)

#: Mesh, placement, class, options, error and message.
REFUSED: dict[str, tuple[tuple[int, int], str, Any, dict[str, Any], type[Exception], str]] = {
    "a class that looks at whole tensors": ((2, 2), "shard", RowNorms, {}, ValueError, PART),
    "such a class on one data-parallel rank": ((1, 2), "shard", RowNorms, {}, ValueError, PART),
    "slices for such a class": (
        *((1, 2), "shard", RowNorms, {"layout": "sliced"}),
        *(ValueError, "would change the numbers of RowNorms"),
    ),
    "a class that couples tensors": ((1, 2), "shard", optim.LBFGS, {}, ValueError, "LBFGS"),
    "layout whole": (
        *((2, 2), "shard", optim.AdamW, {"layout": "whole"}),
        *(ValueError, "'fc.weight' .*layout 'whole' AdamW"),
    ),
    "terms of a sum": ((2, 2), "partial", optim.AdamW, {}, ValueError, "'fc.weight' .*Partial"),
    "module": ((2, 2), "shard", optim.AdamW, {"module": True}, TypeError, "'weight' .*module="),
    "DDP": (
        *((2, 1), "replicate", optim.AdamW, {"overlap_with_ddp": True}),
        *(TypeError, "'fc.weight' .*overlap_with_ddp=True"),
    ),
    "stochastic rounding": (
        *((2, 2), "shard", optim.AdamW, {"precision": AT_RANDOM}),
        *(TypeError, "'fc.weight' .*stochastic_rounding"),
    ),
    "a group of ranks with different parts": (
        *((2, 2), "shard", optim.AdamW, {"everybody": True}),
        *(ValueError, "part 0 of 2 by .*'fc.weight' of shape .*same part.*part 1 of 2"),
    ),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_cannot_be_right_is_refused_on_every_rank(ranks: int) -> None:
    cases = [
        (_build, error, match, *mesh, *arguments)
        for mesh, *arguments, error, match in REFUSED.values()
        if math.prod(mesh) == ranks
    ]
    assert cases
    each_raises_on_every_rank(ranks, cases)


class Signs(RowNorms):
    """Element-wise, which must be found out."""

    def direction(self, grad: Tensor) -> Tensor:
        return grad.sign()


@on_ranks(2, 4)
def test_element_wise_classes_may_have_parts_and_others_what_is_whole() -> None:
    whole = (2, 2, "replicate") if dist.get_world_size() == 4 else (2, 1, "shard")
    _build(*whole, RowNorms, {})
    for mesh in MESHES[dist.get_world_size()]:
        _build(*mesh, "shard", Signs, {})


def _checkpointed(how: str, path: str) -> None:
    mesh = make_mesh(2, 2)
    params = made_params(mesh)
    opt = sharded([(f"p{i}", param) for i, param in enumerate(params)], mesh, CASES[0])
    plain = ZeroRedundancyOptimizer(
        [nn.Parameter(torch.ones(3))], optim.AdamW, process_group=opt.process_group
    )
    folder = f"{path}/{mesh['tp'].get_local_rank()}"
    acts: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpoint.save(folder, opt),
        "async": lambda: checkpoint.async_save(folder, opt),
        "save model": lambda: checkpoint.save(folder, plain, make_model(mesh)),
        "load": lambda: checkpoint.load(checkpoint.save(folder, plain), opt, strict=False),
        "dcp": lambda: dcp.save({"optim": checkpoint.Sharded(opt)}, checkpoint_id=path),
        "dcp load": lambda: dcp.load({"optim": checkpoint.Sharded(opt)}, checkpoint_id=path),
        "stateful": lambda: checkpoint.Sharded(opt).state_dict(),
        "join": lambda: opt.join_hook(),
    }
    acts[how]()


ERRORS: dict[str, Any] = dict.fromkeys(
    ("save", "async", "save model", "load", "stateful", "join"), TypeError
)
# DCP reports what ranks raise in an error of its own.
ERRORS |= dict.fromkeys(("dcp", "dcp load"), (TypeError, dcp.api.CheckpointException))


def test_what_knows_nothing_of_parts_refuses_dtensors(tmp_path: Path) -> None:
    match = "parameter '.*' is a DTensor: "
    cases = [(_checkpointed, ERRORS[how], match, how, str(tmp_path)) for how in ERRORS]
    each_raises_on_every_rank(4, cases)
