"""The layout of a group is the one asked for, declared, known or probed, or there is none."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy_optimizers as toys
from on_ranks import on_ranks
from torch import optim
from torch.optim import Optimizer
from toy_optimizers import Simple

import shardstep.layouts.choose
from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep.layouts.choose import choose
from shardstep.layouts.probe import probe
from shardstep.layouts.recipe import OptimizerRecipe

FP32, BF16 = torch.float32, torch.bfloat16


def chosen(layout: str, cls: Any, world_size: int = 2, **options: Any) -> Any:
    params = [torch.nn.Parameter(torch.zeros(3, 3))]
    return choose(layout, OptimizerRecipe(cls, options), params, world_size)


class SaysWhole(Simple):
    shardstep_layout = "whole"


class SaysSliced(toys.TrustRatio):
    shardstep_layout = "sliced"


class SaysNonsense(Simple):
    shardstep_layout = "diagonal"


@dataclasses.dataclass
class Unhashable:
    cls: Any

    def __call__(self, groups: Any) -> Optimizer:
        return self.cls(groups, lr=0.1)


@pytest.mark.parametrize(
    ("layout", "cls", "expected"),
    [
        ("auto", optim.AdamW, "sliced"),
        ("whole", optim.AdamW, "whole"),
        ("auto", toys.Momentum, "sliced"),
        ("sliced", toys.Momentum, "sliced"),
        ("whole", toys.Momentum, "whole"),
        ("auto", toys.TrustRatio, "whole"),
        ("whole", toys.TrustRatio, "whole"),
        ("auto", SaysWhole, "whole"),
        ("auto", SaysSliced, "sliced"),
        ("whole", SaysSliced, "whole"),
        ("sliced", toys.Noisy, "sliced"),
        ("whole", toys.NoisyTrust, "whole"),
        ("whole", toys.TwoPhases, "whole"),
        ("sliced", toys.TwoPhases, "sliced"),
        ("auto", Unhashable(toys.Momentum), "sliced"),
    ],
)
def test_the_layout_is_the_one_asked_for_or_the_one_needed(
    layout: str, cls: Any, expected: str
) -> None:
    assert chosen(layout, cls).layout == expected


@pytest.mark.parametrize(
    ("layout", "cls", "message"),
    [
        (
            "sliced",
            toys.TrustRatio,
            "numbers of TrustRatio, which updates each tensor.*layout='whole'",
        ),
        ("sliced", toys.NoisyTrust, "would change the numbers of NoisyTrust"),
        ("sliced", SaysWhole, "SaysWhole declares that it needs layout='whole'"),
        ("auto", SaysNonsense, "shardstep_layout must be 'sliced' or 'whole', not 'diagonal'"),
        ("auto", toys.GlobalClip, "GlobalClip couples all parameters.*unsharded"),
        ("whole", toys.GlobalClip, "GlobalClip couples all parameters"),
        ("whole", toys.NoisyCoupled, "NoisyCoupled couples all parameters"),
        (
            "auto",
            toys.MovesThenEvaluates,
            "moves parameters before it evaluates its closure.*unsharded",
        ),
        ("auto", optim.LBFGS, "LBFGS couples all parameters.*closure more than once.*unsharded"),
        ("auto", toys.Noisy, "Noisy draws random numbers.*layout='sliced'.*seed each rank"),
        ("auto", toys.NoisyTrust, "NoisyTrust draws random numbers.*layout='whole'"),
        ("auto", toys.TwoPhases, "TwoPhases could not be probed.*first_step.*layout='whole'"),
    ],
)
def test_what_would_change_the_numbers_is_refused(layout: str, cls: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(layout, cls)


def test_what_the_class_says_of_its_options_reaches_the_user() -> None:
    with pytest.raises(TypeError, match="wings"):
        chosen("auto", optim.Muon, wings=2)


@pytest.mark.parametrize("cls", [toys.GlobalClip, toys.TwoPhases, toys.Noisy, optim.LBFGS])
def test_one_rank_takes_any_class_and_probes_none(
    cls: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardstep.layouts.choose, "probe", None)
    assert chosen("auto", cls, world_size=1).layout == "whole"


def test_a_class_with_equal_options_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Any] = []

    def counting(*args: Any) -> Any:
        probed.append(args)
        return probe(*args)

    monkeypatch.setattr(shardstep.layouts.choose, "probe", counting)
    for lr in (0.1, 0.1, torch.tensor(0.1), torch.tensor(0.1), 0.2):
        chosen("auto", toys.Momentum, lr=lr, nested={"a": [1, 2.0]})
    chosen("auto", toys.Momentum, lr=0.2, nested={"a": [True, 2.0]})
    assert len(probed) == 4


class Switch:
    on = False


def test_an_option_that_has_changed_is_probed_again() -> None:
    decides = toys.toy(
        "Decides", direction=lambda self, p, g, group: g / g.norm() if group["switch"].on else g
    )
    switch = Switch()
    assert chosen("auto", decides, switch=switch).layout == "sliced"
    switch.on = True
    assert chosen("auto", decides, switch=switch).layout == "whole"


@pytest.mark.parametrize(
    "naming",
    [lambda p: {p: 2.0}, lambda p: {id(p): 2.0}, lambda p: [{p}], lambda p: (1, [p])],
    ids=["keys", "ids", "a set", "a list"],
)
def test_options_that_name_parameters_are_refused(naming: Callable[..., Any]) -> None:
    params = [torch.nn.Parameter(torch.zeros(3, 3)) for _ in range(2)]
    message = "option 'scales' of Simple names parameters.*their own group"
    for options in ({"scales": naming(params[1])}, {}), ({}, {"scales": naming(params[1])}):
        with pytest.raises(ValueError, match=message):
            choose("auto", OptimizerRecipe(Simple, *options), params, 2)


def test_a_class_reads_the_attributes_of_parameters() -> None:
    reads = toys.by_direction("Reads", lambda p, g: g * getattr(p, "lr_scale", 1.0))
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight.lr_scale = 5.0
    before = module.weight.detach().clone()
    opt = ZeroRedundancyOptimizer(module.parameters(), reads, module=module, lr=0.1)
    module(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert torch.equal(module.weight, before.sub(torch.full((4, 4), 5.0), alpha=0.1))


# ---------------------------------------------------------------------------- sizes and steps


class FromSomeSize(Simple):
    """Looks at whole tensors, but only if they are large, or made up of blocks, or have many rows.

    As low-bit classes quantise, and as factored ones factor.
    """

    def __init__(
        self, params: Any, min_size: float = 1e9, block_size: float = 1e9, rows: int | None = None
    ) -> None:
        super().__init__(params, min_size=min_size, block_size=block_size)
        self.rows = rows or 10**9

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        blocks = p.numel() >= 4096 and p.numel() % group["block_size"] == 0
        many_rows = p.dim() == 2 and p.shape[0] >= self.rows
        large = p.numel() >= group["min_size"] or blocks or many_rows
        return grad / grad.abs().max() if large else grad


class From30000(FromSomeSize):
    def __init__(self, params: Any, min_size: int = 30_000) -> None:
        super().__init__(params, min_size)


class HidesItsSize(FromSomeSize):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{"min_size": 30_000, **options})


class HasItsSize(Simple):
    min_size = 30_000

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad / grad.norm() if p.numel() >= self.min_size else grad


@dataclasses.dataclass(frozen=True)
class Config:
    min_size: int


class TakesConfig(FromSomeSize):
    def __init__(self, params: Any, config: Config) -> None:
        super().__init__(params, config.min_size)


@pytest.mark.parametrize(
    ("cls", "options", "group_options", "size"),
    [
        (FromSomeSize, {"min_size": 50_000}, {}, 50_000),
        (FromSomeSize, {"min_size": 200_000.0}, {}, 200_000),
        (FromSomeSize, {}, {"min_size": 50_000}, 50_000),
        (FromSomeSize, {"block_size": 300}, {}, 300),
        (FromSomeSize, {"block_size": 2048}, {}, 2048),
        (FromSomeSize, {"block_size": 100_000}, {}, 100_000),
        (FromSomeSize, {"rows": 500}, {}, 500),
        (From30000, {}, {}, 30_000),
        (HidesItsSize, {}, {}, 30_000),
        (HasItsSize, {}, {}, 30_000),
        (TakesConfig, {"config": Config(28_000)}, {}, 28_000),
        (functools.partial(From30000, min_size=40_000), {}, {}, 40_000),
    ],
)
def test_a_class_is_tried_beyond_the_sizes_that_it_is_told(
    cls: Any, options: dict[str, Any], group_options: dict[str, Any], size: int
) -> None:
    def layout(largest: int) -> str:
        param = torch.nn.Parameter(torch.empty(largest))
        return choose("auto", OptimizerRecipe(cls, options, group_options), [param], 2).layout

    assert layout(size) == "whole"
    assert layout(size - 1) == "sliced"  # nothing here is as large as that


class FromSomeStep(Simple):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{"first": 10**9, "every": 10**9, **options})

    def before(self) -> None:
        if self.taken % self.param_groups[0]["every"] == 0:
            self.normalise(self.grads)

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad / grad.norm() if self.taken > group["first"] else grad


def test_a_class_is_tried_beyond_the_steps_that_it_is_told() -> None:
    assert chosen("auto", FromSomeStep).layout == "sliced"
    assert chosen("auto", FromSomeStep, first=100).layout == "whole"
    with pytest.raises(ValueError, match="couples all parameters"):
        chosen("auto", FromSomeStep, every=50)


def test_numbers_that_are_no_sizes_cost_nothing() -> None:
    numbers = {"steps": 10**9, "warmup": 100, "seed": -7, "eps": 1e-8, "far": float("inf")}
    group_options = {"on": True, "nested": (512, [1000.0]), "half": 300.5, "no": float("nan")}
    assert OptimizerRecipe(Simple, numbers, group_options).numbers(2**40).sizes == (512, 1000)
    later_python = toys.toy("LaterPython", __firstlineno__=300)
    assert OptimizerRecipe(later_python).numbers(2**40) == ((), 0)


# ---------------------------------------------------------------------- what makes optimizers


class HandsOn(Optimizer):
    """Never calls the base class, as wrappers that offload to the CPU do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.inner = [torch.optim.SGD([p], lr) for group in params for p in group["params"]]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for opt in self.inner for group in opt.param_groups]

    def step(self, closure: Any = None) -> None:
        for opt in self.inner:
            opt.step()


def test_an_optimizer_that_keeps_its_state_elsewhere_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    message = "HandsOn does not keep state and param_groups as a torch"
    with pytest.raises(ValueError, match=message):
        chosen("auto", HandsOn)
    with pytest.raises(ValueError, match=message):  # nor on one rank, where nothing is probed
        ZeroRedundancyOptimizer([param], HandsOn, layout="whole")
    groups = [
        {"params": [param], "optimizer_class": HandsOn},
        {"params": [torch.nn.Parameter(torch.ones(3))]},
    ]
    with pytest.raises(ValueError, match=message):  # nor as one of several
        ZeroRedundancyOptimizer(groups, torch.optim.SGD, layout="whole")


def made_by_a_function(groups: Any, **options: Any) -> Optimizer:
    return SaysWhole(groups, **options)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(SaysWhole, lr=0.2),
        functools.partial(functools.partial(SaysWhole, lr=0.2), lr=0.3),
        made_by_a_function,
        lambda groups: SaysWhole(groups),
        Unhashable(SaysWhole),
    ],
    ids=["partial", "partial of a partial", "function", "lambda", "object"],
)
def test_what_a_class_says_is_believed_however_it_is_made(make: Any) -> None:
    assert chosen("auto", make).layout == "whole"
    with pytest.raises(ValueError, match="declares that it needs layout='whole'"):
        chosen("sliced", make)


def test_a_function_may_make_more_of_a_class_that_is_known() -> None:
    def clipping(groups: Any) -> Optimizer:
        opt = optim.SGD(groups, lr=0.1)
        params = [p for group in opt.param_groups for p in group["params"]]

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)

        opt.register_step_pre_hook(clip)
        return opt

    with pytest.raises(ValueError, match="couples all parameters"):
        chosen("auto", clipping)


class DividesItsWork(Simple):
    """Updates every second parameter on each of two ranks, as distributed versions of Muon do."""

    def before(self) -> None:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if p.grad is not None and number % 2 != dist.get_rank():
                    p.grad.zero_()
                if p.grad is not None:
                    dist.all_reduce(p.grad)


@on_ranks(2, raises=ValueError, match="a step communicates with other ranks")
def test_a_class_that_divides_its_work_among_ranks_is_refused() -> None:
    params = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    ZeroRedundancyOptimizer(params, DividesItsWork)


def test_random_numbers_for_one_dtype_are_refused_whatever_another_needs() -> None:
    mixed = toys.by_direction(
        "Mixed", lambda p, g: g + torch.rand_like(g) if p.dtype is BF16 else g / g.norm()
    )
    params = [torch.zeros(8, 8, dtype=dtype, requires_grad=True) for dtype in (FP32, BF16)]
    with pytest.raises(ValueError, match=r"draws random numbers.*layout='whole'"):
        choose("auto", OptimizerRecipe(mixed), params, 2)


class KeepsFirstDtype(Simple):
    """Keeps the dtype of its first parameter in the group."""

    def before(self) -> None:
        for group in self.param_groups:
            for p in group["params"][:1]:
                group["eps"] = torch.finfo(p.dtype).eps


@pytest.mark.parametrize(
    ("cls", "layout"), [(KeepsFirstDtype, "sliced"), (optim.Adafactor, "whole")]
)
def test_a_class_that_treats_dtypes_of_a_group_otherwise_together_is_refused(
    cls: Any, layout: str
) -> None:
    """Adafactor derives its epsilon from the first tensor of a group."""
    params = [torch.zeros(8, 8, dtype=dtype, requires_grad=True) for dtype in (FP32, BF16)]
    plain = OptimizerRecipe(cls)
    with pytest.raises(ValueError, match="give each dtype its own group"):
        choose("auto", plain, params, 2)
    # It is the same together and apart in groups of one dtype.
    assert choose("auto", plain, params[:1], 2).layout == layout
    assert choose("auto", plain, params, 2, MixedPrecision()).layout == layout


def test_dtypes_that_do_not_matter_may_be_in_one_group() -> None:
    """Adafactor with a given epsilon."""
    params = [torch.zeros(8, 8, dtype=dtype, requires_grad=True) for dtype in (FP32, BF16)]
    told = OptimizerRecipe(optim.Adafactor, {"eps": (1e-8, 1e-3)})
    assert choose("auto", told, params, 2).layout == "whole"
    assert choose("auto", OptimizerRecipe(Simple), params, 2).layout == "sliced"
