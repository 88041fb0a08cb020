"""`module=` and graphs that its hooks do not see: outputs of any class, compiled models, no use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from doubles import Wrapped
from graphs import Checkpointed, Opaque, Reaching
from models import MLP, MLP_PROBLEM, SGD, Problem, noise, train, with_zero
from on_ranks import on_ranks
from problems import assert_same
from ranks import run_ranks
from scenarios import compared
from torch import Tensor, nn

from shardstep.comm import Work


def _square_of(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().mean()


def _through(model: Any, step: int) -> Tensor:
    """The same without activations, by calling the root."""
    model.forward = lambda x: _square_of(model.layers, x)
    return model(noise(step, 6, 16))


@on_ranks(2)
def test_a_loss_around_the_roots_forward_or_an_output_of_any_class_trains_alike() -> None:
    """Rounds begin and end without the hooks at the root."""
    for overlap in (True, False):
        direct = Problem(MLP, lambda m, s: _square_of(m.layers, noise(s, 6, 16)))
        opaque = Problem(Opaque, lambda m, s: m(noise(s, 6, 16)).value.square().mean())
        clear = Problem(lambda: Checkpointed(True), MLP_PROBLEM.loss)
        for unseen, plain in ((direct, Problem(MLP, _through)), (opaque, clear)):
            seen = []
            for problem in (unseen, plain):
                setup = with_zero(problem.fresh(), SGD, overlap=overlap)
                seen.append([*train(setup, problem, range(5)), *setup.params])
            assert_same(*seen, overlap)


# ------------------------------------------------------------------------------------- compilation


class _Plainer(Reaching):
    """Without what the compiler breaks the graph at or computes differently."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.simple(x)
        return h[:, :32] @ self.aside[1].t() + 0 * self.loose[2].sum()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2, timeout=110)
def test_compiled_before_after_or_in_place_equals_not_compiled_to_the_bit(
    backend: str,
) -> None:

    def run(when: str, problem: Problem) -> list[Tensor]:
        torch._dynamo.reset()
        module = problem.fresh()
        call: Callable[..., Any] = module
        if when == "before construction":
            call = torch.compile(module, backend=backend)
        setup = with_zero(module, SGD)
        if when == "in place":
            module.compile(backend=backend)
        losses = []
        for step in range(6):
            if when == "after two steps" and step == 2:
                call = torch.compile(module, backend=backend)
            loss = problem.loss(call, step)
            loss.backward()
            losses.append(loss.detach())
            setup.finish()
        return losses + setup.params

    for name, problem in (("mlp", MLP_PROBLEM), ("reaching", Problem(_Plainer, MLP_PROBLEM.loss))):
        expected = run("never", problem)
        for when in ("before construction", "after two steps", "in place"):
            assert_same(expected, run(when, problem), f"{name}, compiled {when}")


class _Ordered(Wrapped):
    """Lists the collectives of all connections in the order of their launch."""

    made: ClassVar[list[Any]] = []
    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.made.append(self)

    def all_gather(self, *args: Any) -> Work:
        self.calls.append(("all_gather", self.made.index(self)))
        return self._inner.all_gather(*args)

    def reduce_scatter(self, *args: Any) -> Work:
        self.calls.append(("reduce_scatter", self.made.index(self)))
        return self._inner.reduce_scatter(*args)


def _two_models() -> tuple[list[str], list[tuple[str, int]]]:
    found = compared(["two_models_in_one_backward"], double=_Ordered, modes=["module"])
    return found, _Ordered.calls


def test_two_models_in_one_backward_pass_send_in_one_order_on_every_rank() -> None:
    """Otherwise ranks may wait for each other in a circle; NCCL asks for one order anyway."""
    (found, calls), other = run_ranks(_two_models, 2, timeout=40)
    assert found == []
    assert calls
    assert other == (found, calls)


@on_ranks(2)
def test_changing_what_trains_over_accumulated_gradients_is_refused() -> None:
    """What cannot be done without losing gradients is refused, on every rank."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.module.get_submodule("layers.1").requires_grad_(False)
    zero.backward(0)
    zero.module.get_submodule("layers.1").requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"lose gradients.*zero_grad\(set_to_none=True\)"):
        zero.backward(1)
    zero.opt.zero_grad()
    train(zero, MLP_PROBLEM, range(2))
    zero.backward(2)
    with pytest.raises(RuntimeError, match="lose gradients"):
        zero.opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    zero.finish()
    train(zero, MLP_PROBLEM, range(2))
