"""Small optimizer classes that look at elements, tensors or all tensors, each in its own way."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class Simple(Optimizer):
    """SGD, for others to differ from in `before` or `direction`."""

    taken = 0

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.taken += 1
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p, p.grad, group), alpha=float(group["lr"]))
        return loss

    def before(self) -> None:
        pass

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad

    @property
    def grads(self) -> list[torch.Tensor]:
        return [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]

    def normalise(self, grads: list[torch.Tensor]) -> None:
        if grads:
            torch._foreach_div_(grads, float(get_total_norm(grads)))


def toy(name: str, *bases: type, **methods: Any) -> Any:
    """A class with these methods."""
    return type(name, bases or (Simple,), methods)


def by_direction(name: str, direction: Any, *bases: type) -> Any:
    """A class whose update is this function of a parameter and its gradient."""
    return toy(name, *bases, direction=lambda self, p, grad, group: direction(p, grad))


def by_norm_of(name: str, chosen: Any, *bases: type) -> Any:
    """A class that divides by the norm of all gradients for which `chosen` holds."""
    return toy(
        name, *bases, before=lambda self: self.normalise([g for g in self.grads if chosen(self, g)])
    )


def skipping(name: str, skip: Any, *bases: type) -> Any:
    """A class that zeroes all gradients if `skip` says so."""
    return toy(
        name, *bases, before=lambda self: [g.zero_() for g in (self.grads if skip(self) else ())]
    )


def only_matrices(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if p.dim() != 2:
        raise ValueError("not a matrix")
    return grad


class Momentum(Simple):
    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        state = self.state[p]
        state["moment"] = state.get("moment", torch.zeros_like(p)) * 0.9 + grad
        state["step"] = state.get("step", 0) + 1
        return state["moment"]


class HasModes(Simple):
    """As schedule-free classes: it takes a step only after `train()`."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def eval(self) -> None:
        self.trains = False

    def before(self) -> None:
        if not self.trains:
            raise RuntimeError("call train() first")


class ScalesToEvaluate(HasModes):
    @torch.no_grad()
    def eval(self) -> None:
        super().eval()
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(p.norm() + 1)


class LateTurn(Simple):
    """By element in the first thirty steps, by its norm from then on."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        step = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return grad / grad.norm() if step > 30 else grad


def trust(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return grad * (p.norm() / (grad.norm() + 1e-8))


def trust_squares(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return trust(p, grad) if p.dim() == 2 and p.shape[0] == p.shape[1] else grad


def by_shape(name: str, chosen: Any, dim: int = 2) -> Any:
    """A class that divides a gradient by its norm if its shape is `chosen`."""
    return by_direction(
        name, lambda p, g: g / g.norm() if p.dim() == dim and chosen(*p.shape) else g
    )


def cubes_alone(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if p.dim() > 4:
        raise ValueError("too many dimensions")
    return grad / grad.norm() if p.dim() == 3 else grad


def in_blocks(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """By blocks of 256 elements where these fit, as 8-bit states are kept."""
    if p.numel() < 4096 or p.numel() % 256:
        return grad
    return grad / grad.reshape(-1, 256).abs().amax(1).repeat_interleave(256).view_as(grad)


def refusing(name: str, dislikes: Any) -> Any:
    """A class that raises for some gradients."""

    def direction(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if dislikes(grad):
            raise ValueError("not this one")
        return grad

    return by_direction(name, direction)


TrustRatio = by_direction("TrustRatio", trust)
NoisyTrust = by_direction("NoisyTrust", lambda p, g: trust(p, g.add_(torch.rand_like(g))))
StartsLate = skipping("StartsLate", lambda self: self.taken <= 10)


class FirstDecides(Simple):
    """Skips a group if its first parameter has no gradient."""

    def before(self) -> None:
        for group in self.param_groups:
            if group["params"] and group["params"][0].grad is None:
                for p in group["params"]:
                    p.grad = None


class StopsAtMissing(Simple):
    """Updates the parameters of a group up to the first that has no gradient."""

    def before(self) -> None:
        for group in self.param_groups:
            missing = False
            for p in group["params"]:
                missing = missing or p.grad is None
                if missing:
                    p.grad = None


class ByDirection(Simple):
    """Compares the direction of a gradient with that of the gradients before."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        cosine = torch.cosine_similarity(moment.flatten(), grad.flatten(), dim=0)
        moment.mul_(0.9).add_(grad)
        return self.scale(float(cosine)) * moment

    def scale(self, cosine: float) -> float:
        return 2.0 if cosine > 0.6 else 1.0


Restarts = toy("Restarts", ByDirection, scale=lambda self, cosine: float(cosine > -0.5))


class NormIfLossRises(Simple):
    last = float("inf")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = float(closure()) if closure is not None else self.last
        self.rises, self.last = loss > self.last, loss
        return super().step()

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad / grad.norm() if self.rises else grad


class GroupNormOfThree(Simple):
    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        grads = [q.grad for q in group["params"] if q.grad is not None]
        return grad / get_total_norm(grads) if len(grads) > 2 else grad


class CountsByParameter(Simple):
    """A group without parameters does not count its steps."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        group["updates"] = group.get("updates", 0) + 1
        return super().direction(p, grad, group)


class Hoarder(Simple):
    """Keeps an object of unknown contents."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        self.state[p]["later"] = object()
        return grad


class GlobalClip(Simple):
    """The norm of all gradients counts only when it is large."""

    def before(self) -> None:
        torch._foreach_mul_(self.grads, float(min(1.0, 100 / get_total_norm(self.grads))))


class GroupNorm(Simple):
    """The norm of a group's gradients, or of those of its matrices."""

    matrices_only = False

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        if self.matrices_only and p.dim() != 2:
            return grad
        like = [q for q in group["params"] if not self.matrices_only or q.dim() == 2]
        return grad / get_total_norm([q.grad for q in like if q.grad is not None])


GroupNormOfMatrices = toy("GroupNormOfMatrices", GroupNorm, matrices_only=True)


class GroupNormForMatrices(GroupNormOfMatrices):  # type: ignore[misc, valid-type]
    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return super().direction(p, only_matrices(p, grad), group)


class StopsAtZero(Simple):
    """Does not decay if all gradients are zero."""

    def before(self) -> None:
        self.zero = not any(bool(grad.any()) for grad in self.grads)

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad if self.zero else grad + 0.1 * p


class SkipsSpikes(Simple):
    """Takes no step if the norm of all gradients is a hundred times what it was."""

    def before(self) -> None:
        norm = float(get_total_norm(self.grads))
        if norm > 100 * getattr(self, "usual", norm):
            torch._foreach_zero_(self.grads)
        else:
            self.usual = norm or 1.0


class Stacked(Simple):
    """Keeps the moments of a group's matrices of one shape together, with the first of them."""

    def before(self) -> None:
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.dim() == 2 and p.grad is not None]
            for shape in dict.fromkeys(p.shape for p in matrices):
                stack = [p for p in matrices if p.shape == shape]
                state, grads = self.state[stack[0]], torch.stack([p.grad for p in stack])
                moment = state.get("moment")
                if moment is None or moment.shape != grads.shape:
                    moment = torch.zeros_like(grads)
                state["moment"] = moment * 0.9 + grads
                for p, update in zip(stack, state["moment"], strict=True):
                    p.grad.copy_(update / update.norm())
        super().before()


class Distance(Simple):
    """Learns its step size from all parameters, slowly, and keeps it in the groups."""

    def before(self) -> None:
        for group in self.param_groups:
            total = float(sum(g.abs().sum() for g in self.grads))
            group["d"] = group.get("d", 1e-6) + 1e-12 * total

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad * group["d"]


Noisy = by_direction("Noisy", lambda p, grad: grad + torch.randn_like(grad))


class NoisyCoupled(GlobalClip):
    def before(self) -> None:
        super().before()
        random.random()


class DrawsFromPython(Simple):
    """One draw for all parameters, from Python's own source."""

    def before(self) -> None:
        self.scale = random.random()

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return self.scale * grad / grad.norm()


def with_noise(grad: torch.Tensor) -> torch.Tensor:
    return grad + torch.rand_like(grad)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # and still in use
    scripted_with_noise = torch.jit.script(with_noise)


class NoiseNowAndThen(Simple):
    """The same function draws at some steps and not at others."""

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        return grad * torch.nn.functional.dropout(torch.ones_like(p), 0.5, training=steps % 3 == 0)


class NeedsClosure(Simple):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step()


class ByLoss(Simple):
    """Takes its step size from the loss, if there is one: the same for all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.loss = float(closure()) if closure is not None else 1.0
        return super().step()

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad * self.loss


class EvaluatesTwice(Simple):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class MovesThenEvaluates(Simple):
    """Has the loss computed elsewhere than where it leaves parameters between steps."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_mul_(params, 2)
        with torch.enable_grad():
            closure()
        torch._foreach_div_(params, 2)
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

    def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
        return grad / grad.norm()


class GlobalState(Simple):
    def before(self) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]


def counting(name: str, count: Any) -> Any:
    """A class with a counter in its state dict."""
    return toy(name, state_dict=lambda self: {**Simple.state_dict(self), "count": count(self)})


CountsItself = counting("CountsItself", lambda self: self.taken)
CountsItsParameters = counting("CountsItsParameters", lambda self: len(self.grads))


def finite(self: Simple) -> bool:
    return all(bool(grad.isfinite().all()) for grad in self.grads)


def divide_late(self: Simple) -> None:
    if self.taken > 30 and self.grads:
        torch._foreach_div_(self.grads, float(len(self.grads)))


GroupDecides = toy(
    "GroupDecides", direction=lambda self, p, g, group: g / g.norm() if group["normalise"] else g
)
OnlyMatrices = by_direction("OnlyMatrices", only_matrices)

VERDICTS: dict[str, list[Any]] = {
    "element-wise": [
        *(Simple, Momentum, NeedsClosure, ByLoss, GlobalState, HasModes, StartsLate, CountsItself),
        (Momentum, {"lr": torch.tensor(0.1)}),
        (GroupDecides, {"normalise": False}),
        refusing("RefusesSmall", lambda g: g.dim() == 2 and min(g.shape) < 20),
        refusing("RefusesInfinite", lambda g: not g.isfinite().all()),
    ],
    "per tensor": [
        *(ScalesToEvaluate, TrustRatio, LateTurn, Hoarder),
        *(MatricesOnly, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam),
        (TrustRatio, {"lr": 0.0}),
        (TrustRatio, {"lr": torch.tensor(0.0)}),
        (GroupDecides, {"normalise": True}),
        toy("TrustsLate", StartsLate, TrustRatio),
        by_direction("InBlocks", in_blocks),
        by_direction("TrustsSquares", trust_squares),
        by_direction("DecaysMatrices", lambda p, g: g + p if p.dim() > 1 else g),
        by_direction("MeanIfLarge", lambda p, g: g.mean() if p.numel() >= 4096 else g),
        by_direction("LeavesSmallOut", lambda p, g: g if p.numel() >= 300 else 0 * g),
        by_direction("SkipsInfinite", lambda p, g: g if g.isfinite().all() else torch.zeros(())),
        by_direction("DecaysUnlessZero", lambda p, g: g + 0.1 * p if g.any() else g),
        *(ByDirection, Restarts, NormIfLossRises),
        by_direction("NormOfCubes", lambda p, g: g / g.norm() if p.dim() == 3 else g),
        by_direction("NormOf5Dimensions", lambda p, g: g / g.norm() if p.dim() == 5 else g),
        by_direction("NormOfCubesAlone", cubes_alone),
        by_shape("NormOfRows", lambda rows, columns: columns > 4 * rows),
        by_shape("NormOfColumns", lambda rows, columns: columns == 1),
        by_shape("NormOfBlocks", lambda rows, columns: rows % 16 == columns % 16 == 0),
        by_shape("NormOfPoints", lambda _, __, *kernel: kernel == (1, 1), dim=4),
        by_direction("SignOfOutliers", lambda p, g: g.sign() if g.abs().max() > 100 else g),
        by_direction("RaisesTiny", lambda p, g: g / g.norm() if 0 < g.norm() < 1e-3 else g),
        by_direction("NormAtZero", lambda p, g: g if p.any() else g / g.norm()),
    ],
    "coupled": [
        *(GlobalClip, GroupNorm, GroupNormOfMatrices, GroupNormForMatrices),
        *(StopsAtZero, SkipsSpikes, Stacked, Distance, CountsByParameter, CountsItsParameters),
        *(EvaluatesTwice, MovesThenEvaluates, MovesIfItMayEvaluate, torch.optim.LBFGS),
        *(FirstDecides, StopsAtMissing, GroupNormOfThree),
        (torch.optim.LBFGS, {"max_iter": 1}),
        toy("TrustAndCount", CountsByParameter, TrustRatio),
        toy("TrustAndGroupNorm", GroupNormOfMatrices, TrustRatio),
        toy("TrustAndStack", Stacked, TrustRatio),
        toy("TrustAndStop", StopsAtZero, TrustRatio),
        skipping("TrustAndSkip", lambda self: not finite(self), TrustRatio),
        toy("LateCount", before=divide_late),
        by_norm_of("LateClip", lambda self, grad: self.taken > 30),
        by_norm_of("TrustThenClip", lambda self, grad: self.taken > 9, TrustRatio),
        by_norm_of("NormOfLarge", lambda self, grad: grad.numel() > 4096),
        by_norm_of("NormOfMedium", lambda self, grad: grad.numel() > 500),
        by_norm_of("NormButOfMatrices", lambda self, grad: grad.dim() != 2),
        skipping("SkipsIfInfinite", lambda self: not finite(self)),
        skipping("SkipsMatricesIfInfinite", lambda self: not finite(self), OnlyMatrices),
        skipping("SkipsOnlyMatrices", lambda self: not finite(self), MatricesOnly),
    ],
    "element-wise and random": [
        *(Noisy, NoiseNowAndThen),
        toy("LateNoise", direction=lambda self, p, g, _: with_noise(g) if self.taken > 30 else g),
        # Draws where Python does not see it.
        by_direction("ScriptedNoise", lambda p, g: scripted_with_noise(g)),
    ],
    "per tensor and random": [NoisyTrust, DrawsFromPython],
    "coupled and random": [NoisyCoupled],
    "untried": [TwoPhases, (Simple, {"lr": "fast"})],
}
"""Classes, some with options, under what the probe has to find."""
