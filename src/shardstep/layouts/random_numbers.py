"""Random numbers of an optimizer class: detected, and replaced by constants."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RandomSources:
    """The random generators of the process: Python's, numpy's and torch's, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._numpy: Any = sys.modules.get("numpy")
        self._device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._seed = 0
        self._device_state: Any = None

    def seed(self, seed: int) -> None:
        """Seed all generators: a verdict must be the same in every process."""
        self._seed = seed
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if self._numpy:
            self._numpy.random.seed(seed)
        if self._device:
            self._device.manual_seed(seed)
            self._device_state = self._device.get_rng_state()

    def used(self) -> bool:
        """Return True if numbers were drawn since `seed`. Called once after each."""
        if self._device and not torch.equal(self._device_state, self._device.get_rng_state()):
            return True
        # An unused generator continues as from its seed. Comparing whole states is slower.
        found = self._draw()
        self.seed(self._seed)
        return found != self._draw()

    def _draw(self) -> list[float]:
        numbers = [random.random(), *torch.rand(2, dtype=torch.float32, device="cpu").tolist()]
        return [*numbers, self._numpy.random.random_sample()] if self._numpy else numbers


class ConstantRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which torch's random operations return constants."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The sandbox compiles nothing, and checking that is as slow as an operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_random(func):
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(0.25 if tensor.is_floating_point() else 0)
        return out


@functools.cache
def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags
