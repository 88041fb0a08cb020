"""Comparison of tensors and optimizer states, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by number of bytes; they are equal if the bits are."""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if shape, dtype and bits are equal. All NaNs are equal."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if not (is_plain(one) and is_plain(other)):
        return type(one) is type(other) and same(_inner(one), _inner(other))
    if one.is_complex():
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    bits, others = as_integers(one), as_integers(other)
    if torch.equal(bits, others) or not one.is_floating_point():
        return torch.equal(bits, others)
    # The bits of a NaN depend on the kernel, and that on the number of tensors in a call.
    both_nan = one.detach().isnan() & other.detach().isnan()
    return torch.equal(bits.masked_fill(both_nan, 0), others.masked_fill(both_nan, 0))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the bits of a dense tensor as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(_INTEGERS[real.element_size()])


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is nothing but its elements in memory."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not tensor.is_quantized


def _inner(tensor: torch.Tensor) -> Any:
    """Return the tensors inside of a tensor subclass or a sparse tensor."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.to_dense()
    names, context = flatten()
    return [*(getattr(tensor, name) for name in names), context]


def same(one: Any, other: Any) -> bool:
    """Return True if two values have equal structure, equal leaves and tensors of equal bits.

    Objects that do not define equality count as equal: each run makes others.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, Mapping):
        # Keys that are tensors differ from run to run.
        names, others = (
            [key for key in each if not isinstance(key, torch.Tensor)] for each in (one, other)
        )
        return names == others and all(same(one[name], other[name]) for name in names)
    if is_sequence(one):
        return len(one) == len(other) and all(map(same, one, other))
    no_equality: Any = object.__eq__
    return type(one).__eq__ is no_equality or bool(one == other) or one != one


def fits(
    whole: Any, pieces: Sequence[Any], shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]
) -> bool:
    """Return True if the states of a tensor's pieces are its state, cut like the tensor.

    Values that are not per element must be comparable, and equal in all states.
    """
    if not all(type(piece) is type(whole) for piece in pieces):
        return False
    if isinstance(whole, torch.Tensor):
        cut = all(tuple(p.shape) == s for p, s in zip(pieces, shapes, strict=True))
        if tuple(whole.shape) == shape and cut and is_plain(whole):
            joined = torch.cat([piece.reshape(-1) for piece in pieces])
            return same_bits(joined, whole.reshape(-1))
        return all(same_bits(whole, piece) for piece in pieces)
    if isinstance(whole, Mapping) or is_sequence(whole):
        keys, *others = (_keys(each) for each in (whole, *pieces))
        return all(other == keys for other in others) and all(
            fits(whole[key], [piece[key] for piece in pieces], shape, shapes) for key in keys
        )
    # Any other object may hold something that a later step uses.
    plain = whole is None or isinstance(whole, (bool, int, float, complex, str))
    return plain and all(same(whole, piece) for piece in pieces)


def _keys(value: Any) -> list[Any]:
    return list(value if isinstance(value, Mapping) else range(len(value)))


def is_sequence(value: Any) -> bool:
    """Return True for a list, a tuple, a deque or the like, but not for text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
