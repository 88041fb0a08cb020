"""DTensor parameters are sharded on their local part, with the numbers of the unsharded optimizer.

The unsharded optimizer steps on the same DTensors with the same gradients, on every rank. What it
does to an element it does on the rank that holds it, in the same order: no bit may differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problems import Case, copies, difference, differing
from ranks import raises_on_every_rank, run_ranks
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
        out: Tensor = self.last(self.down(torch.relu(self.up(self.norm(x)))))
        return out


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


# --------------------------------------------------------------------------------- the numbers


def _trained_like_unsharded(dp: int, tp: int) -> list[str]:
    mesh = make_mesh(dp, tp)
    failures = []
    for case, views in itertools.product(CASES, (False, True)):
        models = [make_model(mesh), make_model(mesh)]
        assert isinstance(models[1].up.weight, DTensor)
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
        assert len(differing(start, expected)) == len(start), "something was left as it was"
        if wrong := differing(expected, got):
            failures.append(f"{case}, views {views}: parameters {wrong}")
    return failures


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_a_tensor_parallel_model_trains_as_with_the_unsharded_optimizer(dp: int, tp: int) -> None:
    assert run_ranks(_trained_like_unsharded, dp * tp, dp, tp) == [[]] * (dp * tp)


def _masters() -> list[int]:
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


def test_16_bit_dtensors_have_masters_of_their_local_parts() -> None:
    assert run_ranks(_masters, 4) == [[]] * 4


def _clipped() -> list[str]:
    mesh = make_mesh(2, 2)
    failures = []
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
            if isinstance(norm, DTensor) or not torch.allclose(norm, expected, rtol=1e-6, atol=0):
                failures.append(f"norm {norm_type}: {norm} instead of {expected}")
            if not plain:
                theirs = nn.utils.clip_grad_norm_(params, 0.01, norm_type)
                assert isinstance(theirs, DTensor)
                if differing([theirs.full_tensor()], [norm]):
                    failures.append(f"norm {norm_type}: {norm} instead of torch's {theirs}")
                want, got = (parts(gradients(model.parameters())) for model in models)
                # torch 2.11 does not scale gradients that are sums still to be taken.
                after = nn.utils.get_total_norm([full(g) for g in gradients(params)], norm_type)
                right = torch.allclose(after, torch.tensor(0.01), rtol=1e-3, atol=0)
                if right and (wrong := differing(want, got)):
                    failures.append(f"norm {norm_type}: clipped gradients {wrong}")
            whole = [full(g) for g in gradients(models[1].parameters())]
            after = nn.utils.get_total_norm(whole, norm_type)
            if not torch.allclose(after, torch.tensor(0.01), rtol=1e-3, atol=0):
                failures.append(f"norm {norm_type} after clipping: {after}")
    return failures


def gradients(params: Any) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def test_clipping_counts_every_part_once() -> None:
    assert run_ranks(_clipped, 4) == [[]] * 4


def _backward_through_old_values() -> None:
    mesh = make_mesh(2, 1)
    params = made_params(mesh)
    opt = sharded(params, mesh, CASES[0])
    out = (params[0] * params[0]).sum()
    give_gradients(params, mesh, 1)
    opt.step()
    out.backward()


def test_autograd_sees_that_a_step_changed_a_dtensor() -> None:
    match = "modified by an inplace operation"
    raises_on_every_rank(_backward_through_old_values, 2, RuntimeError, match=match)


def _moved_and_frozen() -> list[str]:
    """Another dtype, and another set of trainable parameters, between two steps."""
    mesh = make_mesh(2, 2)
    case = CASES[2]
    failures = []
    for views in (False, True):
        models = [make_model(mesh, plain=False), make_model(mesh, plain=False)]
        opt = sharded(models[1].parameters(), mesh, case, parameters_as_bucket_view=views)
        opts: list[Any] = [Unsharded(models[0].parameters(), case), opt]
        for step in STEPS:
            for model, each in zip(models, opts, strict=True):
                if step == 2:
                    model.up.weight.requires_grad_(False)
                if step == 4:
                    model.up.weight.requires_grad_(True)
                backward(model, mesh, step)
                each.step()
                each.zero_grad()
        if wrong := differing(*(parts(model.parameters()) for model in models)):
            failures.append(f"views {views}: parameters {wrong}")
        before = parts(models[1].parameters())
        models[1].double()
        backward(models[1], mesh, 9, torch.float64)
        opt.step()
        now = parts(models[1].parameters())
        if any(part.dtype != torch.float64 for part in now):
            failures.append(f"views {views}: not all are float64")
        if len(differing([part.double() for part in before], now)) < len(now):
            failures.append(f"views {views}: a step in float64 left something as it was")
    return failures


def test_dtensors_may_be_frozen_unfrozen_and_converted() -> None:
    assert run_ranks(_moved_and_frozen, 4) == [[]] * 4


# ----------------------------------------------------------------------------------- the state


def _saved_and_loaded(dp: int, tp: int) -> list[str]:
    """Trained, consolidated, loaded into another optimizer at the same place, and trained on."""
    mesh = make_mesh(dp, tp)
    failures = []
    for case, views in itertools.product(CASES, (False, True)):
        expected, got = made_params(mesh), made_params(mesh)
        plain = Unsharded(expected, case)
        opt = sharded(got, mesh, case, parameters_as_bucket_view=views)
        if wrong := step_both(mesh, (expected, plain), (got, opt)):
            failures.append(f"{case}, views {views}: parameters {wrong}")
        for to in range(dp):
            opt.consolidate_state_dict(to=to)
        saved: list[Any] = [opt.state_dict() if mesh["dp"].get_local_rank() == dp - 1 else None]
        dist.broadcast_object_list(saved, group=mesh["dp"].get_group(), group_src=dp - 1)
        for index, param in enumerate(expected):
            want = {key: local(value) for key, value in plain.state(param).items()}
            failures += [
                f"{case}, views {views}: state of {index}"
                for found in (opt.full_state(got[index]), saved[0]["state"][index])
                if difference(want, found)
            ]
        resumed = sharded(got, mesh, case, layout="auto", parameters_as_bucket_view=not views)
        resumed.load_state_dict(saved[0])
        if wrong := step_both(mesh, (expected, plain), (got, resumed), LATER):
            failures.append(f"{case}, views {views}: parameters {wrong} after loading")
    return failures


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_parameters_and_state_are_those_of_the_unsharded_part_and_load_at_the_same_place(
    dp: int, tp: int
) -> None:
    assert run_ranks(_saved_and_loaded, dp * tp, dp, tp) == [[]] * (dp * tp)


def _torch_state_loads() -> list[int]:
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


def test_the_unsharded_optimizers_state_dict_loads_on_its_own_rank() -> None:
    assert run_ranks(_torch_state_loads, 4) == [[]] * 4


def _global_state() -> None:
    mesh = make_mesh(2, 2)
    params = [nn.Parameter(torch.ones(8, 6))]
    plain = optim.AdamW(params)
    params[0].grad = torch.ones(8, 6)
    plain.step()
    shards = [nn.Parameter(placed_as(torch.ones(8, 6), mesh["tp"], Shard(0)))]
    sharded(shards, mesh, CASES[0]).load_state_dict(plain.state_dict())


def test_the_state_of_whole_tensors_is_refused() -> None:
    match = r"has shape \(8, 6\), but the parameter has shape \(4, 6\)"
    raises_on_every_rank(_global_state, 4, ValueError, match=match)


# ----------------------------------------------------------------------------- what is refused


class RowNorms(optim.Optimizer):
    """Looks at whole tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param.grad), alpha=group["lr"])

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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_on_every_rank(name: str) -> None:
    (dp, tp), placement, optimizer_class, options, error, match = REFUSED[name]
    args = (dp, tp, placement, optimizer_class, options)
    raises_on_every_rank(_build, dp * tp, error, *args, match=match)


class Signs(RowNorms):
    """Element-wise, which has to be found out."""

    def direction(self, grad: Tensor) -> Tensor:
        return grad.sign()


@pytest.mark.parametrize(
    ("dp", "tp", "placement", "optimizer_class"),
    [(2, 2, "replicate", RowNorms), (2, 1, "shard", RowNorms)]
    + [(*mesh, "shard", Signs) for mesh in MESHES],
)
def test_element_wise_classes_may_have_parts_and_others_what_is_whole(
    dp: int, tp: int, placement: str, optimizer_class: Any
) -> None:
    run_ranks(_build, dp * tp, dp, tp, placement, optimizer_class, {})


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


ACTS = ["save", "async", "save model", "load", "stateful", "join", "dcp", "dcp load"]


@pytest.mark.parametrize("how", ACTS)
def test_what_knows_nothing_of_parts_refuses_dtensors(how: str, tmp_path: Path) -> None:
    # DCP reports what ranks raise in an error of its own.
    errors = (TypeError, dcp.api.CheckpointException) if how.startswith("dcp") else TypeError
    match = "parameter '.*' is a DTensor: "
    raises_on_every_rank(_checkpointed, 4, errors, how, str(tmp_path), match=match)
