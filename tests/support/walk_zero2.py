"""Whatever a loop does between two steps, and in whichever order, the numbers are one process's.

Seeded walks of backward passes (held back, repeated, through a part of the model, with branches
that other ranks do not take), clearing, clipping, looking at gradients, writing them and stepping.
Beside each goes one process that has every rank's data and adds the means up itself. Both compute
in float64, so that what is right differs in the last digits and what is wrong in the first.
"""

from __future__ import annotations

import contextlib
import copy
import random

import torch
from models import Branching, Kind, consolidated, noise, rank, with_plain, with_zero, world_size
from torch import Tensor, nn, optim
from walks import Act, Walk

from shardstep import BatchSkippedError

KIND: Kind = (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
MAX_NORM = 0.05


def _close(expected: Tensor, got: Tensor) -> bool:
    return torch.allclose(expected, got, rtol=1e-9, atol=1e-12)


class Looping(Walk):
    """A loop over a divided model, and over one that is whole, in step."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed
        torch.manual_seed(seed)
        self._whole = with_plain(Branching().double(), KIND)
        self._divided = with_zero(
            copy.deepcopy(self._whole.module),
            KIND,
            layout=self.chance.choice(["sliced", "whole"]),
            overlap=self.chance.random() < 0.7,
        )

    def weights(self) -> dict[Act, float]:
        return {
            self.backward: 6,
            self.backward_held_back: 3,
            self.some_time_held_back: 2.5,
            self.step: 4,
            self.clear: 4,
            self.clear_a_part: 1.5,
            self.clip: 1,
            self.look_at_gradients: 1,
            self.write_a_gradient: 0.7,
            self.scale_a_gradient: 0.7,
            self.evaluate: 1,
            self.edit_groups: 1,
            self.freeze: 1,
            self.evaluate_or_train: 0.5,
            self.closure: 1,
            self.fail_and_recover: 1,
            self.reload: 0.5,
            self.copy: 0.3,
            self.add_a_group: 0.2,
            self.halve_a_gradient: 0.5,
            self.halve_the_state: 0.5,
            self.swap: 0.5,
            self.hook: 0.3,
        }

    def modules(self) -> tuple[nn.Module, nn.Module]:
        return self._whole.module, self._divided.module

    def check(self) -> None:
        pairs = zip(self._whole.params, self._divided.params, strict=True)
        self.wrong += [f"parameter {n}" for n, pair in enumerate(pairs) if not _close(*pair)]

    def leave(self) -> None:
        self._divided.opt.detach()

    # ------------------------------------------------------------------------------ backward

    def backward(self, held_back: bool = False) -> None:
        part = self.chance.choice(["all", "all", "again", "twice", "head", "stem", "penalty"])
        step = 100 * self._seed + len(self.acts)
        self.acts.append(part)
        with self._divided.no_sync() if held_back else contextlib.nullcontext():
            self._run(self._divided.module, part, step, rank())
        self._run_whole(part, step)

    def _run_whole(self, part: str, step: int) -> None:
        """Add the mean over all ranks' data to the gradients of the whole model."""
        module, given = self._whole.module, [p.grad for p in self._whole.module.parameters()]
        for of in range(world_size()):
            module.zero_grad()
            self._run(module, part, step, of)
            for number, param in enumerate(module.parameters()):
                if param.grad is not None:
                    mean, before = param.grad / world_size(), given[number]
                    given[number] = mean if before is None else before + mean
        for param, grad in zip(module.parameters(), given, strict=True):
            param.grad = grad

    def backward_held_back(self) -> None:
        self.backward(held_back=True)

    def some_time_held_back(self) -> None:
        with self._divided.no_sync():
            for _ in range(self.chance.randint(1, 4)):
                self.do_one_of({self.backward: 2, self.step: 1, self.clear: 2, self.clip: 1})

    def _run(self, module: nn.Module, part: str, step: int, of: int) -> None:
        """A backward pass with the data of rank `of`, which takes branches of its own."""
        chance = random.Random(f"{step} {of}")
        taken = [branch for branch in range(3) if chance.random() < 0.5]
        x = noise(step, 6, 16, of=of).double()
        if part == "stem":
            module.get_submodule("stem")(x).square().mean().backward()
            return
        out = module(x.requires_grad_(), taken)
        loss = out.square().mean()
        if part == "penalty":
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + slope.square().mean()
        elif part == "again":
            loss.backward(retain_graph=True)
        elif part == "twice":
            loss = loss + module(2 * x, taken).square().mean()
        head = list(module.get_submodule("head").parameters())
        loss.backward(inputs=head if part == "head" else None)

    # ------------------------------------------------------------------------ what may follow

    def step(self) -> None:
        for setup in (self._whole, self._divided):
            setup.opt.step()

    def clear(self) -> None:
        to_none, by_module = self.chance.random() < 0.7, self.chance.random() < 0.4
        for setup in (self._whole, self._divided):
            (setup.module if by_module else setup.opt).zero_grad(set_to_none=to_none)

    def clear_a_part(self) -> None:
        for setup in (self._whole, self._divided):
            setup.module.get_submodule("branches.1").zero_grad()
            setup.module.get_parameter("head.weight").grad = None

    def clip(self) -> None:
        expected, got = (s.clip(MAX_NORM) for s in (self._whole, self._divided))
        if not _close(expected.double(), got):  # the norm of nothing is of any dtype
            self.wrong.append("the norm")

    def look_at_gradients(self) -> None:
        for name, param in self._whole.module.named_parameters():
            got = self._divided.opt.full_grad(name)
            if (got is None) != (param.grad is None):
                self.wrong.append(f"whether {name} has a gradient")
            elif got is not None and not _close(param.grad, got):  # type: ignore[arg-type]
                self.wrong.append(f"the gradient of {name}")

    def write_a_gradient(self) -> None:
        grad = 0.01 * noise(len(self.acts), 96, 96, of=0).double()
        for setup in (self._whole, self._divided):
            setup.module.get_parameter("branches.0.weight").grad = grad.clone()

    def scale_a_gradient(self) -> None:
        expected = self._whole.module.get_parameter("stem.weight")
        got = self._divided.opt.full_grad("stem.weight")
        if got is not None:
            self._divided.module.get_parameter("stem.weight").grad = 0.5 * got
        if expected.grad is not None:
            expected.grad = 0.5 * expected.grad

    def halve_a_gradient(self) -> None:
        for setup in (self._whole, self._divided):
            grad = setup.module.get_parameter("branches.2.weight").grad
            if grad is not None:
                grad.mul_(0.5)

    def halve_the_state(self) -> None:
        self.edit_state(self._whole.opt)

    @torch.no_grad()
    def evaluate(self) -> None:
        x = noise(len(self.acts), 2, 16, of=0).double()
        expected, got = (s.module(x, [0, 1, 2]) for s in (self._whole, self._divided))
        if not _close(expected, got):
            self.wrong.append("an output")

    # -------------------------------------------------------------------- what else a user does

    def _step_number(self) -> int:
        return 100 * self._seed + len(self.acts)

    def _clear_all(self) -> None:
        for setup in (self._whole, self._divided):
            setup.opt.zero_grad()

    def freeze(self) -> None:
        """While there are no gradients. The next pass goes through the root or a part of it."""
        self._clear_all()
        name = self.chance.choice(["branches.1", "branches.2", "never"])
        part, step = self.chance.choice(["all", "stem"]), self._step_number()
        self.say(name, part)
        for setup in (self._whole, self._divided):
            for param in setup.module.get_submodule(name).parameters():
                param.requires_grad_(not param.requires_grad)
        self._run(self._divided.module, part, step, rank())
        self._run_whole(part, step)
        self.step()
        self._clear_all()

    def evaluate_or_train(self) -> None:
        training = not self._divided.module.training
        for setup in (self._whole, self._divided):
            setup.module.train(training)

    def closure(self) -> None:
        part, step = "all", self._step_number()

        def evaluate() -> float:
            self._divided.opt.zero_grad()
            self._run(self._divided.module, part, step, rank())
            return 0.5

        if self._divided.opt.step(evaluate) != 0.5:
            self.wrong.append("the closure's loss")
        self._whole.opt.zero_grad()
        self._run_whole(part, step)
        self._whole.opt.step()

    def fail_and_recover(self) -> None:
        """A rank fails before the end of its backward pass, and all skip the batch."""
        self._clear_all()
        where, failing = self.chance.choice(["loader", "backward"]), self.chance.randrange(4)
        self.say(where, failing % world_size())
        head = self._divided.module.get_parameter("head.weight")
        hooks = []
        try:
            if failing % world_size() == rank():
                if where == "loader":
                    raise Broken
                hooks.append(head.register_post_accumulate_grad_hook(_raise))
            self._run(self._divided.module, "all", self._step_number(), rank())
            self._divided.opt.step()
            self.wrong.append("a step on a batch that failed")
        except (Broken, BatchSkippedError):
            self._divided.opt.recover()
        for hook in hooks:
            hook.remove()

    def reload(self) -> None:
        self._clear_all()
        opt, to = self._divided.opt, self.chance.randrange(world_size())
        opt.load_state_dict(consolidated(opt, to))

    def copy(self) -> None:
        """A copy of the model is a plain one, and has the same numbers."""
        copied = copy.deepcopy(self._divided.module)
        for number, (param, theirs) in enumerate(
            zip(copied.parameters(), self._whole.params, strict=True)
        ):
            if not _close(theirs, param):
                self.wrong.append(f"parameter {number} of a copy")

    def add_a_group(self) -> None:
        self._clear_all()
        for setup in (self._whole, self._divided):
            torch.manual_seed(len(self.acts))
            added = nn.Linear(8, 4).double()
            setup.module.register_module(f"added{len(self.acts)}", added)
            setup.opt.add_param_group({"params": list(added.parameters()), "lr": 0.01})


class Broken(Exception):
    """What a user's code raises."""


def _raise(param: Tensor) -> None:
    raise Broken
