"""The modes of walks: a drop-in without a model, `module=`, and DDP."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp_ways import HOOKS, WAYS, overlapping, set_up
from models import PROBLEMS, in_ddp, with_ddp, world_size
from problems import ELEMENT_WISE, Case
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from walk_module import WithModule
from walks import (
    ALWAYS,
    BF16,
    FP16,
    FP32,
    FP64,
    NO_MASTERS,
    ROUNDING,
    WITH_MODEL,
    WITH_STEP,
    Walk,
    turned,
)

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

# --------------------------------------------------------------------- parameters without a model

CASES = [
    case
    for case in ELEMENT_WISE
    if not (case.options.get("fused") and case.optimizer_class is optim.SGD)
]
# On momenta of 16 bits torch's foreach SGD computes otherwise while one of them is yet to begin.
# What Adagrad starts from is not a number of 16 bits, and what never trained is saved with those.
LOW_CASES = [
    case
    for case in CASES
    if not ("momentum" in case.options and "foreach" in case.options)
    and "initial_accumulator_value" not in case.options
]
WHOLE = Case(optim.Adafactor, {"lr": 0.01, "eps": (1e-8, 1e-3)})
SHAPES: list[tuple[int, ...]] = [
    *((), (0,), (1,), (7,), (64,), (300,), (640,)),
    *((131, 17), (53, 17), (67, 61), (20, 30), (3, 0, 2)),
    *((2, 3, 5, 7), (8, 4, 3, 3)),
]


class Bare(nn.Module):
    """Parameters only; the first has two names."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        for number, param in enumerate(params):
            self.register_parameter(f"w{number}", param)
        self.register_parameter("tied", params[0])


class WithoutModel(Walk):
    """A drop-in over parameters of all forms, with gradients that are equal on all ranks."""

    def __init__(self, seed: int, low: bool = False) -> None:
        super().__init__(seed)
        self._low = low
        self.weights = {**ALWAYS, **WITH_STEP, "add": 0.4, "turn": 0.7}
        wider = MixedPrecision(master_dtype=FP64)
        policies = [MixedPrecision(), ROUNDING, MixedPrecision(), NO_MASTERS, wider]
        self.policy = self.in_turn(policies if low else [NO_MASTERS])
        self.case = WHOLE if self.often(0.1) else self.chance.choice(LOW_CASES if low else CASES)
        params = [self.new_param() for _ in range(self.chance.randint(2, 9))]
        model = Bare(params)
        self.models = model, copy.deepcopy(model)
        names = [f"w{number}" for number in range(len(params))]
        count = min(len(names), self.chance.randint(1, 3))
        cuts = sorted(self.chance.sample(range(len(names)), count))
        parts = [names[a:b] for a, b in zip([0, *cuts[1:]], [*cuts[1:], None], strict=True)]
        self.groups = [(part, self._group_options()) for part in parts]
        if self.often(0.2):
            self._give_matrices_to_muon()
        self.acts.append(f"{self.case} {self.policy} {self.groups}")
        self.start()

    def _give_matrices_to_muon(self) -> None:
        named = dict(self.models[0].named_parameters())
        matrices = [n for n, p in named.items() if p.dim() == 2 and not p.is_complex()]
        rest = [([n for n in part if n not in matrices], own) for part, own in self.groups]
        self.groups = [(part, own) for part, own in rest if part]
        if matrices:
            muon = {"optimizer_class": optim.Muon, "lr": 0.02, "weight_decay": 0.1}
            self.groups.insert(self.chance.randint(0, len(self.groups)), (matrices, muon))

    @property
    def one_tensor_at_a_time(self) -> bool:
        return super().one_tensor_at_a_time and self.case is not WHOLE

    def new_param(self) -> nn.Parameter:
        shape = self.chance.choice(SHAPES)
        if self.case is WHOLE and 0 in shape:
            shape = (5, 6)  # Adafactor divides by the number of elements
        dtype = FP32
        if self._low and self.often(0.7):
            dtype = self.chance.choice([BF16, BF16, FP16])
        elif self.one_tensor_at_a_time and self.often(0.1):
            dtype = self.chance.choice([torch.complex64, FP64])
        values = self.noise(shape, dtype)
        if len(shape) in (2, 4) and self.often(0.3):
            values = turned(values)
        return nn.Parameter(values, requires_grad=self.often(0.9))

    def _group_options(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.often(0.5) and not isinstance(self.case.options.get("lr"), Tensor):
            own["lr"] = self.chance.choice([0.004, 0.02])
        if self.often(0.3) and self.case is not WHOLE and "weight_decay" in self.case.options:
            own["weight_decay"] = 0.03
        return own

    def make(self) -> ZeroRedundancyOptimizer:
        element_wise = self.case is not WHOLE and not any(
            "optimizer_class" in own for _, own in self.groups
        )
        return ZeroRedundancyOptimizer(
            self.grouped(self.models[1]),
            self.case.optimizer_class,
            parameters_as_bucket_view=self.often(0.5),
            layout=self.chance.choice(["auto", "sliced", "whole"] if element_wise else ["auto"]),
            bucket_bytes=self.chance.choice([1, 3000, None]),
            precision=self.policy,
            **self.case.fresh_options(),
        )

    def check(self) -> None:
        super().check()
        for name, expected, got in self.pairs():
            self.compare(f"gradient of {name}", expected.grad, got.grad)

    def backward(self) -> None:
        """Set gradients, clear them, add to them, or leave them."""
        for _, expected, got in self.pairs():
            kind = self.chance.choice(["new", "new", "new", "new", "none", "zero", "add", "leave"])
            if not expected.requires_grad and not self.often(0.03):
                continue
            if kind == "none":
                expected.grad = got.grad = None
            elif kind == "new":
                grad = torch.empty_like(expected).copy_(self.noise(expected.shape, expected.dtype))
                # In 16 bits torch rounds otherwise where gradient and parameter lie differently.
                wide = self.policy.step_dtype(expected.dtype).itemsize > 2
                if self.one_tensor_at_a_time and wide and self.often(0.2):
                    grad = grad.contiguous() if self.often(0.5) else turned(grad)
                expected.grad, got.grad = grad.clone(), grad.clone()
            elif expected.grad is not None and got.grad is not None:
                more = self.noise(expected.shape, expected.dtype)
                for grad in (expected.grad, got.grad):
                    if kind == "zero":
                        grad.zero_()
                    elif kind == "add":
                        grad += more

    def evaluations(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        grads = [self.noise(param.shape, param.dtype) for _, param, _ in self.pairs()]

        def evaluate(model: nn.Module) -> float:
            for param, grad in zip(model.parameters(), grads, strict=True):
                if param.requires_grad:
                    param.grad = torch.empty_like(param).copy_(grad)
            return 0.25

        return partial(evaluate, self.models[0]), partial(evaluate, self.models[1])


# --------------------------------------------------------------------------------------------- DDP

DDP_CASES = [
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    Case(optim.SGD, {"lr": 0.05}),
    Case(optim.AdamW, {"lr": 0.01}),
    Case(optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    Case(optim.AdamW, {"lr": 0.01, "fused": True}),
    Case(optim.RMSprop, {"lr": 0.003, "momentum": 0.5}),
    Case(optim.Adafactor, {"lr": 0.01}),
]
DDP_POLICIES = [NO_MASTERS, MixedPrecision(), MixedPrecision(master_dtype=FP64), ROUNDING]


def _add_in_rank_order(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """Reduce gradients as `register` does."""
    own = bucket.buffer() * (1.0 / world_size())
    parts = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(parts, own)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(functools.reduce(torch.add, parts))
    return done


class WithDDP(Walk):
    """A drop-in under DDP, or a step inside DDP's backward, next to DDP with the same buckets.

    Args:
        seed: of all that is left to chance.
        way: "drop-in", or a way to step inside backward.
    """

    def __init__(self, seed: int, way: str) -> None:
        super().__init__(seed)
        self._way, self._inside = way, way in WAYS
        self.weights = {**ALWAYS, **WITH_MODEL, "accumulate": 3}
        if not self._inside:
            self.weights |= {**WITH_STEP, "add": 0.4}
        self._name = self.in_turn(["branching", "mixed dtypes", "conv", "mlp", "branching"])
        self._problem = PROBLEMS[self._name]
        self.case = self.chance.choice(DDP_CASES)
        if self.case.optimizer_class is optim.Adafactor and self._name == "mixed dtypes":
            self.case = DDP_CASES[0]  # numbers depend on the first dtype in a group: it is refused
        self._view = self.often(0.3)
        self._find_unused = self._problem.find_unused or self.often(0.5)
        ddp = {
            "gradient_as_bucket_view": self._view,
            "find_unused_parameters": self._find_unused,
        }
        # Gradients that are reduced to their owners are added up in the masters' dtype.
        self.policy = self.in_turn(DDP_POLICIES[:1] if way == "register" else DDP_POLICIES)
        module = self._problem.fresh()
        kind = self.chance.choice(["one", "two", "muon"])
        self.groups = self._group_names(module, kind)
        self._later = [] if self._inside or kind == "one" else [self.groups.pop()]
        zero = {
            "precision": self.policy,
            "bucket_bytes": self.chance.choice([1, 20000, None]),
            "layout": "auto" if kind == "muon" else self.chance.choice(["auto", "whole"]),
        }
        # The hook divides by the number of ranks, where DDP itself multiplies.
        comm_hook: Any = allreduce_hook if way in HOOKS else None
        if way == "register" and world_size() > 2:
            comm_hook = _add_in_rank_order
        self._setups = [with_ddp(copy.deepcopy(module), comm_hook=comm_hook, **ddp)]
        pair = (self.case.optimizer_class, self.case.fresh_options())
        if self._inside:
            self._setups.append(overlapping(way, module, pair, self.grouped, zero=zero, **ddp))
        else:
            zero["parameters_as_bucket_view"] = self.often(0.5)
            model = in_ddp(module, **ddp)
            opt: Any = ZeroRedundancyOptimizer(self.grouped(module), pair[0], **zero, **pair[1])
            self._setups.append(set_up(model, opt))
        self.models = self._setups[0].module, self._setups[1].module
        self.acts.append(f"{way} {self._name} {self.case} {kind} {ddp} {zero}")
        self.start()

    @staticmethod
    def _group_names(module: nn.Module, kind: str) -> list[tuple[list[str], dict[str, Any]]]:
        named = list(module.named_parameters())
        if kind == "one":
            return [([name for name, _ in named], {})]
        matrices = [n for n, p in named if (p.dim() == 2 if kind == "muon" else p.dim() > 1)]
        rest = [name for name, _ in named if name not in matrices]
        if kind == "muon":
            return [(matrices, {"optimizer_class": optim.Muon, "lr": 0.02}), (rest, {})]
        return [(matrices, {}), (rest, {"lr": 0.02})]

    def make(self) -> ZeroRedundancyOptimizer:
        return self._setups[1].opt

    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        later = [name for names, _ in self._later for name in names]
        return [pair for pair in super().pairs() if pair[0] not in later]

    def add(self) -> None:
        """Add parameters that DDP knows, and the optimizer did not until now."""
        if self._later:
            names, options = self._later.pop()
            for model, opt in zip(self.models, (self.unsharded, self.sharded), strict=True):
                model.zero_grad()
                params = [model.get_parameter(name) for name in names]
                opt.add_param_group({"params": params, **options})
            self.groups.append((names, options))
            self.new_schedulers()

    def _renew(self) -> None:
        """Stay with the optimizer that DDP knows."""

    def check(self) -> None:
        super().check()
        for name, expected, got in self.pairs():
            if self._way != "register" and (expected.grad is None) != (got.grad is None):
                self.wrong.append(f"whether {name} has a gradient")

    def loss(self, number: int, step: int | None = None) -> Tensor:
        step = self.step_number if step is None else step
        return self._problem.loss(self._setups[number].model, step)

    def _pass(self, held_back: bool = False) -> None:
        losses = []
        for number, setup in enumerate(self._setups):
            with setup.no_sync() if held_back else contextlib.nullcontext():
                losses.append(self.loss(number))
                losses[-1].backward()
        if self._inside and not held_back:
            self.step()
        self.compare("loss", losses[0].detach(), losses[1].detach())

    def backward(self) -> None:
        if self._way == "register":
            self.clear_all()
        self._pass()

    def iterate(self) -> None:
        if self._inside:
            self.backward()  # which takes the step
        else:
            super().iterate()

    def accumulate(self) -> None:
        if self._way == "register":
            self.clear_all()
        for _ in range(self.chance.randint(1, 2)):
            self._pass(held_back=True)
        self._pass()  # or DDP would look for gradients that were cleared

    def evaluations(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def evaluate(number: int) -> float:
            loss = self.loss(number)
            loss.backward()
            return loss.item()

        return partial(evaluate, 0), partial(evaluate, 1)

    def clear(self) -> None:
        if self._way == "register":
            self.clear_all()  # there is one way to clear its gradients
        else:
            super().clear()

    def replace_a_gradient(self) -> None:
        if not self._view:
            super().replace_a_gradient()

    def clip(self) -> None:
        if self._name != "mixed dtypes":
            super().clip()

    def freeze(self) -> None:
        if self._find_unused:
            super().freeze()

    def before_a_change(self) -> None:
        self.clear_all()  # DDP has no gradients when parameters are frozen


MODES: dict[str, Callable[[int], Walk]] = {
    "drop-in 32 bits": WithoutModel,
    "drop-in 16 bits": partial(WithoutModel, low=True),
    "module 32 bits": WithModule,
    "module 16 bits": partial(WithModule, low=True),
    **{f"DDP {way}": partial(WithDDP, way=way) for way in ("drop-in", *WAYS)},
}
