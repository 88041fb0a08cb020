"""Training with Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional as F
from torch.utils.data import DataLoader

from frameworks.cells import Trial, lightning_devices
from frameworks.parts import BATCH, Net, data, optimizer_for
from shardstep.integrations.lightning import ShardstepStrategy


class Classifier(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = Net()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, labels = batch
        self.log("score", F.cross_entropy(self.net(inputs), labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        opt = optimizer_for(self.kind, self)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]


def trained(trial: Trial, epochs: int, start: Path | None) -> tuple[Trainer, Classifier]:
    model = Classifier(trial.kind)
    trainer = Trainer(
        **lightning_devices(),
        strategy=ShardstepStrategy() if trial.kind == "module" else DDPStrategy(),
        max_epochs=epochs,
        accumulate_grad_batches=trial.accumulate,
        gradient_clip_val=trial.clip or None,
        precision="bf16-mixed" if trial.bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = data(2, dist.get_world_size(), trial.accumulate)
    loaders = [DataLoader(samples, batch_size=BATCH) for _ in range(2)]
    trainer.fit(model, *loaders, ckpt_path=start)
    return trainer, model


def run(trial: Trial) -> dict[str, Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    file = trial.folder / "after-2.ckpt"
    if trial.resume is not None:
        _, model = trained(trial, 2, trial.resume / "after-2.ckpt")
        return {"weights": copied(model)}
    trainer, model = trained(trial, 1, None)
    trainer.save_checkpoint(file)
    loaded = torch.load(file, weights_only=False)
    (optimizer,) = loaded["optimizer_states"]
    saved = {
        "model": loaded["state_dict"],
        "optimizer": optimizer["state"],
        "lr": [group["lr"] for group in optimizer["param_groups"]],
    }
    trainer, model = trained(trial, 2, file)
    return {
        "weights": copied(model),
        "losses": model.losses,
        "norms": [],
        "evaluated": trainer.callback_metrics["score"],
        "saved": saved,
    }


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
