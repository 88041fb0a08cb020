"""Walks with `module=`, next to one process that has the data of all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from doubles import AnyOrder, LateArrival, behind_the_door
from models import MLP, Branching, make_gpt, noise, rank, world_size
from problems import Case
from torch import Tensor, nn, optim
from walks import (
    ALWAYS,
    BF16,
    FP16,
    FP32,
    FP64,
    ROUNDING,
    WITH_MODEL,
    WITH_STEP,
    Broken,
    Walk,
    fail,
)

from shardstep import BatchSkippedError, MixedPrecision, ZeroRedundancyOptimizer


class Convolutions(nn.Module):
    """Four-dimensional weights, one that is used twice, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.body = nn.Conv2d(6, 6, 3, padding=1)
        self.tied = self.body
        self.head = nn.Linear(6, 4)
        self.never = nn.Parameter(torch.ones(70, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x.view(-1, 1, 4, 4)))
        x = torch.tanh(self.tied(torch.tanh(self.body(x))))
        return self.head(x.mean(dim=(2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "branching": Branching,
    "mlp": partial(MLP, 48, 3),
    "convolutions": Convolutions,
    "gpt": make_gpt,
}
MODULE_CASES = [
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    Case(optim.AdamW, {"lr": 0.01}),
    Case(optim.AdamW, {"lr": 0.01, "fused": True}),
    Case(optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    Case(optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.125}),
]
MODULE_POLICIES = [
    *(MixedPrecision(), ROUNDING, MixedPrecision(reduce_dtype=FP32)),
    *(MixedPrecision(), MixedPrecision(reduce_dtype=BF16)),
]


class WithModule(Walk):
    """`module=`, next to a process that has all ranks' data and adds in the order of the ranks."""

    norms = ()  # sums over slices are taken in another order

    def __init__(self, seed: int, low: bool = False) -> None:
        super().__init__(seed)
        more = {"hold_back": 3, "hold_back_for_some_time": 2, "clear_a_part": 1, "add": 0.3}
        rare = {"turn": 0.7, "cast": 0.5, "fail_and_recover": 1}
        self.weights = {**ALWAYS, **WITH_STEP, **WITH_MODEL, **more, **rare}
        self._name = self.in_turn(list(MODELS))
        model = MODELS[self._name]().to(
            self.chance.choice([BF16, BF16, FP16] if low else [FP32, FP64])
        )
        if low and self._name != "gpt" and self.often(0.4):
            (model.layers[0] if isinstance(model, MLP) else next(model.children())).float()
        self.case = self.chance.choice(MODULE_CASES)
        for param in model.parameters():
            # State that is made when the class is has no more bits than what is frozen then.
            param.requires_grad_(self.case.optimizer_class is optim.Adagrad or self.often(0.9))
        self.policy = self.in_turn(MODULE_POLICIES if low else MODULE_POLICIES[:1])
        self.models = model, copy.deepcopy(model)
        self.groups = [([name for name, _ in model.named_parameters()], {})]
        self._held: dict[Tensor, list[Tensor | None]] = {}
        self._assigned: set[Tensor] = set()
        self._holding = False
        self._trained = {param for param in model.parameters() if param.requires_grad}
        dtypes = {str(param.dtype) for param in model.parameters()}
        self.acts.append(f"{self._name} {self.case} {self.policy} {sorted(dtypes)}")
        self.start()

    def make(self) -> ZeroRedundancyOptimizer:
        double: Any = self.chance.choice([None, None, None, LateArrival, AnyOrder])
        with behind_the_door(double) if double else contextlib.nullcontext():
            return ZeroRedundancyOptimizer(
                self.grouped(self.models[1]),
                self.case.optimizer_class,
                module=self.models[1],
                layout=self.chance.choice(["sliced", "whole"]),
                precision=self.policy,
                bucket_bytes=self.chance.choice([1, 5000, None]),
                overlap=self.often(0.7),
                **self.case.fresh_options(),
            )

    def leave(self) -> None:
        self.sharded.detach()

    def check(self) -> None:
        if self.often(0.5):  # a read would wait for what is in flight
            super().check()

    # ------------------------------------------------------------------------------- gradients

    def _output(self, model: nn.Module, step: int, of: int, scale: int = 1) -> Tensor:
        """Return the output of a batch of rank `of`, which takes branches of its own."""
        chance = random.Random(f"{step} {of}")
        dtypes = {param.dtype for param in model.parameters()}
        with torch.autocast("cpu", BF16, enabled=len(dtypes) > 1):
            if self._name == "gpt":
                tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(step))
                out = model((tokens + of * scale) % 61)[0]
            else:
                taken = [[branch for branch in range(3) if chance.random() < 0.5]]
                x = noise(step, 6, 16, of=of).to(next(model.parameters()).dtype) * scale
                out = model(x, *(taken if self._name == "branching" else []))
        return out if out.dtype == FP64 else out.float()

    def _loss(self, model: nn.Module, step: int, of: int, scale: int = 1) -> Tensor:
        added = [param for name, param in model.named_parameters() if name.startswith("added")]
        total = self._output(model, step, of, scale).square().mean()
        return total + sum((0.1 * param.float().square().mean() for param in added), 0.0)

    def loss(self, number: int) -> Tensor:
        return self._loss(self.models[number], self.step_number, 0)

    def _passes(self, model: nn.Module, part: str, step: int, of: int) -> Iterator[None]:
        """Run backward passes through a part of the model, and yield after each."""
        if part == "first child":
            x = noise(step, 6, 16, of=of).to(next(model.parameters()).dtype)
            loss = next(model.children())(x).float().square().mean()
            if loss.requires_grad:  # or there is no pass that could send what was held back
                loss.backward()
                yield
            return
        loss = self._loss(model, step, of)
        if part == "again":
            loss.backward(retain_graph=True)
            yield
        elif part == "twice":
            loss = loss + self._loss(model, step, of, 2)
        elif part == "penalty":
            some = [param for param in model.parameters() if param.requires_grad][-2:]
            slopes = torch.autograd.grad(loss, some, create_graph=True, allow_unused=True)
            loss = loss + sum(s.float().square().mean() for s in slopes if s is not None)
        last = [param for param in model.parameters() if param.requires_grad][-1:]
        loss.backward(inputs=last if part == "last" else None)
        yield

    def _of_rank(self, part: str, step: int, of: int) -> list[list[Tensor | None]]:
        """Return the gradients of each pass with one rank's data."""
        params = list(self.models[0].parameters())
        kept, found = [param.grad for param in params], []
        self.models[0].zero_grad()
        for _ in self._passes(self.models[0], part, step, of):
            found.append([param.grad for param in params])
            self.models[0].zero_grad()
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
        return found

    def _pass(self, part: str, step: int, held_back: bool = False) -> None:
        with self.sharded.no_sync() if held_back else contextlib.nullcontext():
            for _ in self._passes(self.models[1], part, step, rank()):
                pass
        self._pass_unsharded(part, step, held_back)

    def _pass_unsharded(self, part: str, step: int, held_back: bool = False) -> None:
        held_back = held_back or self._holding
        ranks = [self._of_rank(part, step, of) for of in range(world_size())]
        for rounds in zip(*ranks, strict=True):
            for number, param in enumerate(self.models[0].parameters()):
                self._hold(param, [each[number] for each in rounds])
            if not held_back:
                self.send()

    def _hold(self, param: Tensor, grads: list[Tensor | None]) -> None:
        """Add to each rank's sum, in the wider dtype. A single gradient stays as it is."""
        before = self._held.get(param)
        if param in self._assigned and any(grad is not None for grad in grads):
            self._assigned.remove(param)  # autograd adds to what the user has assigned
            param.grad = None
        elif before is not None:
            wide = self.policy.step_dtype(param.dtype)
            grads = [None if grad is None else grad.to(wide) for grad in grads]
        if before is not None:
            both = zip(before, grads, strict=True)
            grads = [a if b is None else b if a is None else a + b for a, b in both]
        if any(grad is not None for grad in grads):
            self._held[param] = grads

    def _mean(self, param: Tensor, parts: list[Tensor | None]) -> Tensor:
        """Return the mean over ranks as it is computed: scaled, rounded to the wire, added up."""
        dtype = self.policy.step_dtype(param.dtype)
        if len(parts) == 1 and parts[0] is not None:  # nothing travels
            return parts[0].to(dtype)
        wire = self.policy.wire_dtype(param.dtype)

        def contribution(part: Tensor | None) -> Tensor:
            if part is None:
                return torch.zeros_like(param, dtype=dtype)
            wide = part if part.itemsize > wire.itemsize else part.to(wire)
            return (wide * (1.0 / world_size())).to(wire).to(dtype)

        return functools.reduce(torch.add, map(contribution, parts))  # -0 and -0 make -0

    def send(self, plain_stay: bool = False) -> None:
        if plain_stay and self._held.keys() == self._assigned and not self._holding:
            for param in self._assigned:  # what changes it in place changes it in all parts
                param.grad = self._held[param][0]
            return
        for param, parts in self._held.items():
            param.grad_dtype = None  # a mean is as wide as the master
            before = None if param in self._assigned else param.grad
            mean = self._mean(param, parts)
            param.grad = mean if before is None else before + mean
        self._held.clear()
        self._assigned.clear()

    def backward(self) -> None:
        self._pass(self._some_part(), self.step_number)

    def _some_part(self) -> str:
        parts = ["all", "all", "again", "twice", "last", "penalty"]
        part = self.chance.choice(parts + ["first child"] * (self._name == "branching"))
        self.say(part)
        return part

    def hold_back(self) -> None:
        for time in range(self.chance.randint(1, 3)):
            self._pass(self._some_part(), 7 * self.step_number + time, held_back=True)

    def hold_back_for_some_time(self) -> None:
        with self.sharded.no_sync():
            self._holding = True
            for _ in range(self.chance.randint(1, 4)):
                self.do(self.chance.choice(["backward", "backward", "step", "clear", "clip"]))
            self._holding = False

    def evaluations(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        step = self.step_number

        def expected() -> float:
            self._pass_unsharded("all", step)
            return 0.5

        def got() -> float:
            self._loss(self.models[1], step, rank()).backward()
            return 0.5

        return expected, got

    def clip(self) -> None:
        if self.often(0.5) and not self._holding:  # torch's clips what a rank holds back alone
            if self._assigned and world_size() == 3:
                # A third is rounded. Whether it is taken before clipping depends on earlier calls.
                self.sharded.grad_norms()
                self.send()
            return super().clip()
        self.send()
        expected = nn.utils.clip_grad_norm_(self.models[0].parameters(), 0.01, torch.inf)
        got = self.sharded.clip_grad_norm_(0.01, torch.inf)
        self.compare("norm", expected.double(), got.double())
        return None

    def assign(self, param: nn.Parameter, grad: Tensor | None) -> None:
        param.grad = None
        self._held.pop(param, None)
        self._assigned.discard(param)
        if grad is not None:
            self._held[param] = [grad] * world_size()
            self._assigned.add(param)

    def clear_a_part(self) -> None:
        last, expected = list(self.models[0].children())[-1], next(self.models[0].parameters())
        for param in (expected, *last.parameters()):
            self.assign(param, None)
        list(self.models[1].children())[-1].zero_grad()
        next(self.models[1].parameters()).grad = None

    def look(self) -> None:
        super().look()
        self.send()
        for name, expected, got in self.pairs():
            if got.requires_grad:
                grad = self.sharded.full_grad(got)
                self.compare(f"gradient of {name}", expected.grad, grad)
                if grad is not None:
                    grad.zero_()  # it is the caller's

    # ---------------------------------------------------------------------------------- changes

    def before_a_change(self) -> None:
        self.clear_all()

    def freeze(self) -> None:
        self.clear_all()
        expected, got = self.some()
        trains = not expected.requires_grad
        if trains or sum(param.requires_grad for _, param, _ in self.pairs()) > 1:
            for param in (expected, got):
                param.requires_grad_(trains)
        if trains:
            self.sharded.zero_grad()  # which notices it, and makes a master
            self._trained.add(expected)

    def turn(self) -> None:
        if not self.case.options.get("fused"):  # its kernels need state in the same order
            self.clear_all()
            form = self.chance.choice([torch.channels_last, torch.contiguous_format])
            self.say(form)
            for model in self.models:
                model.to(memory_format=form)  # type: ignore[call-overload]
            self.sharded.zero_grad()  # which notices it; forward does only if a part trains

    def cast(self) -> None:
        """Give all parameters one dtype."""
        # Torch's classes do not take state in another dtype than float32 then.
        wide = any(param.dtype == FP64 for _, param, _ in self.pairs())
        if self.one_tensor_at_a_time and not wide:
            dtype = self.chance.choice([BF16, FP16, FP32])
            self.say(dtype)
            self.clear_all()
            for model in self.models:
                model.to(dtype)
            self.sharded.zero_grad()  # which notices it; masters follow what was rounded by then
            self.unsharded.cast(self._trained)
            self.unsharded.follow()

    def new_param(self) -> nn.Parameter:
        return nn.Parameter(super().new_param().to(next(self.models[0].parameters()).dtype))

    def add(self) -> None:
        super().add()
        self._trained |= set(list(self.unsharded.stepped_on)[-2:])

    def fail_and_recover(self) -> None:
        """Let a rank fail before the end of its backward pass. All ranks skip the batch."""
        self.clear_all()
        where = self.chance.choice(["loader", "backward", "closure"])
        failing = self.chance.randrange(4) % world_size()
        self.say(where, failing)
        last = [p for p in self.models[1].parameters() if p.requires_grad]
        hooks = []

        def closure() -> None:
            if failing == rank() and where != "backward":
                raise Broken
            self._loss(self.models[1], self.step_number, rank()).backward()

        try:
            if failing == rank() and where == "backward":
                hooks = [p.register_post_accumulate_grad_hook(fail) for p in last]
            if where == "closure":
                self.sharded.step(closure)
            else:
                closure()
                self.sharded.step()
            self.wrong.append("a step on a batch that failed")
        except (Broken, BatchSkippedError):
            self.sharded.recover()
        for hook in hooks:
            hook.remove()
