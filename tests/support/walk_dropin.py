"""Whatever is done to a drop-in optimizer, in whichever order, it comes to the whole one's bits.

Seeded walks over bare parameters of all forms with gradients that are equal on all ranks: set,
added to, cleared, left out, clipped; parameters frozen, written to, moved, of other memory formats;
groups added and changed; state saved, compared and loaded into optimizers of other layouts.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import consolidated
from problems import ELEMENT_WISE, Case
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from walks import Act, SavingWalk, Whole, common_folder, is_plain, plain

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint

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
    """Nothing but parameters; the first has two names."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        for number, param in enumerate(params):
            self.register_parameter(f"w{number}", param)
        self.register_parameter("tied", params[0])


class DropIn(SavingWalk):
    """A walk over bare parameters."""

    def __init__(self, seed: int, low: bool = False) -> None:
        super().__init__(seed)
        warnings.filterwarnings("ignore", "the loaded state")
        self._random = torch.Generator().manual_seed(seed)
        self._low = low
        self._policy = self._choose_policy()
        mixture = self.often(0.2)
        self._case = WHOLE if self.often(0.1) else self.chance.choice(LOW_CASES if low else CASES)
        self._plain = is_plain(self._case) and self._case is not WHOLE
        theirs = [self._new_param() for _ in range(self.chance.randint(2, 9))]
        self._theirs = theirs
        self._mine = [_same(param) for param in theirs]
        numbers = list(range(len(theirs)))
        cuts = sorted(self.chance.sample(numbers, min(len(numbers), self.chance.randint(1, 3))))
        parts = [numbers[a:b] for a, b in zip([0, *cuts[1:]], [*cuts[1:], None], strict=True)]
        self._groups = [(part, self._group_options()) for part in parts]
        if mixture:
            matrices = [n for n in numbers if theirs[n].dim() == 2 and not theirs[n].is_complex()]
            self._groups = [([n for n in p if n not in matrices], o) for p, o in self._groups]
            self._groups = [(p, o) for p, o in self._groups if p]
            if matrices:
                muon = {"optimizer_class": optim.Muon, "lr": 0.02, "weight_decay": 0.1}
                self._groups.insert(self.chance.randint(0, len(self._groups)), (matrices, muon))
        self._whole = Whole(self._grouped(self._theirs), self._case, self._policy)
        self._order = [n for part, _ in self._groups for n in part]
        self._divided = self._make()
        self._schedule()
        self.acts.append(f"{self._case} {self._policy} {self._groups}")

    def _choose_policy(self) -> MixedPrecision:
        none = MixedPrecision(master_dtype=None)
        if not self._low:
            return none
        rounding = MixedPrecision(master_dtype=None, stochastic_rounding=True, seed=3)
        wider = MixedPrecision(master_dtype=torch.float64)
        return self.chance.choice([MixedPrecision(), MixedPrecision(), rounding, none, wider])

    def _new_param(self) -> nn.Parameter:
        shape = self.chance.choice(SHAPES)
        if self._case is WHOLE and 0 in shape:
            shape = (5, 6)  # Adafactor divides by the number of elements
        dtype = torch.float32
        if self._low and self.often(0.7):
            dtype = self.chance.choice([torch.bfloat16, torch.bfloat16, torch.float16])
        elif self._plain and self.often(0.1):
            dtype = self.chance.choice([torch.complex64, torch.float64])
        values = self._noise(shape, dtype)
        if len(shape) == 2 and self.often(0.2):
            values = self._noise(shape[::-1], dtype).t()
        if len(shape) == 4 and self.often(0.4):
            values = values.contiguous(memory_format=torch.channels_last)
        return nn.Parameter(values, requires_grad=self.often(0.9))

    def _noise(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), generator=self._random).to(dtype)

    def _group_options(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.often(0.5) and not isinstance(self._case.options.get("lr"), Tensor):
            own["lr"] = self.chance.choice([0.004, 0.02])
        if self.often(0.3) and self._case is not WHOLE and "weight_decay" in self._case.options:
            own["weight_decay"] = 0.03
        return own

    def _grouped(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": [params[n] for n in part], **own} for part, own in self._groups]

    def _make(self) -> ZeroRedundancyOptimizer:
        element_wise = self._case is not WHOLE and not any(
            "optimizer_class" in own for _, own in self._groups
        )
        opt = ZeroRedundancyOptimizer(
            self._grouped(self._mine),
            self._case.optimizer_class,
            parameters_as_bucket_view=self.often(0.5),
            layout=self.chance.choice(["auto", "sliced", "whole"] if element_wise else ["auto"]),
            bucket_bytes=self.chance.choice([1, 3000, None]),
            precision=self._policy,
            **self._case.fresh_options(),
        )
        return opt

    def _schedule(self) -> None:
        self._schedulers = [
            lr_scheduler.ExponentialLR(opt, 0.9) for opt in (self._whole.optim, self._divided)
        ]

    # ---------------------------------------------------------------------------- what is done

    def weights(self) -> dict[Act, float]:
        return {
            self.gradients: 8,
            self.step: 8,
            self.closure: 1,
            self.clear: 2,
            self.clip: 1,
            self.freeze: 1.5,
            self.option: 1,
            self.edit_groups: 0.7,
            self.schedule: 1,
            self.add: 0.4,
            self.write: 2.5,
            self.turn: 0.7,
            self.look: 1,
            self.consolidate: 0.7,
            self.reload: 0.6,
            self.exchange: 0.6,
            self.save: 0.4,
            self.halve_the_state: 0.5,
            self.swap: 0.7,
        }

    def check(self) -> None:
        for number, (expected, got) in enumerate(zip(self._theirs, self._mine, strict=True)):
            self.compare(f"parameter {number}", expected.data, got.data)
            if (expected.grad is None) != (got.grad is None):
                self.wrong.append(f"whether {number} has a gradient")
            elif expected.grad is not None:
                self.compare(f"gradient {number}", expected.grad, got.grad)

    def modules(self) -> tuple[nn.Module, nn.Module]:
        return Bare(self._theirs), Bare(self._mine)

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self._theirs, self._mine, strict=True))

    def gradients(self) -> None:
        for theirs, mine in self._pairs():
            kind = self.chance.choice(["new", "new", "new", "new", "none", "zero", "add", "leave"])
            if not theirs.requires_grad and not self.often(0.03):
                continue
            if kind == "none":
                theirs.grad = mine.grad = None
            elif kind == "new":
                grad = torch.empty_like(theirs).copy_(self._noise(theirs.shape, theirs.dtype))
                # In 16 bits torch rounds otherwise where gradient and parameter lie differently.
                wide = self._policy.step_dtype(theirs.dtype).itemsize > 2
                if self._plain and wide and self.often(0.2):
                    grad = grad.contiguous() if self.often(0.5) else _turned(grad)
                theirs.grad, mine.grad = grad.clone(), grad.clone()
            elif theirs.grad is not None and mine.grad is not None:
                if kind == "zero":
                    theirs.grad.zero_()
                    mine.grad.zero_()
                elif kind == "add":
                    grad = self._noise(theirs.shape, theirs.dtype)
                    theirs.grad += grad
                    mine.grad += grad

    def step(self) -> None:
        for opt in (self._whole, self._divided):
            opt.step()

    def closure(self) -> None:
        grads = [self._noise(param.shape, param.dtype) for param in self._theirs]

        def of(params: list[nn.Parameter]) -> Callable[[], float]:
            def evaluate() -> float:
                for param, grad in zip(params, grads, strict=True):
                    if param.requires_grad:
                        param.grad = torch.empty_like(param).copy_(grad)
                return 0.25

            return evaluate

        self.compare("loss", self._whole.step(of(self._theirs)), self._divided.step(of(self._mine)))

    def clear(self) -> None:
        to_none = self.often(0.5)
        for opt in (self._whole, self._divided):
            opt.zero_grad(set_to_none=to_none)

    def clip(self) -> None:
        # Torch knows no largest element of nothing.
        every = all(param.numel() for param in self._theirs)
        norm = self.chance.choice([2.0, 1.0, float("inf") if every else 3.0])
        expected, got = (
            nn.utils.clip_grad_norm_([params[n] for n in self._order], 0.5, norm)
            for params in (self._theirs, self._mine)
        )
        self.compare("norm", expected, got)

    def freeze(self) -> None:
        number = self.chance.randrange(len(self._mine))
        self.say(number)
        for params in (self._theirs, self._mine):
            params[number].requires_grad_(not params[number].requires_grad)

    def halve_the_state(self) -> None:
        self.edit_state(self._whole.optim)

    def option(self) -> None:
        number = self.chance.randrange(len(self._groups))
        value = self.chance.choice([0.001, 0.03])
        for opt in (self._whole, self._divided):
            group = opt.param_groups[number]
            if isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(value)
            else:
                group["lr"] = value
            if "weight_decay" in group:
                group["weight_decay"] = 2 * value

    def add(self) -> None:
        params = [self._new_param() for _ in range(self.chance.randint(1, 2))]
        numbers = list(range(len(self._theirs), len(self._theirs) + len(params)))
        own = self._group_options()
        if isinstance(self._case.options.get("lr"), Tensor):
            own["lr"] = 0.002  # a scheduler writes to the tensor that is the default
        self._theirs += params
        self._mine += [_same(param) for param in params]
        self._groups.append((numbers, own))
        self._order += numbers
        self._whole.add_param_group({"params": [self._theirs[n] for n in numbers], **own})
        self._divided.add_param_group({"params": [self._mine[n] for n in numbers], **own})
        self._schedule()

    def turn(self) -> None:
        """Another memory format."""
        number = self.chance.randrange(len(self._mine))
        self.say(number)
        if not self._plain or self._policy.step_dtype(self._mine[number].dtype).itemsize == 2:
            return
        for params in (self._theirs, self._mine):
            params[number].data = _turned(params[number].data)

    # --------------------------------------------------------------------------------- the state

    def look(self) -> None:
        for place, number in enumerate(self._order):
            got = self._divided.full_state(self._mine[number])
            param = self._mine[number]
            if param.requires_grad or param.dtype == self._policy.step_dtype(param.dtype):
                self.compare(f"state of {number}", plain(self._whole.state_of(place)), plain(got))
        for place, master in self._whole.masters.items():
            param = self._mine[self._order[place]]
            got = self._divided.full_master(param)
            if got is not None:  # or it did not train yet
                self.compare(f"master of {self._order[place]}", plain(master), plain(got))

    def consolidate(self) -> None:
        to = self.chance.randrange(self._divided.world_size)
        self._whole.follow()
        self._divided.consolidate_state_dict(to)
        if self._divided.rank == to:
            got = self._divided.state_dict()
            got.pop("masters", None)
            got.pop("rounding_step", None)
            expected = self._whole.optim.state_dict()
            expected["state"] = dict(sorted(expected["state"].items()))
            # A class may add options where state is loaded.
            for whole, group in zip(expected["param_groups"], got["param_groups"], strict=True):
                for key in group.keys() - whole.keys():
                    del group[key]
            if self._policy == MixedPrecision(master_dtype=None):
                self.compare("state dict", plain(expected), plain(got))
        self.hear(to)

    def reload(self) -> None:
        """What the divided one saves goes into another one."""
        self._whole.follow()
        saved = consolidated(self._divided)
        self._divided.detach()
        self._divided = self._make()
        self._divided.load_state_dict(saved)
        self._schedule()

    def exchange(self) -> None:
        """What the whole one saves goes into a divided one, which goes on without masters."""
        if self._whole.masters or self._policy.stochastic_rounding:
            return
        saved = copy.deepcopy(self._whole.optim.state_dict())
        if self.often(0.5):
            self._divided = self._make()
        self._divided.load_state_dict(saved)
        self._schedule()

    def save(self) -> None:
        model = Bare(self._mine) if self.often(0.5) else None
        self.say("with the model" if model else "")
        with common_folder() as folder:
            self.save_to(folder / "saved", model, lambda: (self.gradients(), self.step()))
            self.renew()
            checkpoint.load(folder / "saved", self._divided, model)
        self._schedule()


def _same(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)


def _turned(tensor: Tensor) -> Tensor:
    """The same values in another order in memory, if there is one."""
    if tensor.dim() == 4:
        if tensor.is_contiguous():
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor.contiguous()
    if tensor.dim() == 2:
        return tensor.t().contiguous().t() if tensor.is_contiguous() else tensor.contiguous()
    return tensor.clone()
