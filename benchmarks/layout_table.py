"""What a plan costs against the ideal, for known models, on paper: the table in docs/layouts.md.

    python benchmarks/layout_table.py

For each model, number of ranks and way to lay it out: the rank that holds most, the rank that
computes most and the rank that sends most, each over the mean of all ranks, or over the ideal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from shardstep.layouts.cost import newton_schulz
from shardstep.plan import ParamSpec, ShardPlan, shares
from shardstep.plan.models import model

OUTSIDE = ("wte", "wpe", "embed_tokens", "lm_head")
HEAD = (
    "| model | ranks | layout | state, most / mean | Newton–Schulz, most / mean | "
    "gradients sent, most / ideal | parameters sent, most / ideal |\n|---|---|---|---|---|---|---|"
)


def is_inner(spec: ParamSpec) -> bool:
    """Whether people give it to Muon: a matrix of a block."""
    return len(spec.shape) == 2 and not spec.name.startswith(OUTSIDE)


def with_muon(specs: Sequence[ParamSpec], by_cost: bool = True) -> list[ParamSpec]:
    """Muon for the matrices of the blocks, whole; an element-wise class for the rest, sliced."""
    return [
        dataclasses.replace(
            spec, layout="whole", cost=newton_schulz(spec.shape, 5) if by_cost else 0
        )
        if is_inner(spec)
        else spec
        for spec in specs
    ]


def all_whole(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """One per-tensor class for all."""
    return [dataclasses.replace(spec, layout="whole") for spec in specs]


WAYS: dict[str, Callable[[Sequence[ParamSpec]], list[ParamSpec]]] = {
    "sliced: AdamW for all": list,
    "mixed: Muon and AdamW": with_muon,
    "whole: Adafactor for all": all_whole,
}


def row(name: str, specs: Sequence[ParamSpec], world_size: int, way: str) -> str:
    """One line of the table."""
    plan = ShardPlan.make(WAYS[way](specs), world_size)
    each = shares(plan)
    mean = sum(one.nbytes for one in each) / world_size
    ideal = mean * (world_size - 1)
    work = [0] * world_size
    for rank in range(world_size):
        for param in plan.intervals(rank):
            spec = plan.specs[param]
            work[rank] += newton_schulz(spec.shape, 5) if is_inner(spec) else 0
    muon = f"{max(work) * world_size / sum(work):.2f}" if way.startswith("mixed") else ""
    return (
        f"| {name} | {world_size} | {way} | {max(s.nbytes for s in each) / mean:.2f} | {muon} | "
        f"{max(s.reduce_nbytes_sent for s in each) / ideal:.2f} | "
        f"{max(s.gather_nbytes_sent for s in each) / ideal:.2f} |"
    )


def table() -> str:
    """The whole table."""
    models = {"GPT-2 124M": model("gpt2-124m"), "Llama-3 8B": model("llama3-8b")}
    rows = [
        row(name, specs, world_size, way)
        for name, specs in models.items()
        for world_size in (8, 64)
        for way in WAYS
    ]
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    print(table())
