"""What a class looks at is found by trying it, is right, and leaves no trace."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import random
import sys
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import ELEMENT_WISE, Case
from torch import optim
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardstep.layouts.choose
from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep.layouts.choose import Choice, verdict_on
from shardstep.layouts.choose import choose as choose_recipe
from shardstep.layouts.known_classes import ELEMENT_WISE as KNOWN
from shardstep.layouts.probe import Verdict
from shardstep.layouts.probe import probe as probe_recipe
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.params.same_bits import same_bits

FP32, BF16 = torch.float32, torch.bfloat16


def probe(cls: Any, options: Any = {}, group_options: Any = {}, *args: Any) -> Verdict:  # noqa: B006
    return probe_recipe(OptimizerRecipe(cls, options, group_options), *args)


def choose(layout: str, cls: Any, options: Any, group_options: Any, *args: Any) -> Choice:
    return choose_recipe(layout, OptimizerRecipe(cls, options, group_options), *args)


class Simple(Optimizer):
    """SGD, for others to differ from."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)
        return loss

    def before(self) -> None:
        pass

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad, alpha=float(group["lr"]))

    @property
    def grads(self) -> list[torch.Tensor]:
        return [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]


class Momentum(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        state = self.state[p]
        state["moment"] = state.get("moment", torch.zeros_like(p)) * 0.9 + grad
        state["step"] = state.get("step", 0) + 1
        p.sub_(state["moment"], alpha=group["lr"])


class TrustRatio(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad, alpha=float(group["lr"] * p.norm() / (grad.norm() + 1e-8)))


class HasModes(Simple):
    """As schedule-free classes: it takes a step only if it was told to train."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.trains = False

    def train(self) -> None:
        self.trains = True

    def eval(self) -> None:
        self.trains = False

    def before(self) -> None:
        if not self.trains:
            raise RuntimeError("call train() first")


class ScalesToBeJudged(HasModes):
    @torch.no_grad()
    def eval(self) -> None:
        super().eval()
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(p.norm() + 1)


class DecaysMatricesOnly(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.dim() > 1:
            p.mul_(0.9)
        p.sub_(grad, alpha=group["lr"])


class SmallInOtherWays(Simple):
    """Large tensors by their mean, small ones by element."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad.mean() if p.numel() >= 4096 else grad, alpha=group["lr"])


class InBlocks(Simple):
    """By blocks of 256 elements where these fit, as 8-bit states are kept."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.numel() >= 4096 and p.numel() % 256 == 0:
            grad = grad / grad.reshape(-1, 256).abs().amax(1).repeat_interleave(256).view_as(grad)
        p.sub_(grad, alpha=group["lr"])


class LateTurn(Simple):
    """By element in the first thirty steps, by its norm from then on."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        step = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        p.sub_(grad / grad.norm() if step > 30 else grad, alpha=group["lr"])


class LateClip(Simple):
    """By element in the first thirty steps, by the norm of all gradients from then on."""

    taken = 0

    def before(self) -> None:
        self.taken += 1
        if self.taken > 30 and self.grads:
            torch._foreach_div_(self.grads, float(torch.nn.utils.get_total_norm(self.grads)))


class LateCount(LateClip):
    """By the number of parameters in the end, which is no number that slices would change."""

    def before(self) -> None:
        self.taken += 1
        if self.taken > 30 and self.grads:
            torch._foreach_div_(self.grads, float(len(self.grads)))


class TrustThenClip(LateClip, TrustRatio):
    """By tensor at first, and nothing of others for ten steps."""

    taken = 20


class NormOfSome(Simple):
    """The norm of all gradients that it takes an interest in."""

    def before(self) -> None:
        if chosen := [grad for grad in self.grads if self.interesting(grad)]:
            torch._foreach_div_(chosen, float(torch.nn.utils.get_total_norm(chosen)))

    def interesting(self, grad: torch.Tensor) -> bool:
        raise NotImplementedError


class NormOfLarge(NormOfSome):
    def interesting(self, grad: torch.Tensor) -> bool:
        return grad.numel() > 4096


class NormOfMedium(NormOfSome):
    def interesting(self, grad: torch.Tensor) -> bool:
        return grad.numel() > 500


class NormButOfMatrices(NormOfSome):
    def interesting(self, grad: torch.Tensor) -> bool:
        return grad.dim() != 2


class TrustsSquares(TrustRatio):
    """Looks at matrices that have as many rows as columns."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.dim() == 2 and p.shape[0] == p.shape[1]:
            super().update(p, grad, group)
        else:
            Simple.update(self, p, grad, group)


class StartsLate(Simple):
    """Looks on for ten steps."""

    taken = 0

    def before(self) -> None:
        self.taken += 1
        for grad in self.grads if self.taken <= 10 else ():
            grad.zero_()


class TrustsLate(StartsLate, TrustRatio):
    pass


class LeavesSmallOnesOut(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.numel() >= 300:
            super().update(p, grad, group)


class RefusesSmallOnes(Simple):
    """Has no use for matrices of fewer than twenty rows or columns."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.dim() == 2 and min(p.shape) < 20:
            raise ValueError("too small")
        super().update(p, grad, group)


class Laborious(TrustRatio):
    """Calls torch a thousand times in a step."""

    def before(self) -> None:
        for grad in 1000 * self.grads:
            grad.abs()


class LaboriousClip(Laborious):
    def before(self) -> None:
        super().before()
        if self.grads:
            torch._foreach_div_(self.grads, float(torch.nn.utils.get_total_norm(self.grads)))


class LaboriousLateClip(Laborious):
    """Divides by the norm of all gradients from its tenth step on."""

    def before(self) -> None:
        super().before()
        self.taken = getattr(self, "taken", 0) + 1
        if self.grads and self.taken >= 10:
            torch._foreach_div_(self.grads, float(torch.nn.utils.get_total_norm(self.grads)))


class LaboriousCount(Laborious):
    """Counts in its groups how many gradients there are."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        super().update(p, grad, group)
        group["updates"] = group.get("updates", 0) + 1


class Hoarder(Simple):
    """Keeps who knows what for who knows when."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        self.state[p]["later"] = object()
        super().update(p, grad, group)


class GlobalClip(Simple):
    """The norm of all gradients counts only when it is large."""

    def before(self) -> None:
        torch._foreach_mul_(
            self.grads, float(min(1.0, 100 / torch.nn.utils.get_total_norm(self.grads)))
        )


class GroupNorm(Simple):
    """The norm of a group's gradients, and the same step size for all of the group."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        grads = [q.grad for q in group["params"] if q.grad is not None]
        p.sub_(grad / torch.nn.utils.get_total_norm(grads), alpha=group["lr"])


class GroupNormOfMatrices(Simple):
    """The norm of a group's matrices, and of nothing else."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.dim() == 2:
            matrices = [q.grad for q in group["params"] if q.dim() == 2 and q.grad is not None]
            grad = grad / torch.nn.utils.get_total_norm(matrices)
        super().update(p, grad, group)


class GroupNormForMatrices(GroupNormOfMatrices):
    """The same, and takes nothing but matrices."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.dim() != 2:
            raise ValueError("not a matrix")
        super().update(p, grad, group)


class LaboriousGroupNorm(GroupNormOfMatrices, Laborious):
    pass


class SkipsWhatIsNotFinite(Simple):
    """Takes no step if any gradient is not finite."""

    def before(self) -> None:
        if not all(bool(grad.isfinite().all()) for grad in self.grads):
            torch._foreach_zero_(self.grads)


class SkipsMatricesNotFinite(SkipsWhatIsNotFinite):
    """The same, and takes nothing but matrices."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.dim() != 2:
            raise ValueError("not a matrix")
        super().update(p, grad, group)


class SkipsTensorsNotFinite(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if grad.isfinite().all():
            super().update(p, grad, group)


class RefusesWhatIsNotFinite(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if not grad.isfinite().all():
            raise ValueError("not finite")
        super().update(p, grad, group)


class SkipsZeros(Simple):
    """Does not decay what has no gradient."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if grad.any():
            p.mul_(0.99)
            super().update(p, grad, group)


class StopsAtZero(Simple):
    """Takes no step if all gradients are zero."""

    def before(self) -> None:
        self.zero = not any(bool(grad.any()) for grad in self.grads)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if not self.zero:
            p.mul_(0.99)
            super().update(p, grad, group)


class SkipsSpikes(Simple):
    """Takes no step if the norm of all gradients is a hundred times what it was."""

    def before(self) -> None:
        norm = float(torch.nn.utils.get_total_norm(self.grads))
        if norm > 100 * getattr(self, "usual", norm):
            torch._foreach_zero_(self.grads)
        else:
            self.usual = norm or 1.0


class Stacked(Simple):
    """Keeps the moments of a group's matrices of one shape together, with the first of them."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        alike = [q for q in group["params"] if q.shape == p.shape and q.grad is not None]
        if p is alike[0] and p.dim() == 2:
            state, grads = self.state[p], torch.stack([q.grad for q in alike])
            moment = state.get("moment")
            if moment is None or moment.shape != grads.shape:
                moment = torch.zeros_like(grads)
            state["moment"] = moment * 0.9 + grads
            for q, update in zip(alike, state["moment"], strict=True):
                q.sub_(update / update.norm(), alpha=group["lr"])


class LaboriousStack(Stacked, Laborious):
    pass


class Distance(Simple):
    """Learns its step size from all parameters, slowly, and keeps it in the groups."""

    def before(self) -> None:
        for group in self.param_groups:
            group["d"] = group.get("d", 1e-6) + 1e-12 * float(
                sum(g.abs().sum() for g in self.grads)
            )

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad, alpha=group["d"])


class CountsByParameter(Simple):
    """A group without parameters does not count its steps."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        group["steps"] = group.get("steps", 0) + 1
        super().update(p, grad, group)


class Noisy(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad + torch.randn_like(grad), alpha=group["lr"])


class NoisyTrust(TrustRatio):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        super().update(p, grad.add_(torch.rand_like(grad)), group)


class LateNoise(LateClip):
    def before(self) -> None:
        self.taken += 1
        if self.taken > 30:
            for grad in self.grads:
                grad.add_(torch.rand_like(grad))


def with_noise(grad: torch.Tensor) -> torch.Tensor:
    return grad + torch.rand_like(grad)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # and still in use
    scripted_with_noise = torch.jit.script(with_noise)


class ScriptedNoise(Simple):
    """Draws where python does not see it."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(scripted_with_noise(grad), alpha=group["lr"])


class NoiseNowAndThen(Simple):
    """The same function draws at some steps and not at others."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        noise = torch.nn.functional.dropout(torch.ones_like(p), 0.5, training=steps % 3 == 0)
        p.sub_(grad * noise, alpha=group["lr"])


class NoisyCoupled(GlobalClip):
    def before(self) -> None:
        super().before()
        random.random()


class RoundsRandomly(Simple):
    """Only where the parameters are short of bits."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.dtype is torch.bfloat16:
            grad = grad + torch.rand_like(grad)
        p.sub_(grad, alpha=group["lr"])


class NeedsClosure(Simple):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step()


class ByLoss(Simple):
    """Takes its step size from the loss, if it is given one: the same for all parameters."""

    loss = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.loss = float(closure()) if closure is not None else 1.0
        return super().step()

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad, alpha=group["lr"] * self.loss)


class EvaluatesTwice(Simple):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class MovesThenEvaluates(Simple):
    """Has the loss computed somewhere else than where parameters are left between two steps."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            p.mul_(2)
        with torch.enable_grad():
            closure()
        for p in params:
            p.div_(2)
        return super().step()


class MovesIfItMayEvaluate(MovesThenEvaluates):
    def step(self, closure: Any = None) -> Any:
        return Simple.step(self) if closure is None else super().step(closure)


class TwoPhases(Simple):
    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("call first_step() and second_step()")


class MatricesOnly(Simple):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("matrices only")

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad / grad.norm(), alpha=group["lr"])


class GroupDecides(Simple):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad / grad.norm() if group["normalise"] else grad, alpha=group["lr"])


class Loose(Simple):
    def before(self) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]


EXPECTED: list[tuple[type[Optimizer], dict[str, Any], str]] = [
    (Simple, {}, "element-wise"),
    (Momentum, {}, "element-wise"),
    (Momentum, {"lr": torch.tensor(0.1)}, "element-wise"),
    (NeedsClosure, {}, "element-wise"),
    (ByLoss, {}, "element-wise"),
    (Loose, {}, "element-wise"),
    (HasModes, {}, "element-wise"),
    (ScalesToBeJudged, {}, "per tensor"),
    (TrustRatio, {}, "per tensor"),
    (TrustRatio, {"lr": 0.0}, "per tensor"),
    (TrustRatio, {"lr": torch.tensor(0.0)}, "per tensor"),
    (DecaysMatricesOnly, {}, "per tensor"),
    (SmallInOtherWays, {}, "per tensor"),
    (InBlocks, {}, "per tensor"),
    (LateTurn, {}, "per tensor"),
    (LateClip, {}, "coupled"),
    (LateCount, {}, "coupled"),
    (TrustThenClip, {}, "coupled"),
    (NormOfLarge, {}, "coupled"),
    (NormOfMedium, {}, "coupled"),
    (NormButOfMatrices, {}, "coupled"),
    (StartsLate, {}, "element-wise"),
    (TrustsLate, {}, "per tensor"),
    (LeavesSmallOnesOut, {}, "per tensor"),
    (RefusesSmallOnes, {}, "element-wise"),
    (Laborious, {}, "per tensor"),
    (LaboriousClip, {}, "coupled"),
    (LaboriousLateClip, {}, "coupled"),
    (LaboriousCount, {}, "coupled"),
    (TrustsSquares, {}, "per tensor"),
    (Hoarder, {}, "per tensor"),
    (MatricesOnly, {}, "per tensor"),
    (GroupDecides, {"normalise": True}, "per tensor"),
    (GroupDecides, {"normalise": False}, "element-wise"),
    (optim.Adafactor, {}, "per tensor"),
    (optim.Muon, {}, "per tensor"),
    (optim.SparseAdam, {}, "per tensor"),
    (GlobalClip, {}, "coupled"),
    (GroupNorm, {}, "coupled"),
    (GroupNormOfMatrices, {}, "coupled"),
    (GroupNormForMatrices, {}, "coupled"),
    (LaboriousGroupNorm, {}, "coupled"),
    (SkipsWhatIsNotFinite, {}, "coupled"),
    (SkipsMatricesNotFinite, {}, "coupled"),
    (SkipsTensorsNotFinite, {}, "per tensor"),
    (RefusesWhatIsNotFinite, {}, "element-wise"),
    (SkipsZeros, {}, "per tensor"),
    (StopsAtZero, {}, "coupled"),
    (SkipsSpikes, {}, "coupled"),
    (Stacked, {}, "coupled"),
    (LaboriousStack, {}, "coupled"),
    (Distance, {}, "coupled"),
    (CountsByParameter, {}, "coupled"),
    (EvaluatesTwice, {}, "coupled"),
    (MovesThenEvaluates, {}, "coupled"),
    (MovesIfItMayEvaluate, {}, "coupled"),
    (optim.LBFGS, {}, "coupled"),
    (optim.LBFGS, {"max_iter": 1}, "coupled"),
    (Noisy, {}, "element-wise and random"),
    (LateNoise, {}, "element-wise and random"),
    (ScriptedNoise, {}, "element-wise and random"),
    (NoiseNowAndThen, {}, "element-wise and random"),
    (NoisyTrust, {}, "per tensor and random"),
    (NoisyCoupled, {}, "coupled and random"),
    (TwoPhases, {}, "untried"),
    (Simple, {"lr": "fast"}, "untried"),
]


@pytest.mark.parametrize(
    ("cls", "options", "kind"), EXPECTED, ids=[str(Case(c, o)) for c, o, _ in EXPECTED]
)
def test_a_class_is_seen_through(cls: Any, options: dict[str, Any], kind: str) -> None:
    assert str(probe(cls, options, {})).startswith(f"{kind}: ")
    made = functools.partial(cls, **options)
    assert probe(made, {}, {}).kind == probe(cls, options, {}).kind


def test_options_of_the_group_count() -> None:
    assert probe(GroupDecides, {}, {"normalise": True}).kind == "per tensor"
    assert probe(GroupDecides, {}, {"normalise": False}).kind == "element-wise"


def test_the_dtype_of_the_parameters_counts() -> None:
    assert not probe(RoundsRandomly, {}, {}, torch.float32).random
    assert probe(RoundsRandomly, {}, {}, torch.bfloat16).random
    assert probe(optim.AdamW, {}, {}, torch.complex64).kind == "element-wise"
    assert probe(optim.AdamW, {}, {}, torch.int8).kind == "element-wise"


@pytest.mark.parametrize("case", ELEMENT_WISE, ids=str)
def test_trying_agrees_with_what_is_known(case: Case) -> None:
    assert case.optimizer_class in KNOWN
    assert probe(case.optimizer_class, case.options, {}).kind == "element-wise"


def test_options_that_only_other_devices_have_are_left_out() -> None:
    verdict = probe(optim.Adam, {"capturable": True}, {})
    assert verdict.kind == "element-wise"
    assert "probed without capturable" in verdict.why


@pytest.mark.parametrize(
    ("cls", "most"), [(Momentum, 350), (TrustRatio, 80), (GlobalClip, 5), (Laborious, 50)]
)
def test_few_steps_are_taken(cls: type[Optimizer], most: int) -> None:
    """What it costs is counted in steps; benchmarks/probe.py takes the time."""
    taken = 0

    class Counted(cls):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            nonlocal taken
            taken += 1
            return super().step(closure)

    assert probe(Counted, {}, {}).kind == probe(cls, {}, {}).kind
    assert 0 < taken <= most


# ------------------------------------------------------------------------------------ no trace


class Leaves(Simple):
    """Leaves traces wherever it can."""

    made = 0
    names: list[str] = []  # noqa: RUF012 - on purpose
    seen: dict[str, int] = {}  # noqa: RUF012
    counted: Counter[str] = Counter()  # noqa: RUF012
    latest: deque[int] = deque([1, 2, 3], maxlen=3)  # noqa: RUF012
    nested = {"deep": defaultdict(list, at=[[0]])}  # noqa: RUF012
    total = torch.zeros(2)

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        Leaves.made += 1
        Leaves.counted["made"] += 1
        Leaves.latest.append(Leaves.made)
        Leaves.nested["deep"]["at"][0].append(Leaves.made)
        Leaves.nested["deep"]["there"].append([Leaves.made])
        Leaves.total += 1
        Leaves.names.append("one more")
        Leaves.seen["times"] = Leaves.made
        Leaves.added = True  # type: ignore[attr-defined]
        warnings.warn("constructed", stacklevel=1)
        logging.getLogger("traces").error("constructed")
        print("constructed")

    def before(self) -> None:
        random.random()
        np.random.rand()  # noqa: NPY002 - on purpose
        torch.rand(3)


def test_nothing_is_left_behind(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    hook = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    own = dict(vars(Leaves))
    with warnings.catch_warnings(record=True) as warned, torch.no_grad():
        warnings.simplefilter("always")
        assert probe(Leaves, {}, {}).random
        assert not torch.is_grad_enabled()
    hook.remove()
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert (calls, warned, caplog.records, tuple(capfd.readouterr())) == ([], [], [], ("", ""))
    assert dict(vars(Leaves)) == own
    assert (Leaves.made, Leaves.names, Leaves.seen, Leaves.counted) == (0, [], {}, {})
    assert (Leaves.latest, Leaves.nested) == (deque([1, 2, 3]), {"deep": {"at": [[0]]}})
    assert Leaves.total.tolist() == [0, 0]
    assert not torch.is_warn_always_enabled()


def test_nothing_is_left_behind_by_several_threads() -> None:
    def found() -> list[Any]:
        hooks = len(torch_optimizer._global_optimizer_pre_hooks)
        settings = [torch.get_num_threads(), torch.is_warn_always_enabled(), warnings.filters[:]]
        return [sys.stdout, sys.stderr, logging.root.manager.disable, hooks, *settings]

    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        before = found()
        classes: list[Any] = [Momentum, TrustRatio, Momentum, TrustRatio]
        with concurrent.futures.ThreadPoolExecutor(len(classes)) as threads:
            verdicts = list(threads.map(lambda cls: probe(cls, {}, {}).kind, classes))
        assert verdicts == ["element-wise", "per tensor"] * 2
        assert found() == before
    finally:
        handle.remove()


def test_a_tensor_given_as_an_option_is_not_written_to() -> None:
    class Halves(Simple):
        def before(self) -> None:
            for group in self.param_groups:
                group["lr"] *= 0.5

    lr = torch.tensor(0.1)
    assert probe(Halves, {"lr": lr}, {"betas": [lr]}).kind == "element-wise"
    assert lr.item() == torch.tensor(0.1).item()


def test_it_runs_wherever_the_caller_is() -> None:
    with torch.inference_mode():
        assert probe(Momentum, {}, {}).kind == "element-wise"
    with torch.device("meta"):
        assert probe(Momentum, {}, {}).kind == "element-wise"


def test_a_verdict_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counting(*args: Any) -> Any:
        asked.append(args)
        return probe_recipe(*args)

    class Fresh(Momentum):
        pass

    monkeypatch.setattr(shardstep.layouts.choose, "probe", counting)
    for lr in (0.1, 0.1, torch.tensor(0.1), torch.tensor(0.1), 0.2):
        verdict_on(OptimizerRecipe(Fresh, {"lr": lr}, {"nested": {"a": [1, 2.0]}}))
    verdict_on(OptimizerRecipe(Fresh, {"lr": 0.2}, {"nested": {"a": [True, 2.0]}}))
    assert len(asked) == 4


# --------------------------------------------------------------------------------- what is chosen


def chosen(layout: str, cls: Any, world_size: int = 2, **options: Any) -> Any:
    params = [torch.nn.Parameter(torch.zeros(3, 3))]
    return choose(layout, cls, options, {}, params, world_size)


class SaysWhole(Simple):
    shardstep_layout = "whole"


class SaysSliced(TrustRatio):
    shardstep_layout = "sliced"


class SaysNonsense(Simple):
    shardstep_layout = "diagonal"


@pytest.mark.parametrize(
    ("layout", "cls", "expected"),
    [
        ("auto", optim.AdamW, "sliced"),
        ("whole", optim.AdamW, "whole"),
        ("auto", Momentum, "sliced"),
        ("sliced", Momentum, "sliced"),
        ("whole", Momentum, "whole"),
        ("auto", TrustRatio, "whole"),
        ("whole", TrustRatio, "whole"),
        ("auto", SaysWhole, "whole"),
        ("auto", SaysSliced, "sliced"),
        ("whole", SaysSliced, "whole"),
        ("sliced", Noisy, "sliced"),
        ("whole", NoisyTrust, "whole"),
        ("whole", TwoPhases, "whole"),
        ("sliced", TwoPhases, "sliced"),
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
            TrustRatio,
            "numbers of TrustRatio, which updates each tensor as a whole.*layout='whole'",
        ),
        ("sliced", NoisyTrust, "would change the numbers of NoisyTrust"),
        ("sliced", SaysWhole, "SaysWhole declares that it needs layout='whole'"),
        ("auto", SaysNonsense, "shardstep_layout must be 'sliced' or 'whole', not 'diagonal'"),
        ("auto", GlobalClip, "GlobalClip couples all parameters.*unsharded"),
        ("whole", GlobalClip, "GlobalClip couples all parameters"),
        ("whole", NoisyCoupled, "NoisyCoupled couples all parameters"),
        ("auto", MovesThenEvaluates, "moves parameters before it evaluates its closure.*unsharded"),
        ("auto", optim.LBFGS, "LBFGS couples all parameters.*closure more than once.*unsharded"),
        ("auto", Noisy, "Noisy draws random numbers.*layout='sliced'.*seed each rank"),
        ("auto", NoisyTrust, "NoisyTrust draws random numbers.*layout='whole'"),
        ("auto", TwoPhases, "TwoPhases could not be probed.*first_step.*layout='whole'"),
    ],
)
def test_what_would_change_the_numbers_is_refused(layout: str, cls: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(layout, cls)


def test_what_the_class_says_of_its_options_reaches_the_user() -> None:
    with pytest.raises(TypeError, match="wings"):
        chosen("auto", optim.Muon, wings=2)


@pytest.mark.parametrize("cls", [GlobalClip, TwoPhases, Noisy, optim.LBFGS])
def test_one_rank_takes_any_class_and_tries_none(
    cls: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardstep.layouts.choose, "probe", None)
    assert chosen("auto", cls, world_size=1).layout == "whole"


class CountsItself(Simple):
    """Has a counter of its own in its state dict."""

    count = 0

    def before(self) -> None:
        self.count += 1

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}


class CountsItsParameters(CountsItself):
    def before(self) -> None:
        self.count += len(self.grads)


def test_what_a_class_adds_to_its_state_dict_has_to_be_the_same_everywhere() -> None:
    assert probe(CountsItself, {}, {}).kind == "element-wise"
    assert probe(CountsItsParameters, {}, {}).kind == "coupled"


class DrawsFromPython(Simple):
    """One draw for all parameters, from python's own source."""

    def before(self) -> None:
        self.scale = random.random()

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        p.sub_(grad / grad.norm(), alpha=self.scale)


def test_the_verdict_does_not_depend_on_the_random_state_of_the_process() -> None:
    verdicts = []
    for seed in range(3):
        random.seed(seed)
        torch.manual_seed(seed)
        verdicts.append([probe(cls, {}, {}) for cls in (DrawsFromPython, Noisy, NoisyTrust)])
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert str(verdicts[0][0]).startswith("per tensor and random")


class FromSomeSize(Simple):
    """Looks at whole tensors, but only if they are large, or made up of blocks, or have many rows.

    As low-bit classes quantise, and as factored ones factor.
    """

    def __init__(
        self,
        params: Any,
        min_size: float = 1e9,
        block_size: float = 1e9,
        rows: int | None = None,
    ) -> None:
        super().__init__(params, min_size=min_size, block_size=block_size)
        self.rows = rows or 10**9

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        blocks = p.numel() >= 4096 and p.numel() % group["block_size"] == 0
        many_rows = p.dim() == 2 and p.shape[0] >= self.rows
        if p.numel() >= group["min_size"] or blocks or many_rows:
            grad = grad / grad.abs().max()
        p.sub_(grad, alpha=group["lr"])


class From30000(FromSomeSize):
    def __init__(self, params: Any, min_size: int = 30_000) -> None:
        super().__init__(params, min_size)


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
        (functools.partial(From30000, min_size=40_000), {}, {}, 40_000),
    ],
)
def test_a_class_is_tried_beyond_the_sizes_that_it_is_told(
    cls: Any, options: dict[str, Any], group_options: dict[str, Any], size: int
) -> None:
    def layout(largest: int) -> str:
        param = torch.nn.Parameter(torch.empty(largest))
        return choose("auto", cls, options, group_options, [param], 2).layout

    assert layout(size) == "whole"
    assert layout(size - 1) == "sliced"  # nothing here is as large as that


def test_numbers_that_are_no_sizes_cost_nothing() -> None:
    huge = torch.nn.Parameter(torch.empty(()).expand(2**40))
    numbers = {"steps": 10**9, "warmup": 100, "seed": -7, "eps": 1e-8, "far": float("inf")}
    recipe = OptimizerRecipe(Simple, numbers, {"on": True, "nested": (512, [1000.0])})
    assert recipe.sizes(huge.numel()) == (512, 1000)


class RunsOnSmallTensors(Simple):
    """As a class may do here whose kernels for large tensors are another device's."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        if p.numel() >= 4096:
            raise NotImplementedError("no kernel for this device")
        super().update(p, grad, group)


def test_what_large_tensors_are_treated_like_is_not_guessed_from_small_ones() -> None:
    verdict = probe(RunsOnSmallTensors, {}, {})
    assert verdict.kind == "untried"
    assert "no kernel for this device" in verdict.why


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
    message = "HandsOn does not keep state and groups as a torch"
    with pytest.raises(ValueError, match=message):
        choose("auto", HandsOn, {}, {}, [param], 2)
    with pytest.raises(ValueError, match=message):  # nor on one rank, where nothing is tried
        ZeroRedundancyOptimizer([param], HandsOn, layout="whole")
    groups = [
        {"params": [param], "optimizer_class": HandsOn},
        {"params": [torch.nn.Parameter(torch.ones(3))]},
    ]
    with pytest.raises(ValueError, match=message):  # nor as one of several
        ZeroRedundancyOptimizer(groups, torch.optim.SGD, layout="whole")


def made_by_a_function(groups: Any, **options: Any) -> Optimizer:
    return SaysWhole(groups, **options)


@dataclasses.dataclass
class Recipe:
    """What cannot be hashed."""

    lr: float

    def __call__(self, groups: Any) -> Optimizer:
        return SaysWhole(groups, lr=self.lr)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(SaysWhole, lr=0.2),
        functools.partial(functools.partial(SaysWhole, lr=0.2), lr=0.3),
        made_by_a_function,
        lambda groups: SaysWhole(groups),
        Recipe(0.1),
    ],
    ids=["partial", "partial of a partial", "function", "lambda", "object"],
)
def test_what_a_class_says_is_believed_however_it_is_made(make: Any) -> None:
    assert chosen("auto", SaysWhole).layout == "whole"
    assert chosen("auto", make).layout == "whole"
    with pytest.raises(ValueError, match="declares that it needs layout='whole'"):
        chosen("sliced", make)


def test_an_object_that_cannot_be_hashed_may_make_optimizers() -> None:
    assert chosen("auto", Unhashable()).layout == "sliced"


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, groups: Any, **options: Any) -> Optimizer:
        return Momentum(groups, **options)


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


def test_one_nan_is_the_other() -> None:
    nan, other = torch.tensor([0x7FC00000, 0x7FFF0000], dtype=torch.int32).view(torch.float32)
    one = torch.tensor([0.0, nan, 1.0])
    assert same_bits(one, torch.tensor([0.0, other, 1.0]))
    assert not same_bits(one, torch.tensor([-0.0, other, 1.0]))
    assert not same_bits(one, torch.tensor([0.0, 1.0, 1.0]))


def test_a_class_that_treats_dtypes_of_a_group_otherwise_together_is_refused() -> None:
    """Adafactor takes for small what the first tensor of a group says is."""
    params = [torch.zeros(8, 8, dtype=dtype, requires_grad=True) for dtype in (FP32, BF16)]
    with pytest.raises(ValueError, match="give each dtype its own group"):
        choose("auto", optim.Adafactor, {}, {}, params, 2)
    # Told what is small, it is the same together and apart; and so it is in groups of one dtype.
    told = {"eps": (1e-8, 1e-3)}
    assert choose("auto", optim.Adafactor, told, {}, params, 2).layout == "whole"
    assert choose("auto", optim.Adafactor, {}, {}, params[:1], 2).layout == "whole"
    assert choose("auto", optim.Adafactor, {}, {}, params, 2, MixedPrecision()).layout == "whole"
    assert choose("auto", Simple, {}, {}, params, 2).layout == "sliced"
