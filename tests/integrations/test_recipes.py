"""The blocks of the pages that are marked so run at 2 ranks, as they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from frameworks.cells import launched
from pages import ROOT, Block, read
from ranks import run_ranks

PACKAGES = ("accelerate", "lightning", "transformers")
PAGES: dict[str, tuple[int, set[str]]] = {
    "checkpoints.md": (1, {"app/.metadata"}),
    "frameworks.md": (
        5,
        {"state/optimizer.bin", "trainer/checkpoint-1/optimizer.pt", "lightning/last.ckpt"}
        | {"fabric.ckpt"},
    ),
}
"""The number of such blocks, and files that they write to the folder `run`."""


def _run(blocks: list[Block], packages: bool, folder: Path) -> None:
    os.chdir(folder)
    with launched():
        for block in blocks:
            if packages:
                from accelerate.state import AcceleratorState, GradientState

                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
            exec(compile(block.code, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "name", ["checkpoints.md", pytest.param("frameworks.md", marks=pytest.mark.slow)]
)
def test_marked_blocks_run_on_two_ranks(name: str, tmp_path: Path) -> None:
    packages = name == "frameworks.md"
    for package in PACKAGES if packages else ():
        pytest.importorskip(package)
    count, files = PAGES[name]
    blocks = [b for b in read(ROOT / "docs" / name)[1] if b.mark == "run on 2 ranks"]
    assert len(blocks) == count
    run_ranks(_run, 2, blocks, packages, tmp_path, fresh=True)
    assert all((tmp_path / "run" / file).exists() for file in files)
