"""One matrix: what a training loop may do, in every mode of the optimizer, compared with DDP.

A scenario is a loop. It runs once on DDP with the unsharded optimizer and once in each mode; what
it returned, the parameters and the buffers must be the same to the bit. `SCENARIOS` has them by
name, `REFUSED` the pairs of scenario and mode that raise instead.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp_ways import HOOKS, WAYS, overlapping
from doubles import behind_the_door
from models import (
    ADAMW,
    MLP_PROBLEM,
    SGD,
    Groups,
    Kind,
    Problem,
    Setup,
    groups_of,
    train,
    with_ddp,
    with_plain,
    world_size,
)
from problems import copies, differing
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

Options = dict[str, Any]

DROP_IN = ("drop-in", "drop-in views")
MODULE = ("module", "module without overlap")
APART = (*DROP_IN, *MODULE)
"""Modes in which the loop says when a step is taken. In the others backward takes it."""
ALL = (*APART, *WAYS)

LAYOUTS = [{"layout": "sliced"}, {"layout": "whole"}]
IN_DDP: list[tuple[Options, Options]] = [
    ({}, {"gradient_as_bucket_view": True}),
    ({}, {"gradient_as_bucket_view": False}),
]
VARIANTS: dict[str, list[tuple[Options, Options]]] = {
    **{
        mode: [(layout, ddp) for layout in LAYOUTS for _, ddp in IN_DDP]
        for mode in ("drop-in", "drop-in views")
    },
    "module": [
        ({"layout": "sliced", "bucket_bytes": 1}, {}),
        ({"layout": "whole", "bucket_bytes": 200_000}, {}),
        ({"layout": "whole", "bucket_bytes": 1}, {}),
        ({"layout": "sliced", "bucket_bytes": 1 << 30}, {}),
    ],
    "module without overlap": [
        ({"layout": "whole", "bucket_bytes": 1}, {}),
        ({"layout": "sliced", "bucket_bytes": 200_000}, {}),
    ],
    "register": IN_DDP,
    **{
        way: [({"shard_buckets": shard}, ddp) for shard in (False, True) for _, ddp in IN_DDP]
        for way in HOOKS
    },
}
"""Options of the optimizer and of DDP that must not change a number, for each mode."""


def fresh(kind: Kind) -> Kind:
    """The same class and options, with tensors that no other optimizer shares."""
    return kind[0], copy.deepcopy(kind[1])


def unsharded(module: nn.Module, kind: Kind, groups: Groups = groups_of, **ddp: Any) -> Setup:
    """DDP and the optimizer; without a process group, the optimizer."""
    if dist.is_initialized():
        return with_ddp(module, fresh(kind), groups, **ddp)
    return with_plain(module, fresh(kind), groups)


def sharded(
    mode: str,
    module: nn.Module,
    kind: Kind = ADAMW,
    groups: Groups = groups_of,
    zero: Options | None = None,
    **ddp: Any,
) -> Setup:
    """Return what trains `module` in `mode`."""
    kind, zero = fresh(kind), {"bucket_bytes": 1, **(zero or {})}
    if mode in WAYS:
        ddp["shard_buckets"] = zero.pop("shard_buckets", False)
        if group := ddp.get("process_group"):
            zero["process_group"] = group
            ddp["state"] = lambda: group
        return overlapping(mode, module, kind, groups, zero=zero, **ddp)
    opt: Any
    if mode in MODULE:
        zero |= {key: ddp[key] for key in ("broadcast_buffers", "process_group") if key in ddp}
        zero.setdefault("precision", MixedPrecision(master_dtype=None))
        opt = ZeroRedundancyOptimizer(
            groups(module), kind[0], module=module, overlap=mode == "module", **zero, **kind[1]
        )
        return Setup(module, module, opt, opt.no_sync, opt.clip_grad_norm_)
    setup = unsharded(module, kind, groups, **ddp)
    zero["parameters_as_bucket_view"] = mode == "drop-in views"
    if "process_group" in ddp:
        zero["process_group"] = ddp["process_group"]
    setup.opt = opt = ZeroRedundancyOptimizer(groups(module), kind[0], **zero, **kind[1])
    setup.clip = opt.clip_grad_norm_
    return setup


def renew(setup: Setup) -> None:
    """Make DDP again, as it must be whenever the parameters that train have changed."""
    if isinstance(setup.model, DistributedDataParallel):
        setup.model = model = DistributedDataParallel(setup.module)
        setup.no_sync = model.no_sync


New = Callable[..., Setup]
"""Makes a setup: of the scenario's problem, class and groups, unless it is given others."""


@dataclass(frozen=True)
class Scenario:
    """A loop, and what it is run on.

    Attributes:
        loop: takes a setup, or `New` if it has `many`; returns tensors to compare.
        problem: the model and its batches.
        kinds: optimizer classes.
        modes: those in which it can be run.
        close: those in which sums are taken in another order than DDP's.
        groups: makes the parameter groups.
        many: whether the loop makes its own setups.
        layout: the only layout that will do, if there is only one.
        ranks: numbers of ranks it can be run on; 0 is no process group.
        slow: whether it takes long.
        ddp: options for DDP.
    """

    loop: Callable[[Any], Any]
    problem: Problem
    kinds: Sequence[Kind]
    modes: Sequence[str]
    close: Sequence[str]
    groups: Groups
    many: bool
    layout: str | None
    ranks: Sequence[int]
    slow: bool
    ddp: Options

    def seen(self, new: New) -> list[Tensor]:
        """Run the loop; return what it returned, and parameters and buffers."""
        if self.many:
            return copies(self.loop(new))
        setup = new()
        seen = copies(self.loop(setup) or [])
        return seen + result(setup, self.problem)


def result(setup: Setup, problem: Problem) -> list[Tensor]:
    """Return parameters and buffers.

    DDP makes buffers equal before a forward pass and `module=` after a step, so they are compared
    after one more forward pass.
    """
    params = setup.params
    if list(setup.module.buffers()):
        problem.loss(setup.model, 1)
    return params + copies(setup.module.buffers())


def trained(new: New, problem: Problem, steps: int = 5, **options: Any) -> list[Tensor]:
    """Train a setup of its own; return losses, parameters and buffers."""
    setup = new(problem, **{"find_unused_parameters": problem.find_unused, **options})
    return [*train(setup, problem, range(steps)), *result(setup, problem)]


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    problem: Problem = MLP_PROBLEM,
    *,
    kinds: Sequence[Kind] = (SGD, ADAMW),
    modes: Sequence[str] = ALL,
    close: Sequence[str] = (),
    groups: Groups = groups_of,
    many: bool = False,
    layout: str | None = None,
    ranks: Sequence[int] = (0, 1, 2, 3),
    slow: bool = False,
    **ddp: Any,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add a loop to `SCENARIOS` under its own name."""

    def add(loop: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = loop.__name__
        assert name not in SCENARIOS
        options = {"find_unused_parameters": problem.find_unused, **ddp}
        SCENARIOS[name] = Scenario(
            loop, problem, kinds, modes, close, groups, many, layout, ranks, slow, options
        )
        return loop

    return add


@dataclass
class Comparison:
    """Runs one scenario in its modes and collects differences. Used on every rank.

    Attributes:
        name: the scenario.
        thorough: whether to try every kind of optimizer with every variant, not one for each mode.
        double: put behind the optimizer's communication.
        modes: those of the scenario's modes that are run.
        kinds: optimizer classes to use in the place of the scenario's.
        failures: the differences so far.
    """

    name: str
    thorough: bool = False
    double: Any = None
    modes: Sequence[str] = ALL
    kinds: Sequence[Kind] = ()
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        found = SCENARIOS[self.name]
        self._scenario = replace(found, kinds=self.kinds) if self.kinds else found
        self._references: dict[str, list[Tensor]] = {}

    def run(self) -> list[str]:
        """Return a line for each run that came to other numbers."""
        for mode in self._scenario.modes:
            if mode in self.modes and (dist.is_initialized() or mode in APART):
                for kind, (zero, ddp) in self._choices(mode):
                    self._compare(mode, kind, zero, ddp)
        return self.failures

    def _choices(self, mode: str) -> Iterator[tuple[Kind, tuple[Options, Options]]]:
        kinds, variants = self._scenario.kinds, VARIANTS[mode]
        if world_size() > 2 and mode in (*MODULE, "register"):
            kinds = kinds[:1]  # AdamW divides what rounding there is by the gradient's size
        if self.thorough:
            yield from ((kind, variant) for kind in kinds for variant in variants)
        else:
            # One class and one way of DDP for all modes of a scenario, so that one run on DDP does.
            turn = list(SCENARIOS).index(self.name)
            zero, _ = variants[(turn // 4 + ALL.index(mode)) % len(variants)]
            yield kinds[turn % len(kinds)], (zero, IN_DDP[turn // 2 % 2][1])

    def _compare(self, mode: str, kind: Kind, zero: Options, ddp: Options) -> None:
        in_rank_order = world_size() > 2 and mode in (*MODULE, "register")
        if self._scenario.layout:
            zero = {**zero, "layout": self._scenario.layout}
        # DDP divides by three otherwise than the hook that it is given.
        hook = allreduce_hook if mode in HOOKS and world_size() > 2 else None
        expected = self._reference(kind, {**ddp, "comm_hook": hook})
        with behind_the_door(self.double) if self.double else contextlib.nullcontext():
            got = self._scenario.seen(self._new(partial(sharded, mode, zero=zero), kind, ddp))
        what = f"{mode}, {kind[0].__name__}, {zero}, {ddp}"
        if in_rank_order or mode in self._scenario.close:
            far = distance(expected, got)
            if far > (1e-4 if in_rank_order else 1e-5):
                self.failures.append(f"{what}: as far as {far}")
        elif found := differing(expected, got):
            self.failures.append(f"{what}: {found} of {len(expected)}")
        # NCCL begins each segment's sum at another rank, so bits depend on the layout.
        same_order = in_rank_order and dist.get_backend() == "gloo"
        if same_order and not self._scenario.close:
            first = self._references.setdefault(f"rank order {kind}", got)
            if found := differing(first, got):
                self.failures.append(f"{what}: {found} are not those of the other modes")

    def _reference(self, kind: Kind, ddp: Options) -> list[Tensor]:
        key = f"{kind} {ddp}"
        if key not in self._references:
            self._references[key] = self._scenario.seen(self._new(unsharded, kind, ddp))
        return self._references[key]

    def _new(self, make: Callable[..., Setup], kind: Kind, ddp: Options) -> New:
        def new(problem: Problem | None = None, **more: Any) -> Setup:
            problem = problem or self._scenario.problem
            given = {"kind": kind, "groups": self._scenario.groups, **ddp, **self._scenario.ddp}
            return make(problem.fresh(), **{**given, **more})

        return new


def distance(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor; infinite where one
    tensor is finite and the other is not."""
    far = 0.0
    for a, b in zip(expected, got, strict=True):
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return float("inf")
        if finite.any():
            a, b = a[finite].double(), b[finite].double()
            far = max(far, float((a - b).abs().max() / a.abs().max().clamp_min(1e-6)))
    return far


def compared(names: Iterable[str], **options: Any) -> list[str]:
    """Run these scenarios. Called on every rank."""
    return [f"{name}: {found}" for name in names for found in Comparison(name, **options).run()]


Errors = dict[tuple[str, tuple[str, ...]], tuple[type[Exception], str]]

REFUSED: Errors = {
    ("clip", WAYS): (RuntimeError, r"clip_grad_norm_\(\) comes too late"),
    ("grad_scaler", WAYS): (RuntimeError, "GradScaler comes too late"),
    ("closure", WAYS): (ValueError, "cannot evaluate a closure"),
    ("zero_in_place", ("register",)): (ValueError, "without set_to_none=False"),
    ("zero_in_place_through_the_module", ("register",)): (ValueError, "without set_to_none=False"),
    ("never_clear", ("register",)): (RuntimeError, r"call zero_grad\(\)"),
    ("change_what_was_held_back_in_a_hook", MODULE): (RuntimeError, r"register_hook\(\)"),
    ("sparse_gradients", ("interleaved", "register")): (
        ValueError,
        "'tokens' makes sparse gradients",
    ),
    ("uneven_inputs_divided_by_those_that_are_left", ("register",)): (
        RuntimeError,
        "leave out Join's divide_by_initial_world_size",
    ),
}
"""Scenarios that some modes refuse on every rank, with the error."""
