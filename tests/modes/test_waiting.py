"""What waits for parameters and gradients in flight, and what does not."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from doubles import AnyOrder, behind_the_door
from late import Noted, in_flight
from models import MLP, MLP_PROBLEM, SGD, Problem, noise, train, with_ddp, with_zero
from on_ranks import on_ranks
from problems import assert_same
from torch import nn, optim


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
    zero = with_zero(model, (optim.SGD, {"lr": 0.1}))
    train(zero, MLP_PROBLEM, range(1))
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
