"""The frameworks' own calls give DDP's numbers and files over NCCL, with the installed packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.cells import COLUMNS, KINDS, LAST_BIT
from frameworks.table import FRAMEWORKS, rows_of
from on_nccl import run_nccl_ranks, with_same_bits

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with NCCL"),
]


def _run(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return run_nccl_ranks(with_same_bits, world_size, fn, *args)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_cell_is_equal(name: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS[name])
    table = rows_of(name, tmp_path, _run)
    if table["module"]["clip"] == LAST_BIT:
        table["module"]["clip"] = "equal"
    assert table == dict.fromkeys(KINDS, dict.fromkeys(COLUMNS, "equal"))
