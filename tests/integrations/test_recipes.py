"""The recipes in docs/frameworks.md run at 2 ranks, as they are written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from frameworks.cells import launched
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
MARK = re.compile(r"<!-- run on 2 ranks -->\n```python\n(.*?)```", re.DOTALL)


def _run(recipes: list[str], folder: Path) -> int:
    from accelerate.state import AcceleratorState, GradientState

    os.chdir(folder)
    with launched():
        for recipe in recipes:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            exec(compile(recipe, str(PAGE), "exec"), {"__name__": "__main__"})
    return len(recipes)


@pytest.mark.slow
def test_the_recipes_run_as_written(tmp_path: Path) -> None:
    for package in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(package)
    recipes = MARK.findall(PAGE.read_text())
    assert run_ranks(_run, 2, recipes, tmp_path, fresh=True) == [5, 5]
    saved = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {"run/state/optimizer.bin", "run/trainer/checkpoint-1/optimizer.pt"} <= saved
    assert {"run/lightning/last.ckpt", "run/fabric.ckpt"} <= saved
