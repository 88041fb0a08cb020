"""Operations that need all of a tensor refuse DTensors, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensors import CASES, MESHES, made_params, make_mesh, make_model, placed_as, sharded
from on_ranks import on_ranks
from problems import OneByOne
from ranks import each_raises_on_every_rank
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint


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
