"""While a gather or a reduction is on its way nobody sees what is there meanwhile, however they
look; and what needs no look does not wait."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from doubles import LateArrival, spoil
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    Problem,
    Setup,
    failing,
    noise,
    put_behind_the_door,
    rank,
    train,
    with_ddp,
    with_zero,
)
from problems import copies, differing
from ranks import RankFailure, run_ranks
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardstep.comm import Work

# --------------------------------------------------------------------------------- the doubles


class _Late(LateArrival):
    """Gathers and reductions whose results are NaN until they are waited for; counts the waits."""

    waits = 0

    def new_connection(self) -> _Late:
        return type(self)(self._inner.new_connection())

    def all_gather(self, buffer: Tensor, cuts: Sequence[int]) -> Work:
        return _Noted(super().all_gather(buffer, cuts))

    def reduce_scatter(self, buffer: Tensor, cuts: Sequence[int], out: Tensor) -> Work:
        # What is sent is what was there at the call, and the buffer is nobody's until it is over.
        sent, arrived = buffer.clone(), torch.empty_like(out)
        pending = self._inner.reduce_scatter(sent, cuts, arrived)
        spoil(out)
        spoil(buffer)
        return _Noted(_Reduction(pending, arrived, out))


class _Reduction:
    def __init__(self, pending: Work, arrived: Tensor, out: Tensor) -> None:
        self._pending = pending
        self._arrived = arrived
        self._out = out
        self._done = False

    def wait(self) -> None:
        self._pending.wait()
        if not self._done:
            self._out.copy_(self._arrived)
        self._done = True


class _Noted:
    slow = 0.0  # seconds that a wait takes

    def __init__(self, pending: Any) -> None:
        self._pending = pending
        self._waited = False

    def wait(self) -> None:
        _Late.waits += not self._waited
        self._waited = True
        time.sleep(_Noted.slow)
        self._pending.wait()


class _Shuffled(_Late):
    """Whenever one is waited for, some others that are in flight land before it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._random = random.Random(rank())
        self._open: list[Work] = []

    def _note(self, pending: Work) -> Work:
        self._open.append(pending)
        return _Jumbled(self, pending)

    def all_gather(self, buffer: Tensor, cuts: Sequence[int]) -> Work:
        return self._note(super().all_gather(buffer, cuts))

    def reduce_scatter(self, buffer: Tensor, cuts: Sequence[int], out: Tensor) -> Work:
        return self._note(super().reduce_scatter(buffer, cuts, out))

    def land(self, wanted: Work) -> None:
        self._random.shuffle(self._open)
        for pending in list(self._open[: self._random.randrange(3)]):
            self._open.remove(pending)
            pending.wait()
        wanted.wait()


class _Jumbled:
    def __init__(self, comm: _Shuffled, pending: Work) -> None:
        self._comm = comm
        self._pending = pending

    def wait(self) -> None:
        self._comm.land(self._pending)


DOUBLES: dict[str, Callable[[Any], Any]] = {"late": _Late, "shuffled": _Shuffled}
SLOW_IF_SHUFFLED = ["late", pytest.param("shuffled", marks=pytest.mark.slow)]

# ----------------------------------------------------------------------- training through doubles


def _train(double: str) -> list[str]:
    problems = ("gpt", "conv", "branching", "mixed dtypes")
    expected = {}
    for name in problems:
        problem = PROBLEMS[name]
        ddp = with_ddp(problem.fresh(), SGD, find_unused_parameters=problem.find_unused)
        expected[name] = [*train(ddp, problem, range(6)), *ddp.params]
    put_behind_the_door(DOUBLES[double])
    checks = []
    for name in problems:
        for layout in ("sliced", "whole"):
            for overlap in (True, False):
                problem = PROBLEMS[name]
                zero = with_zero(problem.fresh(), SGD, layout=layout, overlap=overlap)
                got = [*train(zero, problem, range(6)), *zero.params]
                checks.append((f"{name} {layout} {overlap}", differing(expected[name], got)))
    return failing(checks)


@pytest.mark.parametrize("double", SLOW_IF_SHUFFLED)
def test_training_reads_nothing_that_has_not_arrived(double: str) -> None:
    assert run_ranks(_train, 2, double, timeout=110) == [[], []]


# ------------------------------------------------------------------- every way to read a parameter


class _Scale(torch.autograd.Function):
    """Reads its parameter in forward and, as saved, in backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return grad * 2 + 0 * weight


def _saved(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not any(vars(param) for param in loaded.parameters())
    loaded(noise(0, 6, 16))
    return list(loaded.parameters())


def _saved_with_variables(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    return list(torch.load(file, weights_only=True).values())


def _copied(model: nn.Module) -> list[Tensor]:
    other = copy.deepcopy(model)
    assert {type(param) for param in other.parameters()} == {nn.Parameter}
    other(noise(0, 6, 16)).sum().backward()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1)
    return list(other.parameters())


def _printed(model: nn.Module) -> list[Tensor]:
    assert not any("nan" in repr(param) + str(param) for param in model.parameters())
    return []


def _into_another(model: nn.Module) -> list[Tensor]:
    other = MLP()
    other.load_state_dict(model.state_dict())
    return list(other.parameters())


def _from_a_list(read: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], list[Tensor]]:
    return lambda model: [read(param) for param in model.parameters()]


def _together(model: nn.Module) -> list[Tensor]:
    flat = torch.cat([param.flatten() for param in model.parameters()])
    rows = torch.stack([param.sum() for param in model.parameters()])
    assert torch.isfinite(rows).all()
    sizes = [param.numel() for param in model.parameters()]
    parts = flat.split(sizes)
    return [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]


def _in_a_list_argument(model: nn.Module) -> list[Tensor]:
    return torch._foreach_mul(list(model.parameters()), 1.0)  # type: ignore[no-any-return]


def _out_argument(model: nn.Module) -> list[Tensor]:
    return [
        torch.mul(p, 1.0, out=torch.empty(p.shape)) for p in map(Tensor.detach, model.parameters())
    ]


def _averaged(model: nn.Module) -> list[Tensor]:
    """The first update of an average copies the model."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    return list(average.module.parameters())


def _called(model: nn.Module) -> list[Tensor]:
    params = dict(model.named_parameters())
    out = functional_call(model, params, (noise(0, 6, 16),))
    assert torch.isfinite(out).all()
    return list(params.values())


def _in_threads(model: nn.Module) -> list[Tensor]:
    """Several threads ask at once; each of them has to wait."""
    _Noted.slow = 0.02
    found: list[list[Tensor]] = []
    threads = [
        threading.Thread(target=lambda: found.append(copies(model.parameters()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _Noted.slow = 0.0
    assert len(found) == 4
    assert not any(differing(found[0], each) for each in found[1:])
    return found[0]


def _numpy(param: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.from_numpy(param.detach().numpy().copy())


READS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "parameters": lambda model: copies(model.parameters()),
    "state_dict": lambda model: list(model.state_dict().values()),
    "state_dict(keep_vars)": lambda model: list(model.state_dict(keep_vars=True).values()),
    "torch.save": _saved,
    "torch.save of variables": _saved_with_variables,
    "pickle": lambda model: list(pickle.loads(pickle.dumps(list(model.parameters())))),
    "deepcopy": _copied,
    "deepcopy of a parameter": _from_a_list(copy.deepcopy),
    "copy of a parameter": _from_a_list(copy.copy),
    "print": _printed,
    "load into another": _into_another,
    "data": _from_a_list(lambda p: p.data),
    "detach": _from_a_list(lambda p: p.detach()),
    "numpy": _from_a_list(_numpy),
    "array": _from_a_list(lambda p: torch.tensor(p.data.__array__())),
    "tolist": _from_a_list(lambda p: torch.tensor(p.tolist())),
    "clone": _from_a_list(lambda p: p.clone()),
    "to": _from_a_list(lambda p: p.to(torch.float64).to(torch.float32)),
    "item": _from_a_list(lambda p: torch.tensor([x.item() for x in p.flatten()]).view(p.shape)),
    "index": _from_a_list(lambda p: torch.stack([p[i] for i in range(len(p))])),
    "iterate": _from_a_list(lambda p: torch.stack(list(p))),
    "storage": _from_a_list(
        lambda p: (
            torch.empty(0)
            .set_(p.untyped_storage(), p.storage_offset(), p.shape, p.stride())
            .clone()
        )
    ),
    "dlpack": _from_a_list(lambda p: torch.from_dlpack(p.detach()).clone()),
    "operator": _from_a_list(lambda p: 1 * p),
    "right operand": _from_a_list(lambda p: torch.zeros(p.shape) + p),
    "in place into another": _from_a_list(lambda p: torch.zeros(p.shape).add_(p.data)),
    "assignment into another": _from_a_list(lambda p: _assigned(p)),
    "cat": _together,
    "foreach": _in_a_list_argument,
    "out=": _out_argument,
    "vector": lambda model: _vector(model),
    "average": _averaged,
    "functional_call": _called,
    "threads": _in_threads,
    "autograd function": _from_a_list(lambda p: _Scale.apply(p) / 2),
    "einsum": _from_a_list(lambda p: torch.einsum("...->...", p)),
    "under inference_mode": lambda model: _inference(model),
    "eval forward": lambda model: _evaluated(model),
}


def _assigned(param: Tensor) -> Tensor:
    target = torch.zeros(param.shape)
    with torch.no_grad():
        target[...] = param
    return target


def _vector(model: nn.Module) -> list[Tensor]:
    vector = nn.utils.parameters_to_vector(model.parameters())
    other = MLP()
    nn.utils.vector_to_parameters(vector, other.parameters())
    return list(other.parameters())


def _inference(model: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [param + 0 for param in model.parameters()]


def _evaluated(model: nn.Module) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(model(noise(0, 6, 16))).all()
    model.train()
    return copies(model.parameters())


def _in_flight(**options: Any) -> Setup:
    """A model right behind a step, nothing of which has arrived."""
    zero = with_zero(MLP_PROBLEM.fresh(), ADAMW, **options)
    train(zero, MLP_PROBLEM, range(2))
    return zero


def _read(double: str) -> list[str]:
    ddp = with_ddp(MLP_PROBLEM.fresh(), ADAMW)
    train(ddp, MLP_PROBLEM, range(2))
    expected = ddp.params
    put_behind_the_door(DOUBLES[double])
    failures = []
    for name, read in READS.items():
        zero = _in_flight()
        watched = [p for p in zero.module.parameters() if type(p) is not nn.Parameter]
        if len(watched) != len(expected):
            failures.append(f"{name}: only {len(watched)} in flight, so this shows nothing")
        if not all(isinstance(p, nn.Parameter) for p in zero.module.parameters()):
            failures.append(f"{name}: not a Parameter in flight")
        try:
            got = read(zero.module)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if got and differing(expected, [t.detach() for t in got]):
            failures.append(f"{name}: other values")
        if {type(param) for param in zero.module.parameters()} != {nn.Parameter}:
            failures.append(f"{name}: not landed")
        if differing(expected, zero.params):
            failures.append(f"{name}: has changed the model")
    return failures


@pytest.mark.parametrize("double", SLOW_IF_SHUFFLED)
def test_no_way_of_reading_a_parameter_in_flight_sees_an_old_value(double: str) -> None:
    assert run_ranks(_read, 2, double) == [[], []]


# ----------------------------------------------------------------------------- whole training loops


def _ema_loops() -> list[str]:
    """Averages that keep their own list of the parameters, and edits between the steps."""

    def ema(setup: Setup) -> list[Tensor]:
        kept = list(setup.module.parameters())
        shadow = [param.detach().clone() for param in kept]
        average = AveragedModel(setup.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(4):
            setup.backward(step)
            setup.finish()
            with torch.no_grad():
                for mean, param in zip(shadow, kept, strict=True):
                    mean.lerp_(param, 0.1)
            average.update_parameters(setup.module)
        return shadow + list(average.module.parameters())

    def edited(setup: Setup) -> list[Tensor]:
        for step in range(4):
            setup.backward(step)
            setup.finish()
            with torch.no_grad():
                for number, param in enumerate(setup.module.parameters()):
                    if number % 3 == 0:
                        param.clamp_(-0.05, 0.05)
                    elif number % 3 == 1:
                        param.data.mul_(0.9)
                    else:
                        param.copy_(param * 1.1)
        return []

    def written_over(setup: Setup) -> list[Tensor]:
        """What is written without a look at what was there stays written."""
        for step in range(3):
            setup.backward(step)
            setup.finish()
            setup.module.get_parameter("layers.0.bias").data.zero_()
            nn.init.ones_(setup.module.get_parameter("layers.1.bias"))
            with torch.no_grad():
                setup.module.get_parameter("layers.2.bias").copy_(torch.full((128,), 0.5))
                setup.module.get_parameter("layers.3.bias")[3] = 7.0
        return []

    def stepping_again(setup: Setup) -> list[Tensor]:
        for step in range(3):
            setup.backward(step)
            setup.opt.step()
            setup.opt.step()
            setup.finish()
        return []

    def regularised(setup: Setup) -> list[Tensor]:
        """The loss reads parameters itself, before and behind the forward pass."""
        for step in range(4):
            before = sum(param.abs().sum() for param in setup.module.parameters())
            loss = MLP_PROBLEM.loss(setup.model, step)
            after = sum(param.square().sum() for param in setup.module.parameters())
            (loss + 1e-3 * before + 1e-3 * after).backward()
            setup.finish()
        return []

    def restored(setup: Setup) -> list[Tensor]:
        saved = None
        for step in range(4):
            setup.backward(step)
            setup.finish()
            if step == 1:
                saved = setup.module.state_dict()
                saved = {name: value.clone() for name, value in saved.items()}
            if step == 2:
                setup.module.load_state_dict(saved)
        return []

    loops = [ema, edited, written_over, stepping_again, regularised, restored]
    expected = {}
    for loop in loops:
        ddp = with_ddp(MLP_PROBLEM.fresh(), SGD)
        expected[loop] = [*copies(loop(ddp)), *ddp.params]
    put_behind_the_door(_Late)
    checks = []
    for loop in loops:
        for overlap in (True, False):
            zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
            got = [*copies(loop(zero)), *zero.params]
            checks.append((f"{loop.__name__}, overlap {overlap}", differing(expected[loop], got)))
    return failing(checks)


def test_averages_edits_and_losses_on_parameters_in_flight_equal_ddp_to_the_bit() -> None:
    assert run_ranks(_ema_loops, 2) == [[], []]


def _evaluated_in_flight() -> list[int]:
    """Torch has fused kernels for attention in evaluation, which round differently; a parameter
    that is in flight must not keep it from using them."""
    results = []
    for make in (with_ddp, with_zero):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        problem = Problem(
            lambda made=layer: made,
            lambda model, step: model(noise(step, 1, 8, 64)).square().mean(),
        )
        setup = make(layer, SGD)
        seen = []
        for step in range(3):
            setup.module.train()
            setup.backward(step, problem)
            setup.finish()
            setup.module.eval()
            with torch.no_grad():
                seen.append(setup.module(noise(99, 1, 8, 64)))
        results.append(seen)
    return differing(*results)


def test_evaluation_right_behind_a_step_uses_the_kernels_it_always_uses() -> None:
    assert run_ranks(_evaluated_in_flight, 2) == [[], []]


def _converted_in_flight() -> list[str]:
    ddp = with_ddp(MLP_PROBLEM.fresh(), ADAMW)
    train(ddp, MLP_PROBLEM, range(2))
    put_behind_the_door(_Late)
    checks = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        zero = _in_flight()
        zero.module.to(dtype)
        got = copies(zero.module.parameters())
        checks.append((str(dtype), differing([p.to(dtype) for p in ddp.params], got)))
    return failing(checks)


def test_converting_a_model_in_flight_converts_what_arrives() -> None:
    assert run_ranks(_converted_in_flight, 2) == [[], []]


def _state_in_flight() -> list[str]:
    ddp = with_ddp(MLP_PROBLEM.fresh(), ADAMW)
    train(ddp, MLP_PROBLEM, range(2))
    expected = ddp.opt.state_dict()["state"]
    put_behind_the_door(_Late)
    zero = _in_flight()
    zero.opt.consolidate_state_dict(to=1)
    failures = []
    if rank() == 1:
        got = zero.opt.state_dict()["state"]
        failures += [
            f"{index} {key}"
            for index, entry in expected.items()
            for key, value in entry.items()
            if differing([value], [got[index][key]])
        ]
    zero = _in_flight()
    whole = zero.opt.full_state("layers.1.weight")
    failures += [key for key, value in expected[2].items() if differing([value], [whole[key]])]
    return failures


def test_the_optimizers_state_is_complete_while_parameters_are_in_flight() -> None:
    assert run_ranks(_state_in_flight, 2) == [[], []]


# ------------------------------------------------------------------------- what does not wait


class _Marked(nn.Parameter):
    """A user's own kind of parameter."""

    mark = "mine"


def _not_waiting() -> list[str]:
    put_behind_the_door(_Late)
    failures = []
    zero = with_zero(MLP_PROBLEM.fresh(), ADAMW)
    train(zero, MLP_PROBLEM, range(1))
    zero.backward(1)
    zero.opt.step()
    before = _Late.waits

    def waited(what: str) -> None:
        if _Late.waits != before or any(type(p) is nn.Parameter for p in zero.module.parameters()):
            failures.append(what)

    zero.opt.zero_grad()
    waited("opt.zero_grad()")
    zero.module.zero_grad()
    waited("module.zero_grad()")
    for param in zero.module.parameters():
        sizes = (param.shape, param.size(), param.size(0), param.numel(), param.dim(), param.ndim)
        kinds = (param.dtype, param.device, param.layout, param.is_cuda, param.requires_grad)
        memory = (param.nbytes, param.element_size(), param.stride(), param.is_contiguous())
        others = (param.grad, param.is_leaf, param.grad_fn, len(param), hash(param))
        assert all((sizes, kinds, memory, others))
    waited("metadata")
    _ = [id(p) for p in zero.module.parameters()], list(zero.module.named_parameters())
    _ = sum(p.numel() * p.element_size() for p in zero.module.parameters() if p.requires_grad)
    waited("counting parameters")
    zero.module.train()
    waited("train()")
    return failures


def test_clearing_gradients_and_asking_for_metadata_do_not_wait() -> None:
    assert run_ranks(_not_waiting, 2) == [[], []]


def _one_bucket_at_a_time() -> list[str]:
    """A parameter's read waits for its own bucket and for no other."""
    put_behind_the_door(_Late)
    zero = _in_flight()
    first, last = (
        zero.module.get_parameter("layers.0.weight"),
        zero.module.get_parameter("layers.4.weight"),
    )
    assert len(zero.opt.plan.training_buckets) >= 3
    first.sum()
    landed = (type(first) is nn.Parameter, type(last) is nn.Parameter)
    last.sum()
    return failing([("landed", landed != (True, False)), ("last", type(last) is not nn.Parameter)])


def test_a_read_waits_for_its_own_bucket_alone() -> None:
    assert run_ranks(_one_bucket_at_a_time, 2) == [[], []]


def _own_class() -> list[str]:
    put_behind_the_door(_Late)
    problem = Problem(_with_marked, MLP_PROBLEM.loss)
    zero = with_zero(problem.fresh(), SGD)
    train(zero, problem, range(2))
    param = zero.module.get_parameter("layers.1.weight")
    failures = []
    if not isinstance(param, _Marked) or param.mark != "mine":
        failures.append("not of its class in flight")
    param.note = "kept"  # type: ignore[attr-defined]
    param.sum()
    if type(param) is not _Marked or vars(param) != {"note": "kept"}:
        failures.append(f"landed as {type(param)} with {vars(param)}")
    return failures


def _with_marked() -> nn.Module:
    model = MLP()
    layer: Any = model.layers[1]
    layer.weight = _Marked(layer.weight.detach())
    return model


def test_a_users_own_class_of_parameter_survives_the_flight() -> None:
    assert run_ranks(_own_class, 2) == [[], []]


def _traced() -> tuple[bool, str]:
    """A trace that was made of the model reads parameters without Python from then on."""
    put_behind_the_door(_Late)
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    train(zero, MLP_PROBLEM, range(1))
    x = noise(1, 6, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(zero.module, x)
    zero.backward(1)
    zero.opt.step()
    with torch.no_grad():
        out = traced(x)
    return bool(out.isnan().any()), str(differing([zero.module(x).detach()], [out]))


def test_a_trace_of_the_model_sees_no_old_values() -> None:
    assert run_ranks(_traced, 2) == [(False, "[]")] * 2


def _forked() -> int:
    """How a process ends that is forked right behind a step and asks whether it has to wait."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    zero.opt.step()
    child = os.fork()
    if child == 0:
        os._exit(sum(type(param) is not nn.Parameter for param in zero.module.parameters()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_has_nothing_in_flight_that_could_never_arrive_there() -> None:
    assert run_ranks(_forked, 2) == [0, 0]


# -------------------------------------------------------------------------- reductions in flight


def _reductions() -> list[str]:
    """Everything that looks at gradients right behind backward, whose reductions are NaN."""
    ddp = with_ddp(MLP_PROBLEM.fresh(), SGD)
    ddp.backward(0)
    expected = [p.grad.clone() for p in ddp.module.parameters() if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(ddp.module.parameters(), 1e-3)
    put_behind_the_door(_Shuffled)
    names = [name for name, _ in ddp.module.named_parameters()]
    failures = []
    for overlap in (True, False):
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
        zero.backward(0)
        got = [zero.opt.full_grad(name) for name in names]
        if differing(expected, got):
            failures.append(f"full_grad, overlap {overlap}")
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
        zero.backward(0)
        if not torch.allclose(zero.clip(1e-3), norm, rtol=1e-6):
            failures.append(f"clip, overlap {overlap}")
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
        zero.backward(1)
        zero.opt.zero_grad()
        zero.backward(0)
        if differing(expected, [zero.opt.full_grad(name) for name in names]):
            failures.append(f"zero_grad in flight, overlap {overlap}")
    return failures


def test_gradients_are_looked_at_only_when_they_have_arrived() -> None:
    assert run_ranks(_reductions, 2) == [[], []]


# ------------------------------------------------------------------------------- a rank that dies


class _Dying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        os._exit(17)


class _Mortal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.dies = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.body.layers):
            x = torch.tanh(layer(x))
            if number == 1 and self.dies:
                x = _Dying.apply(x)
        return x


def _die_in_backward() -> None:
    module = _Mortal()
    zero = with_zero(module, SGD)
    module.dies = rank() == 1
    module(noise(0, 6, 16)).sum().backward()
    zero.opt.step()


def test_when_a_rank_dies_in_backward_the_others_raise_and_name_the_operation() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"shardstep: rank 0: reducing gradients failed"):
        run_ranks(_die_in_backward, 2, timeout=60)
    assert time.monotonic() - start < 25, "not by a timeout"


def _die_around_the_gather(when: str) -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    zero.opt.clip_grad_norm_(1.0)  # everybody has what they need for the step
    if rank() == 1:
        time.sleep(1.0 if when == "in flight" else 0.0)
        os._exit(17)
    time.sleep(0.0 if when == "in flight" else 1.0)
    errors = []
    try:
        zero.opt.step()
        time.sleep(2.0)  # by now the peer is dead
    except RuntimeError as error:
        errors.append(str(error))
    # It is no use to ask again: what did not come is not taken for what should have come.
    params = list(zero.module.parameters())
    for param in params:
        for _ in range(2):
            try:
                param.sum()
            except RuntimeError as error:
                errors.append(str(error))
    assert all("rank 0: gathering parameters failed" in error for error in errors)
    assert len(errors) >= 2 * len(params)
    raise RuntimeError("every read raised")


@pytest.mark.parametrize("when", ["in flight", "before the launch"])
def test_parameters_that_did_not_arrive_can_never_be_read(when: str) -> None:
    with pytest.raises(RankFailure, match="every read raised"):
        run_ranks(_die_around_the_gather, 2, when, timeout=60)


def test_one_rank_has_nothing_in_flight() -> None:
    model = MLP()
    zero = with_zero(model, (optim.SGD, {"lr": 0.1}))
    train(zero, MLP_PROBLEM, range(1))
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
