"""The frameworks' own calls give DDP's numbers and DDP's files, with the installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from frameworks.cells import COLUMNS, KINDS, LAST_BIT
from frameworks.table import FRAMEWORKS, rows_of
from ranks import raises_on_every_rank, run_ranks

from shardstep import ZeroRedundancyOptimizer


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_cell_is_equal(name: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS[name])
    table = rows_of(name, tmp_path)
    # Gradients that are sharded are summed in another order, so a norm may differ in its last bit.
    if table["module"]["clip"] == LAST_BIT:
        table["module"]["clip"] = "equal"
    assert table == dict.fromkeys(KINDS, dict.fromkeys(COLUMNS, "equal"))


def _frameworks() -> set[str]:
    assert "shardstep" in sys.modules
    return sys.modules.keys() & {"accelerate", "lightning", "peft", "transformers"}


def test_importing_the_package_imports_no_framework() -> None:
    assert run_ranks(_frameworks, 1, fresh=True) == [set()]


def _known_to_accelerate_as_one_rank() -> None:
    from accelerate import Accelerator

    from shardstep.integrations.accelerate import prepare

    model = torch.nn.Linear(4, 4)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
    prepare(Accelerator(), model, opt)


def test_an_accelerator_that_knows_of_one_rank_only_is_refused() -> None:
    # Without cpu=True it gives every rank all batches, and lets every rank write.
    pytest.importorskip("accelerate")
    match = "sees 1 process, but"
    raises_on_every_rank(_known_to_accelerate_as_one_rank, 2, ValueError, match=match)
