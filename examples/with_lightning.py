"""Train with Lightning: `ShardstepStrategy` in place of DDP.

    torchrun --standalone --nproc-per-node=2 examples/with_lightning.py

Accumulation, clipping and checkpoints are set as usual. Without `module=self`, use
`strategy="ddp"` and no adapter.
"""

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardstep import ZeroRedundancyOptimizer
from shardstep.integrations.lightning import ShardstepStrategy


class Classifier(lightning.LightningModule):
    """Finds the largest of ten coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        opt = ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, module=self, lr=3e-3)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)]


def main() -> None:
    """Train, and resume for one more epoch from Lightning's checkpoint."""
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    path = "runs/lightning/last.ckpt"
    for max_epochs, resumed in ((4, None), (5, path)):
        trainer = lightning.Trainer(
            devices="auto" if torch.cuda.is_available() else 2,
            strategy=ShardstepStrategy(),
            max_epochs=max_epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            default_root_dir="runs/lightning",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path=resumed)
        trainer.save_checkpoint(path)  # on every rank
        if trainer.is_global_zero:
            loss = trainer.callback_metrics["loss"].item()
            print(f"epoch {trainer.current_epoch}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
