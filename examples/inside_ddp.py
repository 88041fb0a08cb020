"""Keep DDP, and take the optimizer's step inside its backward pass.

    torchrun --standalone --nproc-per-node=2 examples/inside_ddp.py

Use this where other code needs the DDP wrapper. Gradients are reduced to their owners only, so
it sends as many bytes as DDP alone. Clipping and GradScaler are refused: backward has stepped.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardstep


def main() -> None:
    """Train, and check that all ranks end with the same parameters."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
    ddp = DistributedDataParallel(model)
    opt = shardstep.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=3e-3
    )
    shardstep.register(ddp, opt)

    torch.manual_seed(opt.rank)  # a different batch on each rank
    for step in range(100):
        inputs = torch.randn(64, 32, device=device)
        loss = F.cross_entropy(ddp(inputs), inputs[:, :10].argmax(dim=1))
        loss.backward()  # reduces the gradients and takes the step
        opt.zero_grad()
        if opt.rank == 0 and step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    opt.verify()  # raises unless every rank has the same parameters
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
