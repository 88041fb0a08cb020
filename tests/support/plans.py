"""Hypothesis strategies for parameters and plans."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from shardstep.plan import ParamSpec, ShardPlan

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8]

shapes = st.one_of(
    st.sampled_from([(), (0,), (0, 3), (1,), (63,), (64,), (65,), (3, 5), (2, 3, 4, 5)]),
    st.tuples(st.integers(1, 400), st.integers(1, 300)),
)


def make_spec(
    index: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    group: int,
    trainable: bool,
) -> ParamSpec:
    stride = torch.empty(shape, device="meta").stride()
    return ParamSpec(f"layer.{index}", shape, tuple(stride), dtype, device, group, trainable)


@st.composite
def spec_lists(draw: st.DrawFn, frozen: bool = True, max_size: int = 14) -> list[ParamSpec]:
    some_dtypes = st.sampled_from(draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)))
    some_devices = st.sampled_from(draw(st.sampled_from([["cpu#0"], ["cuda#0", "cuda#1"]])))
    trainable = st.sampled_from([True, True, False]) if frozen else st.just(True)
    rows = st.tuples(shapes, some_dtypes, some_devices, st.integers(0, 2), trainable)
    drawn = draw(st.lists(rows, min_size=1, max_size=max_size))
    return [make_spec(index, *row) for index, row in enumerate(drawn)]


world_sizes = st.integers(1, 17)
layouts = st.sampled_from(["sliced", "whole"])
bucket_sizes = st.sampled_from([1, 1000, 4096, 300_000, 25 * 2**20])


@st.composite
def costly(draw: st.DrawFn) -> list[ParamSpec]:
    """Parameters that may not be cut, of any cost, with some that may."""
    return [
        replace(
            spec,
            layout=draw(st.sampled_from(["whole", "whole", "sliced"])),
            cost=draw(st.sampled_from([0, 1, 1000, 10**9, spec.numel**2])),
        )
        for spec in draw(spec_lists())
    ]


@st.composite
def plans(draw: st.DrawFn, layout: str | None = None) -> ShardPlan:
    """Plans of one layout, or of several."""
    specs = draw(st.one_of(spec_lists(), costly()))
    return ShardPlan.make(specs, draw(world_sizes), layout, draw(bucket_sizes))
