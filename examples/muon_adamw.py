"""Train with Muon for the hidden matrices and AdamW for the rest, in one optimizer.

    torchrun --standalone --nproc-per-node=2 examples/muon_adamw.py

Muon needs whole matrices, so each matrix belongs to one rank. AdamW's tensors are cut evenly.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer


class Predictor(nn.Module):
    """Predicts a token from two others."""

    def __init__(self, vocab: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.hidden = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(4))
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, vocab)` for `tokens` of shape `(batch, 2)`."""
        x = self.embed(tokens).flatten(1)
        for layer in self.hidden:
            x = x + F.gelu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def main() -> None:
    """Train to name the larger of two tokens."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = Predictor().to(device)
    matrices = [p for p in model.hidden.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    opt = ZeroRedundancyOptimizer(
        [
            {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02},
            {"params": others, "lr": 3e-3},
        ],
        torch.optim.AdamW,
        module=model,
    )
    # A scheduler sees both groups.
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=80)

    torch.manual_seed(opt.rank)
    for step in range(80):
        tokens = torch.randint(64, (256, 2), device=device)
        loss = F.cross_entropy(model(tokens), tokens.amax(dim=1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        if opt.rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if opt.rank == 0:
        print(opt.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
