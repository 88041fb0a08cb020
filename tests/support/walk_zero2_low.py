"""With `module=` and 16-bit parameters, any order of calls comes to what masters by hand come to.

Seeded walks: backward passes (held back and not), steps, clearing, parameters written to, frozen,
moved, cast and turned into other memory formats, closures, batches that fail and are skipped,
groups edited by hand, copies of the model, state saved and loaded into other layouts. Beside each
goes one process that has the data of all ranks and adds in their order: sums are the same to the
bit.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from functools import partial

import torch
from models import MLP, consolidated, noise, rank, world_size
from problems import Case
from recovery import Broken
from torch import Tensor, nn, optim
from walks import Act, SavingWalk, Whole, common_folder, plain

from shardstep import BatchSkippedError, MixedPrecision, ZeroRedundancyOptimizer, checkpoint

CASES = [
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    Case(optim.AdamW, {"lr": 0.01}),
    Case(optim.AdamW, {"lr": 0.01, "fused": True}),
    Case(optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    Case(optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.125}),
]
LOW = (torch.bfloat16, torch.bfloat16, torch.float16)


class Convolutions(nn.Module):
    """Four-dimensional weights, one that is used twice, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.body = nn.Conv2d(6, 6, 3, padding=1)
        self.tied = self.body
        self.head = nn.Linear(6, 4)
        self.never = nn.Parameter(torch.ones(70, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x.view(-1, 1, 4, 4)))
        x = torch.tanh(self.tied(torch.tanh(self.body(x))))
        return self.head(x.mean(dim=(2, 3)))


class ByHand(Whole):
    """The whole optimizer, with gradients in the dtype of what is stepped on.

    Attributes:
        grads: for each parameter, its gradient.
    """

    grads: list[Tensor | None]

    def _take_gradients(self) -> None:
        for inner, grad in zip(self._stepped_on, self.grads, strict=True):
            inner.grad = None if grad is None else grad.to(inner.dtype)

    def cast(self, trained: set[int]) -> None:
        """Parameters may have other dtypes now; state stays, and masters of what has ever trained.

        Others have no master yet that would know more than they do.
        """
        for number, param in enumerate(self._params):
            before = self._stepped_on[number]
            wide = self._policy.step_dtype(param.dtype)
            if wide == param.dtype:
                after = param
            elif number in trained and before.dtype == wide and before is not param:
                after = before
            else:
                after = nn.Parameter(param.detach().to(wide))
            if after is not before:
                self._replace(number, before, after)

    def _replace(self, number: int, before: Tensor, after: Tensor) -> None:
        self._stepped_on[number] = after
        if before in self.optim.state:
            self.optim.state[after] = self.optim.state.pop(before)
        for group in self.optim.param_groups:
            group["params"] = [after if param is before else param for param in group["params"]]


class Low(SavingWalk):
    """A walk over a module in 16 bits."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        warnings.filterwarnings("ignore", ".*resumes? from zero|.*start from zero")
        torch.manual_seed(seed)
        self._seed = seed
        make = self.chance.choice([partial(MLP, 48, 3), Convolutions])
        self._theirs: nn.Module = make().to(self.chance.choice(LOW))
        if self.often(0.4):
            next(self._theirs.children()).float()
            if isinstance(self._theirs, MLP):
                self._theirs.layers[0].float()
        self._case = self.chance.choice(CASES)
        for param in self._theirs.parameters():
            # State that is made when the class is has no more bits than what is frozen then.
            param.requires_grad_(self._case.optimizer_class is optim.Adagrad or self.often(0.9))
        self._mine = copy.deepcopy(self._theirs)
        self._trained = {n for n, p in enumerate(self._mine.parameters()) if p.requires_grad}
        rounding = MixedPrecision(master_dtype=None, stochastic_rounding=True, seed=5)
        wide = MixedPrecision(reduce_dtype=torch.float32)
        self._policy = self.chance.choice([MixedPrecision(), MixedPrecision(), rounding, wide])
        params = list(self._theirs.parameters())
        self._whole = ByHand([{"params": params}], self._case, self._policy)
        self._whole.grads = [None] * len(params)
        self._divided = self._make()
        self.acts.append(f"{self._case} {self._policy} {make} {[p.dtype for p in params]}")

    def _make(self) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            self._mine.parameters(),
            self._case.optimizer_class,
            module=self._mine,
            layout=self.chance.choice(["sliced", "whole"]),
            precision=self._policy,
            bucket_bytes=self.chance.choice([1, 5000, None]),
            overlap=self.often(0.7),
            **self._case.fresh_options(),
        )

    def leave(self) -> None:
        self._divided.detach()

    def weights(self) -> dict[Act, float]:
        return {
            self.backward: 8,
            self.accumulate: 2,
            self.step: 8,
            self.clear: 3,
            self.write: 2,
            self.freeze: 1.2,
            self.turn: 0.7,
            self.cast: 0.5,
            self.option: 0.5,
            self.edit_groups: 0.7,
            self.closure: 0.7,
            self.fail_and_recover: 0.5,
            self.copy: 0.3,
            self.look: 1,
            self.evaluate: 1,
            self.reload: 0.7,
            self.save: 0.5,
            self.halve_the_state: 0.5,
            self.swap: 0.7,
            self.hook: 0.3,
        }

    def modules(self) -> tuple[nn.Module, nn.Module]:
        return self._theirs, self._mine

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self._theirs.parameters(), self._mine.parameters(), strict=True))

    def check(self) -> None:
        if self.often(0.5):  # what nobody reads may stay in flight
            for number, (theirs, mine) in enumerate(self._pairs()):
                self.compare(f"parameter {number}", theirs.data, mine.data)

    # -------------------------------------------------------------------------------- backward

    def _loss(self, module: nn.Module, step: int, of: int) -> Tensor:
        dtypes = [param.dtype for param in module.parameters()]
        with torch.autocast("cpu", torch.bfloat16, enabled=len(set(dtypes)) > 1):
            out: Tensor = module(noise(step, 6, 16, of=of).to(dtypes[0]))
        return out.float().square().mean()

    def _local(self, step: int, of: int) -> list[Tensor | None]:
        """The gradients of one rank's data."""
        self._theirs.zero_grad()
        self._loss(self._theirs, step, of).backward()
        return [param.grad for param in self._theirs.parameters()]

    def _sent(self, grads: list[list[Tensor | None]]) -> None:
        """Add what each rank has added up in the wider dtype: scaled, sent and added up."""
        for number, param in enumerate(self._theirs.parameters()):
            parts = [each[number] for each in grads]
            if all(part is None for part in parts):
                continue
            wire = self._policy.wire_dtype(param.dtype)
            total = torch.zeros_like(param, dtype=self._policy.step_dtype(param.dtype))
            for part in parts:
                if part is not None:
                    wide = part if part.itemsize > wire.itemsize else part.to(wire)
                    total += (wide * (1.0 / world_size())).to(wire).to(total.dtype)
            before = self._whole.grads[number]
            self._whole.grads[number] = total if before is None else before + total

    def _step_number(self) -> int:
        return 60 * self._seed + len(self.acts)

    def backward(self) -> None:
        self._loss(self._mine, self._step_number(), rank()).backward()
        self._sent([self._local(self._step_number(), of) for of in range(world_size())])

    def accumulate(self) -> None:
        """Held back, and sent with the last."""
        times = self.chance.randint(2, 3)
        sums: list[list[Tensor | None]] = []
        for of in range(world_size()):
            held: list[Tensor | None] = [None] * len(self._pairs())
            for time in range(times):
                for number, grad in enumerate(self._local(7 * self._step_number() + time, of)):
                    if grad is not None:
                        wide = grad.to(self._policy.step_dtype(grad.dtype))
                        before = held[number]
                        held[number] = wide if before is None else before + wide
            sums.append(held)
        for time in range(times):
            last = time == times - 1
            with contextlib.nullcontext() if last else self._divided.no_sync():
                self._loss(self._mine, 7 * self._step_number() + time, rank()).backward()
        self._sent(sums)

    # ------------------------------------------------------------------------ what may follow

    def step(self) -> None:
        self._whole.step()
        self._divided.step()

    def closure(self) -> None:
        def evaluate() -> float:
            self._clear_all()
            self.backward()
            return 0.5

        self.compare("loss", 0.5, self._divided.step(evaluate))
        self._whole.step()

    def fail_and_recover(self) -> None:
        """A rank fails in its loader, and all skip the batch."""
        failing = self.chance.randrange(world_size())
        self.say(failing)
        self._clear_all()
        try:
            if failing == rank():
                raise Broken
            self._loss(self._mine, self._step_number(), rank()).backward()
            self._divided.step()
            self.wrong.append("a step on a batch that failed")
        except (Broken, BatchSkippedError):
            self._divided.recover()

    def copy(self) -> None:
        """A copy of the model is a plain one, and has the same numbers."""
        copied = copy.deepcopy(self._mine).parameters()
        for number, (theirs, param) in enumerate(
            zip(self._theirs.parameters(), copied, strict=True)
        ):
            self.compare(f"parameter {number} of a copy", theirs.data, param.data)

    def clear(self) -> None:
        to_none = self.often(0.7)
        self._divided.zero_grad(set_to_none=to_none)
        self._whole.grads = [
            None if to_none or grad is None else torch.zeros_like(grad)
            for grad in self._whole.grads
        ]

    def _clear_all(self) -> None:
        self._divided.zero_grad()
        self._whole.grads = [None] * len(self._whole.grads)

    def freeze(self) -> None:
        number = self.chance.randrange(len(self._pairs()))
        self.say(number)
        self._clear_all()
        for param in self._pairs()[number]:
            param.requires_grad_(not param.requires_grad)
        if not any(param.requires_grad for param in self._mine.parameters()):
            for param in self._pairs()[number]:
                param.requires_grad_(True)
        if self._pairs()[number][1].requires_grad:
            self._divided.zero_grad()  # where it is noticed, and has a master from then on
            self._trained.add(number)

    def turn(self) -> None:
        if self._case.options.get("fused"):
            return  # on state that lies otherwise, torch's kernels take each element for another
        self._clear_all()
        form = self.chance.choice([torch.channels_last, torch.contiguous_format])
        self.say(form)
        for module in self.modules():
            module.to(memory_format=form)  # type: ignore[call-overload]

    def cast(self) -> None:
        """All parameters get one dtype."""
        if self._case.options.get("fused") or self._case.options.get("foreach"):
            return
        dtype = self.chance.choice([torch.bfloat16, torch.float16, torch.float32])
        self.say(dtype)
        self._clear_all()
        for module in self.modules():
            module.to(dtype)
        self._divided.zero_grad()  # where it is noticed; masters follow what was rounded by then
        self._whole.cast(self._trained)
        self._whole.follow()

    def halve_the_state(self) -> None:
        self.edit_state(self._whole.optim)

    def option(self) -> None:
        for opt in (self._whole, self._divided):
            opt.param_groups[0]["lr"] *= 0.7

    # --------------------------------------------------------------------------------- the state

    @torch.no_grad()
    def evaluate(self) -> None:
        self.compare("output", *(self._loss(m, self._step_number(), 0) for m in self.modules()))

    def look(self) -> None:
        for number, (_, mine) in enumerate(self._pairs()):
            if not mine.requires_grad:
                continue
            got = plain(self._divided.full_state(mine))
            self.compare(f"state of {number}", plain(self._whole.state_of(number)), got)
            grad = self._divided.full_grad(mine)
            self.compare(f"gradient {number}", plain(self._whole.grads[number]), plain(grad))
        for number, master in self._whole.masters.items():
            found = self._divided.full_master(self._pairs()[number][1])
            if found is not None and number in self._trained:
                self.compare(f"master of {number}", plain(master), plain(found))

    def reload(self) -> None:
        """What the divided one saves goes into another one, of any layout."""
        self._clear_all()
        self._whole.follow()
        saved = consolidated(self._divided)
        self.renew()
        self._divided.load_state_dict(saved)

    def save(self) -> None:
        self._clear_all()
        model = self._mine if self.often(0.5) else None
        self.say("with the model" if model else "")
        with common_folder() as folder:
            self.save_to(folder / "saved", model, lambda: (self.backward(), self.step()))
            self._clear_all()
            self.renew()
            checkpoint.load(folder / "saved", self._divided, model)
