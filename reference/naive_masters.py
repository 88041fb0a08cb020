"""Training 16-bit parameters with fp32 masters as plainly as it can be written: a test oracle.

Every rank keeps a master of every parameter and steps on all of them; nothing is divided. Gradients
are averaged by gathering everybody's and adding them up in rank order, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer


class NaiveMasters:
    """An optimizer on fp32 copies of its 16-bit parameters; others are stepped on as they are.

    Args:
        groups: the parameter groups.
        optimizer_class: what steps on the masters.
        **defaults: options for `optimizer_class`.

    Attributes:
        params: all parameters.
        masters: what is stepped on for each of them.
        optim: the optimizer on those.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        **defaults: Any,
    ) -> None:
        self.params: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self._means: dict[int, torch.Tensor] = {}
        self.optim = optimizer_class([self._masters_of(group) for group in groups], **defaults)

    def _masters_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        made = []
        for param in group["params"]:
            narrow = param.is_floating_point() and param.itemsize < 4
            made.append(torch.nn.Parameter(param.detach().float()) if narrow else param)
        self.params += group["params"]
        self.masters += made
        return {**group, "params": made}

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Make masters for more parameters."""
        self.optim.add_param_group(self._masters_of(group))

    def take_gradients(self) -> None:
        """Give each master its parameter's gradient."""
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                master.grad = None if param.grad is None else param.grad.to(master.dtype)

    def add_mean_gradients(self, wire: torch.dtype | None = None) -> None:
        """Add the mean over all ranks of each parameter's gradient to its master's, and clear it.

        Called on every rank. Each rank's part is scaled by 1/N, and then has dtype `wire` when it
        is added, or its own if None.
        """
        for number, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            if param.grad is None:
                continue
            sent = wire or param.dtype
            scaled = param.grad.to(torch.promote_types(param.dtype, sent))
            scaled = (scaled * (1 / dist.get_world_size())).to(sent)
            mean = sum_over_ranks(scaled, master.dtype)
            param.grad = None
            self._means[number] = self._means[number] + mean if number in self._means else mean

    def give_means(self) -> None:
        """Let each master have the mean gradient that was added up for it."""
        for number, mean in self._means.items():
            self.masters[number].grad = mean
        self._means.clear()

    def step(self) -> None:
        """Step on the masters and round them into the parameters."""
        self.give_means()
        self.optim.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if master is not param:
                    param.copy_(master)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.params, *self.masters):
            tensor.grad = None


def sum_over_ranks(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add the `part` of every rank in rank order, in `dtype`. Called on every rank."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    total = parts[0].to(dtype)
    for other in parts[1:]:
        total = total + other.to(dtype)
    return total
