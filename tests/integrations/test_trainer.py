"""The Trainer's less usual ways: evaluation first, training twice, saving the best only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from frameworks.cells import launched
from ranks import run_ranks


@pytest.fixture(autouse=True)
def _package() -> None:
    pytest.importorskip("transformers")


def _unusual(folder: Path) -> dict[str, Any]:
    import torch
    from accelerate.state import AcceleratorState
    from frameworks.with_trainer import CONFIG, ShardedTrainer, Text
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    from shardstep import ZeroRedundancyOptimizer
    from shardstep.integrations.trainer import ConsolidateOnSave

    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "eval_steps": 1}
    options |= {"per_device_train_batch_size": 2, "eval_strategy": "steps", "max_steps": 2}
    found: dict[str, Any] = {}
    with launched():
        args = TrainingArguments(str(folder / "twice"), save_on_each_node=True, **options)
        data = {"train_dataset": Text(8), "eval_dataset": Text(8)}
        trainer = ShardedTrainer(GPT2LMHeadModel(CONFIG), args, **data)
        scores = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            scores.append(trainer.evaluate()["eval_loss"])
        found["better each time"] = scores == sorted(scores, reverse=True)
        # Another Trainer on the same model casts as its own arguments say.
        cast: set[bool] = set()
        trainer.model.transformer.register_forward_pre_hook(
            lambda *_: cast.add(torch.is_autocast_enabled("cpu"))
        )
        trainer.train()
        args = TrainingArguments(str(folder / "cast"), bf16=True, save_strategy="no", **options)
        trainer.optimizer.optimizer.detach()
        AcceleratorState._reset_state(reset_partial_state=True)
        ShardedTrainer(trainer.model, args, **data).train()
        found["cast"] = sorted(cast)
        args = TrainingArguments(
            str(folder / "best"),
            save_strategy="best",
            metric_for_best_model="loss",
            greater_is_better=False,
            **options,
        )
        given = (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.AdamW, "lr": 0.01})
        Trainer(
            GPT2LMHeadModel(CONFIG),
            args,
            **data,
            optimizer_cls_and_kwargs=given,
            callbacks=[ConsolidateOnSave()],
        ).train()
        torch.distributed.barrier()
        found["steps"] = [
            torch.load(path, weights_only=True)["state"][0]["step"].item()
            for path in sorted((folder / "best").glob("*/optimizer.pt"))
        ]
    return found


@pytest.mark.slow
def test_unusual_ways_of_the_trainer(tmp_path: Path) -> None:
    for found in run_ranks(_unusual, 2, tmp_path):
        assert found == {"better each time": True, "cast": [False, True], "steps": [1.0, 2.0]}
