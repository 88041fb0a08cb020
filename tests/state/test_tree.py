"""Optimizer state as text and tensors: what goes in comes out, bit for bit, without pickle."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import same_bits

from shardstep.state.tree import INLINE_NBYTES, Leaf, decode, encode, leaves

CPU = torch.device("cpu")

KINDS = "float32 float64 float16 bfloat16 complex64 complex128 int8 uint8 int32 int64 bool"
DTYPES = [getattr(torch, kind) for kind in f"{KINDS} float8_e4m3fn".split()]

channels_last = torch.channels_last
DENSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as made": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=channels_last) if t.ndim == 4 else t,
    "transposed": lambda t: t.movedim(0, -1) if t.ndim > 1 else t,
    "shifted": lambda t: t[1:] if t.ndim else t,
}
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **DENSE,
    "with gaps": lambda t: t[..., ::2] if t.ndim else t,
    "repeated": lambda t: t.expand(3, *t.shape),
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    sizes = st.sampled_from([0, 1, 2, 3, 5])
    shape = draw(st.one_of(st.just(()), st.lists(sizes, max_size=4).map(tuple)))
    numel = torch.Size(shape).numel()
    # Random bits, not numbers: NaNs with payloads, infinities and denormals come up too.
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return FORMS[draw(st.sampled_from(sorted(FORMS)))](bits.view(dtype).reshape(shape))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    tensors(),
)
keys = st.one_of(st.text(max_size=5), st.integers(-3, 300))
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, float):
        return repr(one) == repr(other)  # so that nan is nan and -0.0 is not 0.0
    if isinstance(one, (list, tuple)):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def round_trip(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Send the structure as text and the tensors by hand, as another process would get them."""
    node, sent = encode(value)
    arriving = iter([tensor.clone() for tensor in sent])

    def make(leaf: Leaf) -> torch.Tensor:
        tensor = next(arriving)
        assert (tensor.dtype, tensor.shape) == (leaf.dtype, leaf.shape)
        if leaf.data is not None:
            tensor = leaf.empty(CPU)  # small: all of it must be in the text
        assert tensor.stride() == leaf.stride or tensor.numel() == 0
        return tensor

    result = decode(json.loads(json.dumps(node)), make)
    assert next(arriving, None) is None, "a tensor was listed but not described"
    return result, sent


@given(trees)
def test_what_is_encoded_comes_back_bit_for_bit(value: Any) -> None:
    result, _ = round_trip(value)
    assert same(value, result)


@given(tensors())
def test_small_tensors_travel_in_the_text_and_large_ones_do_not(tensor: torch.Tensor) -> None:
    node, sent = encode({"state": [0.9, ({7: tensor},)]})
    (leaf,) = leaves(json.loads(json.dumps(node)))
    assert leaf.path == "state.1.0.7"
    assert leaf.on_cpu
    assert (leaf.data is not None) == (tensor.nbytes <= INLINE_NBYTES)
    assert len(sent) == 1
    if leaf.data is not None:
        assert same(tensor, leaf.empty(CPU))


@pytest.mark.parametrize("numel", [15, 16, 17, 1000])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_tensors_keep_their_memory_format_and_are_not_copied(
    form: str, dtype: torch.dtype, numel: int
) -> None:
    tensor = FORMS[form](torch.arange(numel * 4).reshape(2, 2, 1, numel).to(dtype))
    result, (sent,) = round_trip(tensor)
    assert same(tensor, result)
    if form in DENSE:
        assert result.stride() == tensor.stride()
        assert sent.data_ptr() == tensor.data_ptr()


def test_parameters_lose_their_graph_and_mappings_become_dicts() -> None:
    value = OrderedDict(weight=torch.nn.Parameter(torch.ones(3)))
    result, (sent,) = round_trip(value)
    assert type(result) is dict
    assert type(sent) is torch.Tensor
    assert not sent.requires_grad


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (b"raw", "bytes"),
        (torch.device("cpu"), "device"),
        (Pair(1, 2), "Pair"),
        (lambda: None, "function"),
        (torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True), "sparse_coo"),
        ({(1, 2): 3}, "key of type tuple"),
        ({None: 3}, "key of type NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_text_cannot_hold_is_refused_by_its_path(bad: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"state 'momentum.0.inner' .*{name}"):
        encode({"momentum": [{"inner": bad}]})


@pytest.mark.parametrize("numel", [3, 100])
@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view], ids=["conjugated", "negated"])
def test_lazily_conjugated_and_negated_tensors_come_back_as_their_values(
    lazy: Callable[[torch.Tensor], torch.Tensor], numel: int
) -> None:
    tensor = lazy(torch.complex(torch.arange(float(numel)), torch.ones(numel)))
    assert tensor.is_conj() or tensor.is_neg()
    node, sent = encode({"exp_avg": tensor})
    # What travels is the bytes.
    result = leaves(node)[0].empty(CPU)
    if numel == 100:
        result.view(torch.uint8).copy_(sent[0].view(torch.uint8))
    assert torch.equal(result, tensor)
