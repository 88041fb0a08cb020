"""An interval of a parameter's memory, as boxes of its shape."""

from __future__ import annotations

import itertools
import math
import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstep.plan import Box, Interval, boxes, overlap


@st.composite
def stretches(draw: st.DrawFn) -> tuple[torch.Tensor, Interval]:
    """A dense tensor whose elements are numbered in memory order, and a stretch of them."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    numel = math.prod(shape)
    inverse = [order.index(dim) for dim in range(len(shape))]
    tensor = torch.arange(numel).view([shape[dim] for dim in order]).permute(inverse)
    start = draw(st.integers(0, numel))
    return tensor, Interval(start, draw(st.integers(start, numel)))


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    slices = [slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)]
    return tensor[tuple(slices)]


@given(stretches())
def test_a_few_boxes_hold_the_elements_of_the_interval_in_memory_order(
    given: tuple[torch.Tensor, Interval],
) -> None:
    tensor, interval = given
    memory = torch.arange(tensor.numel())
    end = interval.start
    found = boxes(interval, tensor.shape, tensor.stride())
    for stretch, box in found:
        assert stretch.start == end
        assert box.fits(tensor.shape)
        view = memory.as_strided(box.sizes, tensor.stride(), stretch.start)
        assert torch.equal(view, part(tensor, box))
        assert stretch.numel == box.numel
        end = stretch.stop
    assert end == interval.stop or not interval.numel
    assert len(found) <= max(1, 2 * tensor.dim() - 1)


@given(st.data())
def test_what_two_boxes_have_in_common(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    tensor = torch.arange(math.prod(shape)).view(shape)

    def box() -> Box:
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        sizes = [data.draw(st.integers(1, size - s)) for size, s in zip(shape, starts, strict=True)]
        return Box(tuple(starts), tuple(sizes))

    a, b = box(), box()
    common = a.intersect(b)
    expected = set(part(tensor, a).flatten().tolist()) & set(part(tensor, b).flatten().tolist())
    found = part(tensor, common).flatten().tolist() if common is not None else []
    assert set(found) == expected
    if common is not None:
        assert torch.equal(part(part(tensor, a), common.within(a)), part(tensor, common))
        assert common.within(a).out_of(a) == common


def test_a_box_outside_of_a_shape_does_not_fit() -> None:
    assert Box.whole((3, 4)).fits((3, 4))
    for offsets, sizes in [((0, 1), (3, 4)), ((-1, 0), (1, 1)), ((0,), (3,)), ((0, 0), (1, -1))]:
        assert not Box(offsets, sizes).fits((3, 4))


@st.composite
def some_boxes(draw: st.DrawFn) -> list[Box]:
    dims = draw(st.integers(0, 3))
    box = st.builds(
        lambda spans: Box(tuple(start for start, _ in spans), tuple(size for _, size in spans)),
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=dims, max_size=dims),
    )
    return draw(st.lists(box, max_size=6))


@given(some_boxes())
def test_an_overlap_is_found_exactly_if_two_boxes_have_an_element_in_common(
    given: list[Box],
) -> None:
    pairs = [pair for pair in itertools.combinations(given, 2) if pair[0].intersect(pair[1])]
    found = overlap(given)
    assert (found is not None) == bool(pairs)
    assert found is None or found[0].intersect(found[1]) is not None


def test_thousands_of_chunks_are_compared_in_no_time() -> None:
    chunks = [
        box
        for n in range(8192)
        for _, box in boxes(Interval(64 * n, 64 * n + 64), (8192, 64), (64, 1))
    ]
    start = time.process_time()
    assert overlap(chunks) is None
    assert time.process_time() - start < 15, "each with each would take minutes"
