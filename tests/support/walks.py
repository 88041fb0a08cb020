"""What walks through calls in any order have in common: chance, a record of acts, and a verdict.

A walk does things by chance to a divided optimizer and to one that is whole, and stops where the
two differ. All that is left to chance comes from one seed, the same on every rank, so a walk that
went wrong is gone again by its seed alone; its acts say what it did on the way.
"""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import from_rank, rank, world_size
from problems import Case, difference
from torch import Tensor, nn
from torch.optim import Optimizer

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint
from shardstep.local.multi_class import MultiClass
from shardstep.params.stochastic_rounding import StochasticRounding

Act = Callable[[], object]


class Walk:
    """Acts that are done by chance, as long as all agrees.

    Args:
        seed: of all that is left to chance, the same on every rank.

    Attributes:
        chance: where all chance comes from.
        acts: what was done so far.
        wrong: what did not agree.
    """

    _whole: Any
    _divided: Any
    _schedulers: list[Any]

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.acts: list[str] = []
        self.wrong: list[str] = []

    @property
    def optimizer(self) -> ZeroRedundancyOptimizer:
        """The divided optimizer."""
        return getattr(self._divided, "opt", self._divided)

    def modules(self) -> tuple[nn.Module, nn.Module]:
        """The module that is whole and the one that is divided."""
        raise NotImplementedError

    def weights(self) -> dict[Act, float]:
        """What may be done, and how often."""
        raise NotImplementedError

    def check(self) -> None:
        """Note what does not agree."""
        raise NotImplementedError

    def leave(self) -> None:
        """Take off whatever is attached."""

    def go(self, steps: int) -> None:
        """Do so many things, unless something goes wrong before."""
        weights = self.weights()
        while steps and not self.wrong:
            self.do_one_of(weights)
            steps -= 1
        self.leave()

    def do_one_of(self, weights: dict[Act, float]) -> None:
        """Do one of these things, and see whether all agrees."""
        act = self.chance.choices(list(weights), list(weights.values()))[0]
        self.acts.append(getattr(act, "__name__", str(act)))
        act()
        self.check()

    def say(self, *what: object) -> None:
        """Add to the record of what is being done."""
        self.acts[-1] += " " + " ".join(map(str, what))

    def often(self, probability: float) -> bool:
        """Whether something happens that does so with this probability."""
        return self.chance.random() < probability

    def compare(self, what: str, expected: Any, got: Any) -> None:
        """Note a difference in form or bits."""
        found = difference(expected, got)
        if found is not None:
            self.wrong.append(f"{what}{found}")

    @torch.no_grad()
    def write(self) -> None:
        """Write to a parameter, or give it other memory."""
        modules = self.modules()
        name = self.chance.choice([name for name, _ in modules[0].named_parameters()])
        kind = self.chance.choice(["copy", "data", "element", "load", "new", "moved", "all"])
        self.say(name, kind)
        for module in modules:
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
        """Give all parameters other values, and then their own again."""
        anew = self.often(0.3)
        self.say("data" if anew else "values")
        for module in self.modules():
            kept = [param.detach().clone() for param in module.parameters()]
            for param, value in zip(module.parameters(), kept, strict=True):
                param.copy_(0.5 * value)
            for param, value in zip(module.parameters(), kept, strict=True):
                if anew:
                    param.data = value
                else:
                    param.copy_(value)

    def hook(self) -> None:
        """From now on, a hook halves the gradient of a parameter in each pass."""
        modules = self.modules()
        name = self.chance.choice([name for name, p in modules[0].named_parameters()])
        self.say(name)
        for module in modules:
            param = module.get_parameter(name)
            if param.requires_grad:
                param.register_hook(lambda grad: 0.5 * grad)
                param.register_post_accumulate_grad_hook(lambda param: None)

    def edit_state(self, whole: Optimizer) -> None:
        """Halve what both optimizers keep of their parameters."""
        for opt in (whole, self.optimizer):
            for param in list(opt.state):
                for key, value in opt.state[param].items():
                    if isinstance(value, Tensor) and key != "step":
                        value.mul_(0.5)

    def edit_groups(self) -> None:
        """Edit the groups by hand, in ways that change nothing or an option for a plain class."""
        whole = getattr(self._whole, "opt", self._whole)
        whole, divided = getattr(whole, "optim", whole), self.optimizer
        kind = self.chance.choice(["rebind", "replace", "add", "delete", "lr"])
        self.say(kind)
        if kind == "rebind":
            divided.param_groups = [dict(group) for group in divided.param_groups]
        elif kind == "replace":
            first = divided.param_groups[0]
            divided.param_groups[0] = {**first, "params": list(first["params"])}
        for opt in (whole, divided):
            group = opt.param_groups[0]
            if kind == "add":
                group["initial_lr"] = 3.0
            elif kind == "delete":
                group.pop("initial_lr", None)
            elif kind == "lr":
                group["lr"] = 0.8 * group["lr"]
        self.compare("options", *(sorted(opt.param_groups[0]) for opt in (whole, divided)))

    def schedule(self) -> None:
        """Let the schedulers of both optimizers take a step."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for scheduler in self._schedulers:
                scheduler.step()

    def hear(self, source: int) -> None:
        """Let all ranks know what one of them found, so that none goes on alone."""
        self.wrong = from_rank(source, self.wrong)


def plain(value: Any) -> Any:
    """The same with every tensor in plain order.

    State follows its parameter into another memory format, where a whole optimizer's stays as it
    was made.
    """
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def walked(make: Callable[[int], Walk], seeds: Iterable[int], steps: int) -> list[str]:
    """Go the walks of these seeds, up to the first that goes wrong, and tell of that."""
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


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class Whole:
    """An unsharded optimizer that keeps what it steps on in place of 16-bit parameters by hand.

    Args:
        groups: parameter groups; each may name a class of its own.
        case: the class of the others, and its options.
        policy: what is done about 16-bit parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], case: Case, policy: MixedPrecision) -> None:
        self._policy = policy
        self._rounding = StochasticRounding(policy.seed)
        self._params: list[Tensor] = []
        self._stepped_on: list[Tensor] = []
        made = [self._widened(group) for group in groups]
        if any("optimizer_class" in group for group in groups):
            self.optim: Optimizer = MultiClass(made, case.optimizer_class, **case.fresh_options())
        else:
            self.optim = case.optimizer_class(made, **case.fresh_options())

    def _widened(self, group: dict[str, Any]) -> dict[str, Any]:
        params = group["params"]
        inner = [self._inner(param) for param in params]
        self._params += params
        self._stepped_on += inner
        return {**group, "params": inner}

    def _inner(self, param: Tensor) -> Tensor:
        wide = self._policy.step_dtype(param.dtype)
        return param if wide == param.dtype else nn.Parameter(param.detach().to(wide))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @property
    def masters(self) -> dict[int, Tensor]:
        """What is stepped on in place of a parameter, by number of the parameter."""
        if self._policy.stochastic_rounding:
            return {}
        self.follow()
        return {
            number: inner.detach()
            for number, (param, inner) in enumerate(self._pairs())
            if inner is not param
        }

    def state_of(self, number: int) -> dict[str, Any]:
        return dict(self.optim.state.get(self._stepped_on[number], {}))

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(self._widened(group))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._params, self._stepped_on, strict=True))

    @torch.no_grad()
    def follow(self) -> None:
        """Where a parameter is not the rounding of its master, it was written to.

        The divided optimizer sees to that before each step, and where state is asked for.
        """
        for param, inner in self._pairs():
            if inner is not param:
                if inner.stride() != param.stride():
                    inner.data = torch.empty_like(param, dtype=inner.dtype).copy_(inner)
                bits = torch.int16 if param.itemsize == 2 else torch.int32
                same = inner.to(param.dtype).view(bits) == param.view(bits)
                every_time = self._policy.stochastic_rounding
                inner.copy_(param if every_time else torch.where(same, inner, param))

    def _take_gradients(self) -> None:
        for param, inner in self._pairs():
            if inner is not param:
                inner.grad = None if param.grad is None else param.grad.to(inner.dtype)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.follow()
        self._take_gradients()
        kwargs: dict[str, Any] = {}
        if closure is not None:
            given = closure

            def evaluate() -> float:
                loss = given()
                self._take_gradients()
                return loss

            kwargs["closure"] = evaluate
        loss: float | None = self.optim.step(**kwargs)
        self._rounding.step += 1
        for number, (param, inner) in enumerate(self._pairs()):
            if inner is param:
                continue
            if self._policy.stochastic_rounding:
                self._rounding.round_into(
                    _in_memory_order(param), _in_memory_order(inner), number, 0
                )
            else:
                param.data.copy_(inner.detach())
        return loss

    def snapshot(self) -> Any:
        """All that a step changes."""
        self.follow()
        tensors = [tensor.detach().clone() for pair in self._pairs() for tensor in pair]
        states = [copy.deepcopy(self.state_of(number)) for number in range(len(tensors) // 2)]
        return tensors, states, self._rounding.step

    def restore(self, before: Any) -> None:
        """Go back to a snapshot; not by loading, which casts state."""
        tensors, states, self._rounding.step = before
        for tensor, values in zip(
            (t for pair in self._pairs() for t in pair), tensors, strict=True
        ):
            tensor.data.copy_(values)
        for inner, state in zip(self._stepped_on, states, strict=True):
            self.optim.state.pop(inner, None)
            if state:
                self.optim.state[inner] = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach().zero_()


class SavingWalk(Walk):
    """A walk that saves the divided optimizer on its way, and goes on with what it loads.

    Those that are such a walk have the optimizers `_divided` and `_whole`.
    """

    _divided: ZeroRedundancyOptimizer
    _whole: Whole

    def _make(self) -> ZeroRedundancyOptimizer:
        """Another divided optimizer."""
        raise NotImplementedError

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """The parameters of the whole one, each with that of the divided one."""
        raise NotImplementedError

    def renew(self) -> None:
        """Often, go on with another divided optimizer."""
        if self.often(0.7):
            self._divided.detach()
            self._divided = self._make()

    def save_to(self, path: Path, model: nn.Module | None, train: Act) -> None:
        """Save, at once or while `train` goes on; both are where it was saved afterwards."""
        if self.often(0.5):
            self._whole.follow()
            checkpoint.save(path, self._divided, model)
            return
        self.say("in the background")
        handle = checkpoint.async_save(path, self._divided, model)
        before = self._whole.snapshot()
        train()
        handle.wait()
        self._whole.restore(before)
        if model is None:
            for theirs, mine in self._pairs():
                mine.data.copy_(theirs.data)


@contextlib.contextmanager
def common_folder() -> Iterator[Path]:
    """A folder that all ranks know, for as long as all of them need it."""
    path = from_rank(0, tempfile.mkdtemp(prefix="walk-") if rank() == 0 else None)
    yield Path(path)
    if world_size() > 1:
        dist.barrier()
    if rank() == 0:
        shutil.rmtree(path)


FUSED_OR_FOREACH = ("fused", "foreach", "capturable")


def is_plain(case: Case) -> bool:
    """Whether a class computes one tensor at a time, so that any form of gradients and state do."""
    return not any(case.options.get(option) for option in FUSED_OR_FOREACH)
