"""Counts CUDA graphs of the local step, and has a double for them on the CPU.

A graph has addresses and options built in, and holds no memory. So does the double: it steps on the
addresses of the time when it was recorded, whatever lies there now.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardstep.local import step_graphs

NOT_FUSED = ("complex_parameters", "convert_the_model")
"""Scenarios in which torch's fused AdamW raises."""


def capturable(device: str | None = None) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return a class and options whose steps can be replayed."""
    lr = torch.tensor(0.01, device=device)
    return torch.optim.AdamW, {"lr": lr, "fused": True, "capturable": True}


def _same_memory(tensor: Tensor) -> Tensor:
    """Return a tensor at the same address, which does not keep the memory alive."""
    if not tensor.numel():
        return tensor.detach().clone()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    raw = (ctypes.c_char * (span * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Recording:
    """A step of an optimizer, to be taken again and again."""

    def __init__(self, optim: Optimizer) -> None:
        self.replays = 0
        groups, state = [], {}
        for group in optim.param_groups:
            params = []
            for param in group["params"]:
                if param.grad is not None:
                    params.append(nn.Parameter(_same_memory(param.detach())))
                    params[-1].grad = _same_memory(param.grad)
                    state[params[-1]] = {
                        key: _same_memory(value) for key, value in optim.state[param].items()
                    }
            lr = group["lr"]
            lr = _same_memory(lr) if isinstance(lr, Tensor) else lr
            groups.append({**group, "params": params, "lr": lr})
        self._twin: Any = None
        if any(group["params"] for group in groups):
            self._twin = type(optim)(groups)
            self._twin.state.update(state)

    def __call__(self) -> None:
        self.replays += 1
        if self._twin is not None:
            self._twin.step()


@contextmanager
def steps_recorded() -> Iterator[list[Recording]]:
    """Record and replay steps on the CPU, and yield what was recorded."""
    made: list[Recording] = []

    def record(optim: Optimizer) -> Recording:
        made.append(Recording(optim))
        return made[-1]

    with (
        mock.patch.object(step_graphs.StepGraphs, "device_type", "cpu"),
        mock.patch.object(step_graphs, "record", record),
    ):
        yield made


class Counted:
    """What takes a recorded step again, and how often it did."""

    def __init__(self, again: Callable[[], object]) -> None:
        self._again = again
        self.replays = 0

    def __call__(self) -> None:
        self.replays += 1
        self._again()


@contextmanager
def graphs_counted() -> Iterator[list[Counted]]:
    """Yield the CUDA graphs that are recorded."""
    made: list[Counted] = []
    real = step_graphs.record

    def record(optim: Optimizer) -> Callable[[], object] | None:
        again = real(optim)
        if again is None:
            return None
        made.append(Counted(again))
        return made[-1]

    with mock.patch.object(step_graphs, "record", record):
        yield made
