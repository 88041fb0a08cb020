"""Walks: calls in any order on a sharded optimizer and on an unsharded one, while both agree.

A walk draws everything from one seed, the same on every rank, so the seed repeats it. Each act is
written once, for all modes. `walk_modes` has the modes: where gradients come from, and which acts
are possible.
"""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from by_hand import ByHand
from models import consolidated, from_rank, rank, world_size
from problems import Case, copies, difference
from torch import Tensor, nn
from torch.optim import lr_scheduler

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint

T = TypeVar("T")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NO_MASTERS = MixedPrecision(master_dtype=None)
ROUNDING = MixedPrecision(master_dtype=None, stochastic_rounding=True, seed=3)

ALWAYS: dict[str, float] = {
    **{"backward": 8, "clear": 3, "freeze": 1.5, "option": 1, "edit_groups": 0.7, "schedule": 1},
    **{"write": 2, "swap": 0.7, "copy": 0.3, "halve_the_state": 0.5, "look": 1},
    **{"consolidate": 0.5, "reload": 0.7, "save": 0.5, "exchange": 0.5},
}
"""Acts that are possible in every mode, with their frequencies."""

WITH_STEP: dict[str, float] = {
    **{"step": 8, "closure": 1, "closure_that_raises": 0.5, "clip": 1},
    **{"drop_a_gradient": 0.7, "replace_a_gradient": 0.7, "halve_a_gradient": 0.5},
}
"""Acts that are possible where the loop says when a step is taken."""

WITH_MODEL: dict[str, float] = {"evaluate": 1, "evaluate_or_train": 0.5, "hook": 0.5}

EVERY = 3
"""Each so many acts, the next of all acts in turn is done, whatever its weight."""


class Broken(Exception):
    """What a user's code raises."""


def fail(*args: object) -> NoReturn:
    """Raise as a user's code may."""
    raise Broken


class Walk:
    """Acts on two equal models, done by chance as long as the models agree.

    A mode sets the attributes below `acts`, and defines the methods that raise here.

    Args:
        seed: of all that is left to chance.

    Attributes:
        acts: the names of the acts so far, with their choices.
        wrong: differences.
        models: the module of the unsharded optimizer, and that of the sharded one.
        unsharded, sharded: the optimizers.
        case: their class and its options.
        policy: what is done about 16-bit parameters.
        groups: the names and the options of each parameter group.
        weights: the acts that are possible, each with its frequency.
    """

    models: tuple[nn.Module, nn.Module]
    unsharded: ByHand
    sharded: ZeroRedundancyOptimizer
    case: Case
    policy: MixedPrecision
    groups: list[tuple[list[str], dict[str, Any]]]
    weights: dict[str, float]

    def __init__(self, seed: int) -> None:
        warnings.filterwarnings("ignore", "the loaded state|.*resumes? from zero|.*from zero")
        torch.manual_seed(seed)
        self.seed = seed
        self.chance = random.Random(seed)
        self.acts: list[str] = []
        self.wrong: list[str] = []

    # ------------------------------------------------------------------------ defined by a mode

    def make(self) -> ZeroRedundancyOptimizer:
        """Return another sharded optimizer for the second model."""
        raise NotImplementedError

    def backward(self) -> None:
        """Give both models gradients."""
        raise NotImplementedError

    def iterate(self) -> None:
        """Give both models gradients, and take a step."""
        self.backward()
        self.step()

    def evaluations(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return a closure for each optimizer."""
        raise NotImplementedError

    def loss(self, number: int) -> Tensor:
        """Return the loss of one of the models on a batch."""
        raise NotImplementedError

    def new_param(self) -> nn.Parameter:
        """Return a parameter to add to the models."""
        return nn.Parameter(self.noise(self.chance.choice([(7,), (131, 17), (300,)])))

    def send(self, plain_stay: bool = False) -> None:
        """Reduce gradients of the unsharded model that were held back, or assigned.

        With `plain_stay`, torch is about to change gradients. It leaves those that were assigned
        as they are if there are no others to reduce.
        """

    def assign(self, param: nn.Parameter, grad: Tensor | None) -> None:
        """Assign a gradient to a parameter of the unsharded model, or clear it."""
        param.grad = grad

    def before_a_change(self) -> None:
        """Do what is due before a parameter is frozen or moved."""

    def leave(self) -> None:
        """Undo the construction of the sharded optimizer."""

    # ------------------------------------------------------------------------------- the machine

    def go(self, steps: int) -> None:
        """Do so many acts, unless something goes wrong before."""
        names = sorted(self.weights)
        for number in range(steps):
            turn = (steps // EVERY) * self.seed + number // EVERY
            always = names[turn % len(names)] if number % EVERY == EVERY - 1 else None
            self.do(always or self.chance.choices(names, [self.weights[n] for n in names])[0])
            if self.wrong:
                return
        self.leave()

    def do(self, act: str) -> None:
        """Do one act, and compare."""
        self.acts.append(act)
        getattr(self, act)()
        self.check()

    def say(self, *what: object) -> None:
        """Add to the record of the act."""
        self.acts[-1] += " " + " ".join(map(str, what))

    def often(self, probability: float) -> bool:
        """Return whether something happens that has this probability."""
        return self.chance.random() < probability

    def in_turn(self, choices: Sequence[T]) -> T:
        """Return another choice for each of several seeds in a row."""
        return choices[self.seed % len(choices)]

    def noise(self, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return random numbers, the same on every rank."""
        generator = torch.Generator().manual_seed(self.chance.getrandbits(40))
        return torch.randn(tuple(shape), generator=generator).to(dtype)

    def compare(self, what: str, expected: Any, got: Any) -> None:
        """Note a difference in form or bits."""
        if found := difference(contiguous(expected), contiguous(got)):
            self.wrong.append(f"{what}{found}")

    @property
    def step_number(self) -> int:
        return 100 * self.seed + len(self.acts)

    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """Return the name of each parameter, and the parameter in both models."""
        first, second = (dict(model.named_parameters()) for model in self.models)
        return [(name, param, second[name]) for name, param in first.items()]

    def grouped(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the parameter groups of a model."""
        return [
            {"params": [model.get_parameter(name) for name in names], **options}
            for names, options in self.groups
        ]

    def start(self) -> None:
        """Construct both optimizers."""
        self.unsharded = ByHand(self.grouped(self.models[0]), self.case, self.policy)
        self.sharded = self.make()
        self.new_schedulers()

    def some(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return one parameter of both models."""
        name, *both = self.chance.choice(self.pairs())
        self.say(name)
        return both[0], both[1]

    def check(self) -> None:
        """Compare parameters and, where they are not sharded, gradients."""
        for name, expected, got in self.pairs():
            if expected.data.stride() != got.data.stride() and expected.numel() > 1:
                self.wrong.append(f"the stride of {name}")
            self.compare(name, expected.data, got.data)

    # ------------------------------------------------------------------------ gradients and steps

    def step(self) -> None:
        self.send()
        for opt in (self.unsharded, self.sharded):
            opt.step()

    def closure(self) -> None:
        """Evaluate new gradients in the step."""
        self.clear_all()
        expected, got = self.evaluations()
        self.compare("loss", self.unsharded.step(expected), self.sharded.step(got))

    def closure_that_raises(self) -> None:
        """Let all ranks catch an error of the closure, before it has evaluated anything."""
        self.clear_all()
        for opt in (self.unsharded, self.sharded):
            with contextlib.suppress(Broken):
                opt.step(fail)
                self.wrong.append("a closure that raised made a step")

    def clear(self) -> None:
        self.send()
        to_none, by_module = self.often(0.6), self.often(0.4)
        self.say(to_none, by_module)
        for model, opt in zip(self.models, (self.unsharded, self.sharded), strict=True):
            (model if by_module else opt).zero_grad(set_to_none=to_none)

    def clear_all(self) -> None:
        self.send()
        for opt in (self.unsharded, self.sharded):
            opt.zero_grad()

    def clip(self) -> None:
        # The largest element is the same in any order, and torch knows none of nothing.
        every = all(param.numel() for _, param, _ in self.pairs())
        norm = self.chance.choice([torch.inf if every else 3.0, *self.norms])
        self.say(norm)
        self.send(plain_stay=True)
        expected, got = (
            nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm) for model in self.models
        )
        self.compare("norm", expected.double(), got.double())

    norms: tuple[float, ...] = (1.0, 2.0)

    def drop_a_gradient(self) -> None:
        expected, got = self.some()
        self.assign(expected, None)
        got.grad = None

    def replace_a_gradient(self) -> None:
        expected, got = self.some()
        if expected.requires_grad:
            grad = torch.empty_like(expected).copy_(self.noise(expected.shape, expected.dtype))
            self.assign(expected, grad.clone())
            got.grad = grad.clone()

    def halve_a_gradient(self) -> None:
        expected, got = self.some()
        if got.grad is not None:
            self.send(plain_stay=True)  # as the sharded model does
        for param in (expected, got):
            if param.grad is not None:
                param.grad.mul_(0.5)

    def hook(self) -> None:
        """Register hooks that halve the gradient of a parameter in each pass from now on."""
        for param in self.some():
            if param.requires_grad:
                param.register_hook(lambda grad: 0.5 * grad)
                param.register_post_accumulate_grad_hook(lambda param: None)

    # ------------------------------------------------------------------------------- parameters

    @torch.no_grad()
    def write(self) -> None:
        """Write to a parameter, or give it other memory."""
        name = self.chance.choice(self.pairs())[0]
        kind = self.chance.choice(["copy", "data", "element", "load", "new", "moved", "all"])
        self.say(name, kind)
        for module in self.models:
            param = module.get_parameter(name)
            if kind == "copy":
                param.copy_(0.9 * param)
            elif kind == "data":
                param.data.mul_(0.9)
            elif kind == "element" and param.numel():
                param.data[(0,) * param.dim()] = 0.25
            elif kind == "load":
                module.load_state_dict({name: 0.9 * param}, strict=False)
            elif kind == "new":
                param.data = 0.9 * param.data
            elif kind == "moved":
                param.data = param.data.clone()
            elif kind == "all":
                module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()})

    @torch.no_grad()
    def swap(self) -> None:
        """Give all parameters other values, and then back their own."""
        by_data = self.often(0.3)
        self.say("data" if by_data else "values")
        for module in self.models:
            kept = [param.detach().clone() for param in module.parameters()]
            for param, value in zip(module.parameters(), kept, strict=True):
                param.copy_(0.5 * value)
            for param, value in zip(module.parameters(), kept, strict=True):
                if by_data:
                    param.data = value
                else:
                    param.copy_(value)

    def freeze(self) -> None:
        """Freeze a parameter, or let it train again."""
        self.before_a_change()
        for param in self.some():
            param.requires_grad_(not param.requires_grad)

    def turn(self) -> None:
        """Give a parameter another memory format."""
        self.before_a_change()
        expected, got = self.some()
        if self.one_tensor_at_a_time and self.policy.step_dtype(got.dtype).itemsize > 2:
            expected.data, got.data = turned(expected.data), turned(got.data)

    @property
    def one_tensor_at_a_time(self) -> bool:
        """Whether the class takes gradients and state that lie in memory in another way."""
        return not any(self.case.options.get(key) for key in ("fused", "foreach", "capturable"))

    def add(self) -> None:
        """Add parameters to the models, in a group of their own."""
        self.before_a_change()
        options: dict[str, Any] = {"lr": 0.002}
        params = [self.new_param() for _ in range(self.chance.randint(1, 2))]
        for model, opt in zip(self.models, (self.unsharded, self.sharded), strict=True):
            added = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in params]
            names = [f"added{len(self.groups)}{letter}" for letter in "ab"[: len(params)]]
            for name, param in zip(names, added, strict=True):
                model.register_parameter(name, param)
            opt.add_param_group({"params": added, **options})
        self.groups.append((names, options))
        self.new_schedulers()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.compare("loss", self.loss(0), self.loss(1))

    def evaluate_or_train(self) -> None:
        for model in self.models:
            model.train(not model.training)

    def copy(self) -> None:
        """Copy the model: the copy is plain, and has the same numbers."""
        copied = copy.deepcopy(self.models[1])
        assert {type(param) for param in copied.parameters()} == {nn.Parameter}
        self.compare("copy", self.models[0].state_dict(), copied.state_dict())

    # ---------------------------------------------------------------------------------- options

    def option(self) -> None:
        number = self.chance.randrange(len(self.unsharded.param_groups))
        value = self.chance.choice([0.001, 0.03])
        for opt in (self.unsharded, self.sharded):
            group = opt.param_groups[number]
            group["lr"] = torch.tensor(value) if isinstance(group["lr"], Tensor) else value
            if "weight_decay" in group:
                group["weight_decay"] = 2 * value

    def edit_groups(self) -> None:
        """Rebind groups, which changes nothing, or add, delete and change an option."""
        kind = self.chance.choice(["rebind", "replace", "add", "delete", "lr"])
        self.say(kind)
        if kind == "rebind":
            self.sharded.param_groups = [dict(group) for group in self.sharded.param_groups]
        elif kind == "replace":
            first = self.sharded.param_groups[0]
            self.sharded.param_groups[0] = {**first, "params": list(first["params"])}
        groups = [opt.param_groups[0] for opt in (self.unsharded, self.sharded)]
        for group in groups:
            if kind == "add":
                group["initial_lr"] = 3.0
            elif kind == "delete":
                group.pop("initial_lr", None)
            elif kind == "lr":
                group["lr"] = 0.8 * group["lr"]
        self.compare("options", *(sorted(group) for group in groups))

    def new_schedulers(self) -> None:
        opts = (self.unsharded.optim, self.sharded)
        self._schedulers = [lr_scheduler.ExponentialLR(opt, 0.9) for opt in opts]

    def schedule(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for scheduler in self._schedulers:
                scheduler.step()

    # ------------------------------------------------------------------------------------- state

    def halve_the_state(self) -> None:
        for opt in (self.unsharded.optim, self.sharded):
            for param in list(opt.state):
                for key, value in opt.state[param].items():
                    if isinstance(value, Tensor) and key != "step":
                        value.mul_(0.5)

    def look(self) -> None:
        """Ask for the whole state and the master of each parameter."""
        masters = self.unsharded.masters
        for name, expected, got in self.pairs():
            # What is frozen may have state from before it had a wider tensor.
            if got.requires_grad or got.dtype == self.policy.step_dtype(got.dtype):
                state = self.sharded.full_state(got)
                self.compare(f"state of {name}", self.unsharded.state_of(expected), state)
            master = self.sharded.full_master(got)
            if expected in masters and master is not None:  # or it did not train yet
                self.compare(f"master of {name}", masters[expected].detach(), master)

    def consolidate(self) -> None:
        to = self.chance.randrange(self.sharded.world_size)
        self.unsharded.follow()
        self.sharded.consolidate_state_dict(to)
        if self.sharded.rank == to:
            got = self.sharded.state_dict()
            got.pop("masters", None)
            got.pop("rounding_step", None)
            expected = self.unsharded.optim.state_dict()
            expected["state"] = dict(sorted(expected["state"].items()))
            # A class may add options where state is loaded.
            for whole, group in zip(expected["param_groups"], got["param_groups"], strict=True):
                for key in group.keys() - whole.keys():
                    del group[key]
            if not self.unsharded.widened:
                self.compare("state dict", expected, got)
        self.wrong = from_rank(to, self.wrong)

    def _renew(self) -> None:
        """Often, go on with another sharded optimizer."""
        if self.often(0.7):
            self.sharded.detach()
            self.sharded = self.make()

    def reload(self) -> None:
        """Load what the sharded optimizer saves, perhaps into another one."""
        self.before_a_change()
        self.unsharded.follow()
        saved = consolidated(self.sharded, self.chance.randrange(world_size()))
        self._renew()
        self.sharded.load_state_dict(saved)
        self.new_schedulers()

    def exchange(self) -> None:
        """Load what the unsharded optimizer saves. It has no masters to save."""
        if not self.unsharded.widened:
            self.before_a_change()
            saved = copy.deepcopy(self.unsharded.optim.state_dict())
            self._renew()
            self.sharded.load_state_dict(saved)
            self.new_schedulers()

    def save(self) -> None:
        """Save to a folder, at once or while training goes on, and load from it."""
        self.before_a_change()
        module = self.models[1] if self.often(0.5) else None
        background = self.often(0.5)
        self.say("with the model" * bool(module), "in the background" * background)
        with _common_folder() as folder:
            self.unsharded.follow()
            if background:
                handle = checkpoint.async_save(folder / "saved", self.sharded, module)
                before, buffers = self.unsharded.snapshot(), copies(self.models[0].buffers())
                self.iterate()
                handle.wait()
                self.unsharded.restore(before)
                self.clear_all()
                for _, expected, got in self.pairs() if module is None else ():
                    got.data.copy_(expected.data)
                for buffer, value in zip(self.models[0].buffers(), buffers, strict=True):
                    buffer.copy_(value if module else buffer)
            else:
                checkpoint.save(folder / "saved", self.sharded, module)
            self._renew()
            checkpoint.load(folder / "saved", self.sharded, module)
        for buffer in self.models[0].buffers() if module else ():
            buffer.copy_(from_rank(0, buffer))  # DDP does so before the next forward pass
        self.new_schedulers()


def contiguous(value: Any) -> Any:
    """Return a copy with every tensor contiguous.

    State follows its parameter into another memory format, where an unsharded optimizer's does not.
    """
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: contiguous(inner) for key, inner in value.items()}
    return [contiguous(inner) for inner in value] if isinstance(value, list) else value


def turned(tensor: Tensor) -> Tensor:
    """Return the same values in another order in memory, if there is one."""
    if tensor.dim() == 4 and tensor.is_contiguous():
        return tensor.contiguous(memory_format=torch.channels_last)
    if tensor.dim() == 2 and tensor.is_contiguous():
        return tensor.t().contiguous().t()
    return tensor.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def _common_folder() -> Iterator[Path]:
    """Yield a folder that all ranks know, for as long as all of them need it."""
    path = from_rank(0, tempfile.mkdtemp(prefix="walk-") if rank() == 0 else None)
    yield Path(path)
    if world_size() > 1:
        dist.barrier()
    if rank() == 0:
        shutil.rmtree(path)


def walked(make: Callable[[int], Walk], seeds: Iterable[int], steps: int) -> list[str]:
    """Go the walks of these seeds, up to the first that goes wrong, and return how it did."""
    for seed in seeds:
        walk = make(seed)
        try:
            walk.go(steps)
        except Exception as error:
            error.add_note(f"seed {seed}: {', '.join(walk.acts)}")
            raise
        if walk.wrong:
            return [f"seed {seed}", *walk.wrong, *walk.acts]
    return []
