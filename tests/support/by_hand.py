"""An unsharded optimizer that the sharded one has to equal, with 16-bit parameters done by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from problems import Case
from torch import Tensor, nn
from torch.optim import Optimizer

from shardstep import MixedPrecision
from shardstep.local.multi_class import MultiClass
from shardstep.params.stochastic_rounding import StochasticRounding


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class ByHand:
    """The optimizer class on the parameters, or on wider tensors in place of narrow ones.

    Args:
        groups: parameter groups; each may name its class.
        case: the class of the other groups, and its options.
        policy: the precision in which parameters are stepped on.

    Attributes:
        stepped_on: for each parameter, the tensor that the class steps on.
    """

    def __init__(self, groups: list[dict[str, Any]], case: Case, policy: MixedPrecision) -> None:
        self._policy = policy
        self._rounding = StochasticRounding(policy.seed)
        self.stepped_on: dict[Tensor, Tensor] = {}
        made = [self._widened(group) for group in groups]
        if any("optimizer_class" in group for group in groups):
            self.optim: Optimizer = MultiClass(made, case.optimizer_class, **case.fresh_options())
        else:
            self.optim = case.optimizer_class(made, **case.fresh_options())

    def _widened(self, group: dict[str, Any]) -> dict[str, Any]:
        for param in group["params"]:
            wide = self._policy.step_dtype(param.dtype)
            same = wide == param.dtype
            self.stepped_on[param] = param if same else nn.Parameter(param.detach().to(wide))
        return {**group, "params": [self.stepped_on[param] for param in group["params"]]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @property
    def widened(self) -> dict[Tensor, Tensor]:
        """The tensors that are stepped on in place of parameters."""
        return {param: wide for param, wide in self.stepped_on.items() if wide is not param}

    @property
    def masters(self) -> dict[Tensor, Tensor]:
        if self._policy.stochastic_rounding:
            return {}
        self.follow()
        return self.widened

    def state_of(self, param: Tensor) -> dict[str, Any]:
        return dict(self.optim.state.get(self.stepped_on[param], {}))

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(self._widened(group))

    @torch.no_grad()
    def follow(self) -> None:
        """Take over each element of a parameter that is not the rounding of its master.

        The sharded optimizer does so before each step, and when it is asked for state.
        """
        for param, wide in self.widened.items():
            if wide.stride() != param.stride():
                wide.data = torch.empty_like(param, dtype=wide.dtype).copy_(wide)
            bits = torch.int16 if param.itemsize == 2 else torch.int32
            same = wide.to(param.dtype).view(bits) == param.view(bits)
            every_time = self._policy.stochastic_rounding
            wide.copy_(param if every_time else torch.where(same, wide, param))

    def _take_gradients(self) -> None:
        for param, wide in self.widened.items():
            wide.grad = None if param.grad is None else param.grad.to(wide.dtype)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.follow()
        self._take_gradients()
        kwargs: dict[str, Any] = {}
        if closure is not None:
            kwargs["closure"] = lambda: (closure(), self._take_gradients())[0]
        loss = self.optim.step(**kwargs)
        self._rounding.step += 1
        for number, (param, wide) in enumerate(self.stepped_on.items()):
            if wide is param:
                continue
            if self._policy.stochastic_rounding:
                flat = _in_memory_order(param), _in_memory_order(wide)
                self._rounding.round_into(*flat, number, 0)
            else:
                param.data.copy_(wide.detach())
        return loss

    def cast(self, trained: set[Tensor]) -> None:
        """Follow parameters to other dtypes; state stays, and masters of what has trained."""
        for param, before in list(self.stepped_on.items()):
            dtype = self._policy.step_dtype(param.dtype)
            if dtype == param.dtype:
                after = param
            elif param in trained and before.dtype == dtype and before is not param:
                continue
            else:
                after = nn.Parameter(param.detach().to(dtype))
            if after is not before:
                self.stepped_on[param] = after
                if before in self.optim.state:
                    self.optim.state[after] = self.optim.state.pop(before)
                for group in self.optim.param_groups:
                    group["params"] = [
                        after if each is before else each for each in group["params"]
                    ]

    def snapshot(self) -> Any:
        """Return a copy of all that a step changes."""
        self.follow()
        values = [tensor.detach().clone() for pair in self.stepped_on.items() for tensor in pair]
        states = [copy.deepcopy(self.state_of(param)) for param in self.stepped_on]
        return values, states, self._rounding.step

    def restore(self, before: Any) -> None:
        """Go back to a snapshot; not by loading, which casts state."""
        values, states, self._rounding.step = before
        tensors = [tensor for pair in self.stepped_on.items() for tensor in pair]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)
        for wide, state in zip(self.stepped_on.values(), states, strict=True):
            self.optim.state.pop(wide, None)
            if state:
                self.optim.state[wide] = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.stepped_on:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach().zero_()
