"""Masters: who has them, what they cost, what they follow, where they go when state is saved."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP, noise
from problems import LAYOUTS, copies, difference, differing, make_params, set_gradients
from ranks import raises_on_every_rank, run_ranks
from reference.naive_masters import NaiveMasters
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    MixedPrecision,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from shardstep.gradients.lanes import POOL
from shardstep.gradients.sharded_grad import ShardedGrad

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASTERS = MixedPrecision()
WITHOUT = MixedPrecision(master_dtype=None)
AT_RANDOM = MixedPrecision(master_dtype=None, stochastic_rounding=True)


def _loss(module: nn.Module, step: int) -> Tensor:
    dtype = next(module.parameters()).dtype
    out: Tensor = module(noise(step, 6, 16).to(dtype)).float().square().mean()
    return out


def _train(module: nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        _loss(module, step).backward()
        opt.step()
        opt.zero_grad()


def _zero(module: nn.Module, with_module: bool = True, **options: Any) -> ZeroRedundancyOptimizer:
    options = {"lr": 0.003, "bucket_bytes": 1, "module": module if with_module else None, **options}
    return ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, **options)


def _given_gradients(module: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for param in module.parameters():
        param.grad = torch.randn(param.shape).to(param.dtype)


def _model(dtype: torch.dtype = BF16) -> MLP:
    torch.manual_seed(3)
    return MLP().to(dtype)


# ---------------------------------------------------------------------------------- the policy

WIRE = "without module= gradients are reduced by somebody else"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"master_dtype": BF16}, "master_dtype has to be torch.float32"),
        ({"master_dtype": torch.int32}, "master_dtype has to be torch.float32"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype has to be a floating-point dtype"),
        ({"stochastic_rounding": True}, "needs master_dtype=None"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MixedPrecision(**options)


def test_only_what_is_narrower_gets_a_master() -> None:
    wider = {
        policy: [
            dtype
            for dtype in (FP16, BF16, FP32, torch.float64)
            if policy.step_dtype(dtype) != dtype
        ]
        for policy in (MASTERS, WITHOUT, AT_RANDOM, MixedPrecision(torch.float64))
    }
    assert list(wider.values()) == [[FP16, BF16], [], [FP16, BF16], [FP16, BF16, FP32]]
    for policy in wider:
        assert policy.step_dtype(torch.complex64) == torch.complex64
        assert policy.step_dtype(torch.int8) == torch.int8


@pytest.mark.parametrize(
    ("policy", "error", "match"),
    [
        ("bf16", TypeError, "precision has to be a MixedPrecision, not a str"),
        (MixedPrecision(reduce_dtype=FP32), ValueError, WIRE),
    ],
)
def test_no_policy_and_a_wire_that_is_not_ours_are_refused(
    policy: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ZeroRedundancyOptimizer(make_params(), optim.SGD, precision=policy, lr=0.1)


def _hook_with_a_wire(make: Any) -> None:
    ddp = DistributedDataParallel(_model())
    opt = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optim.SGD,
        overlap_with_ddp=True,
        precision=MixedPrecision(reduce_dtype=FP32),
        lr=0.1,
    )
    make(allreduce_hook, ddp, opt)


@pytest.mark.parametrize("make", [hook_with_zero_step, hook_with_zero_step_interleaved])
def test_a_wire_that_is_ddps_is_refused(make: Any) -> None:
    raises_on_every_rank(
        _hook_with_a_wire, 2, ValueError, make, match="the wrapped communication hook"
    )


def _different_policies() -> None:
    policy = [MASTERS, WITHOUT][dist.get_rank()]
    ZeroRedundancyOptimizer(make_params(), optim.SGD, precision=policy, lr=0.1)


def test_ranks_have_to_have_the_same_policy() -> None:
    raises_on_every_rank(_different_policies, 2, ValueError, match="master_dtype=torch.float32")


def _warned(make: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(each.message) for each in caught if "precision=" in str(each.message)]


def _who_warns() -> dict[str, list[str]]:
    def drop_in(**options: Any) -> Callable[[], Any]:
        dtype = options.pop("dtype", BF16)
        params = make_params(dtypes=(dtype,))
        return lambda: ZeroRedundancyOptimizer(params, optim.AdamW, **options)

    def later() -> Any:
        opt = ZeroRedundancyOptimizer(make_params(), optim.AdamW)
        for seed in (1, 2):
            opt.add_param_group({"params": make_params(dtypes=(FP16,), seed=seed)})

    def stepping() -> Any:
        opt = drop_in()()
        for step in range(3):
            set_gradients(opt.param_groups[0]["params"], step)
            opt.step()

    return {
        "drop-in": _warned(drop_in()),
        "stepping": _warned(stepping),
        "hooks": _warned(drop_in(overlap_with_ddp=True)),
        "later": _warned(later),
        "fp32": _warned(drop_in(dtype=FP32)),
        "masters": _warned(drop_in(precision=MASTERS)),
        "meant": _warned(drop_in(precision=WITHOUT)),
        "module": _warned(lambda: _zero(_model())),
    }


def test_a_drop_in_warns_once_on_rank_0_of_what_16_bits_lose() -> None:
    first, second = run_ranks(_who_warns, 2)
    assert {what: len(said) for what, said in first.items() if said} == {
        "drop-in": 1,
        "stepping": 1,
        "hooks": 1,
        "later": 1,
    }
    assert not any(second.values())
    (said,) = first["drop-in"]
    for words in ("AdamW", "bfloat16", "1/512 of a weight", "MixedPrecision()", "stochastic"):
        assert words in said
    assert "1/4096 of a weight" in first["later"][0]


def _dtypes(policy: MixedPrecision | None, dtype: torch.dtype) -> set[torch.dtype]:
    module = _model(dtype)
    opt = _zero(module, precision=policy)
    _train(module, opt, range(1))
    masters = {master.dtype for master in opt.shards.masters().values()}
    moments = {state["exp_avg"].dtype for state in opt.optim.state.values()}
    grads = {lane.shard.dtype for lane in opt.mode.pipeline.gradients.lanes}  # type: ignore[attr-defined]
    assert moments == grads
    assert masters <= moments
    assert {param.dtype for param in module.parameters()} == {dtype}
    assert set(opt.state) <= set(module.parameters())
    return masters


def test_with_a_module_masters_are_the_default_for_16_bits() -> None:
    assert _dtypes(None, BF16) == {FP32}
    assert _dtypes(None, FP16) == {FP32}
    assert _dtypes(None, FP32) == set()
    assert _dtypes(WITHOUT, BF16) == set()
    assert _dtypes(MixedPrecision(torch.float64), FP32) == {torch.float64}


# ------------------------------------------------------- writes to a parameter that has a master


def _zero_written() -> list[int]:
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
    return [int(master.count_nonzero()) for master in masters if master is not None]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_zero_of_the_other_sign_is_a_write_wherever_an_element_lies(world_size: int) -> None:
    assert run_ranks(_zero_written, world_size) == [[0] * 5] * world_size


def _eight_bits() -> Tensor:
    """Training in 8 bits, and a write to elements that one rank owns."""
    weight = nn.Parameter(torch.ones(200).to(torch.float8_e4m3fn))
    opt = ZeroRedundancyOptimizer([weight], optim.SGD, precision=MASTERS, lr=1 / 64)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        opt.step()
    weight.data[:3] = torch.full((3,), 0.5).to(weight.dtype)
    opt.step()
    master = opt.full_master(weight)
    assert master is not None
    return master


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_user_writes_counts_in_8_bits_too(world_size: int) -> None:
    expected = torch.full((200,), 1 - 4 / 64)
    expected[:3] = 0.5 - 1 / 64
    for got in run_ranks(_eight_bits, world_size):
        assert torch.equal(got, expected)


def _moved(with_module: bool) -> list[str]:
    """Masters of parameters that were given other data, before the next step."""
    failures = []
    module = _model()
    opt = _zero(module, with_module, precision=MASTERS)
    for step in range(2):
        _given_gradients(module, step)
        opt.step()
        opt.zero_grad()
    module.layers[0].requires_grad_(False)  # another plan is due, which is not there yet
    for param in module.parameters():
        param.data = torch.full_like(param, 5.0)
    given = [param.data_ptr() for param in module.parameters()]
    for name, param in module.named_parameters():
        master = opt.full_master(param)
        if master is not None and not torch.equal(master, torch.full_like(param, 5.0).float()):
            failures.append(f"full_master({name!r})")
    opt.consolidate_state_dict()
    saved = opt.state_dict()["masters"] if opt.rank == 0 else {}
    failures += [f"master {n}" for n, each in saved.items() if not (each == 5).all()]
    if [param.data_ptr() for param in module.parameters()] != given:
        failures.append("looking has moved parameters")
    return failures


@pytest.mark.parametrize("with_module", [False, True])
def test_masters_are_those_of_the_data_that_parameters_were_given(with_module: bool) -> None:
    assert run_ranks(_moved, 2, with_module) == [[], []]


def test_a_model_that_is_loaded_after_the_optimizer_was_made_is_trained_on() -> None:
    module, source = _model(), _model()
    for param in source.parameters():
        nn.init.normal_(param, std=0.3)
    opt = _zero(module)
    _train(module, opt, range(2))
    module.load_state_dict(source.state_dict())
    opt.step()  # without gradients: nothing changes
    assert differing(copies(source.parameters()), copies(module.parameters())) == []
    for param in module.parameters():
        master = opt.full_master(param)
        assert master is not None
        assert torch.equal(master.bfloat16(), param)
        # But for those few elements that had the very value before.
        assert (master == param.float()).float().mean() > 0.95


def test_an_average_that_is_swapped_in_and_out_leaves_masters_alone() -> None:
    module = _model()
    opt = _zero(module)
    _train(module, opt, range(3))
    before = {index: master.clone() for index, master in opt.shards.masters().items()}
    kept = copies(module.parameters())
    for param in module.parameters():
        param.data.zero_()
    for param, value in zip(module.parameters(), kept, strict=True):
        param.data.copy_(value)
    after = opt.shards.masters()
    assert any(not torch.equal(before[i], before[i].bfloat16().float()) for i in before)
    assert all(torch.equal(before[index], after[index]) for index in before)


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


def _clipped_drop_in() -> list[str]:
    """The norm is that of the gradients in fp32, not one that was rounded to 16 bits on the way."""
    failures = []
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
        if norm.dtype != FP32 or not torch.allclose(norm, expected, rtol=1e-6, atol=0):
            failures.append(f"{norm_type}: {norm}, not {expected}")
        for tensor, param in zip(wide, params, strict=True):
            if tensor.grad is not None and param.grad is not None:
                torch.testing.assert_close(
                    param.grad.to(tensor.dtype), tensor.grad, rtol=0.01, atol=0
                )
    return failures


def test_a_drop_in_computes_the_norm_of_16_bit_gradients_in_fp32() -> None:
    assert _clipped_drop_in() == []


def test_a_drop_in_raises_for_a_norm_that_is_not_finite_if_asked_to() -> None:
    params = make_params([(70, 3), (5,)], dtypes=(BF16,), frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.SGD, precision=MASTERS, lr=0.1)
    assert opt.clip_grad_norm_(1.0).item() == 0  # no gradients yet
    params[0].grad = torch.full_like(params[0], torch.inf)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        opt.clip_grad_norm_(1.0, error_if_nonfinite=True)


# -------------------------------------------------------------------------------------- the state


def _save(layout: str, with_module: bool) -> Any:
    """Train for a while; then on from there, and the state of the moment in between."""
    module = _model()
    opt = _zero(module, with_module, precision=MASTERS, layout=layout, bucket_bytes=None)
    for step in range(4):
        _given_gradients(module, step)
        opt.step()
    opt.consolidate_state_dict()
    saved = opt.state_dict() if dist.get_rank() == 0 else None
    model = copies(module.parameters())
    for step in range(4, 8):
        _given_gradients(module, step)
        opt.step()
    return saved, model, copies(module.parameters())


def _resume(saved: Any, model: list[Tensor], layout: str, with_module: bool, first: str) -> Any:
    module = _model()
    opt = _zero(module, with_module, precision=MASTERS, layout=layout, bucket_bytes=None)

    def load_model() -> None:
        with torch.no_grad():
            for param, value in zip(module.parameters(), model, strict=True):
                param.copy_(value)

    acts = [load_model, lambda: opt.load_state_dict(saved)]
    for act in acts if first == "model" else reversed(acts):
        act()
    for step in range(4, 8):
        _given_gradients(module, step)
        opt.step()
    return copies(module.parameters())


def test_training_goes_on_at_any_world_size_and_layout_as_if_it_had_not_stopped() -> None:
    (saved, model, expected), *_ = run_ranks(_save, 2, "sliced", True)
    moments = {entry["exp_avg"].dtype for entry in saved["state"].values()}
    assert moments == {FP32}
    for index, master in saved["masters"].items():
        assert torch.equal(master.bfloat16(), model[index])
        assert master.dtype == FP32
        assert not torch.equal(master, model[index].float())
    (other, *_), *_ = run_ranks(_save, 3, "whole", False)
    (same, *_), *_ = run_ranks(_save, 2, "sliced", False)
    assert difference(same, other) is None
    ways = [
        (1, "whole", True, "model"),
        (3, "sliced", False, "optimizer"),
        (2, "whole", True, "model"),
    ]
    for world_size, layout, with_module, first in ways:
        for got in run_ranks(_resume, world_size, saved, model, layout, with_module, first):
            assert differing(expected, got) == [], (world_size, layout, with_module, first)


def test_a_plain_optimizer_loads_it_and_ignores_the_masters() -> None:
    module = _model()
    opt = _zero(module)
    _train(module, opt, range(3))
    saved = opt.state_dict()
    plain = optim.AdamW(_model(FP32).parameters())
    plain.load_state_dict(saved)
    assert torch.equal(plain.state_dict()["state"][2]["exp_avg"], saved["state"][2]["exp_avg"])
    without = _zero(_model(FP32))
    without.load_state_dict(saved)
    assert without.shards.masters() == {}
    assert "masters" not in without.state_dict()


def test_without_masters_in_it_they_are_made_from_the_parameters() -> None:
    """A dict of the plain 16-bit optimizer, whose moments become fp32."""
    module = _model()
    plain = optim.AdamW(module.parameters(), lr=0.003)
    _train(module, plain, range(3))
    opt = _zero(module)
    _train(module, opt, range(3, 5))  # masters that are to be forgotten
    opt.load_state_dict(plain.state_dict())
    for param in module.parameters():
        master = opt.full_master(param)
        assert master is not None
        assert torch.equal(master, param.float())
        moment = opt.state[param]["exp_avg"]
        assert moment.dtype == FP32
        assert torch.equal(moment, plain.state[param]["exp_avg"].float())


class _Foreign(optim.Optimizer):
    """Not one of torch's: part of its state has the parameter's dtype, part is fp32 whatever."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                state.setdefault("wide", torch.zeros(param.shape)).add_(param.grad)
                param.data.sub_(state["sum"], alpha=self.param_groups[0]["lr"])


def test_state_of_a_foreign_class_becomes_the_masters_where_it_was_the_parameters() -> None:
    params = make_params([(70, 3), (5,)], dtypes=(BF16,), frozen=())
    plain = _Foreign(params)
    set_gradients(params, 1, missing=False)
    plain.step()
    opt = ZeroRedundancyOptimizer(params, _Foreign, precision=MASTERS)
    opt.load_state_dict(plain.state_dict())
    for param in params:
        assert opt.state[param]["sum"].dtype == FP32
        assert opt.state[param]["wide"].dtype == FP32
        assert torch.equal(opt.state[param]["sum"], plain.state[param]["sum"].float())
        assert torch.equal(opt.state[param]["wide"], plain.state[param]["wide"])
    without = ZeroRedundancyOptimizer(params, _Foreign, precision=WITHOUT)
    without.load_state_dict(plain.state_dict())
    for param in params:
        assert without.state[param]["sum"].dtype == BF16
        assert without.state[param]["wide"].dtype == FP32


@pytest.mark.parametrize(
    ("masters", "match"),
    [
        ({0: torch.zeros(3)}, "the master of parameter 'layers.0.weight' has shape"),
        ({0: torch.zeros(1)}, "the master of parameter 'layers.0.weight' has shape"),
        ({99: torch.zeros(3)}, "a master for 99, which is in no group"),
    ],
)
def test_masters_of_another_model_are_refused(masters: Any, match: str) -> None:
    module = _model()
    opt = _zero(module)
    _train(module, opt, range(2))
    before = {index: master.clone() for index, master in opt.shards.masters().items()}
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict({**opt.state_dict(), "masters": masters})
    assert all(torch.equal(before[i], master) for i, master in opt.shards.masters().items())


def _masters_by_hand() -> bool:
    """What a checkpoint of pieces does: take this rank's masters, and put them back."""
    module = _model()
    opt = _zero(module)
    _train(module, opt, range(3))
    kept = {index: master.clone() for index, master in opt.shards.masters().items()}
    pieces = {piece.param: piece for piece in opt.plan.pieces(opt.rank)}
    for index, master in kept.items():
        numel = pieces[index].param_interval.numel
        assert master.shape == (opt.plan.specs[index].shape if pieces[index].entire else (numel,))
    opt.shards.set_masters({})
    made = all(torch.equal(m, m.bfloat16().float()) for m in opt.shards.masters().values())
    opt.shards.set_masters(kept)
    back = all(torch.equal(kept[i], m) for i, m in opt.shards.masters().items())
    return made and back and kept.keys() == pieces.keys()


def test_masters_can_be_taken_and_put_back_piece_by_piece() -> None:
    assert run_ranks(_masters_by_hand, 2) == [True, True]


# ---------------------------------------------------------------------------------- uneven inputs


def _joined() -> list[Tensor]:
    """Rank 1 has two batches, rank 0 five."""
    module = _model()
    opt = _zero(module)
    with Join([opt]):
        _train(module, opt, range(5 if dist.get_rank() == 0 else 2))
    return copies(module.parameters())


def _as_if_joined() -> list[Tensor]:
    module = _model()
    naive = NaiveMasters([{"params": list(module.parameters())}], optim.AdamW, lr=0.003)
    for step in range(5):
        if dist.get_rank() == 0 or step < 2:
            _loss(module, step).backward()
        else:
            for param in module.parameters():
                param.grad = torch.zeros_like(param)
        naive.add_mean_gradients()
        naive.step()
        naive.zero_grad()
    return copies(module.parameters())


def test_a_rank_without_data_goes_on_stepping_on_its_masters() -> None:
    expected, _ = run_ranks(_as_if_joined, 2)
    for got in run_ranks(_joined, 2):
        assert differing(expected, got) == []


# -------------------------------------------------------------------------------------- the memory


def _storages() -> int:
    """Bytes of every storage that Python can reach."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not isinstance(thing, ShardedGrad):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return sum(found.values())


def _bytes_per_element(policy: MixedPrecision | None, layout: str) -> dict[str, float]:
    """What is there between two steps, in bytes per element of the model."""
    gc.freeze()  # leaves what torch has made at its import out of the search
    empty = _storages()
    torch.manual_seed(0)
    module = MLP(width=192, depth=16).bfloat16()
    numel = sum(param.numel() for param in module.parameters())
    parameters = _storages() - empty
    opt = _zero(module, precision=policy, layout=layout)
    made = _storages() - empty
    _train(module, opt, range(2))
    resting = _storages() - empty
    _loss(module, 3).backward()
    opt.mode.pipeline.gradients.collect()
    with_gradients = _storages() - empty
    gradients: Any = opt.mode.pipeline.gradients
    shards = sum(lane.shard.nbytes for lane in gradients.lanes)
    pool = gradients.nbytes - shards
    masters = sum(master.nbytes for master in opt.shards.masters().values())
    moments = sum(
        value.nbytes
        for state in opt.optim.state.values()
        for value in state.values()
        if value.numel() > 1
    )
    largest = max(bucket.nbytes for bucket in opt.plan.training_buckets)
    return {
        "parameters": parameters / numel,
        "masters": masters / numel,
        "moments": moments / numel,
        "gradient shards": shards / numel,
        "pool": pool / numel,
        "largest buckets": POOL * largest / numel,
        "made": made / numel,
        "resting": resting / numel,
        "with gradients": with_gradients / numel,
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_2_bytes_and_12_and_4_divided_by_the_ranks(world_size: int) -> None:
    for layout in LAYOUTS:
        outcomes = run_ranks(_bytes_per_element, world_size, None, layout, fresh=True)
        share = 1.02 if layout == "sliced" else 1.10  # whole parameters are dealt as well as can be
        for found in outcomes:
            assert found["parameters"] == 2
            assert found["masters"] <= 4 / world_size * share
            assert found["moments"] <= 8 / world_size * share
            assert found["gradient shards"] <= 4 / world_size * share
            assert found["pool"] <= found["largest buckets"]
            # And that is all there is: padding and step counters make the rest.
            total = 2 + 16 / world_size * share + found["pool"]
            assert found["resting"] <= total + 0.1
            assert found["with gradients"] <= total + 0.1
        for what, bytes_each in (("masters", 4), ("moments", 8)):
            assert sum(found[what] for found in outcomes) == pytest.approx(bytes_each, rel=1e-6)


def _drop_in_bytes() -> dict[str, float]:
    gc.freeze()
    torch.manual_seed(0)
    module = MLP(width=192, depth=16).bfloat16()
    numel = sum(param.numel() for param in module.parameters())
    empty = _storages()
    opt = _zero(module, False, precision=MASTERS, parameters_as_bucket_view=True)
    found: dict[str, float] = {}
    for step in range(2):
        _given_gradients(module, step)
        with_user_gradients = _storages()
        opt.mode.pipeline.gradients.collect()
        found["copies of gradients"] = (_storages() - with_user_gradients) / numel
        opt.step()
        opt.zero_grad()
    found["resting"] = (_storages() - empty) / numel
    return found


def test_a_drop_in_holds_masters_and_moments_and_gradients_during_the_step_only() -> None:
    for found in run_ranks(_drop_in_bytes, 2, fresh=True):
        assert found["copies of gradients"] <= 4 / 2 * 1.02
        assert found["resting"] <= 12 / 2 * 1.02 + 0.1


def test_stochastic_rounding_keeps_nothing_but_moments() -> None:
    for found in run_ranks(_bytes_per_element, 2, AT_RANDOM, "sliced", fresh=True):
        assert found["masters"] == 0
        assert found["moments"] <= 8 / 2 * 1.02
        assert found["resting"] <= 2 + 12 / 2 * 1.02 + found["pool"] + 0.1


def _state_made_before_it_trained(policy: MixedPrecision, layout: str) -> str | None:
    states = []
    for frozen in ((), (0,)):
        params = make_params([(70, 3), (5,)], dtypes=(FP16,), frozen=frozen)
        opt = ZeroRedundancyOptimizer(
            params, optim.Adagrad, precision=policy, layout=layout, initial_accumulator_value=0.1
        )
        params[0].requires_grad_(True)
        for param in params:
            param.grad = torch.full_like(param, 1e-3)  # squared, it is lost in 16 bits
        opt.step()
        states.append([opt.full_state(param) for param in params])
    return difference(*states)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", [MASTERS, AT_RANDOM], ids=["masters", "at random"])
def test_state_from_when_a_parameter_was_frozen_is_as_wide_as_that_of_others(
    policy: MixedPrecision, layout: str
) -> None:
    """Adagrad makes its state when it is constructed, also for what does not train yet."""
    assert run_ranks(_state_made_before_it_trained, 2, policy, layout) == [None, None]


def _state_of_what_becomes_narrow(layout: str) -> list[str | None]:
    """Trained in fp32, cast to fp16 while it is frozen or while it is not, and trained on."""
    found = []
    for freeze in (False, True):
        params = make_params([(70, 3), (5,)], dtypes=(FP32,), frozen=())
        opt = ZeroRedundancyOptimizer(
            params, optim.Adagrad, precision=MASTERS, layout=layout, initial_accumulator_value=0.1
        )
        for step in range(2):
            set_gradients(params, step, missing=False)
            opt.step()
        expected = [opt.full_state(param)["sum"] for param in params]
        opt.zero_grad()
        params[0].requires_grad_(not freeze)
        for param in params:
            param.data = param.data.half()
        opt.step()
        params[0].requires_grad_(True)
        opt.step()
        found.append(difference(expected, [opt.full_state(param)["sum"] for param in params]))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_becomes_narrow_keeps_the_state_it_has(layout: str) -> None:
    assert run_ranks(_state_of_what_becomes_narrow, 2, layout) == [[None, None]] * 2
