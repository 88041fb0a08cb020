"""Any order of calls comes to the numbers of the unsharded optimizer: seeded walks in every mode.

`run_walks` goes any range of seeds from the command line.
"""

from __future__ import annotations

import pytest
from ranks import run_ranks
from run_walks import ACTS, MODES
from walks import walked

DROP_IN = ("dropin 32 bits", "dropin 16 bits")
DDP = tuple(MODES["ddp"])


def _go(name: str, seeds: range) -> list[str]:
    make = next(walks[name] for walks in MODES.values() if name in walks)
    return walked(make, seeds, ACTS)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, range(3)) for name in DROP_IN),
        ("zero2_low", range(102, 105)),
        *((name, range(1)) for name in DDP),
    ],
)
def test_any_order_of_calls_comes_to_the_same_bits(name: str, seeds: range) -> None:
    assert run_ranks(_go, 2, name, seeds) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size", "seeds"),
    [
        *((name, ranks, range(100, 105)) for name in DROP_IN for ranks in (3, 5)),
        ("zero2", 2, range(20)),
        ("zero2", 3, range(20)),
        ("zero2_low", 2, range(240, 252)),
        ("zero2_low", 3, range(240, 252)),
        *((name, 3, range(100, 104)) for name in DDP),
    ],
)
def test_so_do_many_more_on_any_number_of_ranks(name: str, world_size: int, seeds: range) -> None:
    assert run_ranks(_go, world_size, name, seeds, timeout=300) == [[]] * world_size
