"""No read sees a parameter or a gradient that is still in flight; and what needs none of them does
not wait."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from doubles import AnyOrder, behind_the_door
from late import Late, Noted, in_flight
from models import ADAMW, MLP, MLP_PROBLEM, SGD, Problem, noise, rank, train, with_ddp, with_zero
from on_ranks import on_ranks
from problems import assert_same, copies, differing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DOUBLES = [
    pytest.param(Late, id="late"),
    pytest.param(AnyOrder, id="shuffled", marks=pytest.mark.slow),
]

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
    Noted.seconds = 0.02
    found: list[list[Tensor]] = []
    threads = [
        threading.Thread(target=lambda: found.append(copies(model.parameters()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Noted.seconds = 0.0
    assert len(found) == 4
    assert not any(differing(found[0], each) for each in found[1:])
    return found[0]


def _numpy(param: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.from_numpy(param.detach().numpy().copy())


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


def _evaluated(model: nn.Module) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(model(noise(0, 6, 16))).all()
    model.train()
    return copies(model.parameters())


def _recorded(model: nn.Module) -> list[Tensor]:
    graph = make_fx(model)(noise(0, 6, 16))
    assert_same([model(noise(1, 6, 16))], [graph(noise(1, 6, 16))], "recorded")
    return copies(model.parameters())


def _with_fake_tensors(model: nn.Module) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(6, 16)).shape == (6, 4)
    return copies(model.parameters())


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
    "parameter": _from_a_list(lambda p: nn.Parameter(p).clone()),
    "another of its class": _from_a_list(lambda p: type(p)(p.data) * 1),
    "subclass": _from_a_list(lambda p: p.as_subclass(Tensor).clone()),
    "operator": _from_a_list(lambda p: 1 * p),
    "right operand": _from_a_list(lambda p: torch.zeros(p.shape) + p),
    "in place into another": _from_a_list(lambda p: torch.zeros(p.shape).add_(p.data)),
    "assignment into another": _from_a_list(_assigned),
    "cat": _together,
    "foreach": lambda model: torch._foreach_mul(list(model.parameters()), 1.0),
    "out=": _from_a_list(lambda p: torch.mul(p.detach(), 1.0, out=torch.empty(p.shape))),
    "vector": _vector,
    "average": _averaged,
    "functional_call": _called,
    "threads": _in_threads,
    "autograd function": _from_a_list(lambda p: _Scale.apply(p) / 2),
    "einsum": _from_a_list(lambda p: torch.einsum("...->...", p)),
    "under inference_mode": torch.inference_mode()(_from_a_list(lambda p: p + 0)),
    "eval forward": _evaluated,
    "make_fx": _recorded,
    "fake tensors": _with_fake_tensors,
}


@pytest.mark.parametrize("double", DOUBLES)
@on_ranks(2)
def test_no_way_of_reading_a_parameter_in_flight_sees_an_old_value(double: Any) -> None:
    ddp, zero = with_ddp(MLP_PROBLEM.fresh(), ADAMW), in_flight(double)
    train(ddp, MLP_PROBLEM, range(2))
    for step, (name, read) in enumerate(READS.items(), 2):
        expected = ddp.params
        for param in zero.module.parameters():
            assert type(param) is not nn.Parameter, f"{name}: not in flight, so this shows nothing"
            assert isinstance(param, nn.Parameter), name
        got = read(zero.module)
        assert_same(expected if got else [], [t.detach() for t in got], name)
        assert {type(param) for param in zero.module.parameters()} == {nn.Parameter}, name
        assert_same(expected, zero.params, f"{name} has changed the model")
        for setup in (ddp, zero):
            setup.opt.zero_grad()
            setup.backward(step)
            setup.opt.step()


@on_ranks(2)
def test_the_optimizers_state_is_complete_while_parameters_are_in_flight() -> None:
    ddp = with_ddp(MLP_PROBLEM.fresh(), ADAMW)
    train(ddp, MLP_PROBLEM, range(2))
    expected = ddp.opt.state_dict()["state"]
    zero = in_flight()
    zero.opt.consolidate_state_dict(to=1)
    if rank() == 1:
        got = zero.opt.state_dict()["state"]
        for index, entry in expected.items():
            assert_same(list(entry.values()), [got[index][key] for key in entry], index)
    zero = in_flight()
    whole = zero.opt.full_state("layers.1.weight")
    assert_same(list(expected[2].values()), [whole[key] for key in expected[2]])


@on_ranks(2, timeout=110, fresh=True)
def test_a_signal_handler_may_read_parameters_at_any_time() -> None:
    """Also while the step waits for them: a job that is about to be preempted saves its model."""
    setup = with_zero(MLP_PROBLEM.fresh())
    reads: list[float] = []

    def read(*args: Any) -> None:
        reads.append(sum(float(param.detach().sum()) for param in setup.module.parameters()))

    before = signal.signal(signal.SIGALRM, read)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0011)
    try:
        train(setup, MLP_PROBLEM, range(60))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(reads) > 10
    setup.opt.verify()


# ------------------------------------------------------------------ what waits, and what does not


class _Marked(nn.Parameter):
    """A user's own kind of parameter."""

    mark = "mine"


@on_ranks(2)
def test_clearing_gradients_and_asking_for_metadata_do_not_wait() -> None:
    zero = in_flight(steps=1)
    zero.backward(1)
    zero.opt.step()
    before = Noted.waits

    def waited(what: str) -> None:
        assert Noted.waits == before, what
        assert all(type(p) is not nn.Parameter for p in zero.module.parameters()), what

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


@on_ranks(2)
def test_a_kernel_in_a_module_finds_parameters_that_it_reads_without_python() -> None:
    zero = in_flight()
    linear: Any = zero.module.get_submodule("layers.0")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # as an extension in C++ reads them
            return nn.functional.linear(x, linear.weight, linear.bias)

    inputs = torch.ones(1, linear.in_features)
    assert kernel(inputs).isnan().any(), "nothing has arrived"
    linear.forward = kernel
    assert linear(inputs).isfinite().all()


@on_ranks(2)
def test_a_read_waits_for_its_own_bucket_alone() -> None:
    """A parameter's read waits for its own bucket and for no other."""
    zero = in_flight()
    first, last = (zero.module.get_parameter(f"layers.{each}.weight") for each in (0, 4))
    assert len(zero.opt.plan.training_buckets) >= 3
    first.sum()
    assert (type(first) is nn.Parameter, type(last) is nn.Parameter) == (True, False)
    last.sum()
    assert type(last) is nn.Parameter


def _with_marked() -> nn.Module:
    model = MLP()
    layer: Any = model.layers[1]
    layer.weight = _Marked(layer.weight.detach())
    return model


@on_ranks(2)
def test_a_users_own_class_of_parameter_survives_the_flight() -> None:
    zero = in_flight(problem=Problem(_with_marked, MLP_PROBLEM.loss))
    param = zero.module.get_parameter("layers.1.weight")
    assert isinstance(param, _Marked)
    assert param.mark == "mine"
    param.note = "kept"  # type: ignore[attr-defined]
    param.sum()
    assert (type(param), vars(param)) == (_Marked, {"note": "kept"})


@on_ranks(2)
def test_a_trace_of_the_model_sees_no_old_values() -> None:
    """A trace that was made of the model reads parameters without Python from then on."""
    zero = in_flight(steps=1, kind=SGD)
    x = noise(1, 6, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(zero.module, x)
    zero.backward(1)
    zero.opt.step()
    with torch.no_grad():
        out = traced(x)
    assert not out.isnan().any()
    assert_same([zero.module(x).detach()], [out])


@on_ranks(2)
def test_a_forked_process_has_nothing_in_flight_that_could_never_arrive_there() -> None:
    """How a process ends that is forked right behind a step and asks whether it has to wait."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    zero.opt.step()
    child = os.fork()
    if child == 0:
        os._exit(sum(type(param) is not nn.Parameter for param in zero.module.parameters()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -------------------------------------------------------------------------- reductions in flight


@on_ranks(2)
def test_gradients_are_looked_at_only_when_they_have_arrived() -> None:
    """Everything that looks at gradients right behind backward, whose reductions are NaN."""
    ddp = with_ddp(MLP_PROBLEM.fresh(), SGD)
    ddp.backward(0)
    expected = [p.grad.clone() for p in ddp.module.parameters() if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(ddp.module.parameters(), 1e-3)
    names = [name for name, _ in ddp.module.named_parameters()]
    for overlap in (True, False):
        with behind_the_door(AnyOrder):
            zeros = [with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap) for _ in range(3)]
        zero, clipped, cleared = zeros
        zero.backward(0)
        assert_same(expected, [zero.opt.full_grad(name) for name in names], overlap)
        clipped.backward(0)
        assert torch.allclose(clipped.clip(1e-3), norm, rtol=1e-6), f"clip, overlap {overlap}"
        cleared.backward(1)
        cleared.opt.zero_grad()
        cleared.backward(0)
        assert_same(expected, [cleared.opt.full_grad(name) for name in names], overlap)


def test_one_rank_has_nothing_in_flight() -> None:
    model = MLP()
    zero = with_zero(model, SGD)
    train(zero, MLP_PROBLEM, range(1))
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
