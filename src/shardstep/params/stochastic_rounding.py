"""Rounds fp32 to 16 bits at random, so that the mean is right, and the same at any world size.

The random numbers are computed, not drawn: each is a hash of the seed, the step, the parameter's
number and the element's place in it. Whoever owns an element rounds it alike.
"""

from __future__ import annotations

import torch

CHUNK = 1 << 15
"""How many elements a CPU rounds at a time: what is computed on the way is several times as large
as they are, and is to stay in its cache."""

DEVICE_CHUNK = 1 << 22
"""How many an accelerator does: enough to keep it busy, few enough to have room for."""

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


class StochasticRounding:
    """A sequence of random roundings.

    Args:
        seed: chooses the sequence.

    Attributes:
        step: where in it this is; the next step is another one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.step = 0

    def round_into(
        self, target: torch.Tensor, source: torch.Tensor, param: int, offset: int
    ) -> None:
        """Round flat `source` into flat `target`.

        Args:
            target: 16-bit floating point.
            source: fp32, as long.
            param: the number of the parameter that these are elements of.
            offset: the number of the first of them in it.
        """
        key = 0
        for word in (self._seed, self.step, param):
            key = mixed((key + word + 1) * _GOLDEN % _WORD)
        chunk = CHUNK if source.device.type == "cpu" else DEVICE_CHUNK
        for start in range(0, source.numel(), chunk):
            stop = min(start + chunk, source.numel())
            counter = torch.arange(offset + start, offset + stop, device=source.device)
            target[start:stop] = rounded(source[start:stop], target.dtype, fractions(counter, key))


def rounded(source: torch.Tensor, dtype: torch.dtype, fraction: torch.Tensor) -> torch.Tensor:
    """`source` in `dtype`: rounded away from zero where what is lost is more than `fraction`.

    A fraction is of the distance between two neighbours in `dtype`. What is not finite stays so,
    and what is does.
    """
    magnitude = source.abs()
    nearest = source.to(dtype)
    # Neighbours are one apart as integers, the one further from zero being the larger, whatever the
    # sign bit.
    bits = nearest.view(torch.int16)
    low = bits - (nearest.float().abs() > magnitude).to(torch.int16)
    below = low.view(dtype).float().abs()
    above = (low + 1).view(dtype).float().abs()
    up = fraction < (magnitude - below) / (above - below)
    return (low + up.to(torch.int16)).view(dtype)


def fractions(counter: torch.Tensor, key: int) -> torch.Tensor:
    """Numbers in [0, 1), multiples of 2**-24, that look random: one for each of `counter`."""
    state = (counter * _signed(_GOLDEN)).add_(_signed(key))
    for shift, factor in _MIX:
        state.bitwise_xor_(_shifted(state, shift)).mul_(_signed(factor))
    state.bitwise_xor_(_shifted(state, _LAST_SHIFT))
    return _shifted(state, 40).to(torch.float32).mul_(2.0**-24)


def mixed(word: int) -> int:
    """The same mixing of one number, without a tensor."""
    for shift, factor in _MIX:
        word = (word ^ (word >> shift)) * factor % _WORD
    return word ^ (word >> _LAST_SHIFT)


def _shifted(state: torch.Tensor, shift: int) -> torch.Tensor:
    """Shifted right with zeros coming in; torch's integers have a sign, which would come in."""
    return (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
