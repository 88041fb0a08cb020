"""Whatever the model's graph is, on which rank and at which step: the numbers are DDP's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    Branching,
    Problem,
    Setup,
    failing,
    noise,
    rank,
    train,
    unlike_ddp,
    with_ddp,
    with_plain,
    with_zero,
)
from problems import copies, differing
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------- unused parameters

# Which branches each rank takes, step by step; branch 3 is taken by nobody at any time.
TAKEN: list[tuple[list[int], list[int]]] = [
    ([0], [0]),
    ([0, 1], [2]),
    ([], [1]),
    ([2, 1, 0], []),
    ([1], [1]),
    ([0], [0, 2]),
    ([], []),
]


def _rank_dependent(model: Callable[..., Any], step: int) -> Tensor:
    out: Tensor = model(noise(step, 6, 16), TAKEN[step % len(TAKEN)][rank()]).square().mean()
    return out


def _other_order(model: Callable[..., Any], step: int) -> Tensor:
    """Each rank's gradients come in another order."""
    taken = [0, 1, 2] if (rank() + step) % 2 else [2, 0, 1]
    out: Tensor = model(noise(step, 6, 16), taken).square().mean()
    return out


def _unused() -> list[str]:
    checks = []
    for overlap in (True, False):
        for layout in ("sliced", "whole"):
            for kind in (SGD, ADAMW):
                for loss in (_rank_dependent, _other_order):
                    problem = Problem(Branching, loss, find_unused=True)
                    found = unlike_ddp(
                        lambda setup, p=problem: train(setup, p, range(9)),
                        problem,
                        kind,
                        overlap=overlap,
                        layout=layout,
                    )
                    checks.append((f"{overlap} {layout} {kind[0].__name__} {loss.__name__}", found))
    return failing(checks)


def test_parameters_unused_on_some_ranks_or_on_all_equal_ddp_to_the_bit() -> None:
    assert run_ranks(_unused, 2) == [[], []]


def _untouched() -> list[str]:
    """Neither weight decay nor momentum, nor a state, for what nobody has used."""
    problem = Problem(Branching, _rank_dependent)
    zero = with_zero(problem.fresh(), ADAMW)
    before = copies(zero.module.get_submodule("never").parameters())
    train(zero, problem, range(4))
    after = copies(zero.module.get_submodule("never").parameters())
    states = [zero.opt.full_state(f"never.{name}") for name in ("weight", "bias")]
    used = zero.opt.full_state("branches.2.weight")
    return failing([("changed", differing(before, after)), ("state", any(states) or not used)])


def test_a_parameter_that_nobody_uses_is_not_touched() -> None:
    assert run_ranks(_untouched, 2) == [[], []]


# ------------------------------------------------------------ how a model reaches its parameters


class _Reaching(nn.Module):
    """Uses parameters in every way but by calling the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.position = nn.Embedding(6, 96)
        self.other = nn.Linear(96, 96)
        self.tied = nn.Linear(96, 96)
        self.tied.weight = self.other.weight
        self.loose = nn.ParameterList(nn.Parameter(torch.randn(96)) for _ in range(3))
        self.table = nn.ParameterDict({"scale": nn.Parameter(torch.ones(96))})
        self.attention = nn.MultiheadAttention(96, 2, batch_first=True)
        self.memory = nn.GRU(96, 32, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.head = nn.Linear(32, 4)
        self.aside = [self.loose[1], self.head.weight]

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.position.weight  # six rows, like the batch
        h = torch.tanh(F.linear(h, self.other.weight, self.other.bias))
        h = self.tied(h) * self.loose[0] + self.aside[0] * self.table["scale"]
        h = h + self.loose[2].detach() * self.loose[2]
        h, _ = self.attention(h[None], h[None], h[None])
        h, _ = self.memory(h)
        out: Tensor = F.linear(self.normed(h), self.aside[1])
        return out


REACHING = Problem(
    _Reaching,
    lambda model, step: model(noise(step, 6, 16)).square().mean(),
    find_unused=True,  # the head's bias
)


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body = MLP()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        layers = self.body.layers
        h = torch.tanh(layers[0](x))
        for layer in (layers[1], layers[2], layers[3]):
            h = checkpoint(lambda h, f=layer: torch.tanh(f(h)), h, use_reentrant=self.use_reentrant)
        out: Tensor = layers[4](h)
        return out


def _checkpointed(use_reentrant: bool) -> Problem:
    return Problem(
        lambda: _Checkpointed(use_reentrant),
        lambda model, step: model(noise(step, 6, 16)).square().mean(),
    )


class _Out:
    """An output that nobody knows how to look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _Checkpointed(True)

    def forward(self, x: Tensor) -> Any:
        return _Out(self.body(x))


def _square_of(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().mean()


def _reaching() -> list[str]:
    problems = {
        "reaching": REACHING,
        "checkpointed": _checkpointed(False),
        "checkpointed, reentrant": _checkpointed(True),
    }
    return failing(
        (
            f"{name} {kind[0].__name__} {overlap}",
            unlike_ddp(lambda s, p=problem: train(s, p, range(8)), problem, kind, overlap=overlap),
        )
        for name, problem in problems.items()
        for kind in (SGD, ADAMW)
        for overlap in (True, False)
    )


def test_parameters_reached_from_anywhere_tied_or_recomputed_equal_ddp_to_the_bit() -> None:
    assert run_ranks(_reaching, 2) == [[], []]


def _unseen_outputs() -> list[str]:
    """Rounds begin and end without the hooks at the root."""
    checks = []
    for overlap in (True, False):
        around, plain = (with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap) for _ in range(2))
        direct = Problem(MLP, lambda m, s: _square_of(m.layers, noise(s, 6, 16)))
        got = [*train(around, direct, range(5)), *around.params]
        expected = [*train(plain, Problem(MLP, _through), range(5)), *plain.params]
        checks.append((f"around the root, overlap {overlap}", differing(expected, got)))

        opaque = Problem(_Opaque, lambda m, s: m(noise(s, 6, 16)).value.square().mean())
        clear = _checkpointed(True)
        hidden, seen = with_zero(opaque.fresh(), SGD), with_zero(clear.fresh(), SGD)
        got = [*train(hidden, opaque, range(5)), *hidden.params]
        expected = [*train(seen, clear, range(5)), *seen.params]
        checks.append((f"opaque output, overlap {overlap}", differing(expected, got)))
    return failing(checks)


def _through(model: Any, step: int) -> Tensor:
    """The same without activations, by calling the root."""
    model.forward = lambda x: _square_of(model.layers, x)
    loss: Tensor = model(noise(step, 6, 16))
    return loss


def test_a_loss_around_the_roots_forward_or_an_output_of_any_class_trains_alike() -> None:
    assert run_ranks(_unseen_outputs, 2) == [[], []]


# -------------------------------------------------------------------------- two optimizers at once


class _Pair(nn.Module):
    """One bucket per layer at two ranks; the second layer may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.second = nn.Linear(128, 128)

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        out: Tensor = self.first(x) if short else self.second(self.first(x))
        return out


def _two_modules() -> list[str]:
    """One backward pass through two modules of the same sizes, of which one rank uses less: the
    two optimizers' messages come in another order there, and must not be taken for each other."""

    def run(make: Callable[[nn.Module, Any], Setup]) -> list[Tensor]:
        groups = [dist.new_group(), dist.new_group()]
        torch.manual_seed(3)
        one, two = (make(_Pair(), group) for group in groups)
        for step in range(6):
            x = noise(step, 6, 128)
            short = rank() == step % 2
            loss = 3 * one.model(x).square().mean() + two.model(x, short).square().mean()
            loss.backward()
            for setup in (one, two):
                setup.finish()
        return one.params + two.params

    expected = run(lambda m, g: with_ddp(m, SGD, process_group=g, find_unused_parameters=True))
    return failing(
        (
            f"overlap {overlap}",
            differing(expected, run(lambda m, g, o=overlap: with_zero(m, SGD, overlap=o))),
        )
        for overlap in (True, False)
    )


def test_two_optimizers_in_one_backward_pass_do_not_mix_their_gradients() -> None:
    assert run_ranks(_two_modules, 2) == [[], []]


def _adversaries() -> list[int]:
    """A GAN: the generator's loss leaves gradients in the discriminator, which are cleared."""

    def run(make: Callable[..., Setup]) -> list[Tensor]:
        torch.manual_seed(1)
        generator, critic = (
            make(MLP()),
            make(nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 1))),
        )
        losses = []
        for step in range(5):
            real, seed = noise(step, 6, 4), noise(step + 50, 6, 16)
            critic.opt.zero_grad()
            with torch.no_grad():
                fake = generator.model(seed)
            loss = critic.model(fake).mean() - critic.model(real).square().mean()
            loss.backward()
            critic.opt.step()
            generator.opt.zero_grad()
            loss = -critic.model(generator.model(seed)).mean()
            loss.backward()
            generator.opt.step()
            losses.append(loss.detach())
        return losses + generator.params + critic.params

    expected = run(
        lambda m: with_ddp(m, SGD, process_group=dist.new_group(), broadcast_buffers=False)
    )
    return differing(expected, run(lambda m: with_zero(m, SGD)))


def test_a_generator_and_its_critic_equal_ddp_to_the_bit() -> None:
    assert run_ranks(_adversaries, 2) == [[], []]


# ------------------------------------------------------------------------------------- compilation


def _compiled(backend: str) -> list[str]:
    checks = []
    steps = 6

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
        for step in range(steps):
            if when == "after two steps" and step == 2:
                call = torch.compile(module, backend=backend)
            loss = problem.loss(call, step)
            loss.backward()
            losses.append(loss.detach())
            setup.finish()
        return losses + setup.params

    for name, problem in (("mlp", MLP_PROBLEM), ("reaching", Problem(_Plainer, REACHING.loss))):
        expected = run("never", problem)
        checks += [
            (f"{name}, compiled {when}", differing(expected, run(when, problem)))
            for when in ("before construction", "after two steps", "in place")
        ]
    return failing(checks)


class _Plainer(_Reaching):
    """Without what the compiler breaks the graph at or computes differently."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.position.weight
        h = torch.tanh(F.linear(h, self.other.weight, self.other.bias))
        h = self.tied(h) * self.loose[0] + self.aside[0] * self.table["scale"]
        return h[:, :32] @ self.aside[1].t() + 0 * self.loose[2].sum()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before_after_or_in_place_equals_not_compiled_to_the_bit(backend: str) -> None:
    assert run_ranks(_compiled, 2, backend, timeout=110) == [[], []]


def _compiled_with_buffers() -> list[int]:
    """Two passes per step outside of `no_sync`: the second evens buffers out first."""

    def run(setup: Setup) -> list[Tensor]:
        compiles = setup.model is setup.module
        setup.model = torch.compile(setup.module, backend="eager") if compiles else setup.model
        losses = []
        for step in range(3):
            loss = problem.loss(setup.model, step) + problem.loss(setup.model, 10 + step)
            loss.backward()
            setup.finish()
            losses.append(loss.detach())
        return losses

    problem = PROBLEMS["conv"]
    return unlike_ddp(run, problem, SGD)


def test_a_compiled_model_with_buffers_equals_ddp_to_the_bit() -> None:
    assert run_ranks(_compiled_with_buffers, 2) == [[], []]


class _PartlyScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
        self.first = nn.Linear(16, 128)
        self.inner = torch.jit.script(inner)
        self.last = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(self.first(x)))
        return out


def _scripted() -> list[int]:
    # The optimizing executor rounds differently in its first runs, under DDP too.
    with warnings.catch_warnings(), torch.jit.optimized_execution(False):
        warnings.simplefilter("ignore")
        problem = Problem(_PartlyScripted, REACHING.loss)
        return unlike_ddp(lambda setup: train(setup, problem, range(6)), problem, SGD)


def test_a_scripted_submodule_equals_ddp_to_the_bit() -> None:
    assert run_ranks(_scripted, 2) == [[], []]


# ------------------------------------------------------------------- freezing, adding, converting


def _frozen_between_steps() -> list[str]:
    """DDP is made anew whenever what trains has changed, as it has to be; the optimizer stays."""

    def freeze(setup: Setup, names: list[str], train_them: bool) -> None:
        for name in names:
            setup.module.get_submodule(name).requires_grad_(train_them)

    changes: dict[int, tuple[list[str], bool]] = {
        2: (["layers.1", "layers.3"], False),
        4: (["layers.3"], True),
        5: (["layers.0"], False),
        7: (["layers.0", "layers.1"], True),
    }

    def run(setup: Setup, kind: Any, when: str, clear: Callable[[Setup], None]) -> list[Tensor]:
        losses = []
        for step in range(9):
            if when == "before forward" and step in changes:
                freeze(setup, *changes[step])
                setup = _renewed(setup)
            losses.append(setup.backward(step))
            setup.opt.step()
            if when == "before zero_grad" and step + 1 in changes:
                freeze(setup, *changes[step + 1])
            clear(setup)
            if when == "before zero_grad" and step + 1 in changes:
                setup = _renewed(setup)
        return losses + setup.params

    clears: dict[str, Callable[[Setup], None]] = {
        "opt": lambda setup: setup.opt.zero_grad(),
        "module": lambda setup: setup.module.zero_grad(),
    }
    checks = []
    for kind in (SGD, ADAMW):
        for when in ("before forward", "before zero_grad"):
            for name, clear in clears.items():
                expected = run(with_ddp(MLP_PROBLEM.fresh(), kind), kind, when, clear)
                for layout in ("sliced", "whole"):
                    got = run(
                        with_zero(MLP_PROBLEM.fresh(), kind, layout=layout), kind, when, clear
                    )
                    checks.append(
                        (f"{kind[0].__name__} {when} {name} {layout}", differing(expected, got))
                    )
    return failing(checks)


def _renewed(setup: Setup) -> Setup:
    if setup.model is not setup.module:
        model = nn.parallel.DistributedDataParallel(setup.module)
        return Setup(model, setup.module, setup.opt, model.no_sync, setup.clip)
    return setup


def test_freezing_and_unfreezing_between_steps_equals_ddp_to_the_bit() -> None:
    assert run_ranks(_frozen_between_steps, 2) == [[], []]


def _frozen_before_the_step() -> list[str]:
    """Between backward and step: the gradients that are there are used, and none is lost."""

    def run(setup: Setup, between: Callable[[nn.Module, int], None]) -> list[Tensor]:
        setup.module.get_submodule("layers.1").requires_grad_(False)
        setup = _renewed(setup)
        for step in range(4):
            setup.backward(step)
            between(setup.module, step)
            setup.finish()
            setup = _renewed(setup)
        return setup.params

    def unfreeze(module: nn.Module, step: int) -> None:
        if step == 1:
            module.get_submodule("layers.1").requires_grad_(True)

    def freeze(module: nn.Module, step: int) -> None:
        if step == 1:
            module.get_submodule("layers.2").requires_grad_(False)

    def freeze_and_clear(module: nn.Module, step: int) -> None:
        freeze(module, step)
        if step == 1:
            module.get_submodule("layers.2").zero_grad()

    checks = []
    for between in (unfreeze, freeze, freeze_and_clear):
        for kind in (SGD, ADAMW):
            expected = run(with_ddp(MLP_PROBLEM.fresh(), kind), between)
            got = run(with_zero(MLP_PROBLEM.fresh(), kind), between)
            checks.append((f"{between.__name__} {kind[0].__name__}", differing(expected, got)))
    return failing(checks)


def test_freezing_and_unfreezing_between_backward_and_step_loses_no_gradient() -> None:
    assert run_ranks(_frozen_before_the_step, 2) == [[], []]


def _losing_gradients() -> None:
    """What cannot be done without losing gradients is refused, on every rank."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.module.get_submodule("layers.1").requires_grad_(False)
    zero.backward(0)
    zero.module.get_submodule("layers.1").requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"lose the gradients.*zero_grad\(\)"):
        zero.backward(1)
    zero.opt.zero_grad()
    train(zero, MLP_PROBLEM, range(2))
    zero.backward(2)
    with pytest.raises(RuntimeError, match="lose the gradients"):
        zero.opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    zero.finish()
    train(zero, MLP_PROBLEM, range(2))


def test_changing_what_trains_over_accumulated_gradients_is_refused() -> None:
    assert run_ranks(_losing_gradients, 2) == [None, None]


def _added_group() -> list[str]:
    def run(make: Callable[..., Setup], kind: Any) -> list[Tensor]:
        module = MLP_PROBLEM.fresh()
        late = list(module.get_submodule("layers.2").parameters())
        for param in late:
            param.requires_grad_(False)
        setup = make(module, kind)
        given = [id(p) for p in late]
        for group in setup.opt.param_groups:
            assert any(id(p) in given for p in group["params"])
        losses = train(setup, MLP_PROBLEM, range(2))
        torch.manual_seed(rank())  # rank 0's values have to become everybody's
        extra = nn.Linear(4, 4)
        module.extra = extra
        setup.opt.add_param_group({"params": list(extra.parameters()), "lr": 0.002})
        problem = Problem(MLP, lambda m, s: extra_loss(m, s))
        losses += train(_renewed(setup), problem, range(2, 5))
        return losses + setup.params

    def extra_loss(model: Any, step: int) -> Tensor:
        module = getattr(model, "module", model)
        if not isinstance(module.forward, _WithExtra):
            module.forward = _WithExtra(module)
        out: Tensor = model(noise(step, 6, 16)).square().mean()
        return out

    return failing(
        (kind[0].__name__, differing(run(with_ddp, kind), run(with_zero, kind)))
        for kind in (SGD, ADAMW)
    )


class _WithExtra:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._module.extra(MLP.forward(self._module, x))
        return out


def test_a_group_that_is_added_trains_like_ddp_to_the_bit() -> None:
    assert run_ranks(_added_group, 2) == [[], []]


def _converted() -> list[str]:
    """`model.double()` between steps; SGD's momentum alone would stop the plain optimizer too."""
    kind = (torch.optim.SGD, {"lr": 0.05})
    problem = Problem(
        MLP,
        lambda model, step: (
            model(noise(step, 6, 16).to(next(iter(model.parameters())).dtype)).square().mean()
        ),
    )

    def run(setup: Setup) -> list[Tensor]:
        losses = train(setup, problem, range(2))
        setup.module.double()
        setup = _renewed(setup)
        losses += train(setup, problem, range(2, 4))
        setup.module.float()
        return losses + train(_renewed(setup), problem, range(4, 6)) + setup.params

    return failing(
        (
            f"overlap {overlap}",
            differing(
                run(with_ddp(problem.fresh(), kind)),
                run(with_zero(problem.fresh(), kind, overlap=overlap)),
            ),
        )
        for overlap in (True, False)
    )


def test_a_model_converted_between_steps_trains_like_ddp_to_the_bit() -> None:
    assert run_ranks(_converted, 2) == [[], []]


def _moved() -> list[int]:
    """Data that is replaced on every rank alike, by an assignment or by loading a state dict."""

    def run(setup: Setup) -> list[Tensor]:
        train(setup, MLP_PROBLEM, range(2))
        saved = {name: value.clone() for name, value in setup.module.state_dict().items()}
        train(setup, MLP_PROBLEM, range(2, 4))
        weight = setup.module.get_parameter("layers.1.weight")
        weight.data = weight.data * 0.5
        train(setup, MLP_PROBLEM, range(4, 6))
        setup.module.load_state_dict(saved)
        losses = train(setup, MLP_PROBLEM, range(6, 8))
        return losses + setup.params

    return differing(*(run(make(MLP_PROBLEM.fresh(), SGD)) for make in (with_ddp, with_zero)))


def test_parameters_that_the_user_overwrites_are_taken_as_they_are() -> None:
    assert run_ranks(_moved, 2) == [[], []]


def test_one_rank_checkpoints_and_shares_as_the_plain_optimizer_does() -> None:
    for problem in (REACHING, _checkpointed(False), _checkpointed(True)):
        outcomes = []
        for make in (with_plain, with_zero):
            setup = make(problem.fresh(), SGD)
            outcomes.append([*train(setup, problem, range(3)), *setup.params])
        assert differing(*outcomes) == []
