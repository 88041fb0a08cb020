"""Tensor-parallel models and DTensor parameters, with an unsharded optimizer to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from problems import Case, copies, differing
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardstep import ZeroRedundancyOptimizer

MESHES = {2: [(2, 1), (1, 2)], 4: [(2, 2)]}
"""Data-parallel times tensor-parallel ranks, by their number."""

CASES = [
    Case(optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    Case(optim.AdamW, {"lr": 0.01, "foreach": True}),
    Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]

BUCKET_BYTES = 256
"""Small, so that there are several buckets and cuts within parameters."""

STEPS = range(6)
LATER = range(6, 12)


def make_mesh(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


class MLP(nn.Module):
    """With a norm that is replicated, one that is a plain module, and linear layers in parallel."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 14)
        self.down = nn.Linear(14, 10)
        self.last = nn.LayerNorm(10) if plain else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(torch.relu(self.up(self.norm(x)))))


def make_model(mesh: DeviceMesh, plain: bool = True) -> MLP:
    torch.manual_seed(0)
    model = MLP(plain)
    parallelize_module(
        model,
        mesh["tp"],
        {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        },
    )
    return model


def backward(model: MLP, mesh: DeviceMesh, step: int, dtype: torch.dtype = torch.float32) -> None:
    """The gradient of what the data-parallel ranks have together, as the user synchronises it."""
    random = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
    x = torch.randn(4, 10, generator=random).to(dtype)
    model(x.chunk(mesh["tp"].size())[mesh["tp"].get_local_rank()]).square().mean().backward()
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(local(param.grad), group=mesh["dp"].get_group())


def local(tensor: Tensor) -> Tensor:
    """This rank's part; written without the library's own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def parts(params: Any) -> list[Tensor]:
    return copies([local(param) for param in params])


def made_params(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Uneven, tiny and empty parts, replicas, and a plain tensor among them."""
    placed: list[tuple[tuple[int, ...], Placement | None]] = [
        ((13, 9), Shard(0)),
        ((9, 13), Shard(1)),
        ((1, 5), Shard(0)),
        ((31,), Replicate()),
        ((17,), None),
        ((), Replicate()),
        ((6, 4, 3), Shard(2)),
    ]
    random = torch.Generator().manual_seed(3)
    made = []
    for shape, placement in placed:
        full = torch.randn(shape, generator=random).to(dtype)
        tensor = full if placement is None else placed_as(full, mesh["tp"], placement)
        made.append(nn.Parameter(tensor))
    return made


def placed_as(full: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    return distribute_tensor(full, mesh, [placement], src_data_rank=None)


def give_gradients(params: list[nn.Parameter], mesh: DeviceMesh, step: int) -> None:
    """The same on all ranks; one of them missing now and then."""
    random = torch.Generator().manual_seed(100 + step)
    for index, param in enumerate(params):
        full = torch.randn(param.shape, generator=random)
        if isinstance(param, DTensor):
            full = placed_as(full, mesh["tp"], param.placements[0])
        param.grad = None if (index + step) % 5 == 0 else full.to(param.dtype)


def step_both(
    mesh: DeviceMesh,
    expected: tuple[list[nn.Parameter], Any],
    got: tuple[list[nn.Parameter], Any],
    steps: range = STEPS,
) -> list[int]:
    """Give both the same gradients and step; the parameters that differ then."""
    for step in steps:
        for params, opt in (expected, got):
            give_gradients(params, mesh, step)
            opt.step()
    return differing(parts(expected[0]), parts(got[0]))


def settle_gradients(params: list[Tensor]) -> None:
    """Take the sums that are still to be taken.

    The gradient of the replicated norm is Partial: each rank has a term of it. Torch's SGD makes
    its momentum of the terms and sums these afterwards, in another order than the sums' momentum.
    """
    for param in params:
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
            param.grad = param.grad.redistribute(param.device_mesh, param.placements)


class Unsharded:
    """One optimizer for the DTensors and one for the rest, which torch's foreach does not mix."""

    def __init__(self, params: Any, case: Case) -> None:
        given = list(params)
        kinds = [[p for p in given if isinstance(p, DTensor) is wanted] for wanted in (True, False)]
        self.opts = [case.optimizer_class(kind, **case.fresh_options()) for kind in kinds if kind]

    def step(self) -> None:
        for opt in self.opts:
            if isinstance(opt, optim.SGD):
                settle_gradients(opt.param_groups[0]["params"])
            opt.step()

    def zero_grad(self) -> None:
        for opt in self.opts:
            opt.zero_grad()

    def state(self, param: Tensor) -> dict[str, Any]:
        return next(dict(opt.state[param]) for opt in self.opts if param in opt.state)


def sharded(params: Any, mesh: DeviceMesh, case: Case, **kwargs: Any) -> ZeroRedundancyOptimizer:
    kwargs.setdefault("process_group", mesh["dp"].get_group())
    return ZeroRedundancyOptimizer(
        params, case.optimizer_class, bucket_bytes=BUCKET_BYTES, **kwargs, **case.fresh_options()
    )
