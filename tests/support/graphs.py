"""Scenarios: models whose graph differs between ranks and steps, or is made in unusual ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import MLP, MLP_PROBLEM, PROBLEMS, SGD, Branching, Problem, Setup, noise, rank, train
from scenarios import APART, MODULE, New, scenario, trained
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

Model = Callable[..., Any]

# ----------------------------------------------------------------------------- unused parameters

# The branches that each of two ranks takes, step by step.
TAKEN: list[tuple[list[int], list[int]]] = [
    ([0], [0]),
    ([0, 1], [2]),
    ([], [1]),
    ([2, 1, 0], []),
    ([1], [1]),
    ([0], [0, 2]),
    ([], []),
]


def _taking(branches: Callable[[int], Any]) -> Callable[[Model, int], Tensor]:
    """The loss of a model that takes these branches at a step."""

    def loss(model: Model, step: int) -> Tensor:
        return model(noise(step, 6, 16), branches(step)).square().mean()

    return loss


BRANCHES: dict[str, Callable[[int], Any]] = {
    "others on each rank": lambda step: TAKEN[step % len(TAKEN)][rank() % 2],
    "in another order on each rank": lambda step: [0, 1, 2] if (rank() + step) % 2 else [2, 0, 1],
    "one": lambda step: [0],
    "one for each rank": lambda step: [rank() % 3],
    "fewer and fewer": lambda step: range(max(1, 3 - step)),
}


def branching(branches: Callable[[int], Any]) -> Problem:
    return Problem(Branching, _taking(branches), find_unused=True)


FEWER = branching(BRANCHES["fewer and fewer"])
ALL_OF_THEM = branching(lambda step: [0, 1, 2])


def _branches(new: New, names: Iterable[str]) -> list[Tensor]:
    """Neither weight decay nor momentum touches what no rank used."""
    seen = []
    for name in names:
        problem = branching(BRANCHES[name])
        setup = new(problem, find_unused_parameters=True)
        before = setup.module.get_parameter("never.weight").detach().clone()
        seen += [*train(setup, problem, range(9)), *setup.params]
        assert torch.equal(before, setup.module.get_parameter("never.weight"))
    return seen


@scenario(many=True)
def branches_that_differ_between_ranks_and_steps(new: New) -> list[Tensor]:
    return _branches(new, ["others on each rank"])


@scenario(many=True, slow=True)
def every_choice_of_branches(new: New) -> list[Tensor]:
    return _branches(new, BRANCHES)


@scenario(many=True)
def unused_parameters_of_a_static_graph(new: New) -> list[Tensor]:
    seen = []
    for name in ("one", "one for each rank"):
        problem = branching(BRANCHES[name])
        seen += trained(new, problem, find_unused_parameters=False, static_graph=True)
    return seen


@scenario(FEWER)
def unused_parameters_with_no_sync(setup: Setup) -> None:
    for step in range(4):
        with setup.no_sync():
            setup.backward(max(0, step - 1), FEWER)
        setup.backward(step, FEWER)
        setup.finish()


# ------------------------------------------------------- how a model reaches its own parameters


class Reaching(nn.Module):
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
        self.head = nn.Linear(32, 4)  # of which the bias is not used
        self.aside = [self.loose[1], self.head.weight]

    def forward(self, x: Tensor) -> Tensor:
        h = self.simple(x)
        h = h + self.loose[2].detach() * self.loose[2]
        h, _ = self.attention(h[None], h[None], h[None])
        h, _ = self.memory(h)
        return F.linear(self.normed(h), self.aside[1])

    def simple(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.position.weight  # six rows, like the batch
        h = torch.tanh(F.linear(h, self.other.weight, self.other.bias))
        return self.tied(h) * self.loose[0] + self.aside[0] * self.table["scale"]


REACHING = Problem(Reaching, MLP_PROBLEM.loss, find_unused=True)


@scenario(REACHING)
def parameters_tied_or_read_from_anywhere(setup: Setup) -> list[Tensor]:
    return train(setup, REACHING, range(6))


class Prompt(nn.Module):
    """Returns its parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 4))

    def forward(self) -> Tensor:
        return self.weight


PROMPT = Problem(Prompt, lambda model, step: (noise(step, 6, 16) @ model()).square().mean())


@scenario(PROMPT, kinds=[SGD])
def a_parameter_that_is_the_output(setup: Setup) -> list[Tensor]:
    return train(setup, PROMPT, range(4))


class ReadsPastAutograd(nn.Module):
    """Backward needs the last layer's weight once more, after its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) @ self.layers[-1].weight.detach()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


READS = Problem(ReadsPastAutograd, MLP_PROBLEM.loss)


@scenario(READS, modes=(*APART, "hook", "register"))
def backward_that_reads_a_parameter_late(setup: Setup) -> list[Tensor]:
    return train(setup, READS, range(3))


class Checkpointed(nn.Module):
    """Recomputes its layers in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body = MLP()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        layers = self.body.layers
        h = torch.tanh(layers[0](x))
        for layer in (layers[1], layers[2], layers[3]):
            h = checkpoint(lambda h, f=layer: torch.tanh(f(h)), h, use_reentrant=self.use_reentrant)
        return layers[4](h)


@scenario(many=True, slow=True)
def activation_checkpointing(new: New) -> list[Tensor]:
    """Passes within the pass end earlier; no gradient may be taken for complete there."""
    seen = []
    for reentrant, static in ((False, False), (False, True), (True, False), (True, True)):
        problem = Problem(lambda r=reentrant: Checkpointed(r), MLP_PROBLEM.loss)
        seen += trained(new, problem, 4, static_graph=static)
    return seen


class Out:
    """An output that no hook can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Checkpointed(True)

    def forward(self, x: Tensor) -> Any:
        return Out(self.body(x))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
        self.first = nn.Linear(16, 128)
        self.inner = torch.jit.script(inner)
        self.last = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


@scenario(many=True, kinds=[SGD])
def a_scripted_submodule(new: New) -> list[Tensor]:
    # The optimizing executor rounds differently in its first runs, under DDP too.
    with warnings.catch_warnings(), torch.jit.optimized_execution(False):
        warnings.simplefilter("ignore")
        return trained(new, Problem(Scripted, MLP_PROBLEM.loss), 6)


@scenario(PROBLEMS["conv"], modes=MODULE, kinds=[SGD])
def a_compiled_model_with_buffers(setup: Setup) -> list[Tensor]:
    """Two forward passes before a backward pass: the second makes buffers equal first."""
    problem = PROBLEMS["conv"]
    if setup.model is setup.module:
        setup.model = torch.compile(setup.module, backend="eager")
    losses = []
    for step in range(3):
        loss = problem.loss(setup.model, step) + problem.loss(setup.model, 10 + step)
        loss.backward()
        setup.finish()
        losses.append(loss.detach())
    return losses


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16, sparse=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens))


def _some_tokens(model: Model, step: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * step + rank())
    return model(torch.randint(40, (6,), generator=random)).square().mean()


SPARSE = Problem(Sparse, _some_tokens)


@scenario(SPARSE, kinds=[(optim.SGD, {"lr": 0.1})], layout="whole")
def sparse_gradients(setup: Setup) -> list[Tensor]:
    return train(setup, SPARSE, range(5))


# --------------------------------------------------------------------------------------- buffers


class Buffered(nn.Module):
    """Buffers that each rank changes in its own way, one with gaps in memory, one an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.register_buffer("mean", torch.zeros(8, 6)[:, ::2])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(x.mean())
            self.count.add_(1 + rank())
        return self.body(x) + self.mean.mean().detach()


BUFFERED = Problem(Buffered, MLP_PROBLEM.loss)


@scenario(many=True, kinds=[SGD])
def buffers_of_rank_0_or_of_each_rank(new: New) -> list[Tensor]:
    each = [trained(new, BUFFERED, broadcast_buffers=broadcast) for broadcast in (True, False)]
    return each[0] + each[1]


class Conjugating(nn.Module):
    """The gradient of its complex weight is a lazily conjugated tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 130), nn.Linear(70, 4)
        self.weight = nn.Parameter(0.1 * torch.randn(130, 70, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).to(self.weight.dtype) @ self.weight.conj()
        return self.last(hidden.real + hidden.imag)


CONJUGATING = Problem(Conjugating, MLP_PROBLEM.loss)


@scenario(CONJUGATING, modes=(*APART, "hook"), kinds=[SGD], gradient_as_bucket_view=False)
def complex_parameters(setup: Setup) -> list[Tensor]:
    return train(setup, CONJUGATING, range(4))


class Remembering(nn.Module):
    """Buffers that backward needs: one that is replaced, and those of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        self.scale = 0.5 * self.scale + 0.5 * hidden.detach().abs().mean(dim=0)
        return self.last(hidden * self.scale)


REMEMBERING = Problem(
    Remembering,
    lambda model, step: MLP_PROBLEM.loss(model, step) + MLP_PROBLEM.loss(model, step + 100),
)


@scenario(REMEMBERING, kinds=[SGD])
def two_forwards_of_a_model_with_buffers(setup: Setup) -> list[Tensor]:
    return train(setup, REMEMBERING, range(4))


@scenario(REMEMBERING, kinds=[SGD])
def buffers_with_no_sync(setup: Setup) -> list[Tensor]:
    losses = []
    for step in range(0, 9, 3):
        with setup.no_sync():
            losses += [setup.backward(step, REMEMBERING), setup.backward(step + 1, REMEMBERING)]
        losses.append(setup.backward(step + 2, REMEMBERING))
        setup.finish()
    return losses


# ------------------------------------------------------------------------ two models, two groups


@scenario(many=True, kinds=[SGD])
def two_models_in_one_backward(new: New) -> list[Tensor]:
    """Of the same sizes, of which each rank uses another part: messages must not be mixed up."""
    groups = [dist.new_group() if dist.is_initialized() else None for _ in range(2)]
    one, two = (new(PAIR, process_group=group, find_unused_parameters=True) for group in groups)
    losses = []
    for step in range(6):
        x = noise(step, 6, 16)
        short = rank() == step % 2
        loss = 3 * one.model(x).square().mean() + two.model(x, short).square().mean()
        loss.backward()
        losses.append(loss.detach())
        one.finish()
        two.finish()
    return losses + one.params + two.params


class Pair(MLP):
    """One bucket for each layer at two ranks; most layers may be left out."""

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        for layer in self.layers[:2] if short else self.layers:
            x = torch.tanh(layer(x))
        return x


PAIR = Problem(lambda: Pair(depth=8), MLP_PROBLEM.loss)


@scenario(many=True, kinds=[SGD], modes=APART)
def generator_and_critic(new: New) -> list[Tensor]:
    """The generator's loss leaves gradients in the critic, which are cleared."""
    critics = Problem(
        lambda: nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 1)), MLP_PROBLEM.loss
    )
    generator, critic = new(), new(critics)
    losses = []
    for step in range(5):
        real, seed = noise(step, 6, 4), noise(step + 50, 6, 16)
        critic.opt.zero_grad()
        with torch.no_grad():
            fake = generator.model(seed)
        (critic.model(fake).mean() - critic.model(real).square().mean()).backward()
        critic.opt.step()
        generator.opt.zero_grad()
        loss = -critic.model(generator.model(seed)).mean()
        loss.backward()
        generator.opt.step()
        losses.append(loss.detach())
    return losses + generator.params + critic.params
