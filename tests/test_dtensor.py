"""DTensor parameters are sharded on their local part, with the numbers of the unsharded optimizer.

The unsharded optimizer steps on the same DTensors with the same gradients, on every rank. What it
does to an element it does on the rank that holds it, in the same order: no bit may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from problems import Case, copies, difference, differing
from ranks import raises_on_every_rank, run_ranks
from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint

MESHES = [(2, 2), (2, 1), (1, 2)]
"""Data-parallel times tensor-parallel ranks."""

CASES = [
    Case(optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    Case(optim.AdamW, {"lr": 0.01, "foreach": True}),
    Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]

BUCKET_BYTES = 256
"""Small, so that there are several buckets and cuts within parameters."""

STEPS = range(6)


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
        out: Tensor = self.last(self.down(torch.relu(self.up(self.norm(x)))))
        return out


def make_model(mesh: DeviceMesh, plain: bool = True) -> MLP:
    torch.manual_seed(0)
    model = MLP(plain)
    if mesh["tp"].size() > 1 or not plain:
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


def backward(model: MLP, mesh: DeviceMesh, step: int) -> None:
    """The gradient of what the data-parallel ranks have together, as the user synchronises it."""
    random = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
    x = torch.randn(4, 10, generator=random)
    if isinstance(model.norm.weight, DTensor):
        x = x.chunk(mesh["tp"].size())[mesh["tp"].get_local_rank()]
    model(x).square().mean().backward()
    for param in model.parameters():
        assert param.grad is not None
        dist.all_reduce(local(param.grad), group=mesh["dp"].get_group())


def local(tensor: Tensor) -> Tensor:
    """This rank's part; written without the library's own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def parts(params: Any) -> list[Tensor]:
    return copies([local(param) for param in params])


def made_params(mesh: DeviceMesh) -> list[nn.Parameter]:
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
        full = torch.randn(shape, generator=random)
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


def settle_gradients(params: list[Tensor]) -> None:
    """Take the sums that are still to be taken.

    The gradient of the replicated norm is Partial: each rank has a term of it. Torch's SGD makes its
    momentum of the terms and sums these afterwards, in another order than the sums' momentum.
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


# --------------------------------------------------------------------------------- the numbers


def _trained_like_unsharded(dp: int, tp: int) -> list[str]:
    mesh = make_mesh(dp, tp)
    failures = []
    for case in CASES:
        for views in (False, True):
            models = [make_model(mesh), make_model(mesh)]
            opts: list[Any] = [
                Unsharded(models[0].parameters(), case),
                sharded(models[1].parameters(), mesh, case, parameters_as_bucket_view=views),
            ]
            start = parts(models[0].parameters())
            for step in STEPS:
                for model, opt in zip(models, opts, strict=True):
                    backward(model, mesh, step)
                    opt.step()
                    opt.zero_grad()
            expected, got = (parts(model.parameters()) for model in models)
            if len(differing(start, expected)) < len(start):
                failures.append(f"{case}: the unsharded optimizer left something as it was")
            if wrong := differing(expected, got):
                failures.append(f"{case}, views {views}: parameters {wrong}")
            if tp > 1 and not isinstance(models[1].up.weight, DTensor):
                failures.append("nothing was tensor-parallel")
    return failures


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_a_tensor_parallel_model_trains_as_with_the_unsharded_optimizer(dp: int, tp: int) -> None:
    assert run_ranks(_trained_like_unsharded, dp * tp, dp, tp) == [[]] * (dp * tp)


def _made_gradients(dp: int, tp: int) -> list[str]:
    mesh = make_mesh(dp, tp)
    failures = []
    for case in CASES:
        for views in (False, True):
            expected, got = made_params(mesh), made_params(mesh)
            plain = Unsharded(expected, case)
            opt = sharded(got, mesh, case, parameters_as_bucket_view=views)
            for step in STEPS:
                give_gradients(expected, mesh, step)
                give_gradients(got, mesh, step)
                plain.step()
                opt.step()
            if wrong := differing(parts(expected), parts(got)):
                failures.append(f"{case}, views {views}: parameters {wrong}")
            for index, param in enumerate(got):
                state = {k: local(value) for k, value in plain.state(expected[index]).items()}
                if wrong := difference(state, opt.full_state(param)):
                    failures.append(f"{case}, views {views}: state of {index} {wrong}")
    return failures


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_uneven_and_empty_parts_and_missing_gradients(dp: int, tp: int) -> None:
    assert run_ranks(_made_gradients, dp * tp, dp, tp) == [[]] * (dp * tp)
