"""What is done with an unsharded class is done with a drop-in of it, and comes to the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from problems import LAYOUTS, Case, assert_alike, assert_same, copies, make_params
from torch import nn

from shardstep import ZeroRedundancyOptimizer

COMBINATIONS = tuple(itertools.product(LAYOUTS, (False, True)))
"""Each layout without and with parameters that are views of buckets."""

Params = list[nn.Parameter]


def in_turn(number: int) -> list[tuple[str, bool]]:
    """Both layouts, one of them with bucket views; for the next number the other one."""
    return [(layout, (number + turn) % 2 == 0) for turn, layout in enumerate(LAYOUTS)]


def follow(
    script: Callable[[Any, Params], Any],
    case: Case,
    make: Callable[[], Params] = make_params,
    given: Callable[[Params], Any] = lambda params: params,
    combinations: Iterable[tuple[str, bool]] = COMBINATIONS,
    unsharded: Callable[..., Any] | None = None,
    to: int = 0,
    **options: Any,
) -> None:
    """Compare what `script` returns, parameters, and the state that is consolidated.

    Args:
        script: Takes an optimizer and parameters.
        case: The class of the optimizer.
        make: Makes the parameters.
        given: Returns what the optimizer is given of them.
        combinations: Layouts, and whether parameters are views of buckets.
        unsharded: What takes the place of the class, and has no state to compare.
        to: The rank to which the state is consolidated.
        **options: Further options of the drop-in.
    """
    params = make()
    plain = (unsharded or case.optimizer_class)(given(params), **case.fresh_options())
    returned, expected = script(plain, params), copies(params)
    for layout, view in combinations:
        params = make()
        opt = ZeroRedundancyOptimizer(
            given(params),
            case.optimizer_class,
            layout=layout,
            parameters_as_bucket_view=view,
            **options,
            **case.fresh_options(),
        )
        what = f"{case}, layout {layout}, view {view}"
        assert_alike(returned, script(opt, params), what)
        assert_same(expected, params, what)
        opt.consolidate_state_dict(to=to)
        if opt.rank == to and unsharded is None:
            state = plain.state_dict()
            state["state"] = dict(sorted(state["state"].items()))
            assert_alike(state, opt.state_dict(), what)
