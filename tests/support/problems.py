"""What several test files train on, and how they compare: every class with its options, parameters
of awkward shapes, gradients that are equal on all ranks, and a comparison down to the bit."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from shardstep import ZeroRedundancyOptimizer

LAYOUTS = ("sliced", "whole")


class OneByOne(Optimizer):
    """Calls `update` for each parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, self.state[param], group["lr"])

    def update(self, p: Any, state: Any, lr: float) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Case:
    """An optimizer class with a set of its options."""

    optimizer_class: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> bool:
        """Whether gradients may be missing: torch's fused SGD cannot start momenta one by one."""
        return not (self.optimizer_class is optim.SGD and self.options.get("fused"))

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.optimizer_class.__name__}({options})"

    def fresh_options(self) -> dict[str, Any]:
        """The options, with tensors that no other optimizer shares."""
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.options.items()
        }


_OPTIONS: dict[type[Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.8, "dampening": 0.3, "maximize": True},
        {"momentum": 0.9, "foreach": True, "weight_decay": 0.1},
        {"fused": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True},
        {"momentum": 0.9, "lr": torch.tensor(0.01)},
    ],
    optim.Adam: [
        {},
        {"amsgrad": True},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"foreach": True},
        {"foreach": True, "amsgrad": True, "weight_decay": 0.1},
        {"fused": True},
        {"fused": True, "amsgrad": True, "weight_decay": 0.1, "maximize": True},
        {"fused": True, "capturable": True},
        {"lr": torch.tensor(0.003)},
        {"lr": torch.tensor(0.003), "fused": True},
        {"betas": (torch.tensor(0.8), torch.tensor(0.95)), "lr": torch.tensor(0.003)},
    ],
    optim.AdamW: [
        {},
        {"amsgrad": True, "maximize": True},
        {"foreach": True},
        {"fused": True, "betas": (0.8, 0.95), "eps": 1e-6},
        {"lr": torch.tensor(0.003)},
    ],
    optim.Adamax: [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"foreach": True, "weight_decay": 0.1},
        {"lr": torch.tensor(0.003)},
    ],
    optim.NAdam: [
        {},
        {"weight_decay": 0.1, "momentum_decay": 0.01},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        {"foreach": True},
        {"foreach": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    optim.RAdam: [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        {"foreach": True},
        {"foreach": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    optim.Adadelta: [
        {},
        {"weight_decay": 0.1, "rho": 0.8, "maximize": True},
        {"foreach": True, "weight_decay": 0.1},
    ],
    optim.Adagrad: [
        {},
        {"lr_decay": 0.01, "weight_decay": 0.1},
        {"initial_accumulator_value": 0.1, "maximize": True},
        {"foreach": True, "lr_decay": 0.01},
        {"fused": True, "initial_accumulator_value": 0.1, "weight_decay": 0.1},
    ],
    optim.ASGD: [
        {},
        {"t0": 5, "lambd": 0.01, "alpha": 0.5},
        {"t0": 5, "weight_decay": 0.1, "maximize": True},
        {"t0": 5, "foreach": True},
    ],
    optim.RMSprop: [
        {},
        {"centered": True},
        {"momentum": 0.9, "alpha": 0.9},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True},
        {"foreach": True},
        {"foreach": True, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    ],
    optim.Rprop: [
        {},
        {"etas": (0.4, 1.3), "step_sizes": (1e-5, 10), "maximize": True},
        {"foreach": True},
    ],
}

ELEMENT_WISE: list[Case] = [Case(cls, opts) for cls, each in _OPTIONS.items() for opts in each]
"""Every element-wise class of `torch.optim` with the options that change what it computes."""

SHAPES: list[tuple[int, ...]] = [
    (131, 131),
    (),
    (7,),
    (0,),
    (1,),
    (53, 17),
    (61, 67),
    (64,),
    (2, 3, 5, 7),
    (3, 0, 2),
    (1009,),
]
FROZEN = (5, 7)
"""Which of the parameters do not train."""


def make_params(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    frozen: Iterable[int] = FROZEN,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    seed: int = 0,
) -> list[torch.nn.Parameter]:
    """Parameters with the given shapes, their dtypes in turn, the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(
            torch.randn(shape, generator=random).to(dtypes[number % len(dtypes)]),
            requires_grad=number not in tuple(frozen),
        )
        for number, shape in enumerate(shapes)
    ]


def make_groups(
    params: Sequence[torch.nn.Parameter], optimizer_class: Callable[..., Optimizer]
) -> list[dict[str, Any]]:
    """Three groups, two of them with options of their own."""
    takes = inspect.signature(optimizer_class).parameters
    decay = {"weight_decay": 0.05} if "weight_decay" in takes else {"lr": 0.0021}
    return [
        {"params": list(params[0::3])},
        {"params": list(params[1::3]), "lr": 0.0042},
        {"params": list(params[2::3]), **decay},
    ]


def set_gradients(params: Sequence[torch.Tensor], step: int, *, missing: bool = True) -> None:
    """Give every trainable parameter a gradient that depends on the step alone.

    At each step some have none, if `missing`, but everyone has one sooner or later. The gradient
    lies in memory as its parameter does.
    """
    form = tuple((param.shape, param.dtype) for param in params)
    for number, (param, values) in enumerate(zip(params, _gradients(form, step), strict=True)):
        absent = missing and (3 * number + step) % 5 == 0
        if not param.requires_grad or absent:
            param.grad = None
        else:
            param.grad = torch.empty_like(param).copy_(values)


@functools.cache
def _gradients(form: tuple[tuple[torch.Size, torch.dtype], ...], step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=random, dtype=dtype) for shape, dtype in form]


def train(
    opt: Any, params: Sequence[torch.Tensor], steps: range, *, missing: bool = True
) -> list[torch.Tensor]:
    """Take `steps` and return copies of the parameters."""
    for step in steps:
        set_gradients(params, step, missing=missing)
        opt.step()
    return copies(params)


def copies(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


def same_bits(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Equal form and equal bytes: stricter than `torch.equal`, which takes -0.0 for 0.0."""
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return False
    # A single element counts as contiguous whatever its stride, and has no view as bytes then.
    expected, got = (
        tensor.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        for tensor in (expected, got)
    )
    return torch.equal(expected, got)


def differing(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of the tensors that are not the same to the bit."""
    pairs = enumerate(zip(expected, got, strict=True))
    return [number for number, (a, b) in pairs if not same_bits(a, b)]


def assert_same(
    expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor], what: Any = ""
) -> None:
    """Check that no tensor differs by a bit."""
    assert not (numbers := differing(expected, got)), f"{what}: other values in {numbers}"


def assert_alike(expected: Any, got: Any, what: Any = "") -> None:
    """Check that there is no `difference`."""
    assert not (found := difference(expected, got)), f"{what}: {found}"


def difference(expected: Any, got: Any, path: str = "") -> str | None:
    """The first difference between two values in type, order of keys, form or bits; or None."""
    if type(expected) is not type(got):
        return f"{path}: a {type(expected).__name__} came as a {type(got).__name__}"
    if isinstance(expected, torch.Tensor):
        for what in ("dtype", "device", "shape", "layout", "requires_grad"):
            if getattr(expected, what) != getattr(got, what):
                return f"{path}: {what} {getattr(expected, what)} came as {getattr(got, what)}"
        if expected.stride() != got.stride() and expected.numel() > 1:
            return f"{path}: stride {expected.stride()} came as {got.stride()}"
        return None if same_bits(expected, got) else f"{path}: other values"
    if isinstance(expected, dict):
        if list(expected) != list(got):
            return f"{path}: keys {list(expected)} came as {list(got)}"
        inner = [(f"{path}[{key!r}]", value, got[key]) for key, value in expected.items()]
    elif isinstance(expected, (list, tuple, deque)):
        if len(expected) != len(got):
            return f"{path}: {len(expected)} entries came as {len(got)}"
        pairs = zip(expected, got, strict=True)
        inner = [(f"{path}[{number}]", a, b) for number, (a, b) in enumerate(pairs)]
    else:
        return None if expected == got else f"{path}: {expected!r} came as {got!r}"
    return next((found for p, a, b in inner if (found := difference(a, b, p))), None)


# --------------------------------------------------- an unsharded class, and a drop-in of it

COMBINATIONS = tuple(itertools.product(LAYOUTS, (False, True)))
"""Each layout without and with parameters that are views of buckets."""

Params = list[nn.Parameter]


def in_turn(number: int) -> list[tuple[str, bool]]:
    """Both layouts, one of them with bucket views; for the next number the other one."""
    return [(layout, (number + turn) % 2 == 0) for turn, layout in enumerate(LAYOUTS)]


def follow(
    script: Callable[[Any, Params], Any],
    case: Case,
    make: Callable[[], Params] = make_params,
    given: Callable[[Params], Any] = lambda params: params,
    combinations: Iterable[tuple[str, bool]] = COMBINATIONS,
    unsharded: Callable[..., Any] | None = None,
    to: int = 0,
    **options: Any,
) -> None:
    """Compare what `script` returns, parameters, and the state that is consolidated.

    Args:
        script: Takes an optimizer and parameters.
        case: The class of the optimizer.
        make: Makes the parameters.
        given: Returns what the optimizer is given of them.
        combinations: Layouts, and whether parameters are views of buckets.
        unsharded: What takes the place of the class, and has no state to compare.
        to: The rank to which the state is consolidated.
        **options: Further options of the drop-in.
    """
    params = make()
    plain = (unsharded or case.optimizer_class)(given(params), **case.fresh_options())
    returned, expected = script(plain, params), copies(params)
    for layout, view in combinations:
        params = make()
        opt = ZeroRedundancyOptimizer(
            given(params),
            case.optimizer_class,
            layout=layout,
            parameters_as_bucket_view=view,
            **options,
            **case.fresh_options(),
        )
        what = f"{case}, layout {layout}, view {view}"
        assert_alike(returned, script(opt, params), what)
        assert_same(expected, params, what)
        opt.consolidate_state_dict(to=to)
        if opt.rank == to and unsharded is None:
            state = plain.state_dict()
            state["state"] = dict(sorted(state["state"].items()))
            assert_alike(state, opt.state_dict(), what)
