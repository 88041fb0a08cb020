"""Train with Hugging Face Accelerate: call `prepare(accelerator, ...)` of this library.

    torchrun --standalone --nproc-per-node=2 examples/with_accelerate.py

The rest of the loop stays. Files are Accelerate's own.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardstep import ZeroRedundancyOptimizer
from shardstep.integrations.accelerate import prepare


def main() -> None:
    """Train, save, and load what was saved."""
    # Without GPUs and without cpu=True, Accelerate would start each rank as the only one.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10)).to(accelerator.device)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, module=model, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=256)
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, opt, loader, schedule = prepare(accelerator, model, opt, loader, schedule)

    for epoch in range(4):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                schedule.step()
                opt.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")

    accelerator.save_state("runs/accelerate")  # on every rank
    accelerator.wait_for_everyone()
    accelerator.load_state("runs/accelerate")
    accelerator.end_training()


if __name__ == "__main__":
    main()
