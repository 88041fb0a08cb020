"""Any order of calls gives the numbers of the unsharded optimizer: seeded walks in every mode.

`run_walks` goes any range of seeds from the command line.
"""

from __future__ import annotations

import pytest
from ranks import run_ranks
from run_walks import ACTS
from walk_modes import MODES
from walks import Walk, walked


def _go(mode: str, seeds: range) -> list[str]:
    """Go the walks, and return what went wrong, or else the acts that no walk has done."""
    walks: list[Walk] = []

    def make(seed: int) -> Walk:
        walks.append(MODES[mode](seed))
        return walks[-1]

    wrong = walked(make, seeds, ACTS)
    done = {act.split()[0] for walk in walks for act in walk.acts}
    return wrong or sorted({act for walk in walks for act in walk.weights} - done)


@pytest.mark.parametrize("mode", MODES)
def test_any_order_of_calls_gives_the_bits_of_the_unsharded_optimizer(mode: str) -> None:
    count = {"DDP": 2, "module": 3, "drop-in": 10}[mode.split()[0]]  # two or three do every act
    assert run_ranks(_go, 2, mode, range(count)) == [[]] * 2


@pytest.mark.parametrize("mode", [mode for mode in MODES if "DDP" not in mode])
def test_walks_without_a_process_group_give_the_same_bits(mode: str) -> None:
    assert walked(MODES[mode], range(10, 12), ACTS) == []


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "count"), [(2, 12), (3, 6), (5, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_many_walks_on_any_number_of_ranks_give_the_same_bits(
    mode: str, world_size: int, count: int
) -> None:
    seeds = range(100 * world_size, 100 * world_size + count)
    assert run_ranks(_go, world_size, mode, seeds, timeout=300) == [[]] * world_size
