"""Models of Hugging Face Transformers train as under DDP, and save the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from shardstep import ZeroRedundancyOptimizer


@pytest.fixture(autouse=True)  # importing them takes seconds, which collecting tests should not
def _packages() -> None:
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


@pytest.mark.slow
def test_embeddings_that_were_resized_are_noticed() -> None:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, module=model, lr=1e-3)
    model.resize_token_embeddings(80)
    with pytest.raises(ValueError, match="was put into the module after the optimizer"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    opt.detach()
