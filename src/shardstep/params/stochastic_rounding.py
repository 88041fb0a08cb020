"""Stochastic rounding of fp32 to 16 bits, with the same result at any world size.

The random numbers are computed, not drawn. Each is a hash of the seed, the step, the parameter's
number and the element's position in it, so every possible owner rounds an element in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 1 << 15
"""Elements that a CPU rounds at a time, so that intermediate results stay in its cache."""

DEVICE_CHUNK = 1 << 22
"""Elements that an accelerator rounds at a time: enough to keep it busy, in little memory."""

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


@dataclass(eq=False)
class StochasticRounding:
    """A sequence of random roundings. The caller advances `step`, the position in it."""

    seed: int
    step: int = 0

    def round_into(
        self, target: torch.Tensor, source: torch.Tensor, param: int, offset: int
    ) -> None:
        """Round flat fp32 `source`, which starts at `offset` in the parameter, into `target`."""
        key = 0
        for word in (self.seed, self.step, param):
            key = mixed((key + word + 1) * _GOLDEN % _WORD)
        chunk = CHUNK if source.device.type == "cpu" else DEVICE_CHUNK
        for start in range(0, source.numel(), chunk):
            stop = min(start + chunk, source.numel())
            counter = torch.arange(offset + start, offset + stop, device=source.device)
            target[start:stop] = rounded(source[start:stop], target.dtype, fractions(counter, key))


def rounded(source: torch.Tensor, dtype: torch.dtype, fraction: torch.Tensor) -> torch.Tensor:
    """Round `source` to `dtype`, away from zero where the remainder exceeds `fraction`.

    Fractions are of the distance between two neighbours in `dtype`. Finite values stay finite, and
    other values stay as they are.
    """
    magnitude = source.abs()
    nearest = source.to(dtype)
    # As integers, neighbours differ by one, and the larger is further from zero for either sign.
    bits = nearest.view(torch.int16)
    low = bits - (nearest.float().abs() > magnitude).to(torch.int16)
    below = low.view(dtype).float().abs()
    above = (low + 1).view(dtype).float().abs()
    up = fraction < (magnitude - below) / (above - below)
    return (low + up.to(torch.int16)).view(dtype)


def fractions(counter: torch.Tensor, key: int) -> torch.Tensor:
    """Return a pseudo-random multiple of 2**-24 in [0, 1) for each element of `counter`."""
    state = (counter * _signed(_GOLDEN)).add_(_signed(key))
    for shift, factor in _MIX:
        state.bitwise_xor_(_shifted(state, shift)).mul_(_signed(factor))
    state.bitwise_xor_(_shifted(state, _LAST_SHIFT))
    return _shifted(state, 40).to(torch.float32).mul_(2.0**-24)


def mixed(word: int) -> int:
    """Mix one number as `fractions` does, without a tensor."""
    for shift, factor in _MIX:
        word = (word ^ (word >> shift)) * factor % _WORD
    return word ^ (word >> _LAST_SHIFT)


def _shifted(state: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift right, filling with zeros; torch fills with the sign."""
    return (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
