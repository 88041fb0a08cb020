"""Models of Hugging Face Transformers train as under DDP, and save the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")


def _differences(names: list[str], folder: Path) -> dict[str, str]:
    from frameworks.zoo import differences

    return differences(names, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["GPT-2", "Llama", "BERT, pooler unused", "T5, tied"],
        ["ViT", "ResNet", "Mixtral", "LoRA"],
    ],
    ids=" ".join,
)
def test_a_model_trains_and_saves_as_under_ddp(names: list[str], tmp_path: Path) -> None:
    for found in run_ranks(_differences, 2, names, tmp_path):
        assert found == dict.fromkeys(found, "equal")
        assert len(found) == 2 * len(names)
