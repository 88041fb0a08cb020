"""Whatever is done around DDP, in whichever order, the numbers are DDP's with the whole optimizer.

Seeded walks: a drop-in optimizer beside DDP, and each way of stepping inside of its backward. Both
sides have a DDP module of their own with the same buckets, so that gradients are equal to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_ways import HOOKS, expected, groups_of, in_ddp, overlapping, set_up
from models import PROBLEMS, Kind, Setup, consolidated, world_size
from problems import Case, same_bits
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import lr_scheduler
from walks import Act, Walk, Whole, plain

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

KINDS: list[Kind] = [
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.05}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01, "fused": True}),
    (optim.RMSprop, {"lr": 0.003, "momentum": 0.5}),
    (optim.Adafactor, {"lr": 0.01}),
]
POLICIES = [
    MixedPrecision(master_dtype=None),
    MixedPrecision(),
    MixedPrecision(master_dtype=torch.float64),
    MixedPrecision(master_dtype=None, stochastic_rounding=True, seed=2),
]


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest, with options of their own."""
    params = list(module.parameters())
    flat = [param for param in params if param.dim() < 2]
    return [{"params": [p for p in params if p.dim() > 1]}, {"params": flat, "lr": 0.02}]


def _add_in_rank_order(grads: Tensor) -> torch.futures.Future[Tensor]:
    """Reduce gradients as `register` does."""
    own = grads * (1.0 / world_size())
    parts = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(parts, own)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(functools.reduce(torch.add, parts))
    return done


def groups_in(given: list[Any]) -> list[dict[str, Any]]:
    """What was given as groups or as parameters, as groups."""
    return given if isinstance(given[0], dict) else [{"params": given}]


def _muon(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    matrices = [param for param in params if param.dim() == 2]
    rest = [param for param in params if param.dim() != 2]
    return [{"params": matrices, "optimizer_class": optim.Muon, "lr": 0.02}, {"params": rest}]


class BesideDDP(Walk):
    """A walk over a module in DDP.

    Args:
        seed: of all that is left to chance.
        way: how the divided optimizer is used: "drop-in", or one of the ways of stepping within
            backward.
    """

    def __init__(self, seed: int, way: str) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)
        self._seed, self._way = seed, way
        self._within = way != "drop-in"
        self._name = self.chance.choice(["conv", "branching", "branching", "mlp", "mixed dtypes"])
        self._problem = PROBLEMS[self._name]
        kind = self.chance.choice(KINDS)
        if kind[0] is optim.Adafactor and self._name == "mixed dtypes":
            kind = KINDS[0]  # its numbers depend on the first dtype in a group, and it is refused
        groups: Callable[[nn.Module], list[Any]] = self.chance.choice([_groups, groups_of, _muon])
        self._view = self.often(0.3)
        self._find_unused = self._problem.find_unused or self.often(0.5)
        ddp = {
            "gradient_as_bucket_view": self._view,
            "find_unused_parameters": self._find_unused,
        }
        # Gradients that are reduced to their owners are added up in the masters' dtype.
        policy = self.chance.choice(POLICIES[:1] if way == "register" else POLICIES)
        zero = {
            "precision": policy,
            "bucket_bytes": self.chance.choice([1, 20000, None]),
            "layout": "auto" if groups is _muon else self.chance.choice(["auto", "whole"]),
        }
        module = self._problem.fresh()
        # The hook divides by the number of ranks, where DDP itself multiplies.
        comm_hook: Any = allreduce_hook if way in HOOKS else None
        if way == "register" and world_size() > 2:
            comm_hook = lambda _, bucket: _add_in_rank_order(bucket.buffer())  # noqa: E731
        self._whole = expected(copy.deepcopy(module), kind, comm_hook=comm_hook, **ddp)
        self._by_hand = Whole(groups_in(groups(self._whole.module)), Case(*kind), policy)
        self._whole.opt = self._by_hand
        if self._within:
            self._divided = overlapping(way, module, kind, groups, zero=zero, **ddp)
        else:
            zero["parameters_as_bucket_view"] = self.often(0.5)
            model = in_ddp(module, **ddp)
            opt: Any = ZeroRedundancyOptimizer(groups(module), kind[0], **zero, **kind[1])
            self._divided = set_up(model, opt)
        self._both = (self._whole, self._divided)
        self._schedulers = [
            lr_scheduler.ExponentialLR(opt, 0.9) for opt in (self._by_hand.optim, self._divided.opt)
        ]
        self.acts.append(f"{way} {self._name} {kind} {groups.__name__} {ddp} {zero}")

    def modules(self) -> tuple[nn.Module, nn.Module]:
        return self._whole.module, self._divided.module

    def weights(self) -> dict[Act, float]:
        common: dict[Act, float] = {
            self.backward: 8,
            self.accumulate: 3,
            self.clear: 3,
            self.schedule: 1,
            self.option: 1,
            self.edit_groups: 0.7,
            self.evaluate_or_train: 0.5,
            self.copy: 0.3,
            self.write: 1,
            self.evaluate: 1,
            self.look: 1,
            self.halve_the_state: 0.5,
            self.swap: 0.7,
            self.hook: 0.5,
        }
        if self._find_unused:
            common[self.freeze] = 1.5
        if self._within:
            return common
        return {
            **common,
            self.step: 8,
            self.closure: 1,
            self.clip: 1,
            self.drop_a_gradient: 1,
            self.replace_a_gradient: 1,
            self.reload: 0.7,
        }

    def check(self) -> None:
        pairs = zip(*(setup.module.named_parameters() for setup in self._both), strict=True)
        for (name, theirs), (_, mine) in pairs:
            if not same_bits(theirs, mine):
                self.wrong.append(f"{name}: {(theirs != mine).sum()} other values")
            if self._way != "register" and (theirs.grad is None) != (mine.grad is None):
                self.wrong.append(f"whether {name} has a gradient")

    # -------------------------------------------------------------------------------- backward

    def _pass(self, held_back: bool = False) -> None:
        step = 50 * self._seed + len(self.acts)
        losses: list[Tensor] = []
        for setup in self._both:
            with setup.no_sync() if held_back else contextlib.nullcontext():
                loss = self._problem.loss(setup.model, step)
                loss.backward()
            losses.append(loss.detach())
        if self._within and not held_back:
            self._whole.opt.step()
            self._divided.opt.step()
        self.compare("loss", *losses)

    def backward(self) -> None:
        if self._way == "register":
            self.clear()
        self._pass()

    def accumulate(self) -> None:
        if self._way == "register":
            self.clear()
        for _ in range(self.chance.randint(1, 2)):
            self._pass(held_back=True)
        self._pass()  # or DDP would look for gradients that were cleared

    # ------------------------------------------------------------------------ what may follow

    def clear(self) -> None:
        given_back = self._way != "register"  # or gradients can be cleared in one way only
        to_none, by_module = self.often(0.6) or not given_back, self.often(0.4) and given_back
        for setup in self._both:
            (setup.module if by_module else setup.opt).zero_grad(set_to_none=to_none)

    def step(self) -> None:
        for setup in self._both:
            setup.opt.step()

    def closure(self) -> None:
        step = 50 * self._seed + len(self.acts)

        def of(setup: Setup) -> Callable[[], float]:
            def evaluate() -> float:
                setup.opt.zero_grad()
                loss = self._problem.loss(setup.model, step)
                loss.backward()
                return loss.item()

            return evaluate

        self.compare("loss", *(setup.opt.step(of(setup)) for setup in self._both))

    def clip(self) -> None:
        norms = [
            nn.utils.clip_grad_norm_(setup.module.parameters(), 0.05)
            if self._name != "mixed dtypes"
            else torch.zeros(())
            for setup in self._both
        ]
        self.compare("norm", *norms)

    def _some_parameter(self) -> str:
        names = [name for name, _ in self._whole.module.named_parameters()]
        name = self.chance.choice(names)
        self.say(name)
        return name

    def drop_a_gradient(self) -> None:
        name = self._some_parameter()
        for setup in self._both:
            setup.module.get_parameter(name).grad = None

    def replace_a_gradient(self) -> None:
        name = self._some_parameter()
        for setup in self._both:
            param = setup.module.get_parameter(name)
            if param.grad is not None and not self._view:
                param.grad = param.grad * 0.5

    def freeze(self) -> None:
        """While there are no gradients, as DDP wants it."""
        name = self._some_parameter()
        for setup in self._both:
            setup.opt.zero_grad()
            param = setup.module.get_parameter(name)
            param.requires_grad_(not param.requires_grad)

    def halve_the_state(self) -> None:
        self.edit_state(self._by_hand.optim)

    def option(self) -> None:
        number = self.chance.randrange(len(self._whole.opt.param_groups))
        for setup in self._both:
            group = setup.opt.param_groups[number]
            group["lr"] = 0.7 * group["lr"]
            if "weight_decay" in group:
                group["weight_decay"] = 0.02

    def evaluate_or_train(self) -> None:
        for setup in self._both:
            setup.model.train(not setup.model.training)

    def copy(self) -> None:
        """A copy of the model is a plain one, and has the same numbers."""
        copied = copy.deepcopy(self._divided.module).state_dict()
        self.compare("copy", plain(self._whole.module.state_dict()), plain(copied))

    @torch.no_grad()
    def evaluate(self) -> None:
        step = 50 * self._seed + len(self.acts)
        self.compare("output", *(self._problem.loss(s.model, step) for s in self._both))

    def look(self) -> None:
        params = (param for group in self._divided.opt.param_groups for param in group["params"])
        for number, param in enumerate(params):
            got = self._divided.opt.full_state(param)
            self.compare(f"state of {number}", plain(self._by_hand.state_of(number)), plain(got))

    def reload(self) -> None:
        opt = self._divided.opt
        opt.load_state_dict(consolidated(opt, 1))
